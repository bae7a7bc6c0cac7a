"""One text in the tokens of two tokenizers: which of them say the same.

Both cut the text at places of their own; the places that both have cut it into chunks, the smallest parts of which both
models give a probability. Mostly a chunk is one token in both. A text is the bytes of its tokens, so that answers count
as they were sampled, however the tokenizer itself would write them. Where the teacher's tokenizer changes a text (one é
for e and an accent) both say the same all the same; where it has no words for something (a special token, half a
character) that place alone has no chunk.

    student   | Str | aw | berry |        chunks  | Straw | berry |
    teacher   |  Straw   | b | erry |
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from itertools import accumulate, count, pairwise

from transformers import PreTrainedTokenizerBase

from ..errors import InputError
from . import chat

SPECIAL = -1
"""Where a special token ends in a text: nowhere."""
LEFT_OUT = -2
"""The chunk of tokens of an unfinished last character, which a rollout's end has cut: nobody is told anything there."""
TRIED = "1 + 23 = 24 \u00e9"
"""A text that every tokenizer can write: is it there again in the bytes of its tokens?"""


@dataclass(frozen=True)
class Aligned:
    """An answer in the teacher's tokens, and how they lie alongside the student's."""

    ids: list[int]  # the teacher's
    chunks: list[int]  # of each of the student's tokens: the chunk that it is of, -1 where none is common to both; or
    # LEFT_OUT
    their_chunks: list[int]  # the same of the teacher's
    count: int  # of chunks
    longer: list[list[tuple[int, int]]]  # of each of the teacher's tokens, see `Aligner.longer`

    @cached_property
    def match(self) -> list[int]:
        """The teacher's token for each student token that forms a chunk with it alone, -1 for any other token."""
        mine = _by_chunk(self.chunks)
        theirs = _by_chunk(self.their_chunks)
        alone = {chunk: places[0] for chunk, places in theirs.items() if len(places) == len(mine.get(chunk, ())) == 1}
        return [alone.get(chunk, -1) for chunk in self.chunks]

    @property
    def settled(self) -> list[bool]:
        """Return for each chunk whether no token that only the teacher has could span its beginning."""
        first = {chunk: place for place, chunk in reversed([*enumerate(self.their_chunks)])}
        return [first[chunk] == 0 or not self.longer[first[chunk] - 1] for chunk in range(self.count)]


def _by_chunk(chunks: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for place, chunk in enumerate(chunks):
        if chunk >= 0:
            found.setdefault(chunk, []).append(place)
    return found


class Aligner:
    """Answers of a student, in the tokens of a teacher. ends: the student's terminal ids, what rows end with first;
    their_end: the teacher's. Raises InputError for a tokenizer whose tokens are not the bytes of a text.

    A teacher that has tokens 9 and 95 writes 9 only where the number ends, so after its 9 it expects no digit. A
    student that writes digit by digit has not decided anything yet. How far the teacher's distribution after 9 holds
    for such a student depends on the probability that the teacher gave to 95 and other tokens that only the teacher has
    and that begin with 9. `Aligned.longer` lists these tokens, `scoring.chunks` sums their probability.
    """

    def __init__(
        self, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, ends: Sequence[int], their_end: int
    ):
        self.student = student
        self.teacher = teacher
        self.ends = list(ends)
        self.their_end = their_end
        self.mine, self.theirs = (_spellings(tokenizer) for tokenizer in (student, teacher))
        alone = {*self.theirs.values()} - {*self.mine.values()}
        lacking = sorted((spelt, token) for token, spelt in self.theirs.items() if spelt in alone)
        self.lacking = [token for _, token in lacking]
        """The teacher's tokens that the student lacks, sorted by their bytes: tokens with a common beginning are
        neighbours."""
        self._spelt = [spelt for spelt, _ in lacking]

    def __call__(self, ids: Sequence[int]) -> Aligned:
        """An answer, which stands behind some prompt."""
        ended = bool(ids) and ids[-1] in self.ends
        said, cuts = spell(self.mine, ids[:-1] if ended else ids)
        whole = len(said) if ended else len(said) - _unfinished(said)
        theirs = self._tokens(said[:whole])
        their_text, their_cuts = spell(self.theirs, theirs)
        common = _common_cuts((said[:whole], cuts), (their_text, their_cuts))
        mine, others = (_chunks(each, [pair[side] for pair in common]) for side, each in enumerate((cuts, their_cuts)))
        # of the parts between common cuts those that say the same are chunks
        parts = ((said[a:b], their_text[c:d]) for (a, c), (b, d) in pairwise([(0, 0), *common]))
        number = 0
        of_part = []
        for one, other in parts:
            same = _say_the_same(one, other)
            of_part.append(number if same else -1)
            number += same
        of_part.append(-1)  # at the place -1: what is of no part
        mine, others = ([of_part[part] for part in side] for side in (mine, others))
        mine = [LEFT_OUT if cut > whole else chunk for cut, chunk in zip(cuts, mine, strict=True)]
        if ended:  # by whatever token: a chunk of its own
            theirs = [*theirs, self.their_end]
            mine = [*mine, number]
            others = [*others, number]
        return Aligned(theirs, mine, others, number + ended, self.longer(theirs))

    def longer(self, ids: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Return, for each token of an answer of the teacher, which tokens could have stood in its place and spanned
        the end of a later token as well: entry d is the range in `lacking` of the tokens that begin with the text of
        this token and the d tokens after it, and are longer. The search backwards from an end stops at the first text
        that no longer token begins with.
        """
        found: list[list[tuple[int, int]]] = [[] for _ in ids]
        for end in range(1, len(ids)):
            text = b""
            for start in reversed(range(end)):
                if ids[start] not in self.theirs:
                    break
                text = self.theirs[ids[start]] + text
                first, last = self._longer_than(text)
                if first == last:
                    break
                found[start].append((first, last))
        return found

    def _longer_than(self, text: bytes) -> tuple[int, int]:
        """Return the range in `lacking` of the tokens that begin with a text and do not end there."""
        first = bisect_right(self._spelt, text)
        return first, bisect_right(self._spelt, text, first, key=lambda spelt: spelt[: len(text)])

    def _tokens(self, said: bytes) -> list[int]:
        """The teacher's tokens of a text that stands behind a prompt: of several ways those that say it, or most."""
        found = []
        most = -1
        for ids in chat.ways_behind(self.teacher, said.decode(errors="replace")):
            text = spell(self.theirs, ids)[0]
            if text == said:
                return ids
            if (same := chat.shared_length(said, text)) > most:
                found = ids
                most = same
        return found


def _unfinished(said: bytes) -> int:
    """How many bytes at the end are the beginning of a character."""
    for size in range(1, min(len(said), 3) + 1):
        first = said[-size]
        if first >= 0xC0:
            wanted = 2 + (first >= 0xE0) + (first >= 0xF0)
            return size if size < wanted else 0
        if first < 0x80:
            return 0
    return 0


def _common_cuts(mine: tuple[bytes, list[int]], theirs: tuple[bytes, list[int]]) -> list[tuple[int, int]]:
    """Where both sides, texts with the ends of their tokens, have cut at the same place of what they have in common:
    (in mine, in theirs), growing in both.
    """
    (said, cuts) = mine
    (their_text, their_cuts) = theirs
    if said == their_text:
        return [(cut, cut) for cut in sorted({*cuts} & {*their_cuts}) if cut > 0]
    # equal beginnings and ends need no search, which costs most where texts are long
    head = chat.shared_length(said, their_text)
    tail = chat.shared_length(said[: head - 1 if head else None : -1], their_text[: head - 1 if head else None : -1])
    inner = said[head : len(said) - tail]
    other = their_text[head : len(their_text) - tail]
    blocks = [(0, 0, head), (len(said) - tail, len(their_text) - tail, tail)]
    found = SequenceMatcher(None, inner, other, autojunk=False).get_matching_blocks()
    blocks += [(head + block.a, head + block.b, block.size) for block in found if block.size]
    ends = {*their_cuts}
    common = {(0, 0)}
    for a, b, size in sorted(blocks):
        common |= {(cut, b + cut - a) for cut in cuts if a <= cut <= a + size and b + cut - a in ends}
    grown: list[tuple[int, int]] = [(0, 0)]
    for pair in sorted(common):
        if pair[0] > grown[-1][0] and pair[1] > grown[-1][1]:
            grown.append(pair)
    return grown[1:]


def _say_the_same(one: bytes, other: bytes) -> bool:
    """Are they one text, in whatever form Unicode has it?"""
    if one == other:
        return True
    try:
        texts = one.decode(), other.decode()
    except UnicodeDecodeError:
        return False
    return len({unicodedata.normalize("NFKC", text) for text in texts}) == 1


def _spellings(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """`bytes_of` a tokenizer, tried on a text."""
    if tokenizer.is_fast:
        spellings = bytes_of(tokenizer)
        if any(_say_the_same(spell(spellings, ids)[0], TRIED.encode()) for ids in chat.ways_behind(tokenizer, TRIED)):
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
    found = [-1] * len(cuts)
    chunk = 0
    start = 0  # the first token of the chunk
    for place, cut in enumerate(cuts):
        if chunk < len(common) and cut == common[chunk]:
            found[start : place + 1] = [chunk] * (place + 1 - start)
            chunk = chunk + 1
            start = place + 1
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
    single byte, which are written where there is no other.
    """
    special = chat.special_ids(tokenizer)
    added = tokenizer.get_added_vocab()
    by_byte = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)  # type: ignore[attr-defined]
    table = {character: byte for byte, character in enumerate(_characters())}
    plain = {}
    single = {}
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
