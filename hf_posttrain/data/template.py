"""A chat template as Jinja reads it, without transformers, whose import is slow."""

import re

from jinja2 import Environment, nodes

GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
"""A tag around what assistants wrote, or its end: one that only transformers knows."""


def parsed(template: str) -> nodes.Template:
    """The tree of a template. Raises TemplateSyntaxError."""
    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))
