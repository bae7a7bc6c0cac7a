"""What differs between one process, DDP, FSDP2 and DeepSpeed ZeRO."""
