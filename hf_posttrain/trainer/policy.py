"""The policy as a trainer makes it, of a model with weights or, for `--check`, of one without."""

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
    """Return the model as it is trained, with a new adapter where `peft_config` is given, and the weight of its
    experts' load-balancing loss.

    The model may be on the meta device, so that `--check` refuses what a run does. Raises InputError for what the
    options ask for and the model does not have.
    """
    launch.check_model(model, args)
    set_seed(args.seed)  # of a new adapter's weights; HF's Trainer does it when they are made
    policy = prepare_policy(model, peft_config, args)
    inner = forward.causal_lm(policy)
    coef = router_coef(inner.config, args.router_aux_loss_coef)
    sequence.check_model(inner, coef, args)
    if args.merge_lora:
        saving.check_mergeable(policy)
    return policy, coef
