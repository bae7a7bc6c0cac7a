"""One optimizer step of PostTrainer: its micro-batches, their scores, and the one place where a loss is reduced."""

from collections.abc import Sequence
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
from .interface import TrainerInterface
from .router_loss import balancing_loss


def run_eagerly(args: PostTrainConfig) -> AbstractContextManager[Any]:
    """Inside, compiled layers run as they are written: in generation every token is another shape, and a check in
    float32 another dtype.
    """
    return torch.compiler.set_stance("force_eager") if args.torch_compile else nullcontext()


class StepMixin(TrainerInterface):
    """Methods of `PostTrainer` for one optimizer step."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Return the micro-batches of an optimizer step, with `row_weights` and after `prepare_window`, and the number
        of tokens or examples over which their loss is averaged, on all ranks.
        """
        if self.state.global_step >= self.state.max_steps:
            return [], None  # a finished run that is resumed: HF would train one step more
        batches = self.next_window(epoch_iterator, num_batches)
        # A stream may end within a window, on each rank at another one. Trainer would run the micro-batches that are
        # there without a step and add them to the next, and ranks would wait for each other: such a window is left out.
        if not has_length(self.train_dataset):
            found = self.accelerator.gather(torch.tensor([len(batches)], device=device)).min()
            if found < num_batches:  # the pass is over, which `ResumeMixin` reads from a state
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

    def next_window(self, epoch_iterator: Any, count: int) -> list[Any]:
        """Return the next `count` micro-batches, or those that are left, each with its `row_weights`."""
        return [mask_duplicate_rows(batch, self.accelerator) for batch in islice(epoch_iterator, count)]

    def _prepare_inputs(self, inputs: Batch) -> Batch:  # type: ignore[override]
        """Move a batch to the device. HF's method also casts floats to DeepSpeed's dtype, which rounds scores."""
        return inputs.to(self.args.device)

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any) -> list[list[int]]:
        """`rollout.generate` with the policy; ranks may bring different numbers of prompts, but all must call it."""
        plain = run_eagerly(self.args)
        whole = engine.gather_policy(self.model_wrapped, self.accelerator)
        with self.accelerator.autocast(), plain, whole as model:
            ends = self.terminal_ids
            pad_id = self.tokenizer.pad_token_id
            see = self.data_collator.vision_inputs
            return rollout.generate(model, prompts, max_new_tokens, ends, pad_id, see=see, **options)

    def score(
        self, model: nn.Module, batch: MicroBatch, tile: TileFunction, weights: Tensor | None = None
    ) -> forward.Scores:
        """`forward.score`, with the router's logits where their loss is on, and NEFTune's noise."""
        noise = self.args.neftune_noise_alpha if forward.unwrap_model(model).training else None
        with neftune.embedding_noise(model, batch, noise) if noise else nullcontext():
            return forward.score(model, batch, tile, weights, router_logits=self.router_coef > 0)

    def weights(self, batch: MicroBatch) -> Tensor:
        """1 for each unit of the loss, 0 where its row must not count: [units]. A token knows its branch (`owner`), a
        branch its row (`row`).
        """
        rows = batch.weights_of_rows
        return rows if self.method.unit == "examples" else rows[batch.row][batch.owner]

    def compute_loss(  # type: ignore[override]
        self,
        model: nn.Module,
        inputs: MicroBatch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The one place where a loss is reduced: sum over units / units of the window over all ranks."""
        losses = self.losses(model, inputs)
        items = num_items_in_batch if num_items_in_batch is not None else losses.weights.sum()
        loss = losses.total / torch.as_tensor(items).clamp(min=1)
        self.meters["train"].add_losses(losses)
        if self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # the engines average gradients over ranks
        if self.router_coef:
            if losses.router_logits is None:
                raise InputError("router_aux_loss_coef: `losses` gives no router_logits: set it to 0, or give them")
            # each micro-batch has a balance of its own: their mean over the window is added
            config = forward.causal_lm(self.model).config
            counted = inputs.router_weights
            balance = self.router_coef * balancing_loss(losses.router_logits, config, counted)
            loss = loss + balance / self.current_gradient_accumulation_steps
        return (loss, losses) if return_outputs else loss

    def training_step(  # type: ignore[override]
        self, model: nn.Module, inputs: MicroBatch, num_items_in_batch: Any = None
    ) -> Tensor:
        """HF's; the guard looks at the loss later, without waiting for the device."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.anomaly_monitor.note(loss, self.state.global_step + 1, inputs)
        self.has_trained = True
        return loss
