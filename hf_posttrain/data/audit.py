"""The data audit: what preparing a data set makes of its rows, counted.

It reads the columns of `prepare.tokenised`, which `datasets` has in its cache once training has prepared them.
Duplicates and overlap compare prompts and answers as they were before they were cut.
"""

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from .encode import ALIKE, COMPLETION_CUT, NO_TARGET, PROMPT_CUT
from .lengths import first_rows
from .packing import lengths_of
from .prepare import notes, tokenised
from .row_schema import Reader, RowKind, class_weights

STREAMED = 1000  # examples of a stream that are audited: its first
DROPPED_SHARE = 0.1
TRUNCATED_SHARE = 0.5
ENDLESS_SHARE = 0.2
"""Shares above which it is warned of examples that are dropped, that are cut at all, and of completions that lose their
end: a model that is shown too few ends does not learn to stop."""
BALANCE = 4.0  # weight of one class of labels over that of the other above which it is warned
_FINDINGS = {  # field of DataAudit: what `lines` call it, share of the kept examples above which it is warned, warning
    "duplicates": ("duplicates", 0.25, "examples repeat an earlier one: remove them"),
    "unknown": ("with the unknown token", 0.1, "examples hold the unknown token: clean them, or use another tokenizer"),
    "stubs": ("with a single trained token", 0.5, "examples train a single token: are the columns the right ones?"),
    "conflicts": ("under both labels", 0.01, "answers are labelled desirable and undesirable: keep one label"),
    "identical": ("with chosen = rejected", 0.01, "pairs have the same chosen and rejected answer: remove them"),
    "overlap": (
        "also in train",
        0,
        "examples are in the training set too, so they measure memory: remove them from one",
    ),
}
_DROPPED = {NO_TARGET: "no trained token", NO_TARGET | COMPLETION_CUT: "no trained token left by max_length"}
_TRUNCATED = {
    PROMPT_CUT: "prompt trimmed",
    COMPLETION_CUT: "completion cut",
    PROMPT_CUT | COMPLETION_CUT: "prompt trimmed and completion cut",
}


@dataclass
class Tally:
    """How many examples something is true of."""

    count: int
    first_rows: list[int]  # numbers of the first raw rows they came from, counted from 0

    def __str__(self) -> str:
        return f"{self.count} (first rows {', '.join(map(str, self.first_rows))})" if self.count else "0"


@dataclass
class Truncation(Tally):
    """Examples that were dropped or truncated."""

    reason: str  # what was lost


@dataclass
class DataAudit:
    """What is in a data set as it is trained. Counts are of examples: a pair is two where answers are labelled."""

    name: str
    max_length: int | None
    rows_read: int  # raw rows; of a stream, those that were looked at
    streamed: bool  # is it a stream, of which only the beginning was looked at?
    examples: int  # what the rows became, dropped ones included
    dropped: list[Truncation]  # by reason
    truncated: list[Truncation]  # examples that were cut and are trained, by what was cut
    lengths: dict[str, dict[str, float] | None]
    """Tokens of the kept examples, as min, p50, p95, p99, max and mean: `prompt`; `completion`, each of a pair counted,
    then each side; `total`, prompt and longest completion; `trained`, tokens with a loss where a mask says which; and
    of all examples `uncut`, the total before they were cut. None where there are none. If answers are sampled during
    training, `total` is None and `uncut` counts the prompt alone."""
    stubs: Tally  # kept examples that train a single token
    duplicates: Tally  # kept examples with the prompt, answers and label of an earlier one, copies by weight aside
    unknown: Tally  # kept examples with the tokenizer's unknown token
    classes: dict[str, int] | None = None  # kept examples of each label, `desirable` and `undesirable`
    balance: float | None = None  # weight of all desirable examples over that of all undesirable ones, if both exist
    weighted: bool = False  # is a class weight given?
    conflicts: Tally | None = None  # kept examples whose prompt and answer have the other label elsewhere
    identical: Tally | None = None  # kept pairs whose answers are the same, after both were cut
    notes: list[str] = field(default_factory=list)  # what is given and not used
    mistakes: list[str] = field(default_factory=list)  # of these, what is most likely a mistake: a misspelt column
    reserved: int = 0  # tokens of max_length that are left for answers that are sampled
    overlap: Tally | None = None  # of evaluation rows: kept examples with the prompt and an answer of a training one

    @property
    def kept(self) -> int:
        """Examples that are trained."""
        return self.examples - sum(cut.count for cut in self.dropped)

    def findings(self) -> dict[str, Tally]:
        """Those of _FINDINGS that were looked for."""
        return {key: found for key in _FINDINGS if (found := getattr(self, key)) is not None}

    def short(self) -> str:
        """One line for the log, next to that of `data.prepare`, which counts what was read, cut and dropped."""
        spread = self.lengths["total"] or self.lengths["prompt"]
        what = "tokens" if self.lengths["total"] else "tokens of prompts"
        parts = [f"{what} p50 {spread['p50']} p95 {spread['p95']} max {spread['max']}"] if spread else []
        parts += [f"{found.count} {_FINDINGS[key][0]}" for key, found in self.findings().items() if found.count]
        if self.classes:
            parts.append(" and ".join(f"{count} {label}" for label, count in self.classes.items()))
        aside = f", of the first {self.examples} examples of the stream" if self.streamed else ""
        return f"{self.name}: {', '.join(parts)}{aside}"

    def lines(self) -> list[str]:
        """The audit for people: a title and indented lines."""
        aside = " (the first of a stream; the rest is not audited)" if self.streamed else ""
        out = [f"{self.name}: {self.rows_read} rows read as {self.examples} examples{aside}"]
        out += [f"  {note}" for note in self.notes]
        for what, cuts in (("dropped", self.dropped), ("truncated", self.truncated)):
            out += [f"  {what}: {cut}, {cut.reason}" for cut in cuts] or [f"  {what}: 0"]
        out += [f"  {_FINDINGS[key][0]}: {found}" for key, found in self.findings().items()]
        if self.classes:
            out.append("  labels: " + ", ".join(f"{count} {label}" for label, count in self.classes.items()))
        table = {what: spread for what, spread in self.lengths.items() if spread}
        for spread in itertools.islice(table.values(), 1):
            out.append(f"  {'tokens':<14}" + "".join(f"{name:>9}" for name in spread))
        return out + [f"    {what:<12}" + "".join(f"{n:>9}" for n in spread.values()) for what, spread in table.items()]

    def warnings(self) -> list[str]:
        """What would ruin training or make evaluation worthless, a sentence each that says what to do."""
        if not self.kept:
            return [f"{self.name}: all {self.examples} examples are dropped, with no trained token: raise max_length"]
        # what max_length takes away
        found = [*self.mistakes]
        dropped = self.examples - self.kept
        truncated = sum(cut.count for cut in self.truncated)
        endless = sum(cut.count for cut in self.truncated if "completion" in cut.reason)
        longest = (self.lengths["uncut"] or {}).get("max")
        has = f"the longest has {longest} tokens"
        if self.reserved:
            has = f"{self.reserved} of them are for the answer, and the longest prompt has {longest}"
        remedy = f"raise max_length from {self.max_length} ({has}) or shorten the rows"
        if dropped > DROPPED_SHARE * self.examples:
            by_length = any("max_length" in cut.reason for cut in self.dropped)
            mend = remedy if by_length else "mend empty answers or masks"
            found.append(f"{dropped} of {self.examples} examples are dropped, with no trained token: {mend}")
        if endless > ENDLESS_SHARE * self.kept:
            cut = "lose the end of a completion, which says where to stop"
            found.append(f"{endless} of {self.kept} examples {cut}: {remedy}")
        elif truncated > TRUNCATED_SHARE * self.kept:
            found.append(f"{truncated} of {self.kept} examples are truncated: {remedy}")
        for key, each in self.findings().items():
            _, share, problem = _FINDINGS[key]
            if each.count > share * self.kept:
                rows = ", ".join(map(str, each.first_rows))
                found.append(f"{each.count} of {self.kept} {problem} (first rows {rows})")
        # the balance of labels is a matter of training alone
        if self.classes and not self.name.startswith("eval"):
            counts = " and ".join(f"{count} {label}" for label, count in self.classes.items())
            if self.balance is None:
                found.append(f"{counts} examples: one label alone does not say what to prefer, both are needed")
            elif not self.weighted and not 1 / BALANCE <= self.balance <= BALANCE:
                rarer = "undesirable_weight" if self.balance > 1 else "desirable_weight"
                found.append(f"{counts} examples, which weigh {self.balance:.3g} to 1: set train.{rarer}=auto")
        return [f"{self.name}: {problem}" for problem in found]


def audits(
    raw: Mapping[str, Any],
    method: Reader,
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
    names: Mapping[str, str] | None = None,
) -> dict[str, DataAudit]:
    """What `method` makes of each data set, as `sources.load` reads it; of a stream, of its first STREAMED examples.

    That of "eval" has its overlap with "train", unless one of both is a stream. names: what `prepare` calls the data
    sets, where that is not the key, so that tokenised rows come from the cache. Raises InputError as `prepare` does.
    """
    names = {key: key for key in raw} | dict(names or {})
    examples = {key: _examples(rows, method, tokenizer, config, names[key]) for key, rows in raw.items()}
    made = {key: _count(rows, *examples[key], method.rows, config, names[key]) for key, rows in raw.items()}
    for key, audit in made.items():
        levels = notes(raw[key], method, config, tokenizer, examples[key][0])
        audit.notes = [note for note, level in levels.items() if level < logging.WARNING]
        audit.mistakes = [note for note, level in levels.items() if level >= logging.WARNING]
    if all(isinstance(raw.get(key), datasets.Dataset) for key in ("train", "eval")):
        (seen, keys) = examples["train"]
        (rows, _) = examples["eval"]
        known = rows[keys].isin(seen[keys].to_numpy().ravel()).any(axis=1)
        made["eval"].overlap = _found(rows[known & (rows.state & NO_TARGET == 0)])
    return made


def _count(raw: Any, every: pd.DataFrame, keys: list[str], kind: RowKind, config: Any, name: str) -> DataAudit:
    """The audit of one data set, from `_examples`."""
    streamed = not isinstance(raw, datasets.Dataset)
    lost = every.state & NO_TARGET > 0
    kept = every[~lost]
    # an example repeats an earlier one of the same keys and label; copies that a source's weight makes do not count
    new = kept[~kept.is_copy]
    repeats = new[new.duplicated([*keys, "label"] if kind.labelled else keys)]
    made = DataAudit(
        name,
        getattr(config, "max_length", None),
        every.row.nunique() if streamed else len(raw),
        streamed,
        len(every),
        dropped=_cuts(every[lost], _DROPPED),
        truncated=_cuts(kept, _TRUNCATED),
        lengths=_lengths(every, kept, kind),
        stubs=_found(kept[kept.trained == 1]),
        duplicates=_found(repeats),
        unknown=_found(kept[kept.unknown]),
    )
    if kind.sampled:
        made.reserved = getattr(config, "max_completion_length", None) or 0
    if kind.paired:
        made.identical = _found(kept[kept.state & ALIKE > 0])
    if kind.labelled:
        good = int(kept.label.sum())
        bad = int((~kept.label).sum())
        made.classes = {"desirable": good, "undesirable": bad}
        if good and bad:
            weights = class_weights(config.desirable_weight, config.undesirable_weight, kept.label.tolist())
            made.balance = weights[0] * good / (weights[1] * bad)
            made.weighted = (config.desirable_weight, config.undesirable_weight) != (1.0, 1.0)
        made.conflicts = _found(kept[kept.groupby(keys[0]).label.transform("nunique") == 2])
    return made


def _examples(
    raw: Any, method: Reader, tokenizer: PreTrainedTokenizerBase, config: Any, name: str
) -> tuple[pd.DataFrame, list[str]]:
    """(one line an example, names of the columns that have its keys).

    Its other columns: FACTS and the label, tokens of the prompt and of each answer under the names of their ids, and
    `is_copy`: is it of a row that stands in the data set before, since its source weighs more than 1?
    """
    rows = tokenised(raw, method, tokenizer, config, name)
    if not isinstance(rows, datasets.Dataset):
        rows = first_rows(rows, STREAMED)
    scalars = [column for column, kind in rows.features.items() if isinstance(kind, datasets.Value)]
    frame = rows.select_columns(scalars).to_pandas()
    for column in ("prompt_ids", *method.rows.answers):
        frame[column] = lengths_of(rows, column)
    hashes = np.asarray(pc.list_flatten(rows.with_format("arrow")["keys"][:])).reshape(len(rows), -1)
    # a hash of the prompt with each answer: a pair has two of them
    keys = [f"key {n}" for n in range(hashes.shape[1])]
    frame[keys] = hashes
    frame["is_copy"] = False
    if getattr(raw, "_indices", None) is not None:
        stored = raw._indices.column(0).to_numpy()[frame.row]
        frame["is_copy"] = frame.row != frame.groupby(stored).row.transform("first")
    return frame, keys


def _found(examples: pd.DataFrame) -> Tally:
    return Tally(len(examples), examples.row.unique()[:5].tolist())


def _cuts(examples: pd.DataFrame, reasons: dict[int, str]) -> list[Truncation]:
    """The examples of each reason, which is known by its bits; reasons without examples are left out."""
    bits = examples.state & max(reasons)  # the last reason has the bits of all
    found = {reason: _found(examples[bits == value]) for value, reason in reasons.items()}
    return [Truncation(each.count, each.first_rows, reason) for reason, each in found.items() if each.count]


def _lengths(every: pd.DataFrame, kept: pd.DataFrame, kind: RowKind) -> dict[str, dict[str, float] | None]:
    answers = kept[[*kind.answers]].to_numpy()
    lengths = {"prompt": kept.prompt_ids, "completion": answers.ravel() if answers.any() else []}
    # the two sides, which should not be told apart by their lengths
    if kind.paired:
        lengths |= {column.removesuffix("_ids"): kept[column] for column in kind.answers}
    if kind.labelled:
        lengths |= {"desirable": kept.completion_ids[kept.label], "undesirable": kept.completion_ids[~kept.label]}
    lengths["total"] = [] if kind.sampled else kept.prompt_ids + answers.max(axis=1)
    lengths |= {"trained": kept.trained if kind.masked else [], "uncut": every.uncut}
    spreads: dict[str, dict[str, float] | None] = dict.fromkeys(lengths)
    for what, tokens in lengths.items():
        if len(tokens):
            # percentiles are lengths that occur: the smallest that so many percent do not exceed
            quantiles = np.percentile(tokens, (0, 50, 95, 99, 100), method="inverted_cdf").tolist()
            spread = dict(zip(("min", "p50", "p95", "p99", "max"), quantiles, strict=True))
            spreads[what] = {**spread, "mean": round(float(np.mean(tokens)), 1)}
    return spreads
