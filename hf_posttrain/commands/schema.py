"""The command `hf-posttrain schema`, which prints the JSON Schema of a recipe."""

import json
from collections.abc import Sequence

from ..recipe.cli import Parser, print_output


def main(argv: Sequence[str] | None = None) -> int:
    """Print the schema of the installed versions of all packages, and return the exit code."""
    parser = Parser(
        prog="hf-posttrain schema",
        description="Print the JSON Schema of a recipe, with which editors complete and check recipes.",
        epilog="example: hf-posttrain schema > recipe.schema.json",
    )
    parser.parse_args(argv)
    from ..recipe.schema import recipe_schema  # imports all methods

    print_output(json.dumps(recipe_schema(), indent=1))
    return 0
