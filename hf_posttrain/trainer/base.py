"""PostTrainer, the base class of the trainers of all methods, on top of `transformers.Trainer`.

A method defines the examples of a row (`examples`) and their losses (`losses`). This module prepares data sets once,
scores inside the forward and logs exact metrics. Mixins in other modules add the optimizer step, in which losses are
reduced (`step.compute_loss`), evaluation, saving and resumption.

Normalization: a method returns one loss per unit (a token or an example). The divisor is the number of units on all
ranks in the whole accumulation window. So batch 4 x accumulation 1 == 2 x 2 == 1 x 4 == two processes.
"""

import abc
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import PeftConfig
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, set_seed

from ..capabilities import Feature, check_features, option_features
from ..data.dataset_type import AnyDataset, AnyDatasets
from ..data.images import get_image_reader, hold_images
from ..data.json_rows import from_rows
from ..data.lengths import add_length_column, check_length_known, warn_if_too_long
from ..data.loss_groups import values_of_groups
from ..data.prepare import SCORE_COLUMNS, prepare
from ..data.recorded_scores import recorded_columns
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
from .interface import Rows
from .length_sampler import seeded_sampler
from .loss_output import MetricAverager
from .optimizers import OptimizerMixin
from .policy import make_policy
from .preemption import Preemption
from .saving import SavingMixin
from .stateful import Stateful
from .step import StepMixin

logger = logging.getLogger(__name__)


class TrainerMeta(abc.ABCMeta):
    """Metaclass of trainers. As in TRL, `Trainer(model, second, args=...)` passes the second model by position."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build a trainer.

        Raises:
            InputError: If `args` is a keyword argument and there are other positional arguments after the model.
        """
        if len(args) > 1 and "args" in kwargs:
            name = {"reference": "ref_model", "teacher": "teacher_model"}.get(cls.method.second)  # type: ignore[attr-defined]
            if len(args) > 2 or name is None or name in kwargs:
                problem = f"{cls.__name__}: the second positional argument is args, which is also a keyword argument"
                raise InputError(f"{problem}. Name all arguments after the model")
            kwargs[name] = args[1]
            args = args[:1]
        return super().__call__(*args, **kwargs)


class PostTrainer(StepMixin, EvaluationMixin, SavingMixin, ResumeMixin, OptimizerMixin, metaclass=TrainerMeta):
    """Base class of the trainers of all methods.

    To change a loss, override `losses`, which training and evaluation call. An overridden `compute_loss` only affects
    training. Values in the metrics of `losses` have no gradient. `TrainerInterface` declares the methods that a
    subclass defines, and the mixins override methods of `transformers.Trainer`.

    Args:
        model: A causal language model, or its name or folder.
        args: The Config of the method.
        data_collator: Not supported, since layouts and losses belong to the method.
        train_dataset: Rows in any format of `data`: raw, streaming or tokenized.
        eval_dataset: Rows like `train_dataset`, or a dict of data sets.
        processing_class: The tokenizer of the model, or its processor for rows with images. It is loaded together with
            a model that is passed by name.
        peft_config: Configuration of a new adapter.
        kwargs: Other arguments of `transformers.Trainer`.

    Raises:
        InputError: If there is a mistake in the arguments or the data.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rules.reject_trl_overrides(cls.__mro__[: cls.__mro__.index(Trainer)])  # includes mixins
        if hasattr(cls, "config_class"):  # a mixin that precedes the trainer of a method has none
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
        peft_config: PeftConfig | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or self.config_class(output_dir="outputs")
        kwargs = check_arguments(type(self), model, args, data_collator, kwargs)
        if train_dataset is None and eval_dataset is None:
            raise InputError("`train_dataset` is required. Pass the rows to train on, or only eval_dataset to evaluate")
        images = processing_class is None and (hold_images(train_dataset) or hold_images(eval_dataset))
        model, self.tokenizer = policies.resolve_model(model, processing_class, peft_config, args, images)  # type: ignore[arg-type]
        args = policies.with_supported_checkpointing(model, args)
        self.terminal_ids = policies.find_terminal_ids(model, self.tokenizer, args.chat_template_kwargs)
        policies.align_generation(model, self.tokenizer, self.terminal_ids)
        model, self.router_coef = make_policy(model, peft_config, args)
        self.base_key = run_fingerprint.base_weights_key(model, peft_config, self.method)
        self.start_key = run_fingerprint.start_weights_key(model, peft_config)
        self.second_key: str | None = None
        optimizer = (kwargs.get("optimizers") or [None])[0] or kwargs.get("optimizer_cls_and_kwargs")
        self.has_custom_optimizer = (
            bool(optimizer) or type(self).create_optimizer is not OptimizerMixin.create_optimizer
        )
        self.new_adapter = getattr(peft_config, "init_lora_weights", None) in (True, "gaussian")
        self.meters = {"train": MetricAverager(), "eval": MetricAverager()}
        self.throughput = Throughput()
        self.scored = [forward.causal_lm(model)]
        self.second_models: Sequence[FrozenModel] = ()
        self.stateful: dict[str, Stateful] = {}
        self.recipe: dict[str, Any] | None = None
        self.run_description: dict[str, Any] = {}

        layout = choose_layout(self.scored, args.layout, args.max_length)
        reader = get_image_reader(self.tokenizer)
        # a vision encoder that is sharded or trained runs on each batch, also without images
        always = args.train_vision or bool(launch.requested_engine(args).sharding_engine)
        vision_inputs = None if reader is None else VisionInputs.from_model(self.scored[0], reader, always)
        collator = self.collator_class(self.examples, layout, row_multiple(self.scored), vision_inputs=vision_inputs)
        if vision_inputs is not None:
            check_features(option_features(args) | {Feature.IMAGES: "images"})
        with launch.main_process_first(args):
            train = add_length_column(self.prepare(train_dataset, self.tokenizer, args, "train"), args)
            warn_if_too_long(train, self.scored[0].config, args)
            evaluation = self.prepare(eval_dataset, self.tokenizer, args, "eval")
        self.scored_rows: list[datasets.Dataset] = []
        train = self.without_scores(train, args)
        evaluation = self.without_scores(evaluation, args)
        self.check_ids(train, evaluation)

        config = self.scored[0].config
        use_cache = getattr(config, "use_cache", None)
        processor = self.tokenizer if reader is None else reader.processor
        self.groups = values_of_groups(train, evaluation)
        super().__init__(model, args, collator, train, evaluation, processor, **kwargs)
        saving.add_tags(self.scored[0], self.method.name)
        if use_cache is not None:
            config.use_cache = use_cache  # Trainer disables it permanently, but forwards here pass it explicitly
        self.neftune_noise_alpha = None  # the noise of Trainer would depend on the layout, so `step.score` adds it
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
        self.ready = False
        self.scoring_checked = False

    # ---- data

    @classmethod
    def prepare(
        cls, rows: Rows | dict[str, Rows] | None, tokenizer: PreTrainedTokenizerBase, args: PostTrainConfig, name: str
    ) -> Any:
        """Prepare rows for `examples`.

        No model is required, so that the data of a recipe are prepared and checked before a model is loaded. Prepared
        rows are returned unchanged.

        Args:
            rows: The rows, a dict of data sets, or None.
            tokenizer: The tokenizer.
            args: The options.
            name: Name of the data set in messages. The name of a training set starts with "train".

        Returns:
            The prepared rows, a dict of them, or None.

        Raises:
            InputError: If the rows are not a data set or a row is invalid.
        """
        if rows is None:
            return None
        if isinstance(rows, dict) and name == "train":
            raise InputError(f"train_dataset is a dict of {join_names(rows)}. Pass one of them, such as rows['train']")
        if isinstance(rows, dict) and not rows:
            raise InputError(f"{name}: the dict has no data set. Remove eval_dataset")
        if isinstance(rows, dict):
            return {key: cls.prepare(part, tokenizer, args, f"{name} {key}") for key, part in rows.items()}
        if args.world_size > 1 and not name.startswith("train") and isinstance(rows, datasets.IterableDataset):
            reason = "ranks would evaluate different numbers of rows"
            raise InputError(f"{name}: a stream is not supported on several processes: {reason}. Set streaming: false")

        plain: Any = rows
        if not isinstance(rows, datasets.Dataset | datasets.IterableDataset):
            try:
                dicts = [{**rows[i]} for i in range(len(rows))]
            except (TypeError, KeyError) as error:
                problem = f"{name}: a {type(rows).__name__} is not a data set"
                fix = "Pass a datasets.Dataset or a list of dicts (load_dataset reads files)"
                raise InputError(f"{problem}. {fix}") from error
            try:
                plain = from_rows(dicts)
            except (TypeError, ValueError) as error:
                raise InputError(f"{name}: the values of a column have incompatible types: {error}") from error
        # The plain values are read, not their format as tensors, arrays or data frames. A transform is applied once.
        elif isinstance(rows, datasets.Dataset) and rows.format["type"] == "custom" and len(rows):
            columns = {*rows[0]}
            removed = [column for column in rows.column_names if column not in columns]
            plain = rows.map(dict, batched=True, remove_columns=removed, desc=f"Transforming {name}").with_format(None)
        elif not isinstance(rows, datasets.Dataset):
            plain = rows.with_format(None)
        elif rows.format["type"] or len(rows.format["columns"]) < len(rows.column_names):
            selected = rows if rows.format["output_all_columns"] else rows.select_columns(rows.format["columns"])
            plain = selected.with_format(None)

        prepared = cls.prepare_rows(plain, tokenizer, args, name)
        cls.check_rows(prepared, tokenizer, args, name)
        return prepared

    @classmethod
    def check_rows(cls, rows: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: PostTrainConfig, name: str) -> None:
        """Raise InputError if prepared rows do not meet the requirements of the options."""
        check_length_known(rows, args, name.startswith("train"))

    @classmethod
    def prepare_rows(
        cls, rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, args: PostTrainConfig, name: str
    ) -> Any:
        """Prepare one data set. A method adds columns that it requires in addition to tokens."""
        return prepare(rows, cls.method, tokenizer, args, name)

    def without_scores(self, rows: AnyDatasets | None, args: PostTrainConfig) -> Any:
        """Return prepared rows without the scores by the second model of another trainer.

        Scores that are recorded in the raw rows remain.
        """
        if isinstance(rows, dict):
            return {name: self.without_scores(part, args) for name, part in rows.items()}
        if rows is None or any(rows is scored for scored in self.scored_rows):
            return rows
        others = SCORE_COLUMNS - {*recorded_columns(args)}
        columns = [column for column in getattr(rows, "column_names", None) or () if column in others]
        return rows.remove_columns(columns) if columns else rows

    def check_ids(self, *rows: AnyDatasets | None) -> None:
        """Raise InputError if prepared rows have a token that a model lacks.

        Teachers with another tokenizer are not checked.
        """
        aligned = [forward.causal_lm(second.model) for second in self.second_models if getattr(second, "aligner", None)]
        for model in self.scored:
            if any(model is teacher for teacher in aligned):
                continue
            load.check_tokenizer_fits(self.tokenizer, model.config, type(model).__name__, *rows)

    def prepare_new_dataset(self) -> None:
        """Prepare a `train_dataset` that was assigned after the trainer was built.

        A method also updates what it has computed from the former one.
        """
        self.train_dataset = rows = self.without_scores(self.train_dataset, self.args)
        columns = {*self.data_method.rows.columns, "index"}
        if rows is not None and not (isinstance(rows, datasets.Dataset) and columns <= set(rows.column_names)):
            with launch.main_process_first(self.args):
                prepared = self.prepare(rows, self.tokenizer, self.args, "train")
                self.train_dataset = add_length_column(prepared, self.args)
                self.check_ids(self.train_dataset)
            self.groups = values_of_groups(self.train_dataset, self.eval_dataset)

    # ---- scoring

    def set_second_models(self, seconds: Sequence[FrozenModel]) -> None:
        """Set the second models that score the same batches, and choose a layout that all models support."""
        self.second_models = seconds
        for second in seconds:
            if self.data_collator.vision_inputs and not forward.is_vision_language_model(second.model):
                name = type(forward.causal_lm(second.model)).__name__
                raise InputError(f"{name} does not support images, and the student does. Load it with images: true")
        for second in seconds:
            acceleration.apply_liger_and_compile(second.model, self.args, second=True)
        keys = [run_fingerprint.base_weights_key(second.model, None, self.method) for second in seconds]
        self.second_key = " ".join(keys) or self.second_key
        self.scored = self.scored[:1] + [forward.causal_lm(second.model) for second in seconds]
        self.check_ids(self.train_dataset, self.eval_dataset)
        current = self.data_collator.layout
        self.use_layout(choose_layout(self.scored, self.args.layout, self.args.max_length, current))

    def use_layout(self, layout: str) -> None:
        """Set the layout of batches, and their number of rows according to the attention of the models."""
        self.data_collator.layout = layout
        self.data_collator.row_multiple = row_multiple(self.scored)

    @property
    def is_float32(self) -> bool:
        """Whether everything is computed in float32."""
        return not self.args.bf16 and not self.args.fp16 and all(m.dtype == torch.float32 for m in self.scored)

    def check_scoring(self, model: nn.Module) -> None:
        """Check once, before the first batch, that models score as in their own forwards.

        See `verified_layout`. If the engine has not prepared the policy yet, only second models are checked, and the
        policy is checked in a later call.

        Args:
            model: The policy.

        Raises:
            InputError: If `trainer.model` was replaced.
        """
        if forward.causal_lm(self.model) is not self.scored[0]:
            raise InputError("trainer.model was replaced. Build a trainer for the new model, which prepares it")
        if self.scoring_checked:
            return
        self.scoring_checked = self.ready or not engine.changes_weights(self.accelerator)
        layout = self.data_collator.layout
        explicit = self.args.layout == self.data_collator.layout
        with self.accelerator.autocast(), step.run_eagerly(self.args), ExitStack() as on_device:
            seconds = [on_device.enter_context(second) for second in self.second_models]
            models = [model, *seconds] if self.scoring_checked else seconds
            # all ranks use the layout of the first one, since collective operations depend on it
            context = self.args.device, self.args.max_length, self.data_collator.vision_inputs
            teachers = seconds if self.method.second == "teacher" else []
            layout = verified_layout(models, layout, explicit, *context, teachers)
        self.use_layout(layout)

    # ---- attributes that TRL's trainers have

    @property
    def ref_model(self) -> nn.Module | None:
        """The frozen reference model, or None if it is the policy without its adapter or its scores are cached."""
        return self.second_models[0].model if self.second_models and self.method.second == "reference" else None

    @property
    def teacher_model(self) -> nn.Module | None:
        """The first teacher in memory, or None if it is on a server or its scores are cached."""
        return self.second_models[0].model if self.second_models and self.method.second == "teacher" else None

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the load-balancing loss of a mixture of experts is part of the loss."""
        return self.router_coef > 0

    # ---- training

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raise InputError, because the search of Trainer changes `args` of a trainer that has been built."""
        problem = "hyperparameter_search is not supported, because it changes the options of a trainer"
        raise InputError(f"{problem}. Instead, build a trainer for each trial, in the objective that optuna calls")

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does, starting with the seed.

        The results do not depend on random numbers that were generated after the trainer was built.

        Args:
            resume_from_checkpoint: A folder; "auto" for the newest complete checkpoint in output_dir, if there is one;
                or True, which requires one.
            args: Other arguments of `Trainer.train`.
            kwargs: Other arguments of `Trainer.train`.

        Raises:
            InputError: If this run would not continue the run that wrote the checkpoint, or another run trains in
                output_dir.
            ServerError: If a server of rollouts or of a teacher is lost. A checkpoint is saved before.
            KeyboardInterrupt: After Ctrl-C. A checkpoint is saved before.
        """
        if isinstance(resume_from_checkpoint, os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        with output_dir.exclusive_access(self.args):
            return self._train_locked(resume_from_checkpoint, *args, **kwargs)

    def _train_locked(self, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> Any:
        if self.train_dataset is None:
            raise InputError("`train_dataset` is required. Pass the rows to train on when the trainer is built")
        if self.ready and engine.changes_weights(self.accelerator):
            raise InputError("train() can be called only once under FSDP2 and DeepSpeed. Build another trainer")
        self.prepare_new_dataset()
        self.run_description = run_fingerprint.describe_run(self) if self.args.should_save else {}
        resume_from_checkpoint = checkpoint.resolve_checkpoint(self, resume_from_checkpoint)
        self.saved_step = checkpoint.step_in_output_dir(self, resume_from_checkpoint)
        stateful.load(self.stateful, resume_from_checkpoint)
        saving.check_folder(self.model, self.args.output_dir, self.args.merge_lora)
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
        rows = self.run_description.get("train_dataset")
        run = {"method": self.method.name, "rows": rows, "recipe": self.recipe}
        reporters.isolate_failures(self.callback_handler.callbacks, run)
        continued = reporters.continued_runs(self.args, checkpoint.reporter_runs(resume_from_checkpoint))
        with self.preemption.handle_signals(), progress.logs_above_progress_bar(), continued:
            try:
                output = super().train(resume_from_checkpoint, *args, **kwargs)
            except ServerError as error:
                raise ServerError(f"{error}{saving.save_last_step(self)}") from error
        if self.preemption.interrupt_time:
            newest = checkpoint.find_checkpoint(self.args.output_dir) if self.state.global_step else None
            hint = f"{newest} is saved. To resume, run the same command with train.resume_from_checkpoint=auto"
            raise KeyboardInterrupt(hint if newest else "there is no checkpoint to resume")
        has_progress = self.has_trained or self.preemption.preempted or self.rows_ran_out
        if not has_progress and self.state.global_step < self.state.max_steps:
            raise InputError(
                "no step was trained, because the data set has fewer rows than a batch (with dataloader_drop_last), or "
                "a stream fewer than a step. Lower per_device_train_batch_size or gradient_accumulation_steps"
            )
        best_step = self.state.best_global_step
        loaded = self.state.best_model_checkpoint or "the last step"
        loads_best = self.args.load_best_model_at_end and not self.preemption.preempted
        is_missing = best_step not in (None, self.state.global_step) and Path(loaded).name != f"checkpoint-{best_step}"
        if loads_best and is_missing:
            message = "load_best_model_at_end: checkpoint-%d was not saved or is missing. The weights are of %s"
            logger.warning(message, best_step, loaded)
        return output

    @property
    def stopped(self) -> str | None:
        """Reason why `stop_on` ended the last `train`, or None. The model of such a run should not be saved."""
        return self.anomaly_monitor.stopped

    def _prepare_for_training(self, *args: Any) -> tuple[nn.Module, Any]:
        with checkpoint.safe_unpickling(self):
            model, dataloader = super()._prepare_for_training(*args)
        self.ready = True
        self.check_scoring(model)
        self.throughput = Throughput()
        return model, sequence.shard_loader(self, dataloader)

    def _get_train_sampler(self, train_dataset: AnyDataset | None = None) -> Any:
        """Return a sampler like Trainer, whose order depends only on the seed, the epoch and the rows per step.

        This also holds for `group_by_length`.
        """
        rows_per_step = self.get_total_train_batch_size(self.args)
        return seeded_sampler(super()._get_train_sampler(train_dataset), self.args, rows_per_step)

    def _get_eval_sampler(self, eval_dataset: AnyDataset) -> None:
        """Return None, so that rows are evaluated in order, independent of the sampling of training rows."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the training metrics, reduced over ranks, to each log of the loss."""
        if "loss" in logs:
            meter = self.meters["train"]
            if reading := self.throughput.read(self.accelerator.num_processes):
                meter.add_pair("tokens_per_second", reading[0])
                meter.set_peak("peak_memory_gib", reading[1])
            logs |= self.finish_metrics("train", meter.averages(self.accelerator))
        super().log(logs, start_time)
