"""The `judge` section of a recipe. Importable without torch."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jinja2 import TemplateError, meta

from ...data.template import parse_template
from ...errors import InputError, name_hint
from ...models.config import ModelSection, RewardModelSection, section_from_name
from ...options import option
from ...trainer.limits import COUNT, POSITIVE, Problem
from ...trainer.rules import limit_problems

LIMITS = {"opponents": COUNT, "batch_size": COUNT, "timeout": POSITIVE}
Kind = Literal["exact_match", "function", "model", "teacher", "url"]
KINDS: tuple[str, ...] = get_args(Kind)
MODEL_JUDGES = ("model", "teacher")
"""Kinds of judges that are models, loaded by this process."""
_QUESTION_VARIABLES = ("prompt", "reference", "first", "second")
_NAME_MEANINGS = {  # kind of judge -> meaning of `name`
    "function": "package.module:name of a function",
    "model": "the folder or Hub name of a reward model",
    "teacher": "the folder or Hub name of a model",
    "url": "the URL of a server, such as http://localhost:8000",
}


@dataclass
class JudgeSection:
    """Judge that scores answers. A higher score is a better answer."""

    by: Kind = option(
        "exact_match",
        "Kind of judge. exact_match gives 1 if the final answer is that of the data. function calls a function of "
        "yours. model is a reward model, that is a sequence classifier with one label. teacher gives a model's "
        "log-probability per token. url is a language model on a server with OpenAI's protocol, which compares answers "
        "in pairs, in both orders.",
    )
    name: str | None = option(
        None, "package.module:name for function, a folder or Hub name for model and teacher, http://HOST:PORT for url."
    )
    served_model: str | None = option(
        None,
        "Model of the server, for url only. By default the first that the server lists. The server's key is read from "
        "OPENAI_API_KEY.",
    )
    question: str | None = option(
        None, "Question to the server, for url only: a Jinja template over prompt, first, second and reference."
    )
    opponents: int = option(
        4,
        "Number of other answers to the same prompt that each answer is compared with, for url only. An odd number is "
        "rounded up.",
    )
    timeout: float = option(
        120.0, "Largest number of seconds for a comparison, for url only. A slower comparison is left out."
    )
    batch_size: int = option(16, "Number of answers that are scored together, for model and teacher only.")

    def model_section(self) -> ModelSection:
        """Return the section of a judge that is a model."""
        section = section_from_name(str(self.name))
        return RewardModelSection(**vars(section)) if self.by == "model" else section

    def fingerprint(self) -> dict[str, Any]:
        """Return the options that scores depend on."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in ("timeout", "batch_size")}

    def __str__(self) -> str:
        return self.by if self.name is None else f"{self.by} {self.name}"


def expand_judge(value: object) -> Any:
    """Return the mapping for a short form of a judge, and other values unchanged.

    Short forms are the name of a kind, `module:name` of a function, a URL of a server, and in Python the function
    itself. Raises InputError for a callable without a name by which it can be imported.
    """
    if callable(value):
        if not hasattr(value, "__qualname__"):  # such as functools.partial
            raise InputError(f"judge: {value!r} has no name. Pass a function, or package.module:name")
        return {"by": "function", "name": f"{value.__module__}:{value.__qualname__}"}
    if not isinstance(value, str):
        return value
    if value.startswith(("http://", "https://")):
        return {"by": "url", "name": value}
    return {"by": "function", "name": value} if ":" in value else {"by": value}


def judge_problems(judge: JudgeSection) -> Iterator[Problem]:
    """Yield the problems of a section."""
    yield from limit_problems(LIMITS, judge)
    if judge.by in _NAME_MEANINGS and not judge.name:
        yield ("name", "by"), f"name is missing. Set it to {_NAME_MEANINGS[judge.by]}"
    if judge.by == "exact_match" and judge.name:
        yield ("name", "by"), f"name={judge.name!r} is not valid with by: exact_match. Set another kind, or remove name"
    module, _, function = (judge.name or "").partition(":")
    if judge.by == "function" and judge.name and not (module and function.isidentifier()):
        hint = f". For a server write http://{judge.name}" if function.isdigit() else ""
        yield ("name",), f"name={judge.name!r} is not package.module:name{hint}"
    if judge.by == "url" and judge.name and not judge.name.startswith(("http://", "https://")):
        yield ("name",), f"name={judge.name!r} must be a URL such as http://localhost:8000"
    defaults = JudgeSection()
    for key in ("served_model", "question", "opponents", "timeout"):
        if getattr(judge, key) != getattr(defaults, key) and judge.by != "url":
            yield (key, "by"), f"{key} is only valid with by: url. Set by: url, or remove {key}"
    if judge.question is not None:
        try:
            variables = meta.find_undeclared_variables(parse_template(judge.question))
        except TemplateError as error:
            yield ("question",), f"question: the Jinja template is not valid: {error}"
            return
        if not {"first", "second"} <= variables:
            yield ("question",), "question must contain both answers. Write {{ first }} and {{ second }}"
        if unknown := sorted(variables - {*_QUESTION_VARIABLES}):
            hint = name_hint(unknown[0], _QUESTION_VARIABLES)
            yield ("question",), f"question: there is no variable {unknown[0]!r}{hint}"
