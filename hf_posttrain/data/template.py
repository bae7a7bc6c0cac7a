"""Analysis of a chat template's Jinja source, without transformers, whose import is slow."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import path_hint
from .files import report_unreadable

if TYPE_CHECKING:
    from jinja2 import nodes

GENERATION_TAG = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
"""The opening or closing tag around an assistant's text, which transformers adds to Jinja."""
BUILTIN_NAMES = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "raise_exception",
    "strftime_now",
    "namespace",
    "range",
    "dict",
}
"""Names that transformers and Jinja pass to every template."""


def parse_template(template: str) -> "nodes.Template":
    """Return the syntax tree of a template. Raises TemplateSyntaxError."""
    from jinja2 import Environment

    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION_TAG.sub("", template))


@report_unreadable
def template_problem(name: str) -> str | None:
    """Return the problem of a chat template's file, which must be Jinja that transformers renders, or None."""
    from jinja2 import TemplateSyntaxError

    path = Path(name)
    if not path.is_file():
        return f"there is no file {name}{path_hint(path)}"
    try:
        parse_template(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return f"{name} is not UTF-8 text. Save the file in UTF-8"
    except TemplateSyntaxError as error:
        return f"{name}, line {error.lineno}: not a valid Jinja template: {(error.message or '').rstrip('.')}"
    return None


def first_referenced_key(template: str, names: Sequence[str]) -> str | None:
    """Return the first of these names that a template reads as an attribute, as a subscript or by `get`, or None.

    Names that are compared with values, as in `role == 'thinking'`, are not read.
    """
    from jinja2 import nodes

    tree = parse_template(template)
    keys = {node.attr for node in tree.find_all(nodes.Getattr)}
    arguments = [node.arg for node in tree.find_all(nodes.Getitem)]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr == "get":
            arguments += call.args[:1]
    keys |= {argument.value for argument in arguments if isinstance(argument, nodes.Const)}
    return next((name for name in names if name in keys), None)


def find_template_options(template: str) -> list[str]:
    """Return the names of the options that a template reads, such as `enable_thinking`.

    These are the variables that neither transformers and Jinja nor the template itself define.
    """
    from jinja2 import meta, nodes

    tree = parse_template(template)
    # An assigned variable is local, unless a test such as `is defined` shows that the assignment is only a default.
    assigned = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    tested = {node.name for test in tree.find_all(nodes.Test) for node in test.find_all(nodes.Name)}
    variables = meta.find_undeclared_variables(tree) - (assigned - tested) - BUILTIN_NAMES
    return sorted(name for name in variables if not name.endswith("_token"))


def string_boolean_problem(options: Mapping[str, Any]) -> str | None:
    """Return the problem with template options if one is a boolean written as a string, such as 'false', or None."""
    for name, value in options.items():
        if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off", "true", "false"):
            return f"{name}: {value!r} is a string, which templates treat as true. Write true or false without quotes"
    return None
