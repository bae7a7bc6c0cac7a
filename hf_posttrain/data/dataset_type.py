"""The type of a data set, with a length or as a stream."""

from typing import TypeAlias

import datasets

AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset
