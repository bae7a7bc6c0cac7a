"""Rounds of training on a model's own judged answers: sample, judge, pair, train, and again."""
