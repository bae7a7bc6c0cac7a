"""The command `hf-posttrain`, which trains, evaluates and saves a model from a recipe.

    accelerate launch -m hf_posttrain.run RECIPE.yaml [section.key=value ...]

Exit codes:
    0: Success.
    1: The run was stopped (by SIGTERM, which saves a checkpoint, or by train.stop_on), or a check has warnings.
    2: There is a mistake in the input, or an external cause such as a full disk, which is printed to stderr in one
        line.
    3: An unexpected error was raised, whose traceback is written to a file.
    130: Ctrl-C was pressed, which also saves a checkpoint.

Heavy imports are deferred until the recipe has been read, so that its errors and --help are quick.
"""

import contextlib
import ctypes
import dataclasses
import errno
import json
import logging
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import __version__
from .errors import InputError, RunStopped, name_hint, printable
from .recipe import build
from .recipe.cli import parse, print_output
from .recipe.fields import train_fields
from .recipe.read import load_recipe
from .recipe.sections import Recipe

if TYPE_CHECKING:
    import argparse

    from .trainer.base import PostTrainer
    from .trainer.interface import TrainerInterface

logger = logging.getLogger("hf_posttrain.run")  # the name is __main__ if the module is run

# first word of the command line -> module whose `main` receives the rest
COMMANDS = {
    **{
        name: f"hf_posttrain.commands.{name}"
        for name in (
            "card",
            "chat",
            "data",
            "docs",
            "env",
            "init",
            "judge",
            "merge",
            "pair",
            "prune",
            "recipes",
            "sample",
            "schema",
        )
    },
    "eval": "hf_posttrain.commands.evaluate",
    "compare": "hf_posttrain.report.compare",
}
PR_SET_PDEATHSIG = 1  # option of Linux' prctl: the signal that a process receives when its parent ends
ADVICE = {  # names of exceptions with an external cause (torch may not be imported) -> what to do
    **dict.fromkeys(
        ("OutOfMemoryError", "MemoryError"),
        "See --check, and Out of memory in docs/guides/troubleshooting.md",
    ),
    "DistNetworkError": "To change a port in use, set accelerate launch --main_process_port N or torchrun"
    " --master_port N",
}
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Numbers of the errors that are raised if a disk is full or cannot be written."""
ERROR_DELAY = 10
"""Seconds that other ranks wait for the error of the first rank before they print their own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code. All exceptions but SystemExit (--help) are converted to exit codes."""
    folder = None  # output folder of a run, after the recipe was read
    # only the first process of a machine logs; datasets reads the environment variable below when it is imported
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    set_up_messages()
    logging.getLogger("hf_posttrain").setLevel(logging.INFO if is_first else logging.ERROR)
    if not is_first:
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    try:
        argv = sys.argv[1:] if argv is None else list(argv)
        if argv and argv[0] in COMMANDS:
            return build.import_quietly(COMMANDS[argv[0]]).main(argv[1:])
        if argv and argv[0].isidentifier() and not os.path.exists(argv[0]):
            problem = f"there is no command {argv[0]!r}{name_hint(argv[0], COMMANDS, in_brackets=True)}"
            fix = "To start a run, use hf-posttrain RECIPE.yaml [section.key=value ...]"
            raise InputError(f"command line: {problem}. {fix}")
        arguments = parse(argv)
        if arguments.check:
            return run_check(arguments)
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        folder = None if arguments.preprocess_only else recipe.train.get("output_dir")
        terminate_with_launcher()
        preprocess(recipe) if arguments.preprocess_only else run(recipe)
        return 0
    except InputError as error:
        # The launcher ends the other ranks when one exits. A rank that survives the delay has an error of its own.
        if not is_first:
            time.sleep(ERROR_DELAY)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except RunStopped as error:
        if is_first:
            print(error, file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt as error:  # the message of a training run names the saved checkpoint
        print(": ".join(filter(None, ("interrupted", str(error)))), file=sys.stderr, flush=True)
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            print(f"error: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr, flush=True)
            return 2
        return report_crash(error, folder)


class LabeledFormatter(logging.Formatter):
    """Formatter that labels the warnings of this package, in yellow on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message, with a label for a warning of this package."""
        text = super().format(record)
        if record.levelno < logging.WARNING or not record.name.startswith("hf_posttrain"):
            return text
        label = record.levelname.lower()
        return f"\033[33m{label}:\033[0m {text}" if sys.stderr.isatty() else f"{label}: {text}"


def has_own_handler(record: logging.LogRecord) -> bool:
    """Return whether another package prints a record itself, as huggingface_hub and datasets do."""
    package = record.name.partition(".")[0]
    printing = [type(handler) is logging.StreamHandler for handler in logging.getLogger(package).handlers]
    return package != "hf_posttrain" and any(printing)


def set_up_messages() -> None:
    """Log to stderr with labels, and filter messages of other packages that users cannot act on."""
    handler = logging.StreamHandler()
    handler.setFormatter(LabeledFormatter())
    handler.addFilter(lambda record: not has_own_handler(record))
    logging.basicConfig(handlers=[handler])
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
    # Llama 3 and others request a clean-up of spaces, which transformers correctly ignores
    logging.getLogger("transformers.tokenization_utils_tokenizers").addFilter(
        lambda record: "Ignoring clean_up_tokenization_spaces" not in record.getMessage()
    )
    logging.getLogger("DeepSpeed").addFilter(lambda record: "etting accelerator to" not in record.getMessage())


def report_crash(error: Exception, folder: str | None) -> int:
    """Write the traceback of an unexpected error to a file, and print one line about it.

    Args:
        error: The error.
        folder: Folder of the file, of which each rank has one, or None for a temporary file.

    Returns:
        The exit code, which is 3, or 2 for an error with an external cause in ADVICE.
    """
    from .report.run_folder import command_line

    message = printable(" ".join(f"{type(error).__name__}: {error}".split()))[:400]
    header = f"{datetime.now():%Y-%m-%d %H:%M:%S}, hf_posttrain {__version__}, python {platform.python_version()}"
    text = f"{header}\n{command_line()}\n\n{''.join(traceback.format_exception(error))}"
    name = f"crash_rank_{os.environ.get('RANK', '0')}.txt" if os.environ.get("WORLD_SIZE", "1") != "1" else "crash.txt"
    try:
        file = Path(folder or tempfile.mkdtemp(prefix="hf_posttrain-")) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError:  # for example, a full disk
        print(text, file=sys.stderr)
        file = Path("above")
    advice = f"This error is unexpected. Please report it with its traceback ({file})"
    code = 3
    if known_advice := ADVICE.get(type(error).__name__):
        advice = f"{known_advice} (traceback: {file})"
        code = 2
    print(f"error: {message.rstrip('.')}. {advice}", file=sys.stderr, flush=True)
    return code


def terminate_with_launcher() -> None:
    """Request SIGTERM when the launcher (torchrun or accelerate) is killed, so that this process saves and stops."""
    if sys.platform == "linux" and {"LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run(recipe: Recipe) -> dict[str, float]:
    """Train, evaluate and save a model.

    Args:
        recipe: The recipe.

    Returns:
        The metrics.

    Raises:
        InputError: For a mistake in the input. Most are raised before weights are loaded.
        RunStopped: If SIGTERM or a warning in `train.stop_on` ended the run. The model is not saved in this case.
    """
    # checks in the order of their duration: recipe and files, options (with torch), tokenizers, rows
    trainer_class, config = build.configure(recipe, training=True)
    from transformers.utils.logging import disable_progress_bar

    from . import report
    from .check.auto_checkpointing import disable_unneeded_checkpointing
    from .recipe.datasets import audit_data, prepare_data
    from .trainer import output_dir

    tokenizer, peft_config = build.check_models(recipe, config)
    rows, raw = prepare_data(recipe, trainer_class, tokenizer, config)
    # the first process reports the contents of the data, and problems that would ruin training
    audits = audit_data(recipe, raw, tokenizer, config) if config.process_index == 0 else {}
    for audit in audits.values():
        logger.info("%s", audit.summary())
    audit_warnings = [warning for audit in audits.values() for warning in audit.warnings()]
    logged = {f"{audit.name}: {note}" for audit in audits.values() for note in audit.mistakes}  # by `prepare_data`
    for warning in audit_warnings:
        if warning not in logged:
            logger.warning("%s", warning)
    disable_unneeded_checkpointing(recipe, config, trainer_class, rows)

    # files are written and weights are loaded from here on
    build.make_output_dir(recipe, config)
    with output_dir.exclusive_access(config):
        trainer = trainer_class(
            args=config,
            processing_class=tokenizer,
            peft_config=peft_config,
            train_dataset=rows["train"],
            eval_dataset=rows.get("eval"),
            **build.load_models(recipe, config),
        )
        disable_progress_bar()  # writing a model shows no progress bar; loading shows one
        if trainer.is_world_process_zero():
            data = {name: dataclasses.asdict(audit) for name, audit in audits.items()}
            text = json.dumps({"warnings": audit_warnings, "data": data}, indent=1)
            (Path(trainer.args.output_dir) / "audit.json").write_text(f"{text}\n", encoding="utf-8")
        trainer.recipe = recipe.to_dict()
        report.follow(trainer)
        return train(trainer, recipe)


def train(trainer: "PostTrainer", recipe: Recipe) -> dict[str, float]:
    """Train, save and evaluate a model, write a report, and return the metrics.

    Raises:
        RunStopped: As in `run`.
    """
    from . import report

    args = trainer.args
    metrics = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint).metrics
    # a run is preempted, stopped by a warning, or finished
    if trainer.preemption.preempted and not trainer.stopped:
        fix = "run the same command with train.resume_from_checkpoint=auto"
        if not trainer.state.global_step:
            fix = "run the same command"
        elif trainer.args.save_only_model:
            fix = "start a new run from the weights of its checkpoint"
        raise_stopped(trainer, f"stopped by SIGTERM. To resume, {fix}")
    if not trainer.stopped:
        metrics = save_and_evaluate(trainer, recipe, metrics)
    trainer.save_state()
    if trainer.is_world_process_zero():
        try:
            report.write(args.output_dir)
        except Exception as error:  # which is not a failure of the run
            problem = f"{type(error).__name__}: {error}"
            message = "the report could not be written (%s). To write it, call hf_posttrain.report.write(%r)"
            logger.warning(message, problem, args.output_dir)
    if trainer.stopped:
        raise_stopped(trainer, trainer.stopped)
    if args.push_to_hub:
        trainer.push_to_hub(commit_message="Report and model card", revision=args.hub_revision)
    return metrics


def raise_stopped(trainer: "TrainerInterface", reason: str) -> NoReturn:
    """Raise RunStopped on all ranks at the same time, since a launcher ends all ranks when the first one exits."""
    trainer.accelerator.wait_for_everyone()
    raise RunStopped(reason)


def save_and_evaluate(trainer: "TrainerInterface", recipe: Recipe, metrics: dict[str, float]) -> dict[str, float]:
    """Save the trained model and the resolved recipe, evaluate, and return all metrics."""
    trainer.save_model()  # with adapter, tokenizer and generation config
    if trainer.is_world_process_zero():
        train = {name: value for name, value in recipe.train.items() if name != "resume_from_checkpoint"}
        text = dataclasses.replace(recipe, train=train).to_yaml(default_options(recipe))
        (Path(trainer.args.output_dir) / "recipe.yaml").write_text(text, encoding="utf-8")
    if trainer.has_trained:  # the metrics of a finished run that is resumed are kept
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
    if recipe.data.eval is None:
        return metrics
    eval_metrics = last_evaluation(trainer) or trainer.evaluate()
    trainer.log_metrics("eval", eval_metrics)
    trainer.save_metrics("eval", eval_metrics)
    return metrics | eval_metrics


def last_evaluation(trainer: "TrainerInterface") -> dict[str, float]:
    """Return the metrics of the last evaluation if it was of the current weights after the last step, else {}."""
    from .report.run_folder import saved_best

    state = trainer.state
    best = trainer.args.load_best_model_at_end
    if not trainer.has_trained or (best and saved_best(vars(state)) not in (None, state.global_step)):
        return {}  # the data may have changed, or the weights belong to another step
    logs = [log for log in state.log_history if log["step"] == state.global_step]
    evaluations = [log for log in logs if any(name.startswith("eval_") for name in log)]
    return {name: value for log in evaluations for name, value in log.items() if name != "step"}


def default_options(recipe: Recipe) -> dict[str, Any]:
    """Return the training options that the recipe does not set, with the defaults of this version.

    Options that affect only where a run is executed or stored are left out.
    """
    from .report.page import MACHINERY

    # fp16 also depends on the machine: if it is set, `--check` plans no other precision
    fields = train_fields(recipe.method)
    left_out = (*MACHINERY, "fp16", "local_rank", "do_")
    return {
        name: field.default
        for name, field in fields.items()
        if field.default is not None and name not in recipe.train and not name.startswith(left_out)
    }


def preprocess(recipe: Recipe) -> None:
    """Run --preprocess-only, which tokenizes the data into the cache of `run` on any machine, and prints a summary."""
    trainer_class, config = build.configure(build.without_hardware_options(recipe))
    from .recipe.datasets import prepare_data, summarize_rows

    tokenizer, _ = build.check_models(recipe)
    for name, prepared in prepare_data(recipe, trainer_class, tokenizer, config)[0].items():
        if config.local_process_index == 0:
            print(f"{name}: {summarize_rows(prepared)}")


def run_check(arguments: "argparse.Namespace") -> int:
    """Run --check, print its result, and return 0, or 1 for warnings that would ruin training."""
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        # with a config file, the run may be planned for another machine
        build.check_inputs(recipe, training=arguments.config_file is None)
        from .check import check

        with contextlib.redirect_stdout(sys.stderr):  # packages print while they are imported
            result = check(recipe, arguments.probe, arguments.config_file, arguments.device_memory)
    except InputError as error:
        if arguments.json:
            print(json.dumps({"status": 2, "error": str(error)}, indent=2))
        raise
    if result is None:  # another rank prints it
        return 0
    print_output(result.to_json() if arguments.json else result.text(sys.stdout.isatty()))
    return result.status


if __name__ == "__main__":
    sys.exit(main())
