"""The command `hf-posttrain merge ADAPTER OUT`, which merges a saved adapter into its base and saves a plain model.

The option `merge_lora` does the same at the end of a run.
"""

import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import InputError, error_context
from ..models.config import ADAPTER_CONFIG, ModelSection, section_from_adapter
from ..recipe.cli import Parser, print_output

DTYPES = ("default", "auto", "float32", "bfloat16", "float16")
_EXAMPLE = "example: hf-posttrain merge outputs/mine/checkpoint-200 merged --dtype bfloat16"
_DTYPE_HELP = "data type of the weights; default is bfloat16 with a GPU and float32 without, auto is that of the base"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder, and return the exit code.

    Raises:
        InputError: For adapters that cannot be merged. No folder is left in this case.
    """
    description = "Merge a saved adapter into its base model, and save a plain model with its tokenizer."
    parser = Parser(prog="hf-posttrain merge", description=description, epilog=_EXAMPLE)
    parser.add_argument("adapter", metavar="ADAPTER", type=Path, help="a run's output_dir, or one of its checkpoints")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write, which must be new or empty")
    parser.add_argument(
        "--base", metavar="NAME_OR_FOLDER", help=f"the base model (default: the one that {ADAPTER_CONFIG} names)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="default", help=_DTYPE_HELP)
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the base")
    arguments = parser.parse_args(argv)
    section = section_from_adapter(arguments.adapter, arguments.base)
    section.dtype = arguments.dtype
    section.trust_remote_code = arguments.trust_remote_code
    with new_folder(arguments.out) as folder:
        dtype = merge(section, folder)
    print_output(
        f"wrote {arguments.out}: {section.name_or_path} with the merged adapter {arguments.adapter}, in {dtype}"
    )
    return 0


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `out` after the block. No folder is left if the block raises an error.

    Raises:
        InputError: If `out` exists and is not empty, or cannot be written.
    """
    absolute = out.absolute()
    if os.path.lexists(absolute) and not (absolute.is_dir() and not any(absolute.iterdir())):
        raise InputError(f"OUT: {out} exists. Set another OUT, or delete the folder")
    unfinished = absolute.with_name(f".{absolute.name}.{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"OUT: {out} cannot be written ({error.strerror})") from error
    try:
        yield unfinished
        if absolute.exists():
            absolute.rmdir()  # an empty folder
        unfinished.rename(absolute)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def merge(section: ModelSection, folder: Path) -> str:
    """Save a model with an adapter as a plain model.

    Args:
        section: The model, with its adapter.
        folder: Folder to save to.

    Returns:
        The data type of the weights.

    Raises:
        InputError: For a model that cannot be merged, and for a full disk.
    """
    from ..data.images import get_image_reader
    from ..models import load
    from ..models.policy import align_generation, find_terminal_ids, set_generation_config
    from ..trainer import output_dir, saving

    adapter = str(section.adapter)
    with error_context(f"the base of {adapter} (--base sets another)"):
        config = load.check_model(ModelSection(section.name_or_path, trust_remote_code=section.trust_remote_code))
    kind = (getattr(config, "quantization_config", None) or {}).get("quant_method", "mxfp4")
    if kind != "mxfp4":  # MXFP4 weights are loaded as plain ones
        problem = f"{section.name_or_path} is quantized ({kind}), which would round the adapter away"
        raise InputError(f"{problem}. Set --base to the model in full precision")
    section.images |= load.is_vision_only(config)
    tokenizer = load.load_tokenizer(section)
    with warnings.catch_warnings(action="ignore"):
        policy: Any = load.load_model(section, trainable=False)
    try:
        saving.check_mergeable(policy)
    except InputError as error:
        raise InputError(f"{adapter} cannot be merged: {error.__cause__ or error}") from error

    # the generation config that the run saved with its adapter
    inner = policy.get_base_model()
    reader = get_image_reader(tokenizer)
    inner.generation_config = load.load_generation_config(ModelSection(adapter)) or inner.generation_config
    terminal_ids = find_terminal_ids(policy, tokenizer, None)
    align_generation(policy, tokenizer, terminal_ids)
    processor = reader.processor if reader else tokenizer
    generation_config = set_generation_config(policy, terminal_ids)
    with output_dir.input_error_on_write(folder):
        saving.write_merged(policy, policy.state_dict(), processor, generation_config, str(folder))
    return str(inner.dtype).removeprefix("torch.")
