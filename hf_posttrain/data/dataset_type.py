"""Type aliases of data sets.

`datasets` has no type information, so mypy treats these aliases as Any. They document signatures.
"""

from typing import TypeAlias

import datasets

AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset
"""A data set with a length, or a stream."""
AnyDatasets: TypeAlias = AnyDataset | dict[str, AnyDataset]
"""One data set, or several by name."""
