"""Preflight: what would this recipe train on, and does it fit? Seconds on CPU, no training, nothing is written."""

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

from ..errors import InputError, error_context
from ..methods import METHODS
from ..recipe import build
from ..recipe.sections import Recipe
from ..rollouts.options import SAMPLERS

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..trainer.config import PostTrainConfig

_USUAL = (  # options of all methods whose defaults are shown
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
_WIDE = 512  # hidden size from which a CPU that multiplies bf16 was found quicker with it
_WRAPPER = textwrap.TextWrapper(110, "  ", "    ", replace_whitespace=False, break_on_hyphens=False)


@dataclass
class Check:
    """What was found: five parts, each with lines() for people and warnings() of what would ruin training."""

    path: str  # the recipe's file
    method: str
    recipe: dict[str, Any]  # as resolved
    given: dict[str, Any]  # keys of the train section that the recipe gives
    defaulted: dict[str, Any]  # the usual keys and the method's own that it does not give, with the values used
    data: dict[str, Any]  # DataAudit of train, and of eval where there is one
    tokens: Any  # TokenAudit
    plan: Any  # Plan
    memory: Any  # MemoryEstimate
    probe: Any = None  # Probe, with --probe
    notes: list[str] = field(default_factory=list)  # warnings that were logged on the way and do no harm to training
    servers: list[str] = field(default_factory=list)  # what is wrong with those that the run would ask, now
    teachers: list[str] = field(default_factory=list)  # each in a line
    adapter: list[str] = field(default_factory=list)  # what a new or loaded one acts on, in a line

    @property
    def warnings(self) -> list[str]:
        made = [*self.data.values(), self.tokens, self.plan, self.memory, *([self.probe] if self.probe else [])]
        return [warning for part in made for warning in part.warnings()]

    @property
    def status(self) -> int:
        return 1 if self.warnings or self.servers else 0  # the exit code

    def to_json(self) -> str:
        """Everything, with null in place of numbers that are not finite."""
        found = {"status": self.status, "warnings": self.warnings} | dataclasses.asdict(self)
        return json.dumps(json.loads(json.dumps(found, default=str), parse_constant=lambda _: None), indent=2)

    def text(self, colour: bool) -> str:
        """The page that --check prints. colour: for a terminal; else trained tokens are in [[double brackets]]."""
        from .token_preview import BOLD, PLAIN, RED, YELLOW

        def paint(words: str, code: str) -> str:
            return f"{code}{words}{PLAIN}" if colour else words

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
            sections.append((sample.title(), [*sample.lines(colour), f"boundary: {sample.boundary}"]))
        for title, part in (("Plan", self.plan), ("Memory", self.memory), ("Probe", self.probe)):
            sections += [(title, part.lines())] if part else []
        # the page: sections, then notes, warnings and the verdict
        page = []
        for title, lines in sections:
            page += ["", paint(title, BOLD), *(part for line in lines for part in _WRAPPER.wrap(line) or [""])]
        page += ["", *(f"{paint('note', YELLOW)}: {note}" for note in self.notes)]
        page += [f"{paint('warning', RED)}: {warning}" for warning in (*self.warnings, *self.servers)]
        verdict = "It can run, but would not train well." if self.warnings else "It can run."
        verdict = "It could not run now: see what is said of its servers." if self.servers else verdict
        return "\n".join([*page, paint(verdict, BOLD)])


def check(
    recipe: Recipe, with_probe: bool = False, config_file: Path | None = None, device_memory: float | None = None
) -> Check | None:
    """Everything about a recipe that shows without training it; None on every rank but the first, which all call it.

    config_file: plan and memory are those of a launch by this file of accelerate_configs. device_memory: GiB, in place
    of this machine's. What the train section asks of engines and GPUs is checked where it is launched for them, and
    otherwise for names and types alone: a laptop can check for a cluster. Raises InputError for what cannot run.
    """
    # what torch needs seconds for comes first, and in the quick way
    build.import_quietly(METHODS[recipe.method].module)
    import torch

    launched = "LOCAL_RANK" in os.environ or any(name.startswith("ACCELERATE_") for name in os.environ)
    at_home = launched or torch.cuda.is_available()
    trainer_class, config = build.configure(recipe if at_home else build.without_hardware_options(recipe))
    # the sampler is planned wherever the check runs
    if "sampler" in recipe.train:
        config.sampler = SAMPLERS.build("sampler", recipe.train["sampler"])
    from ..data.lengths import warn_if_too_long
    from ..data.prepare import notes_logger
    from ..monitoring.versions import newer_than_tested
    from ..recipe.datasets import audit_data, prepare_data
    from . import memory, placement, plan, probe, token_preview
    from .auto_checkpointing import disable_unneeded_checkpointing

    # on all ranks: what a run does first, and the warnings that are logged meanwhile
    tokenizer, peft_config = build.check_models(recipe)
    logger = logging.getLogger("hf_posttrain")
    logged = BufferingHandler(capacity=10_000)
    logged.setLevel(logging.WARNING)
    logger.addHandler(logged)
    notes_logger.disabled = True  # the page says it
    try:
        rows, raw = prepare_data(recipe, trainer_class, tokenizer, config)
        level = logger.level
        logger.setLevel(logging.WARNING)  # The page says what the trainer would say of the models.
        try:
            models, config, adapter = fitted_models(recipe, tokenizer, peft_config, config, rows)
        finally:
            logger.setLevel(level)
        warn_if_too_long(rows["train"], models[0].config, config)
        engine = placement.engine_from_file(config_file) if config_file else placement.requested_engine(config)
        disable_unneeded_checkpointing(recipe, config, trainer_class, rows, engine, device_memory)
        estimate = memory.estimate(recipe, config, trainer_class, rows, engine, device_memory)
        probed = probe.probe(recipe, tokenizer, peft_config, rows["train"]) if with_probe else None
        if probed is not None and config_file is None:  # the estimate is of what the probe has run
            probed.estimate = max(size for name, size in estimate.phases.items() if name != "evaluation")
    finally:
        logger.removeHandler(logged)
        notes_logger.disabled = False
    if config.process_index != 0:
        return None

    # on the first rank alone: the options that the recipe leaves open, and what needs no other rank
    known = {option.name for option in dataclasses.fields(config)} - recipe.train.keys()
    own = trainer_class.config_class.__annotations__
    values = {name: getattr(config, name) for name in (*_USUAL, *own) if name in known}
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
        + quicker_on_cpu(recipe, config, engine, models[0])
        + [said for said in (newer_than_tested(),) if said]
        + missing_vllm(recipe, config),
        servers=[str(problem) for problem in build.server_problems(recipe, config, peft_config)],
        teachers=[describe_teacher(name, section) for name, section in recipe.teacher_sections()],
        adapter=adapter,
    )


def fitted_models(
    recipe: Recipe,
    tokenizer: "PreTrainedTokenizerBase",
    peft_config: "PeftConfig | None",
    config: "PostTrainConfig",
    rows: dict[str, Any],
) -> tuple[list[Any], Any, list[str]]:
    """Return the causal LMs of a run without memory, the policy first, each prepared as by the trainer; the Config as
    the models support it; and a line on what the adapter acts on, if there is one.

    Raises InputError for what the trainer would reject: adapters, tokens and options that do not fit the models.
    """
    import peft

    from ..models.adapters import describe_adapter
    from ..models.load import check_tokenizer_fits, load_skeleton, load_tokenizer, weights_dtype, with_saved_adapter
    from ..models.policy import with_supported_checkpointing
    from ..scoring.forward import causal_lm
    from ..scoring.layout_selection import choose_layout
    from ..teachers.self_teacher import check_average
    from ..trainer.policy import make_policy

    models: list[Any] = []
    adapter: list[str] = []
    for key, section in recipe.models():
        policy = section is recipe.model
        with error_context(recipe.where(f"{key}.name_or_path")):
            model: Any = load_skeleton(section)
            whole = policy and section.lora is None and not section.adapter
            model.to(weights_dtype(section, model.config, whole, config.device))
            model = with_saved_adapter(model, section, policy)
        if policy:
            config = with_supported_checkpointing(model, config)
            model, _ = make_policy(model, peft_config, config)
            adapter = [describe_adapter(model)] if isinstance(model, peft.PeftModel) else []
            if any(taught.self == "ema" for _, taught in recipe.teacher_sections()):
                check_average(weight.dtype for weight in model.parameters() if weight.requires_grad)
        inner = causal_lm(model)
        own = getattr(section, "own_tokenizer", False)
        read = (load_tokenizer(section),) if own else (tokenizer, *rows.values())
        check_tokenizer_fits(read[0], inner.config, type(inner).__name__, *read[1:])
        models.append(inner)
    choose_layout(models, config.layout, config.max_length)
    return models, config, adapter


def describe_teacher(name: str, section: Any) -> str:
    """A teacher of a recipe in a line."""
    said = section.name_or_path
    if section.self:
        average = f"the moving average of the student's weights ({section.ema:g})"
        said = "the student as training starts" if section.self == "start" else average
    elif section.url:
        said = f"on the server {section.url}, tokens of {section.name_or_path}"
    more = ["with its own tokenizer"] if section.own_tokenizer else []
    more += [f"reads {section.prompt!r} in place of the prompt"] if section.prompt is not None else []
    return f"{name}: {', '.join([said, *more])}"


def missing_vllm(recipe: Recipe, config: Any) -> list[str]:
    """Return a note if vLLM is to sample in the process that trains, and is not installed on this machine."""
    from ..rollouts.vllm import check_installed

    for section, options in (("train", config), ("rounds", recipe.rounds)):
        try:
            check_installed(getattr(options, "sampler", None))
        except InputError as error:
            return [f"{recipe.where(f'{section}.sampler')}: on the machine that trains, {section}.{error}"]
    return []


def quicker_on_cpu(recipe: Recipe, config: Any, engine: Any, model: "PreTrainedModel") -> list[str]:
    """The advice to train in bf16, for a run on a CPU that multiplies it, where the recipe leaves it open. In a small
    model casts cost what products save.
    """
    from ..scoring.cpu import bf16_instructions

    left_open = not (config.bf16 or config.fp16 or {"bf16", "fp16"} & recipe.train.keys())
    width = model.config.get_text_config().hidden_size
    if engine.gpu or not left_open or width < _WIDE or not (has := bf16_instructions()):
        return []
    gain = "a step takes 0.6 to 0.8 times as long (measured on 44M weights), its loss is that of float32 to 0.4 %"
    return [f"this processor has {has}: with train.bf16=true {gain}"]
