"""Raw rows -> rows of ids, as the method's kind of rows has them, mapped and cached by `datasets`."""

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import datasets
import numpy as np
import pandas as pd
import xxhash
from transformers import PreTrainedTokenizerBase

from ..errors import InputError, error_context, join_names, name_hint
from . import column_inference
from .assistant_mask import MASK_OPTIONS
from .dataset_type import AnyDataset
from .encode import (
    CHAT,
    TRUNCATED,
    NO_TARGET,
    OTHER_ROLES,
    IMAGE_TRUNCATED,
    Plan,
    with_context,
    encode,
    truncate,
    state_bits,
    read,
    check_misread,
    teacher_columns,
)
from .fingerprint import fingerprint
from .formats import Sample, detect_format, canonical_name, rename_columns, unread_columns
from .images import IMAGE_COLUMNS
from .images import IMAGES_TYPE, ImageReader, count_complete_images, get_image_reader
from .json_rows import JsonValue
from .messages import has_nested_null, without_none
from .packing import example_lengths
from .row_schema import Reader, RowKind
from .teacher_prompts import TEACHER_COLUMNS
from .teacher_prompts import build_teacher_plan, raw_teacher_columns

logger = logging.getLogger(__package__)
notes_logger = logging.getLogger(f"{__package__}.notes")  # lines that the audit shows as well

FACTS = {  # what is known of each example: its type in Arrow
    "row": datasets.Value("int64"),  # number of the raw row
    "state": datasets.Value("int8"),  # bits of `truncate` and `state_bits`
    "unknown": datasets.Value("bool"),  # has it the unknown token?
    "uncut": datasets.Value("int64"),  # tokens before they were cut, of the prompt and its longest answer in the data
    "trained": datasets.Value("int64"),  # with a loss, of the longest branch; 0 where answers are yet to be sampled
    "unread": datasets.Value("string"),  # what of its messages the chat template does not write, with commas
    "keys": datasets.List(datasets.Value("int64")),  # hashes of the uncut prompt with each branch; sampled: alone
}
SCORE_COLUMNS = {"ref_logps", "teacher_ids", "teacher_logps"}
ADDED_COLUMNS = {"mismatch_ids", "length", "images", "asked", *TEACHER_COLUMNS} | SCORE_COLUMNS
"""Columns that trainers and teachers add to prepared rows."""
_PROBED_ROWS = 20
"""Rows that are looked at for a prompt in columns that are not read."""
_MIXED = "rows differ in kind there, and text that looks like JSON is then read as JSON"


def prepare(
    dataset: AnyDataset, method: Reader, tokenizer: PreTrainedTokenizerBase, config: Any, name: str = "train"
) -> Any:
    """Token ids for `method`: exactly method.rows.columns, and `index` (row number).

    Rows that have these columns with their types (lists of int32) already are returned as they are.
    max_length (tokens) bounds prompt plus longest branch: the prompt is cut first, from the left (its BOS stays), down
    to half of it, then branches from the right. Where answers are sampled, max_length - max_completion_length bounds
    the prompt. Rows with no trained token left are dropped; counts are logged, of rows with the unknown token too (not
    of streams). Raises InputError for the first bad row.
    """
    # rows that are prepared have these types too, or lists of them where packed: other rows of ids are yet to be cut
    more: tuple[str, ...] = TEACHER_COLUMNS if build_teacher_plan(config) else ()
    more += ("images",) if get_image_reader(tokenizer) else ()
    more += ("asked",) if getattr(config, "keep_asked", False) else ()
    own = {*method.rows.columns, "index", *more}
    kinds = dict(dataset.features or {})
    typed = all(kinds.get(name) in (kind, datasets.List(kind)) for name, kind in _features(method.rows, False).items())
    if typed and own <= {*kinds} <= own | ADDED_COLUMNS:
        _check_length(dataset, method.rows, config, name)
        return dataset
    mapped = tokenize_dataset(dataset, method, tokenizer, config, name)
    columns = [*method.rows.columns, *more]
    streamed = isinstance(dataset, datasets.IterableDataset)
    told = ["state", "row", "unknown", "unread", "uncut"]
    facts: Any = None if streamed else mapped.select_columns(told).to_pandas()
    for note, level in collect_notes(dataset, method, config, tokenizer, facts).items():
        notes_logger.log(level, "%s: %s", name, note)
    if streamed:
        looked_at = {"input_columns": ["state", "row", "unread"], "fn_kwargs": {"name": name, "told": set()}}
        kept = mapped.filter(_keep_streamed, **looked_at)
        return kept.rename_column("row", "index").select_columns([*columns, "index"])

    state, row, unknown = (facts[column].to_numpy() for column in ("state", "row", "unknown"))
    if len(other := row[(state & CHAT > 0) != (state[0] & CHAT > 0)]):
        raise InputError(f"{name}, row {other[0]}: some rows hold plain text and some hold messages")
    lost = state & NO_TARGET > 0
    cut = state & IMAGE_TRUNCATED > 0
    dropped = row[lost & ~cut]
    truncated = int((~lost & (state & TRUNCATED > 0)).sum())
    line = f"{name}: {len(dataset)} rows read" + (f" as {len(mapped)} examples" if len(mapped) != len(dataset) else "")
    line += f", {truncated} truncated ({_limit(method.rows, config)}), {len(dropped)} dropped"
    if len(dropped):
        line += f" (no trained token left; first rows {', '.join(map(str, dropped[:5]))})"
    notes_logger.log(logging.WARNING if truncated or len(dropped) else logging.INFO, line)
    if cut.any():
        longest = facts["uncut"].to_numpy()[cut].max()
        rows_cut = ", ".join(map(str, row[cut][:5]))
        said = "%s: %d rows are left out, whose pictures max_length cuts (first rows %s; up to %d tokens): raise it"
        logger.warning(said, name, cut.sum(), rows_cut, longest)
    if lost.all():
        mend = ", or mend empty answers or masks" if len(dropped) else ", which cuts their pictures"
        raise InputError(f"{line}: nothing to train on; raise max_length{mend}")
    if len(strange := np.unique(row[~lost & unknown])):
        notes_logger.warning(
            "%s: %d rows hold the unknown token, for text outside the tokenizer's vocabulary (first rows %s): clean "
            "them, or use another tokenizer",
            name,
            len(strange),
            ", ".join(map(str, strange[:5])),
        )
    kept = mapped.select(np.flatnonzero(~lost)) if lost.any() else mapped
    return kept.select_columns(columns).add_column("index", np.arange(len(kept)))


def _limit(rows: RowKind, config: Any) -> str:
    """Return the options that limit the tokens of a row, with their values."""
    longest = getattr(config, "max_length", None)
    reserved = getattr(config, "max_completion_length", None)
    if longest is None or not reserved or not rows.sampled:
        return f"max_length {longest}"
    return f"prompts to {longest - reserved} tokens: max_length {longest} - max_completion_length {reserved}"


def _check_length(prepared: Any, rows: RowKind, config: Any, name: str) -> None:
    """Raises InputError for prepared rows that were cut to a larger max_length than that of today."""
    most = getattr(config, "max_length", None)
    if most is None or not isinstance(prepared, datasets.Dataset) or not len(prepared):
        return
    if (longest := example_lengths(prepared, () if rows.sampled else rows.answers).max()) > most:
        problem = f"rows that are prepared already have up to {longest} tokens, more than max_length {most}"
        raise InputError(f"{name}: {problem}: give the rows that they were made from, or raise it")


def _columns(dataset: AnyDataset) -> list[str]:
    return dataset.column_names or list(next(iter(dataset), {}))


def _features(rows: RowKind, facts: bool = True, more: Sequence[str] = ()) -> datasets.Features:
    types = {"label": datasets.Value("bool"), "prompt_key": datasets.Value("int64"), **FACTS}
    types |= {"teacher": datasets.Value("string"), "images": IMAGES_TYPE, "asked": datasets.Value("string")}
    ids = datasets.List(datasets.Value("int32"))
    names = (*rows.columns, *more, *(FACTS if facts else ()))
    return datasets.Features({name: types.get(name, ids) for name in names})


def to_prepared_rows(rows: Sequence[Mapping[str, Any]], kind: RowKind, sees: bool = False) -> datasets.Dataset:
    """Rows of ids, made by a program, as prepared ones: `kind.columns` of them and `index`. sees: with pictures."""
    features = _features(kind, False, ["images"] if sees else []) | {"index": datasets.Value("int64")}
    columns = {name: [row[name] for row in rows] for name in features}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def tokenize_dataset(
    dataset: AnyDataset, method: Reader, tokenizer: PreTrainedTokenizerBase, config: Any, name: str = "train"
) -> Any:
    """The examples of a data set as `prepare` makes them, those without a target too: method.rows.columns and FACTS.

    Rows of a file or a saved set come from the cache of `datasets` where `prepare` was called with the same arguments,
    and the other way round. Raises InputError for the first bad row.
    """
    with error_context(name):
        dataset, columns, form = _open(dataset, method, config)
        # null in all rows is absent; in some it would train all tokens of these rows
        masks = [
            column
            for column in ("labels", "completion_mask")
            if method.rows.masked
            and "_ids" in form
            and column in columns
            and (dataset.features or {}).get(column) != datasets.Value("null")
        ]
        asked = build_teacher_plan(config)
        sees = get_image_reader(tokenizer) is not None
        plan = build_plan(form, method, tokenizer, config, name)._replace(masks=tuple(masks), teacher=asked)
        if sees:
            dataset = _undecoded(dataset)
        else:
            _check_no_images(dataset, columns, form)
        _check_unread_prompt(dataset, columns, form, name)
    more = (*(TEACHER_COLUMNS if asked else ()), *(["images"] if sees else []), *(["asked"] if plan.keep_prompt else []))
    features = _features(method.rows, more=more)
    filled = null_filled_columns(dataset)
    kwargs = {
        "batched": True,
        "with_indices": True,
        "remove_columns": columns,
        "features": features,
        "fn_kwargs": {"tokenizer": tokenizer, "plan": plan, "filled": filled},
    }
    if not isinstance(dataset, datasets.Dataset):
        return dataset.map(tokenise, **kwargs)
    if mixed := [column for column in plan.form.split(" + ") if _is_mixed(dataset, column)]:
        raise InputError(f"{name}: column {mixed[0]!r}: {_MIXED}, so write text in all rows, or in none")
    kwargs |= {"num_proc": getattr(config, "dataset_num_proc", None), "desc": f"Tokenising {name}"}
    try:
        return dataset.map(tokenise, new_fingerprint=fingerprint(dataset, tokenizer, plan, filled), **kwargs)
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: a text is not UTF-8 ({error})") from error


def _open(dataset: AnyDataset, method: Reader, config: Any) -> tuple[Any, list[str], str]:
    """(the data set with our name for its text, its columns, its format)."""
    columns = _columns(dataset)
    field = getattr(config, "dataset_text_field", "text")
    ours = {column: canonical_name(column, columns) for column in columns}
    if field != "text" and field not in columns and "text" in columns:
        raise InputError(f"dataset_text_field: there is no column {field!r}{name_hint(field, columns)}")
    if field != "text" and field in columns:
        ours |= {"text": "other_text"} if "text" in columns else {}
        ours[field] = "text"
    dataset = rename_columns(dataset, ours)
    columns = list(ours.values())
    if not columns or (isinstance(dataset, datasets.Dataset) and not len(dataset)):
        raise InputError("the data set has no rows")
    try:
        form = detect_format(columns, method)
        label = (dataset.features or {}).get("label")
    except InputError as error:
        near = column_inference.suggest_format(list(islice(dataset, _PROBED_ROWS)), [method])
        here = (
            f"here {column_inference.format_columns(near.columns)}"
            if near and not near.missing
            else column_inference.misspelling_problem(columns)
        )
        raise InputError("; ".join(filter(None, (str(error), here)))) from error
    if field != "text" and form != "text":
        raise InputError(f"dataset_text_field: {field!r} is not read, since the rows are {form}: leave it out")
    is_read = "label" in {*form.split(" + "), *_answer_columns(method)}
    classes = label.names if is_read and isinstance(label, datasets.ClassLabel) else []
    if classes and [name.lower() for name in classes] not in (["false", "true"], ["0", "1"]):
        raise InputError(f"column 'label' numbers classes ({join_names(classes)}): write true for good answers, else false")
    return dataset, columns, form


def columns_read(dataset: AnyDataset, name: str, method: Reader, config: Any) -> list[str]:
    """The columns of a data set `name` that `method` reads. Raises InputError where it can read none, or not all."""
    rename_columns, columns, form = _open(dataset, method, config)
    _check_unread_prompt(rename_columns, columns, form, name)
    left = {*unread_columns(columns, form)} - raw_teacher_columns(config, columns) - {*IMAGE_COLUMNS} - _answer_columns(method)
    return [theirs for theirs, ours in zip(_columns(dataset), columns, strict=True) if ours not in left]


def _answer_columns(method: Reader) -> set[str]:
    """Columns besides the format that say whether an answer of the data is the right one."""
    return {"label"} if method.rows.sampled else set()


def _undecoded(dataset: AnyDataset) -> Any:
    """The data set with its pictures as files or bytes: nothing is decoded before it is looked at."""

    def plain(kind: Any) -> Any:
        if isinstance(kind, datasets.Image):
            return datasets.Image(decode=False)
        if isinstance(kind, datasets.List):
            return datasets.List(plain(kind.feature))
        return {key: plain(value) for key, value in kind.items()} if isinstance(kind, dict) else kind

    found = {column: plain(kind) for column, kind in (dataset.features or {}).items() if _contains_type(kind, datasets.Image)}
    return dataset.cast(datasets.Features(dataset.features | found)) if found else dataset


def _check_no_images(dataset: AnyDataset, columns: list[str], form: str) -> None:
    """Raises InputError where the first rows have pictures, which are not trained on, next to their text."""
    for column in column_inference.IMAGE_COLUMNS & {*(unread_columns(columns, form) if "_ids" not in form else ())}:
        alone = dataset.select_columns([column])
        kind = (dataset.features or {}).get(column)
        if _contains_type(kind, datasets.Image):  # as files or bytes: nothing is decoded
            plain: Any = datasets.Image(decode=False)
            alone = alone.cast_column(column, plain if isinstance(kind, datasets.Image) else datasets.List(plain))
        if problem := column_inference.image_problem(list(islice(alone, _PROBED_ROWS)), [column]):
            raise InputError(problem)


def _check_unread_prompt(dataset: AnyDataset, columns: list[str], form: str, name: str) -> None:
    """Raises InputError where the format has no prompt and a column that is not read says what was asked; beside a
    prompt such a column is warned of.
    """
    aside = unread_columns(columns, form)
    # where no name is suspicious no row is read, which a stream would have to read twice
    problem = (
        column_inference.prompt_problem(list(islice(dataset, _PROBED_ROWS)), aside, form)
        if column_inference.prompt_like_columns(aside)
        else None
    )
    if problem and "prompt" not in form:
        raise InputError(problem)
    if problem:
        logger.warning("%s: %s", name, problem)


def collect_notes(
    dataset: AnyDataset,
    method: Reader,
    config: Any,
    tokenizer: PreTrainedTokenizerBase,
    facts: pd.DataFrame | None = None,
) -> dict[str, int]:
    """What is given and not used, or used in another way than many expect: lines, with the level they are logged at.
    facts: FACTS of the examples, where they are known.
    """
    dataset, columns, form = _open(dataset, method, config)
    sees = get_image_reader(tokenizer) is not None
    found = {}
    for column in (column for column in columns if column not in unread_columns(columns, form)):
        if _contains_type((dataset.features or {}).get(column), datasets.Json, inside=True):
            remedy = "write tools and the arguments of calls as JSON text"
            problem = "has values of several types, of which the text '1' is read as 1"
            found[f"column {column!r} {problem}: {remedy}"] = logging.INFO
        written = isinstance(dataset, datasets.Dataset) and isinstance(dataset.features[column], JsonValue)
        if written and any(map(has_nested_null, islice(dataset[column], 1000))):
            why = "a file that Arrow or pandas wrote has them for the keys of other rows: take them out there"
            found[f"column {column!r} has nulls inside calls or tools, which are trained; {why}"] = logging.WARNING
    used = {"index", "prompt_key", *ADDED_COLUMNS} - {*IMAGE_COLUMNS} | raw_teacher_columns(config, columns) | _answer_columns(method)
    used |= {*IMAGE_COLUMNS} if sees else set()
    if aside := [column for column in unread_columns(columns, form) if column not in used]:
        found[f"read as {form}; columns not read: {join_names(aside)}"] = logging.INFO
    for column, meant in column_inference.misspelt_columns(aside, columns, form, method).items():
        mend = f"did you mean {meant!r}? (columns: {{{meant}: {column}}})"
        found[f"column {column!r} is not read: {mend}"] = logging.WARNING
    if tokenizer.chat_template and "_ids" not in form and form != "messages" and _is_plain(facts, form):
        instead = "messages" if form == "text" else "messages, or apply_chat_template: true"
        said = "the rows are plain text, without the chat template that the tokenizer has"
        found[f"{said}; a model that is to chat wants {instead}"] = logging.INFO
    alone = "; assistant_only_loss: true trains the assistant's alone" if method.rows.masked else ""
    chosen = getattr(config, "assistant_only_loss", None) or getattr(config, "train_on", None)
    if alone and form == "messages" and not chosen:
        found[f"all turns are trained, the users' too{alone}"] = logging.INFO
    if facts is None:
        return found
    for key in ("chat_template_kwargs", "reasoning"):
        if getattr(config, key, None) and not (facts.state & CHAT).any():
            plain = "no row goes through the chat template (plain text does with apply_chat_template: true)"
            found[f"{key}: {plain}"] = logging.INFO
    counted = facts.unread.value_counts().rename("n").rename_axis("what").reset_index()
    counted = counted.assign(what=counted.what.str.split(", ")).explode("what").groupby("what").n.sum()
    if told := ", ".join(f"{what} (in {n} example{'s' * (n != 1)})" for what, n in counted.items() if what):
        found[f"the chat template makes no use of: {told}"] = logging.WARNING
    if others := int((facts.state & OTHER_ROLES > 0).sum()):
        problem = "examples have turns of users or tools inside an answer, which count as a part of it, as in TRL"
        found[f"{others} {problem}{alone or '; give each row a prompt of all turns but the last'}"] = logging.WARNING
    return found


def _is_plain(facts: pd.DataFrame | None, form: str) -> bool:
    """Return whether no row goes through the chat template; of a stream only the format `text` shows it."""
    return form == "text" if facts is None else not (facts.state & CHAT).any()


def null_filled_columns(dataset: AnyDataset) -> list[str]:
    """The columns in which Arrow has given all mappings the same keys, None where a row had no such key."""
    return [column for column, kind in (dataset.features or {}).items() if _contains_type(kind, dict)]


def drop_null_fields(values: Mapping[str, Any], filled: Sequence[str]) -> dict[str, Any]:
    """A row, or a batch of columns, without those keys."""
    return {column: without_none(value) if column in filled else value for column, value in values.items()}


def _contains_type(kind: Any, wanted: type, inside: bool = False) -> bool:
    """Is a type of a column, or one inside it, a `wanted` one? inside: the column's own does not count."""
    parts = [kind.feature] if isinstance(kind, datasets.List) else kind.values() if isinstance(kind, dict) else []
    return (isinstance(kind, wanted) and not inside) or any(_contains_type(part, wanted) for part in parts)


def _is_mixed(dataset: datasets.Dataset, column: str) -> bool:
    """Is it text in some rows and something else in others? There `datasets` reads the text "4" as the number 4."""
    kind = dataset.features[column]
    if isinstance(kind, datasets.Json) and column != "label" and not column.endswith("_ids"):
        return any(isinstance(value, str) for value in dataset[column])
    fields = kind.feature if isinstance(kind, datasets.List) and isinstance(kind.feature, dict) else {}
    return any(isinstance(fields.get(key), datasets.Json) for key in ("content", "value"))


def build_plan(form: str, method: Reader, tokenizer: PreTrainedTokenizerBase, config: Any, name: str) -> Plan:
    """What rows of this form become. Raises InputError for options that do not go with it."""

    def option(key: str) -> Any:
        return getattr(config, key, None)

    max_length = option("max_length")
    as_chat = bool(option("apply_chat_template"))
    is_ids = "_ids" in form
    # what the mask of an answer is; rows without one may be the prompts of a recipe that trains with one (rounds)
    masked = method.rows.masked
    completion_only = option("completion_only_loss") if masked else None
    turns = option("train_on") if masked else None
    assistant_only = masked and (bool(option("assistant_only_loss")) or turns in ("assistant", "last"))
    if form in ("messages", "text") and completion_only:
        raise InputError(f"completion_only_loss needs prompt and completion, the data has {form}")
    if as_chat and (form == "text" or is_ids):
        raise InputError(f"apply_chat_template needs a column 'prompt' or 'instruction', the data has {form}")
    if as_chat and not tokenizer.chat_template:
        lacking = "apply_chat_template needs a chat template, the tokenizer has none"
        raise InputError(f"{lacking}: drop it, or set model.chat_template (--chat_template of commands)")
    if assistant_only and is_ids:
        raise InputError(f"{MASK_OPTIONS} needs messages, the data has {form}: give it a completion_mask")
    if assistant_only and not tokenizer.is_fast:
        slow = f"{type(tokenizer).__name__} does not say which characters a token stands for"
        raise InputError(f"{MASK_OPTIONS} needs a fast tokenizer: {slow}")
    if method.rows.sampled and max_length:
        max_length -= option("max_completion_length") or 0
    reader = get_image_reader(tokenizer)
    return Plan(
        method.name,
        method.rows,
        form,
        name,
        max_length,
        completion_only,
        assistant_only,
        option("chat_template_kwargs"),
        as_chat,
        max(tokenizer.get_vocab().values()) + 1 if is_ids else None,
        tokenizer.bos_token_id,
        last_turn=turns == "last",
        image_ids=tuple(reader.token_ids) if reader else (),
        image_folder=option("image_folder"),
        reasoning=option("reasoning"),
        keep_prompt=bool(option("keep_asked")),
    )


def tokenise(
    batch: dict[str, list], rows: list[int], tokenizer: PreTrainedTokenizerBase, plan: Plan, filled: Sequence[str] = ()
) -> dict:
    """A batch of raw rows -> columns of ids, and FACTS. rows: their numbers. filled: columns with keys that are None
    where Arrow has put them.
    """
    batch = drop_null_fields(batch, filled)
    reader = get_image_reader(tokenizer)
    # 1. raw rows -> samples, of which a row may give two; `origin` has the row of each
    samples = []
    origin = []
    raw = []
    for row, *values in zip(rows, *batch.values(), strict=True):
        given = dict(zip(batch, values, strict=True))
        with error_context(f"{plan.name}, row {row}"):
            found = read(given, plan)
            if reader and found[0].images:
                texts = tuple(map(reader.expansion, found[0].images))
                found = [sample._replace(expansions=texts) for sample in found]
        samples += found
        origin += [row] * len(found)
        raw += [given] * len(found)
    # 2. samples -> ids, of the whole batch together
    kinds = [state_bits(sample, plan) for sample in samples]
    more = teacher_columns(raw, samples, origin, tokenizer, plan, plan.teacher) if plan.teacher else {}
    if plan.keep_prompt:
        more["asked"] = [_prompt_as_json(sample, plan) for sample in samples]
    if "_ids" not in plan.form:
        if rows[0] == 0:
            check_misread(batch, samples, plan, tokenizer)
        samples = encode(samples, origin, tokenizer, plan)
    examples = []
    unknown = tokenizer.unk_token_id
    if unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id):  # as GPT-2's, which is no sign of unknown text
        unknown = None
    # 3. cut each to size, and note what the audit will count
    for row, sample, kind in zip(origin, samples, kinds, strict=True):
        with error_context(f"{plan.name}, row {row}"):
            whole = with_context(sample, plan)
            # where a prompt is trained too, it still gives way to its answer
            first, cut = truncate(sample, plan) if plan.completion_only is False and sample.prompt else (sample, 0)
            kept, state = truncate(with_context(first, plan), plan)
            if reader and not state & NO_TARGET:
                kept = _keep_complete_images(kept, reader)
        branches = kept.branches or [[]]
        trained = sum(kept.mask) if kept.mask is not None else max(map(len, branches))
        compared = [[]] if plan.rows.sampled else whole.branches
        examples.append(
            {
                "prompt_ids": kept.prompt,
                **dict(zip(plan.rows.answers, branches, strict=True)),
                "completion_mask": kept.mask,
                "label": kept.label,
                "prompt_key": prompt_key(whole.prompt, whole.images),
                "row": row,
                "state": state | cut & TRUNCATED | kind,
                "unknown": unknown is not None and any(unknown in ids for ids in (kept.prompt, *branches)),
                "unread": ", ".join(kept.unread),
                "uncut": len(whole.prompt) + max(map(len, compared)),
                "trained": 0 if plan.rows.sampled else trained,
                "keys": [prompt_key([*whole.prompt, -1, *branch], whole.images) for branch in compared],
                "images": list(kept.images),
            }
        )
    columns = (*plan.rows.columns, *FACTS, *(["images"] if reader else []))
    return {column: [example[column] for example in examples] for column in columns} | more


def _prompt_as_json(sample: Sample, plan: Plan) -> str:
    """The prompt as it stands in the data, as JSON, with what its template is given; of ids there is no more than they
    are.
    """
    prompt = None if "_ids" in plan.form else sample.prompt
    given = {"tools": sample.tools, "chat_template_kwargs": sample.template_kwargs} if sample.is_chat else {}
    return json.dumps({"prompt": prompt} | {name: value for name, value in given.items() if value}, ensure_ascii=False)


def _keep_complete_images(sample: Sample, reader: ImageReader) -> Sample:
    """The sample up to its last trained token, with the pictures that stand before it. Raises InputError where ids have
    other tokens for features than its pictures bring: a text may hold such a token.
    """
    if sample.mask:
        end = len(sample.mask) - sample.mask[::-1].index(1)
        sample = sample._replace(branches=[sample.branches[0][:end]], mask=sample.mask[:end])
    counts = [*map(reader.count_features, sample.expansions)] or reader.feature_counts(sample.images)
    for branch in sample.branches or [[]]:
        held = reader.count_feature_tokens([*sample.prompt, *branch])
        counts = counts[: count_complete_images(counts, held)] if sample.mask else counts
        if held != sum(counts):
            problem = f"its tokens have {held} places for features of pictures, and its pictures bring {sum(counts)}"
            raise InputError(f"{problem}: take the token of pictures out of the text")
    return sample._replace(images=sample.images[: len(counts)])


def prompt_key(ids: Sequence[int], pictures: Sequence[Mapping[str, Any]] = ()) -> int:
    """A hash of ids and pictures that is the same in every process, as a signed 64-bit number."""
    digest = xxhash.xxh64(np.array(ids, dtype="<i4").tobytes())
    for picture in pictures:
        digest.update(picture["bytes"] or picture["path"].encode())
    return digest.intdigest() - 2**63


def _keep_streamed(state: int, row: int, unread: str, name: str, told: set[str]) -> bool:
    if state & NO_TARGET:
        why = "max_length would cut its pictures" if state & IMAGE_TRUNCATED else "no trained token left"
        logger.warning("%s: row %d dropped (%s)", name, row, why)
    elif state & TRUNCATED and "truncated" not in told:
        told.add("truncated")
        logger.warning("%s: row %d is truncated to max_length, and others of this stream may be", name, row)
    for what in {*filter(None, unread_columns.split(", "))} - told:
        told.add(what)
        said = "%s: the chat template makes no use of: %s (row %d of this stream, and maybe others)"
        logger.warning(said, name, what, row)
    return not state & NO_TARGET
