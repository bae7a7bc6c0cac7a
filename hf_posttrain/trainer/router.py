"""The router's auxiliary loss of a mixture of experts: load balancing over real tokens, in every layout the same."""

from typing import Any

from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ..errors import InputError


def router_coef(config: Any, asked: float | None) -> float:
    """Weight of the loss: `asked`, or the model's own where its config puts the loss on, else 0. Raises InputError
    where a weight is asked for and the model has no experts."""
    config = config.get_text_config()
    if asked and not hasattr(config, "router_aux_loss_coef"):
        raise InputError("router_aux_loss_coef is set and the model is no mixture of experts")
    if asked is not None:
        return asked
    return getattr(config, "router_aux_loss_coef", 0.0) if getattr(config, "output_router_logits", False) else 0.0


def balancing_loss(router_logits: Any, config: Any, weights: Tensor) -> Tensor:
    """Switch Transformer, eq. 4-6 (arXiv 2101.03961), from the logits of each layer [R * L, experts]; a scalar.

    weights [R, L]: 0 for padding, K for a prompt token that K branches share, otherwise 1: the padded layout's value.
    """
    config = config.get_text_config()
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    loss: Any = load_balancing_loss_func(router_logits, experts, config.num_experts_per_tok, weights)
    return loss
