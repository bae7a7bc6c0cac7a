"""Preparation of data: any source with any supported columns becomes rows of token ids.

`prompt_ids` is context. Every token of a branch is predicted, and `completion_mask` marks the tokens that are trained.
A mistake in the data raises `InputError` with the data set's name, the row (counted from 0), the column and the
expected value.
"""
