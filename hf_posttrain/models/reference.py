"""Choice of the reference model of DPO and KTO when a trainer is built. How it scores is in `frozen`.

If the policy continues an adapter, the reference is a frozen copy of that adapter on the same base
(`FrozenAdapterReference`).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import datasets
import peft
from torch import Tensor, nn

from ..batching.micro_batch import MicroBatch
from ..capabilities import Feature, conflict_message
from ..data.lengths import planned_epochs
from ..engines import engine, launch, sharded
from ..errors import InputError
from . import adapters, load, score_cache
from .config import ModelSection
from .frozen import FrozenModel, Reference, TokenWeights, precast_linear_weights, shares_trained_weights
from .moving_average import WeightPairs, adapter_pairs, build_average, model_pairs

if TYPE_CHECKING:
    from ..trainer.base import PostTrainer

logger = logging.getLogger(__name__)
REFERENCE_ADAPTER = "frozen_reference"
"""Name of the frozen copy among the policy's adapters."""


def make_reference(
    trainer: "PostTrainer",
    ref_model: nn.Module | str | None,
    split_batch: Callable[..., list[MicroBatch]] | None = None,
    token_weights: TokenWeights | None = None,
) -> Reference:
    """Return the reference of a trainer: the policy as it is now, or `ref_model`.

    With `precompute_ref_log_probs` the data sets of the trainer are scored now and no second model is kept. If the
    option is None, they are scored now if that is cheaper, and the reference stays for rows that come later.

    Args:
        trainer: The trainer.
        ref_model: The reference, its hub name or its folder, or None for the policy as it is now.
        split_batch: Returns the batches that are scored instead of a batch, if they differ.
        token_weights: Weights of the tokens in the sums of log-probabilities, by default 1.

    Raises:
        InputError: If `ref_model` is the policy itself.
    """
    if trainer.reference_per_round:  # the policy scores the rows of a round when the round begins
        return Reference(trainer, None, None, split_batch, starts_equal=False, token_weights=token_weights)
    policy = trainer.model
    accelerator = trainer.accelerator
    option = trainer.args.precompute_ref_log_probs
    is_average = trainer.args.sync_ref_model
    if is_average and engine.changes_weights(accelerator):
        raise InputError(conflict_message(Feature.SYNC_REFERENCE, Feature.SHARDED))
    precompute = not is_average and plans_repeated_passes(trainer) if option is None else option

    # with an adapter the base is loaded already: a new adapter is disabled, a continued one is copied
    as_reference: Callable[[Any], AbstractContextManager[Any]] = nullcontext
    if isinstance(policy, peft.PeftModel) and ref_model is None:
        as_reference = adapter_reference(policy, trainer.new_adapter and not is_average) or nullcontext
    by_adapter = as_reference is not nullcontext

    # otherwise the reference is a copy of the policy in memory, which is never loaded by name again
    frozen_model: FrozenModel | None = None
    if ref_model is not None:
        if isinstance(ref_model, str):
            ref_model = load.load_model(ModelSection(name_or_path=ref_model), trainable=False)
        launch.check_model(ref_model, trainer.args)
        if shares_trained_weights(ref_model, policy):
            raise InputError(
                "ref_model is the policy itself, or shares weights with it. Remove it, since the trainer keeps "
                "a frozen reference anyway"
            )
        frozen_model = FrozenModel(ref_model, accelerator)
    elif (precompute and engine.changes_weights(accelerator)) or not (option or by_adapter):
        # a policy that its engine has yet to shard or cast cannot score for itself
        copied = sharded.copy_model(policy, accelerator)
        copied = copied if is_average else precast_linear_weights(copied, accelerator)
        frozen_model = FrozenModel(copied, accelerator)
    if frozen_model is not None:
        trainer.set_second_models([frozen_model])

    if is_average:
        _update_with_policy(trainer, frozen_model, as_reference)
    starts_equal = ref_model is None
    reference = Reference(trainer, as_reference, frozen_model, split_batch, starts_equal, token_weights=token_weights)
    if precompute:
        _precompute(trainer, reference)
        if frozen_model is not None and not (option or by_adapter):
            frozen_model.release()
        elif frozen_model is not None:
            trainer.set_second_models([])
            reference.frozen_model = None
        if option and not by_adapter:
            reference.as_reference = None
    return reference


def _update_with_policy(trainer: "PostTrainer", frozen_model: FrozenModel | None, as_reference: object) -> None:
    """Add the callback that moves the weights of the reference toward the policy (Gorbatovski et al., 2404.09656).

    Raises:
        InputError: If the reference does not have all weights of the policy, or their dtype is too coarse.
    """
    policy = trainer.model
    pairs: WeightPairs
    if frozen_model is not None:
        pairs = partial(model_pairs, frozen_model.model, policy)
        count = sum(weight.requires_grad for weight in policy.parameters())
        if len(pairs()) < count or any(average.shape != weight.shape for average, weight in pairs().values()):
            raise InputError(
                "sync_ref_model requires a reference with the weights of the policy. Remove ref_model or sync_ref_model"
            )
    else:
        assert isinstance(as_reference, FrozenAdapterReference)
        pairs = partial(adapter_pairs, policy, REFERENCE_ADAPTER, as_reference.trained_adapter)
    args = trainer.args
    average = build_average("sync_ref_model", pairs, 1 - args.ref_model_mixup_alpha, args.ref_model_sync_steps)
    trainer.stateful["reference_average"] = average
    trainer.add_callback(average)


def adapter_reference(
    policy: peft.PeftModel, new_adapter: bool
) -> Callable[[peft.PeftModel], AbstractContextManager[Any]] | None:
    """Return a context in which the policy is as it was at the start, on the base that it shares with the reference.

    Args:
        policy: The policy with its adapter.
        new_adapter: Whether the adapter does not change the base at the start.

    Returns:
        The context, which takes the policy, or None if weights of the base are trained, too.
    """
    trained_base_weights = [
        name
        for name, weight in policy.named_parameters()
        if weight.requires_grad and not adapters.is_adapter_weight(policy, name)
    ]
    if not trained_base_weights:
        return peft.PeftModel.disable_adapter if new_adapter else FrozenAdapterReference(policy)
    logger.info("reference: a copy of the full policy, since %s of the base is trained too", trained_base_weights[0])
    return None


def plans_repeated_passes(trainer: "PostTrainer") -> bool:
    """Return whether training reads the rows more than once, so that it is cheaper to score them in advance."""
    args = trainer.args
    eval_dataset = trainer.eval_dataset
    eval_datasets = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    if any(isinstance(rows, datasets.IterableDataset) for rows in eval_datasets):
        return False  # scores of a stream cannot be kept, and a stream to train on has no planned passes
    epochs = planned_epochs(trainer.train_dataset, args, trainer.get_total_train_batch_size(args))
    if epochs > 1:
        logger.info("reference: the data is scored once in advance, since %.3g epochs are planned", epochs)
    return epochs > 1


def _precompute(trainer: "PostTrainer", reference: Reference) -> None:
    """Add the column `ref_logps` to the rows of the trainer, K floats a row, from the cache on disk or scored now."""
    args = trainer.args
    batch_size = trainer.args.precompute_ref_batch_size or trainer.args.per_device_eval_batch_size
    trainer.check_scoring(trainer.model)
    model: Any = trainer.model if reference.frozen_model is None else reference.frozen_model.model
    # a new adapter is disabled, so that the key depends on the base alone
    with_adapter = reference.as_reference is not peft.PeftModel.disable_adapter
    key = [score_cache.model_key(model, with_adapter), trainer.method.name, args.bf16, args.fp16]
    key += [] if reference.token_weights is None else [repr(reference.token_weights)]

    def score(batch: MicroBatch) -> list[dict[str, Any]]:
        return [{"ref_logps": logps} for logps in reference.logps(trainer.model, batch).float().tolist()]

    score_cache.add_scores(trainer, Feature.REFERENCE_CACHE, "reference", key, batch_size, score)


class FrozenAdapterReference:
    """A frozen copy of the policy's adapter. A call returns a context in which the copy is the active adapter."""

    def __init__(self, policy: peft.PeftModel) -> None:
        self.trained_adapter = policy.active_adapter
        if REFERENCE_ADAPTER in policy.peft_config:  # of an earlier trainer of this policy, as in rounds of DPO
            policy.delete_adapter(REFERENCE_ADAPTER)
        config = adapters.config_with_default_init(policy.peft_config[self.trained_adapter])
        if hasattr(config, "bias"):
            config.bias = "none"  # the copy has no biases of the base, which PEFT allows for one adapter only
        policy.add_adapter(REFERENCE_ADAPTER, config)
        self.config = policy.peft_config[REFERENCE_ADAPTER]
        state = peft.get_peft_model_state_dict(policy, adapter_name=self.trained_adapter)
        peft.set_peft_model_state_dict(policy, {key: value.clone() for key, value in state.items()}, REFERENCE_ADAPTER)
        with self(policy):
            pass  # leaves the copy without gradients and the policy's own adapter active

    @contextmanager
    def __call__(self, policy: peft.PeftModel) -> Iterator[None]:
        """Activate the copy inside the context, and restore the trained adapter and trainable weights afterwards.

        Raises:
            InputError: If a later trainer of this policy has made another copy, or another adapter is active.
        """
        if policy.peft_config.get(REFERENCE_ADAPTER) is not self.config:
            raise InputError("a later trainer of this model has replaced the reference. Build this trainer again")
        if policy.active_adapter != self.trained_adapter:
            raise InputError(
                f"adapter {policy.active_adapter!r} is active, but the trainer was built for {self.trained_adapter!r}. "
                "Activate that one"
            )
        # PEFT makes an adapter trainable when it activates it, so that the trainable weights have to be restored
        trainable = {
            name
            for name, weight in policy.named_parameters()
            if weight.requires_grad and f".{REFERENCE_ADAPTER}." not in name
        }
        policy.set_adapter(REFERENCE_ADAPTER)
        try:
            yield
        finally:
            policy.set_adapter(self.trained_adapter)
            for name, weight in policy.named_parameters():
                weight.requires_grad_(name in trainable)


@contextmanager
def without_reference_adapter(model: nn.Module, state: dict[str, Tensor] | None) -> Iterator[dict[str, Tensor] | None]:
    """Exclude the frozen copy from a saved model. Inside the context, PEFT has neither its config nor its tensors.

    Args:
        model: The policy.
        state: The state dict to save, or None for that of the model.

    Yields:
        The state dict without the copy, or `state` if there is no copy.
    """
    configs = getattr(model, "peft_config", {})
    config = configs.pop(REFERENCE_ADAPTER, None)
    if config is None:
        yield state
        return
    tensors = model.state_dict() if state is None else state
    try:
        yield {name: tensor for name, tensor in tensors.items() if f".{REFERENCE_ADAPTER}." not in name}
    finally:
        configs[REFERENCE_ADAPTER] = config
