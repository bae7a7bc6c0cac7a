"""The `model` and `teacher` sections of a recipe: importable without torch, so that a recipe is read in no time."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import InputError, path_hint
from ..options import option

ADAPTER_CONFIG = "adapter_config.json"
"""What a folder with an adapter has."""


@dataclass
class ModelSection:
    """A model: where it comes from and how it is loaded (`model` and `teacher`)."""

    name_or_path: str = option(help="Hub name or folder.")
    from_scratch: bool = option(
        False,
        "Random weights from the folder's config.json instead of saved ones; the tokenizer is in the same folder.",
    )
    dtype: Literal["default", "auto", "float32", "bfloat16", "float16"] = option(
        "default",
        "`default`: float32 if all weights are trained; a LoRA base or frozen model bfloat16 on GPU, float32 on CPU.",
    )
    images: bool = option(False, "Load it with its tower and its processor, for rows with pictures.")
    attn_implementation: str = option(
        "auto",
        "`auto` leaves the choice to transformers; otherwise eager, sdpa, flex_attention, flash_attention_2, ...",
    )
    quantization: Literal["none", "4bit", "8bit"] = option(
        "none", "Weights quantised by bitsandbytes: for a LoRA base or a teacher."
    )
    trust_remote_code: bool = option(
        False, "Run Python code that comes with the model, and read weights that are not safetensors."
    )
    adapter: str | None = option(None, "Continue from this saved PEFT adapter (folder or hub name).")
    lora: dict[str, Any] | None = option(
        None,
        "Train a new LoRA adapter: r, alpha, dropout, target_modules (all-linear) and every other LoraConfig field.",
    )
    chat_template: str | None = option(
        None, "A file with a Jinja chat template, for a tokenizer that has none or the wrong one; none for a teacher."
    )
    offload: bool = option(False, "Keep the model on CPU between uses: for a teacher.")


@dataclass
class TeacherSection(ModelSection):
    """A teacher: a model, the student's own past, or a server; for `teacher_model` too."""

    name_or_path: str = option(
        "", "Hub name or folder; of a server's model, for its tokenizer; none where the teacher is the student itself."
    )
    url: str | None = option(
        None, "A server of vLLM's that scores, such as http://localhost:8000; what it needs is in docs/reference/teachers.md."
    )
    prompt: str | None = option(
        None,
        "What the teacher reads in place of the prompt: a Jinja template over the row's columns, `prompt` among them.",
    )
    self: Literal["start", "ema"] | None = option(
        None, "The student as its own teacher: as training starts, or the moving average of its weights."
    )
    ema: float = option(0.99, "Of self: ema, the share of the average that stays at each step.")
    own_tokenizer: bool = option(
        False, "The teacher has other tokens than the student: texts are aligned, docs/reference/teachers.md."
    )


def has_tokenizer(folder: Path) -> bool:
    """Has the folder any of the files that a tokenizer is saved as?"""
    return any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model", "*.tiktoken"))


def resolve_path(name: str) -> str:
    """Return the absolute path of a model's folder, which can be read from anywhere; a name of the hub as it is."""
    return str(Path(name).expanduser().resolve()) if Path(name).expanduser().is_dir() else name


def is_local(name: str) -> bool:
    """Can `name` only be that of a folder, since no repository of the hub is called so?"""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def section_from_name(name: str, adapter: str | Path | None = None) -> ModelSection:
    """The section of a model as commands are given it: a folder or hub name, with an adapter on it; or the folder of an
    adapter, such as a run's output_dir, whose base comes with it. Raises InputError for a run's folder that has
    checkpoints alone, and for a recipe.
    """
    folder = Path(name)
    if folder.suffix in (".yaml", ".yml"):
        raise InputError(f"{name} is a recipe, and a model is wanted: give its model, or the output_dir of its run")
    is_whole, is_adapter = ((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG))
    saved = sorted(folder.glob("checkpoint-*"), key=os.path.getmtime)
    if saved and not is_whole and not is_adapter:
        raise InputError(f"{folder} has no model yet: give one of its checkpoints, such as {saved[-1]}")
    if adapter is not None:
        return section_from_adapter(Path(adapter), name)
    return section_from_adapter(folder) if is_adapter and not is_whole else ModelSection(name)


def section_from_adapter(folder: Path, base: str | None = None) -> ModelSection:
    """The section of the adapter in a folder on its base (None: the one that it names), which sees where a run has
    saved a processor. Raises InputError for a folder without an adapter.
    """
    file = folder / ADAPTER_CONFIG
    if not folder.exists():
        raise InputError(f"there is no folder {folder}{path_hint(folder)}")
    if not file.is_file() or not any(folder.glob("adapter_model.*")):
        inside = sorted(folder.glob(f"*/{ADAPTER_CONFIG}"), key=os.path.getmtime)
        hint = f"; did you mean '{inside[-1].parent}'?" if inside else ""
        raise InputError(f"{folder} has no adapter ({ADAPTER_CONFIG} and adapter_model.safetensors){hint}")
    try:
        named = base or json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        named = None
    if not named:
        raise InputError(f"{file} does not say which model the adapter is for: name that too")
    if base is None and not Path(named).exists() and (beside := folder / named).is_dir():
        named = str(beside)  # written as a path from there
    return ModelSection(named, adapter=str(folder), images=any(folder.glob("*processor_config.json")))
