"""What is trained, token by token: decoded samples of each source, how they begin and end, what stops generation.

    audit_tokens    the first rows of every source -> TokenAudit
    samples         prepared rows -> Sample, see pieces.py
    prompts_differ  rows whose prompts the teacher's own template and tokenizer would write otherwise
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.encode import NO_TARGET
from ..data.kinds import Reader
from ..data.prepare import tokenised
from ..data.sources import load
from ..errors import InputError, error_context
from ..methods import METHODS
from ..models.load import load_tokenizer
from ..models.prepare import find_terminal_ids
from ..recipe.sections import Recipe
from .pieces import Piece, branches, pieces

SHOWN = 3
"""Samples of each source."""
LOOKED_AT = 1000
"""Rows of each source that ends and beginnings are counted in."""
PADDED_SHARE = 0.1
"""Of the examples: so many hold the padding token before it is warned of."""
EDGE = 24
"""Characters on both sides of the boundary between prompt and trained text."""


@dataclass
class Sample:
    """An example as it is trained."""

    source: str
    """The key of the recipe and its file."""
    row: int
    """Number of the example among those of the source that were looked at, from 0."""
    label: bool | None
    """Of KTO: is it desirable?"""
    pieces: list[Piece]
    """The prompt, then every branch."""

    @property
    def boundary(self) -> str:
        """Where the first trained token begins, with line breaks and spaces to be seen."""
        first = next((n for n, piece in enumerate(self.pieces) if piece.trained), None)
        if first is None:
            return "no token is trained: the student samples its own answers"
        before = self.pieces[first - 1].text if first else ""
        return f"{before[-EDGE:]!r} | {self.pieces[first].text[:EDGE]!r}"


@dataclass
class TokenAudit:
    """What stands at the edges of the examples, and samples of them."""

    samples: list[Sample] = field(default_factory=list)
    """SHOWN of each source."""
    examples: int = 0
    """How many were looked at."""
    bos: str | None = None
    """The token that texts begin with, if the tokenizer has one of its own."""
    bos_counts: dict[int, int] = field(default_factory=dict)
    """How often it stands in an example -> examples."""
    stops: dict[int, str] = field(default_factory=dict)
    """Ids that end an answer, in training and in generation, and their tokens."""
    answers: int = 0
    """Trained answers that were looked at: completions, or chosen and rejected."""
    ended: int = 0
    """Of them: whose last token is one of `stops` and is trained."""
    pad: str | None = None
    """The padding token."""
    pad_is_eos: bool = False
    """Is it the eos? Harmless here: what is trained comes from lengths, never from the pad id."""
    padded: int = 0
    """Examples that hold the padding token, where it is not the eos: some tokenizers write it for unknown text."""
    differing_prompts: int | None = None
    """With a teacher: how many of the first SHOWN prompts its own template and tokenizer would write otherwise."""
    teacher_stops: dict[int, str] | None = None
    """With a teacher: the ids that end its answers. OPD's rollouts stop at any of both."""

    def warnings(self) -> Iterator[str]:
        """What would ruin training."""
        doubled = sum(count for number, count in self.bos_counts.items() if number > 1)
        if doubled:
            yield f"{doubled} of {self.examples} examples hold {self.bos} more than once: take it out of the texts"
        if self.answers and not self.ended:
            ends = ", ".join(self.stops.values())
            yield f"no answer ends with a trained {ends}: the model would never learn to stop; raise train.max_length"
        if self.padded > PADDED_SHARE * self.examples:
            yield (
                f"{self.padded} of {self.examples} examples hold the padding token {self.pad}: it was in the texts, or"
                " stands for what this tokenizer does not know: clean them, or use another tokenizer"
            )
        if self.differing_prompts:
            yield (
                f"the teacher's own template writes {self.differing_prompts} of the first {SHOWN} prompts otherwise"
                " than the student's: it would score text unlike what it was trained on (model.chat_template names one)"
            )

    def lines(self) -> Iterator[str]:
        """The text for people, without the samples."""
        counts = ", ".join(f"{number} x in {count}" for number, count in sorted(self.bos_counts.items()))
        yield f"BOS: {self.bos}, {counts} of {self.examples} examples" if self.bos else "BOS: the tokenizer has none"
        if self.answers:
            yield f"end: {self.ended} of {self.answers} answers end with a trained {' or '.join(self.stops.values())}"
        yield f"generation stops at {_listed(self.stops)}"
        if self.teacher_stops is not None:
            yield f"the teacher stops at {_listed(self.teacher_stops)}"
        also = " (also the eos, which is trained all the same where it ends an answer)" if self.pad_is_eos else ""
        yield f"padding: {self.pad}{also}"


def audit_tokens(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, config: Any, models: Sequence[PreTrainedModel]
) -> TokenAudit:
    """The first LOOKED_AT rows of every source, prepared as training prepares them (unpacked).

    models: the policy, and the teacher where there is one; they need no weights. Raises InputError for a row that
    cannot be read.
    """
    stops = [_named(find_terminal_ids(model, tokenizer, config.chat_template_kwargs), tokenizer) for model in models]
    found = TokenAudit(stops=stops[0], pad=tokenizer.pad_token)
    if recipe.teacher:
        found.teacher_stops, theirs = stops[1], load_tokenizer(recipe.teacher)
        found.differing_prompts = prompts_differ(recipe, [tokenizer, theirs], config)
    found.pad_is_eos = tokenizer.pad_token_id == tokenizer.eos_token_id
    bos = None if tokenizer.bos_token_id in (None, tokenizer.eos_token_id) else tokenizer.bos_token_id
    found.bos = None if bos is None else tokenizer.bos_token
    for key, source in recipe.sources():
        with error_context(recipe.where(f"{key}.path")):
            rows = _examples(load(source, key), METHODS[recipe.method], tokenizer, config, key)
        found.samples += samples(rows, METHODS[recipe.method], tokenizer, f"{key} ({source.path})")
        for row in rows:
            _count_edges(row, METHODS[recipe.method], found, bos)
            found.padded += not found.pad_is_eos and tokenizer.pad_token_id in _all_ids(row, METHODS[recipe.method])
    return found


def samples(rows: list[dict], method: Reader, tokenizer: PreTrainedTokenizerBase, source: str) -> list[Sample]:
    """The first, the middle and the last of prepared rows."""
    numbers = sorted({0, len(rows) // 2, len(rows) - 1}) if rows else []
    return [Sample(source, n, rows[n].get("label"), pieces(rows[n], method, tokenizer)) for n in numbers]


def prompts_differ(recipe: Recipe, tokenizers: Sequence[PreTrainedTokenizerBase], config: Any) -> int:
    """Of the first rows of data.train: how many have other prompt ids with the second tokenizer than with the first."""
    key, source = next(recipe.sources())
    try:
        ids = [_examples(load(source, key), METHODS[recipe.method], t, config, key, SHOWN) for t in tokenizers]
    except InputError:  # the teacher has no chat template: nothing to compare with
        return 0
    return sum(student["prompt_ids"] != teacher["prompt_ids"] for student, teacher in zip(*ids, strict=True))


def _examples(
    raw: Any, method: Reader, tokenizer: PreTrainedTokenizerBase, config: Any, name: str, count: int = LOOKED_AT
) -> list[dict]:
    """What the first `count` raw rows become, those that train something."""
    first = raw.select(range(min(count, len(raw)))) if isinstance(raw, datasets.Dataset) else raw.take(count)
    return [row for row in tokenised(first, method, tokenizer, config, name) if not row["state"] & NO_TARGET]


def _named(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return dict(zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True))


def _listed(named: dict[int, str]) -> str:
    return ", ".join(f"{token} ({i})" for i, token in named.items())


def _all_ids(row: dict, method: Reader) -> list[int]:
    return sum((ids for _, ids, _ in branches(row, method)), row["prompt_ids"])


def _count_edges(row: dict, method: Reader, found: TokenAudit, bos: int | None) -> None:
    """Add a prepared row to the counts."""
    found.examples += 1
    answers = list(branches(row, method))
    if bos is not None:
        number = row["prompt_ids"].count(bos) + max((ids.count(bos) for _, ids, _ in answers), default=0)
        found.bos_counts[number] = found.bos_counts.get(number, 0) + 1
    trained = [(ids, mask) for _, ids, mask in answers if any(mask)]
    found.answers += len(trained)
    found.ended += sum(ids[-1] in found.stops and bool(mask[-1]) for ids, mask in trained)
