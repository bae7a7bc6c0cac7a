"""Keeps run.json in output_dir, for the report: how a run is set up, on which machine, and what it was warned of.

A resumed run keeps its start and its earlier warnings; a fresh one removes results and samples of an earlier run.
"""

import json
import logging
import platform
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import TrainerCallback, TrainingArguments

from .. import __version__
from ..engines import launch
from ..scoring import forward as scoring

logger = logging.getLogger(__name__)
library = logging.getLogger("hf_posttrain")
NAME = "run.json"
STALE = ("samples.json", "all_results.json")  # of an earlier run: a fresh one might never write them
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "tokenizers")
SHARED = {
    "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "adam_beta1", "adam_beta2",
    "max_grad_norm", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "bf16", "fp16", "activation_checkpointing", "neftune_noise_alpha", "seed",
}  # fmt: skip
"""Fields of TrainingArguments that a reader wants; of the method's own fields all are kept."""


@contextmanager
def warn_on_error(consequence: str, raised: bool = False) -> Iterator[None]:
    """An error inside becomes a warning that begins with `consequence`, and the run goes on. raised: let it out."""
    try:
        yield
    except Exception as error:
        if raised:
            raise
        logger.warning("%s: %s: %s", consequence, type(error).__name__, error)


def write_json(file: Path, content: Any) -> None:
    """Write the file, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".tmp")
    new.write_text(json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    new.replace(file)


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
        # A run that ended in an error has left its handler, and must not hear the warnings of this one.
        for handler in [one for one in library.handlers if isinstance(one, _Warnings)]:
            library.removeHandler(handler)
        for file in map(self.file.with_name, () if state.global_step else STALE):
            with warn_on_error(f"{file.name} of an earlier run stays"):
                file.unlink(missing_ok=True)
        with warn_on_error(f"{NAME} is missing"):
            self.record = describe_run(self.trainer) | {"warnings": []}
            if state.global_step and self.file.exists():
                with warn_on_error(f"{NAME} begins anew"):
                    earlier = json.loads(self.file.read_text(encoding="utf-8"))
                    warnings = [warning for warning in earlier["warnings"] if warning["step"] <= state.global_step]
                    self.record |= {"started": earlier["started"], "warnings": warnings}
            write_json(self.file, self.record)
            library.addHandler(self.handler)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """No more warnings are kept."""
        library.removeHandler(self.handler)

    def add_warning(self, message: str) -> None:
        """Keep a warning with the step that it came at, once."""
        if all(message != warning["message"] for warning in self.record["warnings"]):
            self.record["warnings"].append({"step": self.trainer.state.global_step, "message": message})
            write_json(self.file, self.record)


class _Warnings(logging.Handler):
    """Hands warnings of the library's loggers to a Record, as long as that lives: the loggers keep no trainer."""

    def __init__(self, owner: Record):
        super().__init__(logging.WARNING)
        self.owner = weakref.ref(owner)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if (owner := self.owner()) is not None:
                owner.add_warning(record.getMessage())
        except Exception:
            self.handleError(record)


def describe_run(trainer: Any) -> dict[str, Any]:
    """Method, base model, arguments, weights, machine and versions of a PostTrainer that is about to train; as JSON."""
    args, model = trainer.args, scoring.unwrapped(trainer.model)
    name = scoring.causal_lm(model).config.name_or_path
    left_out = {field.name for field in fields(TrainingArguments)} - SHARED
    # Under ZeRO-3 a rank has only its shard of a weight, and the number is in ds_numel.
    weights = [(getattr(weight, "ds_numel", weight.numel()), weight.requires_grad) for weight in model.parameters()]
    cuda, lora = args.device.type == "cuda", None
    if isinstance(model, peft.PeftModel):
        given = model.active_peft_config.to_dict()
        lora = {name: given.get(name) for name in ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules")}
        # PEFT may have spelt the modules out for each layer.
        if not isinstance(modules := lora["target_modules"], str | None):
            lora["target_modules"] = sorted({module.rpartition(".")[2] for module in modules})
    return {
        "method": trainer.method.name, "base_model": name, "base_model_is_local": Path(name).exists(), "lora": lora,
        "arguments": {field.name: getattr(args, field.name) for field in fields(args) if field.name not in left_out},
        "weights": {"all": sum(n for n, _ in weights), "trained": sum(n for n, trained in weights if trained)},
        "rows_per_step": trainer.get_total_train_batch_size(args),
        "engine": launch.describe_launch(trainer).removeprefix("on engine "),
        "device": torch.cuda.get_device_name(args.device) if cuda else f"{args.device.type} ({platform.machine()})",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"hf_posttrain": __version__, "python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
    }  # fmt: skip
