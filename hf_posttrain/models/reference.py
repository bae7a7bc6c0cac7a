"""Which reference a run of DPO or KTO has, made when the trainer is built; how it scores is in `frozen`."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import datasets
import peft
from torch import Tensor, nn

from ..engines import engine, launch, sharded
from ..errors import InputError
from ..scoring import forward
from . import load
from .frozen import REFERENCE_ADAPTER, AdapterCopy, AdapterOff, Frozen, Reference, SecondModel
from .score_cache import cached, model_key, rows_key, score_rows, with_scores
from .section import ModelSection

logger = logging.getLogger(__name__)


def make_reference(trainer: Any, ref_model: nn.Module | str | None) -> Reference:
    """The policy as it is now, or an explicit `ref_model`.

    Under an adapter it costs no second model: a new adapter is switched off; of one that was continued a frozen copy
    is kept on the same base. Otherwise it is a copy of the policy in memory, never a reload by name. With
    precompute_ref_log_probs the trainer's data sets are scored now and no second model is kept; left to itself (None),
    they are scored now if that is cheaper, and the reference stays for rows that come later.
    Raises InputError for a ref_model that is the policy itself.
    """
    policy, accelerator, asked = trainer.model, trainer.accelerator, trainer.args.precompute_ref_log_probs
    precompute = planned_twice(trainer) if asked is None else asked
    by_adapter = isinstance(policy, peft.PeftModel) and ref_model is None
    own = AdapterCopy(policy) if by_adapter and not trainer.new_adapter else AdapterOff()
    if ref_model is not None:
        frozen: Frozen | None = Frozen(_loaded(ref_model, trainer), accelerator)
    elif (precompute and engine.changes_weights(accelerator)) or not (asked or by_adapter):
        # a policy that its engine has yet to cut or cast cannot score for itself
        frozen = Frozen(sharded.copied(policy, accelerator), accelerator)
    else:
        frozen = None
    scorer = own if frozen is None else SecondModel(frozen, own if ref_model is None else None)
    if frozen is not None:
        trainer.set_second_model(frozen)
    if precompute:
        trainer.check_scoring(policy)
        score = partial(_scored, trainer, scorer, frozen, own, ref_model is None)
        for split in ("train", "eval"):
            rows = with_scores(getattr(trainer, f"{split}_dataset"), "precompute_ref_log_probs", score, split)
            setattr(trainer, f"{split}_dataset", rows)
        if frozen is not None and (asked or by_adapter):
            trainer.set_second_model(None)  # with its memory
        elif frozen is not None:
            frozen.release()
    online = own if by_adapter else None if asked else scorer
    return Reference(trainer, online, starts_equal=ref_model is None)


def planned_twice(trainer: Any) -> bool:
    """Are the training rows planned to be seen more than once? Then it is cheaper to score them beforehand."""
    args, rows = trainer.args, trainer.train_dataset
    if not isinstance(rows, datasets.Dataset):
        return False
    step = trainer.get_total_train_batch_size(args)
    passes = args.max_steps * step / len(rows) if args.max_steps > 0 else args.num_train_epochs
    if passes > 1:
        logger.info("reference: the data is scored once beforehand, since %.3g passes over it are planned", passes)
    return passes > 1


def _scored(
    trainer: Any, scorer: Any, frozen: Frozen | None, own: Any, is_policy: bool, rows: datasets.Dataset, name: str
) -> datasets.Dataset:
    """The column `ref_logps` of the rows, K floats a row: from the cache on disk, or scored now, longest first."""
    args = trainer.args
    model = trainer.model if frozen is None else frozen.model
    adapter = getattr(model, "peft_config", {}).get(getattr(own, "name", None))
    key = [  # a new adapter is off: only its base counts
        model_key(model, with_adapter=adapter is not None or not is_policy), rows_key(rows), trainer.method.name,
        args.bf16, args.fp16, adapter and _written(adapter),
    ]  # fmt: skip

    def score(batch: dict, count: int) -> list[list[float]]:
        with trainer.accelerator.autocast():
            return scorer.logps(trainer.model, trainer.reference_batch(batch)).view(count, -1).float().tolist()

    def compute() -> datasets.Dataset:
        size = args.precompute_ref_batch_size or args.per_device_eval_batch_size
        found = score_rows(trainer, rows, size, score, f"Reference log-probs of {name}")
        return datasets.Dataset.from_dict({"ref_logps": found})

    return cached(key, compute, "reference", trainer.accelerator)


def _written(config: peft.PeftConfig) -> str:
    """An adapter's config as text, the same in every process: the order of a set is not."""
    return json.dumps(config.to_dict(), sort_keys=True, default=lambda v: sorted(v) if isinstance(v, set) else str(v))


def _loaded(ref_model: nn.Module | str, trainer: Any) -> nn.Module:
    """An explicit reference, by name too. Raises InputError where it is the policy itself."""
    if isinstance(ref_model, str):
        ref_model = load.load_model(ModelSection(name_or_path=ref_model), trainable=False)
    launch.check_model(ref_model, trainer.args)
    if forward.causal_lm(ref_model) is forward.causal_lm(trainer.model):
        raise InputError("ref_model is the policy itself, which moves: leave it out, a frozen reference is kept anyway")
    return ref_model


@contextmanager
def without_reference_adapter(model: nn.Module, state: dict[str, Tensor] | None) -> Iterator[dict[str, Tensor] | None]:
    """Keep the reference adapter out of what is saved: inside, PEFT knows neither its config nor its tensors.

    state: what would be saved, None for the model's own state_dict; gives what is.
    """
    configs = getattr(model, "peft_config", {})
    config = configs.pop(REFERENCE_ADAPTER, None)
    if config is not None:
        whole = model.state_dict() if state is None else state
        state = {name: tensor for name, tensor in whole.items() if f".{REFERENCE_ADAPTER}." not in name}
    try:
        yield state
    finally:
        if config is not None:
            configs[REFERENCE_ADAPTER] = config
