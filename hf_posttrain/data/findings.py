"""What the data audit found: a DataAudit of each data set, as counts, as text and as warnings.

    Found, Cut   how many examples something is true of, and the first rows they came from
    DataAudit    all that was counted: `short` for a log line, `lines` for people, `warnings`, asdict for machines

The shares below say from where on a finding would ruin training.
"""

from collections.abc import Iterator
from dataclasses import dataclass

DROPPED_SHARE = 0.1
"""Examples with nothing to train."""
TRUNCATED_SHARE = 0.5
"""Examples that were cut at all."""
ENDLESS_SHARE = 0.2
"""Completions cut off before their end: a model that is shown too few ends does not learn to stop."""
STUB_SHARE = 0.5
"""Examples that train a single token."""
DUPLICATE_SHARE = 0.25
"""Examples that repeat an earlier one."""
IDENTICAL_SHARE = 0.01
"""Pairs whose answers are the same: most losses have no gradient there."""
CONFLICT_SHARE = 0.01
"""Answers that stand in the data under both labels."""
UNKNOWN_SHARE = 0.1
"""Examples with the tokenizer's unknown token."""
BALANCE = 4.0
"""Weight of one class of labels over that of the other."""


@dataclass
class Found:
    """How many examples something is true of."""

    count: int
    """Examples."""
    first_rows: list[int]
    """Numbers of the first raw rows they came from, counted from 0."""

    def __str__(self) -> str:
        rows = ", ".join(map(str, self.first_rows))
        return f"{self.count} (first rows {rows})" if self.count else "0"


@dataclass
class Cut(Found):
    """Examples that were dropped or truncated."""

    reason: str
    """What was lost."""


@dataclass
class DataAudit:
    """What is in a data set as it is trained. Counts are of examples: a pair is one for DPO and two for KTO."""

    name: str
    """What messages call the data set."""
    max_length: int | None
    """Tokens that an example may have."""
    rows_read: int
    """Raw rows; of a stream, those that were looked at."""
    streamed: bool
    """Is it a stream, of which only the beginning was looked at?"""
    examples: int
    """What the rows became, dropped ones included."""
    dropped: list[Cut]
    """Examples that are left out, by reason."""
    truncated: list[Cut]
    """Examples that were cut and are trained, by what was cut."""
    lengths: dict[str, dict[str, float] | None]
    """Tokens of the kept examples, as min, p50, p95, p99, max and mean: `prompt`; `completion`, each of a pair counted;
    `total`, prompt and longest completion; `trained`, SFT's and KD's tokens with a loss; and of all examples `uncut`,
    the total before they were cut. None where there are none."""
    stubs: Found
    """Kept examples that train a single token."""
    duplicates: Found
    """Kept examples with the prompt, answers and label of an earlier one, without copies made by a source's weight."""
    unknown: Found
    """Kept examples with the tokenizer's unknown token."""
    classes: dict[str, int] | None = None
    """KTO: kept examples of each label, `desirable` and `undesirable`."""
    balance: float | None = None
    """KTO: weight of all desirable examples over that of all undesirable ones; None where a class is empty."""
    conflicts: Found | None = None
    """KTO: kept examples whose prompt and answer have the other label elsewhere."""
    identical: Found | None = None
    """DPO: kept examples whose chosen answer is the rejected one, after both were cut."""
    overlap: Found | None = None
    """Of evaluation rows: kept examples with the prompt and an answer of a training example (OPD: the prompt)."""

    @property
    def kept(self) -> int:
        """Examples that are trained."""
        return self.examples - _total(self.dropped)

    def short(self) -> str:
        """One line for the log, beside that of `data.prepare`, which counts what was read, cut and dropped."""
        total = self.lengths["total"] or {}
        parts = [f"tokens p50 {total['p50']} p95 {total['p95']} max {total['max']}"] if total else []
        parts += [f"{found.count} {what}" for what, found in self._findings() if found.count]
        if self.classes:
            parts.append(" and ".join(f"{count} {label}" for label, count in self.classes.items()))
        aside = f", of the first {self.examples} examples of the stream" if self.streamed else ""
        return f"{self.name}: {', '.join(parts)}{aside}"

    def lines(self) -> list[str]:
        """The audit for people: a title and indented lines."""
        out = [f"{self.name}: {self._read()}"]
        for what, cuts in (("dropped", self.dropped), ("truncated", self.truncated)):
            out += [f"  {what}: {cut}, {cut.reason}" for cut in cuts] or [f"  {what}: 0"]
        for what, found in self._findings():
            out.append(f"  {what}: {found}")
        if self.classes:
            out.append("  labels: " + ", ".join(f"{count} {label}" for label, count in self.classes.items()))
        rows = {what: values for what, values in self.lengths.items() if values}
        for what, values in rows.items():
            if what == next(iter(rows)):
                out.append(f"  {'tokens':<14}" + "".join(f"{name:>9}" for name in values))
            out.append(f"    {what:<12}" + "".join(f"{value:>9}" for value in values.values()))
        return out

    def warnings(self) -> list[str]:
        """What would ruin training or make evaluation worthless, a sentence each that says what to do."""
        if not self.kept:
            return [f"{self.name}: all {self.examples} examples are dropped, with no trained token: raise max_length"]
        problems = (*self._lost(), *self._worthless(), *self._unbalanced())
        return [f"{self.name}: {problem}" for problem in problems]

    def _read(self) -> str:
        beyond = " (the first of a stream; the rest is not audited)" if self.streamed else ""
        return f"{self.rows_read} rows read as {self.examples} examples{beyond}"

    def _findings(self) -> Iterator[tuple[str, Found]]:
        every = {
            "duplicates": self.duplicates,
            "with the unknown token": self.unknown,
            "with a single trained token": self.stubs,
            "under both labels": self.conflicts,
            "with chosen = rejected": self.identical,
            "also in train": self.overlap,
        }
        return ((what, found) for what, found in every.items() if found is not None)

    def _lost(self) -> Iterator[str]:
        dropped, truncated = _total(self.dropped), _total(self.truncated)
        endless = sum(cut.count for cut in self.truncated if "completion" in cut.reason)
        longest = (self.lengths["uncut"] or {}).get("max")
        remedy = f"raise max_length from {self.max_length} (the longest has {longest} tokens) or shorten the rows"
        if dropped > DROPPED_SHARE * self.examples:
            yield f"{dropped} of {self.examples} examples are dropped, with no trained token: {remedy}"
        if endless > ENDLESS_SHARE * self.kept:
            yield f"{endless} of {self.kept} examples lose the end of a completion, which says where to stop: {remedy}"
        elif truncated > TRUNCATED_SHARE * self.kept:
            yield f"{truncated} of {self.kept} examples are truncated: {remedy}"
        if self.stubs.count > STUB_SHARE * self.kept:
            yield f"{self.stubs.count} of {self.kept} examples train a single token: are the columns the right ones?"

    def _worthless(self) -> Iterator[str]:
        shares = (
            (self.duplicates, DUPLICATE_SHARE, "examples repeat an earlier one: remove them"),
            (self.unknown, UNKNOWN_SHARE, "examples hold the unknown token: clean them, or use another tokenizer"),
            (self.identical, IDENTICAL_SHARE, "pairs have the same chosen and rejected answer: remove them"),
            (self.conflicts, CONFLICT_SHARE, "answers are labelled desirable and undesirable: keep one label"),
            (self.overlap, 0, "examples are in the training set too, so they measure memory: remove them from one"),
        )
        for found, share, problem in shares:
            if found and found.count > share * self.kept:
                rows = ", ".join(map(str, found.first_rows))
                yield f"{found.count} of {self.kept} {problem} (first rows {rows})"

    def _unbalanced(self) -> Iterator[str]:
        if self.classes is None or self.name.startswith("eval"):
            return
        counts = " and ".join(f"{count} {label}" for label, count in self.classes.items())
        if self.balance is None:
            yield f"{counts} examples: one label alone does not say what to prefer, KTO needs both"
        elif not 1 / BALANCE <= self.balance <= BALANCE:
            rarer = "undesirable_weight" if self.balance > 1 else "desirable_weight"
            yield f"{counts} examples, which weigh {self.balance:.3g} to 1: set train.{rarer}=auto"


def _total(cuts: list[Cut]) -> int:
    return sum(cut.count for cut in cuts)
