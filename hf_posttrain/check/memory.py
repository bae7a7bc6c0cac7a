"""What a run needs of each device's memory, before anything is loaded, and what to change if it does not fit.

    estimate     -> MemoryEstimate, with advice where it does not fit (`advice.py`)

Weights are counted from the models' configs (`shapes.py`), what each engine makes of them is arithmetic
(`placement.py`), and what comes on top is the real trainer's real step on the longest rows, with weights that are
shapes (`phases.py`). What the process has beside all that is measured in this one.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch

from ..models import load as models
from ..recipe.sections import Recipe
from .advice import Run, advice
from .phases import Phase, columns, phases_of
from .placement import Engine, Weights, engine_asked, frozen_on, policy_on
from .rehearsal import longest, quiet, rehearsed
from .shapes import Shapes, cast, weights_of

GIB = 2**30
FEW, DEEP = 2, 12
"""A model of more than DEEP layers is rehearsed with FEW and with twice as many. What the line through them misses is
below a tile or two of the head, where those need more than so few layers."""
HEAP = (
    "glibc keeps freed tensors in its heap: the process may hold twice as much. With MALLOC_MMAP_THRESHOLD_=65536 in"
    " the environment it gives them back, for a quarter more time"
)
CUDA_CONTEXT = GIB // 2
"""Kernels and workspaces of CUDA where there is no GPU to ask: a typical value, not a measured one."""


@dataclass
class MemoryEstimate:
    """Bytes on each device at the peak of the part of the run that needs most."""

    engine: str
    """Which engine, and on how many processes."""
    phase: str
    """At whose peak this is: training step, evaluation, generation, ..."""
    parameters: int
    """Weights of the policy, with the layers that an engine gathers."""
    gradients: int
    """Of the trained weights, with the buckets that they travel in."""
    optimizer: int
    """Its state, with the float32 weights that DeepSpeed keeps."""
    second_model: int
    """Reference or teacher."""
    activations: int
    """All other tensors: activations, a tile of the head, masks, the cache of generation."""
    other: int
    """What the process has without tensors; on a GPU its context, and what vLLM keeps."""
    total: int
    """All of these."""
    available: int | None
    """Bytes of the device; None where it is not in this machine."""
    host: int
    """Bytes that an engine keeps in host memory for this device."""
    batch: dict[str, Any]
    """rows and tokens of the longest micro-batch, and its layout."""
    phases: dict[str, int] = field(default_factory=dict)
    """The total of each part of the run."""
    notes: list[str] = field(default_factory=list)
    """What is not in it."""
    advice: list[str] = field(default_factory=list)
    """What to change if it does not fit, in the order to try, each on top of those before."""

    @property
    def fits(self) -> bool:
        """As far as it is known."""
        return self.available is None or self.total <= self.available

    def warnings(self) -> list[str]:
        """One line where it does not fit."""
        if self.fits:
            return []
        need, have = (f"{size / GIB:.1f} GiB" for size in (self.total, self.available or 0))
        return [f"memory: the {self.phase} needs about {need} on each device, which has {have}"]

    def lines(self) -> list[str]:
        """The estimate for people."""
        limit = "" if self.available is None else f" of {self.available / GIB:.1f}"
        found = [f"memory on each device ({self.engine}): {self.total / GIB:.2f} GiB{limit}, in the {self.phase}"]
        for name in ("parameters", "gradients", "optimizer", "second_model", "activations", "other"):
            if size := getattr(self, name):
                found.append(f"  {name.replace('_', ' '):13s}{size / GIB:8.2f}")
        found.append("  the longest micro-batch: {rows} rows, {tokens} tokens, layout {layout}".format(**self.batch))
        rest = [f"{name} {size / GIB:.2f}" for name, size in self.phases.items() if name != self.phase]
        found += [f"  other parts of the run: {', '.join(rest)}"] if rest else []
        found += [f"  in host memory for it: {self.host / GIB:.2f}"] if self.host else []
        return found + [f"  {line}" for line in (*self.notes, *self.advice)]


@dataclass(frozen=True)
class Measured:
    """A rehearsed run: what it consists of, before an engine places it."""

    policy: Weights
    second: Weights | None
    phases: tuple[Phase, ...]
    optim: str
    mixed: bool
    """bf16 or fp16."""
    batch: dict[str, Any]
    other: int
    notes: tuple[str, ...] = ()


def estimate(
    recipe: Recipe,
    config: Any,
    trainer_class: Any,
    rows: dict[str, Any],
    tokenizer: Any,
    engine: Engine | None = None,
    available_gib: float | None = None,
) -> MemoryEstimate:
    """The memory that training on `rows`, as `prepare_data` gives them, needs of each device.

    engine: instead of that of this process, such as `placement.engine_of(file)`; for GPUs it means what the recipe
    would be there, bf16 for instance. available_gib: memory of the device, instead of this machine's.
    Raises InputError as the trainer's constructor does.
    """
    run = Run(recipe, config, engine or engine_asked(config))
    available = int(available_gib * GIB) if available_gib else device_memory(run.engine)

    def of(run: Run) -> MemoryEstimate:
        return on_device(measure(run, trainer_class, rows, tokenizer), run.engine, available)

    with quiet(), models.whole_weights(), _uncollected():
        found = of(run)
        if not found.fits:
            found.advice = advice(found, run, of)
    if not run.engine.gpu and sys.platform == "linux" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        found.notes.append(HEAP)
    return found


def measure(run: Run, trainer_class: Any, rows: dict[str, Any], tokenizer: Any) -> Measured:
    """Rehearse the run. Weights are counted on whole models; of deep ones the phases are rehearsed with FEW layers and
    twice as many, and the rest is on the straight line through the two."""
    depth, recipe = models.check_model(run.recipe.model).get_text_config().num_hidden_layers, run.recipe
    deep, config = depth > DEEP, as_on(run)
    mixed, trainer = bool(config.bf16 or config.fp16), _trainer(run, config, trainer_class, rows, tokenizer, None)
    second = trainer.second_model.model if trainer.second_model is not None else None
    policy = weights_of(trainer.model, recipe.model)
    beside = None if second is None else weights_of(second, recipe.teacher or recipe.model)
    other, batch, found = process_memory(run.engine, config), described_batch(trainer, rows["train"]), []
    notes: list[str] = []
    try:
        for layers in (FEW, 2 * FEW) if deep else (None,):
            if deep:
                trainer = _trainer(run, config, trainer_class, rows, tokenizer, layers)
            if mixed and run.engine.name not in ("single", "ddp"):
                cast(trainer.model, torch.bfloat16)  # the engine does it
            found.append(list(phases_of(trainer, config, rows, run.engine)))
    except (RuntimeError, NotImplementedError) as error:  # what hangs on values, or has no kernel for shapes
        reason = str(error).partition("\n")[0]
        notes.append(f"activations are not in it: this model cannot be run on shapes alone ({reason})")
    phases = _deeper(found, depth) if not notes else [Phase("training step", 0, gradients=True)]
    return Measured(policy, beside, tuple(phases), config.optim, mixed, batch, other, tuple(notes))


def _trainer(
    run: Run, config: Any, trainer_class: Any, rows: dict[str, Any], tokenizer: Any, layers: int | None
) -> Any:
    """The rehearsed trainer on models of `layers` layers."""
    shapes, device = Shapes(layers), torch.device("cuda" if run.engine.gpu else "cpu")
    given: dict[str, Any] = {"model": shapes.model(run.recipe.model, True, device), "processing_class": tokenizer}
    if run.recipe.teacher is not None:
        given["teacher_model"] = shapes.model(run.recipe.teacher, False, device)
        given["teacher_offload"] = run.recipe.teacher.offload
    given |= {"train_dataset": rows["train"], "eval_dataset": rows.get("eval")}
    return rehearsed(trainer_class, config, peft_config=models.lora_config(run.recipe.model), **given)


def _deeper(found: list[list[Phase]], depth: int) -> list[Phase]:
    """The phases of a model of `depth` layers, from those of FEW and of twice as many."""
    if len(found) == 1:
        return found[0]
    return [
        replace(more, beyond=more.beyond + (more.beyond - few.beyond) * (depth - 2 * FEW) // FEW)
        for few, more in zip(*found, strict=True)
    ]


def on_device(measured: Measured, engine: Engine, available: int | None) -> MemoryEstimate:
    """The sum on one device of `engine`, at the phase that needs most."""
    held = policy_on(engine, measured.policy, measured.optim, measured.mixed)
    second = frozen_on(engine, measured.second, measured.mixed) if measured.second else 0
    whole = measured.policy.numbers * (2 if measured.mixed else 4) if engine.shards else 0
    totals: dict[str, int] = {}
    parts: dict[str, dict[str, Any]] = {}
    for phase in measured.phases:
        parts[phase.name] = {
            "parameters": held.parameters + (whole if phase.whole else 0),
            "gradients": held.gradients if phase.gradients else 0,
            "optimizer": held.optimizer if phase.optimizer else 0,
            "second_model": second if phase.second else 0,
            "activations": phase.beyond,
            "other": measured.other,
        }
        totals[phase.name] = sum(parts[phase.name].values())
    most = max(totals, key=lambda name: totals[name])
    return MemoryEstimate(
        engine.described, most, **parts[most], total=totals[most], available=available, host=held.host,
        batch=measured.batch, phases=totals, notes=list(measured.notes),
    )  # fmt: skip


def as_on(run: Run) -> Any:
    """The config as it would be on the engine's machines: on GPUs bf16, unless the recipe says otherwise."""
    decided = {"bf16", "fp16", "use_cpu"} & run.recipe.train.keys()
    return run.config if decided or not run.engine.gpu else run.with_train(bf16=True).config


def described_batch(trainer: Any, rows: Any) -> dict[str, Any]:
    """rows, tokens (as laid out) and layout of the longest micro-batch."""
    chosen = longest(rows, trainer.args.per_device_train_batch_size, columns(trainer))
    batch = trainer.data_collator(chosen)
    if "input_ids" not in batch:  # prompts, to be answered
        [batch] = trainer.prepare_window([batch])
    layout = trainer.data_collator.layout
    return {"rows": len(chosen), "tokens": batch["input_ids"].numel(), "layout": layout}


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected inside, nor afterwards what it left: freeing cycles of fake tensors crashes torch."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def device_memory(engine: Engine) -> int | None:
    """Bytes of the GPU, or what this machine has free and this process has already; None for GPUs elsewhere."""
    if engine.gpu:
        return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    return psutil.virtual_memory().available + psutil.Process().memory_info().rss


def process_memory(engine: Engine, config: Any) -> int:
    """Bytes that are no tensors of the run: of this process so far, or of a GPU's context and vLLM."""
    if not engine.gpu:
        return psutil.Process().memory_info().rss
    if not torch.cuda.is_available():
        return CUDA_CONTEXT
    free, total = torch.cuda.mem_get_info()
    colocated = getattr(config, "vllm_mode", None) == "colocate"
    share = (config.vllm_gpu_memory_utilization or 0.3) if colocated else 0.0
    return total - free - torch.cuda.memory_reserved() + int(share * total)
