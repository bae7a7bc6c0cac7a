"""Data: any source and any supported columns -> rows of token ids, one layout per method.

    sources.py    files, folders and hub names -> raw rows (check_sources, load, decoded)
    broken.py     the broken line of a file that cannot be read
    formats.py    which format the columns are (detect); one raw row -> a sample
    encode.py     samples -> text -> ids, cut to size
    prepare.py    all of it over a data set, counted and cached (prepare); the same before anything is dropped
                  (tokenised)
    lengths.py    warn_if_too_long, and what grouping by length needs (with_lengths, seeded)
    packing.py    short examples -> full rows (pack)

`prompt_ids` is context, every token of a branch is predicted; SFT and KD say in `completion_mask` which of them are
trained. A user's mistake raises `InputError` with the data set's name, row (counted from 0), column and what was
expected.
"""

from .formats import ACCEPTS, FORMATS, detect
from .lengths import seeded, warn_if_too_long, with_lengths
from .packing import pack
from .prepare import COLUMNS, prepare, tokenised
from .sources import check_sources, decoded, load

__all__ = [
    "ACCEPTS", "COLUMNS", "FORMATS", "check_sources", "decoded", "detect", "load", "pack", "prepare", "seeded",
    "tokenised", "warn_if_too_long", "with_lengths",
]  # fmt: skip
