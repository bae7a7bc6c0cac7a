"""The command `hf-posttrain merge CHECKPOINT OUT`, which saves a plain model.

It merges a saved adapter into its base, as the option `merge_lora` does at the end of a run, or the shards of a fully
trained model that FSDP2 or DeepSpeed has saved.
"""

import itertools
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InputError, error_context
from ..models.config import ADAPTER_CONFIG, ModelSection, RewardModelSection, has_tokenizer, section_from_adapter
from ..recipe.cli import Parser, print_output

DTYPES = ("default", "auto", "float32", "bfloat16", "float16")
_EXAMPLE = "example: hf-posttrain merge outputs/mine/checkpoint-200 merged --dtype bfloat16"
_CHECKPOINT_HELP = "output_dir or checkpoint of a run: an adapter, or a model that FSDP2 or DeepSpeed has sharded"
_DTYPE_HELP = "data type of the weights; default is bfloat16 with a GPU and float32 without, auto is that of the base"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder, and return the exit code.

    Raises:
        InputError: For adapters and shards that cannot be merged. No folder is left in this case.
    """
    description = "Merge a saved adapter into its base model, or the shards of a model, and save a plain model."
    parser = Parser(prog="hf-posttrain merge", description=description, epilog=_EXAMPLE)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help=_CHECKPOINT_HELP)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write, which must be new or empty")
    parser.add_argument(
        "--base",
        metavar="NAME_OR_FOLDER",
        help=f"the base model (default: the one that {ADAPTER_CONFIG} names), or config and tokenizer of shards",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="default", help=_DTYPE_HELP)
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the base")
    arguments = parser.parse_args(argv)
    checkpoint: Path = arguments.checkpoint
    shards = _has_shards(checkpoint)
    if not shards and (checkpoint / "config.json").is_file() and not (checkpoint / ADAPTER_CONFIG).is_file():
        raise InputError(f"{checkpoint} is a plain model already, with neither an adapter nor shards. Use it as it is")
    read = _section_from_shards if shards else section_from_adapter
    section = read(checkpoint, arguments.base)
    section.dtype = arguments.dtype
    section.trust_remote_code = arguments.trust_remote_code
    with new_folder(arguments.out) as folder:
        dtype = merge_shards(section, checkpoint, folder) if shards else merge(section, folder)
    model = f"the shards of {checkpoint}" if shards else f"{section.name_or_path} with the merged adapter {checkpoint}"
    print_output(f"wrote {arguments.out}: {model}, in {dtype}")
    return 0


def _has_shards(checkpoint: Path) -> bool:
    """Return whether a folder has shards of FSDP2 or DeepSpeed, and no adapter.

    A run with LoRA saves the whole adapter next to the shards.
    """
    shards = itertools.chain(checkpoint.glob("pytorch_model_fsdp_*/"), checkpoint.glob("global_step*/"))
    return any(shards) and not (checkpoint / ADAPTER_CONFIG).is_file()


def _section_from_shards(checkpoint: Path, base: str | None) -> ModelSection:
    """Return the section with the config of a sharded model: that of the base, or of the checkpoint.

    Raises:
        InputError: If both are missing.
    """
    if base is None and not (checkpoint / "config.json").is_file():
        raise InputError(f"{checkpoint} has no config.json. Set --base to the model that the run started from")
    section = ModelSection(base or str(checkpoint))
    section.images = any(Path(section.name_or_path).glob("*processor_config.json"))
    return section


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


def merge_shards(section: ModelSection, checkpoint: Path, folder: Path) -> str:
    """Save the model of a checkpoint of FSDP2 or DeepSpeed, whose weights are shards, as a plain model.

    Args:
        section: The section with the config and the tokenizer of the model.
        checkpoint: The checkpoint.
        folder: Folder to save to.

    Returns:
        The data type of the weights.

    Raises:
        InputError: For shards that are incomplete or of another model, and for a full disk.
    """
    import torch

    from ..data.images import get_image_reader
    from ..engines.sharded import read_shards
    from ..models import load
    from ..models.policy import find_terminal_ids, set_generation_config
    from ..trainer import output_dir, saving

    config = load.check_model(section)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = load.weights_dtype(section, config, trains_all_weights=False, device=device)
    section.images |= load.is_vision_only(config)
    tokenizer = load.load_tokenizer(
        replace(section, name_or_path=str(checkpoint)) if has_tokenizer(checkpoint) else section
    )
    state = read_shards(checkpoint)
    kind = RewardModelSection if "score.weight" in state else ModelSection
    model: Any = load.load_skeleton(kind(**vars(section)))

    # of tied weights, one name suffices
    required = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    fix = "Set --base to the model that the run started from"
    try:
        result = model.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:
        mismatch = str(error).partition("size mismatch for ")[2].partition("\n")[0].rstrip(".")
        raise InputError(f"{checkpoint} does not fit {section.name_or_path}: {mismatch}. {fix}") from error
    missing = [name for name in result.missing_keys if name in required]
    for names, place in ((result.unexpected_keys, "model"), (missing, "checkpoint")):
        if names:
            problem = f"The {place} lacks {len(names)} weights, {names[0]} first"
            raise InputError(f"{checkpoint} does not fit {section.name_or_path}. {problem}. {fix}")
    model.tie_weights()

    reader = get_image_reader(tokenizer)
    generation_config = set_generation_config(model, find_terminal_ids(model, tokenizer, None))
    with output_dir.input_error_on_write(folder):
        for saved in (model, reader.processor if reader else tokenizer, generation_config):
            saved.save_pretrained(folder)
    saving.check_saved(model, folder)
    return str(dtype).removeprefix("torch.")
