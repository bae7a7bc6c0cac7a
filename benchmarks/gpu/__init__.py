"""Benchmarks for one GPU that fit into a 15-minute slot: `bash benchmarks/gpu.sh`, described in docs/reference/benchmarks.md."""
