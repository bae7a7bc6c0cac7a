"""PostTrainer: what the five methods share on top of `transformers.Trainer`.

A method says how its rows become a batch (`collate_rows`) and what its losses are (`losses`). Here: data sets prepared
once, scoring inside the forward, the one place where losses are reduced, exact metrics, what is saved.

Normalisation: a method returns one loss per unit (a token or an example); the divisor is the number of units over all
ranks and the whole accumulation window. So batch 4 x accumulation 1 == 2 x 2 == 1 x 4 == two processes.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Literal, TypeAlias

import datasets
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import has_length

from .. import data
from ..engines import engine, launch, sequence
from ..errors import InputError
from ..generation import rollout
from ..models import prepare as policy
from ..models.score_cache import Frozen
from ..scoring import forward as scoring
from ..scoring.attention import choose_layout
from ..scoring.tiles import TileFunction
from ..watch import progress
from ..watch.guard import Guard
from . import checkpoint, saving
from . import loss_units as units
from .config import PostTrainConfig
from .evaluation import Evaluating
from .loss_units import Losses
from .metrics import Meter, Pace
from .router import balancing_loss, router_coef

logger = logging.getLogger(__name__)
Rows: TypeAlias = datasets.Dataset | datasets.IterableDataset | Sequence[dict]


class PostTrainer(Evaluating):
    """Base of the five trainers. Arguments are those of `transformers.Trainer`, plus `peft_config`.

    model: a causal LM, or the name or folder of one. processing_class: its tokenizer, loaded with a named model.
    train_dataset, eval_dataset: rows in any format of `data/`: raw, streaming or already tokenised.
    Raises InputError for a mistake in the arguments or the data.
    """

    loss_is_scaled_for_ga = True
    method: ClassVar[str]
    unit: ClassVar[Literal["tokens", "examples"]]
    config_class: ClassVar[type[PostTrainConfig]]
    args: Any
    model: Any
    model_wrapped: Any
    data_collator: Any

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | str,
        args: PostTrainConfig | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | dict[str, Rows] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: Any = None,
        **kwargs: Any,
    ):
        args = _checked(args or self.config_class(output_dir="outputs"), self.config_class, kwargs)
        model, self.tokenizer = policy.resolve(model, processing_class, peft_config)
        launch.check_model(model, args)
        self.terminal_ids = policy.terminal_ids(model, self.tokenizer, args.chat_template_kwargs)
        self.generation_config = policy.align(model, self.tokenizer, self.terminal_ids)
        model = policy.for_training(model, peft_config, args)
        self.new_adapter = getattr(peft_config, "init_lora_weights", None) in (True, "gaussian")
        self.meters, self.scoring_checked = {"train": Meter(), "eval": Meter()}, False
        self.pace = Pace()
        self.router_coef = router_coef(scoring.causal_lm(model).config, args.router_aux_loss_coef)
        self.scored = [scoring.causal_lm(model)]
        sequence.check_model(self.scored[0], self.router_coef, args)
        self.beside: Frozen | None = None
        collator = partial(self.collate_rows, layout=choose_layout(self.scored, args.layout), config=args)
        with launch.main_process_first(args):
            train = data.with_lengths(self.prepare(train_dataset, self.tokenizer, args, "train"), args)
            data.warn_if_too_long(train, self.scored[0].config, args)
            evaluation = self.prepare(eval_dataset, self.tokenizer, args, "eval")
        parts = evaluation.values() if isinstance(evaluation, dict) else [evaluation]
        if args.world_size > 1 and any(isinstance(part, datasets.IterableDataset) for part in parts):
            raise InputError("eval: a stream on several processes would be counted unevenly: set streaming: false")
        if args.merge_lora:
            saving.check_mergeable(model)
        super().__init__(model, args, collator, train, evaluation, self.tokenizer, **kwargs)
        progress.install(self)
        launch.check_accelerator(self.accelerator, args)
        engine.keep_scores_whole(self.accelerator)
        self.preemption = checkpoint.Preemption(self.accelerator)
        self.add_callback(self.preemption)
        self.guard = Guard(self)
        self.add_callback(self.guard)
        self.ready = False

    # ---- what a method defines

    @staticmethod
    def collate_rows(rows: list[dict], layout: str, config: Any) -> dict[str, Tensor]:
        """Prepared rows -> batch: what `batch.collate` gives, and `index` [B]."""
        raise NotImplementedError

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> Losses:
        """The losses of a micro-batch, in training and in evaluation."""
        raise NotImplementedError

    def finish_metrics(self, stage: str, metrics: dict[str, float]) -> dict[str, float]:
        """The last word on the means of a logging interval ("train") or an evaluation ("eval", `loss` among them)."""
        return metrics

    # ---- data

    @classmethod
    def prepare(
        cls, rows: Rows | dict[str, Rows] | None, tokenizer: PreTrainedTokenizerBase, args: PostTrainConfig, name: str
    ) -> Any:
        """Rows as `collate_rows` takes them, from whatever comes in; a dict of data sets one by one.

        name: what messages call the rows; "train" is how the training set begins. Needs no model, so a recipe's data
        is prepared (and refused) before one is loaded; rows that are prepared already stay as they are.
        """
        if rows is None:
            return None
        if isinstance(rows, dict):
            return {key: cls.prepare(part, tokenizer, args, f"{name} {key}") for key, part in rows.items()}
        if not isinstance(rows, datasets.Dataset | datasets.IterableDataset):
            rows = datasets.Dataset.from_list([rows[i] for i in range(len(rows))])
        return cls.prepare_rows(rows, tokenizer, args, name)

    @classmethod
    def prepare_rows(
        cls, rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, args: PostTrainConfig, name: str
    ) -> Any:
        """`prepare` of one data set; a method adds what its rows need beside their tokens."""
        return data.prepare(rows, cls.method, tokenizer, args, name)

    # ---- scoring

    def score_beside(self, second: Frozen | None) -> None:
        """A second model scores the same batches (or no longer does): their layout must suit it too."""
        self.beside = second
        self.scored = self.scored[:1] + ([scoring.causal_lm(second.model)] if second else [])
        self.data_collator.keywords["layout"] = choose_layout(self.scored, self.args.layout)

    @property
    def exact(self) -> bool:
        """Is everything computed in float32?"""
        return not self.args.bf16 and not self.args.fp16 and all(m.dtype == torch.float32 for m in self.scored)

    def check_scoring(self, model: nn.Module) -> None:
        """Once, before the first batch: does each model score as its own forward says? See `scoring.trusted_layout`.

        model: the policy. Where its engine has yet to prepare it, it is left for later; what is beside it is checked.
        """
        if self.scoring_checked:
            return
        self.scoring_checked = self.ready or not engine.changes_weights(self.accelerator)
        choice = self.data_collator.keywords
        explicit, tolerance = self.args.layout == choice["layout"], 1e-3 if self.exact else 0.3
        with self.accelerator.autocast(), self.beside or nullcontext() as second:
            models = ([model] if self.scoring_checked else []) + ([second] if second is not None else [])
            layout = scoring.trusted_layout(models, choice["layout"], explicit, tolerance, self.args.device)
        [choice["layout"]] = broadcast_object_list([layout])  # what ranks do together hangs on it

    def _prepare_for_training(self, *args: Any) -> tuple[nn.Module, Any]:
        model, dataloader = super()._prepare_for_training(*args)
        self.ready = True
        self.check_scoring(model)
        self.pace = Pace()
        return model, sequence.split(self, dataloader)

    # ---- training

    def score(
        self, model: nn.Module, batch: dict[str, Tensor], tile: TileFunction, weights: Tensor | None = None
    ) -> dict[str, Any]:
        """`scoring.score`, with the router's logits where their loss is on. Tokens that are trained on are counted."""
        if torch.is_grad_enabled():
            self.pace.count(batch["router_weights"])
        return scoring.score(model, batch, tile, weights, router_logits=self.router_coef > 0)

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any) -> list[list[int]]:
        """`rollout.generate` with the policy; ranks may bring different numbers of prompts, but all must call it."""
        with self.accelerator.autocast(), engine.whole_weights(self.model_wrapped, self.accelerator) as model:
            ends, pad_id = self.terminal_ids, self.tokenizer.pad_token_id
            return rollout.generate(model, prompts, max_new_tokens, ends, pad_id, **options)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """HF's training, from the seed: its numbers do not hang on what was drawn since the trainer was built.

        resume_from_checkpoint: a folder, "auto" for the newest complete checkpoint of output_dir or a fresh start, or
        True, which wants one. Raises InputError where this run could not go on as the one that wrote it.
        """
        if self.ready and engine.changes_weights(self.accelerator):
            raise InputError("train() runs once under FSDP2 and DeepSpeed: build another trainer")
        resume_from_checkpoint = checkpoint.to_resume(self, resume_from_checkpoint)
        saving.check_folder(self, self.args.output_dir, self.args.merge_lora)
        logger.info("training %s", launch.described(self))
        set_seed(self.args.seed)
        self.meters["train"] = Meter()
        with self.preemption.listening(), progress.messages_above():
            return super().train(resume_from_checkpoint, *args, **kwargs)

    @property
    def has_trained(self) -> bool:
        """Did the last `train` take a step? A finished run that is resumed does not."""
        return self.guard.losses.steps > 0

    @property
    def stopped(self) -> str | None:
        """Why `stop_on` ended the last `train`, in a line, or None. A model that was stopped is not worth saving."""
        return self.guard.stopped

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with self.pace.paused():
            super()._save_checkpoint(model, trial)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """HF's; grouped by length too, the order depends on seed and epoch alone."""
        return data.seeded(super()._get_train_sampler(train_dataset), self.args)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The micro-batches of one optimizer step, each with `row_weights`, made ready by `prepare_window`.

        A stream may end within a window, on each rank at another one: HF would run what is there without a step and
        add it to the next, and ranks would wait for each other, so that window is left out.
        """
        if self.state.global_step >= self.state.max_steps:
            return [], None  # a finished run that is resumed: HF would train one step more
        batches = [units.weigh(batch, self.accelerator) for batch in islice(epoch_iterator, num_batches)]
        if not has_length(self.train_dataset):
            found = self.accelerator.gather(torch.tensor([len(batches)], device=device)).min()
            batches = batches if found == num_batches else []
        if not batches:
            return [], None
        batches = self.prepare_window(batches)
        return batches, self._units_of_window(batches, device)

    def prepare_window(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What a method needs of all micro-batches of an optimizer step before the first of them; all ranks call it."""
        return batches

    def _units_of_window(self, batches: list[dict[str, Any]], device: torch.device) -> Tensor:
        """Tokens or examples of the window that the loss is averaged over, on all ranks."""
        count = torch.as_tensor(sum(self.weights(batch).sum() for batch in batches)).to(device).float()
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()
        return count

    def weights(self, batch: dict[str, Any]) -> Tensor:
        """1 for each unit of the loss, 0 where its row must not count: [units]."""
        return units.weights(batch, self.unit)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The one place where a loss is reduced: sum over units / units of the window over all ranks."""
        losses = self.losses(model, inputs)
        items = num_items_in_batch if num_items_in_batch is not None else losses.weights.sum()
        loss = (losses.values * losses.weights).sum() / torch.as_tensor(items).clamp(min=1)
        self._note("train", losses)
        self.guard.losses.note(loss, self.state.global_step + 1, inputs)
        if self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        if losses.router_logits is not None:
            config, weights = scoring.causal_lm(self.model).config, inputs["router_weights"]
            balance = self.router_coef * balancing_loss(losses.router_logits, config, weights)
            loss = loss + balance / self.current_gradient_accumulation_steps
        return (loss, losses) if return_outputs else loss

    def _note(self, stage: str, losses: Losses) -> None:
        meter = self.meters[stage]
        for name, (values, weights) in losses.metrics.items():
            meter.add(name, values, losses.weights if weights is None and values.ndim else weights)
        if stage == "eval":
            meter.add("loss", losses.values, losses.weights)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the training metrics, reduced over ranks, to each log of the loss."""
        if "loss" in logs:
            self.pace.hand_over(self.meters["train"], self.accelerator.num_processes)
            logs |= self.finish_metrics("train", self.meters["train"].averages(self.accelerator))
        super().log(logs, start_time)


def _checked(args: PostTrainConfig, config_class: type, kwargs: dict) -> PostTrainConfig:
    """Refuse what would be silently wrong."""
    if not isinstance(args, config_class):
        raise InputError(f"args must be a {config_class.__name__}, not a {type(args).__name__}")
    if kwargs.get("data_collator") is not None or kwargs.get("compute_loss_func") is not None:
        raise InputError(
            "data_collator and compute_loss_func cannot be replaced: layouts and losses are the method's own"
        )
    return args
