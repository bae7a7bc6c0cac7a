"""Raw rows from sources: files, folders, saved data sets and the hub, with renamed columns and mixed by weight."""

import glob
import logging
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.fingerprint import Hasher

from ..errors import InputError, error_context, join_names, name_hint
from .column_inference import KNOWN_COLUMNS
from .dataset_type import AnyDataset
from .files import EXTENSIONS, expand_home, extension, source_problem
from .formats import canonical_name, rename_columns
from .json_rows import JsonValue, RowFiles
from .row_schema import OPTIONAL_COLUMNS, SOURCE_COLUMN, SPAN_COLUMN

logger = logging.getLogger(__package__)
_OPTIONAL = OPTIONAL_COLUMNS | {SOURCE_COLUMN, SPAN_COLUMN}
"""Columns that some sources may lack, and that are not named in errors about different columns."""
_METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "config.json")  # files of a data set without rows


def source_names(sources: list[Any]) -> list[str]:
    """Return the name of each source: that of a file without its extension, or the path if this is not unique."""
    paths = [source.path for source in sources]
    names = [Path(path).name.partition(".")[0] if extension(Path(path)) in EXTENSIONS else path for path in paths]
    return names if len({*names}) == len(names) else paths


def load(
    sources: Any,
    name: str = "data",
    columns_read: Callable[[Any, str], list[str]] | None = None,
    with_source: bool = False,
) -> AnyDataset:
    """Load one data set from a source, or from a list of sources.

    A source of weight w counts w times: its rows are repeated, or a seeded sample of them is taken. Streams are
    interleaved by weight.

    Args:
        sources: Objects with the attributes path, name, split, columns, limit, weight and streaming.
        name: Name of the data set in messages.
        columns_read: Function of a source's rows and path that returns the columns that training reads. Sources that
            are mixed must have the same, except for OPTIONAL_COLUMNS. Other columns are left out.
        with_source: Whether to add SOURCE_COLUMN to the rows, which are no streams.

    Returns:
        A data set, or a stream if the sources are streams.

    Raises:
        InputError: If a source cannot be read (the message has the path and, for malformed JSON, the line), or if
            sources cannot be mixed, because their columns differ or only some are streams.
    """
    sources = list(sources) if isinstance(sources, list | tuple) else [sources]
    with error_context(name):
        for source in sources:
            if problem := source_problem(source.path):
                raise InputError(problem)

        streams, others = ([s.path for s in sources if bool(s.streaming) is kind] for kind in (True, False))
        if streams and others:
            raise InputError(
                f"streams cannot be mixed with other sources ({', '.join(streams)} with streaming: true, "
                f"{', '.join(others)} without). Set it for all or for none"
            )
        if streams and len(sources) == 1 and sources[0].weight != 1:
            raise InputError(f"weight: requires several streams, and {streams[0]} is the only one. Remove it")

        parts = [_load_source(source) for source in sources]
        if with_source:
            names = source_names(sources)
            parts = [_with_source(part, name) for part, name in zip(parts, names, strict=True)]
        if len(parts) > 1:
            return _mix(parts, sources, columns_read)
        return parts[0] if streams else _apply_weight(parts[0], sources[0])


def _with_source(rows: datasets.Dataset, name: str) -> datasets.Dataset:
    """Return rows with the name of their source. Without a fingerprint, `datasets` would hash the name of each row."""
    fingerprint = Hasher.hash([rows._fingerprint, SOURCE_COLUMN, name])
    return rows.add_column(SOURCE_COLUMN, [name] * len(rows), new_fingerprint=fingerprint)


def _mix(parts: list, sources: list, columns_read: Callable[[Any, str], list[str]] | None) -> Any:
    """Return the rows of several sources as one data set with their common columns and OPTIONAL_COLUMNS."""
    streams = bool(sources[0].streaming)
    required = None
    paths = ", ".join(source.path for source in sources)
    if columns_read:
        # one source may have `messages` and another one `conversations`
        parts = [
            rename_columns(part, {c: canonical_name(c, part.column_names) for c in part.column_names}) for part in parts
        ]
        required = _common_columns(parts, sources, columns_read)

    columns = dict.fromkeys(column for part in parts for column in part.column_names)
    shared = [c for c in columns if all(c in part.column_names for part in parts) and (not required or c in required)]
    if not shared:
        raise InputError("the sources share no column. Rename columns with `columns`")
    selected = {*shared, *(_OPTIONAL & {*columns})}
    if streams and {*shared} < selected:
        missing = join_names(sorted(selected - {*shared}))
        raise InputError(f"{missing} must be columns of all sources that are streams, or of none")
    if dropped := [column for column in columns if column not in selected]:
        logger.info("%s: these columns are not in all sources, and are not read: %s", paths, join_names(dropped))

    # a column that is JSON in one source becomes JSON in all of them, except for text; pandas writes large_string
    json_columns = {c for part in parts for c, kind in part.features.items() if isinstance(kind, JsonValue)}
    text_types = datasets.Value("string"), datasets.Value("large_string")
    for n, (part, source) in enumerate(zip(parts, sources, strict=True)):
        part = part.select_columns([c for c in columns if c in selected and c in part.column_names])
        kinds = {
            c: text_types[0] if kind in text_types else JsonValue() if c in json_columns else kind
            for c, kind in part.features.items()
        }
        part = part if kinds == part.features else part.cast(datasets.Features(kinds))
        parts[n] = part if streams else _apply_weight(part, source)

    try:
        if not streams:
            return datasets.concatenate_datasets(parts)
        shares = [source.weight / sum(other.weight for other in sources) for source in sources]
        # with equal weights each row counts once; otherwise a stream that ends is repeated until all have ended
        strategy = "all_exhausted_without_replacement" if len({*shares}) == 1 else "all_exhausted"
        return datasets.interleave_datasets(parts, probabilities=shares, seed=0, stopping_strategy=strategy)
    except ValueError as error:
        raise InputError(f"the columns of {paths} have different types: {error}") from error


def _common_columns(parts: list, sources: list, columns_read: Callable[[Any, str], list[str]]) -> set[str]:
    """Return the columns that are read from all sources, and OPTIONAL_COLUMNS. Raises InputError if they differ."""
    columns = []
    for part, source in zip(parts, sources, strict=True):
        with error_context(source.path):
            columns.append({*columns_read(part, source.path)} - _OPTIONAL)
        if columns[-1] != columns[0]:
            raise InputError(
                "sources that are mixed must have the same columns, and "
                f"{sources[0].path} is read from {join_names(sorted(columns[0]))}, "
                f"{source.path} from {join_names(sorted(columns[-1]))}. Rename columns with `columns`, or write the "
                "rows of one source in the format of the other"
            )
    return columns[0] | _OPTIONAL


def _apply_weight(rows: datasets.Dataset, source: Any) -> datasets.Dataset:
    """Return whole copies of the rows, then a random sample of them without repeats, which is always the same."""
    if source.weight == 1:
        return rows
    n = len(rows)
    size = round(source.weight * len(rows))
    if not size:
        raise InputError(
            f"{source.path}: weight {source.weight} of {n} rows leaves none. Increase the weight, or remove the source"
        )
    order = np.concatenate([np.arange(n)] * (size // n) + [np.random.default_rng(0).permutation(n)[: size % n]])
    return rows.select(order)


def _load_source(source: Any) -> AnyDataset:
    """Return the rows of one source with its columns renamed to ours."""
    path = expand_home(source.path)
    try:
        rows = _read(path, source)
    except Exception as error:
        on_hub = "" if path.exists() else " (it is not a local file or folder, so it was looked up on the hub)"
        cause = error if isinstance(error, InputError) else error.__cause__ or error
        problem = " ".join(str(cause).split()).removeprefix(f"{path.name}, ")
        raise InputError(f"cannot read {source.path}{on_hub}: {problem}") from error
    if isinstance(rows, datasets.Dataset) and len(rows) == 0:
        raise InputError(f"{source.path} has no rows")

    # an existing column with our name is removed if another column is renamed to it
    columns = source.columns or {}
    existing = rows.column_names
    for ours, theirs in columns.items():
        if duplicates := [other for other in columns if other != ours and columns[other] == theirs]:
            raise InputError(
                f"{source.path}: column {theirs!r} cannot be mapped to both {ours!r} and {duplicates[0]!r}. Remove one"
            )
        if theirs not in existing:
            hint = name_hint(theirs, {*existing} - {*columns.values()}, list_valid=False, in_brackets=True)
            problem = f"{source.path}: no column {theirs!r} for {ours!r}{hint}; valid: {join_names(existing)}"
            if ours in existing and theirs in KNOWN_COLUMNS:
                problem += f". Swap the two: the column of the file comes second ({theirs}: {ours})"
            raise InputError(problem)
    if replaced := [ours for ours in columns if ours in existing and ours not in columns.values()]:
        logger.info("%s: columns %s are not read, since others replace them", source.path, join_names(replaced))
        rows = rows.remove_columns(replaced)
    rows = rename_columns(rows, {theirs: ours for ours, theirs in columns.items()})
    if source.limit is None:
        return rows
    return rows.take(source.limit) if source.streaming else rows.select(range(min(source.limit, len(rows))))


def _check_split(split: str, known: str, source: str) -> None:
    """Raise InputError for a split of rows that have no splits, all of which are called "train".

    Args:
        split: The split of the recipe, which may be a sum of slices.
        known: Another valid name of a split.
        source: Description of the source, for the message.
    """
    if not {part.partition("[")[0].strip() for part in split.split("+")} <= {"train", known}:
        raise InputError(
            f"{source}, which has no split {split!r}. Set split: train, or a part of it, such as train[90%:]"
        )


def _read(path: Path, source: Any) -> AnyDataset:
    """Return the rows of one split of a source, which is "train" by default."""
    split = source.split or "train"
    streaming = bool(source.streaming)
    is_saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    if source.name and (is_saved or path.is_file()):  # for instance a recipe for the hub with a local path
        logger.warning("%s: name: %s is not read, since it is only valid for a data set of the hub", path, source.name)

    # 1. a data set that was saved to disk, with slices and sums (`train[:90%]+test`) as in load_dataset
    if is_saved:
        saved = datasets.load_from_disk(str(path))
        if not isinstance(saved, dict):
            _check_split(split, str(saved.split or "train"), "it is a single saved data set")
        splits = saved if isinstance(saved, dict) else {split.partition("[")[0]: saved}
        lengths = {name: len(rows) for name, rows in splits.items()}
        parts = []
        for part in datasets.ReadInstruction.from_spec(split).to_absolute(lengths):
            rows = splits[part.splitname]
            is_whole = (part.from_, part.to) == (0, len(rows))  # a selection would not find the cache of the saved rows
            parts.append(rows if is_whole else rows.select(range(part.from_, part.to)))
        rows = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
        return rows.to_iterable_dataset() if streaming else rows

    # 2. a file, a folder or a name on the hub
    if path.is_file():
        _check_split(split, "train", "it is a single file")
        kwargs = {"data_files": {"train": glob.escape(str(path))}}  # the name may have brackets
        builder = (
            datasets.load_dataset_builder("parquet", **kwargs) if extension(path) == ".parquet" else RowFiles(**kwargs)
        )
    else:
        builder = datasets.load_dataset_builder(str(path) if path.is_dir() else source.path, name=source.name)
    if path.is_dir():
        files = builder.config.data_files
        _check_unread_files(path, files, split)
        if {extension(Path(file)) for file in chain(*files.values())} <= {*EXTENSIONS} - {".parquet"}:
            builder = RowFiles(data_files=files)
    if not streaming:
        builder.download_and_prepare()
        return builder.as_dataset(split=split)
    rows = builder.as_streaming_dataset(split=split)
    # the columns of a stream are known from its first row
    return rows._resolve_features() if rows.column_names is None else rows


def _check_unread_files(folder: Path, files: Mapping[Any, list[str]], split: str) -> None:
    """Raise InputError for files of a folder that belong to no split, and log files of other splits.

    Args:
        folder: The folder.
        files: The files of each split, as `datasets` selects them.
        split: The split that is read.
    """
    card = folder / "README.md"  # it may list the files of each split
    if card.is_file() and "data_files:" in card.read_text(encoding="utf-8", errors="replace"):
        return

    # `datasets` selects files of the most frequent type and, if a name has train or test in it, only such files
    selected = {(file.parent.resolve(), file.name) for file in map(Path, chain(*files.values()))}
    candidates = (file.relative_to(folder) for file in folder.rglob("*") if extension(file) in EXTENSIONS)
    candidates = (
        file
        for file in candidates
        if not any(part.startswith((".", "__")) for part in file.parts) and file.name not in _METADATA_FILES
    )
    if unread := [str(file) for file in candidates if ((folder / file).parent.resolve(), file.name) not in selected]:
        raise InputError(
            f"{join_names(sorted(unread))} would not be read. The files of a folder must be of one type, and either "
            "all or none of them named after splits, such as train and test. Rename or move them, or list sources"
        )
    if others := [Path(file).name for name, paths in files.items() if str(name) not in split for file in paths]:
        logger.info("%s: files of other splits than %s, which are not read: %s", folder, split, join_names(others))
