"""Rollouts and greedy answers, by our own decoding, transformers or vLLM."""
