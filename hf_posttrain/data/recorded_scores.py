"""Log-probabilities of a teacher that are recorded in the rows, as vLLM returns them.

The format is that of the KD plugin of Axolotl (https://github.com/axolotl-ai-cloud/axolotl,
src/axolotl/integrations/kd/README.md): a list with one entry for each of the last tokens of the row. An entry is a list
of likely tokens, each {"token": "token_id:123", "logprob": -0.5}, or null for a token that is not trained. The
`logprobs` of a chat completion are read as well: {"content": [{"top_logprobs": [...]}, ...]}.

Legend: B tokens of an answer, T of them trained, K tokens of the top k.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InputError, error_context, name_hint, short_repr

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COLUMNS = ("teacher_ids", "teacher_logps")
"""Columns of prepared rows: top tokens [T][K], and their log-probabilities [T][K]."""
_TOKEN_ID = re.compile(r"token_id:(\d+)")
_EXPECTED = 'expected a list of {"token": "token_id:123", "logprob": -0.5} for each token'
_MAX_EXCESS = 1e-3
"""Largest excess over 1 of a sum of probabilities, which are rounded."""


class RecordedPlan(NamedTuple):
    """Options for the recorded log-probabilities. `datasets` fingerprints the values and the names of these fields."""

    column: str
    top_k: int
    vocabulary: int  # number of ids of the tokenizer


def recorded_column(config: object) -> str | None:
    """Return the column of raw rows with recorded log-probabilities that a Config names, or None."""
    options = getattr(config, "teacher", None)
    return None if options is None else options.logprobs_column


def recorded_columns(config: object) -> tuple[str, ...]:
    """Return the columns of prepared rows with the recorded log-probabilities, if a Config reads them."""
    return () if recorded_column(config) is None else _COLUMNS


def build_recorded_plan(
    config: Any, columns: Sequence[str], tokenizer: "PreTrainedTokenizerBase"
) -> RecordedPlan | None:
    """Return the plan for the recorded log-probabilities of a Config, or None if it does not read any.

    Args:
        config: The Config.
        columns: Columns of the raw rows.
        tokenizer: The tokenizer.

    Raises:
        InputError: If the rows do not have the column.
    """
    column = recorded_column(config)
    if column is None:
        return None
    if column not in columns:
        raise InputError(f"teacher.logprobs_column: there is no column {column!r}{name_hint(column, columns)}")
    return RecordedPlan(column, config.teacher.top_k, max(tokenizer.get_vocab().values()) + 1)


def check_prepared(rows: Any, config: Any, name: str) -> None:
    """Raise InputError if the recorded log-probabilities of prepared rows are not of `teacher.top_k` tokens."""
    first = next(iter(rows), None) if recorded_column(config) is not None else None
    if first is not None and (count := len(first["teacher_ids"][0])) != config.teacher.top_k:
        problem = f"the prepared rows have the {count} most likely tokens, and teacher.top_k is {config.teacher.top_k}"
        raise InputError(f"{name}: {problem}. Pass the raw rows, or set teacher.top_k: {count}")


def read_scores(
    value: object, ids: Sequence[int], mask: Sequence[int], removed: int, plan: RecordedPlan
) -> dict[str, list[list[Any]]]:
    """Return the top k of the trained tokens of an answer, as the columns of `teachers.columns`.

    The last entry of `value` belongs to the last token of the row before truncation.

    Args:
        value: The value of the column.
        ids: Token ids of the answer after truncation, [B].
        mask: Whether each of them is trained, [B].
        removed: Number of tokens at the end of the row that truncation has removed.
        plan: The options.

    Returns:
        teacher_ids [T][K] and teacher_logps [T][K], from the most likely token on.

    Raises:
        InputError: If the value has another format, does not fit the tokens of the row, or has fewer tokens than K.
    """
    trained = [n for n, is_trained in enumerate(mask) if is_trained]
    if not trained:  # the row is dropped
        return {name: [] for name in _COLUMNS}
    with error_context(f"column {plan.column!r}"):
        entries = value.get("content") if isinstance(value, Mapping) else value
        if not isinstance(entries, list):
            raise InputError(f"{short_repr(value)} is not a list of log-probabilities; {_EXPECTED}")
        first = len(entries) - removed - len(ids)  # entry of the first token of the answer, negative if it has none
        if first + trained[0] < 0:
            count = removed + len(ids) - trained[0]
            problem = f"{len(entries)} entries for the {count} tokens from the first trained one to the end of the row"
            raise InputError(f"{problem}. Record the whole answer with its end token, or leave the row out")
        scores = [_read_entry(entries[first + n], first + n, plan.vocabulary) for n in trained]

        matches = sum(ids[n] in logps for n, logps in zip(trained, scores, strict=True))
        if 2 * matches < len(trained):
            problem = f"only {matches} of the {len(trained)} trained tokens are among the recorded tokens"
            cause = "so they are of another tokenizer, chat template or text, or have no entry for the end token"
            raise InputError(f"{problem}, {cause}. Record them for the tokens of the row")
        sizes = [len(logps) for logps in scores]
        if min(sizes) < plan.top_k:
            number = first + trained[sizes.index(min(sizes))]
            problem = f"entry {number} has {min(sizes)} tokens, and teacher.top_k is {plan.top_k}"
            raise InputError(f"{problem}. Set teacher.top_k to at most {min(sizes)}")
    top = [sorted(logps.items(), key=lambda item: -item[1])[: plan.top_k] for logps in scores]
    return {name: [[item[part] for item in row] for row in top] for part, name in enumerate(_COLUMNS)}


def _read_entry(entry: object, number: int, vocabulary: int) -> dict[int, float]:
    """Return the recorded log-probabilities at a trained token by token id.

    Raises:
        InputError: If there are none, or they are no log-probabilities of one distribution over the vocabulary.
    """
    tokens = entry.get("top_logprobs") if isinstance(entry, Mapping) else entry
    if tokens is None or tokens == []:
        raise InputError(f"entry {number} has no tokens, and it belongs to a trained token. Record top_logprobs for it")
    logps = {}
    for item in tokens if isinstance(tokens, list) else [tokens]:
        token, logp = (item.get("token"), item.get("logprob")) if isinstance(item, Mapping) else (None, None)
        if not isinstance(token, str) or not isinstance(logp, int | float):
            raise InputError(f"entry {number} has {short_repr(item)}; {_EXPECTED}")
        match = _TOKEN_ID.fullmatch(token)
        if match is None:
            problem = f"entry {number} has the text {short_repr(token)} in place of a token id such as 'token_id:123'"
            raise InputError(f"{problem}. Record with return_tokens_as_token_ids: true of vLLM, which writes ids")
        if int(match[1]) >= vocabulary:
            problem = f"entry {number} has token id {match[1]}, which is not in the tokenizer's {vocabulary} ids"
            raise InputError(f"{problem}. Record a teacher with the vocabulary of the student")
        if not -math.inf < logp <= _MAX_EXCESS:
            raise InputError(f"entry {number} has the logprob {logp}, which is not the logarithm of a probability")
        logps[int(match[1])] = float(logp)
    if (total := math.fsum(map(math.exp, logps.values()))) > 1 + _MAX_EXCESS:
        problem = f"the probabilities of entry {number} sum to {total:.4g}, above 1"
        raise InputError(f"{problem}. Record natural logarithms of the probabilities at temperature 1")
    return logps
