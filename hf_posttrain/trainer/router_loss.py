"""The router's auxiliary loss of a mixture of experts: load balancing over real tokens, in every layout the same."""

import logging
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ..errors import InputError

logger = logging.getLogger(__name__)


def router_coef(config: Any, asked: float | None) -> float:
    """Weight of the loss: `asked`, or the model's own where its config puts the loss on, else 0. Raises InputError
    where a weight is asked for and the model has no such loss.
    """
    config = config.get_text_config()
    name = next((name for name in ("router_aux_loss_coef", "aux_loss_coef") if hasattr(config, name)), "")
    routed = name and _experts(config) and getattr(config, "is_moe", True)
    if asked and not routed:
        raise InputError("router_aux_loss_coef: this model has no load-balancing loss: leave it out")
    if asked is not None:
        return asked
    on = getattr(config, "output_router_logits", False)
    if on and not routed:
        logger.warning("output_router_logits: this model has no load-balancing loss, so its routers are not balanced")
    return getattr(config, name) or 0.0 if on and routed else 0.0


def _experts(config: PreTrainedConfig) -> int | None:
    return getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)


def balancing_loss(router_logits: Any, config: Any, weights: Tensor) -> Tensor:
    """Switch Transformer, eq. 4-6 (arXiv 2101.03961), from the logits of each layer [R * L, experts]; a scalar.

    weights [R, L]: 0 for padding, K for a prompt token that K branches share, otherwise 1: the padded layout's value.
    """
    config = config.get_text_config()
    loss: Any = load_balancing_loss_func(router_logits, _experts(config), config.num_experts_per_tok, weights)
    return loss
