"""Checkpoints: atomic saves, search for the newest complete one, and resumption with identical results."""

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import xxhash
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import has_length, sort_checkpoints

from ..engines import engine
from ..errors import InputError, join_names, path_hint
from ..monitoring import reporters
from ..monitoring.symptoms import as_list
from . import run_fingerprint
from .interface import TrainerInterface
from .method_spec import Method
from .rules import NO_OPTIMIZER_STATE
from .run_start import is_earlier, start_in_folder

logger = logging.getLogger(__name__)
SAVING_FOLDER = ".saving"  # folder in output_dir of a checkpoint that is being saved
LAUNCH_KEY = "launch"  # key of `launch_state` among the states of callbacks in trainer_state.json
_NAME = re.compile(r"checkpoint-\d+")
_PARTS = {
    "weights": ("*model*.safetensors", "*/adapter_model.*", "*model*.bin", "pytorch_model_fsdp_0", "global_step*"),
    "optimizer": ("optimizer.pt", "optimizer.bin", "optimizer_0", "global_step*"),
    "scheduler": ("scheduler.pt", "global_step*"),
    "random state": ("rng_state*.pth",),
}
"""Parts of a checkpoint, with patterns of their files for all engines."""
_WEIGHTS_ONLY_VARIABLE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # prevents torch.load from unpickling code, for all callers
_CONFIG_NAMES = ("config.json", "adapter_config.json", "latest")
_TENSOR_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".distcp")
_INCOMPLETE = "the complete "
"""Start of the name of a file that is missing or has changed."""


# ---- saving


@contextmanager
def atomic_checkpoint(trainer: TrainerInterface) -> Iterator[str]:
    """Yield the folder `output_dir/.saving` to save a checkpoint in, then rename the checkpoint and delete old ones.

    All ranks call it.
    """
    args = trainer.args
    state: Any = trainer.state
    accelerator = trainer.accelerator
    run = Path(args.output_dir)
    name = f"checkpoint-{state.global_step}"
    if args.should_save:
        shutil.rmtree(run / SAVING_FOLDER, ignore_errors=True)  # left by a run that was killed
    accelerator.wait_for_everyone()
    state.save_to_json = lambda path: None  # the state is written below, with the fingerprints of the files
    try:
        yield str(run / SAVING_FOLDER)
    finally:
        del state.save_to_json
    # Trainer has looked for the best checkpoint in .saving. In output_dir, that of this step may be of an earlier run.
    if state.best_global_step == state.global_step:
        state.best_model_checkpoint = str(run / name)
    accelerator.wait_for_everyone()
    if args.should_save:
        new = run / SAVING_FOLDER / name
        files = {str(file.relative_to(new)): fingerprint(file) for file in new.rglob("*") if _is_loaded(file)}
        state.stateful_callbacks[LAUNCH_KEY] = launch_state(trainer) | {
            "files": files,
            "run": trainer.run_description,
            **reporters.run_names(),
        }
        write_state(state, new / "trainer_state.json")
        # Folders are renamed into and out of output_dir, so that a kill at any moment leaves only complete ones.
        if (run / name).exists():  # from an earlier run
            (run / name).rename(run / SAVING_FOLDER / "replaced")
        new.rename(run / name)
        if (limit := args.save_total_limit or 0) > 0:
            # oldest first; the best and the newest are last and always kept
            best = state.best_model_checkpoint
            folders = [Path(path) for path in sort_checkpoints(str(run), use_mtime=True, best_model_checkpoint=best)]
            limit = max(limit, len({folders[-1], Path(best or folders[-1])}))
            for old in folders[:-limit]:
                old.rename(run / SAVING_FOLDER / old.name)
        shutil.rmtree(run / SAVING_FOLDER)
    accelerator.wait_for_everyone()


def write_state(state: TrainerState, file: Path) -> None:
    """Write trainer_state.json with one line per log entry.

    `TrainerState.save_to_json` copies each value and writes it on a line of its own, which takes four times as long.
    """
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    text = json.dumps(fields | {"log_history": []}, indent=2, sort_keys=True)
    logs = ",\n".join(json.dumps(entry, sort_keys=True) for entry in state.log_history)
    file.write_text(text.replace('"log_history": []', f'"log_history": [\n{logs}\n  ]', 1) + "\n", encoding="utf-8")


def launch_state(trainer: TrainerInterface) -> dict[str, Any]:
    """Return the properties of the launch that a resumed run must have in common with the run that it continues."""
    accelerator = trainer.accelerator
    name = engine.engine_name(trainer.accelerator)
    if name == "fsdp2":
        name += f" with {accelerator.state.fsdp_plugin.state_dict_type.name}"
    rows = trainer.get_total_train_batch_size(trainer.args)
    return {"engine": name, "processes": accelerator.num_processes, "rows_per_step": rows}


# ---- resumption


def find_checkpoint(output_dir: str | os.PathLike[str], max_step: float = inf) -> str | None:
    """Return the newest complete `checkpoint-N` of the last run in a folder, or None.

    Incomplete ones, and those of an earlier run in the same folder, are logged.

    Args:
        output_dir: The folder.
        max_step: Largest N to consider.
    """
    start = start_in_folder(Path(output_dir))
    for path in map(Path, reversed(sort_checkpoints(str(output_dir)))):
        if not _NAME.fullmatch(path.name) or _step(path) > max_step:
            continue  # sort_checkpoints also returns checkpoint-5-tmp
        if is_earlier(path / "trainer_state.json", start):
            logger.warning("%s belongs to an earlier run in this folder. It is skipped", path)
            continue
        if not (missing := incomplete_parts(path)):
            return str(path)
        logger.warning("%s is incomplete, without %s. It is skipped", path, ", ".join(missing))
    return None


def step_in_output_dir(trainer: TrainerInterface, resumed: str | bool | None) -> int | None:
    """Return the step of the resumed checkpoint if it is in the output folder of this run, else None."""
    folder = Path(resumed).resolve() if isinstance(resumed, str) else Path()
    is_inside = folder.parent == Path(trainer.args.output_dir).resolve() and _NAME.fullmatch(folder.name)
    return _step(folder) if is_inside else None


def reporter_runs(checkpoint: str | bool | None) -> dict[str, str | None]:
    """Return `reporters.run_names` of the run that wrote a checkpoint, empty for a new run."""
    stored = stored_launch(Path(checkpoint)) if isinstance(checkpoint, str) else {}
    return {name: stored.get(name) for name in ("wandb", "trackio")}


def stored_launch(checkpoint: Path) -> dict[str, Any]:
    """Return the entry that `atomic_checkpoint` has stored in a checkpoint, empty if another package wrote it."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return state.get("stateful_callbacks", {}).get(LAUNCH_KEY) or {}


def resolve_checkpoint(trainer: TrainerInterface, request: str | bool | None) -> str | None:
    """Return the folder of the checkpoint to resume, or None to start a new run.

    Args:
        trainer: The trainer.
        request: Argument `resume_from_checkpoint` of `train`: a folder, "auto", True or None.

    Raises:
        InputError: On all ranks, if True finds no checkpoint, if machines have no common one, or if this run would not
            continue the run that wrote it.
    """
    if request in (True, "auto"):
        if trainer.args.save_only_model:
            raise InputError(NO_OPTIMIZER_STATE)
        folder = trainer.args.output_dir
        newest = _find_common(trainer)
        if newest is None and request is True:
            problem = f"resume_from_checkpoint: there is no complete checkpoint in {folder}"
            raise InputError(f"{problem}. Use auto, which starts a new run in this case")
        if newest is None:
            logger.info("no complete checkpoint in %s, starting a new run", folder)
        request = newest
    if not isinstance(request, str):
        return None

    # each machine checks its own disk, and all ranks raise the first problem of any
    problems = gather_object([next(resume_problems(trainer, Path(request)), None)])
    if first := next(filter(None, problems), None):
        raise InputError(first)
    logger.info("resuming %s", request)
    return request


def _find_common(trainer: TrainerInterface) -> str | None:
    """Return the newest complete checkpoint in output_dir that each machine has, or None if no machine has any."""
    args = trainer.args
    is_local_first = args.local_process_index == 0
    max_step = inf
    while True:
        newest = find_checkpoint(args.output_dir, max_step) if is_local_first else None
        gathered = gather_object([(is_local_first, newest and Path(newest).name)])
        names = {rank: name for rank, (is_first, name) in enumerate(gathered) if is_first}
        if len(set(names.values())) == 1:
            return names[0] and str(Path(args.output_dir, names[0]))
        if None in names.values():
            listed = ", ".join(f"rank {rank}: {name or 'none'}" for rank, name in names.items())
            raise InputError(
                f"resume_from_checkpoint: the machines have no complete checkpoint in common in {args.output_dir} "
                f"({listed}). Put output_dir on a shared disk, or copy a checkpoint to each machine"
            )
        max_step = min(_step(Path(str(name))) for name in names.values())


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def incomplete_parts(folder: Path) -> list[str]:
    """Return the missing parts and damaged files that prevent a checkpoint from being resumed."""
    missing = missing_parts(folder)
    return missing + [name for name in damaged_files(folder) if not (missing and name.startswith(_INCOMPLETE))]


def missing_parts(folder: Path) -> list[str]:
    """Return the parts of a checkpoint that have no file."""
    return [name for name, patterns in _PARTS.items() if not any(any(folder.glob(p)) for p in patterns)]


def damaged_files(folder: Path) -> list[str]:
    """Return the files of a checkpoint that are missing, truncated, changed or unreadable."""
    try:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        state["global_step"]
        files = state.get("stateful_callbacks", {}).get(LAUNCH_KEY, {}).get("files", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ["trainer_state.json"]
    changed = [
        f"{_INCOMPLETE}{name}"
        for name, stored in files.items()
        if not (file := folder / name).is_file() or (file.suffix in _TENSOR_SUFFIXES and fingerprint(file) != stored)
    ]
    unreadable = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if not _is_readable(file)]
    unreadable = [f"a readable {name}" for name in unreadable if f"{_INCOMPLETE}{name}" not in changed]
    return list(dict.fromkeys(changed + unreadable))


def fingerprint(file: Path) -> list[Any]:
    """Return the size of a file in bytes and a hash of its content, for a large file of 64 evenly spaced blocks."""
    size = file.stat().st_size
    block = 2**14
    digest = xxhash.xxh3_64()
    with file.open("rb") as opened:
        for start in range(0, size, max(block, size // 64)):
            opened.seek(start)
            digest.update(opened.read(block))
    return [size, digest.hexdigest()]


def _is_loaded(file: Path) -> bool:
    """Return whether a resumed run loads a file of a checkpoint."""
    return file.suffix in _TENSOR_SUFFIXES or file.name in _CONFIG_NAMES


def _is_readable(file: Path) -> bool:
    """Return whether a file has a valid format, judged by its start and end."""
    try:
        if file.name in ("config.json", "adapter_config.json") or file.name.endswith(".index.json"):
            return isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                return True
        if file.suffix in (".pt", ".pth", ".bin"):
            with file.open("rb") as opened:  # zip files of torch, and pickles of DeepSpeed
                return opened.read(2) in (b"PK", b"\x80\x02") and file.stat().st_size > 2
    except (OSError, ValueError, SafetensorError):
        return False
    return True


def resume_problems(trainer: TrainerInterface, checkpoint: Path) -> Iterator[str]:
    """Yield the reasons why this run would not continue the run that wrote a checkpoint, the most important first."""
    this = f"the checkpoint {checkpoint}"
    restart = _restart_advice(checkpoint)
    if not checkpoint.is_dir():
        yield f"resume_from_checkpoint: there is no folder {checkpoint}{path_hint(checkpoint)}"
    if damaged := damaged_files(checkpoint):
        yield f"{this} is damaged, without {', '.join(damaged)}. Use another checkpoint, or auto"
    if (missing := missing_parts(checkpoint)) and "weights" not in missing:
        yield f"{this} has weights, but no {', '.join(missing)} (save_only_model). Instead, {restart}"

    stored = stored_launch(checkpoint)
    launch = launch_state(trainer)
    if trainer.run_description and not stored.get("run"):
        logger.info("%s does not store the settings of its run, so they are not compared with this run", checkpoint)
    if not stored:
        return  # written by another package
    stored_engine, stored_processes, stored_rows = (stored[key] for key in ("engine", "processes", "rows_per_step"))
    engine_name, processes, rows = (launch[key] for key in ("engine", "processes", "rows_per_step"))

    # a single process and DDP write the same files, on rank 0
    if stored_engine != engine_name and not {stored_engine, engine_name} <= {"single", "ddp"}:
        problem = (
            f"was written under {stored_engine} and this run is {engine_name}, which cannot load its optimizer state"
        )
        yield f"{this} {problem}. Launch with the same engine, or {restart}"
    if engine_name.startswith("zero") and stored_processes != processes:
        counts = f"was written by {stored_processes} processes and this run has {processes}"
        reason = f"DeepSpeed has sharded its optimizer state for {stored_processes}"
        yield f"{this} {counts}, but {reason}. Launch as many processes, or {restart}"
    if stored_rows != rows and not trainer.args.ignore_data_skip:
        problem = f"trained {stored_rows} rows per step and this run {rows}, so rows would be skipped or repeated"
        fix = "Keep per_device_train_batch_size x gradient_accumulation_steps x processes"
        yield f"{this} {problem}. {fix}, or set ignore_data_skip to restart the epoch"

    description = dict(trainer.run_description)
    if Path(trainer.scored[0].config.name_or_path or "") == checkpoint:
        description.pop("start_weights", None)  # the model was loaded from the checkpoint itself
    difference = settings_problem(checkpoint, stored, description, trainer.args, trainer.method)
    yield from [difference] if difference else []


def settings_problem(
    checkpoint: Path, stored: Mapping[str, Any], description: Mapping[str, Any], args: Any, method: Method
) -> str | None:
    """Return why a run does not continue the run that wrote a checkpoint, by its settings and rows, or None.

    Args:
        checkpoint: The folder of the checkpoint.
        stored: `stored_launch` of the checkpoint.
        description: `run_fingerprint.describe_run` of this run, or a part of it.
        args: The Config of this run.
        method: The method of this run.
    """
    differences = run_fingerprint.differences(stored.get("run", {}), description, args.resume_despite, method.groups)
    if not differences:
        return None
    restart = _restart_advice(checkpoint)
    lines = list(differences.values())
    sections = dict.fromkeys(key.partition(".")[0] for key in differences)
    fix = f"Restore the settings, {restart}, or set train.resume_despite: [{join_names(sections)}]"
    if fixed := [key for key in differences if key in run_fingerprint.OPTIMIZER_STATE_OPTIONS]:
        fix = f"Restore the settings, or {restart}. A resumed optimizer keeps the former {join_names(fixed)}"
    elif {"method", "adapter.r", "adapter.peft_type"} & differences.keys():  # the weights have other shapes or meanings
        fix = f"Restore the settings, or {restart}"
    omitted = f"; {len(lines) - 6} more" if len(lines) > 6 else ""
    return f"the checkpoint {checkpoint} was written with other settings: {'; '.join(lines[:6])}{omitted}. {fix}"


def _restart_advice(checkpoint: Path) -> str:
    """Return how to start a new run from the weights of a checkpoint."""
    weights = f"model.name_or_path={checkpoint} model.from_scratch=false"
    if (checkpoint / "adapter_config.json").exists():
        weights = f"model.lora=null model.adapter={checkpoint}"
    return f"start a new run from its weights ({weights} train.resume_from_checkpoint=null train.output_dir=NEW)"


def _find_best(state: TrainerState, output_dir: str, resumed: Path) -> str | None:
    """Return the best checkpoint of a resumed run, or None.

    It is searched in output_dir, next to the resumed checkpoint (since the folder may have been moved), and at its
    stored path. A checkpoint that another run has left there is recognized by its logs.
    """
    if not state.best_global_step:
        return None
    name = f"checkpoint-{state.best_global_step}"
    # output_dir is first, because the deletion of old checkpoints compares the path of the best one as a string
    for folder in (Path(output_dir, name), resumed.parent / name, Path(state.best_model_checkpoint or name)):
        with suppress(OSError, ValueError):
            logs = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
            if json.dumps(logs) == json.dumps(state.log_history[: len(logs)]):  # as strings, because NaN != NaN
                logger.info("the best checkpoint is %s", folder)
                return str(folder)
    return None


def _restore_callbacks(trainer: TrainerInterface) -> None:
    """Restore the attributes of callbacks, such as the count of early stopping, from the checkpoint.

    Arguments of callbacks are not restored.
    """
    trainer_state: Any = trainer.state
    by_class: dict[str, list[Any]] = {}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            by_class.setdefault(type(callback).__name__, []).append(callback)
    for name, callbacks in by_class.items():
        # The next save of Trainer requires each name. It appends the states of several callbacks of a class to a list.
        new: Any = TrainerState(stateful_callbacks=callbacks).stateful_callbacks
        stored = trainer_state.stateful_callbacks.setdefault(name, new[name])
        latest = stored[-len(callbacks) :] if isinstance(stored, list) else [stored]
        for callback, state in zip(callbacks, latest, strict=False):
            for attribute, value in state["attributes"].items():
                setattr(callback, attribute, value)


@contextmanager
def input_error_on_load(checkpoint: str | None) -> Iterator[None]:
    """Convert errors about files of another model or optimizer into an InputError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, LookupError, OSError, EOFError, UnpicklingError, SafetensorError) as error:
        problem = " ".join(str(error).split())[:300]
        raise InputError(
            f"the checkpoint {checkpoint} cannot be loaded into this run ({problem}). Resume it with the model, "
            "adapter and optimizer of the run that wrote it, or start a new run from its weights"
        ) from error


@contextmanager
def safe_unpickling(trainer: TrainerInterface) -> Iterator[None]:
    """Prevent DeepSpeed from unpickling code in a checkpoint. Only tensors and its own classes are allowed.

    Raises:
        InputError: If a checkpoint has anything else and `pickle` is not in `resume_despite`.
    """
    if not engine.zero_stage(trainer.accelerator) or "pickle" in as_list(trainer.args.resume_despite):
        yield
        return
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get(_WEIGHTS_ONLY_VARIABLE)
    os.environ[_WEIGHTS_ONLY_VARIABLE] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            yield
    except UnpicklingError as error:
        symbol = re.search(r"GLOBAL (\S+)", str(error))
        raise InputError(
            f"the checkpoint would run code when DeepSpeed reads it ({symbol[1] if symbol else 'a pickle'}). If you "
            "trust it, set train.resume_despite: [pickle]"
        ) from error
    finally:
        os.environ.pop(_WEIGHTS_ONLY_VARIABLE) if before is None else os.environ.update(
            {_WEIGHTS_ONLY_VARIABLE: before}
        )


class ResumeMixin(TrainerInterface):
    """Methods of `PostTrainer` that start or resume a run."""

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the number of completed passes, and of micro-batches to skip in the next pass.

        A resumed run logs, evaluates and saves at the intervals of its own options. Its callbacks continue, and its
        best checkpoint is found. Trainer counts all steps of a stream as its first pass. In the stored state, `epoch`
        is the number of completed passes, plus 1 / max_steps for each step since then.

        Raises:
            InputError: If the step of the checkpoint is after the last step of this run.
        """
        progress = super()._init_training_state(*args, **kwargs)
        checkpoint = args[3]
        if self.state.global_step > (planned := self.state.max_steps):
            raise InputError(
                f"the checkpoint {checkpoint} is of step {self.state.global_step}, and this run ends at {planned}. "
                "Raise max_steps or num_train_epochs, or set another output_dir"
            )
        if checkpoint is not None:
            self.state.compute_steps(self.args, planned)  # intervals may have changed since the former run
            _restore_callbacks(self)
            self.state.best_model_checkpoint = _find_best(self.state, self.args.output_dir, Path(checkpoint))
        if checkpoint is None or has_length(self.train_dataset):
            return progress
        stored_max_steps = json.loads(Path(checkpoint, "trainer_state.json").read_text(encoding="utf-8"))["max_steps"]
        steps = round((self.state.epoch or 0) * stored_max_steps)
        if steps == self.state.global_step:
            return progress  # in the first pass
        skipped = 0 if self.args.ignore_data_skip else steps % stored_max_steps
        return steps // stored_max_steps, skipped * self.args.gradient_accumulation_steps
