"""Weights of the tokens of an answer by their text: the option `text_weights` and the column `span_weights`.

A token has the weight of the last pattern or span that it overlaps (a special token: that covers it), and otherwise 1.
Tokens of weight 0 are not trained.
"""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from ..errors import InputError, short_repr
from .align import token_bytes
from .chat import special_ids
from .formats import Sample
from .row_schema import SPAN_COLUMN, is_weight


def weighted_sample(
    encoded: Sample,
    raw: Sample,
    spans: Sequence[Mapping[str, Any]],
    patterns: Mapping[str, float],
    tokenizer: PreTrainedTokenizerBase,
) -> Sample:
    """Return a sample of token ids with the weights of the tokens of its answer, and those of weight 0 masked.

    Args:
        encoded: The sample as token ids, with one branch.
        raw: The same sample as text or messages.
        spans: The spans of the row.
        patterns: Weights by regular expression.
        tokenizer: A fast tokenizer.

    Raises:
        InputError: A span is invalid, or its text is not in the answer.
    """
    [ids] = encoded.branches
    table, special = _texts_of_ids(tokenizer)
    pieces = [table.get(token, b"") for token in ids]
    ends = [*accumulate(map(len, pieces))]
    text = b"".join(pieces).decode("utf-8", "surrogateescape")
    sizes = (len(character.encode("utf-8", "surrogateescape")) for character in text)
    offsets = [0, *accumulate(sizes)]  # of each character, in bytes

    weights = [1.0] * len(ids)
    found = [
        (match.start(), match.end(), weight)
        for pattern, weight in patterns.items()
        for match in re.finditer(pattern, text)
    ]
    if spans:
        parts = [b"\0" * len(piece) if token in special else piece for token, piece in zip(ids, pieces, strict=True)]
        found += _located_spans(spans, raw, b"".join(parts).decode("utf-8", "surrogateescape"))
    for start, end, weight in found:
        first = offsets[start]
        last = offsets[end]
        for number in range(bisect_right(ends, first), len(ids)):
            begin = ends[number] - len(pieces[number])
            if begin >= last:
                break
            if ids[number] not in special or (first <= begin and ends[number] <= last):
                weights[number] = weight
    mask = encoded.mask or [1] * len(ids)
    mask = [int(bool(trained and weight)) for trained, weight in zip(mask, weights, strict=True)]
    return encoded._replace(mask=mask, weights=weights)


def _located_spans(spans: Sequence[Mapping[str, Any]], raw: Sample, text: str) -> list[tuple[int, int, float]]:
    """Return the spans as (start, end, weight) in characters of the decoded answer, without its special tokens."""
    [answer] = raw.branches
    content = answer
    if raw.is_chat:
        content = next((turn.get("content") for turn in reversed(answer) if turn["role"] == "assistant"), None)
    if not isinstance(content, str):
        problem = "requires an answer that is text, or messages whose last assistant turn is text"
        raise InputError(f"column {SPAN_COLUMN!r}: {problem}. Remove the spans of this row")
    offset = text.rfind(content) if raw.is_chat else text.find(content)
    if offset < 0:
        problem = f"the text {short_repr(content)} is not in the answer that the chat template writes"
        raise InputError(f"column {SPAN_COLUMN!r}: {problem}. Remove the spans of this row")
    located = []
    for span in spans:
        start, end, weight = (span.get(key) for key in ("start", "end", "weight"))
        whole = type(start) is type(end) is int
        if not whole or not 0 <= start < end <= len(content) or not is_weight(weight):  # type: ignore[operator]
            expected = f"start and end from 0 to {len(content)} (the length of the text), and a weight from 0 to 1e6"
            raise InputError(f"column {SPAN_COLUMN!r}: {short_repr(dict(span))} must have {expected}")
        located.append((offset + start, offset + end, float(weight)))  # type: ignore[operator, arg-type]
    return located


def unused_patterns(rows: datasets.Dataset, patterns: Mapping[str, float]) -> list[str]:
    """Return the patterns whose weight, other than 1, no token of the rows has.

    Args:
        rows: Rows with the column `token_weights`, if there are patterns.
        patterns: Weights by regular expression.
    """
    if not patterns:
        return []
    column: Any = rows.with_format("arrow")["token_weights"][:]
    used = {*pc.unique(pc.list_flatten(column)).to_pylist()}
    return [pattern for pattern, weight in patterns.items() if weight != 1 and float(np.float32(weight)) not in used]


@lru_cache(maxsize=8)
def _texts_of_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[int, bytes], set[int]]:
    """Return the text of each token id, including special tokens, and the ids of special tokens."""
    added = {number: token.content.encode() for number, token in tokenizer.added_tokens_decoder.items()}
    return added | token_bytes(tokenizer), special_ids(tokenizer)
