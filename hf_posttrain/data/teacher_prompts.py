"""What a row holds for its teacher: which of several it is, and the prompt that it reads where that is another one.

A privileged prompt is a Jinja template over the row's columns. What it writes takes the place of the prompt's text, in
a chat of that of the last user turn; inside, `prompt` is that text.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from jinja2 import StrictUndefined, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

from ..errors import InputError, error_context, join_names, name_hint, short_repr
from .formats import Sample
from .messages import check_unicode

TEACHER_COLUMNS = ("teacher", "teacher_prompt_ids")
"""Of prepared rows: a name; and ids, none where the teacher reads the student's own prompt."""


class TeacherPlan(NamedTuple):
    """What a Config asks of rows for its teachers: plain values, so that `datasets` can fingerprint them."""

    names: tuple[str, ...]  # of several
    prompts: Mapping[str, str]  # name (or "") -> template
    tokenizers: Mapping[str, PreTrainedTokenizerBase]  # name (or "") -> that of a teacher with its own


def build_teacher_plan(config: Any) -> TeacherPlan | None:
    """What a Config asks of rows, if anything."""
    options = getattr(config, "teacher", None)
    if options is None:
        return None
    names = tuple(options.names or ())
    prompts = by_teacher(options.prompt)
    tokenizers = by_teacher(options.tokenizer)
    if not (names or prompts or tokenizers):
        return None
    return TeacherPlan(names, prompts, {name: _tokenizer(path) for name, path in tokenizers.items()})


def by_teacher(given: object) -> dict[str, Any]:
    """What is given for one teacher, under "", or for several by name; {} of None."""
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {"": given}


@cache
def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        # without the argument transformers asks on the terminal, and runs the folder's code if the answer is yes
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise InputError(f"teacher.tokenizer: {path} has no tokenizer that can be read: {first}") from error


def raw_teacher_columns(config: Any, columns: Sequence[str]) -> set[str]:
    """Those of the raw columns that are read for teachers."""
    plan = build_teacher_plan(config)
    if plan is None:
        return set()
    wanted = {*TEACHER_COLUMNS} if plan.names else {TEACHER_COLUMNS[1]}
    for template in plan.prompts.values():
        wanted |= meta.find_undeclared_variables(_environment().parse(template))
    return wanted & {*columns}


def read_teacher_name(row: Mapping[str, Any], plan: TeacherPlan) -> str:
    """The name of a row's teacher. Raises InputError where several are named and the row names none of them."""
    if not plan.names:
        return ""
    name = row.get("teacher")
    if name is None:
        raise InputError(f"column 'teacher': missing or null, and each row names one of {', '.join(plan.names)}")
    if name not in plan.names:
        raise InputError(f"column 'teacher': {short_repr(name)} is none of the teachers{name_hint(str(name), plan.names)}")
    return str(name)


def teacher_sample(row: Mapping[str, Any], sample: Sample, plan: TeacherPlan, teacher: str) -> Sample | None:
    """The raw sample of the prompt that a teacher reads; None where it is the student's own.

    Raises InputError where a template cannot be rendered, and for rows without a prompt.
    """
    template = plan.prompts.get(teacher)
    if template is None and teacher not in plan.tokenizers:
        return None
    if sample.prompt is None:
        wanting = "a teacher with a prompt or a tokenizer of its own wants rows with a prompt"
        raise InputError(f"{wanting}: give prompt and completion, not a whole text or conversation")
    prompt = sample.prompt
    if template is not None:
        with error_context("teacher prompt"):
            prompt = _render_prompt(template, row, prompt)
    return sample._replace(prompt=prompt, branches=[], label=None, mask=None)


def _render_prompt(template: str, row: Mapping[str, Any], prompt: Any) -> Any:
    """The prompt with what the template writes in place of its text."""
    turn = None
    if not isinstance(prompt, str):
        users = [n for n, turn in enumerate(prompt) if turn["role"] == "user"]
        if not users:
            raise InputError("the prompt has no turn of a user that it could take the place of")
        turn = users[-1]
    text = prompt if turn is None else prompt[turn]["content"]
    try:
        given = {column: value for column, value in row.items() if value is not None}
        written = _environment().from_string(template).render({**given, "prompt": text})
    except Exception as error:  # a template is a program, and raises what it likes
        known = join_names(column for column, value in row.items() if value is not None)
        said = " ".join(str(error).split())[:300].rstrip(".")
        raise InputError(f"{said}; the row has {known}") from error
    if not written.strip():
        raise InputError("the template writes nothing for this row")
    check_unicode(written, "its text")
    if turn is None:
        return written
    return [*prompt[:turn], prompt[turn] | {"content": written}, *prompt[turn + 1 :]]


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
