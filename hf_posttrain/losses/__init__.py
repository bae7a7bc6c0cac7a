"""Losses as pure functions of tensors, independent of models, batches and trainers."""
