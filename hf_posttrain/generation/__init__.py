"""Rollouts and greedy answers, by our own decoding or by transformers."""
