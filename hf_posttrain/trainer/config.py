"""PostTrainConfig, the options of all methods on top of `transformers.TrainingArguments`."""

import copy
import inspect
import logging
import numbers
import os
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Literal, Self, get_args, get_type_hints

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.training_args import OptimizerNames
from transformers.utils.import_utils import enable_tf32, is_torch_tf32_available

from ..capabilities import Feature, conflict_message
from ..engines import config_files, sequence
from ..engines.launch import check_engine, requested_engine
from ..errors import InputError, name_hint, short_repr
from ..options import option
from . import rules
from .method_spec import Method
from .option_group import OptionKind, describe_type
from .renamed_options import rename_options, warn_about_old_names

logger = logging.getLogger(__name__)
_LOWER_IS_BETTER = re.compile(r"loss$|divergence|perplexity|\b(\w+_)?(kl|ce|nll)\b")
_READ_ON_CREATION = {
    "accelerator_config",
    "bf16",
    "ddp_backend",
    "deepspeed",
    "fp16",
    "fsdp",
    "fsdp_config",
    "parallelism_config",
    "tf32",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
    "use_cpu",
}
"""Options that transformers and Accelerate read only when a Config is built."""
SWITCH: dict[str, Any] = {"nargs": "?", "const": True}
"""Metadata of an option that may have no value on a command line, such as `--bf16`."""


_CHECKED: ContextVar[bool] = ContextVar("checked", default=False)
"""Whether the options of the Config that is being built have been checked."""


class ConfigMeta(type):
    """Metaclass of Configs. It replaces old names of options, and raises errors with a hint for names of TRL."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Build a Config."""
        parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            options, renamed = rename_options(options, cls.method.groups, parameters)  # type: ignore[attr-defined]
            warn_about_old_names(renamed)
            options = rules.checked_keywords(cls.__name__, options, parameters)
        return super().__call__(*args, **options)


@dataclass
class PostTrainConfig(TrainingArguments, metaclass=ConfigMeta):
    """Options of all methods, in addition to those of `transformers.TrainingArguments`.

    Defaults that differ from TrainingArguments are those of TRL, except for bf16, which is off on CPU.

    Raises:
        InputError: If a value is not supported, or options exclude each other.
    """

    method: ClassVar[Method]
    """The training method, an entry of the registry in `methods`."""
    python_only: ClassVar[tuple[str, ...]] = (
        "chat_template_path",
        "model_init_kwargs",
        "trust_remote_code",
        "no_remove_unused_columns",
    )
    """Fields that a recipe does not have."""
    keep_asked = False
    """Whether prepared rows have the prompts of the data in the column `asked`. Commands set it. It is not an option.
    """
    logging_steps: float = option(10, "Number of steps between logs. A value below 1 is a fraction of all steps.")
    activation_checkpointing: bool | None = option(
        None,
        "Recompute activations in the backward pass, which reduces memory and adds a third of compute. By default "
        "true, as in TRL, except for a recipe whose device has enough memory without it according to `--check`.",
        **SWITCH,
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, "Options of activation checkpointing, such as {offload: true}."
    )
    gradient_checkpointing: bool | None = option(
        None, "Older name of activation_checkpointing, used if the newer one is not set.", **SWITCH
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, "Older name of activation_checkpointing_kwargs."
    )
    bf16: bool | None = option(  # type: ignore[assignment]
        None, "Autocast to bf16. By default true on a GPU that supports it, unless fp16 is set.", **SWITCH
    )
    fsdp: str | None = option(
        None,
        "Use FSDP2 with the options of fsdp_config, if true. The usual way is accelerate_configs/fsdp2.yaml.",
        **SWITCH,
    )
    resume_from_checkpoint: str | None = option(
        None,
        "Folder of a checkpoint to resume; auto for the newest complete checkpoint in output_dir, if there is one; or "
        "true, which requires one.",
        **SWITCH,
    )
    remove_unused_columns: bool = option(False, "Only false is supported, since the collators read all columns.")
    no_remove_unused_columns: bool = option(
        False, "Accepted from command lines as `--no_remove_unused_columns`. It has no effect."
    )
    logging_nan_inf_filter: bool = option(
        False,
        "Exclude non-finite losses from the logged mean, as transformers does by default. Otherwise they are logged "
        "with their step.",
    )
    max_length: int | None = option(
        1024,
        "Maximum number of tokens of prompt and completion. The prompt is truncated first, from the left and down to "
        "half of it. None: no limit.",
    )
    torch_compile: bool = option(
        False,
        "Compile the decoder layers once for all shapes of batches. On a GPU training is faster after some minutes.",
        **SWITCH,
    )
    use_liger_kernel: bool = option(
        False,
        "Use Liger's kernels in the layers. Requires a GPU and liger-kernel. The head is not replaced, since it is "
        "already fused.",
        **SWITCH,
    )
    merge_lora: bool = option(False, "Merge the adapter into the base model when the model is saved at the end.")
    layout: str = option(
        "auto",
        "Layout of batches: auto, shared (a prompt once for all its completions), packed or padded. The losses are the "
        "same.",
        choices=rules.LAYOUTS,
    )
    dataset_num_proc: int | None = option(
        None, "Number of processes that tokenize. The rows and their cache do not depend on it."
    )
    dataset_text_field: str = option("text", "Column with plain text, for methods that train on whole texts.")
    chat_template_kwargs: dict[str, Any] | None = option(
        None, "Arguments of the chat template, such as {enable_thinking: false}."
    )
    apply_chat_template: bool = option(
        False,
        "Convert prompts and completions that are strings to user and assistant messages in the model's chat template.",
    )
    reasoning: str | None = option(
        None,
        "Reasoning of assistant messages, in reasoning_content, thinking or reasoning, or in <think> tags: keep it in "
        "the form that the chat template reads, or drop it. None: pass messages to the template unchanged.",
        choices=rules.REASONING,
    )
    image_folder: str | None = option(
        None, "Folder that relative paths of images start from. By default the current folder."
    )
    train_vision: bool = option(
        False, "Also train the vision encoder and its projection to the language model, with LoRA or without."
    )
    disable_dropout: bool = option(
        False, "Set all dropout of the policy to 0, including that of LoRA and the jitter of routers."
    )
    router_aux_loss_coef: float | None = option(
        None,
        "Weight of the load-balancing loss of a mixture of experts. By default that of the model, if its config has "
        "output_router_logits.",
    )
    stop_on: list[str] | str | None = option(
        None,
        "Warnings that end the run without saving, one or a list: nan, chosen_falling, kl_zero, no_learning, "
        "clipped_rollouts, empty_rollouts, no_eos, label_leak. `monitoring.symptoms` describes them.",
    )
    eval_exact_match: bool = option(
        False, "Answer the prompts greedily in each evaluation, and log eval_exact_match of the final answers."
    )
    eval_max_completion_length: int = option(256, "Maximum number of tokens of an answer for eval_exact_match.")
    optim: OptimizerNames | Literal["muon"] | str = option(
        TrainingArguments.__dataclass_fields__["optim"].default,
        "Optimizer: a name of transformers, or muon, which is torch.optim.Muon for hidden matrices and AdamW for other "
        "weights.",
    )
    learning_rate_factors: dict[str, float] | None = option(
        None,
        "Factors of the learning rate by regular expressions that are searched in the names of weights, such as "
        "{lora_B: 16, embed_tokens: 0.1}. The first match applies.",
    )
    log_loss_by: str | None = option(
        None,
        "Column of the data by whose values the loss is logged too, as loss/VALUE. A recipe with several training "
        "sources logs the loss of each source by default (not of rollouts).",
    )
    resume_despite: list[str] | str | None = option(
        None, "Settings that may differ from the run that wrote the checkpoint, by the names in the error message."
    )
    chat_template_path: str | None = option(
        None, "File with a Jinja chat template for the tokenizer. A recipe has it in its model section."
    )
    model_init_kwargs: dict[str, Any] | None = option(
        None,
        "Arguments of `from_pretrained` for a model that is passed by name. A recipe has them in its model section.",
    )
    trust_remote_code: bool = option(
        False, "Run Python code of a model that is passed by name. A recipe has the option in its model section."
    )

    def __post_init__(self) -> None:
        switches: Any = {"true": True, "false": None}  # strings from a command line
        resume = self.resume_from_checkpoint
        self.resume_from_checkpoint = switches.get(str(resume).lower(), resume)
        self.report_to = "none" if self.report_to is None else self.report_to
        self._validate()

        # both names have one value: transformers reads `activation_...` since 5.23, and `gradient_...` before
        for suffix, default in (("", True), ("_kwargs", None)):
            names = f"activation_checkpointing{suffix}", f"gradient_checkpointing{suffix}"
            values = [value for name in names if (value := getattr(self, name)) is not None]
            for name in names:
                setattr(self, name, values[0] if values else default)
        if self.bf16 is None:
            has_gpu = not self.use_cpu and torch.cuda.is_available()
            self.bf16 = has_gpu and not self.fp16 and torch.cuda.is_bf16_supported(including_emulation=False)
        if self.bf16 and not torch.accelerator.is_available():
            self.use_cpu = True  # TrainingArguments rejects bf16 on a machine without an accelerator if it is not set
        # TrainingArguments assumes that every metric except the loss should increase
        if self.greater_is_better is None and self.metric_for_best_model:
            self.greater_is_better = not _LOWER_IS_BETTER.search(self.metric_for_best_model)
        is_default_accelerator_config = self.accelerator_config is None
        config_files.check_deepspeed_sections(self.deepspeed)
        uses_muon = self.optim == rules.MUON
        self.optim = "adamw_torch" if uses_muon else self.optim  # TrainingArguments rejects unknown names
        super().__post_init__()
        if uses_muon:
            self.optim = rules.MUON
            engine = requested_engine(self)
            if engine.sharding_engine or engine.zero:
                layout = Feature.SHARDED if engine.sharding_engine else Feature.FLATTENED
                raise InputError(conflict_message(Feature.MUON, layout))

        if self.torch_compile and not self.tf32 and is_torch_tf32_available():
            enable_tf32(False)  # TrainingArguments enables it with torch_compile, for the whole process
        if getattr(self.lr_scheduler_type, "value", None) == "reduce_lr_on_plateau":
            direction: Any = {"mode": "max" if self.greater_is_better else "min"}
            self.lr_scheduler_kwargs = direction | (self.lr_scheduler_kwargs or {})
        if self.fp16 and self.device.type == "cpu":
            raise InputError("fp16 requires a GPU, since gradients are not scaled on CPU. Remove fp16")
        if self.use_liger_kernel:
            if self.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
                raise InputError("use_liger_kernel requires a GPU. Remove use_liger_kernel")
            disabled = dict.fromkeys(rules.LIGER_HEAD_KERNELS, False)
            self.liger_kernel_config = (self.liger_kernel_config or {}) | disabled
        if self.torch_compile:
            backends = torch.compiler.list_backends(exclude_tags=())
            if (backend := self.torch_compile_backend or "") not in backends:
                hint = name_hint(backend, backends, list_valid=False)
                raise InputError(f"torch_compile_backend={backend!r} is not a backend of torch{hint}")
        checkpointing: Any = self.activation_checkpointing_kwargs
        if not isinstance(checkpointing, dict | None):
            raise InputError(f"activation_checkpointing_kwargs must be a mapping, not {short_repr(checkpointing)}")
        if (checkpointing or {}).get("offload") and self.device.type == "cpu":
            raise InputError("activation_checkpointing_kwargs: offload requires a GPU. Remove offload")

        accelerator_config: Any = self.accelerator_config
        if is_default_accelerator_config and self.dataloader_pin_memory and self.device.type == "cuda":
            accelerator_config.non_blocking = True  # otherwise each tensor of a batch waits for all work of the GPU
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # it has no effect, and torch would warn
        # Accelerate would split a batch by rows, as it does by default with streams
        if accelerator_config.dispatch_batches or accelerator_config.split_batches:
            problem = "accelerator_config: dispatch_batches and split_batches are not supported"
            raise InputError(f"{problem}, because they split batches by rows. Remove them")
        accelerator_config.dispatch_batches = False
        if self.world_size > 1 and not accelerator_config.even_batches:
            problem = "accelerator_config: even_batches: false is not supported"
            raise InputError(f"{problem}, because ranks would wait for each other. Set it to true")
        _check_schedule_and_optimizer(self)
        self.parallelism_config = sequence.resolve_parallelism(self)
        if self.parallelism_config and self.parallelism_config.sp_size > 1 and self.layout == "auto":
            logger.info("layout: padded (with sequence parallelism a row is one document)")
            self.layout = "padded"
        if self.n_gpu > 1:
            message = "%d GPUs are visible and no launcher is used, so that one is used. Use accelerate launch for all"
            logger.warning(message, self.n_gpu)
            self._n_gpu = 1
        check_engine(self)
        self.snapshot_options()

    def snapshot_options(self) -> None:
        """Store the current options, with which `check_changes` compares later ones."""
        self._snapshot = self._public_values()

    def _public_values(self) -> dict[str, Any]:
        """Return the current values by name, with copies of mappings and lists."""
        values = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {name: copy.copy(value) if isinstance(value, dict | list) else value for name, value in values.items()}

    def check_changes(self) -> None:
        """Check the options that were assigned after this Config was built. Without changes, nothing is checked again.

        If one of the two names of activation checkpointing was assigned, the other name gets the same value.

        Raises:
            InputError: If an assigned name is not an option, or an option is read only when the Config is built.
        """
        class_name = type(self).__name__
        snapshot = self._snapshot
        unknown = [name for name in vars(self).keys() - snapshot.keys() if not name.startswith("_")]
        if unknown:
            name = sorted(unknown)[0]
            hint = rules.replacement_hint(name, "python")
            if not hint:
                hint = f"{class_name} has no such option{name_hint(name, snapshot, list_valid=False)}"
            raise InputError(f"args.{name} was set after {class_name} was built, and has no effect: {hint}")
        for suffix in ("", "_kwargs"):
            names = f"activation_checkpointing{suffix}", f"gradient_checkpointing{suffix}"
            changed = [name for name in names if getattr(self, name) != snapshot[name]]
            for name in names if changed else ():
                setattr(self, name, getattr(self, changed[0]))
        for name in sorted(_READ_ON_CREATION & snapshot.keys()):
            if getattr(self, name) != snapshot[name]:
                problem = f"args.{name} was changed to {getattr(self, name)!r} after {class_name} was built"
                raise InputError(f"{problem}, and the new value has no effect. Pass it to {class_name}")
        if self._public_values() != snapshot:
            self._validate()
            self.snapshot_options()

    @classmethod
    def from_checked(cls, **options: Any) -> Self:
        """Build a Config from options without `rules.problems`, which are not checked again."""
        token = _CHECKED.set(True)
        try:
            return cls(**options)
        finally:
            _CHECKED.reset(token)

    def _validate(self) -> None:
        """Raise InputError for the first problem of the options, and build their groups."""
        if not _CHECKED.get():
            for name, annotation in _simple_options(type(self)).items():
                value = getattr(self, name)
                if not any(_has_type(value, kind) for kind in _union_members(annotation)):
                    raise InputError(f"{name} must be {describe_type(annotation)}, not {value!r}")
            for _, problem in rules.problems(self, self.method):
                raise InputError(problem)
        for key, group in self.method.groups.items():
            setattr(self, key, group.build(key, getattr(self, key)))

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain values, as TrainingArguments does."""
        groups = {key: value.to_dict() for key, value in vars(self).items() if isinstance(value, OptionKind)}
        return super().to_dict() | groups


@cache
def _simple_options(config_class: type[PostTrainConfig]) -> dict[str, Any]:
    """Return the annotations of the options of this package that are numbers, booleans or strings, by name."""
    inherited = {field.name for field in fields(TrainingArguments)} - {"learning_rate"}
    names = [field.name for field in fields(config_class) if field.name not in inherited]
    simple = {*_NUMBERS, bool, str, type(None)}
    hints = get_type_hints(config_class)
    return {name: hints[name] for name in names if {*_union_members(hints[name])} <= simple}


def _union_members(annotation: object) -> tuple[Any, ...]:
    return get_args(annotation) or (annotation,)


_NUMBERS: dict[type, type] = {int: numbers.Integral, float: numbers.Real}
"""Abstract types that include the numbers of NumPy and PyTorch."""


def _has_type(value: object, kind: type) -> bool:
    """Return whether a value has the type of an option. True and False are not numbers, and a path is a string."""
    if kind is str:
        return isinstance(value, str | os.PathLike)
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    return isinstance(value, kind)


@dataclass
class ReferenceOptions(PostTrainConfig):
    """Options of methods with a reference model."""

    precompute_ref_log_probs: bool | None = option(
        None,
        "Score the data with the reference model once before training, into a cache on disk. True also frees the "
        "reference model during training. By default the cache is used if more than one pass over the data is planned.",
        **SWITCH,
    )
    precompute_ref_batch_size: int | None = option(
        None, "Batch size for precompute_ref_log_probs. By default per_device_eval_batch_size."
    )
    sync_ref_model: bool = option(
        False,
        "Update the reference model during training: every ref_model_sync_steps, its weights become "
        "ref_model_mixup_alpha times those of the policy plus the rest of its own.",
    )
    ref_model_mixup_alpha: float = option(
        rules.REFERENCE_SYNC_DEFAULTS["ref_model_mixup_alpha"],
        "Share of the policy in an update of the reference model.",
    )
    ref_model_sync_steps: int = option(
        rules.REFERENCE_SYNC_DEFAULTS["ref_model_sync_steps"],
        "Number of optimizer steps between two updates of the reference model.",
    )


def _check_schedule_and_optimizer(config: PostTrainConfig) -> None:
    """Raise InputError for invalid options of the learning rate schedule, or if the optimizer is not installed.

    Trainer would raise these errors after the model has been loaded.
    """
    kind: Any = config.lr_scheduler_type
    options: Any = config.lr_scheduler_kwargs
    try:
        optimizer = torch.optim.SGD([torch.zeros(1)], config.learning_rate)
        get_scheduler(kind, optimizer, config.get_warmup_steps(100), 100, options)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        problem = str(error).rpartition("() ")[2]
        raise InputError(f"lr_scheduler_type: {kind.value} with lr_scheduler_kwargs: {problem}") from error
    if config.optim == rules.MUON:
        return
    try:
        Trainer.get_optimizer_cls_and_kwargs(config)
    except (ImportError, ValueError) as error:
        if re.search("install|import", str(error)):
            raise InputError(f"optim: {' '.join(str(error).split())}") from error


def check_arguments(
    trainer_class: Any, model: nn.Module | str | None, args: object, data_collator: object, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Check the arguments of a trainer.

    Args:
        trainer_class: Class of the trainer.
        model: The model, or its name or folder.
        args: The Config.
        data_collator: Must be None.
        kwargs: Other keyword arguments.

    Returns:
        The keyword arguments without those of TRL that have no effect.

    Raises:
        InputError: If an argument is not supported.
    """
    if not isinstance(args, trainer_class.config_class):
        config_name = trainer_class.config_class.__name__
        fix = "Name all arguments after the model (args=..., train_dataset=...)"
        if isinstance(args, TrainingArguments):
            fix = f"Build a {config_name}, which has the same options and those of the method"
        raise InputError(f"args must be a {config_name}, not a {type(args).__name__}. {fix}")
    args.check_changes()
    if args.model_init_kwargs and not isinstance(model, str):
        problem = "model_init_kwargs requires a model that is passed by name, and this one is already loaded"
        raise InputError(f"{problem}. Remove it, or pass the name as model")

    remaining = rules.checked_keywords(trainer_class.__name__, kwargs, inspect.signature(Trainer.__init__).parameters)
    if data_collator is not None or remaining.get("compute_loss_func") is not None:
        problem = "data_collator and compute_loss_func are not supported, because the method defines layouts and losses"
        third = f" (the third argument, a {type(data_collator).__name__}, is data_collator)"
        raise InputError(f"{problem}. Remove them{third * (data_collator is not None)}")
    if model is None or remaining.get("model_init") is not None:
        raise InputError(
            "model_init is not supported, because adapter, reference and prepared rows belong to one model. Pass model,"
            " and build a trainer for each trial of a hyperparameter search"
        )
    return remaining


def check_optimizer(trainer: Trainer) -> None:
    """Raise InputError if the optimizer lacks weights that are trained."""
    if trainer.optimizer is None:
        return
    optimized = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    model: Any = trainer.model
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if missing := [name for name, parameter in trained.items() if id(parameter) not in optimized]:
        problem = (
            f"the optimizer lacks {len(missing)} of {len(trained)} weights that are trained (such as {missing[0]})"
        )
        raise InputError(f"optimizers: {problem}. Add them, or set their requires_grad to False")
