"""Iterative training on judged answers of the model: sample, judge, pair, train, and repeat."""
