"""What to change where a run does not fit: overrides in the order to try, each estimated on top of those before.

Those come first that leave the numbers of the run as they are. What saves nothing is left out; the list ends with what
makes it fit.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..recipe.sections import Recipe
from .placement import Engine

ENGINES = (("zero1", False), ("zero2", False), ("fsdp2", False), ("fsdp2", True))
"""(name, does it keep weights in host memory), from the fastest to the one that needs least."""
LEAST = 0.02
"""Of the total: what a change must save to be worth a line."""
BATCHES = dict.fromkeys(("evaluation", "scoring beforehand", "greedy answers"), "per_device_eval_batch_size")
BATCHES["generation"] = "generation_batch_size"
"""Phase -> the batch size that it depends on."""


@dataclass(frozen=True)
class Run:
    """A run that an estimate is of."""

    recipe: Recipe
    config: Any
    engine: Engine

    def changed(self, section: str, **fields: Any) -> "Run":
        """The same with other values in a section: train, model, teacher or engine."""
        if section == "train":
            config = copy.copy(self.config)
            vars(config).update(fields)
            return replace(self, config=config)
        if section == "engine":
            return replace(self, engine=replace(self.engine, **fields))
        changed = replace(getattr(self.recipe, section), **fields)
        return replace(self, recipe=replace(self.recipe, **{section: changed}))


def advice(found: Any, run: Run, again: Callable[[Run], Any]) -> list[str]:
    """Lines for an estimate that does not fit. again: the estimate of a changed run."""
    lines, before = [], found
    for number in range(len(changes(run, found.phase))):
        applies, section, fields = changes(run, before.phase)[number]
        if before.fits or not applies:
            continue
        changed = run.changed(section, **fields)
        after = again(changed)
        if after.total < (1 - LEAST) * before.total:
            run, before = changed, after
            said = " ".join(f"{section}.{name}={str(value).lower()}" for name, value in fields.items()).replace("'", "")
            if section == "engine":
                file = fields["name"] + "_offload" * fields["offload_params"]
                said = f"accelerate launch --config_file accelerate_configs/{file}.yaml"
            lines.append(f"{said}: {after.total / 2**30:.1f} GiB{', which fits' if after.fits else ''}")
    if not before.fits:
        lines.append("what is left to change: shorter rows (train.max_length), a smaller model, more or larger devices")
    return lines


def changes(run: Run, phase: str) -> list[tuple[bool, str, dict[str, Any]]]:
    """(does it apply, section, its new fields) of all that could be changed, in the order to try. phase: the one that
    needs most."""
    config, model, teacher, engine = run.config, run.recipe.model, run.recipe.teacher, run.engine
    size, steps = config.per_device_train_batch_size, config.gradient_accumulation_steps
    # a quarter of the rows at a time, and the same rows a step: the same numbers
    fewer = max(n for n in range(1, max(size // 4, 1) + 1) if size % n == 0)
    smaller = {"per_device_train_batch_size": fewer, "gradient_accumulation_steps": steps * size // fewer}
    online, adapted = not getattr(config, "precompute_ref_log_probs", True), model.lora is not None or model.adapter
    engines = [{"name": name, "offload_params": off, "offload_optimizer": off} for name, off in ENGINES]
    now, several = (engine.name, engine.offload_params), engine.processes > 1 and not engine.offload_params
    moments = not engine.changes_weights and "8bit" not in str(config.optim)
    return [
        (not config.activation_checkpointing, "train", {"activation_checkpointing": True}),
        (size > 1, "train", smaller),
        (phase in BATCHES, "train", {BATCHES.get(phase, ""): 1}),
        (online, "train", {"precompute_ref_log_probs": True}),
        (engine.gpu and teacher is not None and not teacher.offload, "teacher", {"offload": True}),
        (size > 1, "train", smaller),
        *((several and now != (each["name"], each["offload_params"]), "engine", each) for each in engines),
        (engine.gpu and moments, "train", {"optim": "adamw_8bit"}),
        (not adapted and not model.from_scratch, "model", {"lora": {"r": 16}}),
        (engine.gpu and bool(adapted) and model.quantization == "none", "model", {"quantization": "4bit"}),
    ]
