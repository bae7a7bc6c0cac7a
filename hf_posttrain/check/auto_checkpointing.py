"""Disables activation checkpointing on a device that has room for all activations."""

import copy
import logging
from collections.abc import Mapping

import datasets
from accelerate.utils import broadcast_object_list

from ..data.dataset_type import AnyDataset
from ..models.adapters import trained_adapter_config
from ..models.load import load_skeleton
from ..recipe.sections import Recipe
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from .memory import GIB, estimate
from .placement import Engine, engine_from_config

logger = logging.getLogger(__name__)
_NAMES = ("activation_checkpointing", "gradient_checkpointing")
MAX_MEMORY_SHARE = 0.7
"""Largest share of a device's memory that the estimate may need without checkpointing."""


def disable_unneeded_checkpointing(
    recipe: Recipe,
    config: PostTrainConfig,
    trainer_class: type[PostTrainer],
    rows: Mapping[str, AnyDataset | None],
    engine: Engine | None = None,
    memory_gib: float | None = None,
) -> None:
    """Switch activation checkpointing off on a device that has room for all activations, unless the recipe sets it.

    Checkpointing costs a third more compute, and gives the same numbers. It is also switched off for an aLoRA, which
    PEFT cannot train with it. All ranks call it.

    Args:
        recipe: The recipe.
        config: The Config of the run, which is changed in place.
        trainer_class: The trainer class of the run.
        rows: Prepared rows of each data set.
        engine: Engine in place of this run's.
        memory_gib: Memory of a device in GiB, in place of this machine's.
    """
    options = {*_NAMES, *(f"{name}_kwargs" for name in _NAMES)}
    if options & recipe.train.keys():
        return
    if getattr(trained_adapter_config(recipe.model), "alora_invocation_tokens", None):
        _disable_checkpointing(config)
        logger.info("activation_checkpointing: off (it cannot be combined with alora_invocation_tokens)")
        return
    if not isinstance(rows["train"], datasets.Dataset):
        return
    if load_skeleton(recipe.model).config.get_text_config()._attn_implementation == "eager":
        return  # eager attention saves scores of tokens by tokens, which the estimate does not count
    engine = engine or engine_from_config(config)
    without = copy.copy(config)
    without.activation_checkpointing = False
    try:
        needed = estimate(recipe, without, trainer_class, rows, engine, memory_gib, with_advice=False)
        unknown = "; ".join(needed.notes)
    except ValueError as error:  # an architecture that cannot be counted
        unknown = str(error)
    if unknown:
        enough = False
        reason = f"the memory that the run needs without it is unknown: {unknown}"
    else:
        # on CPU, freed memory may stay with the process, and all processes may be on this machine
        total = needed.total if engine.gpu else (needed.process or needed.total) * engine.processes
        available = needed.available or 0
        enough = total <= MAX_MEMORY_SHARE * available
        reason = f"without it the run needs about {total / GIB:.1f} of {available / GIB:.1f} GiB"
    [enough, reason] = broadcast_object_list([enough, reason])  # all ranks decide as the first one
    if enough:
        _disable_checkpointing(config)
    logger.info("activation_checkpointing: %s (%s)", "off" if enough else "on", reason)


def _disable_checkpointing(config: PostTrainConfig) -> None:
    """Set both names of the option. The trainer does not check all options again, since both values are valid."""
    vars(config).update(dict.fromkeys(_NAMES, False))
    config.snapshot_options()
