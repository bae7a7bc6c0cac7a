"""run.json in output_dir: how a run was set up, on what, and what it was warned of; the report reads it.

    Record    the callback that writes it when training begins, and again with each warning
    described what it says of a trainer

A resumed run keeps the warnings that came before.
"""

import dataclasses
import json
import logging
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import TrainerCallback, TrainingArguments

from .. import __version__, launch, scoring

NAME = "run.json"
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "tokenizers")
SHARED = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "adam_beta1", "adam_beta2",
    "max_grad_norm", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "bf16", "fp16", "activation_checkpointing", "neftune_noise_alpha", "seed",
)  # fmt: skip
"""Fields of TrainingArguments that a reader wants; of the method's own fields all are kept."""


class Record(TrainerCallback):
    """Writes run.json on the first process: at the start of training and with each warning of this library."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.file = Path(trainer.args.output_dir, NAME)
        self.record: dict[str, Any] = {}
        self.handler = _Warnings(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Describe the run; of one that is resumed, keep the warnings of the steps before."""
        if not state.is_world_process_zero:
            return
        resumed = state.global_step > 0 and self.file.exists()
        earlier = json.loads(self.file.read_text(encoding="utf-8"))["warnings"] if resumed else []
        kept = [warning for warning in earlier if warning["step"] <= state.global_step]
        self.record = described(self.trainer) | {"warnings": kept}
        self.save()
        logging.getLogger("hf_posttrain").addHandler(self.handler)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """No more warnings are kept."""
        logging.getLogger("hf_posttrain").removeHandler(self.handler)

    def warned(self, message: str) -> None:
        """Keep a warning with the step that it came at, once."""
        if all(message != warning["message"] for warning in self.record["warnings"]):
            self.record["warnings"].append({"step": self.trainer.state.global_step, "message": message})
            self.save()

    def save(self) -> None:
        """Write the file, whole or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.file.with_suffix(".tmp")
        beside.write_text(json.dumps(self.record, indent=1, default=str) + "\n", encoding="utf-8")
        beside.replace(self.file)


class _Warnings(logging.Handler):
    """Hands warnings of the library's loggers to a Record."""

    def __init__(self, record: Record):
        super().__init__(logging.WARNING)
        self.record = record

    def emit(self, record: logging.LogRecord) -> None:
        self.record.warned(record.getMessage())


def described(trainer: Any) -> dict[str, Any]:
    """Method, base model, arguments, weights, machine and versions of a PostTrainer that is about to train; as JSON."""
    args, model = trainer.args, scoring.unwrapped(trainer.model)
    cuda = args.device.type == "cuda"
    name = scoring.causal_lm(model).config.name_or_path
    return {
        "method": trainer.method,
        "base_model": name,
        "base_model_is_local": Path(name).exists(),
        "arguments": _arguments(args),
        "lora": _lora(model),
        "weights": _weights(model),
        "rows_per_step": trainer.get_total_train_batch_size(args),
        "engine": launch.described(trainer).removeprefix("on engine "),
        "device": torch.cuda.get_device_name(args.device) if cuda else f"{args.device.type} ({platform.machine()})",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"hf_posttrain": __version__, "python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
    }


def _arguments(args: Any) -> dict[str, Any]:
    """The shared fields and the method's own."""
    shared = {field.name for field in dataclasses.fields(TrainingArguments)} - {*SHARED}
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name not in shared}


def _lora(model: Any) -> dict[str, Any] | None:
    """The trained adapter's size and place."""
    if not isinstance(model, peft.PeftModel):
        return None
    config = model.active_peft_config.to_dict()
    found = {name: config.get(name) for name in ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules")}
    modules = found["target_modules"]
    if not isinstance(modules, str | None):  # PEFT has spelt them out for each layer
        found["target_modules"] = sorted({name.rpartition(".")[2] for name in modules})
    return found


def _weights(model: Any) -> dict[str, int]:
    """How many there are and how many are trained, cut over ranks or not."""
    sizes = [(getattr(weight, "ds_numel", weight.numel()), weight.requires_grad) for weight in model.parameters()]
    return {"all": sum(size for size, _ in sizes), "trained": sum(size for size, trained in sizes if trained)}
