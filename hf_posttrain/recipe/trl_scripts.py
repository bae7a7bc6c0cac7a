"""Command lines of TRL's scripts: the names that they import in addition to a Config and a trainer.

Options and defaults are those of TRL, so that a script runs after its imports were changed:

    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()

A new run is better written as a recipe, which is checked before a model is loaded.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import yaml
from transformers import BitsAndBytesConfig, HfArgumentParser

from ..errors import InputError, name_hint
from ..options import option

logger = logging.getLogger(__name__)


@dataclass
class ScriptArguments:
    """Options for the dataset of a script."""

    dataset_name: str | None = option(None, "Name or folder of the dataset.")
    dataset_config: str | None = option(None, "Configuration of the dataset, the `name` of `datasets.load_dataset`.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split to evaluate on.")
    dataset_streaming: bool = option(False, "Read the dataset as a stream.")
    ignore_bias_buffers: bool = option(
        False, "Leave boolean buffers out of DDP's synchronization; the script does this itself."
    )


@dataclass
class ModelConfig:
    """Options for the model of a script, its LoRA adapter and its quantization."""

    model_name_or_path: str | None = option(None, "Hub name or folder of the model.")
    model_revision: str = option(
        "main", "Branch, tag or commit on the hub. Trainers load `main` only; download any other revision."
    )
    dtype: str | None = option(
        "float32",
        "Data type of the weights; `auto` is the one that they were saved in.",
        choices=["auto", "bfloat16", "float16", "float32"],
    )
    attn_implementation: str | None = option(None, "Implementation of attention; by default transformers chooses it.")
    use_peft: bool = option(False, "Train a LoRA adapter. The options that begin with `lora_` are only read with this.")
    lora_r: int = option(16, "Rank of the adapter.")
    lora_alpha: int = option(32, "Scale of the adapter: its product is multiplied by lora_alpha / lora_r.")
    lora_dropout: float = option(0.05, "Dropout of the adapter's input. Trainers with `disable_dropout` set it to 0.")
    lora_target_modules: list[str] | None = option(
        None, "Layers that get an adapter, or `all-linear`; by default PEFT chooses them by architecture."
    )
    lora_target_parameters: list[str] | None = option(None, "Parameters that get an adapter, such as fused experts.")
    lora_modules_to_save: list[str] | None = option(None, "Layers that are trained whole and saved with the adapter.")
    lora_task_type: str = option(
        "CAUSAL_LM", "Task of the adapter; only causal language modeling is trained here.", choices=["CAUSAL_LM"]
    )
    use_rslora: bool = option(
        False, "Divide the scale of the adapter by the square root of its rank, instead of by the rank."
    )
    use_dora: bool = option(False, "Train the magnitude of each weight separately from its direction (DoRA).")
    load_in_8bit: bool = option(False, "Quantize the base to 8 bits with bitsandbytes.")
    load_in_4bit: bool = option(False, "Quantize the base to 4 bits with bitsandbytes.")
    bnb_4bit_quant_type: str = option("nf4", "Data type of 4-bit weights.", choices=["fp4", "nf4"])
    use_bnb_nested_quant: bool = option(False, "Quantize the constants of the quantization as well.")
    bnb_4bit_quant_storage: str | None = option(None, "Data type that 4-bit weights are stored in.")

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise InputError("load_in_8bit cannot be combined with load_in_4bit. Set one of the two.")
        if self.lora_target_modules == ["all-linear"]:
            self.lora_target_modules = "all-linear"  # type: ignore[assignment]


@dataclass
class DatasetConfig:
    """One dataset of a mixture: arguments of `datasets.load_dataset`, and which columns to keep."""

    path: str = option(help="Name or folder of the dataset.")
    name: str | None = option(None, "Configuration of the dataset.")
    data_dir: str | None = option(None, "Folder within the dataset.")
    data_files: Any = option(None, "File or files within the dataset.")
    split: str = option("train", "Split to read.")
    columns: list[str] | None = option(None, "Columns to keep; by default all.")
    fraction: float | None = option(
        None,
        "Share of this dataset in the mixture, relative to the others': the first rows are kept, of no dataset more "
        "than it has. Either all datasets of a mixture have one or none.",
    )


@dataclass
class DatasetMixtureConfig:
    """Datasets that are concatenated; written in the file that `--config` names."""

    datasets: list[DatasetConfig] = option(
        help="The datasets of the mixture, as mappings with the fields of `DatasetConfig`.", default_factory=list
    )
    streaming: bool = option(False, "Read every dataset as a stream.")
    test_split_size: float | None = option(
        None, "Share of the mixture that becomes its `test` split; by default there is no such split."
    )

    def __post_init__(self) -> None:
        self.datasets = [_dataset_config(given) for given in self.datasets]


def _dataset_config(given: object) -> DatasetConfig:
    """Return one entry of a mixture. Raises InputError for a wrong one."""
    if isinstance(given, DatasetConfig):
        return given
    if not isinstance(given, dict) or "path" not in given:
        raise InputError(f"datasets: {given!r} must be a mapping with `path`, in the file that --config names")
    known = DatasetConfig.__dataclass_fields__
    for name in given:
        if name not in known:
            raise InputError(f"datasets: {given['path']} cannot have {name!r}{name_hint(str(name), known)}")
    return DatasetConfig(**given)


class TrlParser(HfArgumentParser):
    """Parse dataclasses from the command line, with defaults from the YAML file that `--config` names."""

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """Return one instance of each dataclass, and with `return_remaining_strings` the strings that nothing takes.

        `env` in the file sets environment variables. With `fail_with_unknown_args=False` unknown keys of the file are
        logged and left out. Raises InputError for a file that cannot be read, and for unknown keys.
        """
        outer = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        outer.add_argument("--config")
        chosen, left = outer.parse_known_args(sys.argv[1:] if args is None else list(args))
        options = {} if chosen.config is None else _read_config(chosen.config)
        known = {one.name: one for kind in self.dataclass_types for one in fields(kind) if one.init}
        unknown = [name for name in options if name not in known]
        if unknown and not return_remaining_strings:
            problem = f"{chosen.config}: {unknown[0]} is not an option of this script{name_hint(unknown[0], known)}"
            if fail_with_unknown_args:
                raise InputError(problem)
            logger.warning("%s. It is left out.", problem)
        of_file = {name: value for name, value in options.items() if name in known}
        self.set_defaults(**of_file)
        for name, value in of_file.items():
            if known[name].default is known[name].default_factory is MISSING:  # argparse requires it on the line
                left = [f"--{name}", *map(str, value if isinstance(value, list) else [value]), *left]
        parsed = self.parse_args_into_dataclasses(args=left, return_remaining_strings=return_remaining_strings)
        if not return_remaining_strings:
            return parsed
        from_file = [text for name in unknown for text in (f"--{name}", str(options[name]))]
        return (*parsed[:-1], from_file + parsed[-1])


def _read_config(file: str) -> dict[str, Any]:
    """Return the options of a YAML file, after its `env` was set. Raises InputError for another content."""
    try:
        options = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"--config {file}: {' '.join(str(error).split())}") from error
    if not isinstance(options, dict):
        raise InputError(f"--config {file}: the file must be a mapping of options to values")
    variables = options.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise InputError(f"--config {file}: env must be a mapping of environment variables to values")
    os.environ.update({str(name): str(value) for name, value in variables.items()})
    return options


def get_peft_config(model_args: ModelConfig) -> peft.LoraConfig | None:
    """Return the LoRA configuration that a script asks for, or None without `use_peft`."""
    if not model_args.use_peft:
        return None
    return peft.LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
    )


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """Return the bitsandbytes configuration that a script asks for, or None if it asks for none."""
    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    if not model_args.load_in_4bit:
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=model_args.dtype if model_args.dtype != "auto" else torch.float32,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """Return the device map that puts a quantized model on the GPU of this process, or None without a GPU."""
    return {"": int(os.environ.get("LOCAL_RANK", 0))} if torch.cuda.is_available() else None


def get_dataset(mixture: DatasetMixtureConfig) -> Any:
    """Return a dict of splits with the concatenated datasets of a mixture: `train`, and `test` if one is asked for.

    Raises InputError for a mixture without datasets, for a test split or a fraction of a stream, and for fractions of
    some datasets only.
    """
    if not mixture.datasets:
        raise InputError("datasets: the mixture must name a dataset at least")
    if mixture.test_split_size is not None and mixture.streaming:
        raise InputError("test_split_size cannot be combined with streaming: a stream has no length")
    parts = []
    for one in mixture.datasets:
        where = {"data_dir": one.data_dir, "data_files": one.data_files, "split": one.split}
        part = datasets.load_dataset(one.path, one.name, **where, streaming=mixture.streaming)
        parts.append(part if one.columns is None else part.select_columns(one.columns))
    whole = datasets.concatenate_datasets(_in_shares(parts, mixture))
    if mixture.test_split_size is not None:
        return whole.train_test_split(test_size=mixture.test_split_size)
    kind = datasets.IterableDatasetDict if mixture.streaming else datasets.DatasetDict
    return kind({"train": whole})


def _in_shares(parts: list[Any], mixture: DatasetMixtureConfig) -> list[Any]:
    """Return the first rows of each dataset, so many that their numbers are as its `fraction`s."""
    fractions = [one.fraction for one in mixture.datasets]
    shares = [fraction for fraction in fractions if fraction is not None]
    if not shares:
        return parts
    if len(shares) < len(fractions):
        raise InputError("datasets: some have a `fraction` and some have none. Set it for all of them, or for none.")
    if mixture.streaming:
        raise InputError("datasets: `fraction` cannot be combined with streaming: a stream has no length")
    if min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise InputError(f"datasets: `fraction` must be positive, and is {', '.join(map(str, shares))}")
    rows = min(len(part) / share for part, share in zip(parts, shares, strict=True) if share)
    return [part.select(range(round(rows * share))) for part, share in zip(parts, shares, strict=True)]
