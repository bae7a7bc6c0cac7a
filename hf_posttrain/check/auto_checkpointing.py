"""Activation checkpointing is left out where a GPU has room for all activations."""

import copy
import logging

import datasets
from accelerate.utils import broadcast_object_list

from ..models.load import load_skeleton
from ..recipe.sections import Recipe
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from .memory import GIB, estimate
from .placement import Engine, requested_engine

logger = logging.getLogger(__name__)
MAX_MEMORY_SHARE = 0.7  # share of a GPU that an estimate may take before it counts as full


def disable_unneeded_checkpointing(
    recipe: Recipe,
    config: PostTrainConfig,
    trainer_class: type[PostTrainer],
    rows: dict,
    engine: Engine | None = None,
    memory_gib: float | None = None,
) -> None:
    """Switch activation checkpointing off in a run on a GPU that has room for all activations, where the recipe leaves
    it open: it costs a third more compute, and gives the same numbers.

    engine: in place of this run's. memory_gib: memory of a device in GiB, in place of what it has.
    """
    names = ("activation_checkpointing", "gradient_checkpointing")
    engine = engine or requested_engine(config)
    options = {*names, *(f"{name}_kwargs" for name in names)}
    if not engine.gpu or options & recipe.train.keys() or not isinstance(rows["train"], datasets.Dataset):
        return
    if load_skeleton(recipe.model).config.get_text_config()._attn_implementation == "eager":
        return  # it keeps scores of tokens by tokens, which the estimate does not count
    without = copy.copy(config)
    without.activation_checkpointing = False
    try:
        found = estimate(recipe, without, trainer_class, rows, engine, memory_gib)
    except ValueError as error:  # an architecture that cannot be counted
        logger.info("activation_checkpointing: on (what the run needs without it is not known: %s)", error)
        return
    enough = not found.notes and found.total <= MAX_MEMORY_SHARE * (found.available or 0)
    [enough] = broadcast_object_list([enough])
    if enough:
        vars(config).update(dict.fromkeys(names, False))
    size = found.total / GIB
    have = (found.available or 0) / GIB
    logger.info(
        "activation_checkpointing: %s (without it the run needs about %.1f of %.1f GiB)",
        "off" if enough else "on",
        size,
        have,
    )
