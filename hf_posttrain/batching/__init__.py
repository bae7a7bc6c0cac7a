"""Micro-batches: the tensors that are made from prepared rows."""
