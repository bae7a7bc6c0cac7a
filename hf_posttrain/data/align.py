"""One text in the tokens of two tokenizers: which of them say the same.

Both cut the text at places of their own; the places that both have cut it into chunks, the smallest parts of which both
models give a probability. Mostly a chunk is one token in both. A text is the bytes of its tokens, so that answers count
as they were sampled, however the tokenizer itself would write them.

    student   | Str | aw | berry |        chunks  | Straw | berry |
    teacher   |  Straw   | b | erry |
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count

from transformers import PreTrainedTokenizerBase

from ..errors import InputError
from . import chat

SPECIAL = -1
"""Where a special token ends in a text: nowhere."""
TRIED = "1+23=24"
"""A text that every tokenizer can write: is it there again in the bytes of its tokens?"""


@dataclass(frozen=True)
class Aligned:
    """An answer in the teacher's tokens, and how they lie alongside the student's."""

    ids: list[int]  # the teacher's
    chunks: list[int]  # of each of the student's tokens: the chunk that it is of, -1 where none is common to both
    their_chunks: list[int]  # the same of the teacher's
    settled: list[bool]  # of each chunk: was its beginning known before what it says? See `Aligner`

    @property
    def count(self) -> int:
        """Of chunks."""
        return len(self.settled)

    @cached_property
    def match(self) -> list[int]:
        """Of each of the student's tokens the teacher's token that says the same alone and can be compared with it in
        full, -1 where there is none."""
        mine, theirs = _by_chunk(self.chunks), _by_chunk(self.their_chunks)
        alone = {chunk: places[0] for chunk, places in theirs.items()
                 if self.settled[chunk] and len(places) == len(mine.get(chunk, ())) == 1}  # fmt: skip
        return [alone.get(chunk, -1) for chunk in self.chunks]


def _by_chunk(chunks: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for place, chunk in enumerate(chunks):
        if chunk >= 0:
            found.setdefault(chunk, []).append(place)
    return found


class Aligner:
    """Answers of a student, in the tokens of a teacher. ends: the student's terminal ids, what rows end with first;
    their_end: the teacher's. Raises InputError for a tokenizer whose tokens are not the bytes of a text.

    A teacher that has tokens 9 and 95 writes 9 only where the number ends: behind its 9 it expects no digit. A student
    that writes digit by digit has decided nothing yet. So the teacher's distribution there tells what comes next, and
    is none for the student. The beginning of a chunk is settled where no token of the teacher's alone goes on from the
    one before.
    """

    def __init__(self, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, ends: Sequence[int],
                 their_end: int):  # fmt: skip
        self.student, self.teacher, self.ends, self.their_end = student, teacher, list(ends), their_end
        self.mine, self.theirs = (_spellings(tokenizer) for tokenizer in (student, teacher))
        alone = {*self.theirs.values()} - {*self.mine.values()}
        self.going_on = {spelt[:end] for spelt in alone for end in range(1, len(spelt))}
        """What some token of the teacher's alone begins with."""

    def __call__(self, ids: Sequence[int]) -> Aligned:
        """An answer, which stands behind some prompt."""
        ended = bool(ids) and ids[-1] in self.ends
        said, cuts = spell(self.mine, ids[:-1] if ended else ids)
        theirs = self._tokens(said)
        their_text, their_cuts = spell(self.theirs, theirs)
        # behind the first byte that differs nothing is common: there the answer is no valid text
        same = chat.shared_length(said, their_text)
        common = sorted({cut for cut in cuts if 0 < cut <= same} & {*their_cuts})
        mine, others = _chunks(cuts, common), _chunks(their_cuts, common)
        if ended:  # by whatever token: a chunk of its own
            theirs, mine, others = [*theirs, self.their_end], [*mine, len(common)], [*others, len(common)]
        last = {chunk: token for token, chunk in zip(theirs, others, strict=True)}
        before = (self.theirs.get(last[chunk - 1]) for chunk in range(1, len(common) + ended))
        settled = [True, *(spelt not in self.going_on for spelt in before)]
        return Aligned(theirs, mine, others, settled[: len(common) + ended])

    def _tokens(self, said: bytes) -> list[int]:
        """The teacher's tokens of a text that stands behind a prompt: of several ways those that say it."""
        ways = chat.ways_behind(self.teacher, said.decode(errors="replace"))
        return next((ids for ids in ways if spell(self.theirs, ids)[0] == said), ways[0])


def _spellings(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """`bytes_of` a tokenizer, tried on a text."""
    if tokenizer.is_fast:
        spellings = bytes_of(tokenizer)
        if any(spell(spellings, ids)[0] == TRIED.encode() for ids in chat.ways_behind(tokenizer, TRIED)):
            return spellings
    said = f"{type(tokenizer).__name__} {tokenizer.name_or_path}".strip()
    kinds = "only fast tokenizers of bytes, or in the manner of sentencepiece"
    raise InputError(f"{said} cannot be aligned with another: {kinds}")


def spell(spellings: Mapping[int, bytes], ids: Sequence[int]) -> tuple[bytes, list[int]]:
    """The text of tokens, special ones left out; and where in it each of them ends, SPECIAL of a special one."""
    said = [spellings.get(token, b"") for token in ids]
    ends = accumulate(map(len, said))
    return b"".join(said), [end if token in spellings else SPECIAL for token, end in zip(ids, ends, strict=True)]


def _chunks(cuts: Sequence[int], common: Sequence[int]) -> list[int]:
    """Of each token the number of the chunk that it is of, by where it ends; `common` are the ends of the chunks."""
    found, chunk = [-1] * len(cuts), 0
    start = 0  # the first token of the chunk
    for place, cut in enumerate(cuts):
        if chunk < len(common) and cut == common[chunk]:
            found[start : place + 1] = [chunk] * (place + 1 - start)
            chunk, start = chunk + 1, place + 1
    return [-1 if cut == SPECIAL else chunk for cut, chunk in zip(cuts, found, strict=True)]


def shared_ids(student: Mapping[int, bytes], teacher: Mapping[int, bytes]) -> tuple[list[int], list[int]]:
    """The ids, the student's and the teacher's, that stand for the same bytes by the `bytes_of` both tokenizers."""
    sides = []
    for spellings in (student, teacher):
        by_bytes: dict[bytes, int] = {}
        for token, spelt in spellings.items():
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
