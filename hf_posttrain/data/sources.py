"""Sources -> raw rows: files, folders, saved and hub data sets, their columns renamed, mixed by weight."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from ..errors import InputError, error_context, named, nearest
from .files import BUILDERS, broken, source_problem


def check_sources(sources: Any, what: str = "data") -> None:
    """Existence, extension and emptiness of each local source, without reading it. Raises InputError."""
    for source in _as_list(sources):
        if problem := source_problem(source.path):
            raise InputError(f"{what}: {problem}")


def load(sources: Any, what: str = "data") -> datasets.Dataset | datasets.IterableDataset:
    """One data set from a source or a list of them: objects with path, name, split, columns, limit, weight, streaming.

    A source of weight w counts w times (repeated, or a seeded sample of it); streams are interleaved by weight.
    Raises InputError for what cannot be read, naming `what`, the path and, for malformed JSON, the line, and for
    sources that cannot be mixed: columns of different types, or streams together with others.
    """
    check_sources(sources, what)
    sources = _as_list(sources)
    streams, others = ([s.path for s in sources if bool(s.streaming) is kind] for kind in (True, False))
    if streams and others:
        problem = f"{', '.join(streams)} with streaming: true, {', '.join(others)} without"
        raise InputError(f"{what}: streams do not mix with other sources ({problem}): set it for all or for none")
    with error_context(what):
        parts = [_load_one(source) for source in sources]
    # only the columns that all sources have
    shared = [c for c in parts[0].column_names if all(c in part.column_names for part in parts)]
    if not shared:
        raise InputError(f"{what}: the sources share no column; rename with `columns`")
    try:
        return _mixed([part.select_columns(shared) for part in parts], [float(source.weight) for source in sources])
    except ValueError as error:
        paths = ", ".join(source.path for source in sources)
        raise InputError(f"{what}: the columns of {paths} are not of the same types: {error}") from error


def _mixed(parts: list, weights: list[float]) -> datasets.Dataset | datasets.IterableDataset:
    """One data set from several with the same columns."""
    if not isinstance(parts[0], datasets.IterableDataset):
        parts = [_times(part, weight) for part, weight in zip(parts, weights, strict=True)]
    elif set(weights) != {1.0}:
        odds = [w / sum(weights) for w in weights]
        return datasets.interleave_datasets(parts, probabilities=odds, seed=0, stopping_strategy="all_exhausted")
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def _times(rows: datasets.Dataset, weight: float) -> datasets.Dataset:
    """Whole copies of the rows, then a random sample of them without repeats, always the same."""
    if weight == 1:
        return rows
    n, size = len(rows), round(weight * len(rows))
    order = np.concatenate([np.arange(n)] * (size // n) + [np.random.default_rng(0).permutation(n)[: size % n]])
    return rows.select(order)


def _load_one(source: Any) -> datasets.Dataset | datasets.IterableDataset:
    path = Path(source.path).expanduser()
    try:
        rows = _read(path, source)
    except Exception as error:
        # `datasets` rarely says which line of a file is wrong: look for it
        local = "" if path.exists() else " (it is no file or folder here, so the hub was asked)"
        problem = broken(path) or " ".join(str(error.__cause__ or error).split())
        raise InputError(f"cannot read {source.path}{local}: {problem}") from error
    if isinstance(rows, datasets.Dataset) and len(rows) == 0:
        raise InputError(f"{source.path} has no rows")
    if path.suffix == ".csv" and len(rows.column_names) == 1 and (other := re.search("[;\t|]", rows.column_names[0])):
        raise InputError(f"{source.path} is separated by {other[0]!r}: a .csv has commas between its fields")
    rows = _rename(rows, source.columns or {}, source.path)
    if source.limit is None:
        return rows
    return rows.take(source.limit) if source.streaming else rows.select(range(min(source.limit, len(rows))))


def _read(path: Path, source: Any) -> Any:
    """The rows of one split of a source, "train" where none is given."""
    split, streaming = source.split or "train", bool(source.streaming)
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        saved = _saved(path, split)
        return saved.to_iterable_dataset() if streaming else saved
    name, options = source.path, {"name": source.name}
    if path.is_dir():
        name = str(path)
    elif path.is_file():
        name, options = BUILDERS[path.suffix], {"data_files": {split.partition("[")[0]: str(path)}}
    with _unlogged(name) if path.is_file() else nullcontext():  # of a folder, only the log names the broken file
        rows = datasets.load_dataset(name, split=split, streaming=streaming, **options)
        # the columns of a stream are in its first row
        return rows._resolve_features() if rows.column_names is None else rows


@contextmanager
def decoded(sources: Any, what: str) -> Iterator[None]:
    """Context for code that reads the rows of a loaded data set: Arrow finds a text that is not UTF-8 only then.

    Raises InputError with the file and line of the first.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        found = ((source.path, broken(Path(source.path).expanduser())) for source in _as_list(sources))
        places = [f"{path}: {problem}" for path, problem in found if problem]
        raise InputError(f"{what}: {places[0] if places else f'a text is not UTF-8 ({error})'}") from error


@contextmanager
def _unlogged(builder: str) -> Iterator[None]:
    """Keeps `datasets` from logging that a file is broken, which it raises as well."""
    logger = logging.getLogger(f"datasets.packaged_modules.{builder}.{builder}")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _saved(path: Path, split: str) -> datasets.Dataset:
    """`split` of a data set saved to disk, with slices and sums (`train[:90%]+test`) as load_dataset has them.

    A saved Dataset has no splits, so any name stands for it. Raises ValueError for another split, listing those there.
    """
    saved = datasets.load_from_disk(str(path))
    splits = saved if isinstance(saved, dict) else {split.partition("[")[0]: saved}
    wanted = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    parts = []
    for part in wanted:
        rows = splits[part.splitname]
        whole = (part.from_, part.to) == (0, len(rows))  # a selection would lose the cache of the saved rows
        parts.append(rows if whole else rows.select(range(part.from_, part.to)))
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def _rename(rows: Any, columns: dict[str, str], where: str) -> Any:
    """`columns` is {our name: theirs}; another column that has our name is removed."""
    for ours, theirs in columns.items():
        if theirs not in rows.column_names:
            near = nearest(theirs, {*rows.column_names} - {*columns.values()}, listed=False, aside=True)
            raise InputError(f"{where}: no column {theirs!r} for {ours!r}{near}; there are {named(rows.column_names)}")
    taken = [ours for ours in columns if ours in rows.column_names and ours not in columns.values()]
    return rows.remove_columns(taken).rename_columns({theirs: ours for ours, theirs in columns.items()})


def _as_list(sources: Any) -> list:
    return list(sources) if isinstance(sources, list | tuple) else [sources]
