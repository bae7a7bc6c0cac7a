"""The command: a recipe -> objects -> train, evaluate, save.

    accelerate launch -m hf_posttrain.run RECIPE.yaml [section.key=value ...]

Exit codes: 0; 1 for a run that was stopped (SIGTERM, which saves a checkpoint, or train.stop_on) or a check that warns;
2 for a mistake in the input, in one line on stderr; 3 for an error that nobody foresaw, with its traceback in a file;
130 for Ctrl-C, which saves a checkpoint too.
Heavy imports come after the recipe has been read, so that its errors and --help are quick.
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
from .recipe import build as parts
from .recipe.cli import parse, print_output
from .recipe.fields import train_fields
from .recipe.read import load_recipe
from .recipe.sections import Recipe

if TYPE_CHECKING:
    from .trainer.interface import TrainerInterface

logger = logging.getLogger("hf_posttrain.run")  # also as __main__

# Commands of their own: first word -> the module whose `main` takes the rest
COMMANDS = {
    **{
        name: f"hf_posttrain.commands.{name}"
        for name in ("data", "sample", "judge", "pair", "chat", "merge", "init", "recipes")
    },
    "eval": "hf_posttrain.commands.evaluate",
    "compare": "hf_posttrain.report.compare",
}
PR_SET_PDEATHSIG = 1  # of Linux' prctl: the signal that a process gets when the one that started it ends
ADVICE = {  # names of exceptions (torch may not be imported) that are no fault of ours -> what to do
    **dict.fromkeys(
        ("OutOfMemoryError", "MemoryError"),
        "--check and docs/guides/troubleshooting.md, Out of memory, say what to change",
    ),
    "DistNetworkError": "a port in use is changed with accelerate launch --main_process_port N or torchrun"
    " --master_port N",
}
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # a disk that takes no more
ERROR_DELAY = 10  # seconds that other ranks give the first one to say what is wrong, before they say it too


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for; returns the exit code, whatever happens."""
    folder = None  # where a run leaves its files, once the recipe has said it
    # only the first process talks; the variable is read when datasets is imported
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    set_up_messages()
    logging.getLogger("hf_posttrain").setLevel(logging.INFO if first else logging.ERROR)
    if not first:
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    try:
        argv = sys.argv[1:] if argv is None else list(argv)
        if argv and argv[0] in COMMANDS:
            return parts.import_quietly(COMMANDS[argv[0]]).main(argv[1:])
        if argv and argv[0].isidentifier() and not os.path.exists(argv[0]):
            said = f"there is no command {argv[0]!r}{name_hint(argv[0], COMMANDS)}"
            raise InputError(f"command line: {said}; a run is hf-posttrain RECIPE.yaml [section.key=value ...]")
        arguments = parse(argv)
        if arguments.check:
            return run_check(arguments)
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        folder = None if arguments.preprocess_only else recipe.train.get("output_dir")
        terminate_with_launcher()
        preprocess(recipe) if arguments.preprocess_only else run(recipe)
        return 0
    except InputError as error:
        # a launcher ends all ranks when the first one leaves: one that is still there has a mistake of its own
        if not first:
            time.sleep(ERROR_DELAY)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except RunStopped as error:
        if first:
            print(error, file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt as error:  # of a training it says what was saved
        print(": ".join(filter(None, ("interrupted", str(error)))), file=sys.stderr, flush=True)
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            print(f"error: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr, flush=True)
            return 2
        return report_crash(error, folder)


class LabelledFormatter(logging.Formatter):
    """The message alone; a warning of this package says that it is one, in yellow on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING or not record.name.startswith("hf_posttrain"):
            return text
        label = record.levelname.lower()
        return f"\033[33m{label}:\033[0m {text}" if sys.stderr.isatty() else f"{label}: {text}"


def set_up_messages() -> None:
    """What is logged goes to stderr, labelled; what other packages say that nobody can act on is left out."""
    handler = logging.StreamHandler()
    handler.setFormatter(LabelledFormatter())
    logging.basicConfig(handlers=[handler])
    for said in (".*pin_memory.*no accelerator", ".*is_gradient_checkpointing"):
        warnings.filterwarnings("ignore", message=said)
    # Llama 3 and others ask for a clean-up of spaces that transformers rightly leaves out
    logging.getLogger("transformers.tokenization_utils_tokenizers").addFilter(
        lambda record: "Ignoring clean_up_tokenization_spaces" not in record.getMessage()
    )
    logging.getLogger("DeepSpeed").addFilter(lambda record: "etting accelerator to" not in record.getMessage())


def report_crash(error: Exception, folder: str | None) -> int:
    """Write the traceback of an error that nobody foresaw into `folder` (None: a temporary file) and say so in a line.
    Every rank has a file of its own. Returns the exit code: 3, or 2 where ADVICE says what to change.
    """
    from .report.run_folder import command_line

    said = printable(" ".join(f"{type(error).__name__}: {error}".split()))[:400]
    about = f"{datetime.now():%Y-%m-%d %H:%M:%S}, hf_posttrain {__version__}, python {platform.python_version()}"
    text = f"{about}\n{command_line()}\n\n{''.join(traceback.format_exception(error))}"
    name = f"crash_rank_{os.environ['RANK']}.txt" if os.environ.get("WORLD_SIZE", "1") != "1" else "crash.txt"
    try:
        file = Path(folder or tempfile.mkdtemp(prefix="hf_posttrain-")) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError:  # a full disk, for one
        print(text, file=sys.stderr)
        file = Path("above")
    advice = f"nobody foresaw this error: please report it, with its traceback ({file})"
    code = 3
    if advised := ADVICE.get(type(error).__name__):
        advice = f"{advised} (traceback: {file})"
        code = 2
    print(f"error: {said}; {advice}", file=sys.stderr, flush=True)
    return code


def terminate_with_launcher() -> None:
    """A process that torchrun or accelerate started gets SIGTERM when that is killed: it saves and stops."""
    if sys.platform == "linux" and {"LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run(recipe: Recipe) -> dict[str, float]:
    """Train, evaluate and save as `recipe` says; returns the metrics. InputErrors come before weights are loaded.

    Raises RunStopped where SIGTERM or a warning of `train.stop_on` ended it: the model is then not saved.
    """
    # what is wrong is said in the order of what it takes to know it: the recipe and its files, torch, tokenizers, rows
    trainer_class, config = parts.configure(recipe, training=True)
    from transformers.utils.logging import disable_progress_bar

    from . import report
    from .recipe.datasets import audit_data, prepare_data
    from .trainer import output_dir

    tokenizer, peft_config = parts.check_models(recipe, config)
    rows, raw = prepare_data(recipe, trainer_class, tokenizer, config)
    # the first process says what the data hold, and what in them would ruin training
    audits = audit_data(recipe, raw, tokenizer, config) if config.process_index == 0 else {}
    for audit in audits.values():
        logger.info("%s", audit.summary())
    found_wrong = [warning for audit in audits.values() for warning in audit.warnings()]
    for warning in found_wrong:
        logger.warning("%s", warning)
    if config.device.type != "cpu":
        from .check.auto_checkpointing import disable_unneeded_checkpointing

        disable_unneeded_checkpointing(recipe, config, trainer_class, rows)
    # from here on files are written and weights loaded
    parts.make_output_dir(recipe, config)
    with output_dir.exclusive_access(config):
        trainer = trainer_class(
            args=config,
            processing_class=tokenizer,
            peft_config=peft_config,
            train_dataset=rows["train"],
            eval_dataset=rows.get("eval"),
            **parts.load_models(recipe, config),
        )
        disable_progress_bar()  # of files that are written; those that are read were shown
        if trainer.is_world_process_zero():
            data = {name: dataclasses.asdict(audit) for name, audit in audits.items()}
            text = json.dumps({"warnings": found_wrong, "data": data}, indent=1)
            (Path(config.output_dir) / "audit.json").write_text(f"{text}\n", encoding="utf-8")
        trainer.recipe = recipe.to_dict()
        report.follow(trainer)
        return train(trainer, recipe)


def train(trainer: Any, recipe: Recipe) -> dict[str, float]:
    """Train, save, evaluate and leave a report; returns the metrics. Raises RunStopped as `run` does."""
    from . import report

    args = trainer.args
    metrics = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint).metrics
    # a run ends in one of three ways: the machine is taken away, a warning stops it, it is finished
    if trainer.preemption.preempted and not trainer.stopped:
        way = "the same command with train.resume_from_checkpoint=auto"
        if not trainer.state.global_step:
            way = "the same command"
        elif trainer.args.save_only_model:
            way = "a new run from the weights of its checkpoint"
        raise_stopped(trainer, f"stopped by SIGTERM; to go on: {way}")
    if not trainer.stopped:
        metrics = save_and_evaluate(trainer, recipe, metrics)
    trainer.save_state()
    if trainer.is_world_process_zero():
        try:
            report.write(args.output_dir)
        except Exception as error:  # no failure of the run
            problem = f"{type(error).__name__}: {error}"
            logger.warning("no report (%s); hf_posttrain.report.write(%r) makes it", problem, args.output_dir)
    if trainer.stopped:
        raise_stopped(trainer, trainer.stopped)
    if args.push_to_hub:
        trainer.push_to_hub(commit_message="Report and model card", revision=args.hub_revision)
    return metrics


def raise_stopped(trainer: "TrainerInterface", why: str) -> NoReturn:
    """Raise RunStopped on all ranks together: a launcher ends the others when the first one leaves."""
    trainer.accelerator.wait_for_everyone()
    raise RunStopped(why)


def save_and_evaluate(trainer: "TrainerInterface", recipe: Recipe, metrics: dict[str, float]) -> dict[str, float]:
    """Save the trained model and the recipe as resolved, then evaluate; returns the metrics of both."""
    trainer.save_model()  # and adapter, tokenizer, generation config
    if trainer.is_world_process_zero():
        (Path(trainer.args.output_dir) / "recipe.yaml").write_text(
            recipe.to_yaml(default_options(recipe)), encoding="utf-8"
        )
    if trainer.has_trained:  # not a finished run that was resumed: its metrics stay
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
    if recipe.data.eval is None:
        return metrics
    found = last_evaluation(trainer) or trainer.evaluate()
    trainer.log_metrics("eval", found)
    trainer.save_metrics("eval", found)
    return metrics | found


def last_evaluation(trainer: "TrainerInterface") -> dict[str, float]:
    """The metrics of an evaluation of the weights as they are now, made after the last step; {} without one."""
    from .report.run_folder import saved_best

    state = trainer.state
    best = trainer.args.load_best_model_at_end
    if not trainer.has_trained or (best and saved_best(vars(state)) not in (None, state.global_step)):
        return {}  # the data may be others, or the weights are those of another step
    logs = [log for log in state.log_history if log["step"] == state.global_step and any("eval_" in key for key in log)]
    return {name: value for log in logs for name, value in log.items() if name != "step"}


def default_options(recipe: Recipe) -> dict[str, Any]:
    """The options of training that the recipe leaves open, with their defaults of today: another version may have
    others. Those that say where a run is, not what it trains, are left out.
    """
    from .report.page import MACHINERY

    # of a machine is fp16 too: where it is given, `--check` plans no other precision
    known = train_fields(recipe.method)
    left_out = (*MACHINERY, "fp16", "local_rank", "do_")
    return {
        name: field.default
        for name, field in known.items()
        if field.default is not None and name not in recipe.train and not f"{name}=".startswith(left_out)
    }


def preprocess(recipe: Recipe) -> None:
    """--preprocess-only: tokenise the data, on any machine, into the cache that `run` reads; print a line for each."""
    trainer_class, config = parts.configure(parts.without_hardware_options(recipe))
    from .recipe.datasets import prepare_data, summarize_rows

    tokenizer, _ = parts.check_models(recipe)
    for name, prepared in prepare_data(recipe, trainer_class, tokenizer, config)[0].items():
        if config.local_process_index == 0:
            print(f"{name}: {summarize_rows(prepared)}")


def run_check(arguments: Any) -> int:
    """--check: print what the recipe would train on and whether it fits; returns 0, or 1 for what would ruin it."""
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        parts.check_inputs(recipe, training=arguments.config_file is None)  # else it may be for another machine
        from .check import check

        with contextlib.redirect_stdout(sys.stderr):  # packages print there while they are imported
            found = check(recipe, arguments.probe, arguments.config_file, arguments.device_memory)
    except InputError as error:
        if arguments.json:
            print(json.dumps({"status": 2, "error": str(error)}, indent=2))
        raise
    if found is None:  # another rank prints it
        return 0
    print_output(found.to_json() if arguments.json else found.text(sys.stdout.isatty()))
    return found.status


if __name__ == "__main__":
    sys.exit(main())
