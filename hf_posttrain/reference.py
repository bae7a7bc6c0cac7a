"""The reference of DPO and KTO: log-probabilities from an adapter switched off, a frozen copy, or a cache."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import datasets
import peft
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from . import models, scoring
from .errors import InputError
from .frozen import branch_logps, cached, freeze, rows_key, weights_key
from .recipe import ModelSection

logger = logging.getLogger(__name__)
REFERENCE_ADAPTER = "reference"


class Reference:
    """The policy as it was when the trainer was built, or an explicit `ref_model`.

    Under an adapter it costs no second model: a new adapter is switched off; one that was continued is kept as a
    frozen copy beside it. Otherwise it is a copy of the policy in memory, never a reload by name. With
    precompute_ref_log_probs the trainer's data sets are scored now, and no reference is kept.
    """

    def __init__(self, trainer: Any, ref_model: nn.Module | str | None):
        self.trainer, self.policy = trainer, trainer.model
        self.model = None if ref_model is None else freeze(_loaded(ref_model, trainer))
        self.adapter: str | None = None
        self.starts_equal, self.checked = ref_model is None, False
        adapted, precompute = isinstance(self.policy, peft.PeftModel), trainer.args.precompute_ref_log_probs
        if self.model is None and adapted and not trainer.new_adapter:
            self.adapter = self.policy.active_adapter
            _copy_adapter(self.policy, self.adapter)
        if self.model is None and not adapted and not precompute:
            self.model = freeze(copy.deepcopy(self.policy))
        self.online = not precompute or (adapted and ref_model is None)
        if self.model is not None:
            trainer.score_beside(self.model)
        if precompute:
            trainer.check_scoring(self.policy)
            trainer.train_dataset = self.precompute(trainer.train_dataset, "train")
            trainer.eval_dataset = self.precompute(trainer.eval_dataset, "eval")
            self.model, trainer.scored = None, trainer.scored[:1]

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
        return self._score(policy, part, len(batch["index"]), branches)

    def _score(self, policy: nn.Module, part: dict[str, Any], examples: int, branches: int) -> Tensor:
        accelerator = self.trainer.accelerator
        if self.model is not None:
            with accelerator.autocast():
                return branch_logps(self.model.to(accelerator.device), part, examples, branches)
        with self._switched(scoring.unwrapped(policy)), accelerator.autocast():
            return branch_logps(policy, part, examples, branches)

    def _switched(self, policy: nn.Module) -> Any:
        """The policy as its own reference: adapter off, the frozen copy on, or (precomputing, no adapter) as it is."""
        if not isinstance(policy, peft.PeftModel):
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
        model = self.model if self.model is not None else self.policy
        own = getattr(model, "peft_config", {}).get(self.adapter)  # a new adapter is off: only its base counts
        key = [
            weights_key(model, with_adapter=own is not None or self.model is not None), rows_key(rows),
            self.trainer.method, self.trainer.args.bf16, self.trainer.args.fp16, own and own.to_dict(),
        ]  # fmt: skip
        found = cached(key, lambda: self._score_rows(rows, name), "reference")
        return rows.add_column("ref_logps", found["ref_logps"][:])

    def _score_rows(self, rows: datasets.Dataset, name: str) -> datasets.Dataset:
        """Each row is scored by one rank and the ranks' tables added up, so that odd sizes need no padding."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        size = trainer.args.precompute_ref_batch_size or trainer.args.per_device_eval_batch_size
        lengths = [sum(len(v) for v in row.values() if isinstance(v, list)) for row in rows]
        order = sorted(range(len(rows)), key=lambda i: -lengths[i])
        starts = range(accelerator.process_index * size, len(order), size * accelerator.num_processes)
        branches = 2 if "chosen_ids" in rows.column_names or "mismatch_ids" in rows.column_names else 1
        table = torch.zeros(len(rows), branches, device=accelerator.device, dtype=torch.float32)
        for start in tqdm(starts, desc=f"Reference log-probs of {name}", disable=not accelerator.is_local_main_process):
            chosen = order[start : start + size]
            batch = trainer._prepare_inputs(trainer.data_collator([rows[i] for i in chosen]))
            table[chosen] = self._score(self.policy, batch.get("pair", batch), len(chosen), branches).float()
        table = accelerator.reduce(table, "sum").cpu()
        return datasets.Dataset.from_dict({"ref_logps": table.tolist()})

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


def _loaded(ref_model: nn.Module | str, trainer: Any) -> nn.Module:
    """An explicit reference, by name too. Raises InputError where it is the policy itself."""
    if isinstance(ref_model, str):
        return models.load_model(ModelSection(name_or_path=ref_model), trainable=False)
    if scoring.causal_lm(ref_model) is scoring.causal_lm(trainer.model):
        raise InputError("ref_model is the policy itself, which moves: leave it out, a frozen reference is kept anyway")
    return ref_model


@contextmanager
def without_reference_adapter(model: nn.Module) -> Iterator[None]:
    """Keep the reference adapter out of what is saved."""
    configs = getattr(model, "peft_config", {})
    config = configs.pop(REFERENCE_ADAPTER, None)
    try:
        yield
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
