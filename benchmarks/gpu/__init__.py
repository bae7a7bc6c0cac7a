"""Benchmarks for one GPU in a slot of 15 minutes: `bash benchmarks/gpu.sh`. See docs/reference/benchmarks.md."""
