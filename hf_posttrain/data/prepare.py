"""Raw rows -> rows of ids, one layout per method, mapped and cached by `datasets`.

COLUMNS    what each method's rows hold, beside `index` (row number)
prepare    a data set in any of FORMATS -> COLUMNS[method], truncated and counted; prepared rows pass through
with_lengths, seeded    lengths for HF's sampler by length, and that sampler with an order of its own
warn_if_too_long    rows that are longer than the model's positions
"""

import logging
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import torch
import xxhash
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..errors import InputError
from .encode import DROPPED, TRUNCATED, Plan, context, encode, fit, read
from .formats import detect, located
from .packing import lengths_of

logger = logging.getLogger(__package__)

COLUMNS = {
    "sft": ("prompt_ids", "completion_ids", "completion_mask"),
    "kd": ("prompt_ids", "completion_ids", "completion_mask"),
    "dpo": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "kto": ("prompt_ids", "completion_ids", "label", "prompt_key"),
    "opd": ("prompt_ids", "completion_ids"),
}


BESIDE = ("row", "state", "unknown")
"""What `_tokenise` says of each row: where it came from; KEPT, TRUNCATED or DROPPED; has it the unknown token?"""
ADDED = {"mismatch_ids", "ref_logps", "teacher_ids", "teacher_logps", "length"}
"""What trainers add to prepared rows."""


def prepare(dataset: Any, method: str, tokenizer: PreTrainedTokenizerBase, config: Any, name: str = "train") -> Any:
    """Token ids for `method`: exactly COLUMNS[method], and `index` (row number) unless the data set is a stream.

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
    columns = dataset.column_names or list(next(iter(dataset), {}))
    own = {*COLUMNS[method], "index"}
    if isinstance(dataset, datasets.Dataset) and own <= {*columns} <= own | ADDED:
        return dataset
    if isinstance(dataset, datasets.IterableDataset) and dataset.features == _features(method, ()):
        return dataset
    field = getattr(config, "dataset_text_field", "text")
    if field != "text" and field in columns and "text" not in columns:
        dataset = dataset.rename_column(field, "text")
        columns = dataset.column_names or list(next(iter(dataset), {}))
    with located(name):
        if not columns or (isinstance(dataset, datasets.Dataset) and not len(dataset)):
            raise InputError("the data set has no rows")
        plan = _plan(detect(columns, method), method, config, name)
        if plan.assistant_only and not tokenizer.is_fast:
            raise InputError(
                f"assistant_only_loss needs a fast tokenizer: {type(tokenizer).__name__} does not say which characters "
                "a token stands for"
            )
    kwargs = {"batched": True, "with_indices": True, "remove_columns": columns}
    kwargs |= {"fn_kwargs": {"tokenizer": tokenizer, "plan": plan}, "features": _features(method)}
    if not isinstance(dataset, datasets.Dataset):
        mapped = dataset.map(_tokenise, **kwargs)
        kept = mapped.filter(_keep_streamed, input_columns=["state", "row"], fn_kwargs={"name": name})
        return kept.select_columns(list(COLUMNS[method]))
    workers = getattr(config, "dataset_num_proc", None)
    mapped = dataset.map(_tokenise, num_proc=workers, desc=f"Tokenising {name}", **kwargs)
    return _count(mapped, len(dataset), plan)


def _plan(form: str, method: str, config: Any, name: str) -> Plan:
    def option(key: str) -> Any:
        return getattr(config, key, None)

    max_length, max_new = option("max_length"), option("max_completion_length") or 0
    if method == "opd" and max_length is not None and max_length <= max_new:
        raise InputError(f"max_length {max_length} leaves no prompt beside max_completion_length {max_new}")
    whole = form in ("messages", "conversations", "text")
    completion_only, assistant_only = option("completion_only_loss"), bool(option("assistant_only_loss"))
    template_kwargs = option("chat_template_kwargs")
    if method in ("sft", "kd") and whole and completion_only:
        raise InputError(f"completion_only_loss needs prompt and completion, the data has {form}")
    if assistant_only and form == "text":
        raise InputError("assistant_only_loss needs messages, the data has text")
    as_chat = bool(option("apply_chat_template"))
    if as_chat and (form == "text" or "_ids" in form):
        raise InputError(f"apply_chat_template needs a column 'prompt', the data has {form}")
    max_prompt = max_length - max_new if method == "opd" and max_length else None
    return Plan(method, form, name, max_length, max_prompt, completion_only, assistant_only, template_kwargs, as_chat)


def _features(method: str, beside: tuple[str, ...] = BESIDE) -> datasets.Features:
    single = {"label": "bool", "prompt_key": "int64", "row": "int64", "state": "int8", "unknown": "bool"}
    return datasets.Features({
        column: datasets.Value(single[column]) if column in single else datasets.List(datasets.Value("int32"))
        for column in (*COLUMNS[method], *beside)
    })  # fmt: skip


def _tokenise(batch: dict[str, list], rows: list[int], tokenizer: PreTrainedTokenizerBase, plan: Plan) -> dict:
    """A batch of raw rows -> columns of ids, and BESIDE."""
    samples, origin = [], []
    for n, row in enumerate(rows):
        with located(f"{plan.name}, row {row}"):
            found = read({column: values[n] for column, values in batch.items()}, plan)
        samples += found
        origin += [row] * len(found)
    samples = samples if "_ids" in plan.form else encode(samples, origin, tokenizer, plan)
    out: dict[str, list] = {column: [] for column in (*COLUMNS[plan.method], *BESIDE)}
    unknown = _unknown_id(tokenizer)
    for row, sample in zip(origin, samples, strict=True):
        with located(f"{plan.name}, row {row}"):
            whole = context(sample, plan)
            sample, state = fit(whole, plan)
        extra = {"dpo": [], "opd": [], "kto": [sample.label, _key(whole.prompt)]}.get(plan.method, [sample.mask])
        branches = sample.branches or [[]]
        beside = row, state, unknown is not None and any(unknown in ids for ids in (sample.prompt, *branches))
        for column, value in zip(out, [sample.prompt, *branches, *extra, *beside], strict=True):
            out[column].append(value)
    return out


def _unknown_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id for text without a token; None where there is none, or it also is the eos or bos (as GPT-2's)."""
    unknown = tokenizer.unk_token_id
    return None if unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id) else unknown


def _key(ids: list[int]) -> int:
    """Tells prompts apart, before truncation: a hash that is the same in every process, as a signed 64-bit number."""
    return xxhash.xxh64_intdigest(np.array(ids, dtype="<i4").tobytes()) - 2**63


def _count(mapped: datasets.Dataset, read: int, plan: Plan) -> datasets.Dataset:
    """Drops what has to go, numbers the rest in `index`, and logs one line of counts, and one of unknown tokens."""
    columns = mapped.with_format("numpy")
    state, row = columns["state"][:], columns["row"][:]
    dropped, truncated = row[state == DROPPED], int((state == TRUNCATED).sum())
    line = f"{plan.name}: {read} rows read" + (f" as {len(mapped)} examples" if len(mapped) != read else "")
    line += f", {truncated} truncated (max_length {plan.max_length}), {len(dropped)} dropped"
    if len(dropped):
        line += f" (no trained token left; first rows {', '.join(map(str, dropped[:5]))})"
    logger.log(logging.WARNING if truncated or len(dropped) else logging.INFO, line)
    if len(dropped) == len(mapped):
        raise InputError(f"{line}: nothing to train on; raise max_length")
    unknown = np.unique(row[(state != DROPPED) & columns["unknown"][:]])
    if len(unknown):
        logger.warning(
            "%s: %d rows hold the unknown token, for text outside the tokenizer's vocabulary (first rows %s): clean "
            "them, or use another tokenizer", plan.name, len(unknown), ", ".join(map(str, unknown[:5])),
        )  # fmt: skip
    kept = mapped.select(np.flatnonzero(state != DROPPED)) if len(dropped) else mapped
    return kept.select_columns(list(COLUMNS[plan.method])).add_column("index", np.arange(len(kept)))


def _keep_streamed(state: int, row: int, name: str) -> bool:
    if state == DROPPED:
        logger.warning("%s: row %d dropped (no trained token left)", name, row)
    return state != DROPPED


class _ByLength(LengthGroupedSampler):
    """HF's sampler draws from the global generator: another order on each rank and after a resume."""

    def __init__(self, sampler: LengthGroupedSampler, seed: int):
        self.__dict__ |= vars(sampler)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


def seeded(sampler: Any, args: Any) -> Any:
    """A sampler by length whose order depends on (data_seed or seed, epoch); any other as it is."""
    if not isinstance(sampler, LengthGroupedSampler):
        return sampler
    return _ByLength(sampler, args.seed if args.data_seed is None else args.data_seed)


def with_lengths(rows: Any, args: Any) -> Any:
    """Prepared rows with the column that HF's sampler by length reads, where one is asked for: tokens of each row."""
    wanted = args.train_sampling_strategy == "group_by_length"
    if not wanted or not isinstance(rows, datasets.Dataset) or args.length_column_name in rows.column_names:
        return rows
    lengths = [sum(_tokens(ids) for name, ids in row.items() if name.endswith("_ids")) for row in rows]
    return rows.add_column(args.length_column_name, lengths)


def warn_if_too_long(rows: Any, config: PretrainedConfig, args: Any, name: str = "train") -> None:
    """Warn of prepared rows, not of a stream, that are longer than the positions that the model's config names."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None or not isinstance(rows, datasets.Dataset):
        return
    branches = [column for column in ("completion_ids", "chosen_ids", "rejected_ids") if column in rows.column_names]
    rollout = getattr(args, "max_completion_length", None)  # OPD's completions are yet to be sampled
    lengths = lengths_of(rows, "prompt_ids") + (rollout or np.max([lengths_of(rows, c) for c in branches], axis=0))
    if count := int((lengths > positions).sum()):
        logger.warning(
            "%s: %d examples are longer than the model's %d positions (max_position_embeddings), the longest has %d "
            "tokens: set train.max_length=%d", name, count, positions, lengths.max(), positions,
        )  # fmt: skip


def _tokens(ids: list) -> int:
    """Of an example, or of the examples of a packed row."""
    return sum(map(len, ids)) if ids and isinstance(ids[0], list) else len(ids)
