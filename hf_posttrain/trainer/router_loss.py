"""Load-balancing loss of the routers of a mixture of experts, over real tokens and equal in every layout."""

import logging
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ..errors import InputError

logger = logging.getLogger(__name__)


def router_coef(config: PreTrainedConfig, coef: float | None) -> float:
    """Return the weight of the load-balancing loss, 0 where it is off.

    Args:
        config: Config of the model.
        coef: The option `router_aux_loss_coef`. If None, the weight is that of the model where its config has
            `output_router_logits`, otherwise 0.

    Raises:
        InputError: If `coef` is set and the model has no load-balancing loss.
    """
    config = config.get_text_config()
    name = next((name for name in ("router_aux_loss_coef", "aux_loss_coef") if hasattr(config, name)), "")
    has_loss = name and _num_experts(config) and getattr(config, "is_moe", True)
    if coef and not has_loss:
        raise InputError("router_aux_loss_coef: this model has no load-balancing loss. Remove the option")
    if coef is not None:
        return coef

    enabled = getattr(config, "output_router_logits", False)
    if enabled and not has_loss:
        logger.warning("output_router_logits: this model has no load-balancing loss, so its routers are not balanced")
    return getattr(config, name) or 0.0 if enabled and has_loss else 0.0


def _num_experts(config: PreTrainedConfig) -> int | None:
    return getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)


def balancing_loss(router_logits: tuple[Tensor, ...], config: PreTrainedConfig, weights: Tensor) -> Tensor:
    """Compute the load-balancing loss of the Switch Transformer, eq. 4-6 (arXiv 2101.03961), a scalar.

    Args:
        router_logits: Router logits of each layer, [R * L, experts].
        config: Config of the model.
        weights: Weight of each token, [R, L]: 0 for padding, K for a prompt token that K branches share, otherwise 1.
            So every layout has the value of the padded one.
    """
    config = config.get_text_config()
    logits: Any = router_logits
    loss: Any = load_balancing_loss_func(logits, _num_experts(config), config.num_experts_per_tok, weights)
    return loss
