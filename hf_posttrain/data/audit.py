"""The data audit: what preparing a data set makes of its rows, counted.

    audits       a recipe's raw data sets -> a DataAudit of each, that of the evaluation rows with their overlap
    audit        one raw data set -> its DataAudit
    overlap      which evaluation examples are training examples too

It reads the examples of `prepare.tokenised`, which are in the cache of `datasets` once training has prepared them, as
columns: no loop over rows. Duplicates and overlap compare prompts and answers as they were before they were cut.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc

from .encode import ALIKE, COMPLETION_CUT, NO_TARGET, PROMPT_CUT
from .findings import Cut, DataAudit, Found
from .kinds import Reader
from .labels import class_weights
from .packing import lengths_of
from .prepare import tokenised

__all__ = ["DataAudit", "audit", "audits", "overlap"]

STREAMED = 1000
"""Examples of a stream that are audited: its first."""
NAMED = 5
"""Rows that a finding names."""
_DROPPED = {
    NO_TARGET: "no trained token",
    NO_TARGET | COMPLETION_CUT: "no trained token left by max_length",
}
_TRUNCATED = {
    PROMPT_CUT: "prompt trimmed",
    COMPLETION_CUT: "completion cut",
    PROMPT_CUT | COMPLETION_CUT: "prompt trimmed and completion cut",
}


def audits(
    raw: Mapping[str, Any], method: Reader, tokenizer: Any, config: Any, names: Mapping[str, str] | None = None
) -> dict[str, DataAudit]:
    """A DataAudit of each raw data set; that of "eval" has its overlap with "train", unless one of both is a stream.

    names: what `prepare` calls them, where that is not the key; so that the tokenised rows come from the cache.
    """
    named = {key: (names or {}).get(key, key) for key in raw}
    made = {key: audit(rows, method, tokenizer, config, named[key]) for key, rows in raw.items()}
    if all(isinstance(raw.get(key), datasets.Dataset) for key in ("train", "eval")):
        pair = named["train"], named["eval"]
        made["eval"].overlap = overlap(raw["train"], raw["eval"], method, tokenizer, config, pair)
    return made


def audit(raw: Any, method: Reader, tokenizer: Any, config: Any, name: str = "train") -> DataAudit:
    """What `method` makes of rows as `data.load` reads them; `name` is what `prepare` calls them.

    Of a stream, the first STREAMED examples. Raises InputError for the first bad row, as `prepare` does.
    """
    streamed = not isinstance(raw, datasets.Dataset)
    rows = _examples(raw, method, tokenizer, config, name)
    columns = rows.with_format("numpy")
    row, state = columns["row"][:], columns["state"][:]
    lost = state & NO_TARGET > 0
    made = DataAudit(
        name=name,
        max_length=getattr(config, "max_length", None),
        rows_read=len(np.unique(row)) if streamed else len(raw),
        streamed=streamed,
        examples=len(rows),
        dropped=_cuts(row, state & (NO_TARGET | COMPLETION_CUT), lost, _DROPPED),
        truncated=_cuts(row, state & (PROMPT_CUT | COMPLETION_CUT), ~lost, _TRUNCATED),
        lengths=_lengths(rows, ~lost),
        stubs=_found(row, ~lost & (columns["trained"][:] == 1)),
        duplicates=_found(row, _repeated(rows, ~lost & ~_weighted_copies(raw, row))),
        unknown=_found(row, ~lost & columns["unknown"][:]),
    )
    if method.rows.paired:
        made.identical = _found(row, ~lost & (state & ALIKE > 0))
    if method.rows.labelled:
        _add_classes(made, rows, ~lost, config)
    return made


def overlap(
    train: datasets.Dataset, evaluation: datasets.Dataset, method: Reader, tokenizer: Any, config: Any,
    names: tuple[str, str] = ("train", "eval"),
) -> Found:  # fmt: skip
    """Evaluation examples whose prompt and an answer are those of a training example; of OPD, whose prompt is."""
    pair = zip((train, evaluation), names, strict=True)
    seen, rows = (_examples(raw, method, tokenizer, config, name) for raw, name in pair)
    kept = rows.with_format("numpy")["state"][:] & NO_TARGET == 0
    return _found(rows.with_format("numpy")["row"][:], kept & np.isin(_keys(rows), _keys(seen)).any(axis=1))


def _examples(raw: Any, method: Reader, tokenizer: Any, config: Any, name: str) -> datasets.Dataset:
    rows = tokenised(raw, method, tokenizer, config, name)
    if isinstance(rows, datasets.Dataset):
        return rows
    return datasets.Dataset.from_list(list(itertools.islice(rows, STREAMED)), features=rows.features)


def _found(row: np.ndarray, chosen: np.ndarray) -> Found:
    """Those of the examples [examples] that are `chosen`; `row` has the raw row of each."""
    return Found(int(chosen.sum()), np.unique(row[chosen])[:NAMED].tolist())


def _cuts(row: np.ndarray, bits: np.ndarray, among: np.ndarray, reasons: dict[int, str]) -> list[Cut]:
    """The examples of each reason, which is known by its bits; reasons without examples are left out."""
    found = ((_found(row, among & (bits == value)), reason) for value, reason in reasons.items())
    return [Cut(cut.count, cut.first_rows, reason) for cut, reason in found if cut.count]


def _keys(rows: datasets.Dataset) -> np.ndarray:
    """[examples, branches] hashes of the prompt with each branch."""
    return np.asarray(pc.list_flatten(rows.with_format("arrow")["keys"][:])).reshape(len(rows), -1)


def _branches(rows: datasets.Dataset) -> np.ndarray:
    """[examples, branches] tokens of each completion."""
    columns = [name for name in ("completion_ids", "chosen_ids", "rejected_ids") if name in rows.column_names]
    return np.stack([lengths_of(rows, name) for name in columns], axis=1)


def _lengths(rows: datasets.Dataset, kept: np.ndarray) -> dict[str, dict[str, float] | None]:
    prompt, branches, columns = lengths_of(rows, "prompt_ids"), _branches(rows), rows.with_format("numpy")
    return {
        "prompt": _spread(prompt[kept]),
        "completion": _spread(branches[kept].ravel()) if branches.any() else None,
        **_sides(rows, branches, kept),
        "total": _spread((prompt + branches.max(axis=1))[kept]),
        "trained": _spread(columns["trained"][:][kept]) if "completion_mask" in rows.column_names else None,
        "uncut": _spread(columns["uncut"][:]),
    }


def _sides(rows: datasets.Dataset, branches: np.ndarray, kept: np.ndarray) -> dict[str, dict[str, float] | None]:
    """Completions of each side, which should not be told apart by their lengths."""
    if "chosen_ids" in rows.column_names:
        return {name: _spread(branches[kept, side]) for side, name in enumerate(("chosen", "rejected"))}
    if "label" in rows.column_names:
        label = rows.with_format("numpy")["label"][:]
        sides = (("desirable", kept & label), ("undesirable", kept & ~label))
        return {name: _spread(branches[chosen, 0]) for name, chosen in sides}
    return {}


def _spread(lengths: np.ndarray) -> dict[str, float] | None:
    """Percentiles are lengths that occur: the smallest that so many percent do not exceed."""
    if not len(lengths):
        return None
    p50, p95, p99 = np.percentile(lengths, (50, 95, 99), method="inverted_cdf").tolist()
    spread = {"min": int(lengths.min()), "p50": p50, "p95": p95, "p99": p99, "max": int(lengths.max())}
    return {**spread, "mean": round(float(lengths.mean()), 1)}


def _weighted_copies(raw: Any, row: np.ndarray) -> np.ndarray:
    """[examples] Is this one of a row that stands in the data set before, since its source weighs more than 1?"""
    if getattr(raw, "_indices", None) is None:
        return np.zeros(len(row), dtype=bool)
    stored = raw._indices.column(0).to_numpy()[row]
    _, first, group = np.unique(stored, return_index=True, return_inverse=True)
    return row != row[first][group]


def _repeated(rows: datasets.Dataset, among: np.ndarray) -> np.ndarray:
    """[examples] Has an earlier one the same prompt, answers and label? Of those that are `among` them."""
    columns = _keys(rows)
    if "label" in rows.column_names:
        columns = np.column_stack([columns, rows.with_format("numpy")["label"][:]])
    chosen = np.flatnonzero(among)
    repeated = among.copy()
    repeated[chosen[np.unique(columns[chosen], axis=0, return_index=True)[1]]] = False
    return repeated


def _add_classes(made: DataAudit, rows: datasets.Dataset, kept: np.ndarray, config: Any) -> None:
    """The labels of KTO: their numbers, weights and contradictions."""
    label, row = rows.with_format("numpy")["label"][:], rows.with_format("numpy")["row"][:]
    good, bad = int((kept & label).sum()), int((kept & ~label).sum())
    made.classes = {"desirable": good, "undesirable": bad}
    if good and bad:
        weights = class_weights(config.desirable_weight, config.undesirable_weight, label[kept].tolist())
        made.balance = weights[0] * good / (weights[1] * bad)
    group = np.unique(_keys(rows)[:, 0], return_inverse=True)[1]
    both = np.logical_and(*(np.isin(group, group[kept & (label == value)]) for value in (True, False)))
    made.conflicts = _found(row, kept & both)
