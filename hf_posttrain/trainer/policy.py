"""Construction of the policy, from a model with weights or, for `--check`, from one on the meta device."""

from peft import PeftConfig
from torch import nn
from transformers import set_seed

from ..engines import launch, sequence
from ..models.policy import prepare_policy
from ..scoring import forward
from . import saving
from .config import PostTrainConfig
from .router_loss import router_coef


def make_policy(model: nn.Module, peft_config: PeftConfig | None, args: PostTrainConfig) -> tuple[nn.Module, float]:
    """Return the model to train and the weight of its load-balancing loss.

    Args:
        model: The model. It may be on the meta device, so that `--check` rejects the same options as a run.
        peft_config: Configuration of a new adapter, or None.
        args: Options of the trainer.

    Raises:
        InputError: If the model does not support an option.
    """
    launch.check_model(model, args)
    set_seed(args.seed)  # for the weights of a new adapter; Trainer sets the seed only after they are initialized
    policy = prepare_policy(model, peft_config, args)
    inner = forward.causal_lm(policy)
    coef = router_coef(inner.config, args.router_aux_loss_coef)
    sequence.check_model(inner, coef, args)
    if args.merge_lora:
        saving.check_mergeable(policy)
    return policy, coef
