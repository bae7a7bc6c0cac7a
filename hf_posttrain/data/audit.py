"""The data audit: counts of what the preparation of a data set makes of its rows.

It reads the columns of `prepare.tokenize_dataset`, which `datasets` has in its cache once training has prepared them.
Duplicates and overlap are determined from prompts and answers before truncation.
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

from ..errors import count_noun
from .dataset_type import AnyDataset
from .encode import COMPLETION_TRUNCATED, IDENTICAL, NO_TARGET, PROMPT_TRUNCATED
from .lengths import first_rows
from .packing import column_lengths
from .prepare import collect_notes, tokenize_dataset, unread_parts
from .row_schema import Reader, RowKind, class_weights

STREAMED = 1000  # examples at the beginning of a stream that are audited
DROPPED_SHARE = 0.1
TRUNCATED_SHARE = 0.5
ENDLESS_SHARE = 0.2
"""Shares of examples that are dropped, of examples that are truncated at all, and of completions that lose their end,
above which the audit warns. A model that is trained on too few ends does not learn to stop."""
MARKER_SHARE = 0.9
"""Share of the good or of the bad answers that begin with the same token, above which the audit warns if less than
1 - MARKER_SHARE of the other answers do. A model would learn this token in place of the difference of the answers."""
MARKER_ANSWERS = 20  # fewest answers of each side for that warning
BALANCE = 4.0  # ratio of the total weights of the two labels, above which the audit warns
_FINDINGS = {  # field of DataAudit: name in `lines`, share of the kept examples above which the audit warns, warning
    "duplicates": ("duplicates", 0.25, "examples repeat an earlier one. Remove them"),
    "unknown": (
        "with the unknown token",
        0.1,
        "examples hold the unknown token. Clean them, or use another tokenizer",
    ),
    "stubs": (
        "with a single trained token",
        0.5,
        "examples train a single token. Check that the columns are the right ones",
    ),
    "conflicts": ("under both labels", 0.01, "answers are labeled desirable and undesirable. Keep one label"),
    "identical": ("with chosen = rejected", 0.01, "pairs have the same chosen and rejected answer. Remove them"),
    "overlap": (
        "also in train",
        0,
        "examples are also in the training set, so they measure memorization. Remove them from one of the two",
    ),
}
_DROPPED = {NO_TARGET: "no trained token", NO_TARGET | COMPLETION_TRUNCATED: "no trained token left by max_length"}
_TRUNCATED = {
    PROMPT_TRUNCATED: "prompt trimmed",
    COMPLETION_TRUNCATED: "completion cut",
    PROMPT_TRUNCATED | COMPLETION_TRUNCATED: "prompt trimmed and completion cut",
}


@dataclass
class Tally:
    """Number of examples with a property, and the first raw rows that they come from, counted from 0."""

    count: int
    first_rows: list[int]

    def __str__(self) -> str:
        return f"{self.count} (first rows {', '.join(map(str, self.first_rows))})" if self.count else "0"


@dataclass
class Truncation(Tally):
    """Number of examples that were dropped or truncated, with the reason or the truncated part."""

    reason: str


@dataclass
class DataAudit:
    """Statistics of a data set as it is trained.

    Counts are of examples. For a method that trains on labeled answers, a pair is two examples.

    Attributes:
        name: Name of the data set.
        max_length: Maximum length in tokens, or None.
        rows_read: Number of raw rows. For a stream, the number of rows that were audited.
        streamed: Whether the data set is a stream, of which only the beginning was audited.
        examples: Number of examples, including dropped ones.
        dropped: Dropped examples, by reason.
        truncated: Examples that are truncated and trained, by the part that is truncated.
        lengths: Statistics of numbers of tokens (min, p50, p95, p99, max and mean), or None without examples.
            `prompt`, `completion` (each answer of a pair is counted, and each side is also a separate entry), `total`
            (prompt and longest completion) and `trained` (tokens with a loss, if a mask determines them) are of the
            kept examples. `uncut` is the total of all examples before truncation. If answers are sampled during
            training, `total` is None and `uncut` is of the prompt alone.
        stubs: Kept examples that train a single token.
        duplicates: Kept examples with the prompt, answers and label of an earlier one, without copies by weight.
        unknown: Kept examples with the tokenizer's unknown token.
        classes: Number of kept examples of each label, `desirable` and `undesirable`.
        balance: Total weight of desirable examples divided by that of undesirable ones, if both exist.
        weighted: Whether a class weight is set.
        conflicts: Kept examples whose prompt and answer have the other label in another example.
        identical: Kept pairs with identical answers after truncation.
        marker: Sentence about a first token that reveals good or bad answers, or None.
        notes: Columns and options that are not used.
        mistakes: Those notes that most likely indicate a mistake, such as a misspelled column.
        reserved: Tokens of `max_length` that are reserved for answers that are sampled.
        overlap: Kept evaluation examples with the prompt and an answer of a training example.
    """

    name: str
    max_length: int | None
    rows_read: int
    streamed: bool
    examples: int
    dropped: list[Truncation]
    truncated: list[Truncation]
    lengths: dict[str, dict[str, float] | None]
    stubs: Tally
    duplicates: Tally
    unknown: Tally
    classes: dict[str, int] | None = None
    balance: float | None = None
    weighted: bool = False
    conflicts: Tally | None = None
    identical: Tally | None = None
    marker: str | None = None
    notes: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    reserved: int = 0
    overlap: Tally | None = None

    @property
    def kept(self) -> int:
        """Number of examples that are trained."""
        return self.examples - sum(tally.count for tally in self.dropped)

    def findings(self) -> dict[str, Tally]:
        """Return the tallies of `_FINDINGS` that were determined, by field."""
        tallies = {key: getattr(self, key) for key in _FINDINGS}
        return {key: tally for key, tally in tallies.items() if tally is not None}

    def summary(self) -> str:
        """Return one line for the log, next to that of `prepare`, which counts read, truncated and dropped rows."""
        statistics = self.lengths["total"] or self.lengths["prompt"]
        label = "tokens" if self.lengths["total"] else "prompt tokens"
        parts = []
        if statistics:
            parts.append(f"{label} p50 {statistics['p50']} p95 {statistics['p95']} max {statistics['max']}")
        parts += [f"{tally.count} {_FINDINGS[key][0]}" for key, tally in self.findings().items() if tally.count]
        if self.classes:
            parts.append(" and ".join(f"{count} {label}" for label, count in self.classes.items()))
        suffix = f", of the first {self.examples} examples of the stream" if self.streamed else ""
        return f"{self.name}: {', '.join(parts)}{suffix}"

    def lines(self) -> list[str]:
        """Return the audit as text: a title and indented lines."""
        suffix = " (the beginning of a stream; the rest is not audited)" if self.streamed else ""
        rows = count_noun(self.rows_read, "row")
        lines = [f"{self.name}: {rows} read as {count_noun(self.examples, 'example')}{suffix}"]
        lines += [f"  {note}" for note in self.notes]
        for label, tallies in (("dropped", self.dropped), ("truncated", self.truncated)):
            lines += [f"  {label}: {tally}, {tally.reason}" for tally in tallies] or [f"  {label}: 0"]
        lines += [f"  {_FINDINGS[key][0]}: {tally}" for key, tally in self.findings().items()]
        if self.classes:
            lines.append("  labels: " + ", ".join(f"{count} {label}" for label, count in self.classes.items()))
        table = {label: statistics for label, statistics in self.lengths.items() if statistics}
        for statistics in itertools.islice(table.values(), 1):
            lines.append(f"  {'tokens':<14}" + "".join(f"{name:>9}" for name in statistics))
        for label, statistics in table.items():
            lines.append(f"    {label:<12}" + "".join(f"{n:>9}" for n in statistics.values()))
        return lines

    def warnings(self) -> list[str]:
        """Return warnings about problems that would ruin training or make the evaluation meaningless, with a fix."""
        if not self.kept:
            return [
                f"{self.name}: every example is dropped, because none has a trained token (number of examples:"
                f" {self.examples}). Increase max_length"
            ]

        # effects of max_length
        problems = [*self.mistakes]
        dropped = self.examples - self.kept
        truncated = sum(tally.count for tally in self.truncated)
        endless = sum(tally.count for tally in self.truncated if "completion" in tally.reason)
        max_tokens = (self.lengths["uncut"] or {}).get("max")
        lengths = f"the longest has {max_tokens} tokens"
        if self.reserved:
            lengths = f"{self.reserved} tokens are reserved for the answer, and the longest prompt has {max_tokens}"
        fix = f"Increase max_length from {self.max_length} ({lengths}) or shorten the rows"
        if dropped > DROPPED_SHARE * self.examples:
            by_length = any("max_length" in tally.reason for tally in self.dropped)
            dropped_fix = fix if by_length else "Correct empty answers and masks"
            problem = "examples are dropped, because they have no trained token"
            problems.append(f"{dropped} of {self.examples} {problem}. {dropped_fix}")
        if endless > ENDLESS_SHARE * self.kept:
            problem = "examples lose the end of a completion, from which the model learns to stop"
            problems.append(f"{endless} of {self.kept} {problem}. {fix}")
        elif truncated > TRUNCATED_SHARE * self.kept:
            problems.append(f"{truncated} of {self.kept} examples are truncated. {fix}")
        for key, tally in self.findings().items():
            _, share, problem = _FINDINGS[key]
            if tally.count > share * self.kept:
                rows = ", ".join(map(str, tally.first_rows))
                problems.append(f"{tally.count} of {self.kept} {problem} (first rows {rows})")

        if self.marker:
            fix = "The model would learn this token in place of the answers. Write both sides alike"
            problems.append(f"{self.marker}. {fix}")

        # the balance of labels is relevant for training alone
        if self.classes and not self.name.startswith("eval"):
            counts = " and ".join(f"{count} {label}" for label, count in self.classes.items())
            if self.balance is None:
                problems.append(f"{counts} examples. Training requires both labels. Add examples of the missing one")
            elif not self.weighted and not 1 / BALANCE <= self.balance <= BALANCE:
                rarer = "undesirable_weight" if self.balance > 1 else "desirable_weight"
                problems.append(
                    f"{counts} examples, whose total weights are {self.balance:.3g} to 1. Set train.{rarer}=auto"
                )
        return [f"{self.name}: {problem}" for problem in problems]


def audit_datasets(
    raw: Mapping[str, AnyDataset],
    method: Reader,
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
    names: Mapping[str, str] | None = None,
) -> dict[str, DataAudit]:
    """Audit data sets as they are trained by a method.

    Args:
        raw: Raw rows of each data set, as returned by `sources.load`. Of a stream, the first `STREAMED` examples are
            audited. The audit of "eval" includes its overlap with "train", unless either is a stream.
        method: The method.
        tokenizer: The student's tokenizer.
        config: The method's Config.
        names: Names of the data sets in `prepare`, if they differ from the keys, so that tokenized rows come from the
            cache.

    Raises:
        InputError: As `prepare` does.
    """
    names = {key: key for key in raw} | dict(names or {})
    examples = {key: _examples(rows, method, tokenizer, config, names[key]) for key, rows in raw.items()}
    audits = {
        key: _audit(rows, *examples[key], method.rows, tokenizer, config, names[key]) for key, rows in raw.items()
    }
    reported: set[str] = set()  # template options that are not used: reported of the first data set alone
    for key, audit in audits.items():
        levels = collect_notes(raw[key], method, config, tokenizer, examples[key][0], reported)
        reported |= {part for part in unread_parts(examples[key][0]) if part.startswith("chat_template_kwargs")}
        audit.notes = [note for note, level in levels.items() if level < logging.WARNING]
        audit.mistakes = [note for note, level in levels.items() if level >= logging.WARNING]
    if all(isinstance(raw.get(key), datasets.Dataset) for key in ("train", "eval")):
        train_examples, keys = examples["train"]
        eval_examples, _ = examples["eval"]
        is_known = eval_examples[keys].isin(train_examples[keys].to_numpy().ravel()).any(axis=1)
        audits["eval"].overlap = _tally(eval_examples[is_known & (eval_examples.state & NO_TARGET == 0)])
    return audits


def _audit(
    raw: AnyDataset,
    examples: pd.DataFrame,
    keys: list[str],
    kind: RowKind,
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
    name: str,
) -> DataAudit:
    """Return the audit of one data set.

    Args:
        raw: The raw rows.
        examples: First result of `_examples`.
        keys: Second result of `_examples`.
        kind: The kind of rows of the method.
        tokenizer: The student's tokenizer.
        config: The method's Config.
        name: Name of the data set.
    """
    is_stream = not isinstance(raw, datasets.Dataset)
    is_dropped = examples.state & NO_TARGET > 0
    kept = examples[~is_dropped]
    # a duplicate has the keys and the label of an earlier example; copies by the weight of a source do not count
    originals = kept[~kept.is_copy]
    duplicates = originals[originals.duplicated([*keys, "label"] if kind.labeled else keys)]
    audit = DataAudit(
        name,
        getattr(config, "max_length", None),
        examples.row.nunique() if is_stream else len(raw),
        is_stream,
        len(examples),
        dropped=_truncations(examples[is_dropped], _DROPPED),
        truncated=_truncations(kept, _TRUNCATED),
        lengths=_lengths(examples, kept, kind),
        stubs=_tally(kept[kept.trained == 1]),
        duplicates=_tally(duplicates),
        unknown=_tally(kept[kept.unknown]),
    )
    if kind.sampled:
        audit.reserved = getattr(config, "max_completion_length", None) or 0
    if kind.paired or kind.labeled:
        audit.marker = _find_marker(kept, kind, tokenizer)
    if kind.paired:
        audit.identical = _tally(kept[kept.state & IDENTICAL > 0])
    if kind.labeled:
        desirable = int(kept.label.sum())
        undesirable = int((~kept.label).sum())
        audit.classes = {"desirable": desirable, "undesirable": undesirable}
        if desirable and undesirable:
            weights = class_weights(config.desirable_weight, config.undesirable_weight, kept.label.tolist())
            audit.balance = weights[0] * desirable / (weights[1] * undesirable)
            audit.weighted = (config.desirable_weight, config.undesirable_weight) != (1.0, 1.0)
        audit.conflicts = _tally(kept[kept.groupby(keys[0]).label.transform("nunique") == 2])
    return audit


def _examples(
    raw: AnyDataset, method: Reader, tokenizer: PreTrainedTokenizerBase, config: Any, name: str
) -> tuple[pd.DataFrame, list[str]]:
    """Return a table with one row per example, and the names of the columns with the keys of examples.

    The other columns are `FACTS` and the label, the number of tokens of the prompt and of each answer under the names
    of their ids, and `is_copy`: whether the example comes from a repeated row of a source with a weight above 1.
    """
    rows = tokenize_dataset(raw, method, tokenizer, config, name)
    if not isinstance(rows, datasets.Dataset):
        rows = first_rows(rows, STREAMED)
    scalars = [column for column, feature in rows.features.items() if isinstance(feature, datasets.Value)]
    table = rows.select_columns(scalars).to_pandas()
    for column in ("prompt_ids", *method.rows.answers):
        table[column] = column_lengths(rows, column)
    for column in method.rows.answers if method.rows.paired or method.rows.labeled else ():
        starts = pc.list_slice(rows.with_format("arrow")[column][:], 0, 1).to_pylist()
        table[f"first {column}"] = [ids[0] if ids else -1 for ids in starts]

    # a hash of the prompt with each answer, so that a pair has two keys
    hashes = np.asarray(pc.list_flatten(rows.with_format("arrow")["keys"][:])).reshape(len(rows), -1)
    keys = [f"key {n}" for n in range(hashes.shape[1])]
    table[keys] = hashes

    table["is_copy"] = False
    if getattr(raw, "_indices", None) is not None:
        stored_row = raw._indices.column(0).to_numpy()[table.row]
        table["is_copy"] = table.row != table.groupby(stored_row).row.transform("first")
    return table, keys


def _find_marker(kept: pd.DataFrame, kind: RowKind, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a sentence about a first token of most good answers that bad ones lack, or the reverse; None without one.

    Args:
        kept: The rows of the first result of `_examples` that are kept.
        kind: The kind of rows of the method, which are pairs or labeled.
        tokenizer: The student's tokenizer.
    """
    if kind.paired:
        sides = {column.removesuffix("_ids"): kept[f"first {column}"] for column in kind.answers}
    else:
        first = kept["first completion_ids"]
        sides = {"desirable": first[kept.label], "undesirable": first[~kept.label]}
    if min(map(len, sides.values())) < MARKER_ANSWERS:
        return None
    for (name, tokens), (other_name, others) in itertools.permutations(sides.items()):
        token = tokens.mode()[0]
        count = int((tokens == token).sum())
        other_count = int((others == token).sum())
        if count > MARKER_SHARE * len(tokens) and other_count < (1 - MARKER_SHARE) * len(others):
            text = tokenizer.decode([token])
            other = f"{other_count} of {len(others)} {other_name} ones"
            return f"{count} of {len(tokens)} {name} answers begin with {text!r}, and {other}"
    return None


def _tally(examples: pd.DataFrame) -> Tally:
    return Tally(len(examples), examples.row.unique()[:5].tolist())


def _truncations(examples: pd.DataFrame, reasons: dict[int, str]) -> list[Truncation]:
    """Return the examples of each reason, which is identified by its state bits, without reasons that do not occur."""
    bits = examples.state & max(reasons)  # the last reason has the bits of all reasons
    tallies = {reason: _tally(examples[bits == value]) for value, reason in reasons.items()}
    return [Truncation(tally.count, tally.first_rows, reason) for reason, tally in tallies.items() if tally.count]


def _lengths(examples: pd.DataFrame, kept: pd.DataFrame, kind: RowKind) -> dict[str, dict[str, float] | None]:
    """Return `DataAudit.lengths` of all examples and the kept ones among them."""
    answers = kept[[*kind.answers]].to_numpy()
    lengths = {"prompt": kept.prompt_ids, "completion": answers.ravel() if answers.any() else []}
    # the two sides, which should not be distinguishable by their lengths
    if kind.paired:
        lengths |= {column.removesuffix("_ids"): kept[column] for column in kind.answers}
    if kind.labeled:
        lengths |= {"desirable": kept.completion_ids[kept.label], "undesirable": kept.completion_ids[~kept.label]}
    lengths["total"] = [] if kind.sampled else kept.prompt_ids + answers.max(axis=1)
    lengths |= {"trained": kept.trained if kind.masked else [], "uncut": examples.uncut}

    statistics: dict[str, dict[str, float] | None] = dict.fromkeys(lengths)
    for name, tokens in lengths.items():
        if len(tokens):
            # percentiles are lengths that occur: the smallest length that this percentage does not exceed
            percentiles = np.percentile(tokens, (0, 50, 95, 99, 100), method="inverted_cdf").tolist()
            values = dict(zip(("min", "p50", "p95", "p99", "max"), percentiles, strict=True))
            statistics[name] = {**values, "mean": round(float(np.mean(tokens)), 1)}
    return statistics
