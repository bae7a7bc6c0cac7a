"""Command lines of TRL's scripts, with the names that they import in addition to a Config and a trainer.

Options and defaults are the same as in TRL, so that a script runs after its imports are changed:

    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()

For a new run, prefer a recipe, which is validated before a model is loaded.
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
        self.datasets = [_dataset_config(entry) for entry in self.datasets]


def _dataset_config(entry: object) -> DatasetConfig:
    """Convert one entry of a mixture, and raise InputError for an invalid one."""
    if isinstance(entry, DatasetConfig):
        return entry
    if not isinstance(entry, dict) or "path" not in entry:
        raise InputError(f"datasets: {entry!r} must be a mapping with `path`, in the file that --config names")
    known = DatasetConfig.__dataclass_fields__
    for name in entry:
        if name not in known:
            raise InputError(f"datasets: {entry['path']} cannot have {name!r}{name_hint(str(name), known)}")
    return DatasetConfig(**entry)


class TrlParser(HfArgumentParser):
    """Parse dataclasses from the command line, with defaults from the YAML file that `--config` names."""

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """Parse the command line and the file.

        `env` in the file sets environment variables.

        Args:
            args: The arguments. Defaults to sys.argv.
            return_remaining_strings: Whether to return the arguments that no dataclass has.
            fail_with_unknown_args: Whether unknown keys of the file raise an error instead of a warning.

        Returns:
            One instance of each dataclass, and the remaining strings if requested.

        Raises:
            InputError: For a file that cannot be read, and for unknown keys.
        """
        config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        config_parser.add_argument("--config")
        namespace, arguments = config_parser.parse_known_args(sys.argv[1:] if args is None else list(args))
        file = namespace.config
        options = {} if file is None else _read_config(file)
        known = {field.name: field for kind in self.dataclass_types for field in fields(kind) if field.init}
        unknown = [name for name in options if name not in known]
        if unknown and not return_remaining_strings:
            problem = f"{file}: {unknown[0]} is not an option of this script{name_hint(unknown[0], known)}"
            if fail_with_unknown_args:
                raise InputError(problem)
            logger.warning("%s. It is ignored.", problem)

        file_options = {name: value for name, value in options.items() if name in known}
        self.set_defaults(**file_options)
        for name, value in file_options.items():
            if known[name].default is known[name].default_factory is MISSING:  # argparse ignores defaults of these
                arguments = [f"--{name}", *map(str, value if isinstance(value, list) else [value]), *arguments]
        parsed = self.parse_args_into_dataclasses(args=arguments, return_remaining_strings=return_remaining_strings)
        if not return_remaining_strings:
            return parsed
        remaining = [text for name in unknown for text in (f"--{name}", str(options[name]))]
        return (*parsed[:-1], remaining + parsed[-1])


def _read_config(file: str) -> dict[str, Any]:
    """Return the options of a YAML file, and set the environment variables of its `env`."""
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
    """Return the LoRA configuration of a script, or None without `use_peft`."""
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
    """Return the bitsandbytes configuration of a script, or None without quantization."""
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
    """Load and concatenate the datasets of a mixture.

    Returns:
        A dictionary with the split `train`, and the split `test` if `test_split_size` is set.

    Raises:
        InputError: For a mixture without datasets, for a test split or a fraction of a stream, and for fractions of
            only some datasets.
    """
    if not mixture.datasets:
        raise InputError("datasets: the mixture must not be empty. Add a dataset")
    if mixture.test_split_size is not None and mixture.streaming:
        raise InputError(
            "test_split_size cannot be combined with streaming: a stream has no length. Remove one of them"
        )
    parts = []
    for config in mixture.datasets:
        source = {"data_dir": config.data_dir, "data_files": config.data_files, "split": config.split}
        part = datasets.load_dataset(config.path, config.name, **source, streaming=mixture.streaming)
        parts.append(part if config.columns is None else part.select_columns(config.columns))
    rows = datasets.concatenate_datasets(_select_fractions(parts, mixture))
    if mixture.test_split_size is not None:
        return rows.train_test_split(test_size=mixture.test_split_size)
    kind = datasets.IterableDatasetDict if mixture.streaming else datasets.DatasetDict
    return kind({"train": rows})


def _select_fractions(parts: list[Any], mixture: DatasetMixtureConfig) -> list[Any]:
    """Return the first rows of each dataset, in numbers that are proportional to `fraction`."""
    all_fractions = [config.fraction for config in mixture.datasets]
    fractions = [fraction for fraction in all_fractions if fraction is not None]
    if not fractions:
        return parts
    if len(fractions) < len(all_fractions):
        raise InputError("datasets: some have a `fraction` and some have none. Set it for all of them, or for none")
    if mixture.streaming:
        problem = "datasets: `fraction` cannot be combined with streaming: a stream has no length"
        raise InputError(f"{problem}. Remove one of them")
    if min(fractions) < 0 or not 0 < sum(fractions) < float("inf"):
        raise InputError(f"datasets: `fraction` must be positive, not {', '.join(map(str, fractions))}")
    rows = min(len(part) / fraction for part, fraction in zip(parts, fractions, strict=True) if fraction)
    return [part.select(range(round(rows * fraction))) for part, fraction in zip(parts, fractions, strict=True)]
