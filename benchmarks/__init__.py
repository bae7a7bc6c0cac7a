"""Speed and memory of hf_posttrain, alone and beside others: `python -m benchmarks.run --help`."""
