"""Preflight: what would this recipe train on, and does it fit? Seconds on CPU, no training, nothing is written.

    check        a recipe -> Check, on the first rank
    Check        its parts, each with lines() for people and warnings(): audit.py (rows), tokens.py, plan.py, memory.py,
                 probe.py
    show.py      a Check as text
"""

import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..recipe import build as parts
from ..recipe.sections import Recipe

_USUAL = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "max_grad_norm", "num_train_epochs",
    "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size",
    "bf16", "activation_checkpointing", "max_length", "layout", "logging_steps", "eval_strategy", "save_strategy",
    "save_steps", "seed", "report_to",
)  # fmt: skip
"""Fields that all methods have whose defaults are said."""


@dataclass
class Check:
    """What was found."""

    path: str
    """The recipe's file."""
    method: str
    """sft, dpo, kto, kd or opd."""
    recipe: dict[str, Any]
    """The recipe as resolved."""
    given: dict[str, Any]
    """Keys of the train section that the recipe gives."""
    defaulted: dict[str, Any]
    """Keys of the method's own and the usual ones that it does not give, with the values that are used."""
    data: dict[str, Any]
    """DataAudit of train, and of eval where there is one; streams are not audited."""
    tokens: Any
    """TokenAudit."""
    plan: Any
    """Plan."""
    memory: Any
    """MemoryEstimate."""
    probe: Any = None
    """Probe, where --probe asks for it."""
    notes: list[str] = field(default_factory=list)
    """What was logged as a warning on the way, and does no harm to training."""

    @property
    def warnings(self) -> list[str]:
        """What would ruin training."""
        made = [*self.data.values(), self.tokens, self.plan, self.memory, *([self.probe] if self.probe else [])]
        return [warning for part in made for warning in part.warnings()]

    @property
    def status(self) -> int:
        """The exit code: 0, or 1 where there are warnings."""
        return 1 if self.warnings else 0

    def to_json(self) -> str:
        """Everything, with null in place of numbers that are not finite."""
        found = {"status": self.status, "warnings": self.warnings} | dataclasses.asdict(self)
        return json.dumps(json.loads(json.dumps(found, default=str), parse_constant=lambda _: None), indent=2)


def check(
    recipe: Recipe, with_probe: bool = False, config_file: Path | None = None, device_memory: float | None = None
) -> Check | None:
    """Everything about a recipe that shows without training it; None on every rank but the first, which all call it.

    config_file: plan and memory are those of a launch by this file of accelerate_configs. device_memory: GiB, in place
    of this machine's.

    What its train section asks of engines and GPUs is checked where it is launched for them, and otherwise for names
    and types alone, so that a laptop can check what a cluster is to run. Raises InputError for what cannot run.
    """
    trainer_class, config = parts.configure(recipe if _is_at_home() else parts.of_any_machine(recipe))
    from ..data.lengths import warn_if_too_long
    from ..recipe.datasets import audit_data, prepare_data
    from .memory import estimate
    from .placement import engine_asked, engine_of
    from .plan import plan
    from .probe import probe
    from .tokens import audit_tokens

    tokenizer, peft_config = parts.check_models(recipe)
    with _remembered_warnings() as notes:
        rows = prepare_data(recipe, trainer_class, tokenizer, config)
        models = parts.load_skeletons(recipe)
        warn_if_too_long(rows["train"], models[0].config, config)
    engine = engine_of(config_file) if config_file else engine_asked(config)
    memory = estimate(recipe, config, trainer_class, rows, engine, device_memory)
    with _remembered_warnings() as more:
        probed = probe(recipe, tokenizer, peft_config, rows["train"]) if with_probe else None
    if config.process_index != 0:
        return None
    return Check(
        path=str(recipe.path),
        method=recipe.method,
        recipe=recipe.to_dict(),
        given=recipe.to_dict()["train"],
        defaulted=_defaulted(recipe, trainer_class, config),
        data=audit_data(recipe, tokenizer, config),
        tokens=audit_tokens(recipe, tokenizer, config, models),
        plan=plan(rows["train"], trainer_class, config, models, engine.processes),
        memory=memory,
        probe=probed,
        notes=[*notes, *more],
    )


def _is_at_home() -> bool:
    """Is this the machine that the recipe is meant for: was it launched, or is there a GPU?"""
    if "LOCAL_RANK" in os.environ or any(name.startswith("ACCELERATE_") for name in os.environ):
        return True
    import torch

    return torch.cuda.is_available()


def _defaulted(recipe: Recipe, trainer_class: Any, config: Any) -> dict[str, Any]:
    """The values of what the recipe leaves open, as they are used."""
    known = {f.name for f in dataclasses.fields(config)}
    own = vars(trainer_class.config_class)["__annotations__"]
    names = [name for name in (*_USUAL, *own) if name not in recipe.train and name in known]
    values = {name: getattr(config, name) for name in dict.fromkeys(names)}
    return {name: getattr(value, "value", value) for name, value in values.items() if value is not None}


@contextmanager
def _remembered_warnings() -> Iterator[list[str]]:
    """The messages of warnings that are logged meanwhile."""
    notes: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    package = logging.getLogger(__name__.partition(".")[0])
    package.addHandler(handler)
    try:
        yield notes
    finally:
        package.removeHandler(handler)
