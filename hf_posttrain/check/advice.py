"""What to change where a run does not fit: overrides in the order to try, each estimated on top of those before.

Those come first that leave the numbers of the run as they are. What saves nothing is left out; the list ends with what
makes it fit.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..recipe.sections import Recipe
from .placement import Engine

ENGINES = ("zero1", "zero2", "fsdp2", "fsdp2_offload")
"""Files of accelerate_configs/, from the fastest to the one that needs least."""
LEAST = 0.02
"""Of the total: what a change must save to be worth a line."""


@dataclass(frozen=True)
class Run:
    """What a change makes another of."""

    recipe: Recipe
    config: Any
    engine: Engine

    def with_train(self, **fields: Any) -> "Run":
        """Other values in the train section."""
        config = copy.copy(self.config)
        for name, value in fields.items():
            setattr(config, name, value)
        return replace(self, config=config)

    def with_model(self, **fields: Any) -> "Run":
        """Other values in the model section."""
        return replace(self, recipe=replace(self.recipe, model=replace(self.recipe.model, **fields)))


Change = tuple[str, Run] | None
"""(what to say, the changed run), or None where it does not apply."""


def advice(found: Any, run: Run, again: Callable[[Run], Any]) -> list[str]:
    """Lines for an estimate that does not fit. again: the estimate of a changed run."""
    lines, before = [], found
    for change in CHANGES:
        if before.fits or (changed := change(run, before.phase)) is None:
            continue
        after = again(changed[1])
        if after.total < (1 - LEAST) * before.total:
            run, before = changed[1], after
            lines.append(f"{changed[0]}: {after.total / 2**30:.1f} GiB{', which fits' if after.fits else ''}")
    if not before.fits:
        lines.append("what is left to change: shorter rows (train.max_length), a smaller model, more or larger devices")
    return lines


def checkpointing(run: Run, phase: str) -> Change:
    """Recompute activations."""
    if run.config.activation_checkpointing:
        return None
    return "train.activation_checkpointing=true", run.with_train(activation_checkpointing=True)


def smaller_batches(run: Run, phase: str) -> Change:
    """A quarter of the rows at a time, the same rows a step: the same numbers."""
    size, steps = run.config.per_device_train_batch_size, run.config.gradient_accumulation_steps
    if size == 1:
        return None
    fewer = next(n for n in range(max(1, size // 4), 0, -1) if size % n == 0)
    fields = {"per_device_train_batch_size": fewer, "gradient_accumulation_steps": steps * size // fewer}
    return " ".join(f"train.{name}={value}" for name, value in fields.items()), run.with_train(**fields)


def one_at_a_time(run: Run, phase: str) -> Change:
    """One row or rollout at a time where it is not the training step that needs most."""
    names = {"evaluation": "per_device_eval_batch_size", "scoring beforehand": "per_device_eval_batch_size",
             "greedy answers": "per_device_eval_batch_size", "generation": "generation_batch_size"}  # fmt: skip
    name = names.get(phase)
    return name and (f"train.{name}=1", run.with_train(**{name: 1}))  # type: ignore[return-value]


def scored_beforehand(run: Run, phase: str) -> Change:
    """No reference while training."""
    if getattr(run.config, "precompute_ref_log_probs", True):
        return None
    return "train.precompute_ref_log_probs=true", run.with_train(precompute_ref_log_probs=True)


def offloaded_teacher(run: Run, phase: str) -> Change:
    """The teacher on the device only while it scores."""
    teacher = run.recipe.teacher
    if teacher is None or teacher.offload or not run.engine.gpu:
        return None
    return "teacher.offload=true", replace(run, recipe=replace(run.recipe, teacher=replace(teacher, offload=True)))


def on_engine(name: str, run: Run, phase: str) -> Change:
    """An engine that cuts more, where there are several devices."""
    kind, _, offload = name.partition("_")
    same = (run.engine.name, run.engine.offload_params) == (kind, bool(offload))
    if run.engine.processes == 1 or same or run.engine.offload_params:
        return None
    engine = replace(run.engine, name=kind, offload_params=bool(offload), offload_optimizer=bool(offload))
    return f"accelerate launch --config_file accelerate_configs/{name}.yaml", replace(run, engine=engine)


def small_optimizer(run: Run, phase: str) -> Change:
    """AdamW's state in bytes."""
    if not run.engine.gpu or "8bit" in str(run.config.optim) or run.engine.name not in ("single", "ddp"):
        return None
    return "train.optim=adamw_8bit", run.with_train(optim="adamw_8bit")


def lora(run: Run, phase: str) -> Change:
    """An adapter instead of all weights."""
    model = run.recipe.model
    if model.lora is not None or model.adapter or model.from_scratch:
        return None
    return "model.lora={r: 16}", run.with_model(lora={"r": 16})


def four_bits(run: Run, phase: str) -> Change:
    """A quantised base."""
    model = run.recipe.model
    if not run.engine.gpu or model.quantization != "none" or not (model.lora is not None or model.adapter):
        return None
    return "model.quantization=4bit", run.with_model(quantization="4bit")


CHANGES: list[Callable[[Run, str], Change]] = [
    checkpointing, smaller_batches, one_at_a_time, scored_beforehand, offloaded_teacher, smaller_batches,
    *(partial(on_engine, name) for name in ENGINES), small_optimizer, lora, four_bits,
]  # fmt: skip
"""In the order to try."""
