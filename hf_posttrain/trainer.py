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
from typing import Any, ClassVar, Literal, TypeAlias

import datasets
import peft
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, set_seed
from transformers.trainer_utils import has_length

from . import checkpoint, data, engine, launch, policy, reference, rollout, saving, scoring, sequence, units
from .answers import exact_match
from .attention import choose_layout
from .config import PostTrainConfig
from .errors import InputError
from .frozen import Frozen
from .metrics import FiniteWatch, Meter
from .router import balancing_loss, router_coef
from .tiles import TileFunction
from .units import Losses

logger = logging.getLogger(__name__)
Rows: TypeAlias = datasets.Dataset | datasets.IterableDataset | Sequence[dict]


class PostTrainer(Trainer):
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
        self.finite = FiniteWatch()
        self.router_coef = router_coef(scoring.causal_lm(model).config, args.router_aux_loss_coef)
        self.scored = [scoring.causal_lm(model)]
        sequence.check_model(self.scored[0], self.router_coef, args)
        self.beside: Frozen | None = None
        collator = partial(self.collate_rows, layout=choose_layout(self.scored, args.layout), config=args)
        train = data.with_lengths(self.prepare(train_dataset, self.tokenizer, args, "train"), args)
        data.warn_if_too_long(train, self.scored[0].config, args)
        evaluation = self.prepare(eval_dataset, self.tokenizer, args, "eval")
        parts = evaluation.values() if isinstance(evaluation, dict) else [evaluation]
        if args.world_size > 1 and any(isinstance(part, datasets.IterableDataset) for part in parts):
            raise InputError("eval: a stream on several processes would be counted unevenly: set streaming: false")
        if args.merge_lora:
            saving.check_mergeable(model)
        super().__init__(model, args, collator, train, evaluation, self.tokenizer, **kwargs)
        launch.check_accelerator(self.accelerator, args)
        engine.keep_scores_whole(self.accelerator)
        self.preemption = checkpoint.Preemption(self.accelerator)
        self.add_callback(self.preemption)
        self.saving_in: str | None = None
        self.ready = False

    # ---- what a method defines

    @staticmethod
    def collate_rows(rows: list[dict], layout: str, config: Any) -> dict[str, Tensor]:
        """Prepared rows -> batch: what `batch.collate` gives, and `index` [B]."""
        raise NotImplementedError

    def losses(self, model: nn.Module, batch: dict[str, Any]) -> Losses:
        """The losses of a micro-batch, in training and in evaluation."""
        raise NotImplementedError

    def count_units(self, batch: dict[str, Any]) -> Tensor | float:
        """How many tokens or examples of this micro-batch the loss is averaged over."""
        return self.weights(batch).sum()

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
            choice["layout"] = scoring.trusted_layout(models, choice["layout"], explicit, tolerance, self.args.device)

    def _prepare_for_training(self, *args: Any) -> tuple[nn.Module, Any]:
        model, dataloader = super()._prepare_for_training(*args)
        self.ready = True
        self.check_scoring(model)
        return model, sequence.split(self, dataloader)

    # ---- training

    def score(
        self, model: nn.Module, batch: dict[str, Tensor], tile: TileFunction, weights: Tensor | None = None
    ) -> dict[str, Any]:
        """`scoring.score`, with the router's logits where their loss is on."""
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
        if resume_from_checkpoint in (True, "auto"):
            [found] = broadcast_object_list([checkpoint.newest(self.args)])  # the first rank's view of the disk
            if found is None and resume_from_checkpoint is True:
                raise InputError(f"resume_from_checkpoint: there is no complete checkpoint in {self.args.output_dir}")
            resume_from_checkpoint = found
        if isinstance(resume_from_checkpoint, str):
            checkpoint.check_launch(self, resume_from_checkpoint)
        set_seed(self.args.seed)
        self.meters["train"], self.finite = Meter(), FiniteWatch()
        with self.preemption.listening():
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        self.finite.report(self.accelerator)
        return output

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The micro-batches of one optimizer step, with `row_weights`."""
        if self.state.global_step >= self.state.max_steps:
            return [], None  # a finished run that is resumed: HF would train one step more
        return super().get_batch_samples(
            (units.weigh(batch, self.accelerator) for batch in epoch_iterator), num_batches, device
        )

    def weights(self, batch: dict[str, Any]) -> Tensor:
        """1 for each unit of the loss, 0 where its row must not count: [units]."""
        return units.weights(batch, self.unit)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | None:
        if not batch_samples:
            return None
        count = torch.as_tensor(sum(self.count_units(batch) for batch in batch_samples)).to(device).float()
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()
        return count

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
        self.finite.note(loss.detach(), self.state.global_step + 1)
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
            logs |= self.finish_metrics("train", self.meters["train"].averages(self.accelerator))
            self.finite.report(self.accelerator)
        super().log(logs, start_time)

    # ---- evaluation

    def prediction_step(
        self, model: nn.Module, inputs: dict, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The training losses without gradient, added up exactly; predictions for `compute_metrics`."""
        inputs = self._prepare_inputs(units.weigh(inputs, self.accelerator))
        with torch.no_grad(), self.compute_loss_context_manager():
            losses = self.losses(model, inputs)
            self._note("eval", losses)
            mean = (losses.values * losses.weights).sum() / losses.weights.sum().clamp(min=1)
            if prediction_loss_only:
                return mean, None, None
            return mean, *self.predictions(model, inputs, losses)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """HF's, for raw rows too, and with a row for each example where `compute_metrics` is given rows of logits."""
        packed, kept = self.data_collator, self.__dict__.get("_eval_dataloaders")
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self.prepare(eval_dataset, self.tokenizer, self.args, "eval")
            self.__dict__.pop("_eval_dataloaders", None)  # HF keeps loaders by name; these rows have none
        if self.compute_metrics is not None:
            self.data_collator = partial(packed.func, **packed.keywords | {"layout": "padded"})
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = packed
            if kept is not None:
                self._eval_dataloaders = kept

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """In order, however the training rows are sampled."""
        whole = self.args.world_size <= 1 and has_length(eval_dataset)
        return SequentialSampler(eval_dataset) if whole else None

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The same for `predict`."""
        return self.get_eval_dataloader(test_dataset)

    def predictions(self, model: nn.Module, batch: dict[str, Any], losses: Losses) -> tuple[Any, Any]:
        """What `compute_metrics` is given: (predictions, label_ids)."""
        return losses.predictions, losses.labels

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """HF's loop, with means over the whole set instead of means of batch means."""
        if not self.ready and engine.changes_weights(self.accelerator):
            raise InputError("FSDP2 and DeepSpeed cannot evaluate before train(): set eval_on_start: true instead")
        self.check_scoring(self.model_wrapped)
        self.meters["eval"] = Meter()
        output: Any = super().evaluation_loop(dataloader, *args, **kwargs)
        metrics = self.finish_metrics("eval", self.meters["eval"].averages(self.accelerator))
        if self.args.eval_exact_match:
            metrics["exact_match"] = exact_match(self, dataloader.dataset)
        prefix = kwargs.get("metric_key_prefix", "eval")
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output

    # ---- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Every weight under every engine, read again and compared; merged where merge_lora says so.

        All ranks call it. Raises RuntimeError where what was saved is not the whole model.
        """
        folder = output_dir or self.args.output_dir
        if self.args.merge_lora and not (_internal_call and output_dir):  # HF's own saves but that of push_to_hub
            saving.save_merged(self, folder)
        else:
            self._save(folder, saving.whole_state(self, isinstance(self.model, peft.PeftModel)))
            if self.args.should_save:
                saving.check_saved(self.model, folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """HF copies tensors by name, and so leaves out those that are saved under other names (fused experts)."""
        if self._loads_pretrained:
            own = self.model if model is None else model
            own.load_state_dict(type(own).from_pretrained(resume_from_checkpoint, dtype="auto").state_dict())
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self._loads_pretrained:
            self._load_from_checkpoint(str(self.state.best_model_checkpoint))
        else:
            super()._load_best_model()

    @property
    def _loads_pretrained(self) -> bool:
        """Is the policy a whole model in one piece, not an adapter and not in an engine's own files?"""
        return isinstance(self.model, PreTrainedModel) and not engine.changes_weights(self.accelerator)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        try:
            with checkpoint.complete_or_invisible(self) as self.saving_in:
                super()._save_checkpoint(model, trial)
        finally:
            self.saving_in = None
        if self.args.push_to_hub:
            self._push_from_checkpoint(f"{self.args.output_dir}/checkpoint-{self.state.global_step}")

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.saving_in is None:  # not a folder that is about to be renamed
            super()._push_from_checkpoint(checkpoint_folder)

    def _get_output_dir(self, trial: Any) -> str:
        return self.saving_in or super()._get_output_dir(trial)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Also the generation config, with the trained turn end, next to an adapter."""
        with reference.without_reference_adapter(self.model, state_dict) as state_dict:
            super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.generation_config.save_pretrained(output_dir or self.args.output_dir)


def _checked(args: PostTrainConfig, config_class: type, kwargs: dict) -> PostTrainConfig:
    """Refuse what would be silently wrong."""
    if not isinstance(args, config_class):
        raise InputError(f"args must be a {config_class.__name__}, not a {type(args).__name__}")
    if kwargs.get("data_collator") is not None or kwargs.get("compute_loss_func") is not None:
        raise InputError(
            "data_collator and compute_loss_func cannot be replaced: layouts and losses are the method's own"
        )
    return args
