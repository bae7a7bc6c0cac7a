"""Examples as text with their trained tokens marked, and statistics of the beginnings and ends of examples."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import compress, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from ..data import chat
from ..data.align import Aligner
from ..data.dataset_type import AnyDataset
from ..data.encode import NO_TARGET
from ..data.images import get_image_reader, image_size
from ..data.prepare import tokenize_dataset
from ..data.row_schema import SOURCE_COLUMN, Reader, RowKind
from ..data.sources import load
from ..errors import InputError, count_noun, error_context, printable
from ..methods.rules import POLICY_GRADIENT
from ..recipe.sections import Recipe

if TYPE_CHECKING:  # the command `data` uses this module, and these imports take seconds
    from transformers import PreTrainedModel

    from ..trainer.config import PostTrainConfig

SAMPLES_PER_SOURCE = 3
"""Number of samples of each source."""
AUDITED_ROWS = 1000
"""Number of rows of each source whose beginnings and ends are counted."""
PADDED_SHARE = 0.1
"""Share of examples with padding tokens inside them from which a warning is given."""
ALIGNED_ANSWERS = 200
"""Number of answers that are aligned with a teacher's tokens."""
BOUNDARY_CHARACTERS = 24
"""Number of characters on each side of the boundary between prompt and trained text."""
MAX_CHARACTERS = 1500
"""Number of characters to which a piece is shortened."""
PLAIN = "\033[0m"
BOLD = "\033[1m"
GREEN = "\033[1;32m"
YELLOW = "\033[33m"
RED = "\033[1;31m"
_RUNS = re.compile(r"(<[^<>\s]+>)\1{3,}")  # an image is one token many times
Part: TypeAlias = tuple[str, Sequence[Any], Sequence[int]]
"""The prompt or an answer: role, values (ids, or parts of a raw row), and for each value whether it is trained."""


@dataclass
class Piece:
    """Consecutive tokens that are either all trained or all not trained."""

    role: str  # prompt, completion, chosen or rejected
    trained: bool  # whether the loss counts these tokens
    text: str  # their text with special tokens; shortened, with control characters escaped
    tokens: int  # number of tokens


@dataclass
class Sample:
    """An example as it is trained."""

    source: str  # the key of the recipe and its file
    row: int  # number among the audited examples of the source, from 0
    label: bool | None  # whether a labeled answer is desirable
    pieces: list[Piece]  # the prompt, then every answer
    read_by_teacher: str | None = None  # input of the teacher in place of the prompt, if it differs

    @property
    def boundary(self) -> str:
        """The text on both sides of the first trained token, with line breaks and spaces visible."""
        before = ""
        for piece in self.pieces:
            if piece.trained:
                return f"{before[-BOUNDARY_CHARACTERS:]!r} | {piece.text[:BOUNDARY_CHARACTERS]!r}"
            before = piece.text
        return "no token of the row is trained, because rollouts replace the answer"

    def title(self) -> str:
        """Return the title of the sample."""
        label = "" if self.label is None else ", desirable" if self.label else ", undesirable"
        trained = sum(piece.tokens for piece in self.pieces if piece.trained)
        total = sum(piece.tokens for piece in self.pieces)
        return f"Sample: {self.source}, example {self.row}{label} ({trained} of {total} tokens trained)"

    def lines(self, color: bool) -> list[str]:
        """Return the lines of the sample.

        The prompt and a single answer are one text, and several answers are on separate lines. color: as in
        `mark_trained`.
        """
        answers = dict.fromkeys(piece.role for piece in self.pieces if piece.role != "prompt")
        paired = answers if len(answers) > 1 else {}
        text = mark_trained([piece for piece in self.pieces if piece.role not in paired], color)
        for role in paired:
            text += f"\n{role}: {mark_trained([piece for piece in self.pieces if piece.role == role], color)}"
        if self.read_by_teacher is not None:
            text += f"\nthe teacher reads: {self.read_by_teacher}"
        return text.split("\n")


@dataclass
class TokenAudit:
    """Statistics of the beginnings and ends of examples, and samples of them."""

    samples: list[Sample] = field(default_factory=list)  # SAMPLES_PER_SOURCE of each source
    examples: int = 0  # number of audited examples
    bos: str | None = None  # the token that texts begin with, if the tokenizer has one for this alone
    doubled: int = 0  # examples that begin with it twice; templates may write it elsewhere, such as before each turn
    bos_counts: dict[int, int] = field(default_factory=dict)  # number of BOS tokens in an example -> examples
    stops: dict[int, str] = field(default_factory=dict)  # ids that end an answer, here and in generation -> tokens
    answers: int = 0  # audited answers that are trained: completions, or chosen and rejected
    ended: int = 0  # those with one of `stops` as last token, trained
    masked_ends: int = 0  # those with one of `stops` as last token, not trained
    pad: str | None = None  # the padding token
    pad_is_eos: bool = False  # harmless: trained tokens are determined by lengths, never by the pad id
    padded: int = 0  # examples with a padding token that is not the EOS; some tokenizers use it for unknown text
    differing_prompts: int | None = None  # prompts that the teacher's template renders differently, of the first ones
    teacher_stops: dict[int, str] | None = None  # ids that end the teacher's answers; rollouts stop at any of both
    one_outcome: dict[int, str] | None = None  # ids of both that the loss counts as one outcome
    pictures: list[tuple[int, int, int]] = field(default_factory=list)  # width, height and feature tokens of each image
    sees: bool = False  # whether images are read
    alignment: dict[str, float] | None = None  # for a teacher with its own tokenizer: shares of trained tokens
    compares_vocabularies: bool = True  # whether its loss compares all tokens; a server scores only the text

    def warnings(self) -> Iterator[str]:
        """Yield problems that would ruin training."""
        if self.doubled:
            problem = f"{self.doubled} of {self.examples} examples begin with {self.bos} twice"
            yield f"{problem}. Remove it from the texts, or from the chat template"
        if self.answers and not self.ended:
            ends = ", ".join(self.stops.values())
            problem = f"no answer ends with a trained {ends}. The model would never learn to stop"
            masked = f"{self.masked_ends} answers have it, but it is masked or has weight 0. Train their last token"
            yield f"{problem}. {masked if self.masked_ends else 'Raise train.max_length'}"
        if self.padded > PADDED_SHARE * self.examples:
            cause = "The texts contain it, or it represents text that this tokenizer does not know"
            fix = "Remove it from the texts, or use another tokenizer"
            yield f"{self.padded} of {self.examples} examples contain the padding token {self.pad}. {cause}. {fix}"
        if self.differing_prompts:
            prompts = f"{self.differing_prompts} of the first {SAMPLES_PER_SOURCE} prompts"
            fix = "It would score text unlike its training data. Set model.chat_template to use one template for both"
            yield f"the teacher's own template renders {prompts} differently from the student's. {fix}"

    def lines(self) -> Iterator[str]:
        """Yield the lines of the page."""
        counts = ", ".join(f"{number} x in {count}" for number, count in sorted(self.bos_counts.items()))
        examples = count_noun(self.examples, "example")
        yield f"BOS: {self.bos}, {counts} of {examples}" if self.bos else "BOS: the tokenizer has none"
        if self.answers:
            yield f"end: {self.ended} of {self.answers} answers end with a trained {' or '.join(self.stops.values())}"
        for name, stops in (("generation", self.stops), ("the teacher", self.teacher_stops)):
            if stops is not None:
                yield f"{name} stops at " + ", ".join(f"{token} ({i})" for i, token in stops.items())
        if self.one_outcome is not None:
            merged = ", ".join(f"{token} ({i})" for i, token in self.one_outcome.items())
            separate = "none, each is compared separately (train.teacher.merge_eos)"
            yield f"one outcome in the loss: {merged or separate}"
        if self.alignment is not None:
            one_to_one = f"{self.alignment['one_to_one']:.1%}"
            aligned = f"{one_to_one} of the trained tokens align with one token of the teacher"
            yield f"alignment: {aligned}, {self.alignment['unaligned']:.1%} have no common text"
            if self.compares_vocabularies:
                limit = f"at most {one_to_one}, depending on the probabilities of both models"
                yield f"compared in full: {limit} (--probe measures it)"
        if self.sees:
            sizes = sorted(self.pictures, key=itemgetter(2))
            summary = "none in the audited examples"
            if sizes:
                (w, h, fewest) = sizes[0]
                (width, height, most) = sizes[-1]
                mean = sum(tokens for *_, tokens in sizes) / len(sizes)
                summary = f"{len(sizes)} in {examples}, {mean:.0f} tokens each on average, "
                summary += f"from {fewest} of {w} x {h} pixels to {most} of {width} x {height}"
            yield f"images: {summary}"
        eos = " (also the EOS token, which is still trained at the end of an answer)" if self.pad_is_eos else ""
        yield f"padding: {self.pad}{eos}"


def row_parts(row: Mapping[str, Any], kind: RowKind) -> Iterator[Part]:
    """Yield the prompt of a prepared row, then its answers.

    Answers that are yet to be sampled have no trained token.
    """
    yield "prompt", row["prompt_ids"], [0] * len(row["prompt_ids"])
    for column in kind.answers:
        ids = row.get(column) or []
        yield column.removesuffix("_ids"), ids, row.get("completion_mask") or [int(not kind.sampled)] * len(ids)


def split_pieces(parts: Iterable[Part], write: Callable[[Any], str]) -> list[Piece]:
    """Split each part where training begins or ends.

    Args:
        parts: Parts of a row.
        write: Function that returns the text of some values of a part, such as a tokenizer's `decode` of ids.
    """
    half = MAX_CHARACTERS // 2
    pieces = []
    for role, values, mask in parts:
        for trained, pairs in groupby(zip(values, mask, strict=True), key=lambda pair: bool(pair[1])):
            run = [value for value, _ in pairs]
            text = _RUNS.sub(lambda hit: f"{len(hit[0]) // len(hit[1])} x {hit[1]}", write(run))
            # of a long text the beginning and the end; control characters are escaped
            if len(text) > MAX_CHARACTERS:
                text = f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"
            pieces.append(Piece(role, trained, printable(text, keep="\n"), len(run)))
    return pieces


def mark_trained(pieces: Iterable[Piece], color: bool) -> str:
    """Return the text of all pieces with marks around trained tokens: a color, or [[double brackets]]."""
    before, after = (GREEN, PLAIN) if color else ("[[", "]]")
    return "".join(f"{before}{piece.text}{after}" if piece.trained else piece.text for piece in pieces)


def audit_tokens(
    recipe: Recipe,
    tokenizer: Any,
    config: Any,
    models: Sequence["PreTrainedModel"],
    raw: Mapping[str, AnyDataset],
) -> TokenAudit:
    """Audit the first AUDITED_ROWS rows of every source, prepared as for training without packing.

    The rows of a data set with one source come from the cache that `prepare_data` has filled.

    Args:
        recipe: The recipe.
        tokenizer: Tokenizer of the policy.
        config: Config of the run.
        models: The policy, and teachers in memory, without weights.
        raw: Raw rows of each data set.

    Raises:
        InputError: A row is invalid.
    """
    from ..models.load import load_generation_config, load_tokenizer
    from ..models.policy import find_terminal_ids, terminal_ids_from_config
    from ..recipe.datasets import dataset_names

    # special tokens: terminal ids, BOS and padding
    method = recipe.data_method
    kind = recipe.data_method.rows
    trains_data = getattr(config, "lmbda", 1) < 1  # in OPD some prompts are trained on answers of the data
    kind = replace(kind, sampled=kind.sampled and not trains_data)
    ends = [find_terminal_ids(model, tokenizer, config.chat_template_kwargs) for model in models]
    stops = [dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)) for ids in ends]
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    audit = TokenAudit(stops=stops[0], pad=tokenizer.pad_token, pad_is_eos=pad == eos)

    raw_by_source = {}  # the rows of each source that training reads, without copies
    names = dataset_names(recipe)  # of tokenized data sets -> their names in messages
    complete = {f"data.{name}": rows for name, rows in raw.items() if isinstance(rows, datasets.Dataset)}
    for key, source in recipe.sources():
        is_tokenized = key in complete and source.weight == 1
        weight = 1.0 if source.streaming else min(source.weight, 1.0)
        with error_context(recipe.where(f"{key}.path")):
            with_source = config.log_loss_by == SOURCE_COLUMN
            part = replace(source, weight=weight)
            raw_by_source[key] = complete[key] if is_tokenized else load(part, key, with_source=with_source)
        if not is_tokenized:
            names.pop(key, None)

    teachers = [section for _, section in recipe.teacher_sections() if not (section.self or section.own_tokenizer)]
    if teachers:
        served = [
            terminal_ids_from_config(load_generation_config(section), tokenizer, config.chat_template_kwargs)
            for section in teachers
            if section.url
        ]
        teacher_stops = {end: tokenizer.convert_ids_to_tokens(end) for ids in (*ends[1:], *served) for end in ids}
        audit.teacher_stops = teacher_stops
        audit.differing_prompts = 0
        audit.one_outcome = stops[0] | teacher_stops if config.teacher.merge_eos else {}
        key, source_rows = next(iter(raw_by_source.items()))
        tokenizers = tokenizer, load_tokenizer(teachers[0])
        with suppress(InputError):  # the teacher has no chat template to compare with
            first = [_first_examples(source_rows, method, t, config, key, SAMPLES_PER_SOURCE) for t in tokenizers]
            pairs = zip(*first, strict=True)
            audit.differing_prompts = sum(ours["prompt_ids"] != theirs["prompt_ids"] for ours, theirs in pairs)

    # the examples of all sources, and samples of each: the first, the middle and the last
    examples: list[list[Part]] = []
    reader = get_image_reader(tokenizer)
    audit.sees = reader is not None
    decode = {
        name.partition(".")[2]: (load_tokenizer(section) if section.own_tokenizer else tokenizer).decode
        for name, section in recipe.teacher_sections()
    }
    for key, source in recipe.sources():
        with error_context(recipe.where(f"{key}.path")):
            if key in names:
                tokenized = tokenize_dataset(raw_by_source[key], method, tokenizer, config, names[key])
                rows = list(tokenized.select(np.flatnonzero(np.asarray(tokenized["row"][:]) < AUDITED_ROWS)))
            else:
                rows = _first_examples(raw_by_source[key], method, tokenizer, config, key, AUDITED_ROWS)
        rows = [row for row in rows if not row["state"] & NO_TARGET]
        if reader is not None:
            for image in (image for row in rows for image in row["images"] or ()):
                audit.pictures.append((*image_size(image), reader.count_features(reader.expansion(image))))
        for n in sorted({0, len(rows) // 2, len(rows) - 1}) if rows else []:
            pieces = split_pieces(row_parts(rows[n], kind), tokenizer.decode)
            teacher_ids = rows[n].get("teacher_prompt_ids")
            text = decode[rows[n].get("teacher") or ""](teacher_ids) if teacher_ids else None
            read_by_teacher = printable(str(text))[:MAX_CHARACTERS] if teacher_ids else None
            audit.samples.append(Sample(f"{key} ({source.path})", n, rows[n].get("label"), pieces, read_by_teacher))
        examples += [list(row_parts(row, kind)) for row in rows]

    # beginnings and ends; a prompt is read once with each answer
    audit.examples = len(examples)
    if bos not in (None, eos):
        audit.bos = tokenizer.bos_token
        counts = [[ids.count(bos) for _, ids, _ in example] for example in examples]
        audit.doubled = sum(example[0][1][:2] == [bos, bos] for example in examples)
        audit.bos_counts = dict(Counter(prompt + max(answers) for prompt, *answers in counts))
    template_ids: set[int] = set()
    if tokenizer.chat_template:
        with suppress(InputError):
            template_ids = chat.template_special_ids(tokenizer, config.chat_template_kwargs)
    if not audit.pad_is_eos and pad not in template_ids | {bos, *audit.stops}:
        audit.padded = sum(any(pad in ids for _, ids, _ in example) for example in examples)
    trained = [(ids, mask) for example in examples for _, ids, mask in example if any(mask)]
    audit.answers = len(trained)
    stop_masks = [bool(mask[-1]) for ids, mask in trained if ids[-1] in audit.stops]
    audit.ended = sum(stop_masks)
    audit.masked_ends = len(stop_masks) - audit.ended
    aligned = next((section for _, section in recipe.teacher_sections() if section.own_tokenizer), None)
    if aligned is not None:
        audit.compares_vocabularies = not aligned.url and getattr(config, "loss_type", "") != POLICY_GRADIENT
        audit.alignment = _alignment(tokenizer, load_tokenizer(aligned), [*audit.stops], trained[:ALIGNED_ANSWERS])
    return audit


def _alignment(
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    ends: list[int],
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> dict[str, float] | None:
    """Return shares of the trained tokens of answers; None without an answer, and for equal tokenizers.

    Args:
        student: Tokenizer of the student.
        teacher: Tokenizer of the teacher.
        ends: Ids that end an answer of the student.
        answers: Ids and mask of each answer.

    Returns:
        `one_to_one`, tokens that align with one token of the teacher, and `unaligned`, tokens without common text.
    """
    if not answers or student.get_vocab() == teacher.get_vocab():
        return None
    aligner = Aligner(student, teacher, ends, teacher.eos_token_id)
    counts = Counter[str]()
    for ids, mask in answers:
        alignment = aligner(ids)
        counts["one_to_one"] += sum(position >= 0 for position in compress(alignment.match, mask))
        counts["unaligned"] += sum(chunk < 0 for chunk in compress(alignment.chunks, mask))
        counts["all"] += sum(map(bool, mask))
    return {name: counts[name] / counts["all"] for name in ("one_to_one", "unaligned")}


def _first_examples(
    raw: Any, method: Reader, tokenizer: PreTrainedTokenizerBase, config: "PostTrainConfig", name: str, count: int
) -> list[dict]:
    """Return the examples of the first `count` raw rows, including those without a trained token."""
    first = raw.select(range(min(count, len(raw)))) if isinstance(raw, datasets.Dataset) else raw.take(count)
    return list(tokenize_dataset(first, method, tokenizer, config, name))
