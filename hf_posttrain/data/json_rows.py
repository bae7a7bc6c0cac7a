"""JSON and CSV files, and rows in Python, as data sets whose values are those that stand there."""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
from .images import data_url
from .messages import without_none
from .row_schema import OPTIONAL

logger = logging.getLogger(__package__)

_HEAD = 1000  # rows of a stream that say which columns it has, and which of them are text


@dataclass
class JsonValue:
    """The feature of a column that is not text: each value is kept as JSON. (Arrow gives all rows the same keys, makes
    1 into 1.0 where another row has 0.5, and dates of texts.)
    """

    _type: str = field(default="AsWritten", init=False, repr=False)

    def __call__(self) -> pa.DataType:
        return pa.string()

    def encode_example(self, value: object) -> str | None:
        return None if value is None else json.dumps(value, default=_written)

    def cast_storage(self, values: pa.Array) -> pa.Array:
        if pa.types.is_string(values.type):
            return values
        kind = datasets.Features.from_arrow_schema(pa.schema({"value": values.type}))  # it may have JSON inside
        found = [kind.decode_example({"value": value})["value"] for value in values.to_pylist()]
        return pa.array(map(self.encode_example, without_none(found)), pa.string())

    def decode_example(self, text: str | None, token_per_repo_id: Any = None) -> Any:
        return None if text is None else json.loads(text)


def _written(value: object) -> str:
    """What JSON has in place of a value that it cannot write: of a picture the picture."""
    if isinstance(value, bytes) or type(value).__module__.startswith("PIL."):
        return data_url(value)
    return str(value)


with warnings.catch_warnings(action="ignore"):  # that it is experimental
    register_feature(JsonValue, "AsWritten")


def from_rows(rows: Sequence[Mapping[str, Any]]) -> datasets.Dataset:
    """Rows given in Python with all the columns that any has, and columns with mappings inside as they were written.
    Raises ValueError or TypeError where the values of a column do not go together.
    """
    names = dict.fromkeys(column for row in rows for column in row)
    columns: dict[str, Any] = {column: [row.get(column) for row in rows] for column in names}
    kept = [column for column, values in columns.items() if any(map(_holds_mapping, values))]
    columns |= {column: [*map(JsonValue().encode_example, columns[column])] for column in kept}
    made = datasets.Dataset.from_dict(columns)
    return made.cast(datasets.Features(made.features | dict.fromkeys(kept, JsonValue()))) if kept else made


def _holds_mapping(value: object) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(map(_holds_mapping, value)))


class RowFiles(datasets.ArrowBasedBuilder):
    """.jsonl, .json, .csv and .tsv files, in the cache of `datasets` or streamed, with the values that stand there."""

    VERSION = datasets.Version("1.0.0")  # of the cache: raise it with a change of what is read

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list:
        files: dict[str, list[str]] = {split: list(paths) for split, paths in self.config.data_files.items()}
        texts: dict[str, set[bool]] = {}  # column: are its values text?
        rows = chain.from_iterable(map(self._rows, chain(*files.values())))
        for row in islice(rows, _HEAD if dl_manager.is_streaming else None):
            for column, value in row.items():
                found = texts.setdefault(column, set())
                if value is not None:
                    found.add(isinstance(value, str))
        if not texts:
            raise InputError("it has no rows")
        text = datasets.Value("string")
        empty = JsonValue() if dl_manager.is_streaming else datasets.Value("null")
        kinds = {c: JsonValue() if False in found else text if found else empty for c, found in texts.items()}
        self.info.features = datasets.Features(kinds)
        return [datasets.SplitGenerator(name=split, gen_kwargs={"files": paths}) for split, paths in files.items()]

    def _rows(self, file: str) -> Iterator[dict[str, Any]]:
        try:
            yield from rows_of(Path(file))
        except InputError as error:
            raise InputError(f"{Path(file).name}, {error}") from error

    def _generate_tables(self, files: list[str]) -> Iterator[tuple[Key, pa.Table]]:
        features = self.info.features
        told = set[str]()
        for n, file in enumerate(files):
            found = self._rows(file)
            m = 0
            while rows := list(islice(found, 1000)):
                if late := set().union(*rows) - {*features} - told:
                    problem = f"column {min(late)!r} is none of the first {_HEAD} rows of the stream"
                    if late & OPTIONAL:
                        raise InputError(f"{file}: {problem}: write it, null, into the first row")
                    logger.warning("%s: %s, and is not read", file, problem)
                    told |= late
                columns = []
                for column, kind in features.items():
                    values = [row.get(column) for row in rows]
                    if isinstance(kind, JsonValue):
                        values = [*map(kind.encode_example, values)]
                    try:
                        columns.append(pa.array(values, features.arrow_schema.field(column).type))
                    except (pa.ArrowException, ValueError, TypeError) as error:
                        problem = f"is not text that can be written in UTF-8, as in the first {_HEAD} rows ({error})"
                        raise InputError(f"{file}: column {column!r} {problem}") from error
                yield Key(n, m), pa.Table.from_arrays(columns, schema=features.arrow_schema)
                m += 1
