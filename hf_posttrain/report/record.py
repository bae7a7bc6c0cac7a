"""Keeps run.json in output_dir, for the report: how a run is set up, on which machine, and what it was warned of.

A resumed run keeps its start and its earlier warnings; a fresh one removes results and samples of an earlier run.
"""

import dataclasses
import json
import logging
import platform
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
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
NAME = "run.json"
STALE = ("samples.json", "all_results.json")
"""Files of an earlier run that a fresh one would add to, or might never write."""
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "tokenizers")
SHARED = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "adam_beta1", "adam_beta2",
    "max_grad_norm", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "bf16", "fp16", "activation_checkpointing", "neftune_noise_alpha", "seed",
)  # fmt: skip
"""Fields of TrainingArguments that a reader wants; of the method's own fields all are kept."""


@contextmanager
def harmless(consequence: str, raised: bool = False) -> Iterator[None]:
    """For what is kept for people to read, of which no run may end: an error inside becomes a warning.

    consequence: how the warning begins. raised: let errors out after all.
    """
    try:
        yield
    except Exception as error:
        if raised:
            raise
        logger.warning("%s: %s: %s", consequence, type(error).__name__, error)


class Record(TrainerCallback):
    """Writes run.json on the first process: at the start of training and with each warning of this library."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.file = Path(trainer.args.output_dir, NAME)
        self.record: dict[str, Any] = {}
        self.handler = _Warnings(self)
        self.library = logging.getLogger("hf_posttrain")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Describe the run; of one that is resumed, keep the warnings of the steps before."""
        if not state.is_world_process_zero:
            return
        for handler in [one for one in self.library.handlers if isinstance(one, _Warnings)]:
            self.library.removeHandler(handler)  # of a run that ended in an error
        for file in map(self.file.with_name, () if state.global_step else STALE):
            with harmless(f"{file.name} of an earlier run stays"):
                file.unlink(missing_ok=True)
        with harmless(f"{NAME} is missing"):
            self.record = described(self.trainer) | self._kept(state.global_step)
            self.save()
            self.library.addHandler(self.handler)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """No more warnings are kept."""
        self.library.removeHandler(self.handler)

    def warned(self, message: str) -> None:
        """Keep a warning with the step that it came at, once."""
        if all(message != warning["message"] for warning in self.record["warnings"]):
            self.record["warnings"].append({"step": self.trainer.state.global_step, "message": message})
            self.save()

    def _kept(self, step: int) -> dict[str, Any]:
        """Start and warnings of a run that is resumed at `step`, if its file can be read; otherwise no warnings."""
        with harmless(f"{NAME} begins anew"):
            if step and self.file.exists():
                earlier = json.loads(self.file.read_text(encoding="utf-8"))
                warnings = [warning for warning in earlier["warnings"] if warning["step"] <= step]
                return {"started": earlier["started"], "warnings": warnings}
        return {"warnings": []}

    def save(self) -> None:
        """Write the file, whole or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(".tmp")
        new.write_text(json.dumps(self.record, indent=1, default=str) + "\n", encoding="utf-8")
        new.replace(self.file)


class _Warnings(logging.Handler):
    """Hands warnings of the library's loggers to a Record, as long as that lives: the loggers keep no trainer."""

    def __init__(self, record: Record):
        super().__init__(logging.WARNING)
        self.of = weakref.ref(record)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if (run := self.of()) is not None:
                run.warned(record.getMessage())
        except Exception:
            self.handleError(record)


def described(trainer: Any) -> dict[str, Any]:
    """Method, base model, arguments, weights, machine and versions of a PostTrainer that is about to train; as JSON."""
    args, model = trainer.args, scoring.unwrapped(trainer.model)
    cuda = args.device.type == "cuda"
    name = scoring.causal_lm(model).config.name_or_path
    return {
        "method": trainer.method.name,
        "base_model": name,
        "base_model_is_local": Path(name).exists(),
        "arguments": _arguments(args),
        "lora": _lora(model),
        "weights": _weights(model),
        "rows_per_step": trainer.get_total_train_batch_size(args),
        "engine": launch.describe_launch(trainer).removeprefix("on engine "),
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
    """The trained adapter's options: its rank and where it is."""
    if not isinstance(model, peft.PeftModel):
        return None
    config = model.active_peft_config.to_dict()
    found = {name: config.get(name) for name in ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules")}
    modules = found["target_modules"]
    if not isinstance(modules, str | None):  # PEFT has spelt them out for each layer
        found["target_modules"] = sorted({name.rpartition(".")[2] for name in modules})
    return found


def _weights(model: Any) -> dict[str, int]:
    """How many there are and how many are trained; under ZeRO-3 a rank has only its shard, and ds_numel the number."""
    sizes = [(getattr(weight, "ds_numel", weight.numel()), weight.requires_grad) for weight in model.parameters()]
    return {"all": sum(size for size, _ in sizes), "trained": sum(size for size, trained in sizes if trained)}
