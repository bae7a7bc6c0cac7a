"""Prepared rows -> micro-batches of tensors."""
