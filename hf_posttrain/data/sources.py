"""Sources -> raw rows: files, folders, saved and hub data sets, their columns renamed, mixed by weight."""

import glob
import logging
import re
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from ..errors import InputError, error_context, join_names, name_hint
from .files import EXTENSIONS, extension, source_problem, expand_home
from .formats import canonical_name, rename_columns
from .json_rows import JsonValue, RowFiles
from .row_schema import OPTIONAL_COLUMNS

logger = logging.getLogger(__package__)
_METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "config.json")  # of a data set, without rows


def load(
    sources: Any, what: str = "data", columns_read: Callable[[Any, str], list[str]] | None = None
) -> datasets.Dataset | datasets.IterableDataset:
    """One data set from a source or a list of them: objects with path, name, split, columns, limit, weight, streaming.

    A source of weight w counts w times (repeated, or a seeded sample of it); streams are interleaved by weight.
    columns_read: the columns of a source that training reads; sources that are mixed have the same, but for OPTIONAL_COLUMNS
    ones, and what else they have is left out. Raises InputError for what cannot be read, naming `what`, the path and,
    for malformed JSON, the line, and for sources that cannot be mixed: columns that differ, or streams with others.
    """
    sources = list(sources) if isinstance(sources, list | tuple) else [sources]
    with error_context(what):
        for source in sources:
            if problem := source_problem(source.path):
                raise InputError(problem)
        streams, others = ([s.path for s in sources if bool(s.streaming) is kind] for kind in (True, False))
        if streams and others:
            problem = f"{', '.join(streams)} with streaming: true, {', '.join(others)} without"
            raise InputError(f"streams do not mix with other sources ({problem}): set it for all or for none")
        if streams and len(sources) == 1 and sources[0].weight != 1:
            raise InputError(f"weight is a stream's share among others: {streams[0]} is alone, leave it out")
        parts = [_load_one(source) for source in sources]
        if len(parts) > 1:
            return _mix(parts, sources, columns_read)
        return parts[0] if streams else _apply_weight(parts[0], sources[0])


def _mix(parts: list, sources: list, columns_read: Callable[[Any, str], list[str]] | None) -> Any:
    """The rows of several sources as one data set, with the columns that all of them have and OPTIONAL_COLUMNS ones."""
    streams = bool(sources[0].streaming)
    wanted = None
    paths = ", ".join(source.path for source in sources)
    if columns_read:
        # `messages` may be `conversations` in another
        parts = [rename_columns(part, {c: canonical_name(c, part.column_names) for c in part.column_names}) for part in parts]
        wanted = _common_columns(parts, sources, columns_read)
    columns = dict.fromkeys(column for part in parts for column in part.column_names)
    shared = [c for c in columns if all(c in part.column_names for part in parts) and (not wanted or c in wanted)]
    if not shared:
        raise InputError("the sources share no column; rename with `columns`")
    kept = {*shared, *(OPTIONAL_COLUMNS & {*columns})}
    if streams and {*shared} < kept:
        problem = "must be a column of all sources that are streams, or of none"
        raise InputError(f"{join_names(sorted(kept - {*shared}))} {problem}")
    if aside := [column for column in columns if column not in kept]:
        logger.info("%s: not all sources have these columns, which are not read: %s", paths, join_names(aside))
    # a column that one source keeps as JSON is kept so in all of them, but for text; pandas writes large_string
    written = {c for part in parts for c, kind in part.features.items() if isinstance(kind, JsonValue)}
    text = datasets.Value("string"), datasets.Value("large_string")
    for n, (part, source) in enumerate(zip(parts, sources, strict=True)):
        part = part.select_columns([c for c in columns if c in kept and c in part.column_names])
        kinds = {
            c: text[0] if kind in text else JsonValue() if c in written else kind for c, kind in part.features.items()
        }
        part = part if kinds == part.features else part.cast(datasets.Features(kinds))
        parts[n] = part if streams else _apply_weight(part, source)
    try:
        if not streams:
            return datasets.concatenate_datasets(parts)
        odds = [source.weight / sum(other.weight for other in sources) for source in sources]
        # of one weight each row counts once; with others a stream that ends is repeated until all have ended
        until = "all_exhausted_without_replacement" if len({*odds}) == 1 else "all_exhausted"
        return datasets.interleave_datasets(parts, probabilities=odds, seed=0, stopping_strategy=until)
    except ValueError as error:
        raise InputError(f"the columns of {paths} are not of the same types: {error}") from error


def _common_columns(parts: list, sources: list, columns_read: Callable[[Any, str], list[str]]) -> set[str]:
    """The columns that all sources are read from, and the OPTIONAL_COLUMNS ones. Raises InputError where they differ."""
    read = []
    for part, source in zip(parts, sources, strict=True):
        with error_context(source.path):
            read.append({*columns_read(part, source.path)} - OPTIONAL_COLUMNS)
        if read[-1] != read[0]:
            found = f"{sources[0].path} is read from {join_names(sorted(read[0]))}, {source.path} from"
            raise InputError(
                f"{found} {join_names(sorted(read[-1]))}: sources are mixed where they have the same columns; rename with "
                "`columns`, or write the rows of one in the other's format"
            )
    return read[0] | OPTIONAL_COLUMNS


def _apply_weight(rows: datasets.Dataset, source: Any) -> datasets.Dataset:
    """Whole copies of the rows, then a random sample of them without repeats, always the same."""
    if source.weight == 1:
        return rows
    n = len(rows)
    size = round(source.weight * len(rows))
    if not size:
        raise InputError(f"{source.path}: weight {source.weight} of {n} rows leaves none: raise it, or drop the source")
    order = np.concatenate([np.arange(n)] * (size // n) + [np.random.default_rng(0).permutation(n)[: size % n]])
    return rows.select(order)


def _load_one(source: Any) -> datasets.Dataset | datasets.IterableDataset:
    """The rows of one source, with our names for its columns."""
    path = expand_home(source.path)
    try:
        rows = _read(path, source)
    except Exception as error:
        local = "" if path.exists() else " (it is no file or folder here, so the hub was asked)"
        found = error if isinstance(error, InputError) else error.__cause__ or error
        problem = " ".join(str(found).split()).removeprefix(f"{path.name}, ")
        raise InputError(f"cannot read {source.path}{local}: {problem}") from error
    if isinstance(rows, datasets.Dataset) and len(rows) == 0:
        raise InputError(f"{source.path} has no rows")
    lone = rows.column_names[0] if extension(path) == ".csv" and len(rows.column_names) == 1 else ""
    if other := re.search("[;\t|]", lone):
        raise InputError(f"{source.path} is separated by {other[0]!r}: a .csv has commas between its fields")
    # our names for the columns; another column that has our name is removed
    columns = source.columns or {}
    there = rows.column_names
    for ours, theirs in columns.items():
        if twice := [other for other in columns if other != ours and columns[other] == theirs]:
            raise InputError(f"{source.path}: column {theirs!r} is for {ours!r} and for {twice[0]!r}: it can be one")
        if theirs not in there:
            near = name_hint(theirs, {*there} - {*columns.values()}, list_valid=False, in_brackets=True)
            raise InputError(f"{source.path}: no column {theirs!r} for {ours!r}{near}; there are {join_names(there)}")
    if replaced := [ours for ours in columns if ours in there and ours not in columns.values()]:
        logger.info("%s: columns %s, which others replace, are not read", source.path, join_names(replaced))
        rows = rows.remove_columns(replaced)
    rows = rename_columns(rows, {theirs: ours for ours, theirs in columns.items()})
    if source.limit is None:
        return rows
    return rows.take(source.limit) if source.streaming else rows.select(range(min(source.limit, len(rows))))


def _check_split(split: str, known: str, what: str) -> None:
    """Raises InputError for a split that rows without splits do not have: all of them are "train"."""
    if not {part.partition("[")[0].strip() for part in split.split("+")} <= {"train", known}:
        raise InputError(f"{what}, without a split {split!r}: set split: train, or a part of it, such as train[90%:]")


def _read(path: Path, source: Any) -> Any:
    """The rows of one split of a source, "train" where none is given."""
    split = source.split or "train"
    streaming = bool(source.streaming)
    saved_here = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    if source.name and (saved_here or path.is_file()):  # as of a recipe for the hub with another path
        logger.warning("%s: name: %s is not read, it is a configuration of a data set of the hub", path, source.name)
    # 1. saved to disk: slices and sums (`train[:90%]+test`) are as load_dataset has them
    if saved_here:
        saved = datasets.load_from_disk(str(path))
        if not isinstance(saved, dict):
            _check_split(split, str(saved.split or "train"), "it is one saved data set")
        splits = saved if isinstance(saved, dict) else {split.partition("[")[0]: saved}
        lengths = {name: len(rows) for name, rows in splits.items()}
        parts = []
        for part in datasets.ReadInstruction.from_spec(split).to_absolute(lengths):
            rows = splits[part.splitname]
            whole = (part.from_, part.to) == (0, len(rows))  # a selection would lose the cache of the saved rows
            parts.append(rows if whole else rows.select(range(part.from_, part.to)))
        rows = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
        return rows.to_iterable_dataset() if streaming else rows
    # 2. a file, a folder or a name on the hub
    if path.is_file():
        _check_split(split, "train", "it is one file")
        given = {"data_files": {"train": glob.escape(str(path))}}  # which may have brackets in its name
        builder = (
            datasets.load_dataset_builder("parquet", **given) if extension(path) == ".parquet" else RowFiles(**given)
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
    # the columns of a stream are in its first row
    return rows._resolve_features() if rows.column_names is None else rows


def _check_unread_files(folder: Path, files: Mapping[Any, list[str]], split: str) -> None:
    """Raises InputError for files of a folder that are none of its splits' `files`; names those of other splits."""
    card = folder / "README.md"  # it may say itself which files belong to a split
    if card.is_file() and "data_files:" in card.read_text(encoding="utf-8", errors="replace"):
        return
    # `datasets` takes those of the commonest kind and, where a name says train or test, only such files
    picked = {(file.parent.resolve(), file.name) for file in map(Path, chain(*files.values()))}
    there = (file.relative_to(folder) for file in folder.rglob("*") if extension(file) in EXTENSIONS)
    there = (
        file
        for file in there
        if not any(part.startswith((".", "__")) for part in file.parts) and file.name not in _METADATA_FILES
    )
    if left := [str(file) for file in there if ((folder / file).parent.resolve(), file.name) not in picked]:
        raise InputError(
            f"{join_names(sorted(left))} would not be read: a folder has files of one kind, "
            "all or none of them named for splits, as train and test; rename or move them, or list sources"
        )
    if others := [Path(file).name for name, found in files.items() if str(name) not in split for file in found]:
        logger.info("%s: files of other splits than %s, which are not read: %s", folder, split, join_names(others))
