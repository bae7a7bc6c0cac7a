"""The command `hf-posttrain prune MODEL OUT --keep_layers N`, which removes decoder layers from a model.

The result is worse than the model until it is trained. Distillation from the model recovers most of the difference.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError, join_names
from ..models.config import ModelSection, section_from_name
from ..recipe.cli import Parser, number_type, print_output
from ..recipe.sections import Source
from .merge import DTYPES, new_folder

_EXAMPLES = """examples:
  hf-posttrain prune Qwen/Qwen3-0.6B outputs/half --keep_layers 14
  hf-posttrain prune Qwen/Qwen3-0.6B outputs/half --keep_layers 14 --data texts.jsonl
  hf-posttrain prune Qwen/Qwen3-0.6B outputs/half --keep_layers 0-5,8,20-27
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder, and return the exit code.

    Raises:
        InputError: For models whose layers cannot be removed. No folder is left in this case.
    """
    arguments = parse(argv)
    section = section_from_name(arguments.model)
    if section.adapter:
        raise InputError(f"MODEL: {arguments.model} is an adapter. Merge it first (hf-posttrain merge)")
    section.dtype = arguments.dtype
    section.trust_remote_code = arguments.trust_remote_code
    with new_folder(arguments.out) as folder:
        kept, total = prune(section, folder, arguments)
    print_output(f"wrote {arguments.out}: layers {format_layers(kept)} of the {total} layers of {section.name_or_path}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments."""
    parser = Parser(
        prog="hf-posttrain prune",
        description="Remove decoder layers from a model, and save the smaller model with its tokenizer.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or hub name of a language model")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write, which must be new or empty")
    parser.add_argument(
        "--keep_layers",
        "--keep-layers",
        required=True,
        metavar="N|LIST",
        help="number of layers to keep, or their numbers from 0 on, such as 0-5,8,20-27",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="rows on which the influence of each layer is measured; the layers with the least influence are removed"
        " (default: the kept layers have equal distances)",
    )
    parser.add_argument("--limit", type=number_type(1), default=32, metavar="N", help="number of rows to read (32)")
    parser.add_argument("--max_length", type=number_type(2), default=512, metavar="N", help="tokens of a row (512)")
    parser.add_argument(
        "--apply_chat_template", action="store_true", help="convert rows of plain text to a user and an assistant turn"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="data type of the weights (auto: as saved)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    parser.add_shared("columns")
    arguments = parser.parse_args(argv)
    arguments.columns = dict(arguments.columns)
    if arguments.data and not arguments.keep_layers.isdigit():
        parser.error("--data requires a number of layers in --keep_layers, and it is a list. Remove --data")
    if arguments.apply_chat_template and not arguments.data:
        parser.error("--apply_chat_template converts the rows of --data. Add --data, or remove it")
    return arguments


def prune(section: ModelSection, folder: Path, arguments: argparse.Namespace) -> tuple[list[int], int]:
    """Save a model without some of its layers. Return the numbers of the kept layers, and the number of all layers."""
    from ..data.images import get_image_reader
    from ..models import load, prune
    from ..models.policy import find_terminal_ids, set_generation_config

    config = load.check_model(section)
    section.images |= load.is_vision_only(config)
    total = config.get_text_config().num_hidden_layers
    kept = read_layers(arguments.keep_layers, total)
    tokenizer = load.load_tokenizer(section)
    model: Any = load.load_model(section, trainable=False)
    if arguments.data:
        influence = prune.layer_influence(model, read_texts(arguments, tokenizer))
        kept = sorted(sorted(range(total), key=influence.__getitem__)[-len(kept) :])
    prune.keep_layers(model, kept)

    reader = get_image_reader(tokenizer)
    generation_config = set_generation_config(model, find_terminal_ids(model, tokenizer, None))
    for saved in (model, reader.processor if reader else tokenizer, generation_config):
        saved.save_pretrained(folder)
    prune.check_reloaded(model, str(folder))
    return kept, total


def read_layers(text: str, total: int) -> list[int]:
    """Return the numbers of the layers in `--keep_layers`.

    Raises:
        InputError: For text that is neither a number nor a list, and for layers that the model does not have.
    """
    from ..models.prune import evenly_spaced

    if text.isdigit():
        if not 0 < int(text) < total:
            raise InputError(f"--keep_layers: {text} must be from 1 to {total - 1}, since the model has {total} layers")
        return evenly_spaced(int(text), total)
    numbers: list[int] = []
    for part in text.split(","):
        if not (match := re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)):
            raise InputError(f"--keep_layers: {part!r} is neither a number nor a range such as 0-5")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    if missing := [number for number in numbers if number >= total]:
        raise InputError(f"--keep_layers: the model has no layer {missing[0]}. Its layers are 0 to {total - 1}")
    if not numbers or len({*numbers}) < len(numbers) or numbers != sorted(numbers):
        raise InputError(f"--keep_layers: {text} must name layers in ascending order, each once")
    if len(numbers) == total:
        raise InputError(f"--keep_layers: {text} are all layers of the model. Leave some out")
    return numbers


def read_texts(arguments: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of the rows of --data.

    Raises:
        InputError: For columns that contain no texts.
    """
    from ..data.prepare import prepare
    from ..data.row_schema import SUPERVISED
    from ..data.sources import load
    from .inference import PromptReader, data_options

    options = data_options(max_length=arguments.max_length, apply_chat_template=arguments.apply_chat_template)
    raw = load(Source(arguments.data, None, "train", arguments.columns or None, arguments.limit), "--data")
    rows = prepare(raw, PromptReader("prune", SUPERVISED), tokenizer, options, "--data")
    return [[*row["prompt_ids"], *row["completion_ids"]] for row in rows]


def format_layers(numbers: Sequence[int]) -> str:
    """Return layers as text, such as 0-5, 8, 20-27."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return join_names(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
