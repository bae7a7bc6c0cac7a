"""Sequence parallelism: the ranks of a group hold a part of each row, so that longer rows fit (DeepSpeed Ulysses).

Inside attention a rank has whole rows and some of the heads. Everything else looks at one position at a time, so a rank
scores the tokens of its own part, and sums over ranks are taken as with data parallelism. In eval mode nothing is cut.

Legend: R rows, L row length, P parts of a row.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate import ParallelismConfig
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, TrainingArguments

from ..batching.micro_batch import MicroBatch
from ..capabilities import Feature, check_features, conflict_message, option_features
from ..errors import InputError
from ..scoring import forward
from ..scoring.layouts import IGNORE, Branch, Example, collate
from ..scoring.parity_check import HALF_PRECISION_TOLERANCE, token_logps, tolerance, is_within_tolerance
from ..scoring.rotary import rope_switch_length
from .duplicate_mask import mask_duplicate_rows


def resolve_parallelism(args: Any) -> ParallelismConfig | None:
    """The parallelism of `args`, a PostTrainConfig: its own, or that of `accelerate launch`; None where there is none.

    Raises InputError for what cannot be honoured.
    """
    config = args.parallelism_config
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        config = ParallelismConfig()
    config = ParallelismConfig(**config) if isinstance(config, dict) else config
    if config is None or config.sp_size == config.cp_size == 1:
        return config
    if config.cp_size > 1:
        raise InputError("parallelism_config: cp_size does not work here, use sp_size to cut long rows")
    parts = config.sp_size
    stage = args.deepspeed_plugin.zero_stage if args.deepspeed_plugin else 0
    _raise_first(
        f"sequence parallelism (parallelism_config.sp_size={parts})",
        [
            (not args.method.sequence_parallel, f"is not there for method {args.method.name}"),
            (stage not in (2, 3), "needs DeepSpeed with ZeRO stage 2 or 3"),
            (args.world_size % parts, f"needs a number of processes that it divides, not {args.world_size}"),
            (args.layout not in ("auto", "padded"), f"needs one document a row: layout: padded, not {args.layout}"),
            (not args.average_tokens_across_devices, "counts over all ranks: set average_tokens_across_devices: true"),
        ],
    )
    check_features(option_features(args) | {Feature.SEQUENCE_PARALLEL: "parallelism_config"})
    # processes that no size speaks of are data parallel
    return config if config.data_parallel_size > 1 else replace(config, dp_shard_size=args.world_size // parts)


def _raise_first(what: str, mistakes: list[tuple[Any, str]]) -> None:
    """Raises InputError for the first mistake that was made."""
    for made, why in mistakes:
        if made:
            raise InputError(f"{what} {why}")


def check_model(model: PreTrainedModel, router_coef: float, args: TrainingArguments) -> None:
    """Raises InputError where the rows of this causal LM cannot be cut. Says which attention Ulysses takes over."""
    parallel = args.parallelism_config
    if parallel is None or parallel.sp_size == 1:
        return
    parts = parallel.sp_size
    config = model.config.get_text_config()
    attention = config._attn_implementation or "eager"
    heads = config.num_attention_heads
    pairs = getattr(config, "num_key_value_heads", 0)
    # a layer that sees less than all tokens before it: flash attention alone knows windows
    windows = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    kinds = set(getattr(config, "layer_types", None) or windows) - {"full_attention"}
    kinds -= {"sliding_attention"} if "flash" in attention else set()
    _raise_first(
        f"{type(model).__name__}: sequence parallelism (sp_size={parts})",
        [
            ("flash" not in attention and attention != "sdpa", f"needs sdpa or flash_attention_2, not {attention}"),
            (kinds, f"cannot cut layers that are {', '.join(sorted(kinds))} with {attention}"),
            (not pairs, "does not know its attention: the config has no num_key_value_heads"),
            (heads % parts or (pairs % parts and parts % pairs), f"cannot share out {heads} heads and {pairs} of keys"),
            (rope_switch_length(model), "would give each part of a row its own rotary frequencies (LongRoPE or dynamic NTK)"),
            (router_coef, "would cut the rows that the router's loss is taken of: set router_aux_loss_coef: 0"),
        ],
    )
    if model.base_model is not model and forward.is_vision_language_model(model):
        raise InputError(f"{conflict_message(Feature.SEQUENCE_PARALLEL, Feature.IMAGES)}. Load it as a text model")
    parallel.sp_handler.sp_attn_implementation = attention


def shard_loader(trainer: Any, adapter: Any) -> Any:
    """The training loader that Trainer prepared, with its batches cut.

    adapter: DeepSpeed's, which cuts tensors [rows, tokens] alone; without sequence parallelism the loader itself.
    Raises InputError where the model scores otherwise in parts than it does in one.
    """
    if not hasattr(adapter, "sp_group"):
        return adapter
    _check_parity(trainer, adapter)
    # DeepSpeed multiplies by it where it sums gradients by all-reduce, as if each rank had the loss of its whole group
    trainer.model_wrapped.optimizer.sequence_parallel_size = 1
    return DataLoader(SequenceShards(trainer, adapter), batch_size=None, generator=torch.Generator())


def _check_parity(trainer: Any, adapter: Any) -> None:
    """Score the same rows whole and cut, as `parity_check.parity_error` does for layouts."""
    model = trainer.model_wrapped
    parts = adapter.sp_world_size
    inner = forward.causal_lm(model)
    if getattr(inner.config.get_text_config(), "attention_dropout", 0):
        return  # it would be random

    example = Example([5, 9, 6], [Branch([7, 8, 5, 9, 6, 7, 9])])
    rows = collate([example] * trainer.args.train_batch_size, "padded")
    pieces = [batch.to(trainer.args.device) for batch in (rows, shard_batch(rows, adapter.sp_rank, parts))]

    def gap(in_float32: bool) -> float:
        # in eval mode nothing is cut: rows whole, and then with attention alone in training mode, which Ulysses cuts
        with torch.no_grad(), forward.eval_mode(model):
            whole = token_logps(model, pieces[0], in_float32).sum()
            for module in inner.modules():
                if hasattr(module, "is_causal"):  # an attention
                    module.training = True
            part = token_logps(model, pieces[1], in_float32).sum()
        found: Tensor = trainer.accelerator.reduce(part) * parts / trainer.accelerator.num_processes
        return ((found - whole).abs() / len(rows.scored)).item()

    if not is_within_tolerance(gap, (tolerance(inner), HALF_PRECISION_TOLERANCE), "sequence parallelism"):
        name = type(inner).__name__
        raise InputError(f"sequence parallelism gives {name} other numbers than its own forward: it cannot be used")


class SequenceShards(IterableDataset):
    """This rank's parts of the batches that the ranks of its group drew, one batch after the other."""

    def __init__(self, trainer: Any, adapter: Any):
        self.trainer = trainer
        self.adapter = adapter

    def __len__(self) -> int:
        return len(self.adapter.dl) * self.adapter.sp_world_size

    def __iter__(self) -> Iterator[MicroBatch]:
        loader = self.adapter.dl
        parts = self.adapter.sp_world_size
        loader.set_epoch(int(self.trainer.state.epoch or 0))  # Trainer tells it to DataLoaders of accelerate alone
        for batch in loader:
            # each rank of the group draws a batch of its own; all of them train on a part of each
            own = mask_duplicate_rows(batch, self.trainer.accelerator).to("cpu")
            drawn: list[Any] = [None] * parts
            torch.distributed.all_gather_object(drawn, own, group=self.adapter.sp_group)
            for whole in drawn:
                yield shard_batch(whole, self.adapter.sp_rank, parts)


def shard_batch(batch: MicroBatch, part: int, parts: int) -> MicroBatch:
    """Part number `part` of each row of a padded batch: [R, L] -> [R, L / P], L rounded up.

    scored and owner are those of the part; what belongs to rows stays whole.
    """
    rows, length = batch.input_ids.shape
    size = -(-length // parts)
    start = part * size

    def columns(values: Tensor, fill: int) -> Tensor:
        """Columns start to start + size of rows [R, L], filled up where P does not divide L."""
        return pad(values, (0, size * parts - length), value=fill)[:, start : start + size].contiguous()

    # positions in the flattened rows: those of this part, in its own count
    row = batch.scored // length
    column = batch.scored % length - start
    in_part = (column >= 0) & (column < size)
    return batch.replace(
        input_ids=columns(batch.input_ids, 0),
        shift_labels=columns(batch.shift_labels, IGNORE),
        router_weights=columns(batch.router_weights, 0),
        position_ids=torch.arange(start, start + size).repeat(rows, 1),
        attention_mask=None,  # attention is causal, and padding comes after the tokens
        scored=(row * size + column)[in_part],
        owner=batch.owner[in_part],
    )
