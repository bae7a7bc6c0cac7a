"""The reference of DPO and KTO: log-probabilities from an adapter switched off, a frozen copy, or a cache."""

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import datasets
import peft
from torch import Tensor, nn

from ..engines import engine, launch
from ..errors import InputError
from ..recipe.read import ModelSection
from ..scoring import forward as scoring
from . import load as models
from .score_cache import Frozen, branch_logps, cached, model_key, rows_key, score_rows

logger = logging.getLogger(__name__)
REFERENCE_ADAPTER = "reference"


class Reference:
    """The policy as it was when the trainer was built, or an explicit `ref_model`.

    Under an adapter it costs no second model: a new adapter is switched off; one that was continued is kept as a
    frozen copy beside it. Otherwise it is a copy of the policy in memory, never a reload by name. With
    precompute_ref_log_probs the trainer's data sets are scored now, and no reference is kept; left to itself (None), it
    scores them now if that is cheaper, and keeps the reference for rows that come later.
    """

    def __init__(self, trainer: Any, ref_model: nn.Module | str | None):
        self.trainer, self.policy = trainer, trainer.model
        self.frozen = None if ref_model is None else Frozen(_loaded(ref_model, trainer), trainer.accelerator)
        self.adapter: str | None = None
        self.starts_equal, self.checked = ref_model is None, False
        adapted, asked = isinstance(self.policy, peft.PeftModel), trainer.args.precompute_ref_log_probs
        precompute = is_cheaper(trainer) if asked is None else asked
        if self.frozen is None and adapted and not trainer.new_adapter:
            self.adapter = self.policy.active_adapter
            _copy_adapter(self.policy, self.adapter)
        by_adapter = adapted and ref_model is None
        keeps = not (asked or by_adapter)  # a model of its own, also for rows that come later
        self.online = keeps or by_adapter
        unready = precompute and engine.changes_weights(trainer.accelerator)
        if self.frozen is None and (unready or keeps):
            self.frozen = Frozen(engine.copied(self.policy, trainer.accelerator), trainer.accelerator)
        if self.frozen is not None:
            trainer.score_beside(self.frozen)
        if precompute:
            self._score_data_sets(keeps)

    def _score_data_sets(self, keeps: bool) -> None:
        """The trainer's own, now; keeps: the second model waits for others, on CPU where it is not cut."""
        self.trainer.check_scoring(self.policy)
        self.trainer.train_dataset = self.precompute(self.trainer.train_dataset, "train")
        self.trainer.eval_dataset = self.precompute(self.trainer.eval_dataset, "eval")
        if not keeps:
            self.frozen = None
            self.trainer.score_beside(None)
        elif self.frozen is not None:
            self.frozen.release()

    def logps(self, policy: nn.Module, batch: dict[str, Any], part: dict[str, Any], branches: int) -> Tensor:
        """Summed log-probabilities of each branch of `part` under the reference, [B, K], or those cached in `batch`.

        policy: the model that is trained, wrapped by its engine or not.
        """
        if "ref_logps" in batch:
            return batch["ref_logps"]
        if not self.online:
            raise InputError(
                "this data set was not scored by the reference: with precompute_ref_log_probs, pass every data set "
                "when the trainer is built, or turn it off to keep a reference model"
            )
        return self.score(policy, part, len(batch["index"]), branches)

    def score(self, policy: nn.Module, part: dict[str, Any], examples: int, branches: int) -> Tensor:
        """As `logps`, computed now: [B, K]."""
        with self.trainer.accelerator.autocast():
            if self.frozen is None:
                with self._switched(scoring.unwrapped(policy)):
                    return branch_logps(policy, part, examples, branches)
            with self.frozen as model, self._switched(scoring.unwrapped(model)):
                return branch_logps(model, part, examples, branches)

    def _switched(self, policy: nn.Module) -> Any:
        """The policy or a copy as its own reference: a new adapter off, the copy of a continued one on."""
        if not isinstance(policy, peft.PeftModel) or not self.starts_equal:
            return nullcontext()
        return policy.disable_adapter() if self.adapter is None else _reference_adapter(policy, self.adapter)

    def precompute(self, rows: Any, name: str) -> Any:
        """The rows with a column `ref_logps` (K floats a row): from the cache on disk, or scored now, longest first."""
        if rows is None:
            return None
        if isinstance(rows, dict):
            return {key: self.precompute(part, f"{name} {key}") for key, part in rows.items()}
        if not isinstance(rows, datasets.Dataset):
            raise InputError("precompute_ref_log_probs needs a data set of known length, not a stream")
        args, accelerator = self.trainer.args, self.trainer.accelerator
        model = self.frozen.model if self.frozen is not None else self.policy
        own = getattr(model, "peft_config", {}).get(self.adapter)  # a new adapter is off: only its base counts
        key = [
            model_key(model, with_adapter=own is not None or not self.starts_equal), rows_key(rows),
            self.trainer.method, args.bf16, args.fp16, own and _written(own),
        ]  # fmt: skip
        found = cached(key, lambda: self._score_rows(rows, name), "reference", accelerator)
        return rows.add_column("ref_logps", found["ref_logps"][:])

    def _score_rows(self, rows: datasets.Dataset, name: str) -> datasets.Dataset:
        """The summed log-probabilities of each row's branches."""
        args = self.trainer.args
        size = args.precompute_ref_batch_size or args.per_device_eval_batch_size
        branches = 2 if "chosen_ids" in rows.column_names or "mismatch_ids" in rows.column_names else 1

        def score(batch: dict, count: int) -> list[list[float]]:
            return self.score(self.policy, batch.get("pair", batch), count, branches).float().tolist()

        found = score_rows(self.trainer, rows, size, score, f"Reference log-probs of {name}")
        return datasets.Dataset.from_dict({"ref_logps": found})

    def check_start(self, logps: Tensor, ref: Tensor, lengths: Tensor) -> None:
        """Warn, once, where policy and reference, one model, differ before the first step. All three [B, K]."""
        if self.checked or not self.starts_equal or self.trainer.state.global_step or not logps.requires_grad:
            return
        self.checked = True
        gap = ((logps.detach() - ref).abs() / lengths.clamp(min=1)).max().item()
        tolerance = 1e-4 if self.trainer.exact else 5e-2
        if gap > tolerance:
            logger.warning(
                "before the first step the policy differs from its reference by %.2g in log-probability per token: is "
                "dropout on, or does the adapter's initialisation change the base?", gap,
            )  # fmt: skip


def is_cheaper(trainer: Any) -> bool:
    """Are the training rows planned to be seen more than once?"""
    args, rows = trainer.args, trainer.train_dataset
    if not isinstance(rows, datasets.Dataset):
        return False
    step = trainer.get_total_train_batch_size(args)
    passes = args.max_steps * step / len(rows) if args.max_steps > 0 else args.num_train_epochs
    if passes > 1:
        logger.info("reference: the data is scored once beforehand, since %.3g passes over it are planned", passes)
    return passes > 1


def _written(config: peft.PeftConfig) -> str:
    """An adapter's config as text, the same in every process: the order of a set is not."""
    return json.dumps(config.to_dict(), sort_keys=True, default=lambda v: sorted(v) if isinstance(v, set) else str(v))


def _loaded(ref_model: nn.Module | str, trainer: Any) -> nn.Module:
    """An explicit reference, by name too. Raises InputError where it is the policy itself."""
    if isinstance(ref_model, str):
        ref_model = models.load_model(ModelSection(name_or_path=ref_model), trainable=False)
    launch.check_model(ref_model, trainer.args)
    if scoring.causal_lm(ref_model) is scoring.causal_lm(trainer.model):
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


def _copy_adapter(policy: peft.PeftModel, name: str) -> None:
    """A frozen copy of adapter `name` beside it; the base stays one."""
    config = copy.deepcopy(policy.peft_config[name])
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # PiSSA and its kin would change the base once more; the weights come next
    policy.add_adapter(REFERENCE_ADAPTER, config)
    state = peft.get_peft_model_state_dict(policy, adapter_name=name)
    peft.set_peft_model_state_dict(policy, {key: value.clone() for key, value in state.items()}, REFERENCE_ADAPTER)
    with _reference_adapter(policy, name):
        pass  # leaves the copy without gradients and `name` active


@contextmanager
def _reference_adapter(policy: peft.PeftModel, name: str) -> Iterator[None]:
    """The reference adapter active inside; what was trainable is trainable again outside."""
    trainable = {key for key, p in policy.named_parameters() if p.requires_grad and f".{REFERENCE_ADAPTER}." not in key}
    policy.set_adapter(REFERENCE_ADAPTER)
    try:
        yield
    finally:
        policy.set_adapter(name)
        for key, parameter in policy.named_parameters():
            parameter.requires_grad_(key in trainable)
