"""What the values of a method's Config may be, and which exclude each other: told without torch.

    problems(kind, values)  what is wrong: (names of the fields, sentence), for kind "shared" or a method
    check(kind, config)     raises the first: each Config calls it as it is made, so Python users meet the same rules
    limits, shared, methods the rules themselves: single values, what all methods share, what one method has

A recipe asks for `problems` before torch is imported, on a stand-in with the Config's defaults (`keys.train_fields`).
"""

from .table import check, problems

__all__ = ["check", "problems"]
