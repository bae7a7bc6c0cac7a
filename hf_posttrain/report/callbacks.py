"""Callbacks that write files for the report to output_dir during a run.

run.json contains the settings of the run, its machine and its warnings. samples.json contains greedy answers to a few
prompts before the first step and after the last one. The state of the random generators is restored, so that the
results of training do not depend on the samples. Their time counts toward train_runtime. An error becomes a warning,
unless other ranks would wait.
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
from ..data.lengths import flat_token_ids
from ..engines import engine, launch
from ..errors import InputError
from ..generation import rollout
from ..generation.exact_match import answers_key, first_turn
from ..models.reference import REFERENCE_ADAPTER
from ..monitoring.reporters import reporter_places
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
SHARED_ARGUMENTS = {  # fields of TrainingArguments that are always recorded; others only with a non-default value
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
_INTERNAL_PEFT_FIELDS = (
    "peft_version",
    "task_type",
    "base_model_name_or_path",
    "auto_mapping",
    "revision",
    "inference_mode",
)
_OPTIMIZER_OPTIONS = ("learning_rate", "optim", "adam_", "weight_decay")
"""Options, or prefixes of options, that do not apply to an optimizer of the user."""
NUM_SAMPLES = 4
"""Number of sample answers."""
MAX_NEW_TOKENS = 96
"""Maximum length of a sample answer."""
MAX_PROMPT_TOKENS = 16
"""Maximum number of tokens of a text without a prompt that serve as the prompt."""
MISSING_SAMPLES = "sample answers are missing"


@contextmanager
def warn_on_error(consequence: str, reraise: bool = False) -> Iterator[None]:
    """Log an error that is raised inside as a warning.

    Args:
        consequence: Start of the warning.
        reraise: Whether to raise the error instead.
    """
    try:
        yield
    except Exception as error:
        if reraise:
            raise
        logger.warning("%s: %s: %s", consequence, type(error).__name__, error)


class RunRecord(TrainerCallback):
    """Callback that writes run.json on the first process, at the start of training and with each warning.

    A resumed run keeps its start time and its earlier warnings. A new run removes the results and samples of an earlier
    run in the same folder.

    Args:
        trainer: A PostTrainer.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self.trainer = trainer
        self.file = Path(trainer.args.output_dir, "run.json")
        self.record: dict[str, Any] = {}
        self.handler = WarningRecorder(self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write run.json, and start to record warnings."""
        if not state.is_world_process_zero:
            return
        # The handler of a run that ended with an error must not record the warnings of this run.
        for handler in [item for item in package_logger.handlers if isinstance(item, WarningRecorder)]:
            package_logger.removeHandler(handler)
        # A new run may not write these files, and must not appear to have the results of an earlier run.
        for name in () if state.global_step else ("samples.json", "all_results.json", "evaluations.json"):
            with warn_on_error(f"{name} of an earlier run cannot be removed"):
                self.file.with_name(name).unlink(missing_ok=True)
        with warn_on_error("run.json is missing"):
            self.record = describe_run(self.trainer) | {"warnings": []}
            if state.global_step and self.file.exists():
                with warn_on_error("run.json lacks the start and the warnings of the resumed run"):
                    earlier = json.loads(self.file.read_text(encoding="utf-8"))
                    warnings = [warning for warning in earlier["warnings"] if warning["step"] <= state.global_step]
                    self.record |= {"started": earlier["started"], "warnings": warnings}
            write_json(self.file, self.record)
            package_logger.addHandler(self.handler)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record where the reporters show the run. They have started when it is logged for the first time."""
        if state.is_world_process_zero and "reporters" not in self.record:
            with warn_on_error("run.json lacks the places of the reporters"):
                self.record["reporters"] = reporter_places(args)
                write_json(self.file, self.record)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop to record warnings."""
        package_logger.removeHandler(self.handler)

    def add_warning(self, message: str) -> None:
        """Record a warning with its step, unless the same one is recorded already."""
        if all(message != warning["message"] for warning in self.record["warnings"]):
            self.record["warnings"].append({"step": self.trainer.state.global_step, "message": message})
            write_json(self.file, self.record)


class WarningRecorder(logging.Handler):
    """Handler that adds the warnings of this package to a RunRecord, to which it has only a weak reference.

    Otherwise the loggers would keep the trainer alive.
    """

    def __init__(self, owner: RunRecord) -> None:
        super().__init__(logging.WARNING)
        self.owner = weakref.ref(owner)

    def emit(self, record: logging.LogRecord) -> None:
        """Add a warning to the owner."""
        try:
            if (owner := self.owner()) is not None:
                owner.add_warning(record.getMessage())
        except Exception:
            self.handleError(record)


def describe_run(trainer: TrainerInterface) -> dict[str, Any]:
    """Return the method, base model, arguments, weights, machine and versions of a run, as values of JSON."""
    args = trainer.args
    model = scoring.unwrap_model(trainer.model)
    name = scoring.causal_lm(model).config.name_or_path
    left_out = {field.name for field in fields(TrainingArguments)} - SHARED_ARGUMENTS - non_default_fields(args).keys()
    left_out |= {"output_dir", "gradient_checkpointing"}  # the latter is recorded as activation_checkpointing
    weights = [
        (_count_values(weight), weight.requires_grad)
        for name, weight in model.named_parameters()
        if f".{REFERENCE_ADAPTER}." not in name
    ]
    arguments = {field.name: getattr(args, field.name) for field in fields(args) if field.name not in left_out}
    if trainer.has_custom_optimizer and trainer.optimizer is not None:
        optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        rates = sorted({group.get("initial_lr", group["lr"]) for group in optimizer.param_groups})
        arguments = {name: value for name, value in arguments.items() if not name.startswith(_OPTIMIZER_OPTIONS)}
        arguments |= {"optim": type(optimizer).__name__, "learning_rate": rates[0] if len(rates) == 1 else rates}
    class_name = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
    is_cuda = args.device.type == "cuda"

    lora = None
    if isinstance(model, peft.PeftModel):
        options = model.active_peft_config.to_dict()
        lora = {name: options.get(name) for name in ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules")}
        non_defaults = non_default_fields(model.active_peft_config)
        lora |= {name: value for name, value in non_defaults.items() if name not in {*lora, *_INTERNAL_PEFT_FIELDS}}
        # PEFT may list the modules of each layer
        if not isinstance(modules := lora["target_modules"], str | None):
            lora["target_modules"] = sorted({module.rpartition(".")[2] for module in modules})
    if rounds := getattr(args, "rounds", None):
        arguments["num_train_epochs"] = args.passes  # the option of the user, passes over the rows of a round
    return {
        "method": trainer.method.name,
        "rounds": rounds and rounds.fingerprint(),
        "base_model": name,
        "base_model_is_local": Path(name).exists(),
        "lora": lora,
        "arguments": arguments,
        "trainer": None if class_name.startswith(f"{package_logger.name}.") else class_name,  # a class of the user
        "weights": {"all": sum(n for n, _ in weights), "trained": sum(n for n, trained in weights if trained)},
        "train_rows": trainer.run_description.get("train_dataset"),
        "eval_rows": describe_rows(trainer.eval_dataset, trainer.data_method.rows.columns),
        "chat": is_chat(trainer),
        "eval_answers": answers_key(trainer, trainer.eval_dataset),
        # with ZeRO-3 the key would only describe the shard of this rank
        "second_model": None if engine.zero_stage(trainer.accelerator) == 3 else trainer.second_key,
        "rows_per_step": trainer.get_total_train_batch_size(args),
        "engine": launch.describe_launch(trainer).removeprefix("on engine "),
        "device": torch.cuda.get_device_name(args.device) if is_cuda else f"{args.device.type} ({platform.machine()})",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": find_commit(),
        "versions": {"hf_posttrain": __version__, "python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
    }


def is_chat(trainer: TrainerInterface) -> bool | None:
    """Return whether the training rows were written by the chat template, or None if that is not known."""
    rows = trainer.train_dataset
    if not isinstance(rows, datasets.Dataset):
        return None
    columns = {"prompt_ids", *trainer.method.rows.answers} & {*rows.column_names}  # without candidates of a teacher
    first = [i for ids in flat_token_ids(rows.select([0]).select_columns([*columns])) for i in ids.to_pylist()]
    try:
        return has_template_tokens(trainer.tokenizer, first, trainer.args.chat_template_kwargs)
    except InputError:  # the template rejects the conversation of the test
        return None


def _count_values(weight: torch.Tensor) -> int:
    """Return the number of values of a weight.

    bitsandbytes packs two values of 4 bits into a byte, and ZeRO-3 stores a shard of the values.
    """
    state = getattr(weight, "quant_state", None)
    return getattr(weight, "ds_numel", weight.numel()) if state is None else state.shape.numel()


def non_default_fields(options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance with a non-default value, without tokens and values that JSON lacks."""
    json_types = str | int | float | bool | list | dict | None
    values = {}
    for field in fields(options):
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(options, field.name)
        value = sorted(value) if isinstance(value, set | tuple) else value
        if field.init and value != default and isinstance(value, json_types) and not field.name.endswith("_token"):
            values[field.name] = value
    return values


def find_commit() -> str | None:
    """Return the git commit of the current folder, with a + if files differ from it, or None without a repository."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


class SampleCallback(TrainerCallback):
    """Callback that writes sample answers from before and after training, or logs why there are none.

    Args:
        trainer: A PostTrainer.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self.trainer = trainer
        self.file = Path(trainer.args.output_dir, "samples.json")
        self.prompts: list[tuple[Prompt, list[int]]] = []
        """Prompts with the token ids of their right answers. Empty if samples are not possible."""
        self.samples: list[dict[str, Any]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Generate the answers before training, or read them from the file of a resumed run.

        The engine is ready at this point.
        """
        self.prompts = []
        self.samples = []
        trainer = self.trainer
        is_resumed = state.global_step > 0
        if problem := find_obstacle(trainer):
            logger.info("no sample answers before and after training: %s", problem)
            return
        with warn_on_error(MISSING_SAMPLES, reraise=engine.shards_weights(trainer.accelerator)):
            prompts = pick_prompts(trainer.train_dataset if trainer.eval_dataset is None else trainer.eval_dataset)
            answers = [None] * len(prompts) if is_resumed else self.generate(prompts)
            # set after generation, so that on_train_end does not try again if it failed
            self.prompts = prompts
            if not state.is_world_process_zero:
                return
            decode = trainer.tokenizer.decode
            for (prompt, reference), answer in zip(prompts, answers, strict=True):
                expected = {"expected": decode(reference, skip_special_tokens=True)} if reference else {}
                self.samples.append({"prompt": decode(prompt), "before": answer, "after": None} | expected)
            if is_resumed:
                with warn_on_error("sample answers from before training are missing"):
                    earlier = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else []
                    before = {sample["prompt"]: sample["before"] for sample in earlier}
                    for sample in self.samples:
                        sample["before"] = before.get(sample["prompt"])
                    if not all(sample["prompt"] in before for sample in self.samples):
                        logger.info("no sample answers from before training: %s lacks them", self.file)
            with warn_on_error(MISSING_SAMPLES):  # other ranks do not wait for the file
                write_json(self.file, self.samples)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Generate the answers after training, unless SIGTERM requested an early end."""
        if not self.prompts or self.trainer.preemption.preempted:
            return
        with warn_on_error(MISSING_SAMPLES, reraise=engine.shards_weights(self.trainer.accelerator)):
            answers = self.generate(self.prompts)
            for sample, answer in zip(self.samples, answers, strict=False):  # other ranks have no samples
                sample["after"] = answer
            if state.is_world_process_zero:
                with warn_on_error(MISSING_SAMPLES):
                    write_json(self.file, self.samples)

    def generate(self, prompts: list[tuple[Prompt, list[int]]]) -> list[Any]:
        """Return one text per prompt on the first process, and none on others. All ranks call this."""
        trainer = self.trainer
        rank_prompts = [prompt for prompt, _ in prompts] if trainer.is_world_process_zero() else []
        with rollout.seeded(trainer.accelerator.device, trainer.args.seed):
            try:
                answers = trainer.generate(rank_prompts, MAX_NEW_TOKENS, batch_size=NUM_SAMPLES)
            except InputError as error:  # raised on all processes, for a model that cannot generate
                logger.warning("no sample answers: %s", error)
                return [None] * len(rank_prompts)
        texts = trainer.tokenizer.batch_decode(answers, skip_special_tokens=True) if answers else []
        terminal_ids = trainer.terminal_ids
        return [text if ids[-1] in terminal_ids else f"{text} …" for text, ids in zip(texts, answers, strict=True)]


def find_obstacle(trainer: TrainerInterface) -> str | None:
    """Return why the policy should not generate samples, or None if it can."""
    args = trainer.args
    if trainer.method.head == "score":
        return "a reward model generates no answers"
    if trainer.train_dataset is None and trainer.eval_dataset is None:
        return "there are no rows"
    if args.parallelism_config is not None and args.parallelism_config.sp_size > 1:
        return "the model cannot generate with sequence parallelism"
    # FSDP and ZeRO gather all weights on each device to generate, which is only known to fit if the run does the same.
    generates = args.eval_exact_match or isinstance(getattr(args, "sampler", None), PolicySamplerOptions)
    if engine.shards_weights(trainer.accelerator) and not generates:
        return "they would gather all weights on each device. eval_exact_match: true does so as well, and enables them"
    return None


def pick_prompts(rows: AnyDatasets) -> list[tuple[Prompt, list[int]]]:
    """Return (prompt, token ids of the right answer or none) of a few prepared rows, packed or not.

    The rows are evenly spread over a data set (the first one of a dictionary), or the first rows of a stream.
    """
    if isinstance(rows, dict):
        rows = next(iter(rows.values()))
    if isinstance(rows, datasets.Dataset):
        rows = rows.select(sorted({n * len(rows) // NUM_SAMPLES for n in range(NUM_SAMPLES)}) if len(rows) else [])
    elif isinstance(rows, datasets.IterableDataset):
        rows = rows.take(NUM_SAMPLES)
    return [_prompt_and_answer(row) for row in islice(rows, NUM_SAMPLES)]


def _prompt_and_answer(row: dict[str, Any]) -> tuple[Prompt, list[int]]:
    prompt = row["prompt_ids"]
    answer = row.get("chosen_ids") or row.get("completion_ids") or []
    if answer and isinstance(answer[0], list):  # a packed row
        return _prompt_and_answer({name: value[0] for name, value in row.items() if isinstance(value, list)})
    if len(prompt) < 2:  # a text, whose beginning is the prompt
        length = max(1, min(MAX_PROMPT_TOKENS, len(answer) // 2))
        return Prompt.from_row(row | {"prompt_ids": [*prompt, *answer[:length]]}), answer[length:]
    return Prompt.from_row(row), first_turn(row) if row.get("label", True) else []
