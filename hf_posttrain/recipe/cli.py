"""The command's arguments: what may stand on the line, in any order, and what --help says."""

import argparse
import difflib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from .. import __version__
from ..errors import InputError, path_hint
from ..methods import METHODS
from .yaml_tree import OVERRIDE

_USAGE = """hf-posttrain RECIPE.yaml [section.key=value ...] [--check [OPTIONS]] [--preprocess-only]
       hf-posttrain COMMAND ... (each has its own --help)"""
_EPILOG = """commands:
  hf-posttrain recipes           the recipes that come with the package: lists, shows and copies them
  hf-posttrain init METHOD       writes a recipe with a comment on each line
  hf-posttrain data FILE         the format of a data file, and its first row as it would be trained
  hf-posttrain sample MODEL      a model's answers to prompts, or those of a recipe, as rows to train on
  hf-posttrain judge FILE        a score for each answer: exact match, a function, a model or a server
  hf-posttrain pair FILE         rows to train on from judged answers
  hf-posttrain eval MODEL        exact match, perplexity, accuracy of pairs, and tasks of lm-eval
  hf-posttrain chat MODEL        talk to a model
  hf-posttrain merge ADAPTER     an adapter and its base as one plain model
  hf-posttrain compare RUN RUN   several finished runs (their output_dir) side by side in one page

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
        "what the recipe would train on, and whether it fits, without training: exit code 0, 1 for"
        " warnings that would ruin training, 2 if it cannot run",
    ),
    "--probe": (_SWITCH, "with --check: also run the longest batch for real"),
    "--json": (_SWITCH, "with --check: print it for machines"),
    "--config_file": (
        {"metavar": "FILE", "type": Path},
        "with --check: plan and memory as accelerate launch would run"
        " it with this file of accelerate_configs, on this machine or another",
    ),
    "--device_memory": ({"metavar": "GIB", "type": float}, "with --check: memory of each device, such as 80"),
    "--preprocess-only": (
        _SWITCH,
        "check and tokenise the data into the cache, where later runs find it, and stop:"
        " needs no launcher and no GPU, loads no weights, writes no output_dir",
    ),
}


def _type(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type of argparse's: what `read` makes of an argument, or the problem that it raises as InputError."""

    def reading(text: str) -> Any:
        try:
            return read(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return reading


def number_type(least: float, kind: type = int) -> Callable[[str], Any]:
    """A type of argparse's: a number of this kind from `least` on."""

    @_type
    def read(text: str) -> Any:
        with suppress(ValueError):
            if least <= (value := kind(text)) < float("inf"):
                return value
        raise InputError(f"must be a {'whole ' * (kind is int)}number from {least} on, not {text}")

    return read


@_type
def _renamed(pair: str) -> tuple[str, str]:
    ours, found, theirs = pair.partition("=")
    if not found:
        raise InputError(f"{pair!r} is not ours=theirs, such as prompt=question")
    return ours, theirs


@_type
def _template(file: str) -> str:
    from .rules import template_problem

    if problem := template_problem(file):
        raise InputError(problem)
    return file


@_type
def _switches(text: str) -> dict[str, Any]:
    from ..data.formats import read_template_kwargs

    return read_template_kwargs(text)


_SHARED: dict[str, dict[str, Any]] = {
    "columns": {
        "type": _renamed,
        "nargs": "+",
        "default": [],
        "metavar": "ours=theirs",
        "help": "columns of the data, as prompt=question completion=answer",
    },
    "chat_template": {"type": _template, "metavar": "FILE", "help": "a Jinja template, in place of the model's own"},
    "chat_template_kwargs": {
        "type": _switches,
        "default": {},
        "metavar": "JSON",
        "help": "options of the chat template, as '{\"enable_thinking\": false}'",
    },
}


class Parser(argparse.ArgumentParser):
    """Raises InputError where argparse prints its usage and leaves."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"command line: {message}")

    def add_shared(self, *names: str) -> None:
        """Options that several commands have: `columns` (pairs of names), `chat_template` (a file that renders) and
        `chat_template_kwargs` (a mapping).
        """
        for name in names:
            self.add_argument(f"--{name}", **_SHARED[name])


def print_output(text: str) -> None:
    """Print what a command found; whoever reads it may stop before its end, as `| head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left is not to be told when Python ends either


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """`argv` (None: of the process) -> recipe (a path), overrides (texts `section.key=value`) and the options. Raises
    InputError for an unknown option (with the nearest), options that do not go together, and no recipe.
    """
    parser = Parser(
        prog="hf-posttrain",
        usage=_USAGE,
        epilog=_EPILOG,
        allow_abbrev=False,
        description=f"Post-train a causal language model ({', '.join(METHODS).upper()}) as a recipe says.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        metavar="RECIPE.yaml, section.key=value",
        nargs="*",
        help="the recipe file, and what replaces values of it",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    for name, (reading, meaning) in _OPTIONS.items():
        parser.add_argument(name, help=meaning, **reading)
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    words = vars(arguments).pop("words")
    # words that begin with a dash and are no option
    for option in unknown:
        key = option.lstrip("-")
        if OVERRIDE.match(key):
            written = key if "." in key.partition("=")[0] else f"train.{key}"
            parser.error(f"{option!r} is not section.key=value: write {written}, without dashes")
        close = difflib.get_close_matches(option, _OPTIONS, n=1)
        otherwise = "a key of the recipe is written section.key=value, without dashes"
        parser.error(f"unknown option {option}; {f'did you mean {close[0]}?' if close else otherwise}")
    # options that do not go together, and their values
    for name in ("probe", "json", "config_file", "device_memory"):
        if getattr(arguments, name) and not arguments.check:
            parser.error(f"--{name} is an option of --check: add that, or drop --{name}")
    file = arguments.config_file
    memory = arguments.device_memory
    if file and not os.path.isfile(file):
        parser.error(f"--config_file: there is no file {file}{path_hint(file)}")
    if memory is not None and not 0 < memory < float("inf"):
        parser.error(f"--device_memory must be a number of GiB above 0, not {memory}")
    if arguments.check and arguments.preprocess_only:
        parser.error("--check and --preprocess-only exclude each other: drop one")
    arguments.recipe, arguments.overrides = find_recipe(parser, words)
    return arguments


def find_recipe(parser: Parser, words: list[str]) -> tuple[str, list[str]]:
    """(recipe, overrides): the first word that is no override, wherever it stands; its name may hold an `=`."""
    at = next((n for n, word in enumerate(words) if not OVERRIDE.match(word) or os.path.isfile(word)), None)
    if at is None:
        given = f" next to {words[0]}" if words else ""
        parser.error(f"there is no recipe{given}: hf-posttrain RECIPE.yaml [section.key=value ...]")
    return words[at], words[:at] + words[at + 1 :]
