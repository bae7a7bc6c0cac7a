"""Alignment of one text in the tokens of two tokenizers.

Each tokenizer splits the text at its own boundaries. The boundaries that both tokenizers share divide the text into
chunks, the smallest segments to which both models assign a probability. Most chunks are a single token on both sides.
A text is the concatenated bytes of its tokens, so an answer keeps the tokens that were sampled, even if the tokenizer
would encode its text differently. If the teacher's tokenizer normalizes a text (a single é instead of e and an accent),
both sides still count as the same text. Only the position of something that the teacher's tokenizer cannot encode (a
special token, half a character) has no chunk.

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
from operator import itemgetter

from transformers import PreTrainedTokenizerBase

from ..errors import InputError
from . import chat

SPECIAL = -1
"""End position of a special token, which has no bytes in the text."""
INCOMPLETE_CHARACTER = -2
"""Chunk of the tokens of an incomplete last character, truncated by the end of a rollout. It has no teacher signal."""
_PROBE_TEXT = "1 + 23 = 24 \u00e9"
"""A text that every tokenizer can encode. It must be equal to the bytes of its tokens."""


@dataclass(frozen=True)
class Alignment:
    """An answer in the teacher's tokens, and its alignment with the student's tokens.

    Attributes:
        ids: The teacher's tokens.
        chunks: Chunk of each student token. -1 if it is in no common chunk, or `INCOMPLETE_CHARACTER`.
        teacher_chunks: Chunk of each teacher token, -1 if it is in no common chunk.
        count: Number of chunks.
        longer: Result of `Aligner.longer` for the teacher's tokens.
    """

    ids: list[int]
    chunks: list[int]
    teacher_chunks: list[int]
    count: int
    longer: list[list[tuple[int, int]]]

    @cached_property
    def match(self) -> list[int]:
        """Position of the teacher token for each student token that forms a chunk with it alone, otherwise -1."""
        student = _tokens_by_chunk(self.chunks)
        teacher = _tokens_by_chunk(self.teacher_chunks)
        one_to_one = {
            chunk: positions[0]
            for chunk, positions in teacher.items()
            if len(positions) == len(student.get(chunk, ())) == 1
        }
        return [one_to_one.get(chunk, -1) for chunk in self.chunks]


def _tokens_by_chunk(chunks: Sequence[int]) -> dict[int, list[int]]:
    positions: dict[int, list[int]] = {}
    for position, chunk in enumerate(chunks):
        if chunk >= 0:
            positions.setdefault(chunk, []).append(position)
    return positions


class Aligner:
    """Aligns answers of a student with the tokens of a teacher.

    A teacher that has the tokens 9 and 95 emits 9 only at the end of a number, so it expects no digit after its 9. A
    student that emits digit by digit has not decided yet whether a digit follows. The extent to which the teacher's
    distribution after 9 applies to such a student depends on the probability that the teacher assigned to 95 and to
    other tokens that begin with 9 and that only the teacher has. `Alignment.longer` lists these tokens, and
    `teachers.cross_tokenizer` sums their probability.

    Args:
        student: The student's tokenizer.
        teacher: The teacher's tokenizer.
        terminal_ids: Token ids that end the student's answers. The first one ends the training rows.
        teacher_eos_id: Token id that ends the teacher's answers.

    Attributes:
        student_bytes: Bytes of each token id of the student, see `token_bytes`.
        teacher_bytes: Bytes of each token id of the teacher.
        teacher_only: Token ids of the teacher that the student lacks, sorted by their bytes, so that tokens with a
            common prefix are adjacent.

    Raises:
        InputError: If the tokens of a tokenizer are not the bytes of a text.
    """

    def __init__(
        self,
        student: PreTrainedTokenizerBase,
        teacher: PreTrainedTokenizerBase,
        terminal_ids: Sequence[int],
        teacher_eos_id: int,
    ) -> None:
        self.student = student
        self.teacher = teacher
        self.terminal_ids = list(terminal_ids)
        self.teacher_eos_id = teacher_eos_id

        self.student_bytes = _checked_token_bytes(student)
        self.teacher_bytes = _checked_token_bytes(teacher)
        unshared = {*self.teacher_bytes.values()} - {*self.student_bytes.values()}
        pairs = sorted((text, token) for token, text in self.teacher_bytes.items() if text in unshared)
        self.teacher_only = [token for _, token in pairs]
        self._teacher_only_bytes = [text for text, _ in pairs]

    def __call__(self, ids: Sequence[int]) -> Alignment:
        """Align an answer, which follows some prompt, with the teacher's tokens."""
        is_ended = bool(ids) and ids[-1] in self.terminal_ids
        text, ends = decode_bytes(self.student_bytes, ids[:-1] if is_ended else ids)
        size = len(text) if is_ended else len(text) - _incomplete_bytes(text)
        teacher_ids = self._teacher_ids(text[:size])
        teacher_text, teacher_ends = decode_bytes(self.teacher_bytes, teacher_ids)

        common = _common_boundaries((text[:size], ends), (teacher_text, teacher_ends))
        segments = _segment_of_tokens(ends, [boundary for boundary, _ in common])
        teacher_segments = _segment_of_tokens(teacher_ends, [boundary for _, boundary in common])

        # of the segments between common boundaries, those with an equivalent text on both sides are chunks
        chunk_of_segment = []
        number = 0
        for (begin, teacher_begin), (end, teacher_end) in pairwise([(0, 0), *common]):
            is_chunk = _are_equivalent(text[begin:end], teacher_text[teacher_begin:teacher_end])
            chunk_of_segment.append(number if is_chunk else -1)
            number += is_chunk
        chunk_of_segment.append(-1)  # at index -1: tokens of no segment
        chunks = [chunk_of_segment[segment] for segment in segments]
        teacher_chunks = [chunk_of_segment[segment] for segment in teacher_segments]
        chunks = [INCOMPLETE_CHARACTER if end > size else chunk for end, chunk in zip(ends, chunks, strict=True)]

        if is_ended:  # the ends of both answers are a chunk, whatever their tokens are
            teacher_ids = [*teacher_ids, self.teacher_eos_id]
            chunks = [*chunks, number]
            teacher_chunks = [*teacher_chunks, number]
        return Alignment(teacher_ids, chunks, teacher_chunks, number + is_ended, self.longer(teacher_ids))

    def longer(self, ids: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Return the longer tokens that only the teacher has, for each token of an answer in the teacher's tokens.

        These tokens could have replaced the token and also span the end of a later token. The search goes backwards
        from each end and stops at the first text that is a prefix of no longer token.

        Returns:
            A list for each token. Its entry d is the range (start, stop) in `teacher_only` of the tokens that begin
            with the text of this token and the d tokens after it, and are longer.
        """
        ranges: list[list[tuple[int, int]]] = [[] for _ in ids]
        for end in range(1, len(ids)):
            text = b""
            for start in reversed(range(end)):
                if ids[start] not in self.teacher_bytes:
                    break
                text = self.teacher_bytes[ids[start]] + text
                first, last = self._longer_than(text)
                if first == last:
                    break
                ranges[start].append((first, last))
        return ranges

    def _longer_than(self, text: bytes) -> tuple[int, int]:
        """Return the range in `teacher_only` of the tokens that begin with a text and do not end there."""
        first = bisect_right(self._teacher_only_bytes, text)
        last = bisect_right(self._teacher_only_bytes, text, first, key=lambda token: token[: len(text)])
        return first, last

    def _teacher_ids(self, text: bytes) -> list[int]:
        """Return the teacher's tokens of a text that follows a prompt.

        Of several tokenizations, the first one whose bytes are the text, or the one with the longest common prefix.
        """
        best: list[int] = []
        best_length = -1
        for ids in chat.continuation_ids(self.teacher, text.decode(errors="replace")):
            teacher_text = decode_bytes(self.teacher_bytes, ids)[0]
            if teacher_text == text:
                return ids
            length = chat.common_prefix_length(text, teacher_text)
            if length > best_length:
                best = ids
                best_length = length
        return best


def _incomplete_bytes(text: bytes) -> int:
    """Return the number of bytes at the end of a text that are an incomplete UTF-8 character."""
    for size in range(1, min(len(text), 3) + 1):
        byte = text[-size]
        if byte >= 0xC0:
            character_size = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return size if size < character_size else 0
        if byte < 0x80:
            return 0
    return 0


def _common_boundaries(student: tuple[bytes, list[int]], teacher: tuple[bytes, list[int]]) -> list[tuple[int, int]]:
    """Return the token boundaries that both sides share within the text that they have in common.

    Args:
        student: The student's text, and the ends of its tokens.
        teacher: The teacher's text, and the ends of its tokens.

    Returns:
        Pairs (position in the student's text, position in the teacher's text), strictly increasing in both.
    """
    text, ends = student
    teacher_text, teacher_ends = teacher
    if text == teacher_text:
        return [(end, end) for end in sorted({*ends} & {*teacher_ends}) if end > 0]

    # a common prefix and suffix need no search, whose cost grows fastest with the length of the texts
    head = chat.common_prefix_length(text, teacher_text)
    last = head - 1 if head else None
    tail = chat.common_prefix_length(text[:last:-1], teacher_text[:last:-1])
    inner = text[head : len(text) - tail]
    teacher_inner = teacher_text[head : len(teacher_text) - tail]
    blocks = [(0, 0, head), (len(text) - tail, len(teacher_text) - tail, tail)]
    inner_blocks = SequenceMatcher(None, inner, teacher_inner, autojunk=False).get_matching_blocks()
    blocks += [(head + block.a, head + block.b, block.size) for block in inner_blocks if block.size]

    teacher_end_set = {*teacher_ends}
    common = {(0, 0)}
    for a, b, size in sorted(blocks):
        common |= {(end, b + end - a) for end in ends if a <= end <= a + size and b + end - a in teacher_end_set}
    increasing: list[tuple[int, int]] = [(0, 0)]
    for pair in sorted(common):
        if pair[0] > increasing[-1][0] and pair[1] > increasing[-1][1]:
            increasing.append(pair)
    return increasing[1:]


def _are_equivalent(first: bytes, second: bytes) -> bool:
    """Return whether two byte strings are the same text, up to Unicode normalization (NFKC)."""
    if first == second:
        return True
    try:
        texts = first.decode(), second.decode()
    except UnicodeDecodeError:
        return False
    return len({unicodedata.normalize("NFKC", text) for text in texts}) == 1


def _checked_token_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Return `token_bytes` of a tokenizer, checked with a probe text.

    Raises:
        InputError: If the tokenizer is not fast, or the bytes of its tokens are not the probe text.
    """
    if tokenizer.is_fast:
        table = token_bytes(tokenizer)
        encodings = chat.continuation_ids(tokenizer, _PROBE_TEXT)
        if any(_are_equivalent(decode_bytes(table, ids)[0], _PROBE_TEXT.encode()) for ids in encodings):
            return table
    name = f"{type(tokenizer).__name__} {tokenizer.name_or_path}".strip()
    raise InputError(
        f"{name} cannot be aligned with another tokenizer. Use a fast tokenizer of type byte-level BPE or SentencePiece"
    )


def decode_bytes(table: Mapping[int, bytes], ids: Sequence[int]) -> tuple[bytes, list[int]]:
    """Return the text of token ids as bytes, and the end position of each token.

    Args:
        table: Bytes of each token id, see `token_bytes`. Ids that it lacks are special tokens.
        ids: Token ids.

    Returns:
        The text without special tokens, and for each token its end in the text, or `SPECIAL` for a special token.
    """
    parts = [table.get(token, b"") for token in ids]
    ends = accumulate(map(len, parts))
    return b"".join(parts), [end if token in table else SPECIAL for token, end in zip(ids, ends, strict=True)]


def _segment_of_tokens(ends: Sequence[int], boundaries: Sequence[int]) -> list[int]:
    """Return the index of the segment of each token, -1 for special tokens and tokens after the last boundary.

    Args:
        ends: End position of each token.
        boundaries: End position of each segment.
    """
    segments = [-1] * len(ends)
    segment = 0
    first_token = 0
    for position, end in enumerate(ends):
        if segment < len(boundaries) and end == boundaries[segment]:
            segments[first_token : position + 1] = [segment] * (position + 1 - first_token)
            segment = segment + 1
            first_token = position + 1
    return [-1 if end == SPECIAL else segment for end, segment in zip(ends, segments, strict=True)]


def shared_ids(student: Mapping[int, bytes], teacher: Mapping[int, bytes]) -> tuple[list[int], list[int]]:
    """Return the ids of the student and the ids of the teacher that have the same bytes, as two parallel lists.

    Args:
        student: `token_bytes` of the student's tokenizer.
        teacher: `token_bytes` of the teacher's tokenizer.
    """
    student_ids = _ids_by_bytes(student)
    teacher_ids = _ids_by_bytes(teacher)
    pairs = sorted((student_ids[text], teacher_ids[text]) for text in student_ids.keys() & teacher_ids.keys())
    return [student_id for student_id, _ in pairs], [teacher_id for _, teacher_id in pairs]


def _ids_by_bytes(table: Mapping[int, bytes]) -> dict[bytes, int]:
    """Return the first token id of each byte string."""
    ids: dict[bytes, int] = {}
    for token, text in table.items():
        ids.setdefault(text, token)
    return ids


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Return the bytes of each token id within a text, without special tokens.

    The single-byte tokens of SentencePiece come last, because they are used only where no other token has the byte.
    """
    special = chat.special_ids(tokenizer)
    added = tokenizer.get_added_vocab()
    is_byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)  # type: ignore[attr-defined]
    byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
    text_tokens = {}
    byte_tokens = {}
    for token, number in sorted(tokenizer.get_vocab().items(), key=itemgetter(1)):
        if number in special:
            continue
        if token in added or not is_byte_level:
            byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
            if byte:
                byte_tokens[number] = bytes.fromhex(byte[1])
            else:
                text_tokens[number] = token.replace("\u2581", " ").encode()
        elif all(character in byte_of for character in token):
            text_tokens[number] = bytes(byte_of[character] for character in token)
    return text_tokens | byte_tokens


def _byte_characters() -> list[str]:
    """Return the character that byte-level tokenizers write for each byte.

    It is the byte itself if it is visible in Latin-1, otherwise the next code point from 256 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(256)
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
