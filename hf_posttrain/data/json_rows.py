"""Lossless loading of JSON files, CSV files and Python rows as data sets, with the values unconverted."""

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
from .files import read_rows
from .images import data_url
from .messages import without_none
from .row_schema import OPTIONAL_COLUMNS

logger = logging.getLogger(__package__)

_HEAD = 1000  # rows of a stream that determine its columns, and which of them are text


@dataclass
class JsonValue:
    """The feature of a column that is not text, which stores each value as JSON.

    Arrow types would give all rows the same keys, change 1 to 1.0 if another row has 0.5, and change texts to dates.
    """

    _type: str = field(default="AsWritten", init=False, repr=False)

    def __call__(self) -> pa.DataType:
        """Return the Arrow type of the column."""
        return pa.string()

    def encode_example(self, value: object) -> str | None:
        """Return a value as JSON, or None for None."""
        return None if value is None else json.dumps(value, default=_json_default)

    def cast_storage(self, values: pa.Array) -> pa.Array:
        """Return an Arrow array of any type as an array of JSON texts. An array of strings is JSON already."""
        if pa.types.is_string(values.type):
            return values
        # the type may contain JSON features
        feature = datasets.Features.from_arrow_schema(pa.schema({"value": values.type}))
        decoded = [feature.decode_example({"value": value})["value"] for value in values.to_pylist()]
        return pa.array(map(self.encode_example, without_none(decoded)), pa.string())

    def decode_example(self, text: str | None, token_per_repo_id: object = None) -> Any:
        """Return the value of a JSON text, or None for None."""
        return None if text is None else json.loads(text)


def _json_default(value: object) -> str:
    """Return the JSON text of a value that JSON cannot represent. An image becomes a data URL."""
    if isinstance(value, bytes) or type(value).__module__.startswith("PIL."):
        return data_url(value)
    return str(value)


with warnings.catch_warnings(action="ignore"):  # `register_feature` warns that it is experimental
    register_feature(JsonValue, "AsWritten")


def from_rows(rows: Sequence[Mapping[str, Any]]) -> datasets.Dataset:
    """Build a data set from Python rows.

    It has all columns that occur in any row. Columns that contain mappings are stored as `JsonValue`.

    Raises:
        ValueError: If the values of a column have incompatible types.
        TypeError: As ValueError.
    """
    names = dict.fromkeys(column for row in rows for column in row)
    columns: dict[str, Any] = {column: [row.get(column) for row in rows] for column in names}
    json_columns = [column for column, values in columns.items() if any(map(_contains_mapping, values))]
    columns |= {column: [*map(JsonValue().encode_example, columns[column])] for column in json_columns}
    dataset = datasets.Dataset.from_dict(columns)
    if not json_columns:
        return dataset
    return dataset.cast(datasets.Features(dataset.features | dict.fromkeys(json_columns, JsonValue())))


def _contains_mapping(value: object) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(map(_contains_mapping, value)))


class RowFiles(datasets.ArrowBasedBuilder):
    """Builder of .jsonl, .json, .csv and .tsv files with unconverted values, cached by `datasets` or streamed."""

    VERSION = datasets.Version("1.0.0")  # of the cache: increase it when the values that are read change

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo()

    def _split_generators(
        self, dl_manager: datasets.DownloadManager | datasets.StreamingDownloadManager
    ) -> list[datasets.SplitGenerator]:
        files: dict[str, list[str]] = {split: list(paths) for split, paths in self.config.data_files.items()}

        # for each column, whether its values that are not None are text
        is_text: dict[str, set[bool]] = {}
        rows = chain.from_iterable(map(self._rows, chain(*files.values())))
        for row in islice(rows, _HEAD if dl_manager.is_streaming else None):
            for column, value in row.items():
                kinds = is_text.setdefault(column, set())
                if value is not None:
                    kinds.add(isinstance(value, str))
        if not is_text:
            raise InputError("the file has no rows")

        text = datasets.Value("string")
        empty = JsonValue() if dl_manager.is_streaming else datasets.Value("null")
        features = {
            column: JsonValue() if False in kinds else text if kinds else empty for column, kinds in is_text.items()
        }
        self.info.features = datasets.Features(features)
        return [datasets.SplitGenerator(name=split, gen_kwargs={"files": paths}) for split, paths in files.items()]

    def _rows(self, file: str) -> Iterator[dict[str, Any]]:
        try:
            yield from read_rows(Path(file))
        except InputError as error:
            raise InputError(f"{Path(file).name}, {error}") from error

    def _generate_tables(self, files: list[str]) -> Iterator[tuple[Key, pa.Table]]:
        features = self.info.features
        reported = set[str]()
        for n, file in enumerate(files):
            file_rows = self._rows(file)
            m = 0
            while rows := list(islice(file_rows, 1000)):
                if unknown := set().union(*rows) - {*features} - reported:
                    problem = f"column {min(unknown)!r} is not in the first {_HEAD} rows of the stream"
                    if unknown & OPTIONAL_COLUMNS:
                        raise InputError(f"{file}: {problem}. Add it to the first row, with the value null")
                    logger.warning("%s: %s and is not read", file, problem)
                    reported |= unknown
                columns = []
                for column, feature in features.items():
                    values = [row.get(column) for row in rows]
                    if isinstance(feature, JsonValue):
                        values = [*map(feature.encode_example, values)]
                    try:
                        columns.append(pa.array(values, features.arrow_schema.field(column).type))
                    except (pa.ArrowException, ValueError, TypeError) as error:
                        problem = f"must be text in valid UTF-8, as in the first {_HEAD} rows ({error})"
                        raise InputError(f"{file}: column {column!r} {problem}") from error
                yield Key(n, m), pa.Table.from_arrays(columns, schema=features.arrow_schema)
                m += 1
