"""Preflight check of a recipe: its data, tokens, plan and memory. Seconds on CPU, without training or writing files."""

import dataclasses
import json
import logging
import os
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.recorded_scores import recorded_column
from ..errors import InputError, error_context
from ..methods import METHODS
from ..recipe import build
from ..recipe.sections import Recipe
from ..rollouts.options import SAMPLERS
from ..trainer.rules import ADAPTER_RATE_FACTOR

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..data.audit import DataAudit
    from ..models.config import TeacherSection
    from ..trainer.base import PostTrainer
    from ..trainer.config import PostTrainConfig
    from .memory import MemoryEstimate
    from .placement import Engine
    from .plan import Plan
    from .probe import Probe
    from .token_preview import TokenAudit

_COMMON_OPTIONS = (  # options of all methods with defaults that the page lists
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "optim",
    "weight_decay",
    "max_grad_norm",
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size",
    "bf16",
    "activation_checkpointing",
    "max_length",
    "layout",
    "logging_steps",
    "eval_strategy",
    "save_strategy",
    "save_steps",
    "seed",
    "report_to",
)
_BF16_MIN_WIDTH = 512  # hidden size from which a CPU that multiplies bf16 was faster with it
_WRAPPER = textwrap.TextWrapper(110, "  ", "    ", replace_whitespace=False, break_on_hyphens=False)


@dataclass
class Check:
    """Result of a check: parts with lines() for the page, and with warnings() of problems that would ruin training."""

    path: str  # file of the recipe
    method: str
    recipe: dict[str, Any]  # as resolved
    given: dict[str, Any]  # keys of the train section that the recipe sets
    defaulted: dict[str, Any]  # common and method options that it does not set, with the values used
    data: dict[str, "DataAudit"]  # of train, and of eval if there is one
    tokens: "TokenAudit"
    plan: "Plan"
    memory: "MemoryEstimate"
    probe: "Probe | None" = None  # with --probe
    notes: list[str] = field(default_factory=list)  # warnings that were logged during the check, harmless to training
    servers: list[str] = field(default_factory=list)  # current problems of the servers that the run would use
    teachers: list[str] = field(default_factory=list)  # a line about each
    adapter: list[str] = field(default_factory=list)  # a line about a new or loaded adapter

    @property
    def warnings(self) -> list[str]:
        """Problems that would ruin training."""
        parts: list[Any] = [*self.data.values(), self.tokens, self.plan, self.memory]
        parts += [self.probe] if self.probe else []
        return [warning for part in parts for warning in part.warnings()]

    @property
    def status(self) -> int:
        """The exit code."""
        return 1 if self.warnings or self.servers else 0

    def to_json(self) -> str:
        """Return everything as JSON, with null in place of numbers that are not finite."""
        content = {"status": self.status, "warnings": self.warnings} | dataclasses.asdict(self)
        return json.dumps(json.loads(json.dumps(content, default=str), parse_constant=lambda _: None), indent=2)

    def text(self, color: bool) -> str:
        """Return the page that --check prints.

        color: whether it is for a terminal. Otherwise trained tokens are in [[double brackets]].
        """
        from .token_preview import BOLD, PLAIN, RED, YELLOW

        def paint(text: str, code: str) -> str:
            return f"{code}{text}{PLAIN}" if color else text

        # title and lines of each section
        sections: list[tuple[str, Iterable[str]]] = [
            (
                "Recipe",
                [
                    f"method {self.method}, model {self.recipe['model']['name_or_path']}, read from {self.path}",
                    "given: " + ", ".join(f"{name}={value}" for name, value in self.given.items()),
                    "defaulted: " + ", ".join(f"{name}={value}" for name, value in self.defaulted.items()),
                    *self.teachers,
                    *self.adapter,
                ],
            )
        ]
        sections += [(f"Data: {audit.name}", audit.lines()) for audit in self.data.values()]
        sections.append(("Tokens", self.tokens.lines()))
        for sample in self.tokens.samples:
            sections.append((sample.title(), [*sample.lines(color), f"boundary: {sample.boundary}"]))
        sections += [("Plan", self.plan.lines()), ("Memory", self.memory.lines())]
        sections += [("Probe", self.probe.lines())] if self.probe else []

        # the page: sections, then notes, warnings and the verdict
        page = []
        for title, lines in sections:
            page += ["", paint(title, BOLD), *(part for line in lines for part in _WRAPPER.wrap(line) or [""])]
        page += ["", *(f"{paint('note', YELLOW)}: {note}" for note in self.notes)]
        page += [f"{paint('warning', RED)}: {warning}" for warning in (*self.warnings, *self.servers)]
        verdict = "It can run, but would not train well." if self.warnings else "It can run."
        verdict = "It cannot run now. See the warnings about its servers." if self.servers else verdict
        return "\n".join([*page, paint(verdict, BOLD)])


def check(
    recipe: Recipe, with_probe: bool = False, config_file: Path | None = None, memory_gib: float | None = None
) -> Check | None:
    """Check a recipe without training it. All ranks call it.

    Options of engines and GPUs are checked in full on a machine with GPUs and in a launch. Elsewhere only their names
    and types are checked, so that a laptop can check a recipe for a cluster.

    Args:
        recipe: The recipe.
        with_probe: Whether to train one step on the longest batch.
        config_file: A file of accelerate_configs. The plan and the memory are of a launch with it.
        memory_gib: Memory of a device in GiB, in place of this machine's.

    Returns:
        The result; None on every rank but the first.

    Raises:
        InputError: The recipe cannot run.
    """
    # imports that take seconds come first
    build.import_quietly(METHODS[recipe.method].module)
    import peft
    import torch

    launched = "LOCAL_RANK" in os.environ or any(name.startswith("ACCELERATE_") for name in os.environ)
    checks_hardware = launched or torch.cuda.is_available()
    trainer_class, config = build.configure(recipe if checks_hardware else build.without_hardware_options(recipe))
    # the sampler is planned on any machine
    if "sampler" in recipe.train:
        config.sampler = SAMPLERS.build("sampler", recipe.train["sampler"])  # type: ignore[attr-defined]
    if recipe.rounds:
        config.rounds = recipe.rounds  # type: ignore[attr-defined]
    from ..data.lengths import warn_if_too_long
    from ..data.prepare import notes_logger
    from ..models.adapters import describe_adapter
    from ..monitoring.versions import newer_than_tested
    from ..recipe.datasets import audit_data, prepare_data
    from ..trainer.saving import check_folder
    from . import memory, placement, plan, probe, token_preview
    from .auto_checkpointing import disable_unneeded_checkpointing

    # on all ranks: the first steps of a run, and the warnings that they log
    tokenizer, peft_config = build.check_models(recipe)
    logger = logging.getLogger("hf_posttrain")
    logged = BufferingHandler(capacity=10_000)
    logged.setLevel(logging.WARNING)
    logger.addHandler(logged)
    notes_logger.disabled = True  # the page reports the same
    try:
        rows, raw = prepare_data(recipe, trainer_class, tokenizer, config)
        engine = placement.engine_from_file(config_file) if config_file else placement.engine_from_config(config)
        disable_unneeded_checkpointing(recipe, config, trainer_class, rows, engine, memory_gib)
        level = logger.level
        logger.setLevel(logging.WARNING)  # the page reports what the trainer would log about the models
        try:
            models, config, policy = build_skeletons(recipe, tokenizer, peft_config, config, rows)
        finally:
            logger.setLevel(level)
        warn_if_too_long(rows["train"], models[0].config, config)
        with error_context(recipe.where("train.output_dir")):
            check_folder(policy, str(config.output_dir), config.merge_lora)
        check_resumption(recipe, config, trainer_class, rows["train"], policy, checks_hardware)
        estimate = memory.estimate(recipe, config, trainer_class, rows, engine, memory_gib)
        probed = probe.probe(recipe, tokenizer, peft_config, rows["train"]) if with_probe else None
        if probed is not None and config_file is None:  # the estimate is for the step of the probe
            probed.estimate = max(size for name, size in estimate.phases.items() if name != "evaluation")
    finally:
        logger.removeHandler(logged)
        notes_logger.disabled = False
    if config.process_index != 0:
        return None

    # on the first rank alone: the options that the recipe does not set, and parts that need no other rank
    unset = {option.name for option in dataclasses.fields(config)} - recipe.train.keys()
    method_options = trainer_class.config_class.__annotations__
    values = {name: getattr(config, name) for name in (*_COMMON_OPTIONS, *method_options) if name in unset}
    defaulted = {name: getattr(value, "value", value) for name, value in values.items() if value is not None}
    resolved = recipe.to_dict()
    data = audit_data(recipe, raw, tokenizer, config)
    return Check(
        str(recipe.path),
        recipe.method,
        resolved,
        resolved["train"],
        defaulted,
        data,
        tokens=token_preview.audit_tokens(recipe, tokenizer, config, models, raw),
        plan=plan.plan(rows["train"], trainer_class, config, models, engine.processes),
        memory=estimate,
        probe=probed,
        notes=[record.getMessage() for record in logged.buffer]
        + bf16_notes(recipe, config, engine, models[0])
        + vllm_notes(recipe, config)
        + lora_rate_notes(recipe, config)
        + [note for note in (newer_than_tested(), build.earlier_run_note(config)) if note],
        servers=[str(problem) for problem in build.server_problems(recipe, config, peft_config, rows["train"])],
        teachers=[describe_teacher(name, section) for name, section in recipe.teacher_sections()]
        + describe_recorded(config),
        adapter=[describe_adapter(policy, peft_config)] if isinstance(policy, peft.PeftModel) else [],
    )


def build_skeletons(
    recipe: Recipe,
    tokenizer: "PreTrainedTokenizerBase",
    peft_config: "PeftConfig | None",
    config: "PostTrainConfig",
    rows: dict[str, Any],
) -> tuple[list[Any], Any, Any]:
    """Return the causal LMs of a run without memory, prepared as the trainer prepares them.

    Args:
        recipe: The recipe.
        tokenizer: Tokenizer of the policy.
        peft_config: Adapter of the policy, if it has a new one.
        config: Config of the run.
        rows: Prepared rows of each data set.

    Returns:
        The models, the policy first; the Config that the models support; and the policy with its adapter, if any.

    Raises:
        InputError: Adapters, tokens or options do not fit the models.
    """
    from ..models.load import check_tokenizer_fits, load_skeleton, load_tokenizer, weights_dtype, with_saved_adapter
    from ..models.moving_average import check_average
    from ..models.policy import with_supported_checkpointing
    from ..scoring.forward import causal_lm
    from ..scoring.layout_selection import choose_layout
    from ..teachers.self_teacher import OPTION
    from ..trainer.policy import make_policy

    models: list[Any] = []
    policy: Any = None
    for key, section in recipe.models():
        is_policy = section is recipe.model
        with error_context(recipe.where(f"{key}.name_or_path")):
            model: Any = load_skeleton(section)
            all_trained = is_policy and section.lora is None and not section.adapter
            model.to(weights_dtype(section, model.config, all_trained, config.device))
            model = with_saved_adapter(model, section, is_policy)
        if is_policy:
            config = with_supported_checkpointing(model, config)
            model, _ = make_policy(model, peft_config, config)
            policy = model
            if any(teacher.self == "ema" for _, teacher in recipe.teacher_sections()):
                check_average(OPTION, (weight.dtype for weight in model.parameters() if weight.requires_grad))
        inner = causal_lm(model)
        own_tokenizer = getattr(section, "own_tokenizer", False)
        inputs = (load_tokenizer(section),) if own_tokenizer else (tokenizer, *rows.values())
        check_tokenizer_fits(inputs[0], inner.config, type(inner).__name__, *inputs[1:])
        models.append(inner)
    choose_layout(models, config.layout, config.max_length)
    return models, config, policy


def check_resumption(
    recipe: Recipe,
    config: "PostTrainConfig",
    trainer_class: "type[PostTrainer]",
    rows: Any,
    policy: Any,
    on_hardware: bool,
) -> None:
    """Check that the options, training rows and adapter of a recipe are those of the checkpoint that it resumes.

    The run also compares its weights and its engine.

    Args:
        recipe: The recipe.
        config: Config of the run.
        trainer_class: Trainer class of the run.
        rows: Prepared training rows.
        policy: The policy with its adapter, without weights.
        on_hardware: Whether the config has all options. Without it, those of `without_hardware_options` and the
            precision, whose default depends on the machine, are not compared.

    Raises:
        InputError: They differ, or the checkpoint is incomplete.
    """
    from ..trainer.checkpoint import find_checkpoint, settings_problem, stored_launch
    from ..trainer.run_fingerprint import adapter_settings, describe_options, describe_rows, hashed_columns

    build.check_checkpoint(recipe, config)
    checkpoint = config.resume_from_checkpoint
    if checkpoint in (True, "auto"):
        checkpoint = find_checkpoint(str(config.output_dir))
    if checkpoint is None:
        return
    description = describe_options(config, trainer_class.method)
    if not on_hardware:
        omitted = (*(name for name in build.HARDWARE_OPTIONS if name != "sampler"), "bf16", "fp16")
        description = {name: value for name, value in description.items() if not name.startswith(omitted)}
    description["adapter"] = adapter_settings(policy)
    description["train_dataset"] = describe_rows(rows, hashed_columns(trainer_class.data_method, config))
    folder = Path(checkpoint)
    if problem := settings_problem(folder, stored_launch(folder), description, config, trainer_class.method):
        raise InputError(f"{recipe.where('train.resume_from_checkpoint')}: {problem}")


def describe_teacher(name: str, section: "TeacherSection") -> str:
    """Return a line about a teacher of a recipe."""
    source = str(section.name_or_path)
    if section.self:
        average = f"the moving average of the student's weights ({section.ema:g})"
        source = "the student as training starts" if section.self == "start" else average
    elif section.url:
        source = f"on the server {section.url}, tokens of {section.name_or_path}"
    details = ["with its own tokenizer"] if section.own_tokenizer else []
    details += [f"reads {section.prompt!r} in place of the prompt"] if section.prompt is not None else []
    return f"{name}: {', '.join([source, *details])}"


def describe_recorded(config: "PostTrainConfig") -> list[str]:
    """Return a line about log-probabilities of a teacher that are recorded in the rows, if a Config reads them."""
    column = recorded_column(config)
    return [] if column is None else [f"teacher: log-probabilities recorded in the column {column!r} of the rows"]


def vllm_notes(recipe: Recipe, config: object) -> list[str]:
    """Return a note if vLLM samples in the training process, and is not installed on this machine."""
    from ..rollouts.vllm import check_installed

    for section, options in (("train", config), ("rounds", recipe.rounds)):
        try:
            check_installed(getattr(options, "sampler", None))
        except InputError as error:
            return [f"{recipe.where(f'{section}.sampler')}: on the machine that trains, {section}.{error}"]
    return []


def lora_rate_notes(recipe: Recipe, config: "PostTrainConfig") -> list[str]:
    """Return a note if an adapter is trained at the default learning rate, which is for training of all weights."""
    if (recipe.model.lora is None and not recipe.model.adapter) or "learning_rate" in recipe.train:
        return []
    rate = config.learning_rate
    adapter_rate = ADAPTER_RATE_FACTOR * rate
    fix = f"Adapters require about {ADAPTER_RATE_FACTOR} times as much: set train.learning_rate={adapter_rate:g}"
    return [f"learning_rate {rate:g} is the default for training of all weights. {fix}"]


def bf16_notes(recipe: Recipe, config: "PostTrainConfig", engine: "Engine", model: "PreTrainedModel") -> list[str]:
    """Return a note for a run on a CPU whose precision is not the fastest.

    Without a precision in the recipe, it recommends bf16 if the CPU multiplies bf16 and the model is not small: in a
    small model casts cost as much as the faster products save.
    """
    from ..scoring.cpu import bf16_instructions, lacks_bf16_instructions

    if config.bf16 and not engine.gpu and lacks_bf16_instructions():
        slower = "several times as long as in float32 (products of 1,600 rows took 4.6 times as long)"
        return [f"this processor has no bf16 instructions, and a step takes {slower}: set train.bf16=false"]
    is_unset = not (config.bf16 or config.fp16 or {"bf16", "fp16"} & recipe.train.keys())
    width = model.config.get_text_config().hidden_size
    if engine.gpu or not is_unset or width < _BF16_MIN_WIDTH or not (feature := bf16_instructions()):
        return []
    gain = "a step takes 0.6 to 0.8 times as long (measured on 44M weights), its loss is that of float32 to 0.4 %"
    return [f"this processor has {feature}: with train.bf16=true {gain}"]
