"""Keep files in output_dir while a run trains, for its report.

run.json: how the run is set up, on which machine, and what it was warned of. samples.json: greedy answers to a few
prompts before the first step and after the last; the generators' state is restored, so that training gives the same
numbers with and without, and the time counts into train_runtime. An error is a warning, unless other ranks would wait.
"""

import json
import logging
import platform
import subprocess
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .. import __version__
from ..data.chat import has_template_tokens
from ..data.dataset_type import AnyDatasets
from ..data.lengths import flat_ids
from ..engines import engine, launch
from ..errors import InputError
from ..generation import rollout
from ..generation.exact_match import answers_key, first_turn
from ..models.reference import REFERENCE_ADAPTER
from ..rollouts.options import PolicySamplerOptions
from ..scoring import forward as scoring
from ..scoring.layouts import Prompt
from ..trainer.interface import TrainerInterface
from ..trainer.output_dir import write_json
from ..trainer.run_fingerprint import describe_rows
from .run_folder import command_line

logger = logging.getLogger(__name__)
package_logger = logging.getLogger("hf_posttrain")
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "tokenizers")
SHARED_ARGUMENTS = {  # fields of TrainingArguments that a reader wants; all others are kept where they are not the default
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "optim",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "max_grad_norm",
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "activation_checkpointing",
    "neftune_noise_alpha",
    "seed",
}
_OF_PEFT = ("peft_version", "task_type", "base_model_name_or_path", "auto_mapping", "revision", "inference_mode")
_OF_OPTIMIZERS = ("learning_rate", "optim", "adam_", "weight_decay")
NUM_SAMPLES = 4  # sample answers
MAX_NEW_TOKENS = 96  # tokens of an answer, at most
MAX_PROMPT_TOKENS = 16  # tokens that a text without a prompt is continued from, at most
FAILED = "sample answers are missing"


@contextmanager
def warn_on_error(consequence: str, raised: bool = False) -> Iterator[None]:
    """An error inside becomes a warning that begins with `consequence`, and the run goes on. raised: let it out."""
    try:
        yield
    except Exception as error:
        if raised:
            raise
        logger.warning("%s: %s: %s", consequence, type(error).__name__, error)


class RunRecord(TrainerCallback):
    """Writes run.json on the first process: at the start of training and with each warning of this library.

    A resumed run keeps its start and its earlier warnings; a fresh one removes results and samples of an earlier run.
    """

    def __init__(self, trainer: TrainerInterface):
        self.trainer = trainer
        self.file = Path(trainer.args.output_dir, "run.json")
        self.record: dict[str, Any] = {}
        self.handler = WarningRecorder(self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        # A run that ended in an error has left its handler, and must not hear the warnings of this one.
        for handler in [one for one in package_logger.handlers if isinstance(one, WarningRecorder)]:
            package_logger.removeHandler(handler)
        # A fresh run might never write these, and those of an earlier run must not pass for its own.
        for name in () if state.global_step else ("samples.json", "all_results.json", "evaluations.json"):
            with warn_on_error(f"{name} of an earlier run stays"):
                self.file.with_name(name).unlink(missing_ok=True)
        with warn_on_error("run.json is missing"):
            self.record = describe_run(self.trainer) | {"warnings": []}
            if state.global_step and self.file.exists():
                with warn_on_error("run.json begins anew"):
                    earlier = json.loads(self.file.read_text(encoding="utf-8"))
                    warnings = [warning for warning in earlier["warnings"] if warning["step"] <= state.global_step]
                    self.record |= {"started": earlier["started"], "warnings": warnings}
            write_json(self.file, self.record)
            package_logger.addHandler(self.handler)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        package_logger.removeHandler(self.handler)

    def add_warning(self, message: str) -> None:
        """Keep a warning with the step that it came at, once."""
        if all(message != warning["message"] for warning in self.record["warnings"]):
            self.record["warnings"].append({"step": self.trainer.state.global_step, "message": message})
            write_json(self.file, self.record)


class WarningRecorder(logging.Handler):
    """Hands warnings of the library's loggers to a Record, as long as that lives: the loggers keep no trainer."""

    def __init__(self, owner: RunRecord):
        super().__init__(logging.WARNING)
        self.owner = weakref.ref(owner)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if (owner := self.owner()) is not None:
                owner.add_warning(record.getMessage())
        except Exception:
            self.handleError(record)


def describe_run(trainer: Any) -> dict[str, Any]:
    """Method, base model, arguments, weights, machine and versions of a PostTrainer that is about to train; as JSON."""
    args = trainer.args
    model = scoring.unwrap_model(trainer.model)
    name = scoring.causal_lm(model).config.name_or_path
    left_out = {field.name for field in fields(TrainingArguments)} - SHARED_ARGUMENTS - non_default_fields(args).keys()
    left_out |= {"output_dir", "gradient_checkpointing"}  # the latter is activation_checkpointing
    weights = [
        (_count_values(weight), weight.requires_grad)
        for name, weight in model.named_parameters()
        if f".{REFERENCE_ADAPTER}." not in name
    ]
    arguments = {field.name: getattr(args, field.name) for field in fields(args) if field.name not in left_out}
    if trainer.own_optimizer and trainer.optimizer is not None:
        held: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        rates = sorted({group.get("initial_lr", group["lr"]) for group in held.param_groups})
        arguments = {name: value for name, value in arguments.items() if not name.startswith(_OF_OPTIMIZERS)}
        arguments |= {"optim": type(held).__name__, "learning_rate": rates[0] if len(rates) == 1 else rates}
    kind = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
    cuda = args.device.type == "cuda"
    lora = None
    if isinstance(model, peft.PeftModel):
        given = model.active_peft_config.to_dict()
        lora = {name: given.get(name) for name in ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules")}
        chosen = non_default_fields(model.active_peft_config)
        lora |= {name: value for name, value in chosen.items() if name not in {*lora, *_OF_PEFT}}
        # PEFT may have spelt the modules out for each layer.
        if not isinstance(modules := lora["target_modules"], str | None):
            lora["target_modules"] = sorted({module.rpartition(".")[2] for module in modules})
    if rounds := getattr(args, "rounds", None):
        arguments["num_train_epochs"] = args.passes  # as given: over the rows of a round
    return {
        "method": trainer.method.name,
        "rounds": rounds and rounds.described(),
        "base_model": name,
        "base_model_is_local": Path(name).exists(),
        "lora": lora,
        "arguments": arguments,
        "trainer": None if kind.startswith(f"{package_logger.name}.") else kind,  # a class of the user's
        "weights": {"all": sum(n for n, _ in weights), "trained": sum(n for n, trained in weights if trained)},
        "train_rows": trainer.described.get("train_dataset"),
        "eval_rows": describe_rows(trainer, trainer.eval_dataset),
        "chat": is_chat(trainer),
        "eval_answers": answers_key(trainer, trainer.eval_dataset),
        # under ZeRO-3 the key is of this rank's part
        "second_model": None if engine.zero_stage(trainer.accelerator) == 3 else trainer.second_key,
        "rows_per_step": trainer.get_total_train_batch_size(args),
        "engine": launch.describe_launch(trainer).removeprefix("on engine "),
        "device": torch.cuda.get_device_name(args.device) if cuda else f"{args.device.type} ({platform.machine()})",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": find_commit(),
        "versions": {"hf_posttrain": __version__, "python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
    }


def is_chat(trainer: TrainerInterface) -> bool | None:
    """Did the training rows come through the chat template? None where that is not known."""
    rows = trainer.train_dataset
    if not isinstance(rows, datasets.Dataset):
        return None
    texts = {"prompt_ids", *trainer.method.rows.answers} & {*rows.column_names}  # and no candidates of a teacher
    first = [i for ids in flat_ids(rows.select([0]).select_columns([*texts])) for i in ids.to_pylist()]
    try:
        return has_template_tokens(trainer.tokenizer, first, trainer.args.chat_template_kwargs)
    except InputError:  # the template takes no such conversation
        return None


def _count_values(weight: Any) -> int:
    """Of a weight, also where bitsandbytes packs two values of 4 bits into a byte, or ZeRO-3 keeps a shard of them."""
    state = getattr(weight, "quant_state", None)
    return getattr(weight, "ds_numel", weight.numel()) if state is None else state.shape.numel()


def non_default_fields(options: Any) -> dict[str, Any]:
    """The fields of a dataclass with another value than their default, but for tokens and what JSON cannot hold."""
    plain = str | int | float | bool | list | dict | None
    found = {}
    for field in fields(options):
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(options, field.name)
        value = sorted(value) if isinstance(value, set | tuple) else value
        if field.init and value != default and isinstance(value, plain) and not field.name.endswith("_token"):
            found[field.name] = value
    return found


def find_commit() -> str | None:
    """The git commit of the current folder, with a + where files differ from it; None where there is none."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


class SampleCallback(TrainerCallback):
    """Asks before and after training; says in the log where it cannot."""

    def __init__(self, trainer: TrainerInterface):
        self.trainer = trainer
        self.file = Path(trainer.args.output_dir, "samples.json")
        self.asked: list[tuple[Prompt, list[int]]] = []
        self.samples: list[dict[str, Any]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The engine is ready by now: the answers of before, or of a resumed run those that were kept."""
        self.asked = []
        self.samples = []
        trainer = self.trainer
        resumed = state.global_step > 0
        if problem := find_obstacle(trainer):
            logger.info("no sample answers before and after training: %s", problem)
            return
        with warn_on_error(FAILED, raised=engine.shards(trainer.accelerator)):
            asked = pick_prompts(trainer.train_dataset if trainer.eval_dataset is None else trainer.eval_dataset)
            answers = [None] * len(asked) if resumed else self.generate(asked)
            # Set only now: where this failed, on_train_end does not try again.
            self.asked = asked
            if not state.is_world_process_zero:
                return
            decode = trainer.tokenizer.decode
            for (prompt, right), answer in zip(asked, answers, strict=True):
                expected = {"expected": decode(right, skip_special_tokens=True)} if right else {}
                self.samples.append({"prompt": decode(prompt), "before": answer, "after": None} | expected)
            if resumed:
                # Whatever the file of the run that is resumed holds
                with warn_on_error("sample answers from before training are missing"):
                    earlier = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else []
                    before = {sample["prompt"]: sample["before"] for sample in earlier}
                    for sample in self.samples:
                        sample["before"] = before.get(sample["prompt"])
                    if not all(sample["prompt"] in before for sample in self.samples):
                        logger.info("no sample answers from before training: %s of that run lacks them", self.file)
            with warn_on_error(FAILED):  # other ranks do not wait for the file
                write_json(self.file, self.samples)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The answers of after; none where SIGTERM asks for a quick end."""
        if not self.asked or self.trainer.preemption.happened:
            return
        with warn_on_error(FAILED, raised=engine.shards(self.trainer.accelerator)):
            for sample, answer in zip(self.samples, self.generate(self.asked), strict=False):  # other ranks have none
                sample["after"] = answer
            if state.is_world_process_zero:
                with warn_on_error(FAILED):
                    write_json(self.file, self.samples)

    def generate(self, asked: list[tuple[Prompt, list[int]]]) -> list[Any]:
        """A text for each question on the first process, none on others; all ranks call it."""
        trainer = self.trainer
        prompts = [prompt for prompt, _ in asked] if trainer.is_world_process_zero() else []
        with rollout.seeded(trainer.accelerator.device, trainer.args.seed):
            try:
                found = trainer.generate(prompts, MAX_NEW_TOKENS, batch_size=NUM_SAMPLES)
            except InputError as error:  # a model that cannot, on one process as on all
                logger.warning("no sample answers: %s", error)
                return [None] * len(prompts)
        texts = trainer.tokenizer.batch_decode(found, skip_special_tokens=True) if found else []
        ends = trainer.terminal_ids
        return [text if ids[-1] in ends else f"{text} …" for text, ids in zip(texts, found, strict=True)]


def find_obstacle(trainer: TrainerInterface) -> str | None:
    """Why the policy should not be asked: whole weights on one device, or whole rows, may be out of its reach."""
    args = trainer.args
    if trainer.train_dataset is None and trainer.eval_dataset is None:
        return "there are no rows"
    if args.parallelism_config is not None and args.parallelism_config.sp_size > 1:
        return "with sequence parallelism the model cannot generate"
    # To generate, FSDP and ZeRO gather the whole model on each device; it fits for sure only where the run does that.
    generates = args.eval_exact_match or isinstance(getattr(args, "sampler", None), PolicySamplerOptions)
    if engine.shards(trainer.accelerator) and not generates:
        return "they would gather all weights on each device, for which eval_exact_match: true would ask as well"
    return None


def pick_prompts(rows: AnyDatasets) -> list[tuple[Prompt, list[int]]]:
    """(prompt, ids of the right answer, or none) of a few prepared rows, packed or not: evenly spread over a data
    set (of a dict the first), the first of a stream.
    """
    if isinstance(rows, dict):
        rows = next(iter(rows.values()))
    if isinstance(rows, datasets.Dataset):
        rows = rows.select(sorted({n * len(rows) // NUM_SAMPLES for n in range(NUM_SAMPLES)}) if len(rows) else [])
    elif isinstance(rows, datasets.IterableDataset):
        rows = rows.take(NUM_SAMPLES)
    return [_read_question(row) for row in islice(rows, NUM_SAMPLES)]


def _read_question(row: dict[str, Any]) -> tuple[Prompt, list[int]]:
    prompt = row["prompt_ids"]
    answer = row.get("chosen_ids") or row.get("completion_ids") or []
    if answer and isinstance(answer[0], list):  # packed
        return _read_question({name: value[0] for name, value in row.items() if isinstance(value, list)})
    if len(prompt) < 2:  # a text: its beginning is the prompt
        opening = max(1, min(MAX_PROMPT_TOKENS, len(answer) // 2))
        return Prompt.of(row | {"prompt_ids": [*prompt, *answer[:opening]]}), answer[opening:]
    return Prompt.of(row), first_turn(row) if row.get("label", True) else []
