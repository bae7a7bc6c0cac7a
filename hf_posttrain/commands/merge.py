"""`hf-posttrain merge ADAPTER OUT`: a saved adapter merged into its base and saved as a plain model, as merge_lora does
at the end of a run.
"""

import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError, error_context
from ..models.config import ADAPTER_CONFIG, ModelSection, section_from_adapter
from ..recipe.cli import Parser, print_output

DTYPES = ("default", "auto", "float32", "bfloat16", "float16")
_EXAMPLE = "example: hf-posttrain merge outputs/mine/checkpoint-200 merged --dtype bfloat16"
_DTYPE = "of the weights: bfloat16 where there is a GPU, otherwise float32; auto: as the files of the base"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder; returns the exit code. Raises InputError for what cannot be merged, and then leaves nothing."""
    described = "Merge a saved adapter into its base model, and save a plain model with its tokenizer."
    parser = Parser(prog="hf-posttrain merge", description=described, epilog=_EXAMPLE, allow_abbrev=False)
    parser.add_argument("adapter", metavar="ADAPTER", type=Path, help="a run's output_dir, or a checkpoint in it")
    parser.add_argument("out", metavar="OUT", type=Path, help="where the model goes: a new folder")
    parser.add_argument("--base", metavar="NAME_OR_FOLDER", help=f"the base model (the one that {ADAPTER_CONFIG} names)")
    parser.add_argument("--dtype", choices=DTYPES, default="default", help=_DTYPE)
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the base")
    given = parser.parse_args(argv)
    section = section_from_adapter(given.adapter, given.base)
    section.dtype = given.dtype
    section.trust_remote_code = given.trust_remote_code
    out = given.out.absolute()
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        parser.error(f"OUT: {given.out} is there already: name another folder, or delete it")
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        parser.error(f"OUT: {given.out} cannot be written ({error.strerror})")
    try:
        dtype = merge(section, unfinished)
        if out.exists():
            out.rmdir()  # it is empty
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print_output(f"{given.out} is {section.name_or_path} with {given.adapter} merged into it, in {dtype}")
    return 0


def merge(section: ModelSection, folder: Path) -> str:
    """Save the model of `section`, which has an adapter, as a plain one; returns the dtype of its weights. Raises
    InputError where that cannot be done, or the disk takes no more.
    """
    from ..data.images import read_by
    from ..models import load
    from ..models.policy import align_generation, find_terminal_ids, set_generation_config
    from ..trainer import output_dir, saving

    adapter = str(section.adapter)
    with error_context(f"the base of {adapter} (--base names another)"):
        config = load.check_model(ModelSection(section.name_or_path, trust_remote_code=section.trust_remote_code))
    kind = (getattr(config, "quantization_config", None) or {}).get("quant_method", "mxfp4")
    if kind != "mxfp4":  # which is loaded as what it stands for
        why = f"{section.name_or_path} is quantised ({kind}), and its steps would round the adapter away"
        raise InputError(f"{why}: --base names the model in full precision")
    section.images |= load.is_vision_only(config)
    tokenizer = load.load_tokenizer(section)
    with warnings.catch_warnings(action="ignore"):
        policy: Any = load.load_model(section, trainable=False)
    try:
        saving.check_mergeable(policy)
    except InputError as error:
        raise InputError(f"{adapter} cannot be merged: {error.__cause__ or error}") from error
    # a run saves with its adapter how the model generates
    inner = policy.get_base_model()
    reader = read_by(tokenizer)
    inner.generation_config = load.load_generation_config(ModelSection(adapter)) or inner.generation_config
    ends = find_terminal_ids(policy, tokenizer, None)
    align_generation(policy, tokenizer, ends)
    saved_too = reader.processor if reader else tokenizer, set_generation_config(policy, ends)
    with output_dir.writing(folder):
        saving.write_merged(policy, policy.state_dict(), *saved_too, str(folder))
    return str(inner.dtype).removeprefix("torch.")
