"""Columns of rows that teachers read: the name of a row's teacher, and the prompt of a teacher with another prompt.

A privileged prompt is a Jinja template over the columns of the row, in which `prompt` is the text of the prompt. The
rendered text replaces the text of the prompt; in a chat, it replaces the text of the last user turn.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from jinja2 import StrictUndefined, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from ..errors import InputError, error_context, join_names, name_hint, short_repr
from .formats import Sample
from .messages import Messages, check_unicode
from .recorded_scores import recorded_column

TEACHER_COLUMNS = ("teacher", "teacher_prompt_ids")
"""Columns of prepared rows: a teacher's name, and its prompt, which is empty if it reads the prompt of the student."""


class TeacherPlan(NamedTuple):
    """The options of a Config that determine the rows for its teachers.

    `datasets` fingerprints the values and the names of these fields, so that another name changes the key of the cache.
    """

    names: tuple[str, ...]  # of several teachers, otherwise empty
    prompts: Mapping[str, str]  # name (or "") -> template
    tokenizers: Mapping[str, PreTrainedTokenizerBase]  # name (or "") -> tokenizer of a teacher with another tokenizer


def build_teacher_plan(config: object) -> TeacherPlan | None:
    """Return the plan for the teachers of a Config, or None if rows need nothing for them."""
    options = getattr(config, "teacher", None)
    if options is None:
        return None
    names = tuple(options.names or ())
    prompts = by_teacher(options.prompt)
    tokenizers = by_teacher(options.tokenizer)
    if not (names or prompts or tokenizers):
        return None
    return TeacherPlan(names, prompts, {name: _load_tokenizer(path) for name, path in tokenizers.items()})


def by_teacher(value: object) -> dict[str, Any]:
    """Return the value of an option as {name of a teacher: value}.

    The name is "" if the option has a single value, and the result is empty for None.
    """
    if value is None:
        return {}
    return dict(value) if isinstance(value, Mapping) else {"": value}


@cache
def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        # without `trust_remote_code`, transformers asks on the terminal whether to run code of the folder
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise InputError(f"teacher.tokenizer: cannot load the tokenizer of {path}: {first_line}") from error


def raw_teacher_columns(config: object, columns: Sequence[str]) -> set[str]:
    """Return the raw columns that are read for the teachers of a Config."""
    plan = build_teacher_plan(config)
    if plan is None:
        return {*filter(None, [recorded_column(config)])} & {*columns}
    used = {*TEACHER_COLUMNS} if plan.names else {TEACHER_COLUMNS[1]}
    for template in plan.prompts.values():
        used |= meta.find_undeclared_variables(_environment().parse(template))
    return used & {*columns}


def read_teacher_name(row: Mapping[str, Any], plan: TeacherPlan) -> str:
    """Return the name of a row's teacher, which is "" for a single teacher.

    Raises InputError if there are several teachers and the row names none of them.
    """
    if not plan.names:
        return ""
    name = row.get("teacher")
    if name is None:
        raise InputError(f"column 'teacher': missing or null. Name one of {', '.join(plan.names)} in each row")
    if name not in plan.names:
        raise InputError(f"column 'teacher': unknown teacher {short_repr(name)}{name_hint(str(name), plan.names)}")
    return str(name)


def teacher_sample(row: Mapping[str, Any], sample: Sample, plan: TeacherPlan, teacher: str) -> Sample | None:
    """Return the raw sample with the prompt that a teacher reads, or None if it reads the prompt of the student.

    Args:
        row: The raw row.
        sample: The raw sample of the row.
        plan: The plan for all teachers.
        teacher: Name of the teacher.

    Raises:
        InputError: If the template cannot be rendered, if the sample has no prompt, or if the teacher has no chat
            template for its messages.
    """
    template = plan.prompts.get(teacher)
    if template is None and teacher not in plan.tokenizers:
        return None
    if sample.prompt is None:
        raise InputError(
            "a teacher with its own prompt or tokenizer requires rows with a prompt. Split whole texts and "
            "conversations into prompt and completion"
        )
    tokenizer = plan.tokenizers.get(teacher)
    if sample.is_chat and tokenizer is not None and not tokenizer.chat_template:
        problem = (
            f"messages require a chat template, and the tokenizer of the teacher {tokenizer.name_or_path} has none"
        )
        raise InputError(f"{problem}. Add chat_template.jinja to its folder, or use plain strings")
    prompt = sample.prompt
    if template is not None:
        with error_context("teacher prompt"):
            prompt = _render_prompt(template, row, prompt)
    return sample._replace(prompt=prompt, branches=[], label=None, mask=None)


def _render_prompt(template: str, row: Mapping[str, Any], prompt: str | Messages) -> str | Messages:
    """Return the prompt with its text replaced by the rendered template."""
    if isinstance(prompt, str):
        text = prompt
    else:
        user_turns = [n for n, message in enumerate(prompt) if message["role"] == "user"]
        if not user_turns:
            raise InputError("the prompt has no user turn, whose text the template replaces")
        turn = user_turns[-1]
        text = prompt[turn]["content"]

    try:
        variables = {column: value for column, value in row.items() if value is not None}
        rendered = _environment().from_string(template).render({**variables, "prompt": text})
    except Exception as error:  # a template is a program that may raise any exception
        columns = join_names(column for column, value in row.items() if value is not None)
        problem = " ".join(str(error).split())[:300].rstrip(".")
        raise InputError(f"{problem}; the row has {columns}") from error
    if not rendered.strip():
        raise InputError("the template renders to an empty text for this row")
    check_unicode(rendered, "its text")

    if isinstance(prompt, str):
        return rendered
    return [*prompt[:turn], prompt[turn] | {"content": rendered}, *prompt[turn + 1 :]]


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
