"""A chat template as Jinja reads it, without transformers, whose import is slow."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
"""A tag around what assistants wrote, or its end: one that only transformers knows."""


_GIVEN = {
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


def parsed(template: str) -> Any:
    """The tree of a template. Raises TemplateSyntaxError."""
    from jinja2 import Environment

    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))


def named_in(template: str, names: Sequence[str]) -> str | None:
    """The first of these names that a template reads as a key of something."""
    from jinja2 import nodes

    tree = parsed(template)
    read = {node.attr for node in tree.find_all(nodes.Getattr)} | {node.value for node in tree.find_all(nodes.Const)}
    return next((name for name in names if name in read), None)


def switches(template: str) -> list[str]:
    """What a template reads besides what transformers and Jinja give it, and the values that it sets itself."""
    from jinja2 import meta, nodes

    tree = parsed(template)
    own = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    asked = {node.name for test in tree.find_all(nodes.Test) for node in test.find_all(nodes.Name)}
    read = meta.find_undeclared_variables(tree) - (own - asked) - _GIVEN
    return sorted(name for name in read if not name.endswith("_token"))


def switch_problem(options: Mapping[str, Any]) -> str | None:
    """What is wrong with options for a template of which one is a text that means a switch; None where none is."""
    for name, value in options.items():
        if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off", "true", "false"):
            return f"{name}: {value!r} is a text, which templates take for true: write true or false"
    return None
