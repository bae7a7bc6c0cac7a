"""All the mathematics, as pure functions of tensors: nothing here knows of models, batches or trainers."""
