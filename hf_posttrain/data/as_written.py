"""JSON and CSV files as data sets whose values are those that stand in the file."""

import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets.builder import Key
from datasets.features.features import register_feature

from ..errors import InputError
from .files import rows_of
from .messages import without_none

_HEAD = 1000  # rows of a stream that say what its columns hold
_TEXT, _HALF = datasets.Value("string"), re.compile("[\ud800-\udfff]")


@dataclass
class AsWritten:
    """The feature of a column that is not text: each value is kept as JSON. (Arrow gives all rows the same keys, makes
    1 into 1.0 where another row has 0.5, and dates of texts.)"""

    _type: str = field(default="AsWritten", init=False, repr=False)

    def __call__(self) -> pa.DataType:
        return pa.string()

    def encode_example(self, value: Any) -> str | None:
        return None if value is None else json.dumps(value)

    def cast_storage(self, values: pa.Array) -> pa.Array:
        if pa.types.is_string(values.type):
            return values
        return pa.array(map(self.encode_example, without_none(values.to_pylist())), pa.string())

    def decode_example(self, text: str | None, token_per_repo_id: Any = None) -> Any:
        return None if text is None else json.loads(text)


with warnings.catch_warnings(action="ignore"):  # that it is experimental
    register_feature(AsWritten, "AsWritten")


class Files(datasets.ArrowBasedBuilder):
    """.jsonl, .json, .csv and .tsv files, in the cache of `datasets` or streamed, with the values that stand there."""

    VERSION = datasets.Version("1.0.0")  # of the cache: raise it with a change of what is read

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list:
        files: dict[str, list[str]] = {split: list(paths) for split, paths in self.config.data_files.items()}
        texts: dict[str, set[bool]] = {}  # column: are its values text that Arrow can hold?
        rows = chain.from_iterable(map(self._rows, chain(*files.values())))
        for row in islice(rows, _HEAD if dl_manager.is_streaming else None):
            for column, value in row.items():
                found = texts.setdefault(column, set())
                if value is not None:
                    found.add(isinstance(value, str) and (value.isascii() or not _HALF.search(value)))
        empty = AsWritten() if dl_manager.is_streaming else datasets.Value("null")
        kinds = {column: AsWritten() if False in all_text else _TEXT for column, all_text in texts.items()}
        self.info.features = datasets.Features({c: kind if texts[c] else empty for c, kind in kinds.items()})
        return [datasets.SplitGenerator(name=split, gen_kwargs={"files": paths}) for split, paths in files.items()]

    def _rows(self, file: str) -> Iterator[dict[str, Any]]:
        try:
            yield from rows_of(Path(file))
        except InputError as error:
            raise InputError(f"{Path(file).name}, {error}") from error

    def _generate_tables(self, files: list[str]) -> Iterator[tuple[Key, pa.Table]]:
        features = self.info.features
        for n, file in enumerate(files):
            found, m = self._rows(file), 0
            while rows := list(islice(found, 1000)):
                if late := set().union(*rows) - {*features}:
                    raise InputError(f"{file}: column {min(late)!r} is none of the first {_HEAD} rows of the stream")
                columns = []
                for column, kind in features.items():
                    values = [row.get(column) for row in rows]
                    if isinstance(kind, AsWritten):
                        values = [*map(kind.encode_example, values)]
                    try:
                        columns.append(pa.array(values, features.arrow_schema.field(column).type))
                    except (pa.ArrowException, ValueError, TypeError) as error:
                        problem = f"is not text, as in the first {_HEAD} rows of the stream ({error})"
                        raise InputError(f"{file}: column {column!r} {problem}") from error
                yield Key(n, m), pa.Table.from_arrays(columns, schema=features.arrow_schema)
                m += 1
