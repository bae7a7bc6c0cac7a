"""The router's auxiliary loss of a mixture of experts: load balancing over real tokens, in every layout the same."""

from typing import Any

from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ..errors import InputError


def router_coef(config: Any, asked: float | None) -> float:
    """Weight of the loss: `asked`, or the model's own where its config puts the loss on, else 0. Raises InputError
    where a weight is asked for and the model has no such loss."""
    config = config.get_text_config()
    name = next((name for name in ("router_aux_loss_coef", "aux_loss_coef") if hasattr(config, name)), None)
    routed = name and _experts(config) and getattr(config, "is_moe", True)
    on = getattr(config, "output_router_logits", False)
    if not routed and (asked or (asked is None and on)):
        problem = "router_aux_loss_coef" if asked else "output_router_logits, of the model's config,"
        raise InputError(f"{problem} asks for a loss of routers that this model has not: set router_aux_loss_coef: 0")
    return asked if asked is not None else float(getattr(config, name or "", None) or 0) * on


def _experts(config: Any) -> int | None:
    return getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)


def balancing_loss(router_logits: Any, config: Any, weights: Tensor) -> Tensor:
    """Switch Transformer, eq. 4-6 (arXiv 2101.03961), from the logits of each layer [R * L, experts]; a scalar.

    weights [R, L]: 0 for padding, K for a prompt token that K branches share, otherwise 1: the padded layout's value.
    """
    config = config.get_text_config()
    loss: Any = load_balancing_loss_func(router_logits, _experts(config), config.num_experts_per_tok, weights)
    return loss
