"""The types of data sets.

`datasets` has no type information, so that mypy takes these for Any: they are for readers.
"""

from typing import TypeAlias

import datasets

AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset
"""A data set with a length, or a stream."""
AnyDatasets: TypeAlias = AnyDataset | dict[str, AnyDataset]
"""One data set, or several by name."""
