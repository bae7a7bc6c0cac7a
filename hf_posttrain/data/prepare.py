"""Conversion of raw rows to prepared rows of token ids, which `datasets` maps and caches."""

import json
import logging
import sys
from array import array
from collections.abc import Container, Mapping, Sequence
from itertools import islice
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import xxhash
from transformers import PreTrainedTokenizerBase

from ..errors import InputError, count_noun, error_context, join_names, name_hint
from . import column_inference
from .assistant_mask import MASK_OPTIONS
from .dataset_type import AnyDataset
from .encode import (
    CHAT,
    IMAGE_TRUNCATED,
    NO_TARGET,
    OTHER_ROLES,
    TRUNCATED,
    Plan,
    check_misread,
    encode,
    read,
    state_bits,
    teacher_columns,
    truncate,
    with_context,
)
from .fingerprint import fingerprint
from .formats import Sample, canonical_name, detect_format, rename_columns, unread_columns
from .images import IMAGE_COLUMNS, IMAGES_TYPE, ImageReader, count_complete_images, get_image_reader
from .json_rows import JsonValue
from .loss_groups import group_column, read_group
from .messages import has_nested_null, without_none
from .packing import example_lengths
from .recorded_scores import build_recorded_plan, check_prepared, read_scores, recorded_columns
from .row_schema import SPAN_COLUMN, Reader, RowKind
from .teacher_prompts import TEACHER_COLUMNS, build_teacher_plan, raw_teacher_columns
from .text_weights import unused_patterns, weighted_sample

logger = logging.getLogger(__package__)
notes_logger = logging.getLogger(f"{__package__}.notes")  # lines that the audit shows too

FACTS = {  # facts about each example -> type in Arrow
    "row": datasets.Value("int64"),  # number of the raw row
    "state": datasets.Value("int8"),  # bits of `truncate` and `state_bits`
    "unknown": datasets.Value("bool"),  # whether it has the unknown token
    "uncut": datasets.Value("int64"),  # tokens before truncation, of the prompt and its longest answer in the data
    "trained": datasets.Value("int64"),  # trained tokens of the longest branch; 0 if answers are sampled
    "unread": datasets.Value("string"),  # parts of its messages that the template does not write, separated by commas
    "keys": datasets.List(datasets.Value("int64")),  # hashes of the full prompt with each branch, or of the prompt
}
SCORE_COLUMNS = {"ref_logps", "teacher_ids", "teacher_logps", "teacher_hidden"}
ADDED_COLUMNS = {
    "mismatch_ids",
    "length",
    "images",
    "asked",
    "group",
    "token_weights",
    *TEACHER_COLUMNS,
    *SCORE_COLUMNS,
}
"""Columns that trainers and teachers add to prepared rows."""
_PROBED_ROWS = 20
"""Number of rows that are searched for a prompt or images in columns that are not read."""


def prepare(
    dataset: AnyDataset, method: Reader, tokenizer: PreTrainedTokenizerBase, config: object, name: str = "train"
) -> Any:
    """Convert a data set to prepared rows of token ids.

    `max_length` limits the tokens of the prompt plus the longest branch. The prompt is truncated first, from the left
    (its BOS token is kept), down to half of `max_length`, then the branches from the right. If answers are sampled, the
    prompt is limited to `max_length - max_completion_length`. Rows without a trained token are dropped. The numbers of
    truncated and dropped rows are logged, and except for streams that of rows with the unknown token.

    Args:
        dataset: Raw rows. Rows that have the columns of prepared rows with their types (lists of int32) are returned
            unchanged.
        method: The method, which determines the columns.
        tokenizer: The tokenizer, with an ImageReader if the model supports images.
        config: The Config, or any object with some of its options, or None.
        name: Name of the data set in messages.

    Returns:
        A data set with the columns `method.rows.columns`, `index` (the number of the row), and columns for teachers,
        images and judges if the options require them.

    Raises:
        InputError: For the first invalid row, and if no row is left.
    """
    extra_columns: tuple[str, ...] = TEACHER_COLUMNS if build_teacher_plan(config) else ()
    extra_columns += ("images",) if get_image_reader(tokenizer) else ()
    extra_columns += ("asked",) if getattr(config, "keep_asked", False) else ()
    extra_columns += ("group",) if group_column(config) else ()
    extra_columns += ("token_weights",) if _has_weights(dataset, method, config) else ()
    extra_columns += recorded_columns(config)

    # prepared rows have these types, or lists of them if packed; other rows of ids are not truncated yet
    required = {*method.rows.columns, "index", *extra_columns}
    kinds = dict(dataset.features or {})
    is_typed = all(
        kinds.get(name) in (kind, datasets.List(kind)) for name, kind in _features(method.rows, False).items()
    )
    if is_typed and required <= {*kinds} <= required | ADDED_COLUMNS:
        _check_length(dataset, method.rows, config, name)
        check_prepared(dataset, config, name)
        if isinstance(dataset, datasets.Dataset):
            _report_unused_patterns(dataset, method, config, name)
        if "group" in kinds and not group_column(config):
            dataset = dataset.remove_columns("group")
        return _with_unique_numbers(dataset)

    mapped = tokenize_dataset(dataset, method, tokenizer, config, name)
    columns = [*method.rows.columns, *extra_columns]
    is_stream = isinstance(dataset, datasets.IterableDataset)
    fact_columns = ["state", "row", "unknown", "unread", "uncut"]
    facts: Any = None if is_stream else mapped.select_columns(fact_columns).to_pandas()
    for note, level in collect_notes(dataset, method, config, tokenizer, facts).items():
        notes_logger.log(level, "%s: %s", name, note)
    if is_stream:
        arguments = {"input_columns": ["state", "row", "unread"], "fn_kwargs": {"name": name, "reported": set()}}
        kept = mapped.filter(_keep_streamed, **arguments)
        return kept.rename_column("row", "index").select_columns([*columns, "index"])

    state, row, unknown = (facts[column].to_numpy() for column in ("state", "row", "unknown"))
    if len(other := row[(state & CHAT > 0) != (state[0] & CHAT > 0)]):
        raise InputError(f"{name}, row {other[0]}: some rows hold plain text and some hold messages")

    lost = state & NO_TARGET > 0
    image_lost = state & IMAGE_TRUNCATED > 0
    dropped = row[lost & ~image_lost]
    truncated = int((~lost & (state & TRUNCATED > 0)).sum())
    line = f"{name}: {count_noun(len(dataset), 'row')} read"
    line += f" as {count_noun(len(mapped), 'example')}" if len(mapped) != len(dataset) else ""
    line += f", {truncated} truncated ({_limit(method.rows, config)}), {len(dropped)} dropped"
    if len(dropped):
        line += f" (no trained token left; first rows {', '.join(map(str, dropped[:5]))})"
    notes_logger.log(logging.WARNING if truncated or len(dropped) else logging.INFO, line)
    if image_lost.any():
        logger.warning(
            "%s: %d rows are left out, since max_length would truncate their images (first rows %s, up to %d tokens). "
            "Increase max_length",
            name,
            image_lost.sum(),
            ", ".join(map(str, row[image_lost][:5])),
            facts["uncut"].to_numpy()[image_lost].max(),
        )
    if lost.all():
        fix = ", or correct empty answers and masks" if len(dropped) else ", which truncates their images"
        raise InputError(f"{line}: nothing to train on. Increase max_length{fix}")
    if len(unknown_rows := np.unique(row[~lost & unknown])):
        notes_logger.warning(
            "%s: %d rows hold the unknown token, for text outside the tokenizer's vocabulary (first rows %s). Clean "
            "them, or use another tokenizer",
            name,
            len(unknown_rows),
            ", ".join(map(str, unknown_rows[:5])),
        )
    kept = mapped.select(np.flatnonzero(~lost)) if lost.any() else mapped
    _report_unused_patterns(mapped, method, config, name)
    return kept.select_columns(columns).add_column("index", np.arange(len(kept)))


def _with_unique_numbers(rows: AnyDataset) -> AnyDataset:
    """Return prepared rows with new numbers if two rows have the same, as in a concatenation of prepared data sets."""
    if not isinstance(rows, datasets.Dataset) or len(np.unique(rows["index"])) == len(rows):
        return rows
    return rows.remove_columns("index").add_column("index", np.arange(len(rows)))


def _limit(rows: RowKind, config: object) -> str:
    """Return the options that limit the tokens of a row, with their values."""
    max_length = getattr(config, "max_length", None)
    reserved = getattr(config, "max_completion_length", None)
    if max_length is None or not reserved or not rows.sampled:
        return f"max_length {max_length}"
    return f"prompts to {max_length - reserved} tokens: max_length {max_length} - max_completion_length {reserved}"


def _check_length(prepared: AnyDataset, rows: RowKind, config: object, name: str) -> None:
    """Raise InputError for prepared rows that were truncated to a larger `max_length` than the present one."""
    max_length = getattr(config, "max_length", None)
    if max_length is None or not isinstance(prepared, datasets.Dataset) or not len(prepared):
        return
    if (longest := example_lengths(prepared, () if rows.sampled else rows.answers).max()) > max_length:
        raise InputError(
            f"{name}: the prepared rows have up to {longest} tokens, more than max_length {max_length}. Pass the raw "
            "rows, or increase max_length"
        )


def _has_weights(dataset: AnyDataset, method: Reader, config: object) -> bool:
    """Return whether tokens of the rows have weights."""
    return method.rows.masked and bool(getattr(config, "text_weights", None) or SPAN_COLUMN in _columns(dataset))


def _report_unused_patterns(rows: datasets.Dataset, method: Reader, config: object, name: str) -> None:
    """Warn of a pattern of `text_weights` whose weight no token has."""
    if method.rows.masked and (unused := unused_patterns(rows, getattr(config, "text_weights", None) or {})):
        problem = "no token has its weight, so that it matches no answer"
        logger.warning("%s: text_weights[%r]: %s. Correct or remove it", name, unused[0], problem)


def _columns(dataset: AnyDataset) -> list[str]:
    return dataset.column_names or list(next(iter(dataset), {}))


def _features(rows: RowKind, facts: bool = True, extra_columns: Sequence[str] = ()) -> datasets.Features:
    """Return the types of prepared rows, with FACTS or without."""
    types = {
        "label": datasets.Value("bool"),
        "margin": datasets.Value("float64"),
        "prompt_key": datasets.Value("int64"),
        **FACTS,
    }
    types |= {"teacher": datasets.Value("string"), "images": IMAGES_TYPE, "asked": datasets.Value("string")}
    types["group"] = datasets.Value("string")
    types["token_weights"] = datasets.List(datasets.Value("float32"))
    ids = datasets.List(datasets.Value("int32"))
    types |= {
        "teacher_ids": datasets.List(ids),
        "teacher_logps": datasets.List(datasets.List(datasets.Value("float32"))),
    }
    names = (*rows.columns, *extra_columns, *(FACTS if facts else ()))
    return datasets.Features({name: types.get(name, ids) for name in names})


def to_prepared_rows(rows: Sequence[Mapping[str, Any]], kind: RowKind, with_images: bool = False) -> datasets.Dataset:
    """Return rows of token ids as a data set with the columns and types of prepared rows.

    Args:
        rows: Rows with the columns `kind.columns` and `index`.
        kind: The kind of rows.
        with_images: Whether the rows have a column `images` too.
    """
    features = _features(kind, False, ["images"] if with_images else []) | {"index": datasets.Value("int64")}
    columns = {name: [row[name] for row in rows] for name in features}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def tokenize_dataset(
    dataset: AnyDataset, method: Reader, tokenizer: PreTrainedTokenizerBase, config: object, name: str = "train"
) -> Any:
    """Return the examples of a data set as `prepare` makes them, including those without a trained token.

    The columns are `method.rows.columns`, and FACTS. Rows of a file or of a saved data set are cached by `datasets`, so
    that this function and `prepare` use the same cache. Raises InputError for the first invalid row.
    """
    with error_context(name):
        dataset, columns, form = _open(dataset, method, config)
        # a mask that is null in all rows is absent; null in some rows would train all of their tokens
        masks = [
            column
            for column in ("labels", "completion_mask")
            if method.rows.masked
            and "_ids" in form
            and column in columns
            and (dataset.features or {}).get(column) != datasets.Value("null")
        ]
        if (group := group_column(config)) and group not in columns:
            raise InputError(f"log_loss_by: there is no column {group!r}{name_hint(group, columns)}")
        teacher = build_teacher_plan(config)
        with_images = get_image_reader(tokenizer) is not None
        plan = build_plan(form, method, tokenizer, config, name)._replace(
            masks=tuple(masks),
            teacher=teacher,
            recorded=build_recorded_plan(config, columns, tokenizer),
            weighted=_has_weights(dataset, method, config),
        )
        if with_images:
            dataset = _without_decoding(dataset)
        else:
            _check_no_images(dataset, columns, form)
        _check_unread_prompt(dataset, columns, form, name)

    extra_columns = (
        *(TEACHER_COLUMNS if teacher else ()),
        *(["images"] if with_images else []),
        *(["asked"] if plan.keep_prompt else []),
        *(["group"] if plan.group_column else []),
        *(["token_weights"] if plan.weighted else []),
        *recorded_columns(config),
    )
    features = _features(method.rows, extra_columns=extra_columns)
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
        raise InputError(
            f"{name}: column {mixed[0]!r}: its values have several types, and text that looks like JSON would be read "
            "as JSON. Write text in all rows, or in none"
        )
    kwargs |= {"num_proc": getattr(config, "dataset_num_proc", None), "desc": f"Tokenizing {name}"}
    try:
        return dataset.map(tokenise, new_fingerprint=fingerprint(dataset, tokenizer, plan, filled), **kwargs)
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: a text is not UTF-8 ({error})") from error


def _open(dataset: AnyDataset, method: Reader, config: object) -> tuple[Any, list[str], str]:
    """Return the data set with our names for its columns, these names, and its format."""
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
        suggestion = column_inference.suggest_format(list(islice(dataset, _PROBED_ROWS)), [method])
        hint = (
            f"here {column_inference.format_columns(suggestion.columns)}"
            if suggestion and not suggestion.missing
            else column_inference.misspelling_problem(columns)
        )
        raise InputError("; ".join(filter(None, (str(error), hint)))) from error
    if field != "text" and form != "text":
        raise InputError(
            f"dataset_text_field: {field!r} is not read, since the rows are {form}. Remove dataset_text_field"
        )
    is_read = "label" in {*form.split(" + "), *_answer_columns(method)}
    classes = label.names if is_read and isinstance(label, datasets.ClassLabel) else []
    if classes and [name.lower() for name in classes] not in (["false", "true"], ["0", "1"]):
        raise InputError(
            f"column 'label': its values number classes ({join_names(classes)}). Write true for good answers, and "
            "false for others"
        )
    return dataset, columns, form


def columns_read(dataset: AnyDataset, name: str, method: Reader, config: object) -> list[str]:
    """Return the columns of a data set that `method` reads.

    Args:
        dataset: Raw rows.
        name: Name of the data set in messages.
        method: The method.
        config: As in `prepare`.

    Raises:
        InputError: If the method cannot read the columns, or if a column that is not read seems to be a prompt.
    """
    renamed, columns, form = _open(dataset, method, config)
    _check_unread_prompt(renamed, columns, form, name)
    unread = {*unread_columns(columns, form)}
    unread -= raw_teacher_columns(config, columns) | {*IMAGE_COLUMNS} | _answer_columns(method)
    unread -= {group_column(config)}
    return [theirs for theirs, ours in zip(_columns(dataset), columns, strict=True) if ours not in unread]


def _answer_columns(method: Reader) -> set[str]:
    """Return columns, in addition to the format's, that describe the answers of the data.

    These are the label of a reference answer, the margin of a pair, and weights of spans.
    """
    if method.rows.masked:
        return {SPAN_COLUMN}
    return {"label"} if method.rows.sampled else {"margin"} & {*method.rows.columns}


def _without_decoding(dataset: AnyDataset) -> Any:
    """Return the data set with its images as files or bytes, which are decoded only when they are used."""

    def undecoded(kind: Any) -> Any:
        if isinstance(kind, datasets.Image):
            return datasets.Image(decode=False)
        if isinstance(kind, datasets.List):
            return datasets.List(undecoded(kind.feature))
        return {key: undecoded(value) for key, value in kind.items()} if isinstance(kind, dict) else kind

    changes = {
        column: undecoded(kind)
        for column, kind in (dataset.features or {}).items()
        if _contains_type(kind, datasets.Image)
    }
    return dataset.cast(datasets.Features(dataset.features | changes)) if changes else dataset


def _check_no_images(dataset: AnyDataset, columns: list[str], form: str) -> None:
    """Raise InputError if the first rows have images next to their text, which a text model does not train on."""
    for column in column_inference.IMAGE_COLUMNS & {*(unread_columns(columns, form) if "_ids" not in form else ())}:
        selected = dataset.select_columns([column])
        kind = (dataset.features or {}).get(column)
        if _contains_type(kind, datasets.Image):  # images are not decoded
            undecoded: Any = datasets.Image(decode=False)
            selected = selected.cast_column(
                column, undecoded if isinstance(kind, datasets.Image) else datasets.List(undecoded)
            )
        if problem := column_inference.image_problem(list(islice(selected, _PROBED_ROWS)), [column]):
            raise InputError(problem)


def _check_unread_prompt(dataset: AnyDataset, columns: list[str], form: str, name: str) -> None:
    """Raise InputError if a column that is not read seems to be the prompt.

    If the format has another prompt, a warning is logged instead. Rows are only read if the name of a column suggests
    a prompt, since a stream would have to read them twice.
    """
    unread = unread_columns(columns, form)
    problem = (
        column_inference.prompt_problem(list(islice(dataset, _PROBED_ROWS)), unread, form)
        if column_inference.prompt_like_columns(unread)
        else None
    )
    if problem and "prompt" not in form:
        raise InputError(problem)
    if problem:
        logger.warning("%s: %s", name, problem)


def unread_parts(facts: pd.DataFrame) -> dict[str, int]:
    """Return the options and the parts of messages that the chat template does not use, with their examples."""
    counts = facts.unread.value_counts().rename("n").rename_axis("part").reset_index()
    counts = counts.assign(part=counts.part.str.split(", ")).explode("part").groupby("part").n.sum()
    return {part: n for part, n in counts.items() if part}


def collect_notes(
    dataset: AnyDataset,
    method: Reader,
    config: object,
    tokenizer: PreTrainedTokenizerBase,
    facts: pd.DataFrame | None = None,
    reported: Container[str] = (),
) -> dict[str, int]:
    """Return notes about data and options that are not used, or not used as users may expect.

    Args:
        dataset: Raw rows.
        method: The method.
        config: As in `prepare`.
        tokenizer: As in `prepare`.
        facts: FACTS of the examples, if they are known.
        reported: Parts that the chat template does not use, see `unread_parts`, and that are not reported again.

    Returns:
        The lines, with the level that each is logged at.
    """
    dataset, columns, form = _open(dataset, method, config)
    with_images = get_image_reader(tokenizer) is not None
    notes = {}
    for column in (column for column in columns if column not in unread_columns(columns, form)):
        if _contains_type((dataset.features or {}).get(column), datasets.Json, nested_only=True):
            problem = "has values of several types, and the text '1' is read as 1"
            notes[f"column {column!r} {problem}. Write tools and the arguments of calls as JSON text"] = logging.INFO
        is_json = isinstance(dataset, datasets.Dataset) and isinstance(dataset.features[column], JsonValue)
        if is_json and any(map(has_nested_null, islice(dataset[column], 1000))):
            reason = "Arrow and pandas write them for keys of other rows. Remove them from the file"
            notes[f"column {column!r} has nulls inside calls or tools, which are trained. {reason}"] = logging.WARNING

    used = {"index", "prompt_key", *ADDED_COLUMNS} - {*IMAGE_COLUMNS}
    used |= raw_teacher_columns(config, columns) | _answer_columns(method)
    used |= {*IMAGE_COLUMNS} if with_images else set()
    used |= {group_column(config) or ""}
    if unread := [column for column in unread_columns(columns, form) if column not in used]:
        notes[f"read as {form}; columns not read: {join_names(unread)}"] = logging.INFO
    for column, valid in column_inference.misspelled_columns(unread, columns, form, method).items():
        hint = f"did you mean {valid!r}? Rename it with columns: {{{valid}: {column}}}"
        notes[f"column {column!r} is not read; {hint}"] = logging.WARNING

    if tokenizer.chat_template and "_ids" not in form and form != "messages" and _is_plain(facts, form):
        requirement = "messages" if form == "text" else "messages, or apply_chat_template: true"
        problem = "the rows are plain text, and the tokenizer's chat template is not applied"
        notes[f"{problem}. A chat model requires {requirement}"] = logging.INFO
    fix = ". Set assistant_only_loss: true to train only assistant turns" if method.rows.masked else ""
    is_selected = getattr(config, "assistant_only_loss", None) or getattr(config, "train_on", None)
    if fix and form == "messages" and not is_selected:
        notes[f"all turns are trained, including user turns{fix}"] = logging.INFO
    if facts is None:
        return notes

    for key in ("chat_template_kwargs", "reasoning"):
        if getattr(config, key, None) and not (facts.state & CHAT).any():
            problem = "the chat template is applied to no row. Set apply_chat_template: true for plain text"
            notes[f"{key}: {problem}"] = logging.INFO
    counts = {part: n for part, n in unread_parts(facts).items() if part not in reported}
    if listing := ", ".join(f"{part} (in {count_noun(n, 'example')})" for part, n in counts.items()):
        notes[f"the chat template does not use: {listing}"] = logging.WARNING
    if count := int((facts.state & OTHER_ROLES > 0).sum()):
        problem = "examples have user or tool turns inside an answer, which are trained as a part of it, as in TRL"
        notes[f"{count} {problem}{fix or '. Write all turns but the last into the prompt'}"] = logging.WARNING
    return notes


def _is_plain(facts: pd.DataFrame | None, form: str) -> bool:
    """Return whether the chat template is applied to no row. Without FACTS, only the format `text` shows it."""
    return form == "text" if facts is None else not (facts.state & CHAT).any()


def null_filled_columns(dataset: AnyDataset) -> list[str]:
    """Return the columns with mappings to which Arrow may have added missing keys as None.

    Without any null in the column, all mappings had the same keys. The nulls inside a value that is JSON are not known.
    """
    columns = {column: kind for column, kind in (dataset.features or {}).items() if _contains_type(kind, dict)}
    if not isinstance(dataset, datasets.Dataset):
        return [*columns]
    return [
        column
        for column, kind in columns.items()
        if _contains_type(kind, datasets.Json) or any(map(_has_null, dataset.data.column(column).chunks))
    ]


def _has_null(values: pa.Array) -> bool:
    """Return whether an array has a null, or any array nested in it."""
    if values.null_count:
        return True
    if pa.types.is_struct(values.type):
        return any(_has_null(values.field(number)) for number in range(values.type.num_fields))
    return pa.types.is_nested(values.type) and (not hasattr(values, "flatten") or _has_null(values.flatten()))


def drop_null_fields(values: Mapping[str, Any], filled: Sequence[str]) -> dict[str, Any]:
    """Return a row, or a batch of columns, without the keys that Arrow has added to the columns `filled`."""
    return {column: without_none(value) if column in filled else value for column, value in values.items()}


def _contains_type(kind: Any, target: type, nested_only: bool = False) -> bool:
    """Return whether the type of a column, or a type nested in it, is an instance of `target`.

    Args:
        kind: The type of the column.
        target: The class.
        nested_only: Whether only nested types count.
    """
    parts = [kind.feature] if isinstance(kind, datasets.List) else kind.values() if isinstance(kind, dict) else []
    return (isinstance(kind, target) and not nested_only) or any(_contains_type(part, target) for part in parts)


def _is_mixed(dataset: datasets.Dataset, column: str) -> bool:
    """Return whether a column is text in some rows only. Then `datasets` reads the text "4" as the number 4."""
    kind = dataset.features[column]
    if isinstance(kind, datasets.Json) and column != "label" and not column.endswith("_ids"):
        return any(isinstance(value, str) for value in dataset[column])
    fields = kind.feature if isinstance(kind, datasets.List) and isinstance(kind.feature, dict) else {}
    return any(isinstance(fields.get(key), datasets.Json) for key in ("content", "value"))


def build_plan(form: str, method: Reader, tokenizer: PreTrainedTokenizerBase, config: object, name: str) -> Plan:
    """Return the Plan for rows of a format. Raises InputError for options that cannot be combined with it."""

    def option(key: str) -> Any:
        return getattr(config, key, None)

    max_length = option("max_length")
    as_chat = bool(option("apply_chat_template"))
    is_ids = "_ids" in form
    # the options of a mask are ignored for rows without one, which may be the prompts of rounds that train with a mask
    masked = method.rows.masked
    text_weights = option("text_weights") if masked else None
    if text_weights and not tokenizer.is_fast:
        problem = f"{type(tokenizer).__name__} does not map tokens to characters"
        raise InputError(f"text_weights requires a fast tokenizer. {problem}")
    completion_only = option("completion_only_loss") if masked else None
    turns = option("train_on") if masked else None
    assistant_only = masked and (bool(option("assistant_only_loss")) or turns in ("assistant", "last"))
    if form in ("messages", "text") and completion_only:
        raise InputError(f"completion_only_loss requires prompt and completion, and the data has {form}")
    if as_chat and (form == "text" or is_ids):
        raise InputError(f"apply_chat_template requires a column 'prompt' or 'instruction', and the data has {form}")
    if as_chat and not tokenizer.chat_template:
        raise InputError(
            "apply_chat_template requires a chat template, and the tokenizer has none. Remove the option, or set "
            "model.chat_template (--chat_template of commands)"
        )
    if assistant_only and is_ids:
        raise InputError(f"{MASK_OPTIONS} requires messages, and the data has {form}. Add a column completion_mask")
    if assistant_only and not tokenizer.is_fast:
        tokenizer_class = type(tokenizer).__name__
        raise InputError(
            f"{MASK_OPTIONS} requires a fast tokenizer. {tokenizer_class} does not map tokens to characters"
        )
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
        text_weights=text_weights,
        group_column=group_column(config),
    )


# `datasets` caches the rows of tokenizers without a fingerprint by the name and the parameters of this function
def tokenise(
    batch: dict[str, list], rows: list[int], tokenizer: PreTrainedTokenizerBase, plan: Plan, filled: Sequence[str] = ()
) -> dict:
    """Convert a batch of raw rows to columns of token ids, and FACTS.

    Args:
        batch: The columns of the raw rows.
        rows: The numbers of the raw rows.
        tokenizer: The tokenizer.
        plan: The plan for all rows.
        filled: Names of the columns in which Arrow has added keys with the value None, see `null_filled_columns`.
    """
    batch = drop_null_fields(batch, filled)
    reader = get_image_reader(tokenizer)

    # 1. convert raw rows to samples, of which a row may have two; `row_numbers` has the row of each
    samples = []
    row_numbers = []
    raw_rows = []
    for number, *values in zip(rows, *batch.values(), strict=True):
        raw_row = dict(zip(batch, values, strict=True))
        with error_context(f"{plan.name}, row {number}"):
            row_samples = read(raw_row, plan)
            if reader and row_samples[0].images:
                expansions = tuple(map(reader.expansion, row_samples[0].images))
                row_samples = [sample._replace(expansions=expansions) for sample in row_samples]
        samples += row_samples
        row_numbers += [number] * len(row_samples)
        raw_rows += [raw_row] * len(row_samples)

    # 2. tokenize the samples of the whole batch together
    raw_samples = samples
    bits = [state_bits(sample, plan) for sample in samples]
    extra_columns = (
        teacher_columns(raw_rows, samples, row_numbers, tokenizer, plan, plan.teacher) if plan.teacher else {}
    )
    if plan.group_column:
        extra_columns["group"] = _groups(raw_rows, row_numbers, plan)
    if plan.keep_prompt:
        extra_columns["asked"] = [_prompt_as_json(sample, plan) for sample in samples]
    if "_ids" not in plan.form:
        if rows[0] == 0:
            check_misread(batch, samples, plan, tokenizer)
        samples = encode(samples, row_numbers, tokenizer, plan)
    samples = _with_weights(samples, raw_samples, raw_rows, row_numbers, tokenizer, plan)

    # 3. truncate each sample, and record facts for the audit
    examples = []
    scores: list[dict[str, list[Any]]] = []  # recorded log-probabilities of each sample
    unknown = tokenizer.unk_token_id
    if unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id):  # as in GPT-2, where it does not mean unknown text
        unknown = None
    for number, raw_row, sample, sample_bits in zip(row_numbers, raw_rows, samples, bits, strict=True):
        with error_context(f"{plan.name}, row {number}"):
            full = with_context(sample, plan)
            # a prompt that is trained too is still truncated before its answer
            shortened = sample
            prompt_state = 0
            if plan.completion_only is False and sample.prompt:
                shortened, prompt_state = truncate(sample, plan)
            context = full if shortened is sample else with_context(shortened, plan)
            kept, state = truncate(context, plan)
            if reader and not state & NO_TARGET:
                kept = _keep_complete_images(kept, reader)
            if plan.recorded:
                sizes = [len(part.branches[0]) for part in (sample, shortened, context, kept)]
                removed = sizes[0] - sizes[1] + sizes[2] - sizes[3]
                mask = [] if state & NO_TARGET else kept.mask or []
                value = raw_row.get(plan.recorded.column)
                scores.append(read_scores(value, kept.branches[0], mask, removed, plan.recorded))
        branches = kept.branches or [[]]
        trained = sum(kept.mask) if kept.mask is not None else max(map(len, branches))
        full_branches = [[]] if plan.rows.sampled else full.branches
        prompt_hash = PromptHash(full.prompt, full.images)
        examples.append(
            {
                "prompt_ids": kept.prompt,
                **dict(zip(plan.rows.answers, branches, strict=True)),
                "completion_mask": kept.mask,
                "label": kept.label,
                "margin": kept.margin,
                "token_weights": kept.weights or [1.0] * len(branches[0]),
                "prompt_key": prompt_hash.key(),
                "row": number,
                "state": state | prompt_state & TRUNCATED | sample_bits,
                "unknown": unknown is not None and any(unknown in ids for ids in (kept.prompt, *branches)),
                "unread": ", ".join(kept.unread),
                "uncut": len(full.prompt) + max(map(len, full_branches)),
                "trained": 0 if plan.rows.sampled else trained,
                "keys": [prompt_hash.key(branch) for branch in full_branches],
                "images": list(kept.images),
            }
        )
    columns = (
        *plan.rows.columns,
        *FACTS,
        *(["images"] if reader else []),
        *(["token_weights"] if plan.weighted else []),
    )
    if plan.recorded:
        extra_columns |= {column: [row[column] for row in scores] for column in scores[0]}
    return {column: [example[column] for example in examples] for column in columns} | extra_columns


def _with_weights(
    samples: list[Sample],
    raw_samples: list[Sample],
    raw_rows: list[dict[str, Any]],
    row_numbers: list[int],
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
) -> list[Sample]:
    """Return encoded samples with the weights of `text_weights` and `span_weights`, if the rows have any."""
    if not plan.weighted:
        return samples
    weighted = []
    for sample, raw, row, number in zip(samples, raw_samples, raw_rows, row_numbers, strict=True):
        spans = row.get(SPAN_COLUMN) or []
        if spans or plan.text_weights:
            with error_context(f"{plan.name}, row {number}"):
                sample = weighted_sample(sample, raw, spans, plan.text_weights or {}, tokenizer)
        weighted.append(sample)
    return weighted


def _groups(raw_rows: list[dict[str, Any]], row_numbers: list[int], plan: Plan) -> list[str]:
    """Return the value of each row in the column by whose values the loss is logged."""
    groups = []
    for row, number in zip(raw_rows, row_numbers, strict=True):
        with error_context(f"{plan.name}, row {number}"):
            groups.append(read_group(row, str(plan.group_column)))
    return groups


def _prompt_as_json(sample: Sample, plan: Plan) -> str:
    """Return the raw prompt with its tools and template options as JSON. The prompt of rows of ids is null."""
    prompt = None if "_ids" in plan.form else sample.prompt
    options = {"tools": sample.tools, "chat_template_kwargs": sample.template_kwargs} if sample.is_chat else {}
    return json.dumps(
        {"prompt": prompt} | {name: value for name, value in options.items() if value}, ensure_ascii=False
    )


def _keep_complete_images(sample: Sample, reader: ImageReader) -> Sample:
    """Return the sample up to its last trained token, with the images before that token.

    Raises InputError if the ids have other numbers of feature tokens than the images, since a text may hold such a
    token.
    """
    if sample.mask:
        end = len(sample.mask) - sample.mask[::-1].index(1)
        weights = sample.weights and sample.weights[:end]
        sample = sample._replace(branches=[sample.branches[0][:end]], mask=sample.mask[:end], weights=weights)
    counts = [*map(reader.count_features, sample.expansions)] or reader.feature_counts(sample.images)
    for branch in sample.branches or [[]]:
        feature_tokens = reader.count_feature_tokens([*sample.prompt, *branch])
        counts = counts[: count_complete_images(counts, feature_tokens)] if sample.mask else counts
        if feature_tokens != sum(counts):
            raise InputError(
                f"its tokens have {feature_tokens} places for features of images, and its images have {sum(counts)} "
                "features. Remove the image token from the text"
            )
    return sample._replace(images=sample.images[: len(counts)])


class PromptHash:
    """Hashes of a prompt that are the same in every process.

    Args:
        ids: Token ids of the prompt.
        images: Its images.
    """

    def __init__(self, ids: Sequence[int], images: Sequence[Mapping[str, Any]] = ()) -> None:
        self.digest = xxhash.xxh64(_to_bytes(ids))
        self.images = [image["bytes"] or image["path"].encode() for image in images]

    def key(self, branch: Sequence[int] | None = None) -> int:
        """Return the hash of the prompt, or of the prompt with an answer, as a signed 64-bit number."""
        digest = self.digest.copy()
        if branch is not None:
            digest.update(_to_bytes([-1, *branch]))
        for image in self.images:
            digest.update(image)
        return digest.intdigest() - 2**63


def prompt_key(ids: Sequence[int], images: Sequence[Mapping[str, Any]] = ()) -> int:
    """Return a hash of ids and images that is the same in every process, as a signed 64-bit number."""
    return PromptHash(ids, images).key()


def _to_bytes(ids: Sequence[int]) -> bytes:
    """Return ids as little-endian 32-bit numbers."""
    numbers = array("i", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _keep_streamed(state: int, row: int, unread: str, name: str, reported: set[str]) -> bool:
    """Return whether an example of a stream has a trained token, and log each kind of problem once."""
    if state & NO_TARGET:
        reason = "max_length would truncate its images" if state & IMAGE_TRUNCATED else "no trained token left"
        logger.warning("%s: row %d dropped (%s)", name, row, reason)
    elif state & TRUNCATED and "truncated" not in reported:
        reported.add("truncated")
        logger.warning("%s: row %d is truncated to max_length, and others of this stream may be", name, row)
    for part in {*filter(None, unread.split(", "))} - reported:
        reported.add(part)
        notes_logger.warning(
            "%s: the chat template does not use: %s (row %d of this stream, and maybe others)", name, part, row
        )
    return not state & NO_TARGET
