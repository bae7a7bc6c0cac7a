"""Raw rows -> rows of ids, one layout per method, mapped and cached by `datasets`.

COLUMNS    what each method's rows hold, beside `index` (row number)
BESIDE     what is known of each example beside them
tokenised  a data set in any of FORMATS -> one example a row: method.rows.columns cut to size, and BESIDE
tokenise   the same of one batch of raw rows
prepare    what `tokenised` gives without examples that train nothing, counted, and without BESIDE; prepared rows pass
"""

import logging
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from ..errors import InputError, error_context
from .encode import COMPLETION_CUT, NO_TARGET, PROMPT_CUT, Plan, code_hash, context, encode, fit, read
from .formats import Sample, detect
from .kinds import Reader, RowKind

logger = logging.getLogger(__package__)

BESIDE = ("row", "state", "unknown", "uncut", "trained", "keys")
"""Number of the raw row; bits of `fit`; has it the unknown token? Tokens of the prompt and the longest branch before
they were cut; tokens with a loss, of the longest branch (0 for OPD, whose answers are yet to be sampled); a hash of the
prompt with each branch, before they were cut (OPD: of the prompt alone)."""
ADDED = {"mismatch_ids", "ref_logps", "teacher_ids", "teacher_logps", "length"}
"""What trainers add to prepared rows."""

_MIXED = "rows differ in kind there, and text that looks like JSON is then read as JSON"


def prepare(dataset: Any, method: Reader, tokenizer: PreTrainedTokenizerBase, config: Any, name: str = "train") -> Any:
    """Token ids for `method`: exactly method.rows.columns, and `index` (row number) unless the data set is a stream.

    A data set that has exactly these columns was prepared before and is returned as it is; so is a stream that has
    exactly these columns, without `index`, in the types they have here (lists of int32): one of your own that looks so
    is neither validated nor cut.
    Reads max_length, max_completion_length (OPD), completion_only_loss, assistant_only_loss, dataset_text_field,
    dataset_num_proc, apply_chat_template and chat_template_kwargs from `config`.
    max_length (tokens) bounds prompt plus longest branch: the prompt is cut first, from the left, then branches from
    the right. For OPD, max_length - max_completion_length bounds the prompt and completions stay whole. Rows with no
    trained token left are dropped; counts are logged, of rows with the tokenizer's unknown token too (not of streams).
    Raises InputError for the first bad row.
    """
    if _is_prepared(dataset, method.rows):
        return dataset
    mapped = tokenised(dataset, method, tokenizer, config, name)
    if isinstance(dataset, datasets.Dataset):
        return _count(mapped, len(dataset), method.rows, getattr(config, "max_length", None), name)
    kept = mapped.filter(_keep_streamed, input_columns=["state", "row"], fn_kwargs={"name": name})
    return kept.select_columns(list(method.rows.columns))


def tokenised(
    dataset: Any, method: Reader, tokenizer: PreTrainedTokenizerBase, config: Any, name: str = "train"
) -> Any:
    """The examples of a data set as `prepare` makes them, those without a target too: method.rows.columns and BESIDE.

    Rows of a file or a saved set come from the cache of `datasets` where `prepare` was called with the same arguments,
    and the other way round. Raises InputError for the first bad row.
    """
    columns = _columns(dataset)
    field = getattr(config, "dataset_text_field", "text")
    if field != "text" and field in columns and "text" not in columns:
        dataset = dataset.rename_column(field, "text")
        columns = _columns(dataset)
    with error_context(name):
        if not columns or (isinstance(dataset, datasets.Dataset) and not len(dataset)):
            raise InputError("the data set has no rows")
        plan = plan_for(detect(columns, method), method, tokenizer, config, name)
    kwargs = {"batched": True, "with_indices": True, "remove_columns": columns}
    kwargs |= {"fn_kwargs": {"tokenizer": tokenizer, "plan": plan}, "features": _features(method.rows)}
    if not isinstance(dataset, datasets.Dataset):
        return dataset.map(tokenise, **kwargs)
    workers, mixed = getattr(config, "dataset_num_proc", None), list(_of_two_kinds(dataset, plan.form))
    try:
        mapped = dataset.map(tokenise, num_proc=workers, desc=f"Tokenising {name}", **kwargs)
    except InputError as error:
        raise InputError(f"{error}; {_MIXED}" if mixed else str(error)) from error
    for column, inside in mixed:
        values = (message for row in dataset[column] for message in (row or [] if inside else [row]))
        if inside or any(isinstance(value, str) for value in values):
            raise InputError(f"{name}: column {column!r}: {_MIXED}, so write text in all rows, or in none")
    return mapped


def _of_two_kinds(dataset: datasets.Dataset, form: str) -> Iterator[tuple[str, str | None]]:
    """(column, None) or (column, key of its messages) whose text is text in some rows and something else in others.

    There `datasets` keeps text that looks like JSON as JSON: "4" comes back as 4, a quoted word without its quotes.
    """
    for column in form.split(" + "):
        kind = dataset.features[column]
        fields = kind.feature if isinstance(kind, datasets.List) and isinstance(kind.feature, dict) else {}
        yield from ((column, key) for key in ("content", "value") if isinstance(fields.get(key), datasets.Json))
        if isinstance(kind, datasets.Json) and column != "label" and not column.endswith("_ids"):
            yield column, None


def _columns(dataset: Any) -> list[str]:
    return dataset.column_names or list(next(iter(dataset), {}))


def _is_prepared(dataset: Any, rows: RowKind) -> bool:
    own, columns = {*rows.columns, "index"}, {*_columns(dataset)}
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.features == _features(rows, ())
    return own <= columns <= own | ADDED


def plan_for(form: str, method: Reader, tokenizer: PreTrainedTokenizerBase, config: Any, name: str) -> Plan:
    """What rows of this form become. Raises InputError for options that do not go with it."""

    def option(key: str) -> Any:
        return getattr(config, key, None)

    max_length, max_new = option("max_length"), option("max_completion_length") or 0
    whole = form in ("messages", "conversations", "text")
    completion_only, assistant_only = option("completion_only_loss"), bool(option("assistant_only_loss"))
    template_kwargs = option("chat_template_kwargs")
    if method.rows.masked and whole and completion_only:
        raise InputError(f"completion_only_loss needs prompt and completion, the data has {form}")
    if assistant_only and form == "text":
        raise InputError("assistant_only_loss needs messages, the data has text")
    as_chat = bool(option("apply_chat_template"))
    if as_chat and (form == "text" or "_ids" in form):
        raise InputError(f"apply_chat_template needs a column 'prompt', the data has {form}")
    if assistant_only and not tokenizer.is_fast:
        raise InputError(
            f"assistant_only_loss needs a fast tokenizer: {type(tokenizer).__name__} does not say which characters a "
            "token stands for"
        )
    max_prompt = max_length - max_new if method.rows.sampled and max_length else None
    known = max(tokenizer.get_vocab().values()) + 1 if "_ids" in form else None
    return Plan(
        method.name, method.rows, form, name, max_length, max_prompt, completion_only, assistant_only, template_kwargs,
        as_chat, known, code_hash(),
    )


def _features(rows: RowKind, beside: tuple[str, ...] = BESIDE) -> datasets.Features:
    single = {
        "label": "bool", "prompt_key": "int64", "row": "int64", "state": "int8", "unknown": "bool", "uncut": "int64",
        "trained": "int64",
    }  # fmt: skip
    kinds: dict[str, Any] = {column: datasets.Value(kind) for column, kind in single.items()}
    kinds["keys"] = datasets.List(datasets.Value("int64"))
    ids = datasets.List(datasets.Value("int32"))
    return datasets.Features({column: kinds.get(column, ids) for column in (*rows.columns, *beside)})


def tokenise(batch: dict[str, list], rows: list[int], tokenizer: PreTrainedTokenizerBase, plan: Plan) -> dict:
    """A batch of raw rows -> columns of ids, and BESIDE."""
    samples, origin = [], []
    for n, row in enumerate(rows):
        with error_context(f"{plan.name}, row {row}"):
            found = read({column: values[n] for column, values in batch.items()}, plan)
        samples += found
        origin += [row] * len(found)
    samples = samples if "_ids" in plan.form else encode(samples, origin, tokenizer, plan)
    out: dict[str, list] = {column: [] for column in (*plan.rows.columns, *BESIDE)}
    unknown = _unknown_id(tokenizer)
    for row, sample in zip(origin, samples, strict=True):
        with error_context(f"{plan.name}, row {row}"):
            whole = context(sample, plan)
            sample, state = fit(whole, plan)
        known = {"completion_mask": sample.mask, "label": sample.label, "prompt_key": _key(whole.prompt)}
        branches = sample.branches or [[]]
        is_unknown = unknown is not None and any(unknown in ids for ids in (sample.prompt, *branches))
        uncut = len(whole.prompt) + max(map(len, whole.branches or [[]]))
        compared = [[]] if plan.rows.sampled else whole.branches
        keys = [_key([*whole.prompt, -1, *branch]) for branch in compared]
        extra = [known[column] for column in plan.rows.columns if column in known]
        beside = row, state, is_unknown, uncut, _trained(sample, plan.rows), keys
        for column, value in zip(out, [sample.prompt, *branches, *extra, *beside], strict=True):
            out[column].append(value)
    return out


def _trained(sample: Sample, rows: RowKind) -> int:
    """Tokens with a loss, of the longest branch; none of OPD's answers, which are yet to be sampled."""
    if rows.sampled:
        return 0
    return sum(sample.mask) if sample.mask is not None else max(map(len, sample.branches))


def _unknown_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id for text without a token; None where there is none, or it also is the eos or bos (as GPT-2's)."""
    unknown = tokenizer.unk_token_id
    return None if unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id) else unknown


def _key(ids: list[int]) -> int:
    """Tells prompts apart, before truncation: a hash that is the same in every process, as a signed 64-bit number."""
    return xxhash.xxh64_intdigest(np.array(ids, dtype="<i4").tobytes()) - 2**63


def _count(mapped: datasets.Dataset, read: int, rows: RowKind, max_length: int | None, name: str) -> datasets.Dataset:
    """Drops what has to go, numbers the rest in `index`, and logs one line of counts, and one of unknown tokens."""
    columns = mapped.with_format("numpy")
    state, row = columns["state"][:], columns["row"][:]
    lost = state & NO_TARGET > 0
    dropped, truncated = row[lost], int((~lost & (state & (PROMPT_CUT | COMPLETION_CUT) > 0)).sum())
    line = f"{name}: {read} rows read" + (f" as {len(mapped)} examples" if len(mapped) != read else "")
    line += f", {truncated} truncated (max_length {max_length}), {len(dropped)} dropped"
    if len(dropped):
        line += f" (no trained token left; first rows {', '.join(map(str, dropped[:5]))})"
    logger.log(logging.WARNING if truncated or len(dropped) else logging.INFO, line)
    if len(dropped) == len(mapped):
        raise InputError(f"{line}: nothing to train on; raise max_length")
    unknown = np.unique(row[~lost & columns["unknown"][:]])
    if len(unknown):
        logger.warning(
            "%s: %d rows hold the unknown token, for text outside the tokenizer's vocabulary (first rows %s): clean "
            "them, or use another tokenizer", name, len(unknown), ", ".join(map(str, unknown[:5])),
        )  # fmt: skip
    kept = mapped.select(np.flatnonzero(~lost)) if len(dropped) else mapped
    return kept.select_columns(list(rows.columns)).add_column("index", np.arange(len(kept)))


def _keep_streamed(state: int, row: int, name: str) -> bool:
    if state & NO_TARGET:
        logger.warning("%s: row %d dropped (no trained token left)", name, row)
    return not state & NO_TARGET
