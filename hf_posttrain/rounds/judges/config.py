"""Who judges, as a recipe says it: importable without torch."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jinja2 import TemplateError, meta

from ...data.template import parse_template
from ...errors import InputError, name_hint
from ...options import option
from ...trainer.limits import COUNT, POSITIVE, Problem
from ...trainer.rules import limit_problems

LIMITS = {"opponents": COUNT, "batch_size": COUNT, "timeout": POSITIVE}
Kind = Literal["exact_match", "function", "model", "teacher", "url"]
KINDS: tuple[str, ...] = get_args(Kind)
MODEL_JUDGES = ("model", "teacher")
"""Kinds of judges that are models, loaded here."""
_QUESTION_VARIABLES = ("prompt", "reference", "first", "second")  # what a question may read
_NAME_MEANINGS = {  # kind of judge -> what `name` is
    "function": "package.module:name of a function",
    "model": "the folder or hub name of a reward model",
    "teacher": "the folder or hub name of a model",
    "url": "a server's URL, such as http://localhost:8000",
}


@dataclass
class JudgeSection:
    """Who scores answers: a higher score is a better answer."""

    by: Kind = option(
        "exact_match",
        "exact_match: 1 where the final answer is that of the data; function: one of yours; model: a reward model, "
        "that is a sequence classifier with one label; teacher: a model's log-probability per token; url: a language "
        "model behind a server with OpenAI's protocol, which compares answers two by two, in both orders.",
    )
    name: str | None = option(
        None, "Of function: package.module:name; of model and teacher: a folder or hub name; of url: http://HOST:PORT."
    )
    served_model: str | None = option(
        None,
        "Of url: which of the server's models; None: the first that it lists. Its key is read from OPENAI_API_KEY.",
    )
    question: str | None = option(
        None, "Of url: what is asked, a Jinja template over prompt, first, second and reference."
    )
    opponents: int = option(
        4, "Of url: with how many others of the same prompt each answer is compared; an odd number is rounded up."
    )
    timeout: float = option(120.0, "Of url: seconds that an answer may take; what takes longer is not judged.")
    batch_size: int = option(16, "Of model and teacher: answers that are scored together.")

    def fingerprint(self) -> dict[str, Any]:
        """What scores depend on."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in ("timeout", "batch_size")}

    def __str__(self) -> str:
        return self.by if self.name is None else f"{self.by} {self.name}"


def expand_judge(given: object) -> Any:
    """`exact_match` as the mapping that it stands for; `module:name` is a function, in Python also the function itself,
    and a URL a server. Raises InputError for something to call that has no name to find it by.
    """
    if callable(given):
        if not hasattr(given, "__qualname__"):  # such as functools.partial
            raise InputError(f"judge: {given!r} has no name: give a function, or package.module:name")
        return {"by": "function", "name": f"{given.__module__}:{given.__qualname__}"}
    if not isinstance(given, str):
        return given
    if given.startswith(("http://", "https://")):
        return {"by": "url", "name": given}
    return {"by": "function", "name": given} if ":" in given else {"by": given}


def judge_problems(judge: JudgeSection) -> Iterator[Problem]:
    """What is wrong with a section: names of its keys, and a sentence."""
    yield from limit_problems(LIMITS, judge)
    if judge.by in _NAME_MEANINGS and not judge.name:
        yield ("name", "by"), f"name is missing: {_NAME_MEANINGS[judge.by]}"
    if judge.by == "exact_match" and judge.name:
        yield ("name", "by"), f"name: {judge.name}: exact_match has no name: set by, or drop name"
    module, _, function = (judge.name or "").partition(":")
    if judge.by == "function" and judge.name and not (module and function.isidentifier()):
        hint = f"; a server is http://{judge.name}" if function.isdigit() else ""
        yield ("name",), f"name={judge.name!r} is not package.module:name{hint}"
    if judge.by == "url" and judge.name and not judge.name.startswith(("http://", "https://")):
        yield ("name",), f"name={judge.name!r} is no URL such as http://localhost:8000"
    usual = JudgeSection()
    for key in ("served_model", "question", "opponents", "timeout"):
        if getattr(judge, key) != getattr(usual, key) and judge.by != "url":
            yield (key, "by"), f"{key} is of by: url: set that, or drop {key}"
    if judge.question is not None:
        try:
            read = meta.find_undeclared_variables(parse_template(judge.question))
        except TemplateError as error:
            yield ("question",), f"question is no Jinja template: {error}"
            return
        if not {"first", "second"} <= read:
            yield ("question",), "question: it must show both answers: write {{ first }} and {{ second }}"
        if unknown := sorted(read - {*_QUESTION_VARIABLES}):
            yield ("question",), f"question: there is no {unknown[0]!r}{name_hint(unknown[0], _QUESTION_VARIABLES)}"
