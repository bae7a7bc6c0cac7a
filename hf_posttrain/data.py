"""Data: any source and any supported columns -> rows of token ids, one layout per method.

    check_sources    path, extension and emptiness of the sources, before anything slow
    load             sources -> one datasets.Dataset (or IterableDataset), columns renamed, mixed by weight
    detect           column names -> which of FORMATS this is
    prepare          raw rows -> COLUMNS[method], truncated, counted, cached by `datasets`

Inside `prepare` a row becomes `Sample`s (one small reader per format), then text, then ids. `prompt_ids` is context,
every token of a branch is predicted; SFT and KD say in `completion_mask` which of them are trained.
A user's mistake raises `InputError` with the data set's name, row (counted from 0), column and what was expected.
"""

import difflib
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from . import chat
from .errors import InputError

logger = logging.getLogger("hf_posttrain.data")

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
COLUMNS = {
    "sft": ("prompt_ids", "completion_ids", "completion_mask"),
    "kd": ("prompt_ids", "completion_ids", "completion_mask"),
    "dpo": ("prompt_ids", "chosen_ids", "rejected_ids"),
    "kto": ("prompt_ids", "completion_ids", "label"),
    "opd": ("prompt_ids", "completion_ids"),
}
KEPT, TRUNCATED, DROPPED = 0, 1, 2


# ---- sources -> raw rows


def check_sources(sources: Any, what: str = "data") -> None:
    """Existence, extension and emptiness of each local source, without reading it. Raises InputError."""
    for source in _as_list(sources):
        path = Path(source.path).expanduser()
        if path.is_file():
            if path.suffix not in BUILDERS:
                raise InputError(f"{what}: {path} has an unknown extension; known are {', '.join(BUILDERS)}")
            with path.open("rb") as file:
                if not any(line.strip() for line in file):
                    raise InputError(f"{what}: {path} is empty")
        elif path.is_dir():
            if not any(path.iterdir()):
                raise InputError(f"{what}: the folder {path} is empty")
        elif path.suffix in BUILDERS or path.is_absolute() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source.path):
            near = _nearest(path.name, [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else [])
            raise InputError(f"{what}: there is no file or folder {path}{near}")


def load(sources: Any, what: str = "data") -> datasets.Dataset | datasets.IterableDataset:
    """One data set from a source or a list of them: objects with path, name, split, columns, limit, weight, streaming.

    A source of weight w counts w times (repeated, or a seeded sample of it); streams are interleaved by weight.
    Raises InputError for what cannot be read, naming `what`, the path and, for malformed JSON, the line.
    """
    check_sources(sources, what)
    sources = _as_list(sources)
    parts = [_load_one(source, what) for source in sources]
    shared = [c for c in parts[0].column_names if all(c in part.column_names for part in parts)]
    if not shared:
        raise InputError(f"{what}: the sources share no column; rename with `columns`")
    parts = [part.select_columns(shared) for part in parts]
    weights = [float(source.weight) for source in sources]
    if isinstance(parts[0], datasets.IterableDataset):
        if set(weights) == {1.0}:
            return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
        odds = [w / sum(weights) for w in weights]
        return datasets.interleave_datasets(parts, probabilities=odds, seed=0, stopping_strategy="all_exhausted")
    parts = [_times(part, weight) for part, weight in zip(parts, weights, strict=True)]
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def _load_one(source: Any, what: str) -> datasets.Dataset | datasets.IterableDataset:
    path, split = Path(source.path).expanduser(), source.split or "train"
    options = {"split": split, "streaming": bool(source.streaming)}
    try:
        if path.is_file():
            files = {split.partition("[")[0]: str(path)}
            rows = datasets.load_dataset(BUILDERS[path.suffix], data_files=files, **options)
        elif (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            rows = datasets.load_from_disk(str(path))
            rows = rows[split] if isinstance(rows, dict) else rows
        else:
            rows = datasets.load_dataset(str(path) if path.is_dir() else source.path, source.name, **options)
        if rows.column_names is None:
            rows = rows._resolve_features()
    except Exception as error:
        line = _malformed_line(path) if path.is_file() and BUILDERS[path.suffix] == "json" else None
        local = "" if path.exists() else " (it is no file or folder here, so the hub was asked)"
        raise InputError(f"{what}: cannot read {source.path}{local}: {line or error.__cause__ or error}") from error
    if isinstance(rows, datasets.Dataset) and len(rows) == 0:
        raise InputError(f"{what}: {source.path} has no rows")
    rows = _rename(rows, source.columns or {}, f"{what}: {source.path}")
    if source.limit is None:
        return rows
    return rows.take(source.limit) if options["streaming"] else rows.select(range(min(source.limit, len(rows))))


def _malformed_line(path: Path) -> str | None:
    text = path.read_text(errors="replace")
    chunks = [(1, text)] if text.lstrip().startswith("[") else enumerate(text.split("\n"), 1)
    for first, chunk in chunks:
        try:
            json.loads(chunk or "0")
        except json.JSONDecodeError as error:
            return f"line {first + error.lineno - 1} is not valid JSON ({error.msg}, column {error.colno})"
    return None


def _rename(rows: Any, columns: dict[str, str], where: str) -> Any:
    """`columns` is {our name: theirs}."""
    for ours, theirs in columns.items():
        if theirs not in rows.column_names:
            near, names = _nearest(theirs, rows.column_names), ", ".join(rows.column_names)
            raise InputError(f"{where}: no column {theirs!r} for {ours!r}{near}; there are {names}")
    taken = [ours for ours in columns if ours in rows.column_names and ours not in columns.values()]
    return rows.remove_columns(taken).rename_columns({theirs: ours for ours, theirs in columns.items()})


def _times(rows: datasets.Dataset, weight: float) -> datasets.Dataset:
    if weight == 1:
        return rows
    n, size = len(rows), round(weight * len(rows))
    order = np.concatenate([np.arange(n)] * (size // n) + [np.random.default_rng(0).permutation(n)[: size % n]])
    return rows.select(order)


def _as_list(sources: Any) -> list:
    return list(sources) if isinstance(sources, list | tuple) else [sources]


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


# ---- one raw row -> samples


class Sample(NamedTuple):
    """An example: first raw, then text, then ids. `prompt` None: the one branch is a whole text or conversation."""

    prompt: Any  # str | messages | list[int] | None
    branches: list  # [] | [completion] | [chosen, rejected], each of the prompt's kind
    label: bool | None = None
    mask: list[int] | None = None  # of the one branch, once it is ids
    tools: list | None = None


def _value(row: dict, column: str) -> str | chat.Messages:
    value = row.get(column)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InputError(f"column {column!r}: expected a string or a list of messages, found {value!r}")
    with _located(f"column {column!r}"):
        return chat.clean_messages(value)


def _completion(row: dict, column: str) -> str | chat.Messages:
    value = _value(row, column)
    if isinstance(value, list) and value[-1]["role"] != "assistant":
        raise InputError(f"column {column!r}: the last turn is {value[-1]['role']!r}, expected 'assistant'")
    if not (value if isinstance(value, str) else value[-1]["content"] or value[-1].get("tool_calls")):
        raise InputError(f"column {column!r}: empty completion")
    return value


def _label(row: dict) -> bool:
    if not isinstance(row["label"], bool | int | np.bool_) or row["label"] not in (0, 1):
        raise InputError(f"column 'label': expected true or false (or 1, 0), found {row['label']!r}")
    return bool(row["label"])


def _tools(row: dict) -> list | None:
    tools = row.get("tools")
    try:
        return chat.without_none(json.loads(tools) if isinstance(tools, str) and tools else tools) or None
    except json.JSONDecodeError as error:
        raise InputError(f"column 'tools': not valid JSON ({error})") from None


def _ids(row: dict, column: str) -> list[int]:
    value = row.get(column)
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise InputError(f"column {column!r}: expected a list of token ids, found {str(value)[:60]}")
    return value


def _read_text(row: dict) -> Sample:
    if not isinstance(row["text"], str) or not row["text"]:
        raise InputError(f"column 'text': expected a text that is not empty, found {row['text']!r}")
    return Sample(None, [row["text"]])


def _read_messages(row: dict) -> Sample:
    column = "messages" if "messages" in row else "conversations"
    with _located(f"column {column!r}"):
        return Sample(None, [chat.clean_messages(row[column])], tools=_tools(row))


def _read_completion(row: dict) -> Sample:
    return Sample(_value(row, "prompt"), [_completion(row, "completion")], tools=_tools(row))


def _read_label(row: dict) -> Sample:
    sample = _read_ids(row) if "prompt_ids" in row else _read_completion(row)
    return sample._replace(label=_label(row))


def _read_preference(row: dict) -> Sample:
    chosen, rejected = _completion(row, "chosen"), _completion(row, "rejected")
    if "prompt" not in row or (isinstance(row["prompt"], str) and isinstance(chosen, list)):
        return _shared_prompt(chosen, rejected)._replace(tools=_tools(row))  # a string beside whole conversations
    return Sample(_value(row, "prompt"), [chosen, rejected], tools=_tools(row))


def _shared_prompt(chosen: str | chat.Messages, rejected: str | chat.Messages) -> Sample:
    """The longest common beginning is the prompt: whole messages, or text up to a word or line boundary (a space
    belongs to the completions, a line break to the prompt). No branch is left empty."""
    n = min(chat.shared_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if isinstance(chosen, str) and isinstance(rejected, str):
        while n and chosen[n - 1] != "\n" and (chosen[n], rejected[n]) != (" ", " "):
            n -= 1
    elif n == 0:
        raise InputError("columns 'chosen' and 'rejected': the conversations share no first message to be the prompt")
    return Sample(chosen[:n], [chosen[n:], rejected[n:]])


def _read_prompt(row: dict) -> Sample:
    return Sample(_value(row, "prompt"), [], tools=_tools(row))


def _read_ids(row: dict) -> Sample:
    if "input_ids" in row:
        return _read_input_ids(row)
    names = ("chosen_ids", "rejected_ids") if "chosen_ids" in row else ("completion_ids",)
    branches = [_ids(row, name) for name in names if name in row]
    mask = row.get("completion_mask")
    return Sample(_ids(row, "prompt_ids"), branches, mask=_mask(mask, branches[0]) if mask and branches else None)


def _read_input_ids(row: dict) -> Sample:
    ids, labels, mask = _ids(row, "input_ids"), row.get("labels"), row.get("completion_mask")
    if labels is not None:
        if len(labels) != len(ids) or any(a not in (-100, b) for a, b in zip(labels, ids, strict=True)):
            raise InputError("column 'labels': expected -100 or the token of 'input_ids' at the same position")
        mask = [int(label != -100) for label in labels]
    return Sample([], [ids], mask=_mask([1] * len(ids) if mask is None else mask, ids))


def _mask(mask: list[int], ids: list[int]) -> list[int]:
    if len(mask) != len(ids) or not set(mask) <= {0, 1}:
        raise InputError(f"column 'completion_mask': expected {len(ids)} values 0 or 1, one for each token")
    return [int(m) for m in mask]


FORMATS: dict[str, Callable[[dict], Sample]] = {  # the name is the columns it needs
    "prompt_ids + completion_ids + label": _read_label,
    "prompt_ids + chosen_ids + rejected_ids": _read_ids,
    "prompt_ids + completion_ids": _read_ids,
    "prompt_ids": _read_ids,
    "input_ids": _read_ids,
    "prompt + completion + label": _read_label,
    "prompt + chosen + rejected": _read_preference,
    "chosen + rejected": _read_preference,
    "prompt + completion": _read_completion,
    "messages": _read_messages,
    "conversations": _read_messages,
    "text": _read_text,
    "prompt": _read_prompt,
}
_SUPERVISED = ("prompt_ids + completion_ids", "input_ids", "prompt + completion", "messages", "conversations", "text")
_PAIRS = ("prompt + chosen + rejected", "chosen + rejected")
ACCEPTS = {  # in order of preference
    "sft": _SUPERVISED,
    "kd": _SUPERVISED,
    "dpo": ("prompt_ids + chosen_ids + rejected_ids", *_PAIRS),
    "kto": ("prompt_ids + completion_ids + label", "prompt + completion + label", *_PAIRS),
    "opd": ("prompt_ids", "prompt + completion", "prompt", "messages", "conversations"),
}


def detect(columns: list[str], method: str) -> str:
    """Which of FORMATS `method` reads from these columns. Raises InputError listing what it could read."""
    for form in ACCEPTS[method]:
        if {*form.split(" + ")} <= {*columns}:
            return form
    missing = {c for form in ACCEPTS[method] for c in form.split(" + ")} - {*columns}
    near = next((hint for c in sorted(missing) if (hint := _nearest(c, columns))), "")
    raise InputError(
        f"columns {', '.join(columns)} are none that {method} reads{near}: {' | '.join(ACCEPTS[method])}; "
        "rename yours with data.train.columns, for instance {prompt: question}"
    )


# ---- samples -> ids


class _Plan(NamedTuple):
    """What the rows become: plain values, so that `datasets` can fingerprint them."""

    method: str
    form: str
    name: str
    max_length: int | None
    max_prompt: int | None
    completion_only: bool | None
    assistant_only: bool
    template_kwargs: dict | None
    code: str = sha256(Path(__file__).read_bytes() + Path(chat.__file__).read_bytes()).hexdigest()  # ages the cache


def prepare(dataset: Any, method: str, tokenizer: PreTrainedTokenizerBase, config: Any, name: str = "train") -> Any:
    """Token ids for `method`: exactly COLUMNS[method], and `index` (row number) unless the data set is a stream.

    Reads max_length, max_completion_length (OPD), completion_only_loss, assistant_only_loss, dataset_text_field,
    dataset_num_proc and chat_template_kwargs from `config`. max_length (tokens) bounds prompt plus longest branch: the
    prompt is cut first, from the left, then branches from the right. For OPD, max_length - max_completion_length
    bounds the prompt and completions stay whole. Rows with no trained token left are dropped; counts are logged.
    Raises InputError for the first bad row.
    """
    columns = dataset.column_names or list(next(iter(dataset), {}))
    field = getattr(config, "dataset_text_field", "text")
    if field != "text" and field in columns and "text" not in columns:
        dataset = dataset.rename_column(field, "text")
        columns = dataset.column_names or list(next(iter(dataset), {}))
    with _located(name):
        if not columns or (isinstance(dataset, datasets.Dataset) and not len(dataset)):
            raise InputError("the data set has no rows")
        plan = _plan(detect(columns, method), method, config, name)
    kwargs = {"batched": True, "with_indices": True, "remove_columns": columns}
    kwargs |= {"fn_kwargs": {"tokenizer": tokenizer, "plan": plan}, "features": _features(method)}
    if not isinstance(dataset, datasets.Dataset):
        mapped = dataset.map(_tokenise, **kwargs)
        kept = mapped.filter(_keep_streamed, input_columns=["state", "row"], fn_kwargs={"name": name})
        return kept.select_columns(list(COLUMNS[method]))
    workers = getattr(config, "dataset_num_proc", None)
    mapped = dataset.map(_tokenise, num_proc=workers, desc=f"Tokenising {name}", **kwargs)
    return _count(mapped, len(dataset), plan)


def _plan(form: str, method: str, config: Any, name: str) -> _Plan:
    def read(key: str) -> Any:
        return getattr(config, key, None)

    max_length, max_new = read("max_length"), read("max_completion_length") or 0
    if method == "opd" and max_length is not None and max_length <= max_new:
        raise InputError(f"max_length {max_length} leaves no prompt beside max_completion_length {max_new}")
    whole = form in ("messages", "conversations", "text")
    completion_only, assistant_only = read("completion_only_loss"), bool(read("assistant_only_loss"))
    template_kwargs = read("chat_template_kwargs")
    if method in ("sft", "kd") and whole and completion_only:
        raise InputError(f"completion_only_loss needs prompt and completion, the data has {form}")
    if assistant_only and form == "text":
        raise InputError("assistant_only_loss needs messages, the data has text")
    max_prompt = max_length - max_new if method == "opd" and max_length else None
    return _Plan(method, form, name, max_length, max_prompt, completion_only, assistant_only, template_kwargs)


def _features(method: str) -> datasets.Features:
    lists = {column: datasets.List(datasets.Value("int32")) for column in COLUMNS[method]}
    label = {"label": datasets.Value("bool")} if "label" in lists else {}
    return datasets.Features({**lists, **label, "row": datasets.Value("int64"), "state": datasets.Value("int8")})


def _tokenise(batch: dict[str, list], rows: list[int], tokenizer: PreTrainedTokenizerBase, plan: _Plan) -> dict:
    """A batch of raw rows -> columns of ids, plus `row` (where it came from) and `state` (KEPT, TRUNCATED, DROPPED)."""
    samples, origin = [], []
    for n, row in enumerate(rows):
        with _located(f"{plan.name}, row {row}"):
            found = _read({column: values[n] for column, values in batch.items()}, plan)
        samples += found
        origin += [row] * len(found)
    samples = samples if "_ids" in plan.form else _encode(samples, origin, tokenizer, plan)
    out: dict[str, list] = {column: [] for column in (*COLUMNS[plan.method], "row", "state")}
    for row, sample in zip(origin, samples, strict=True):
        with _located(f"{plan.name}, row {row}"):
            sample, state = _fit(_context(sample, plan), plan)
        extra = {"dpo": [], "kto": [sample.label], "opd": []}.get(plan.method, [sample.mask])
        branches = sample.branches or [[]]
        for column, value in zip(out, [sample.prompt, *branches, *extra, row, state], strict=True):
            out[column].append(value)
    return out


def _read(row: dict, plan: _Plan) -> list[Sample]:
    """The samples of a row for this method: KTO splits pairs; OPD splits a conversation at its last turn."""
    sample = FORMATS[plan.form](row)
    parts = [part for part in (sample.prompt, *sample.branches) if part is not None]
    if len({type(part) for part in parts}) > 1:
        raise InputError(f"columns {plan.form}: some are strings and some are lists of messages, expected one kind")
    if plan.method == "kto" and len(sample.branches) == 2:
        chosen, rejected = sample.branches
        return [sample._replace(branches=[b], label=label) for b, label in ((chosen, True), (rejected, False))]
    if plan.method == "opd" and sample.prompt is None:
        turns = sample.branches[0]
        answered = turns[-1]["role"] == "assistant" and len(turns) > 1
        return [sample._replace(prompt=turns[:-1], branches=[turns[-1:]]) if answered else
                sample._replace(prompt=turns, branches=[])]  # fmt: skip
    return [sample]


def _encode(samples: list[Sample], rows: list[int], tokenizer: PreTrainedTokenizerBase, plan: _Plan) -> list[Sample]:
    """Raw samples -> ids. All are plain text or all are messages; the whole batch is tokenised together."""
    first = _first_part(samples[0])
    with _located(plan.name):
        is_chat = isinstance(first, list)
        end_id = chat.turn_end_id(tokenizer, plan.template_kwargs) if is_chat else chat.eos_id(tokenizer)
    texts = []
    for sample, row in zip(samples, rows, strict=True):
        with _located(f"{plan.name}, row {row}"):
            if type(_first_part(sample)) is not type(first):
                raise InputError(f"columns {plan.form}: some rows hold plain text and some hold messages")
            texts.append(_assistant_ids(sample, tokenizer, plan) if plan.assistant_only else
                         _text(sample, tokenizer, plan))  # fmt: skip
    if plan.assistant_only:
        return texts
    prompts = [text.prompt for text in texts for _ in text.branches or [""]]
    completions = [branch for text in texts for branch in text.branches or [""]]
    pairs = iter(chat.encode_pairs(tokenizer, prompts, completions, end_id))
    encoded = []
    for text in texts:
        mine = [next(pairs) for _ in text.branches or [""]]
        encoded.append(text._replace(prompt=mine[0][0], branches=[ids for _, ids in mine][: len(text.branches)]))
    return encoded


def _first_part(sample: Sample) -> Any:
    return sample.branches[0] if sample.prompt is None else sample.prompt


def _text(sample: Sample, tokenizer: PreTrainedTokenizerBase, plan: _Plan) -> Sample:
    """Messages -> text; plain strings stay as they are. A whole text is a branch of the empty prompt."""
    options = (sample.tools, plan.template_kwargs)
    if isinstance(_first_part(sample), str):
        return sample._replace(prompt=sample.prompt or "")
    if sample.prompt is None:
        return sample._replace(prompt="", branches=[chat.render(tokenizer, sample.branches[0], *options)])
    if not sample.branches:
        return sample._replace(prompt=chat.prompt_text(tokenizer, sample.prompt, *options))
    pairs = [chat.split_chat(tokenizer, sample.prompt, branch, *options) for branch in sample.branches]
    return sample._replace(prompt=pairs[0][0], branches=[text for _, text in pairs])


def _assistant_ids(sample: Sample, tokenizer: PreTrainedTokenizerBase, plan: _Plan) -> Sample:
    """Ids and mask of what assistants wrote: in the completion where there is one, otherwise everywhere."""
    options = (sample.tools, plan.template_kwargs)
    if isinstance(_first_part(sample), str):
        raise InputError(f"assistant_only_loss needs messages, {plan.form} holds plain text")
    if sample.prompt is None:
        ids, mask = chat.assistant_mask(tokenizer, sample.branches[0], *options)
        return Sample([], [ids], mask=mask)
    ids, mask = chat.assistant_mask(tokenizer, chat.join_messages(sample.prompt, sample.branches[0]), *options)
    if plan.completion_only is not False:
        context = len(chat.encode(tokenizer, [chat.prompt_text(tokenizer, sample.prompt, *options)])[0])
        mask = [0] * context + mask[context:]
    return Sample([], [ids], mask=mask)


def _context(sample: Sample, plan: _Plan) -> Sample:
    """`sample` with at least one prompt token. SFT and KD without a prompt, or with every token trained, take what
    stands before the first trained token, at least one; the other methods refuse an empty prompt."""
    prompt, branches = sample.prompt, sample.branches
    if plan.method != "opd" and not all(branches):
        raise InputError("empty completion")
    if plan.method not in ("sft", "kd"):
        if not prompt:
            raise InputError(f"column 'prompt': empty, {plan.method} needs a prompt of at least one token")
        return sample
    ids = prompt + branches[0]
    mask = [int(plan.completion_only is False)] * len(prompt) + (sample.mask or [1] * len(branches[0]))
    n = len(prompt) if prompt and plan.completion_only is not False else max(1, mask.index(1) if 1 in mask else 1)
    return sample._replace(prompt=ids[:n], branches=[ids[n:]], mask=mask[n:])


def _fit(sample: Sample, plan: _Plan) -> tuple[Sample, int]:
    """The sample cut to size, and whether that left it KEPT, TRUNCATED or DROPPED (no trained token)."""
    prompt, branches, mask = sample.prompt, sample.branches, sample.mask
    if plan.max_prompt is not None:
        prompt = prompt[-plan.max_prompt :]
    elif plan.max_length is not None and plan.method != "opd":
        prompt = prompt[-max(1, plan.max_length - max(map(len, branches))) :]
        branches = [branch[: plan.max_length - 1] for branch in branches]
        mask = mask and mask[: plan.max_length - 1]
    fitted = sample._replace(prompt=prompt, branches=branches, mask=mask)
    if plan.method != "opd" and not (all(branches) and (mask is None or any(mask))):
        return fitted, DROPPED
    return fitted, KEPT if (prompt, branches) == (sample.prompt, sample.branches) else TRUNCATED


def _count(mapped: datasets.Dataset, read: int, plan: _Plan) -> datasets.Dataset:
    """Drops what has to go, numbers the rest in `index`, and logs one line of counts."""
    state, row = np.array(mapped["state"][:]), np.array(mapped["row"][:])
    dropped, truncated = row[state == DROPPED], int((state == TRUNCATED).sum())
    line = f"{plan.name}: {read} rows read" + (f" as {len(mapped)} examples" if len(mapped) != read else "")
    line += f", {truncated} truncated (max_length {plan.max_length}), {len(dropped)} dropped"
    if len(dropped):
        line += f" (no trained token left; first rows {', '.join(map(str, dropped[:5]))})"
    logger.log(logging.WARNING if truncated or len(dropped) else logging.INFO, line)
    if len(dropped) == len(mapped):
        raise InputError(f"{line}: nothing to train on; raise max_length")
    kept = mapped.select(np.flatnonzero(state != DROPPED)) if len(dropped) else mapped
    return kept.select_columns(list(COLUMNS[plan.method])).add_column("index", list(range(len(kept))))


def _keep_streamed(state: int, row: int, name: str) -> bool:
    if state == DROPPED:
        logger.warning("%s: row %d dropped (no trained token left)", name, row)
    return state != DROPPED


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Puts `where` in front of an InputError's message."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
