"""Optimizer step of PostTrainer: micro-batches, their scores, and the only reduction of the loss."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_utils import has_length

from ..batching.micro_batch import Batch, MicroBatch
from ..engines import engine
from ..engines.duplicate_mask import mask_duplicate_rows
from ..errors import InputError
from ..generation import rollout
from ..scoring import forward, neftune
from ..scoring.head import TileFunction
from .config import PostTrainConfig
from .group_metrics import with_group_metrics
from .interface import TrainerInterface
from .router_loss import balancing_loss


def run_eagerly(args: PostTrainConfig) -> AbstractContextManager[Any]:
    """Return a context in which compiled layers run uncompiled.

    They would be recompiled for the shape of every token in generation, and for the float32 of a check.
    """
    return torch.compiler.set_stance("force_eager") if args.torch_compile else nullcontext()


class StepMixin(TrainerInterface):
    """Methods of `PostTrainer` for one optimizer step."""

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the micro-batches of an optimizer step and the number of units of their loss.

        Returns:
            The micro-batches, with `row_weights` and after `prepare_window`, and the number of tokens or examples on
            all ranks, over which their loss is averaged.
        """
        if self.state.global_step >= self.state.max_steps:
            return [], None  # Trainer would train one more step of a finished run that is resumed
        batches = self.next_window(epoch_iterator, num_batches)
        # A stream may end within a window, which may differ between ranks. Trainer would add the gradients of
        # the incomplete window to the next step, and ranks would wait for each other. So such a window is skipped.
        if not has_length(self.train_dataset):
            smallest = self.accelerator.gather(torch.tensor([len(batches)], device=device)).min()
            if smallest < num_batches:  # the pass is over, which `ResumeMixin` reads from the state
                batches = []
                self.state.epoch = ceil(self.state.epoch or 0)
        if not batches:
            return [], None
        batches = self.prepare_window(batches)
        for batch in batches:
            self.throughput.count(batch.router_weights.to(device))
        units = torch.as_tensor(sum(self.weights(batch).sum() for batch in batches)).to(device).float()
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            units = self.accelerator.gather(units).sum()
        return batches, units

    def next_window(self, epoch_iterator: Iterator[Any], count: int) -> list[Any]:
        """Return the next micro-batches with their `row_weights`, at most `count`."""
        return [mask_duplicate_rows(batch, self.accelerator) for batch in islice(epoch_iterator, count)]

    def _prepare_inputs(self, inputs: Batch) -> Batch:  # type: ignore[override]
        """Move a batch to the device.

        The method of Trainer also casts floats to the dtype of DeepSpeed, which would round scores.
        """
        return inputs.to(self.args.device)

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any) -> list[list[int]]:
        """Call `rollout.generate` with the policy. All ranks call it, possibly with different numbers of prompts."""
        eager = run_eagerly(self.args)
        gathered = engine.gather_policy(self.model_wrapped, self.accelerator)
        with self.accelerator.autocast(), eager, gathered as model:
            terminal_ids = self.terminal_ids
            pad_id = self.tokenizer.pad_token_id
            see = self.data_collator.vision_inputs
            return rollout.generate(model, prompts, max_new_tokens, terminal_ids, pad_id, vision_inputs=see, **options)

    def score(
        self, model: nn.Module, batch: MicroBatch, tile: TileFunction, weights: Tensor | None = None
    ) -> forward.Scores:
        """Call `forward.score` with the noise of NEFTune, and with router logits if their loss is enabled."""
        noise = self.args.neftune_noise_alpha if forward.unwrap_model(model).training else None
        with neftune.embedding_noise(model, batch, noise) if noise else nullcontext():
            return forward.score(model, batch, tile, weights, router_logits=self.router_coef > 0)

    def weights(self, batch: MicroBatch) -> Tensor:
        """Return the weight of each unit of the loss, [units]: that of the token or 1, or 0 if its row does not count.

        `owner` maps a token to its branch, and `row` a branch to its row.
        """
        rows = batch.weights_of_rows
        if self.method.unit == "examples":
            return rows
        tokens = rows[batch.row][batch.owner]
        return tokens if batch.target_weights is None else tokens * batch.target_weights

    def compute_loss(  # type: ignore[override]
        self,
        model: nn.Module,
        inputs: MicroBatch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Reduce the losses: their sum over units, divided by the units of the window on all ranks.

        This is the only reduction of a loss.
        """
        losses = self.losses(model, inputs)
        losses = losses if inputs.groups is None else with_group_metrics(self, losses, inputs)
        items = num_items_in_batch if num_items_in_batch is not None else losses.weights.sum()
        loss = losses.total / torch.as_tensor(items).clamp(min=1e-30)  # weights may be small
        self.meters["train"].add_losses(losses)
        if self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # the engines average gradients over ranks
        if self.router_coef:
            if losses.router_logits is None:
                problem = "router_aux_loss_coef: `losses` returns no router_logits"
                raise InputError(f"{problem}. Set it to 0, or return them in `Losses`")
            # the balance is computed for each micro-batch, and the mean over the window is added to the loss
            config = forward.causal_lm(self.model).config
            balance = self.router_coef * balancing_loss(losses.router_logits, config, inputs.router_weights)
            loss = loss + balance / self.current_gradient_accumulation_steps
        return (loss, losses) if return_outputs else loss

    def training_step(  # type: ignore[override]
        self, model: nn.Module, inputs: MicroBatch, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run the step of Trainer. The anomaly monitor checks the loss later, without waiting for the device."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.anomaly_monitor.record(loss, self.state.global_step + 1, inputs)
        self.has_trained = True
        return loss
