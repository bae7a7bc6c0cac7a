"""PostTrainer: what all methods share on top of `transformers.Trainer`.

A method says which examples its rows hold (`examples`) and what its losses are (`losses`). Here: data sets prepared
once, scoring inside the forward, exact metrics. Modules of their own have the optimizer step (losses are reduced in
`step.compute_loss`), evaluation and saving: their functions are bound at the end of the class.

Normalisation: a method returns one loss per unit (a token or an example); the divisor is the number of units over all
ranks and the whole accumulation window. So batch 4 x accumulation 1 == 2 x 2 == 1 x 4 == two processes.
"""

import abc
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, set_seed

from ..capabilities import Feature, check_features, option_features
from ..data.dataset_type import AnyDataset
from ..data.images import get_image_reader, hold_images
from ..data.json_rows import from_rows
from ..data.lengths import add_length_column, check_length_known, seeded_sampler, warn_if_too_long
from ..data.prepare import SCORE_COLUMNS, prepare
from ..engines import engine, launch, sequence, sharded
from ..errors import InputError, join_names
from ..generation.completions_client import ServerError
from ..generation.hf_generate import warn_about_ignored_settings
from ..models import acceleration, load
from ..models import policy as policies
from ..models.frozen import FrozenModel
from ..monitoring import progress, reporters
from ..monitoring.anomaly_monitor import AnomalyMonitor
from ..monitoring.progress import LogLastStep, Throughput
from ..monitoring.threads import oversubscription_hint
from ..monitoring.versions import newer_than_tested
from ..scoring import forward
from ..scoring.attention_selection import row_multiple
from ..scoring.layout_selection import choose_layout, verified_layout
from ..scoring.vision_inputs import VisionInputs
from . import checkpoint, output_dir, rules, run_fingerprint, saving, stateful, step
from .checkpoint import ResumeMixin
from .config import PostTrainConfig, check_arguments, check_optimizer
from .evaluation import EvaluationMixin
from .loss_output import MetricAverager
from .policy import make_policy
from .preemption import Preemption
from .saving import SavingMixin
from .stateful import Stateful
from .step import StepMixin

logger = logging.getLogger(__name__)
Rows: TypeAlias = datasets.Dataset | datasets.IterableDataset | Sequence[dict[str, Any]]


class TrainerMeta(abc.ABCMeta):
    """The class of trainers: `Trainer(model, second, args=...)` passes the second model by position, as TRL's allow."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raises InputError for another second argument, and for more of them, while `args` is given by name."""
        if len(args) > 1 and "args" in kwargs:
            name = {"reference": "ref_model", "teacher": "teacher_model"}.get(cls.method.second)  # type: ignore[attr-defined]
            if len(args) > 2 or name is None or name in kwargs:
                problem = f"{cls.__name__}: its second argument is args, which is given by name too"
                raise InputError(f"{problem}: name every argument after the model")
            kwargs[name] = args[1]
            args = args[:1]
        return super().__call__(*args, **kwargs)


class PostTrainer(StepMixin, EvaluationMixin, SavingMixin, ResumeMixin, metaclass=TrainerMeta):
    """Base of the methods' trainers. Arguments are those of `transformers.Trainer`, plus `peft_config`.

    model: a causal LM, or the name or folder of one. processing_class: its tokenizer, loaded with a named model; its
    processor for rows with pictures.
    train_dataset, eval_dataset: rows in any format of `data`: raw, streaming or already tokenised.
    To change a loss, override `losses`, which training and evaluation both read (an own `compute_loss` only trains).
    What stands in its metrics has no gradient. `TrainerInterface` has the methods that a subclass defines, and the
    mixins those that replace methods of `transformers.Trainer`.
    Raises InputError for a mistake in the arguments or the data.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rules.reject_trl_overrides(cls.__mro__[: cls.__mro__.index(Trainer)])  # mixins too
        if hasattr(cls, "config_class"):  # none of a class that goes in front of a method's
            cls.method = cls.data_method = cls.config_class.method

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | str | None = None,
        args: PostTrainConfig | None = None,
        data_collator: None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | dict[str, Rows] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        peft_config: Any = None,
        **kwargs: Any,
    ):
        args = args or self.config_class(output_dir="outputs")
        kwargs = check_arguments(type(self), model, args, data_collator, kwargs)
        if train_dataset is None and eval_dataset is None:
            raise InputError("`train_dataset` is required: pass the rows to train on (to evaluate, eval_dataset alone)")
        images = processing_class is None and (hold_images(train_dataset) or hold_images(eval_dataset))
        model, self.tokenizer = policies.resolve_model(model, processing_class, peft_config, args, images)  # type: ignore[arg-type]
        args = policies.with_supported_checkpointing(model, args)
        self.terminal_ids = policies.find_terminal_ids(model, self.tokenizer, args.chat_template_kwargs)
        policies.align_generation(model, self.tokenizer, self.terminal_ids)
        model, self.router_coef = make_policy(model, peft_config, args)
        self.base_key = run_fingerprint.base_weights_key(model, peft_config, self.method)
        self.start_key = run_fingerprint.start_weights_key(model, peft_config)
        self.second_key: str | None = None  # the same of the second model
        given = (kwargs.get("optimizers") or [None])[0] or kwargs.get("optimizer_cls_and_kwargs")
        self.own_optimizer = bool(given) or type(self).create_optimizer is not Trainer.create_optimizer
        self.new_adapter = getattr(peft_config, "init_lora_weights", None) in (True, "gaussian")
        self.meters = {"train": MetricAverager(), "eval": MetricAverager()}
        self.throughput = Throughput()
        self.scored = [forward.causal_lm(model)]
        self.second_models: Sequence[FrozenModel] = ()
        self.stateful: dict[str, Stateful] = {}  # what checkpoints store besides, by name
        self.recipe: dict[str, Any] | None = None  # that the command was given, for W&B
        self.run_description: dict[
            str, Any
        ] = {}  # `same_run.describe` of the last `train`, where checkpoints are written
        layout = choose_layout(self.scored, args.layout, args.max_length)
        reader = get_image_reader(self.tokenizer)
        # a tower that is cut over ranks, or trained, runs on each batch: with a picture or without
        always = args.train_vision or bool(launch.requested_engine(args).shards)
        seen = None if reader is None else VisionInputs.from_model(self.scored[0], reader, always)
        collator = self.collator_class(self.examples, layout, row_multiple(self.scored), vision_inputs=seen)
        if seen is not None:
            check_features(option_features(args) | {Feature.IMAGES: "images"})
        with launch.main_process_first(args):
            train = add_length_column(self.prepare(train_dataset, self.tokenizer, args, "train"), args)
            warn_if_too_long(train, self.scored[0].config, args)
            evaluated = self.prepare(eval_dataset, self.tokenizer, args, "eval")
        self.scored_rows: list[datasets.Dataset] = []  # those with columns of scores by this trainer's second model
        train = self.without_scores(train)
        evaluated = self.without_scores(evaluated)
        self.check_ids(train, evaluated)
        config = self.scored[0].config
        cached = getattr(config, "use_cache", None)
        saved = self.tokenizer if reader is None else reader.processor
        super().__init__(model, args, collator, train, evaluated, saved, **kwargs)
        saving.add_tags(self.scored[0], self.method.name)
        if cached is not None:
            config.use_cache = cached  # HF's Trainer turns it off for good; our forwards say it each time
        self.neftune_noise_alpha = None  # HF's noise would depend on the layout: `step.score` adds it
        check_optimizer(self)
        if args.eval_exact_match or self.data_method.rows.sampled:
            warn_about_ignored_settings(model)
        progress.replace_progress_callback(self, self.method.key_metrics)
        self.add_callback(LogLastStep())
        launch.check_accelerator(self.accelerator, args)
        sharded.keep_full_precision(self.accelerator)
        sharded.set_wrapped_layers(self.accelerator, self.scored[0])
        self.preemption = Preemption(self)
        self.anomaly_monitor = AnomalyMonitor(self)
        self.add_callback(self.preemption)
        self.add_callback(self.anomaly_monitor)
        self.ready = self.scoring_checked = False

    # ---- data

    @classmethod
    def prepare(
        cls, rows: Rows | dict[str, Rows] | None, tokenizer: PreTrainedTokenizerBase, args: PostTrainConfig, name: str
    ) -> Any:
        """Rows as `examples` takes them, from whatever comes in; a dict of data sets one by one.

        name: what messages call the rows; "train" is how the training set begins. Needs no model, so a recipe's data
        is prepared (and refused) before one is loaded; rows that are prepared already stay as they are.
        """
        if rows is None:
            return None
        if isinstance(rows, dict) and name == "train":
            raise InputError(f"train_dataset is a dict of {join_names(rows)}: give one of them, such as rows['train']")
        if isinstance(rows, dict) and not rows:
            raise InputError(f"{name}: a dict without a data set: leave eval_dataset out")
        if isinstance(rows, dict):
            return {key: cls.prepare(part, tokenizer, args, f"{name} {key}") for key, part in rows.items()}
        if args.world_size > 1 and not name.startswith("train") and isinstance(rows, datasets.IterableDataset):
            raise InputError(f"{name}: a stream on several processes would be counted unevenly: set streaming: false")
        plain: Any = rows
        if not isinstance(rows, datasets.Dataset | datasets.IterableDataset):
            try:
                each = [{**rows[i]} for i in range(len(rows))]
            except (TypeError, KeyError) as error:
                what = f"{name}: a {type(rows).__name__} is no data set: pass a datasets.Dataset, or a list of dicts"
                raise InputError(f"{what} (load_dataset reads files, Dataset.from_generator iterators)") from error
            try:
                plain = from_rows(each)
            except (TypeError, ValueError) as error:
                raise InputError(f"{name}: values of a column do not go together: {error}") from error
        # tensors, arrays or frames are a view of the plain values, which is all that is read; a transform is made once
        elif isinstance(rows, datasets.Dataset) and rows.format["type"] == "custom" and len(rows):
            kept = {*rows[0]}
            gone = [column for column in rows.column_names if column not in kept]
            plain = rows.map(dict, batched=True, remove_columns=gone, desc=f"Transforming {name}").with_format(None)
        elif not isinstance(rows, datasets.Dataset):
            plain = rows.with_format(None)
        elif rows.format["type"] or len(rows.format["columns"]) < len(rows.column_names):
            shown = rows if rows.format["output_all_columns"] else rows.select_columns(rows.format["columns"])
            plain = shown.with_format(None)
        made = cls.prepare_rows(plain, tokenizer, args, name)
        cls.check_rows(made, tokenizer, args, name)
        return made

    @classmethod
    def check_rows(cls, rows: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: PostTrainConfig, name: str) -> None:
        """Raises InputError for prepared rows that lack what the options want of all of them. name: as in `prepare`."""
        check_length_known(rows, args, name.startswith("train"))

    @classmethod
    def prepare_rows(
        cls, rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, args: PostTrainConfig, name: str
    ) -> Any:
        """`prepare` of one data set; a method adds what its rows need besides their tokens."""
        return prepare(rows, cls.method, tokenizer, args, name)

    def without_scores(self, rows: Any) -> Any:
        """Prepared rows without what a model of another trainer has scored: this one's are scored by its own."""
        if isinstance(rows, dict):
            return {name: self.without_scores(part) for name, part in rows.items()}
        own = rows is None or any(rows is one for one in self.scored_rows)
        scored = (
            [] if own else [column for column in getattr(rows, "column_names", None) or () if column in SCORE_COLUMNS]
        )
        return rows.remove_columns(scored) if scored else rows

    def check_ids(self, *rows: Any) -> None:
        """Raises InputError where prepared rows have a token that one of the models that read them lacks: not a teacher
        with a tokenizer of its own.
        """
        own = [forward.causal_lm(second.model) for second in self.second_models if getattr(second, "aligner", None)]
        for model in (model for model in self.scored if not any(model is other for other in own)):
            load.check_tokenizer_fits(self.tokenizer, model.config, type(model).__name__, *rows)

    def prepare_new_dataset(self) -> None:
        """Prepare a `train_dataset` that was put in the place of the one that the trainer was built with; a method adds
        what it took from that one.
        """
        self.train_dataset = rows = self.without_scores(self.train_dataset)
        columns = {*self.data_method.rows.columns, "index"}
        if rows is not None and not (isinstance(rows, datasets.Dataset) and columns <= set(rows.column_names)):
            with launch.main_process_first(self.args):
                self.train_dataset = add_length_column(
                    self.prepare(rows, self.tokenizer, self.args, "train"), self.args
                )
                self.check_ids(self.train_dataset)

    # ---- scoring

    def set_second_models(self, seconds: Sequence[FrozenModel]) -> None:
        """Other models score the same batches, or no longer do: their layout must suit them too."""
        self.second_models = seconds
        for second in seconds:
            if self.data_collator.vision_inputs and not forward.is_vision_language_model(second.model):
                name = type(forward.causal_lm(second.model)).__name__
                raise InputError(f"{name} sees no pictures, and the student does: load it with images: true")
        for second in seconds:
            acceleration.apply_liger_and_compile(second.model, self.args, second=True)
        keys = [run_fingerprint.base_weights_key(second.model, None, self.method) for second in seconds]
        self.second_key = " ".join(keys) or self.second_key
        self.scored = self.scored[:1] + [forward.causal_lm(second.model) for second in seconds]
        self.check_ids(self.train_dataset, self.eval_dataset)
        self.use_layout(choose_layout(self.scored, self.args.layout, self.args.max_length))

    def use_layout(self, layout: str) -> None:
        """Lay out batches so from now on, in one row where all models attend to that."""
        self.data_collator.layout = layout
        self.data_collator.row_multiple = row_multiple(self.scored)

    @property
    def is_float32(self) -> bool:
        """Is everything computed in float32?"""
        return not self.args.bf16 and not self.args.fp16 and all(m.dtype == torch.float32 for m in self.scored)

    def check_scoring(self, model: nn.Module) -> None:
        """Once, before the first batch: does each model score as its own forward says? See `verified_layout`.

        model: the policy. Where its engine has yet to prepare it, it is left for later; second models are checked.
        """
        if forward.causal_lm(self.model) is not self.scored[0]:
            raise InputError("trainer.model was replaced: build a trainer for that model, which prepares it")
        if self.scoring_checked:
            return
        self.scoring_checked = self.ready or not engine.changes_weights(self.accelerator)
        layout = self.data_collator.layout
        explicit = self.args.layout == self.data_collator.layout
        with self.accelerator.autocast(), step.run_eagerly(self.args), ExitStack() as on_device:
            seconds = [on_device.enter_context(second) for second in self.second_models]
            models = [model, *seconds] if self.scoring_checked else seconds
            # collective operations depend on the layout: it is the first rank's answer on all
            given = self.args.device, self.args.max_length, self.data_collator.vision_inputs
            teachers = seconds if self.method.second == "teacher" else []
            layout = verified_layout(models, layout, explicit, *given, teachers)
        self.use_layout(layout)

    # ---- what TRL's users look at

    @property
    def ref_model(self) -> nn.Module | None:
        """The frozen model that scores as the reference. None: it is the policy without its adapter, or its scores are
        cached.
        """
        return self.second_models[0].model if self.second_models and self.method.second == "reference" else None

    @property
    def teacher_model(self) -> nn.Module | None:
        """The teacher that is in memory, of several the first; None: it is on a server, or its scores are cached."""
        return self.second_models[0].model if self.second_models and self.method.second == "teacher" else None

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the load-balancing loss of a mixture of experts is part of the loss."""
        return self.router_coef > 0

    # ---- training

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: HF's changes `args` of a trainer that was built with others."""
        raise InputError("hyperparameter_search: build a trainer for each trial, in the objective that optuna calls")

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """HF's training, from the seed: its numbers do not depend on what was drawn since the trainer was built.

        resume_from_checkpoint: a folder, "auto" for the newest complete checkpoint of output_dir or a fresh start, or
        True, which wants one. Raises InputError where this run could not go on as the one that wrote it, or where
        another trains in output_dir; ServerError where a server of rollouts or a teacher is lost, and KeyboardInterrupt
        after Ctrl-C, both when a checkpoint has been saved.
        """
        if isinstance(resume_from_checkpoint, os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        with output_dir.exclusive_access(self.args):
            return self._train_alone(resume_from_checkpoint, *args, **kwargs)

    def _train_alone(self, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> Any:
        if self.train_dataset is None:
            raise InputError("`train_dataset` is required: pass the rows to train on when the trainer is built")
        if self.ready and engine.changes_weights(self.accelerator):
            raise InputError("train() runs once under FSDP2 and DeepSpeed: build another trainer")
        self.prepare_new_dataset()
        self.run_description = run_fingerprint.describe_run(self) if self.args.should_save else {}
        resume_from_checkpoint = checkpoint.resolve_checkpoint(self, resume_from_checkpoint)
        self.saved_step = checkpoint.step_in_output_dir(self, resume_from_checkpoint)
        stateful.load(self.stateful, resume_from_checkpoint)
        saving.check_folder(self, self.args.output_dir, self.args.merge_lora)
        if self.args.save_strategy != "no" and self.args.should_save:
            output_dir.check_space(self.args.output_dir, output_dir.min_checkpoint_bytes(self.model))
        logger.info("training %s", launch.describe_launch(self))
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", self.args.world_size))
        if self.args.device.type == "cpu" and (hint := oversubscription_hint(torch.get_num_threads(), processes)):
            logger.info("%s", hint)
        if newer := newer_than_tested():
            logger.info("%s", newer)
        set_seed(self.args.seed)
        self.meters["train"] = MetricAverager()
        self.has_trained = False
        of_run = {"method": self.method.name, "rows": self.run_description.get("train_dataset"), "recipe": self.recipe}
        reporters.isolate_failures(self.callback_handler.callbacks, of_run)
        wandb = reporters.wandb_environment(checkpoint.wandb_id(resume_from_checkpoint))
        with self.preemption.handle_signals(), progress.logs_above_progress_bar(), wandb:
            try:
                output = super().train(resume_from_checkpoint, *args, **kwargs)
            except ServerError as error:
                raise ServerError(f"{error}{saving.save_last_step(self)}") from error
        if self.preemption.interrupt_time:
            newest = checkpoint.find_checkpoint(self.args.output_dir) if self.state.global_step else None
            how = f"{newest} is saved; the same command with train.resume_from_checkpoint=auto goes on"
            raise KeyboardInterrupt(how if newest else "no checkpoint is saved that could be resumed")
        over = self.has_trained or self.preemption.preempted or self.rows_ran_out
        if not over and self.state.global_step < self.state.max_steps:
            raise InputError(
                "not a step was taken: the rows do not fill one batch (dataloader_drop_last), or those of a stream one "
                "step (per_device_train_batch_size x gradient_accumulation_steps)"
            )
        best = self.state.best_global_step
        found = self.state.best_model_checkpoint or "the last step"
        wanted = self.args.load_best_model_at_end and not self.preemption.preempted
        if wanted and best not in (None, self.state.global_step) and Path(found).name != f"checkpoint-{best}":
            problem = "load_best_model_at_end: checkpoint-%d was not saved or is gone: the weights are of %s"
            logger.warning(problem, best, found)
        return output

    @property
    def stopped(self) -> str | None:
        """Why `stop_on` ended the last `train`, in a line, or None. A model that was stopped is not worth saving."""
        return self.anomaly_monitor.stopped

    def _prepare_for_training(self, *args: Any) -> tuple[nn.Module, Any]:
        with checkpoint.safe_unpickling(self):
            model, dataloader = super()._prepare_for_training(*args)
        self.ready = True
        self.check_scoring(model)
        self.throughput = Throughput()
        return model, sequence.shard_loader(self, dataloader)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """HF's; grouped by length too, the order depends on seed, epoch and the rows of a step alone."""
        rows_per_step = self.get_total_train_batch_size(self.args)
        return seeded_sampler(super()._get_train_sampler(train_dataset), self.args, rows_per_step)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Rows are evaluated in order, however training rows are sampled."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the training metrics, reduced over ranks, to each log of the loss."""
        if "loss" in logs:
            meter = self.meters["train"]
            if read := self.throughput.read(self.accelerator.num_processes):
                meter.add_pair("tokens_per_second", read[0])
                meter.set_peak("peak_memory_gib", read[1])
            logs |= self.finish_metrics("train", meter.averages(self.accelerator))
        super().log(logs, start_time)
