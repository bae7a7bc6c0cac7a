"""Arguments of the command line, in any order, and the texts of --help."""

import argparse
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from .. import __version__
from ..errors import InputError, path_hint
from ..methods import METHODS
from .yaml_tree import OVERRIDE

_T = TypeVar("_T")
_USAGE = """hf-posttrain RECIPE.yaml [section.key=value ...] [--check [OPTIONS]] [--preprocess-only]
       hf-posttrain COMMAND ... (each has its own --help)"""
_EPILOG = """commands:
  hf-posttrain recipes           list, print or copy the recipes that come with the package
  hf-posttrain init METHOD       write a recipe with a comment on each line
  hf-posttrain schema            print the JSON Schema of a recipe, for editors
  hf-posttrain data FILE         show the format of a data file and its first training example
  hf-posttrain sample MODEL      generate answers to prompts with a model or a recipe, as training rows
  hf-posttrain judge FILE        score each answer by exact match, a function, a model or a server
  hf-posttrain pair FILE         select training rows from judged answers
  hf-posttrain eval MODEL        compute exact match, perplexity, pair accuracy and tasks of lm-eval
  hf-posttrain chat MODEL        talk to a model
  hf-posttrain merge ADAPTER     merge an adapter into its base and save a plain model
  hf-posttrain prune MODEL       remove layers from a model, for a smaller student
  hf-posttrain compare RUN RUN   compare several runs (their output_dir) on one page
  hf-posttrain card ROWS         write a dataset card for rows of sample, judge, pair or rounds
  hf-posttrain docs TOPIC        print a page of the documentation
  hf-posttrain env               print versions, devices and settings, for the report of a bug

examples:
  hf-posttrain recipes/dpo.yaml
  hf-posttrain recipes/dpo.yaml train.beta=0.2 train.max_steps=100 model.lora=null
  hf-posttrain recipes/sft.yaml data.train.path=mine.jsonl 'data.train.columns={prompt: question, completion: answer}'
  hf-posttrain recipes/sft.yaml train.resume_from_checkpoint=auto
  hf-posttrain recipes/dpo.yaml --check
  hf-posttrain recipes/dpo_full.yaml --check --config_file accelerate_configs/zero2.yaml --device_memory 80
  hf-posttrain recipes/dpo.yaml --preprocess-only train.dataset_num_proc=16
  accelerate launch -m hf_posttrain.run recipes/kto.yaml
"""
_SWITCH: dict[str, Any] = {"action": "store_true"}
_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "--check": (
        _SWITCH,
        "show the resolved settings, audit the data and estimate the memory without training; the exit code is 1 for"
        " warnings that would ruin training, and 2 if the recipe cannot run",
    ),
    "--probe": (_SWITCH, "with --check: also run the longest batch"),
    "--json": (_SWITCH, "with --check: print the result as JSON"),
    "--config_file": (
        {"metavar": "FILE", "type": Path},
        "with --check: plan the run for accelerate launch with this file of accelerate_configs, on this machine or"
        " another",
    ),
    "--device_memory": ({"metavar": "GIB", "type": float}, "with --check: memory of each device in GiB, such as 80"),
    "--preprocess-only": (
        _SWITCH,
        "check and tokenize the data into the cache of later runs, and exit; requires no launcher and no GPU, loads no"
        " weights, and writes no output_dir",
    ),
}


def _argument_type(read: Callable[[str], _T]) -> Callable[[str], _T]:
    """Convert a function that raises InputError to a type of argparse."""

    def convert(text: str) -> _T:
        try:
            return read(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def number_type(minimum: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """Return a type of argparse for finite numbers of at least `minimum`."""

    @_argument_type
    def read(text: str) -> float:
        with suppress(ValueError):
            if minimum <= (value := kind(text)) < float("inf"):
                return value
        raise InputError(f"must be a {'whole ' * (kind is int)}number of at least {minimum}, not {text}")

    return read


@_argument_type
def _column_pair(pair: str) -> tuple[str, str]:
    """Split NAME=COLUMN."""
    name, separator, column = pair.partition("=")
    if not separator:
        raise InputError(f"{pair!r} must have the form NAME=COLUMN, such as prompt=question")
    return name, column


@_argument_type
def _template_file(file: str) -> str:
    """Return the path of a chat template that can be parsed."""
    from ..data.template import template_problem

    if problem := template_problem(file):
        raise InputError(problem)
    return file


@_argument_type
def _template_kwargs(text: str) -> dict[str, Any]:
    """Return options of a chat template."""
    from ..data.formats import read_template_kwargs

    return read_template_kwargs(text)


_SHARED: Mapping[str, Mapping[str, Any]] = {
    "columns": {
        "type": _column_pair,
        "nargs": "+",
        "default": [],
        "metavar": "NAME=COLUMN",
        "help": "columns of the data that have other names, such as prompt=question completion=answer",
    },
    "chat_template": {
        "type": _template_file,
        "metavar": "FILE",
        "help": "Jinja chat template (default: that of the model)",
    },
    "chat_template_kwargs": {
        "type": _template_kwargs,
        "default": {},
        "metavar": "JSON",
        "help": "options of the chat template, such as '{\"enable_thinking\": false}'",
    },
}


class Parser(argparse.ArgumentParser):
    """Parser without abbreviated options, which raises InputError where argparse prints its usage and exits."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise an InputError with the message."""
        raise InputError(f"command line: {message}")

    def add_shared(self, *names: str) -> None:
        """Add options that several commands have: `columns`, `chat_template` and `chat_template_kwargs`."""
        for name in names:
            self.add_argument(f"--{name}", **_SHARED[name])


def print_output(text: str) -> None:
    """Print the output of a command. Its reader may exit early, as with `| head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard the rest, so that Python does not raise at exit


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        argv: The arguments. Defaults to sys.argv.

    Returns:
        The namespace with `recipe` (a path), `overrides` (texts `section.key=value`) and the options.

    Raises:
        InputError: For an unknown option, for options that cannot be combined, and without a recipe.
    """
    parser = Parser(
        prog="hf-posttrain",
        usage=_USAGE,
        epilog=_EPILOG,
        description=f"Post-train a causal language model ({', '.join(METHODS).upper()}) from a recipe.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        metavar="RECIPE.yaml, section.key=value",
        nargs="*",
        help="recipe file, and values that override its values",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    for name, (options, help_text) in _OPTIONS.items():
        parser.add_argument(name, help=help_text, **options)
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    words = vars(arguments).pop("words")

    # words that start with a dash and are not options
    for option in unknown:
        key = option.lstrip("-")
        if OVERRIDE.match(key):
            override = key if "." in key.partition("=")[0] else f"train.{key}"
            parser.error(f"{option!r} must have the form section.key=value without dashes. Use {override}")
        similar = difflib.get_close_matches(option, _OPTIONS, n=1)
        if similar:
            parser.error(f"unknown option {option}; did you mean {similar[0]}?")
        parser.error(f"unknown option {option}. Write keys of the recipe as section.key=value, without dashes")

    # invalid combinations and values
    for name in ("probe", "json", "config_file", "device_memory"):
        if getattr(arguments, name) and not arguments.check:
            parser.error(f"--{name} is only valid with --check. Add --check, or remove --{name}")
    file = arguments.config_file
    memory = arguments.device_memory
    if file and not os.path.isfile(file):
        parser.error(f"--config_file: there is no file {file}{path_hint(file)}")
    if memory is not None and not 0 < memory < float("inf"):
        parser.error(f"--device_memory must be a positive number of GiB, not {memory}")
    if arguments.check and arguments.preprocess_only:
        parser.error("--check cannot be combined with --preprocess-only. Remove one of them")
    arguments.recipe, arguments.overrides = find_recipe(parser, words)
    return arguments


def find_recipe(parser: Parser, words: list[str]) -> tuple[str, list[str]]:
    """Return the recipe, which is the first word that is not an override, and the overrides.

    The name of a file may contain `=`.
    """
    index = next((n for n, word in enumerate(words) if not OVERRIDE.match(word) or os.path.isfile(word)), None)
    if index is None:
        location = f" next to {words[0]}" if words else ""
        parser.error(f"there is no recipe{location}. Usage: hf-posttrain RECIPE.yaml [section.key=value ...]")
    return words[index], words[:index] + words[index + 1 :]
