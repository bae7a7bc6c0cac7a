"""The `model` and `teacher` sections of a recipe. They are importable without torch, so that recipes are read fast."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..errors import InputError, path_hint
from ..options import option

OFFLINE_FIX = ". Use the folder of a model, or unset HF_HUB_OFFLINE"
"""Fix in errors about models of the hub."""
ADAPTER_CONFIG = "adapter_config.json"
"""File that every folder with an adapter has."""


@dataclass
class ModelSection:
    """A model and how it is loaded (`model` and `teacher`)."""

    head: ClassVar[Literal["language", "score"]] = "language"
    """Last layer of the model: that of a causal LM, or the score of a reward model."""
    name_or_path: str = option(help="Hub name or folder of the model.")
    from_scratch: bool = option(
        False,
        "Whether to initialize random weights from the config.json of the folder instead of loading saved ones. The "
        "tokenizer is in the same folder.",
    )
    dtype: Literal["default", "auto", "float32", "bfloat16", "float16"] = option(
        "default",
        "Dtype of the weights. `default` is float32 if all weights are trained. For a LoRA base or a frozen model it "
        "is bfloat16 on GPU and float32 on CPU.",
    )
    images: bool = option(
        False, "Whether to load the model with its vision encoder and its processor, for rows with images."
    )
    attn_implementation: str = option(
        "auto",
        "Attention implementation: eager, sdpa, flex_attention, flash_attention_2, ... `auto` leaves the choice to "
        "transformers.",
    )
    quantization: Literal["none", "4bit", "8bit"] = option(
        "none", "Quantization of the weights by bitsandbytes, for a LoRA base or a teacher."
    )
    trust_remote_code: bool = option(
        False,
        "Whether to run Python code that comes with the model, and to read weights that are not safetensors.",
    )
    adapter: str | None = option(None, "Folder or hub name of a saved PEFT adapter, whose training continues.")
    lora: dict[str, Any] | None = option(
        None,
        "A new LoRA adapter to train: r, alpha, dropout, target_modules (default all-linear) and every other field of "
        "LoraConfig.",
    )
    chat_template: str | None = option(
        None,
        "File with a Jinja chat template, if the tokenizer has none or a wrong one. Not supported for a teacher.",
    )
    offload: bool = option(False, "Whether the model is on CPU between uses, for a teacher.")


@dataclass
class RewardModelSection(ModelSection):
    """A reward model: a sequence classifier with one label, or a language model that gets a new score layer."""

    head: ClassVar[Literal["language", "score"]] = "score"


@dataclass
class TeacherSection(ModelSection):
    """A teacher: a model, an earlier state of the student, or a server (also for `teacher_model`)."""

    name_or_path: str = option(
        "",
        "Hub name or folder of the teacher. For a server, that of its model, whose tokenizer is read. Empty if the "
        "student is its own teacher.",
    )
    url: str | None = option(
        None,
        "URL of a vLLM server that scores, such as http://localhost:8000. Its requirements are in "
        "docs/reference/teachers.md.",
    )
    prompt: str | None = option(
        None,
        "Jinja template of the prompt that the teacher reads instead of the student's, over the columns of the row, "
        "including `prompt`.",
    )
    self: Literal["start", "ema"] | None = option(
        None,
        "Use the student as its own teacher: `start` is the student at the start of training, `ema` a moving average "
        "of its weights.",
    )
    ema: float = option(0.99, "Decay of the moving average at each step, for self: ema.")
    own_tokenizer: bool = option(
        False,
        "Whether the teacher has another tokenizer than the student, so that texts are aligned "
        "(docs/reference/teachers.md).",
    )


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has any of the files of a saved tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model", "*.tiktoken"))


def resolve_path(name: str) -> str:
    """Return the absolute path of a model's folder, which can be read from anywhere, or a hub name unchanged."""
    return str(Path(name).expanduser().resolve()) if Path(name).expanduser().is_dir() else name


def is_local(name: str) -> bool:
    """Return whether `name` can only be a folder, since no repository of the Hub has such a name."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def unreadable_weights(folder: str) -> str | None:
    """Return the problem of a folder whose weights this user may not read, or None.

    The error of safetensors for such a file is that there is no file.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    files = files or [file for name in ("pytorch_model*.bin", "adapter_model.bin") for file in Path(folder).glob(name)]
    closed = next((file for file in files if not os.access(file, os.R_OK)), None)
    return None if closed is None else f"there is no permission to read {closed}. Its owner can grant it with chmod a+r"


def section_from_name(name: str, adapter: str | Path | None = None) -> ModelSection:
    """Return the section of a model that is an argument of a command.

    Args:
        name: Folder or hub name of a model, or folder of an adapter, such as the output_dir of a run. The base of the
            adapter is then loaded as well.
        adapter: Folder of an adapter on the model.

    Raises:
        InputError: For a recipe, and for the folder of a run that has only checkpoints.
    """
    folder = Path(name)
    if folder.suffix in (".yaml", ".yml"):
        raise InputError(f"{name} is a recipe, not a model. Use the model of the recipe, or the output_dir of its run")
    is_model, is_adapter = ((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG))
    checkpoints = sorted(folder.glob("checkpoint-*"), key=os.path.getmtime)
    if checkpoints and not is_model and not is_adapter:
        raise InputError(f"{folder} has no model yet. Use one of its checkpoints, such as {checkpoints[-1]}")
    if adapter is not None:
        return section_from_adapter(Path(adapter), name)
    return section_from_adapter(folder) if is_adapter and not is_model else ModelSection(name)


def section_from_adapter(folder: Path, base: str | None = None) -> ModelSection:
    """Return the section of an adapter on its base. It has images if a run has saved a processor in the folder.

    Args:
        folder: Folder of the adapter.
        base: The base model, by default the one that the config of the adapter names.

    Raises:
        InputError: If the folder has no adapter, or if the base is unknown.
    """
    file = folder / ADAPTER_CONFIG
    if not folder.exists():
        raise InputError(f"there is no folder {folder}{path_hint(folder)}")
    if not file.is_file() or not any(folder.glob("adapter_model.*")):
        nested = sorted(folder.glob(f"*/{ADAPTER_CONFIG}"), key=os.path.getmtime)
        hint = f"; did you mean '{nested[-1].parent}'?" if nested else ""
        raise InputError(f"{folder} has no adapter ({ADAPTER_CONFIG} and adapter_model.safetensors){hint}")
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        config = {}
    base_name = base or config.get("base_model_name_or_path")
    if not base_name:
        raise InputError(f"{file} does not name the base model of the adapter. Set the base model, too")
    if base is None and not Path(base_name).exists() and (relative := folder / base_name).is_dir():
        base_name = str(relative)  # a path relative to the folder of the adapter
    if base is None and is_local(base_name) and not Path(base_name).expanduser().exists():
        problem = f"{file} names the base model {base_name}, which does not exist on this machine"
        raise InputError(f"{problem}. Set the base model, too, or set base_model_name_or_path in that file")
    section_class = RewardModelSection if config.get("task_type") == "SEQ_CLS" else ModelSection
    return section_class(base_name, adapter=str(folder), images=any(folder.glob("*processor_config.json")))
