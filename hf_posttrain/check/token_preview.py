"""What is trained: examples as text with their trained tokens marked, and how examples begin and end."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import compress, groupby
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from ..data import chat
from ..data.align import Aligner
from ..data.encode import NO_TARGET
from ..data.images import image_size, get_image_reader
from ..data.prepare import tokenize_dataset
from ..data.row_schema import Reader, RowKind
from ..data.sources import load
from ..errors import InputError, error_context, printable
from ..recipe.datasets import dataset_names
from ..recipe.sections import Recipe
from ..trainer.config import PostTrainConfig

SAMPLES_PER_SOURCE = 3  # samples of each source
AUDITED_ROWS = 1000  # rows of each source whose beginnings and ends are counted
PADDED_SHARE = 0.1  # from this share of examples on, padding tokens inside them are a warning
ALIGNED_ANSWERS = 200  # answers that are aligned with a teacher's tokens
BOUNDARY_CHARACTERS = 24  # characters that are shown on each side of the boundary between prompt and trained text
MAX_CHARACTERS = 1500  # characters of a piece that are shown
PLAIN = "\033[0m"
BOLD = "\033[1m"
GREEN = "\033[1;32m"
YELLOW = "\033[33m"
RED = "\033[1;31m"
_RUNS = re.compile(r"(<[^<>\s]+>)\1{3,}")  # a picture is one token many times
# The prompt or an answer: role, values (ids, or parts of a raw row), and for each value whether it is trained
Part = tuple[str, Sequence[Any], Sequence[int]]


@dataclass
class Piece:
    """A run of tokens that are all trained or all not."""

    role: str  # prompt, completion, chosen or rejected
    trained: bool  # does the loss count these tokens?
    text: str  # what they say, special tokens included; shortened, control characters written out
    tokens: int  # how many they are


@dataclass
class Sample:
    """An example as it is trained."""

    source: str  # the key of the recipe and its file
    row: int  # number among the examples of the source that were looked at, from 0
    label: bool | None  # where answers are labelled: is this one desirable?
    pieces: list[Piece]  # the prompt, then every answer
    read_by_teacher: str | None = None  # in place of the prompt, where that is something else

    @property
    def boundary(self) -> str:
        """The text on both sides of the first trained token, with line breaks and spaces visible."""
        before = ""
        for piece in self.pieces:
            if piece.trained:
                return f"{before[-BOUNDARY_CHARACTERS:]!r} | {piece.text[:BOUNDARY_CHARACTERS]!r}"
            before = piece.text
        return "no token of the row is trained: rollouts take the place of the answer"

    def title(self) -> str:
        label = "" if self.label is None else ", desirable" if self.label else ", undesirable"
        trained = sum(piece.tokens for piece in self.pieces if piece.trained)
        whole = sum(piece.tokens for piece in self.pieces)
        return f"Sample: {self.source}, example {self.row}{label} ({trained} of {whole} tokens trained)"

    def lines(self, colour: bool) -> list[str]:
        """Prompt and completion in one piece, as the model reads them; several answers on lines of their own."""
        answers = dict.fromkeys(piece.role for piece in self.pieces if piece.role != "prompt")
        paired = answers if len(answers) > 1 else {}
        whole = mark_trained([piece for piece in self.pieces if piece.role not in paired], colour)
        for role in paired:
            whole += f"\n{role}: {mark_trained([piece for piece in self.pieces if piece.role == role], colour)}"
        if self.read_by_teacher is not None:
            whole += f"\nthe teacher reads: {self.read_by_teacher}"
        return whole.split("\n")


@dataclass
class TokenAudit:
    """How examples begin and end, and samples of them."""

    samples: list[Sample] = field(default_factory=list)  # SAMPLES_PER_SOURCE of each source
    examples: int = 0  # how many were looked at
    bos: str | None = None  # the token that texts begin with, if the tokenizer has one of its own
    doubled: int = 0  # examples that begin with it twice; elsewhere templates write it, before each turn for instance
    bos_counts: dict[int, int] = field(default_factory=dict)  # how often it is in an example -> examples
    stops: dict[int, str] = field(default_factory=dict)  # ids that end an answer, here and in generation -> tokens
    answers: int = 0  # trained answers that were looked at: completions, or chosen and rejected
    ended: int = 0  # of them: the last token is one of `stops` and is trained
    pad: str | None = None  # the padding token
    pad_is_eos: bool = False  # harmless: what is trained comes from lengths, never from the pad id
    padded: int = 0  # examples with the padding token, where it is not the eos: some tokenizers use it for unknown text
    differing_prompts: int | None = (
        None  # of the first SAMPLES_PER_SOURCE prompts: the teacher's template writes them otherwise
    )
    teacher_stops: dict[int, str] | None = None  # ids that end the teacher's answers; rollouts stop at any of both
    one_outcome: dict[int, str] | None = None  # of both, those that the loss counts as one
    pictures: list[tuple[int, int, int]] = field(default_factory=list)  # of each width, height and tokens of features
    sees: bool = False  # are pictures read?
    alignment: dict[str, float] | None = None  # with a teacher that has its own tokenizer: shares of trained tokens

    def warnings(self) -> Iterator[str]:
        if self.doubled:
            said = f"{self.doubled} of {self.examples} examples begin with {self.bos} twice"
            yield f"{said}: take it out of the texts, or out of the chat template"
        if self.answers and not self.ended:
            ends = ", ".join(self.stops.values())
            yield f"no answer ends with a trained {ends}: the model would never learn to stop; raise train.max_length"
        if self.padded > PADDED_SHARE * self.examples:
            why = "it was in the texts, or stands for what this tokenizer does not know"
            remedy = "clean them, or use another tokenizer"
            yield f"{self.padded} of {self.examples} examples hold the padding token {self.pad}: {why}: {remedy}"
        if self.differing_prompts:
            why = "it would score text unlike what it was trained on (model.chat_template names one)"
            of = f"{self.differing_prompts} of the first {SAMPLES_PER_SOURCE} prompts"
            yield f"the teacher's own template writes {of} otherwise than the student's: {why}"

    def lines(self) -> Iterator[str]:
        counts = ", ".join(f"{number} x in {count}" for number, count in sorted(self.bos_counts.items()))
        yield f"BOS: {self.bos}, {counts} of {self.examples} examples" if self.bos else "BOS: the tokenizer has none"
        if self.answers:
            yield f"end: {self.ended} of {self.answers} answers end with a trained {' or '.join(self.stops.values())}"
        for who, stops in (("generation", self.stops), ("the teacher", self.teacher_stops)):
            if stops is not None:
                yield f"{who} stops at " + ", ".join(f"{token} ({i})" for i, token in stops.items())
        if self.one_outcome is not None:
            one = ", ".join(f"{token} ({i})" for i, token in self.one_outcome.items())
            apart = "none: each is compared by itself (train.teacher.merge_eos)"
            yield f"one outcome in the loss: {one or apart}"
        if self.alignment is not None:
            shares = self.alignment
            said = f"{shares['one_to_one']:.1%} of the trained tokens face one token of the teacher"
            yield f"alignment: {said}, {shares['unaligned']:.1%} have no common text"
            most = f"at most {shares['one_to_one']:.1%}, by the probabilities of both models"
            yield f"compared in full: {most} (--probe measures it)"
        if self.sees:
            sizes = sorted(self.pictures, key=lambda one: one[2])
            said = "none in the examples that were looked at"
            if sizes:
                (w, h, few) = sizes[0]
                (width, height, many) = sizes[-1]
                mean = sum(tokens for *_, tokens in sizes) / len(sizes)
                said = f"{len(sizes)} in {self.examples} examples, {mean:.0f} tokens each on average, "
                said += f"from {few} of {w} x {h} pixels to {many} of {width} x {height}"
            yield f"pictures: {said}"
        also = " (also the eos, which is trained all the same where it ends an answer)" if self.pad_is_eos else ""
        yield f"padding: {self.pad}{also}"


def row_parts(row: dict[str, Any], kind: RowKind) -> Iterator[Part]:
    """The prompt of a prepared row, then its answers. Answers that are yet to be sampled train nothing."""
    yield "prompt", row["prompt_ids"], [0] * len(row["prompt_ids"])
    for column in kind.answers:
        ids = row.get(column) or []
        yield column.removesuffix("_ids"), ids, row.get("completion_mask") or [int(not kind.sampled)] * len(ids)


def split_pieces(made: Iterable[Part], write: Callable[[Any], str]) -> list[Piece]:
    """The runs of each part; `write` makes text of some of its values, such as a tokenizer's `decode` of ids."""
    half = MAX_CHARACTERS // 2
    found = []
    for role, values, mask in made:
        for trained, run in groupby(zip(values, mask, strict=True), key=lambda pair: bool(pair[1])):
            part = [value for value, _ in run]
            text = _RUNS.sub(lambda hit: f"{len(hit[0]) // len(hit[1])} x {hit[1]}", write(part))
            # of a long text the beginning and the end; control characters are written out
            if len(text) > MAX_CHARACTERS:
                text = f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"
            found.append(Piece(role, trained, printable(text, keep="\n"), len(part)))
    return found


def mark_trained(runs: Iterable[Piece], colour: bool) -> str:
    """The text of all runs."""
    before, after = (GREEN, PLAIN) if colour else ("[[", "]]")
    return "".join(f"{before}{piece.text}{after}" if piece.trained else piece.text for piece in runs)


def audit_tokens(
    recipe: Recipe, tokenizer: Any, config: Any, models: Sequence[Any], raw: Mapping[str, Any]
) -> TokenAudit:
    """Audit the first AUDITED_ROWS rows of every source, prepared as for training (unpacked).

    models: the policy, and teachers that are loaded, without weights. raw: the rows of each data set. The rows of a
    data set with one source come from the cache that `prepare_data` has filled. Raises InputError for a bad row.
    """
    from ..models.load import load_generation_config, load_tokenizer
    from ..models.policy import find_terminal_ids, terminal_ids_from_config

    # special tokens: what ends an answer, what begins a text, what pads
    method = recipe.data_method
    kind = recipe.data_method.rows
    own_answers = getattr(config, "lmbda", 1) < 1  # OPD's: below 1 some train the answers of the data
    kind = replace(kind, sampled=kind.sampled and not own_answers)
    ends = [find_terminal_ids(model, tokenizer, config.chat_template_kwargs) for model in models]
    stops = [dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)) for ids in ends]
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    found = TokenAudit(stops=stops[0], pad=tokenizer.pad_token, pad_is_eos=pad == eos)
    raws = {}  # the rows of each source that training reads, without copies
    names = dataset_names(recipe)  # those that are tokenised already -> the name of their data set in messages
    whole = {f"data.{name}": rows for name, rows in raw.items() if isinstance(rows, datasets.Dataset)}
    for key, source in recipe.sources():
        tokenised_already = key in whole and source.weight == 1
        weight = 1.0 if source.streaming else min(source.weight, 1.0)
        with error_context(recipe.where(f"{key}.path")):
            raws[key] = whole[key] if tokenised_already else load(replace(source, weight=weight), key)
        if not tokenised_already:
            names.pop(key, None)
    taught = [section for _, section in recipe.teacher_sections() if not (section.self or section.own_tokenizer)]
    if taught:
        served = [
            terminal_ids_from_config(load_generation_config(section), tokenizer, config.chat_template_kwargs)
            for section in taught
            if section.url
        ]
        theirs = {end: tokenizer.convert_ids_to_tokens(end) for ids in (*ends[1:], *served) for end in ids}
        found.teacher_stops = theirs
        found.differing_prompts = 0
        found.one_outcome = stops[0] | theirs if config.teacher.merge_eos else {}
        key, raw = next(iter(raws.items()))
        tokenizers = tokenizer, load_tokenizer(taught[0])
        with suppress(InputError):  # the teacher has no chat template: nothing to compare with
            first = [_first_examples(raw, method, each, config, key, SAMPLES_PER_SOURCE) for each in tokenizers]
            pairs = zip(*first, strict=True)
            found.differing_prompts = sum(ours["prompt_ids"] != theirs["prompt_ids"] for ours, theirs in pairs)

    # the examples of all sources, and samples of each: the first, the middle and the last
    examples: list[list[Part]] = []
    reader = get_image_reader(tokenizer)
    found.sees = reader is not None
    decode = {
        name.partition(".")[2]: (load_tokenizer(section) if section.own_tokenizer else tokenizer).decode
        for name, section in recipe.teacher_sections()
    }
    for key, source in recipe.sources():
        with error_context(recipe.where(f"{key}.path")):
            if key in names:
                every = tokenize_dataset(raws[key], method, tokenizer, config, names[key])
                rows = list(every.select(np.flatnonzero(np.asarray(every["row"][:]) < AUDITED_ROWS)))
            else:
                rows = _first_examples(raws[key], method, tokenizer, config, key, AUDITED_ROWS)
        rows = [row for row in rows if not row["state"] & NO_TARGET]
        if reader is not None:
            for picture in (one for row in rows for one in row["images"] or ()):
                found.pictures.append((*image_size(picture), reader.count_features(reader.expansion(picture))))
        for n in sorted({0, len(rows) // 2, len(rows) - 1}) if rows else []:
            shown = split_pieces(row_parts(rows[n], kind), tokenizer.decode)
            reads = rows[n].get("teacher_prompt_ids")
            source_name = f"{key} ({source.path})"
            read = printable(str(decode[rows[n].get("teacher") or ""](reads)))[:MAX_CHARACTERS] if reads else None
            found.samples.append(Sample(source_name, n, rows[n].get("label"), shown, read))
        examples += [list(row_parts(row, kind)) for row in rows]

    # what is at their edges; a prompt is read once with each answer
    found.examples = len(examples)
    if bos not in (None, eos):
        found.bos = tokenizer.bos_token
        numbers = [[ids.count(bos) for _, ids, _ in example] for example in examples]
        found.doubled = sum(example[0][1][:2] == [bos, bos] for example in examples)
        found.bos_counts = dict(Counter(prompt + max(answers) for prompt, *answers in numbers))
    written: set[int] = set()
    if tokenizer.chat_template:
        with suppress(InputError):
            written = chat.template_special_ids(tokenizer, config.chat_template_kwargs)
    if not found.pad_is_eos and pad not in written | {bos, *found.stops}:
        found.padded = sum(any(pad in ids for _, ids, _ in example) for example in examples)
    trained = [(ids, mask) for example in examples for _, ids, mask in example if any(mask)]
    found.answers = len(trained)
    found.ended = sum(ids[-1] in found.stops and bool(mask[-1]) for ids, mask in trained)
    other = next((section for _, section in recipe.teacher_sections() if section.own_tokenizer), None)
    if other is not None:
        found.alignment = _alignment(tokenizer, load_tokenizer(other), [*found.stops], trained[:ALIGNED_ANSWERS])
    return found


def _alignment(
    student: Any, teacher: Any, ends: list[int], answers: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> dict[str, float] | None:
    """Return shares of the trained tokens of answers (ids, mask): `one_to_one`, those that face one token of the
    teacher, and `unaligned`, those without common text. None without an answer, and for equal tokenizers.
    """
    if not answers or student.get_vocab() == teacher.get_vocab():
        return None
    aligner = Aligner(student, teacher, ends, teacher.eos_token_id)
    counts = Counter[str]()
    for ids, mask in answers:
        aligned = aligner(ids)
        counts["one_to_one"] += sum(place >= 0 for place in compress(aligned.match, mask))
        counts["unaligned"] += sum(chunk < 0 for chunk in compress(aligned.chunks, mask))
        counts["all"] += sum(map(bool, mask))
    return {name: counts[name] / counts["all"] for name in ("one_to_one", "unaligned")}


def _first_examples(
    raw: Any, method: Reader, tokenizer: PreTrainedTokenizerBase, config: PostTrainConfig, name: str, count: int
) -> list[dict]:
    """What the first `count` raw rows become, examples that train nothing included."""
    first = raw.select(range(min(count, len(raw)))) if isinstance(raw, datasets.Dataset) else raw.take(count)
    return list(tokenize_dataset(first, method, tokenizer, config, name))
