"""Sequence parallelism (DeepSpeed Ulysses): the ranks of a group hold one shard of each row, so that longer rows fit.

Inside attention, a rank has complete rows and some of the heads. All other layers process each position separately, so
that a rank scores the tokens of its shard, and sums over ranks are the same as with data parallelism. In eval mode rows
are not sharded.

Legend: R rows, L row length, P ranks of a group.
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
from transformers import PreTrainedModel, Trainer, TrainingArguments

from ..batching.micro_batch import MicroBatch
from ..capabilities import Feature, check_features, conflict_message, option_features
from ..errors import InputError
from ..options import OptionValues
from ..scoring import forward
from ..scoring.layouts import IGNORE, Branch, Example, collate
from ..scoring.parity_check import HALF_PRECISION_TOLERANCE, is_within_tolerance, token_values, tolerance
from ..scoring.rotary import rope_switch_length
from .duplicate_mask import mask_duplicate_rows
from .launch import SHARDING_FIX


def resolve_parallelism(args: OptionValues) -> ParallelismConfig | None:
    """Return the parallelism of a Config, or that of `accelerate launch` if the Config has none, or None.

    Args:
        args: A PostTrainConfig.

    Raises:
        InputError: If the parallelism is not supported, or cannot be combined with other options.
    """
    config = args.parallelism_config
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        config = ParallelismConfig()
    config = ParallelismConfig(**config) if isinstance(config, dict) else config
    if config is None or config.sp_size == config.cp_size == config.tp_size == 1:
        return config
    if config.tp_size > 1:
        raise InputError(f"parallelism_config: tp_size is not supported. Remove it. {SHARDING_FIX}")
    if config.cp_size > 1:
        raise InputError("parallelism_config: cp_size is not supported. Use sp_size to shard long rows")

    ranks = config.sp_size
    stage = args.deepspeed_plugin.zero_stage if args.deepspeed_plugin else 0
    _raise_first(
        f"sequence parallelism (parallelism_config.sp_size={ranks})",
        [
            (not args.method.sequence_parallel, f"is not supported for method {args.method.name}"),
            (stage not in (2, 3), "requires DeepSpeed with ZeRO stage 2 or 3"),
            (args.world_size % ranks, f"requires a number of processes that it divides, not {args.world_size}"),
            (
                args.layout not in ("auto", "padded"),
                f"requires one document per row, layout: padded, not {args.layout}",
            ),
            (
                not args.average_tokens_across_devices,
                "counts tokens over all ranks, and requires average_tokens_across_devices: true",
            ),
        ],
    )
    check_features(option_features(args) | {Feature.SEQUENCE_PARALLEL: "parallelism_config"})
    # processes that no size of the config accounts for are data parallel
    return config if config.data_parallel_size > 1 else replace(config, dp_shard_size=args.world_size // ranks)


def _raise_first(subject: str, problems: list[tuple[object, str]]) -> None:
    """Raise InputError for the first problem whose condition is true.

    Args:
        subject: Beginning of the message.
        problems: (condition, rest of the message) of each problem.
    """
    for condition, problem in problems:
        if condition:
            raise InputError(f"{subject} {problem}")


def check_model(model: PreTrainedModel, router_coef: float, args: TrainingArguments) -> None:
    """Raise InputError if the rows of a causal LM cannot be sharded, and set the attention that Ulysses replaces.

    Args:
        model: The causal LM.
        router_coef: Coefficient of the router's loss, 0 without a router.
        args: The Config.
    """
    parallel = args.parallelism_config
    if parallel is None or parallel.sp_size == 1:
        return
    ranks = parallel.sp_size
    config = model.config.get_text_config()
    attention = config._attn_implementation or "eager"
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", 0)
    # layers that do not attend to all previous tokens, of which only flash attention supports sliding windows
    windows = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    layer_types = set(getattr(config, "layer_types", None) or windows) - {"full_attention"}
    layer_types -= {"sliding_attention"} if "flash" in attention else set()
    _raise_first(
        f"{type(model).__name__}: sequence parallelism (sp_size={ranks})",
        [
            ("flash" not in attention and attention != "sdpa", f"requires sdpa or flash_attention_2, not {attention}"),
            (layer_types, f"does not support layers of type {', '.join(sorted(layer_types))} with {attention}"),
            (not kv_heads, "requires num_key_value_heads in the config of the model"),
            (
                heads % ranks or (kv_heads % ranks and ranks % kv_heads),
                f"cannot distribute {heads} heads and {kv_heads} key-value heads",
            ),
            (
                rope_switch_length(model),
                "would give each shard of a row other rotary frequencies (LongRoPE or dynamic NTK)",
            ),
            (router_coef, "requires router_aux_loss_coef: 0, since the router's loss is computed over complete rows"),
        ],
    )
    if model.base_model is not model and forward.is_vision_language_model(model):
        raise InputError(f"{conflict_message(Feature.SEQUENCE_PARALLEL, Feature.IMAGES)}. Load it as a text model")
    parallel.sp_handler.sp_attn_implementation = attention


def shard_loader(trainer: Trainer, adapter: Any) -> Any:
    """Return the training loader that Trainer has prepared, with sharded batches.

    Args:
        trainer: The trainer.
        adapter: DeepSpeed's adapter of the loader, which can only shard tensors [rows, tokens]. Without sequence
            parallelism it is the loader, which is returned unchanged.

    Raises:
        InputError: If the model scores sharded rows differently from complete rows.
    """
    if not hasattr(adapter, "sp_group"):
        return adapter
    _check_parity(trainer, adapter)
    # DeepSpeed multiplies gradients by this size in the all-reduce, as if each rank had the loss of its whole group
    optimizer: Any = trainer.model_wrapped.optimizer
    optimizer.sequence_parallel_size = 1
    return DataLoader(SequenceShards(trainer, adapter), batch_size=None, generator=torch.Generator())


def _check_parity(trainer: Trainer, adapter: Any) -> None:
    """Score the same rows complete and sharded, as `parity_check.parity_error` does for layouts."""
    model = trainer.model_wrapped
    ranks = adapter.sp_world_size
    inner = forward.causal_lm(model)
    if getattr(inner.config.get_text_config(), "attention_dropout", 0):
        return  # the scores would be random

    example = Example([5, 9, 6], [Branch([7, 8, 5, 9, 6, 7, 9])])
    rows = collate([example] * trainer.args.train_batch_size, "padded")
    complete = rows.to(trainer.args.device)
    shard = shard_batch(rows, adapter.sp_rank, ranks).to(trainer.args.device)

    def parity_error(in_float32: bool) -> float:
        # rows are not sharded in eval mode; then only attention is in training mode, which Ulysses shards
        with torch.no_grad(), forward.eval_mode(model):
            complete_sum = token_values(model, complete, in_float32).sum()
            for module in inner.modules():
                if hasattr(module, "is_causal"):  # an attention
                    module.training = True
            shard_sum = token_values(model, shard, in_float32).sum()
        total: Tensor = trainer.accelerator.reduce(shard_sum) * ranks / trainer.accelerator.num_processes
        return ((total - complete_sum).abs() / len(rows.scored)).item()

    if not is_within_tolerance(parity_error, (tolerance(inner), HALF_PRECISION_TOLERANCE), "sequence parallelism"):
        raise InputError(
            f"{type(inner).__name__}: sequence parallelism is not supported, since it gives other scores than the "
            "forward of the model"
        )


class SequenceShards(IterableDataset):
    """This rank's shards of the batches of all ranks of its group, one batch after the other."""

    def __init__(self, trainer: Trainer, adapter: Any) -> None:
        self.trainer = trainer
        self.adapter = adapter

    def __len__(self) -> int:
        return len(self.adapter.dl) * self.adapter.sp_world_size

    def __iter__(self) -> Iterator[MicroBatch]:
        loader = self.adapter.dl
        ranks = self.adapter.sp_world_size
        loader.set_epoch(int(self.trainer.state.epoch or 0))  # Trainer sets it only for loaders of Accelerate
        for batch in loader:
            # each rank of the group loads a different batch, and all ranks train on a shard of each
            local_batch = mask_duplicate_rows(batch, self.trainer.accelerator).to("cpu")
            group_batches: list[Any] = [None] * ranks
            torch.distributed.all_gather_object(group_batches, local_batch, group=self.adapter.sp_group)
            for complete in group_batches:
                yield shard_batch(complete, self.adapter.sp_rank, ranks)


def shard_batch(batch: MicroBatch, rank: int, ranks: int) -> MicroBatch:
    """Return the shard of each row of a padded batch that one rank holds: [R, L] -> [R, L / P], with L rounded up.

    Args:
        batch: The batch.
        rank: Rank within the group, which is the number of the shard.
        ranks: Number of ranks of the group, P.

    Returns:
        The batch with the tokens of the shard, of which `scored` and `owner` are too. Fields of rows are unchanged.
    """
    rows, length = batch.input_ids.shape
    size = -(-length // ranks)
    start = rank * size

    def columns(values: Tensor, fill: int) -> Tensor:
        """Return columns start to start + size of rows [R, L], padded if P does not divide L."""
        return pad(values, (0, size * ranks - length), value=fill)[:, start : start + size].contiguous()

    # positions in the flattened rows become positions in the flattened shard
    row = batch.scored // length
    column = batch.scored % length - start
    in_shard = (column >= 0) & (column < size)
    return batch.replace(
        input_ids=columns(batch.input_ids, 0),
        shift_labels=columns(batch.shift_labels, IGNORE),
        router_weights=columns(batch.router_weights, 0),
        position_ids=torch.arange(start, start + size).repeat(rows, 1),
        attention_mask=None,  # attention is causal, and padding comes after the tokens
        scored=(row * size + column)[in_shard],
        owner=batch.owner[in_shard],
        target_weights=None if batch.target_weights is None else batch.target_weights[in_shard],
    )
