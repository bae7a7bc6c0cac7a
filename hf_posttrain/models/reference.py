"""Which reference a run of DPO or KTO has, made when the trainer is built; how it scores is in `frozen`.

Of a policy that continues an adapter it is a frozen copy of the adapter, next to it on the one base
(`FrozenAdapterReference`).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import datasets
import peft
from torch import Tensor, nn

from ..batching.micro_batch import MicroBatch
from ..capabilities import Feature
from ..data.lengths import planned_epochs
from ..engines import engine, launch, sharded
from ..errors import InputError
from . import adapters, load, score_cache
from .config import ModelSection
from .frozen import FrozenModel, Reference, precast_linear_weights, shares_trained_weights

logger = logging.getLogger(__name__)
REFERENCE_ADAPTER = "frozen_reference"  # name of the copy among the policy's adapters


def make_reference(trainer: Any, ref_model: nn.Module | str | None, lay_out: Callable | None = None) -> Reference:
    """The policy as it is now, or an explicit `ref_model`. Raises InputError for a ref_model that is the policy itself.

    With precompute_ref_log_probs the trainer's data sets are scored now and no second model is kept; left to itself
    (None), they are scored now if that is cheaper, and the reference stays for rows that come later.
    """
    if trainer.reference_moves:  # the policy scores the rows of a round as it begins
        return Reference(trainer, None, None, lay_out, starts_equal=False)
    policy = trainer.model
    accelerator = trainer.accelerator
    asked = trainer.args.precompute_ref_log_probs
    precompute = plans_repeated_passes(trainer) if asked is None else asked
    # under an adapter the base is there already: a new adapter is switched off, of a continued one a copy is kept
    adapted = isinstance(policy, peft.PeftModel)
    inside: Callable = nullcontext
    if adapted and ref_model is None:
        inside = adapter_reference(policy, trainer.new_adapter) or nullcontext
    by_adapter = inside is not nullcontext
    # otherwise it is a copy of the policy in memory, never a reload by name
    second: FrozenModel | None = None
    if ref_model is not None:
        if isinstance(ref_model, str):
            ref_model = load.load_model(ModelSection(name_or_path=ref_model), trainable=False)
        launch.check_model(ref_model, trainer.args)
        if shares_trained_weights(ref_model, policy):
            problem = "ref_model is the policy itself, or shares weights with it, which move"
            raise InputError(f"{problem}: leave it out, a frozen reference is kept anyway")
        second = FrozenModel(ref_model, accelerator)
    elif (precompute and engine.changes_weights(accelerator)) or not (asked or by_adapter):
        # a policy that its engine has yet to cut or cast cannot score for itself
        second = FrozenModel(precast_linear_weights(sharded.copy_model(policy, accelerator), accelerator), accelerator)
    if second is not None:
        trainer.set_second_models([second])
    reference = Reference(trainer, inside, second, lay_out, starts_equal=ref_model is None)
    if precompute:
        _precompute(trainer, reference)
        if second is not None and not (asked or by_adapter):
            second.release()
        elif second is not None:
            trainer.set_second_models([])
            reference.second = None
        if asked and not by_adapter:
            reference.inside = None
    return reference


def adapter_reference(policy: peft.PeftModel, new: bool) -> Callable | None:
    """The context in which the policy is as it began, on the base that it trains on; None where there is none.

    new: does its adapter begin as no change?
    """
    base = [name for name, p in policy.named_parameters() if p.requires_grad and not adapters.is_adapter_weight(policy, name)]
    if not base:
        return peft.PeftModel.disable_adapter if new else FrozenAdapterReference(policy)
    logger.info("reference: a copy of the whole policy, since %s of the base is trained too", base[0])
    return None


def plans_repeated_passes(trainer: Any) -> bool:
    """Are the training rows planned to be seen more than once? Then it is cheaper to score them beforehand."""
    args = trainer.args
    evaluated = trainer.eval_dataset
    sets = evaluated.values() if isinstance(evaluated, dict) else [evaluated]
    if any(isinstance(rows, datasets.IterableDataset) for rows in sets):
        return False  # no scores can be kept for a stream; one to train on has no planned passes
    passes = planned_epochs(trainer.train_dataset, args, trainer.get_total_train_batch_size(args))
    if passes > 1:
        logger.info("reference: the data is scored once beforehand, since %.3g passes over it are planned", passes)
    return passes > 1


def _precompute(trainer: Any, reference: Reference) -> None:
    """Give the trainer's rows `ref_logps`, K floats a row, from the cache on disk or scored now."""
    args = trainer.args
    size = trainer.args.precompute_ref_batch_size or trainer.args.per_device_eval_batch_size
    trainer.check_scoring(trainer.model)
    model: Any = trainer.model if reference.second is None else reference.second.model
    # a new adapter is off: only its base counts
    whole = score_cache.model_key(model, with_adapter=reference.inside is not peft.PeftModel.disable_adapter)
    key = [whole, trainer.method.name, args.bf16, args.fp16]

    def score(batch: MicroBatch) -> list[dict[str, Any]]:
        return [{"ref_logps": logps} for logps in reference.logps(trainer.model, batch).float().tolist()]

    score_cache.add_scores(trainer, Feature.REFERENCE_CACHE, "reference", key, size, score)


class FrozenAdapterReference:
    """Puts the copy into the policy; called, it is a context in which the copy is active."""

    def __init__(self, policy: peft.PeftModel):
        self.trained = policy.active_adapter
        if REFERENCE_ADAPTER in policy.peft_config:  # of an earlier trainer of this policy, as in rounds of DPO
            policy.delete_adapter(REFERENCE_ADAPTER)
        config = adapters.config_with_default_init(policy.peft_config[self.trained])
        if hasattr(config, "bias"):
            config.bias = "none"  # here the base has no biases, and PEFT refuses a second adapter that asks for them
        policy.add_adapter(REFERENCE_ADAPTER, config)
        self.config = policy.peft_config[REFERENCE_ADAPTER]
        state = peft.get_peft_model_state_dict(policy, adapter_name=self.trained)
        peft.set_peft_model_state_dict(policy, {key: value.clone() for key, value in state.items()}, REFERENCE_ADAPTER)
        with self(policy):
            pass  # leaves the copy without gradients and the policy's own adapter active

    @contextmanager
    def __call__(self, policy: peft.PeftModel) -> Iterator[None]:
        """The copy in the trained adapter's place inside; what was trainable is trainable again outside. Raises
        InputError where a later trainer of this policy has made another copy.
        """
        if policy.peft_config.get(REFERENCE_ADAPTER) is not self.config:
            raise InputError("a later trainer of this model has replaced the reference: build this trainer once more")
        if policy.active_adapter != self.trained:
            active = policy.active_adapter
            raise InputError(f"adapter {active!r} is active, and the trainer was built for {self.trained!r}")
        # PEFT makes an adapter trainable when it activates it, so remember what was
        trainable = {key for key, p in policy.named_parameters() if p.requires_grad and f".{REFERENCE_ADAPTER}." not in key}
        policy.set_adapter(REFERENCE_ADAPTER)
        try:
            yield
        finally:
            policy.set_adapter(self.trained)
            for key, parameter in policy.named_parameters():
                parameter.requires_grad_(key in trainable)


@contextmanager
def without_reference_adapter(model: nn.Module, state: dict[str, Tensor] | None) -> Iterator[dict[str, Tensor] | None]:
    """Keep the copy out of what is saved: inside, PEFT knows neither its config nor its tensors.

    state: what would be saved, None for the model's own state_dict; gives what is.
    """
    configs = getattr(model, "peft_config", {})
    config = configs.pop(REFERENCE_ADAPTER, None)
    if config is None:
        yield state
        return
    whole = model.state_dict() if state is None else state
    try:
        yield {name: tensor for name, tensor in whole.items() if f".{REFERENCE_ADAPTER}." not in name}
    finally:
        configs[REFERENCE_ADAPTER] = config
