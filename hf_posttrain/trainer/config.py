"""PostTrainConfig: TrainingArguments with what all methods add."""

import inspect
import logging
import numbers
import os
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Self, get_args, get_type_hints

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.utils.import_utils import enable_tf32, is_torch_tf32_available

from ..engines import sequence
from ..engines.launch import check_engine
from ..errors import InputError, name_hint, short_repr
from ..options import option
from . import rules
from .method_spec import Method
from .option_group import OptionKind, describe_type
from .renamed_options import rename_options, warn_about_old_names

logger = logging.getLogger(__name__)
_FALLING = re.compile(r"loss$|divergence|perplexity|\b(\w+_)?(kl|ce|nll)\b")  # metrics of which less is better
_READ_AT_ONCE = {
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
"""Options that transformers and Accelerate read when a Config is made, and not again."""
SWITCH: dict[str, Any] = {"nargs": "?", "const": True}  # HfArgumentParser takes --bf16 and --bf16 true


_CHECKED: ContextVar[bool] = ContextVar("checked", default=False)
"""Whether the options that a Config is being built from were checked before."""


class ConfigMeta(type):
    """The class of Configs: what they are made with is looked at first, so that names of TRL get an answer."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        known = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
            given, renamed = rename_options(given, cls.method.groups, known)  # type: ignore[attr-defined]
            warn_about_old_names(renamed)
            given = rules.checked_keywords(cls.__name__, given, known)
        return super().__call__(*args, **given)


@dataclass
class PostTrainConfig(TrainingArguments, metaclass=ConfigMeta):
    """Every field of TrainingArguments, and these. Defaults that differ are TRL's, except bf16, which is off on CPU.

    Raises InputError for fields that cannot be honoured and for contradictions.
    """

    method: ClassVar[Method]
    """The row of the table of methods that these are the options of."""
    python_only: ClassVar[tuple[str, ...]] = ("model_init_kwargs", "trust_remote_code", "no_remove_unused_columns")
    """Fields that are no keys of a recipe."""
    logging_steps: float = option(10, "Steps between logs; below 1, a share of all steps.")
    activation_checkpointing: bool | None = option(
        None,
        "Recompute activations in the backward: less memory, a third more compute. None: yes, as in TRL, but for a "
        "recipe on a GPU that by `--check`'s estimate has room without.",
        **SWITCH,
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, "Options of that, such as {offload: true}."
    )
    gradient_checkpointing: bool | None = option(
        None, "The older name of activation_checkpointing, read where that is not given.", **SWITCH
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, "The older name of activation_checkpointing_kwargs."
    )
    bf16: bool | None = option(  # type: ignore[assignment]
        None, "bf16 autocast; None: on where the GPU has it (and fp16 is not set), off on CPU.", **SWITCH
    )
    fsdp: str | None = option(
        None, "True: FSDP2, tuned by fsdp_config; accelerate_configs/fsdp2.yaml is the usual way.", **SWITCH
    )
    resume_from_checkpoint: str | None = option(
        None,
        "A checkpoint's folder, auto (the newest complete one of output_dir, or a fresh start) or true (it must "
        "exist).",
        **SWITCH,
    )
    remove_unused_columns: bool = option(False, "Our collators read their own columns; leave it off.")
    no_remove_unused_columns: bool = option(
        False, "Accept `--no_remove_unused_columns` of a command line, which changes nothing: columns are always kept."
    )
    logging_nan_inf_filter: bool = option(
        False,
        "Hide non-finite losses from the logged mean (HF's default); off, they are shown and their step is named.",
    )
    max_length: int | None = option(
        1024, "Longest prompt + completion in tokens: the prompt is cut first, from its left, to half; None: no limit."
    )
    torch_compile: bool = option(
        False,
        "Compile the decoder layers, once for all shapes of batches: quicker on a GPU after some minutes.",
        **SWITCH,
    )
    use_liger_kernel: bool = option(
        False,
        "Liger's kernels in the layers (GPU; needs liger-kernel). The head stays ours, which is fused already.",
        **SWITCH,
    )
    merge_lora: bool = option(
        False, "Save the model at the end with its adapter merged into the base, as one plain model."
    )
    layout: str = option(
        "auto",
        "How examples are laid out: auto, shared (a prompt once for all its answers), packed or padded. Same numbers.",
    )
    dataset_num_proc: int | None = option(
        None, "Processes that tokenise; the rows and their cache are the same for any number."
    )
    dataset_text_field: str = option("text", "Column of plain text, for methods that train on whole texts.")
    chat_template_kwargs: dict[str, Any] | None = option(
        None, "Passed to the chat template, for instance {enable_thinking: false}."
    )
    apply_chat_template: bool = option(
        False, "Plain-string prompts become a user turn and their answers an assistant's, in the model's chat template."
    )
    reasoning: str | None = option(
        None,
        "What assistants thought, under reasoning_content, thinking or reasoning, or in <think> tags: keep it as the "
        "chat template reads it, or drop it; None: rows go to the template as they are.",
    )
    image_folder: str | None = option(None, "Folder where relative paths of pictures start; None: the current one.")
    train_vision: bool = option(
        False, "Train the tower for pictures too, and what joins it to the language model, with LoRA or without."
    )
    disable_dropout: bool = option(
        False, "Set every dropout of the policy to 0, LoRA's included, and routers to no jitter."
    )
    router_aux_loss_coef: float | None = option(
        None,
        "Weight of the experts' load-balancing loss; None: the model's own where its config has output_router_logits.",
    )
    stop_on: list[str] | str | None = option(
        None,
        "Warnings that end the run, one or a list: nan, chosen_falling, kl_zero, no_learning, clipped_rollouts, "
        "empty_rollouts, no_eos, label_leak, as `watch` describes them. Nothing more is saved then.",
    )
    eval_exact_match: bool = option(
        False, "In each evaluation, answer the prompts greedily and log eval_exact_match of the final answers."
    )
    eval_max_completion_length: int = option(256, "Longest answer in that evaluation, in tokens.")
    resume_despite: list[str] | str | None = option(
        None, "Resume a checkpoint though these differ from the run that wrote it: names as the refusal lists them."
    )
    model_init_kwargs: dict[str, Any] | None = option(
        None,
        "Arguments of `from_pretrained` for a model that is given by name. A recipe has them in its model section.",
    )
    trust_remote_code: bool = option(
        False, "Run Python code that comes with a model that is given by name. A recipe has it in its model section."
    )

    def __post_init__(self) -> None:
        spelt: Any = {"true": True, "false": None}  # as a command line has them
        self.resume_from_checkpoint = spelt.get(str(self.resume_from_checkpoint).lower(), self.resume_from_checkpoint)
        self.report_to = "none" if self.report_to is None else self.report_to
        self._validate()
        # one value under both names: transformers reads `activation_...` from 5.23, `gradient_...` before
        for suffix, default in (("", True), ("_kwargs", None)):
            names = f"activation_checkpointing{suffix}", f"gradient_checkpointing{suffix}"
            given = [value for name in names if (value := getattr(self, name)) is not None]
            for name in names:
                setattr(self, name, given[0] if given else default)
        if self.bf16 is None:
            gpu = not self.use_cpu and torch.cuda.is_available()
            self.bf16 = gpu and not self.fp16 and torch.cuda.is_bf16_supported(including_emulation=False)
        if self.bf16 and not torch.accelerator.is_available():
            self.use_cpu = True  # HF refuses bf16 where a CPU is all there is, and nobody said so
        # HF takes every metric but the loss for one that should rise
        if self.greater_is_better is None and self.metric_for_best_model:
            self.greater_is_better = not _FALLING.search(self.metric_for_best_model)
        loading_by_default = self.accelerator_config is None
        super().__post_init__()
        if self.torch_compile and not self.tf32 and is_torch_tf32_available():
            enable_tf32(False)  # HF turns it on with torch_compile, for the whole process, and nobody asked
        if getattr(self.lr_scheduler_type, "value", None) == "reduce_lr_on_plateau":
            direction: Any = {"mode": "max" if self.greater_is_better else "min"}
            self.lr_scheduler_kwargs = direction | (self.lr_scheduler_kwargs or {})
        if self.fp16 and self.device.type == "cpu":
            raise InputError("fp16: true needs a GPU (on CPU its gradients would not be scaled): leave it out here")
        if self.use_liger_kernel:
            if self.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
                raise InputError("use_liger_kernel: true needs a GPU: leave it out here")
            self.liger_kernel_config = (self.liger_kernel_config or {}) | dict.fromkeys(rules.LIGER_HEAD_KERNELS, False)
        if self.torch_compile:
            backends = torch.compiler.list_backends(exclude_tags=())
            if (backend := self.torch_compile_backend or "") not in backends:
                close = name_hint(backend, backends, list_valid=False)
                raise InputError(f"torch_compile_backend={backend!r} is unknown to torch{close}")
        checkpointed: Any = self.activation_checkpointing_kwargs
        if not isinstance(checkpointed, dict | None):
            raise InputError(f"activation_checkpointing_kwargs: expected a mapping, found {short_repr(checkpointed)}")
        if (checkpointed or {}).get("offload") and self.device.type == "cpu":
            raise InputError("activation_checkpointing_kwargs: offload moves activations off a GPU: leave it out here")
        loading: Any = self.accelerator_config
        if loading_by_default and self.dataloader_pin_memory and self.device.type == "cuda":
            loading.non_blocking = True  # else each tensor of a batch waits for all work that the GPU has yet to do
        # Accelerate would cut a laid-out batch by rows, as it does by default with streams
        if loading.dispatch_batches or loading.split_batches:
            raise InputError("accelerator_config: dispatch_batches and split_batches cut laid-out batches by rows")
        loading.dispatch_batches = False
        if self.world_size > 1 and not loading.even_batches:
            raise InputError("accelerator_config: with even_batches: false ranks wait for each other: set it to true")
        _try_optimizer(self)
        self.parallelism_config = sequence.resolve_parallelism(self)
        if self.parallelism_config and self.parallelism_config.sp_size > 1 and self.layout == "auto":
            logger.info("layout: padded (with sequence parallelism a row is one document)")
            self.layout = "padded"
        if self.n_gpu > 1:
            found = "%d GPUs are visible and no launcher is used: training on one. Use accelerate launch for all."
            logger.warning(found, self.n_gpu)
            self._n_gpu = 1
        check_engine(self)
        self.snapshot_options()

    def snapshot_options(self) -> None:
        """Take all that is assigned so far as read: what `check_changes` finds comes later."""
        self._made_of = {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def check_changes(self) -> None:
        """Take in what was assigned to this Config after it was made. Raises InputError for a name that nothing reads,
        and for an option that was read when it was made.

        The two names of activation checkpointing have one value: the one that was assigned.
        """
        made = self._made_of
        unknown = [name for name in vars(self).keys() - made.keys() if not name.startswith("_")]
        if unknown:
            name = sorted(unknown)[0]
            own = type(self).__name__
            instead = (
                rules.replacement_hint(name, "python")
                or f"{own} has no such option{name_hint(name, made, list_valid=False)}"
            )
            raise InputError(f"args.{name} was set after {own} was built, and nothing reads it: {instead}")
        for suffix in ("", "_kwargs"):
            names = f"activation_checkpointing{suffix}", f"gradient_checkpointing{suffix}"
            changed = [name for name in names if getattr(self, name) != made[name]]
            for name in names if changed else ():
                setattr(self, name, getattr(self, changed[0]))
        for name in sorted(_READ_AT_ONCE & made.keys()):
            if getattr(self, name) != made[name]:
                problem = f"args.{name} was changed to {getattr(self, name)!r} after {type(self).__name__} was built"
                raise InputError(f"{problem}, which had read it: pass it when that is built")
        self._validate()
        self.snapshot_options()

    @classmethod
    def from_checked(cls, **options: Any) -> Self:
        """Build a Config from options that `rules.problems` has found nothing wrong with."""
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
                if not any(_is_of(value, kind) for kind in _members(annotation)):
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
    """Return the annotations of the options of this package that are numbers, switches or texts, by name."""
    of_transformers = {field.name for field in fields(TrainingArguments)} - {"learning_rate"}
    names = [field.name for field in fields(config_class) if field.name not in of_transformers]
    simple = {*_NUMBERS, bool, str, type(None)}
    hints = get_type_hints(config_class)
    return {name: hints[name] for name in names if {*_members(hints[name])} <= simple}


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) or (annotation,)


_NUMBERS: dict[type, type] = {int: numbers.Integral, float: numbers.Real}
"""Numbers of NumPy and PyTorch count too."""


def _is_of(value: object, kind: type) -> bool:
    """Return whether a value is of the type of an option. True and False are not numbers; a text may be a path."""
    if kind is str:
        return isinstance(value, str | os.PathLike)
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    return isinstance(value, kind)


@dataclass
class ReferenceOptions(PostTrainConfig):
    """Options of methods with a reference."""

    precompute_ref_log_probs: bool | None = option(
        None,
        "Score the data with the reference once, before training, into a cache on disk. True: and keep no second model "
        "while training; None: where more than one pass over the data is planned.",
        **SWITCH,
    )
    precompute_ref_batch_size: int | None = option(None, "Batch size of that; None: per_device_eval_batch_size.")


def _try_optimizer(config: PostTrainConfig) -> None:
    """Raises InputError for a schedule that its options do not make, or an optimizer whose package is missing: Trainer
    would find both when the model is loaded.
    """
    kind: Any = config.lr_scheduler_type
    options: Any = config.lr_scheduler_kwargs
    try:
        rates = torch.optim.SGD([torch.zeros(1)], config.learning_rate)
        get_scheduler(kind, rates, config.get_warmup_steps(100), 100, options)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        problem = str(error).rpartition("() ")[2]
        raise InputError(f"lr_scheduler_type: {kind.value} with lr_scheduler_kwargs: {problem}") from error
    try:
        Trainer.get_optimizer_cls_and_kwargs(config)
    except (ImportError, ValueError) as error:
        if re.search("install|import", str(error)):
            raise InputError(f"optim: {' '.join(str(error).split())}") from error


def check_arguments(
    trainer: Any, model: nn.Module | str | None, args: object, data_collator: Any, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """`kwargs` of a trainer class without those of TRL that change nothing. Raises InputError for what cannot be
    honoured.
    """
    if not isinstance(args, trainer.config_class):
        own = trainer.config_class.__name__
        mend = "after the model name all arguments (args=..., train_dataset=...)"
        if isinstance(args, TrainingArguments):
            mend = f"it takes the same options and the method's own: build a {own}"
        raise InputError(f"args must be a {own}, not a {type(args).__name__}: {mend}")
    args.check_changes()
    if args.model_init_kwargs and not isinstance(model, str):
        problem = "model_init_kwargs is for a model that is given by name, and this one is loaded already"
        raise InputError(f"{problem}: leave it out, or pass the name as model")
    kept = rules.checked_keywords(trainer.__name__, kwargs, inspect.signature(Trainer.__init__).parameters)
    if data_collator is not None or kept.get("compute_loss_func") is not None:
        problem = "data_collator and compute_loss_func cannot be replaced: layouts and losses are the method's own"
        third = f" (the third argument, a {type(data_collator).__name__}, is data_collator)"
        raise InputError(problem + third * (data_collator is not None))
    if model is None or kept.get("model_init") is not None:
        raise InputError(
            "pass model, not model_init: adapter, reference and prepared rows belong to one model, so build a trainer "
            "for each trial of a search over hyperparameters"
        )
    return kept


def check_optimizer(trainer: Any) -> None:
    """Raises InputError for an optimizer that lacks weights which are to be trained."""
    if trainer.optimizer is None:
        return
    held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    trained = {name: parameter for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    if lacking := [name for name, parameter in trained.items() if id(parameter) not in held]:
        found = f"{len(lacking)} of {len(trained)} weights that are trained (such as {lacking[0]})"
        raise InputError(f"optimizers: this one lacks {found}: give it those, or set their requires_grad to False")
