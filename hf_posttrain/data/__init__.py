"""Any source and any supported columns -> rows of token ids.

`prompt_ids` is context, every token of a branch is predicted; `completion_mask` says which of them are trained.
A user's mistake raises `InputError` with the data set's name, row (counted from 0), column and what was expected.
"""
