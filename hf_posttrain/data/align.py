"""One text in the tokens of two tokenizers: which of them say the same.

Both cut the text at places of their own; the places that both have cut it into chunks, the smallest parts of which both
models give a probability. Mostly a chunk is one token in both. Texts come from decoding token by token, so that answers
count as they were sampled, however the tokenizer itself would write them.

    student   | Str | aw | berry |        chunks  | Straw | berry |
    teacher   |  Straw   | b | erry |
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from ..errors import InputError
from . import chat

SPECIAL = -1
"""Where a special token ends in a text: nowhere."""
BEFORE = 8
"""Tokens of the prompt that are read before an answer: a first word has its space only behind another."""


@dataclass(frozen=True)
class Aligned:
    """An answer in the teacher's tokens, and how they lie alongside the student's."""

    ids: list[int]  # the teacher's
    chunks: list[int]  # of each of the student's tokens: the chunk that it is of, -1 where none is common to both
    their_chunks: list[int]  # the same of the teacher's
    count: int  # of chunks

    @cached_property
    def match(self) -> list[int]:
        """Of each of the student's tokens the teacher's token that says the same alone, -1 where there is none."""
        mine, theirs = _by_chunk(self.chunks), _by_chunk(self.their_chunks)
        alone = {chunk: places[0] for chunk, places in theirs.items() if len(places) == len(mine.get(chunk, ())) == 1}
        return [alone.get(chunk, -1) for chunk in self.chunks]


def _by_chunk(chunks: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for place, chunk in enumerate(chunks):
        if chunk >= 0:
            found.setdefault(chunk, []).append(place)
    return found


class Aligner:
    """Answers of a student, in the tokens of a teacher. Raises InputError for a tokenizer that is not a fast one."""

    def __init__(self, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, ends: Sequence[int],
                 their_end: int):  # fmt: skip
        for tokenizer in (student, teacher):
            if not tokenizer.is_fast:
                raise InputError(f"{type(tokenizer).__name__} cannot be aligned with another: it is no fast tokenizer")
        self.student, self.teacher, self.ends, self.their_end = student, teacher, list(ends), their_end
        self.same = student.get_vocab() == teacher.get_vocab()
        """Are all ids the same? Then nothing needs to be aligned."""

    def __call__(self, prompt: Sequence[int], ids: Sequence[int], their_prompt: Sequence[int]) -> Aligned:
        """An answer behind its prompt as the student has it, and behind that of the teacher."""
        if self.same:
            return Aligned(list(ids), [*range(len(ids))], [*range(len(ids))], len(ids))
        ended = bool(ids) and ids[-1] in self.ends
        said = list(ids[:-1] if ended else ids)
        text, cuts = spell(self.student, prompt, said)
        theirs = self._tokens(their_prompt, text)
        their_text, their_cuts = spell(self.teacher, their_prompt, theirs)
        # behind the first character that differs nothing is common
        same = next((n for n, pair in enumerate(zip(text, their_text, strict=False)) if pair[0] != pair[1]),
                    min(len(text), len(their_text)))  # fmt: skip
        common = sorted({cut for cut in cuts if cut is not None and 0 < cut <= same} & set(their_cuts))
        mine, others = _chunks(cuts, common), _chunks(their_cuts, common)
        count = len(common)
        if ended:  # by whatever token: a chunk of its own
            theirs, mine, others, count = [*theirs, self.their_end], [*mine, count], [*others, count], count + 1
        return Aligned(theirs, mine, others, count)

    def _tokens(self, prompt: Sequence[int], text: str) -> list[int]:
        """The teacher's tokens of a text behind its prompt: of several ways those that say it."""
        ways = chat.ways_behind(self.teacher, text)
        return next((ids for ids in ways if spell(self.teacher, prompt, ids)[0] == text), ways[0])


def spell(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[int], ids: Sequence[int]
) -> tuple[str, list[int | None]]:
    """The text of tokens behind others, special ones left out; and where in it each of them ends: None of one that ends
    within a character, SPECIAL of a special one."""
    backend, special = tokenizer.backend_tokenizer, chat.special_ids(tokenizer)  # type: ignore[attr-defined]
    stream = DecodeStream(ids=list(before[-BEFORE:]), skip_special_tokens=True)
    said = ["" if token in special else stream.step(backend, token) for token in ids]
    ends = accumulate(len(piece or "") for piece in said)
    cuts = [None if piece is None else end for piece, end in zip(said, ends, strict=True)]
    named = [SPECIAL if token in special else cut for token, cut in zip(ids, cuts, strict=True)]
    return "".join(piece or "" for piece in said), named


def _chunks(cuts: Sequence[int | None], common: Sequence[int]) -> list[int]:
    """Of each token the number of the chunk that it is of, by where it ends; `common` are the ends of the chunks."""
    found, chunk = [-1] * len(cuts), 0
    start = 0  # the first token of the chunk
    for place, cut in enumerate(cuts):
        if chunk < len(common) and cut == common[chunk]:
            found[start : place + 1] = [chunk] * (place + 1 - start)
            chunk, start = chunk + 1, place + 1
    return [-1 if cut == SPECIAL else chunk for cut, chunk in zip(cuts, found, strict=True)]


def shared_ids(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids of both that stand for the same bytes, the student's and the teacher's; special ones are left out."""
    sides = []
    for tokenizer in (student, teacher):
        by_bytes: dict[bytes, int] = {}
        for token, spelt in bytes_of(tokenizer).items():
            by_bytes.setdefault(spelt, token)
        sides.append(by_bytes)
    mine, theirs = sides
    both = sorted((mine[spelt], theirs[spelt]) for spelt in mine.keys() & theirs.keys())
    return [pair[0] for pair in both], [pair[1] for pair in both]


def bytes_of(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """The bytes that each id stands for within a text, special ones left out. Last come those of sentencepiece for a
    single byte, which are written where there is no other."""
    special, added = chat.special_ids(tokenizer), tokenizer.get_added_vocab()
    by_byte = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)  # type: ignore[attr-defined]
    table = {character: byte for byte, character in enumerate(_characters())}
    plain, single = {}, {}
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1]):
        if number in special:
            continue
        if token in added or not by_byte:
            byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
            if byte:
                single[number] = bytes.fromhex(byte[1])
            else:
                plain[number] = token.replace("\u2581", " ").encode()
        elif all(character in table for character in token):
            plain[number] = bytes(table[character] for character in token)
    return plain | single


def _characters() -> list[str]:
    """What tokenizers of bytes write for each byte: itself if it is visible in Latin-1, else the next from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(256)
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
