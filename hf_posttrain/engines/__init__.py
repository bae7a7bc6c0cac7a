"""Engines: one process, DDP, FSDP2 and DeepSpeed ZeRO, and the differences between them."""
