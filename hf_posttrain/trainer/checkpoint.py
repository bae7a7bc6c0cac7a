"""Checkpoints: complete or invisible, found again, and resumed only where the numbers stay the same."""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
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
from ..monitoring.symptoms import as_names
from . import run_fingerprint
from .interface import TrainerInterface
from .rules import NO_OPTIMIZER_STATE

logger = logging.getLogger(__name__)
SAVING_FOLDER = ".saving"  # folder in output_dir where a checkpoint is until it is complete
LAUNCH_KEY = "launch"  # key of `launch_state` among the callbacks' states in trainer_state.json
_NAME = re.compile(r"checkpoint-\d+")
_PARTS = {  # what a checkpoint holds, under the names of each engine
    "weights": ("*model*.safetensors", "*/adapter_model.*", "*model*.bin", "pytorch_model_fsdp_0", "global_step*"),
    "optimizer": ("optimizer.pt", "optimizer.bin", "optimizer_0", "global_step*"),
    "scheduler": ("scheduler.pt", "global_step*"),
    "random state": ("rng_state*.pth",),
}
_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch's variable: torch.load unpickles no code, whoever calls it
_OTHERS_READ = ("config.json", "adapter_config.json", "latest")
_TENSORS = (".safetensors", ".bin", ".pt", ".pth", ".distcp")


# ---- written


@contextmanager
def atomic_checkpoint(trainer: Any) -> Iterator[str]:
    """The folder `output_dir/.saving` for a checkpoint, which is then renamed; older ones are deleted. On all ranks."""
    args = trainer.args
    state = trainer.state
    accelerator = trainer.accelerator
    run = Path(args.output_dir)
    name = f"checkpoint-{state.global_step}"
    if args.should_save:
        shutil.rmtree(run / SAVING_FOLDER, ignore_errors=True)  # of a run that was killed
    accelerator.wait_for_everyone()
    yield str(run / SAVING_FOLDER)
    # HF has looked for the best checkpoint in .saving; in the folder one of that step may be of an earlier run
    if state.best_global_step == state.global_step:
        state.best_model_checkpoint = str(run / name)
    accelerator.wait_for_everyone()
    if args.should_save:
        new = run / SAVING_FOLDER / name
        files = {str(file.relative_to(new)): fingerprint(file) for file in new.rglob("*") if _is_read(file)}
        state.stateful_callbacks[LAUNCH_KEY] = launch_state(trainer) | {
            "files": files,
            "run": trainer.run_description,
            "wandb": reporters.wandb_id(),
        }
        state.save_to_json(str(new / "trainer_state.json"))
        # a kill at any moment leaves whole folders: one is renamed in, and renamed away before it is deleted
        if (run / name).exists():  # the same step of an earlier run
            (run / name).rename(run / SAVING_FOLDER / "replaced")
        new.rename(run / name)
        if (limit := args.save_total_limit or 0) > 0:
            # oldest first; the best and the newest stand last and are always kept
            known = state.best_model_checkpoint
            found = [Path(path) for path in sort_checkpoints(str(run), use_mtime=True, best_model_checkpoint=known)]
            kept = max(limit, len({found[-1], Path(known or found[-1])}))
            for old in found[:-kept]:
                old.rename(run / SAVING_FOLDER / old.name)
        shutil.rmtree(run / SAVING_FOLDER)
    accelerator.wait_for_everyone()


def launch_state(trainer: TrainerInterface) -> dict[str, Any]:
    """What must be the same again for a resumed run to go on as if nothing had happened."""
    accelerator = trainer.accelerator
    name = engine.engine_name(trainer.accelerator)
    if name == "fsdp2":
        name += f" with {accelerator.state.fsdp_plugin.state_dict_type.name}"
    rows = trainer.get_total_train_batch_size(trainer.args)
    return {"engine": name, "processes": accelerator.num_processes, "rows_per_step": rows}


# ---- found again


def find_checkpoint(output_dir: str | os.PathLike[str], newest: float = inf) -> str | None:
    """The newest complete `checkpoint-N` in `output_dir`, or None; the log names what is passed over.

    newest: the largest N that is looked at.
    """
    for path in map(Path, reversed(sort_checkpoints(str(output_dir)))):
        if not _NAME.fullmatch(path.name) or _step(path) > newest:
            continue  # HF takes checkpoint-5-tmp for one too
        if not (absent := incomplete_parts(path)):
            return str(path)
        logger.warning("%s is incomplete, without %s: passed over", path, ", ".join(absent))
    return None


def step_in_output_dir(trainer: TrainerInterface, resumed: str | bool | None) -> int | None:
    """The step of a checkpoint that is resumed, where it is one of this run's own folder."""
    folder = Path(resumed).resolve() if isinstance(resumed, str) else Path()
    own = folder.parent == Path(trainer.args.output_dir).resolve() and _NAME.fullmatch(folder.name)
    return _step(folder) if own else None


def wandb_id(checkpoint: str | bool | None) -> str | None:
    """The id of the W&B run that wrote a checkpoint."""
    return None if not isinstance(checkpoint, str) else _state(Path(checkpoint)).get("wandb")


def _state(checkpoint: Path) -> dict[str, Any]:
    """What `atomic_checkpoint` has noted in a readable checkpoint; nothing in one of another package."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return state.get("stateful_callbacks", {}).get(LAUNCH_KEY) or {}


def resolve_checkpoint(trainer: TrainerInterface, wanted: str | bool | None) -> str | None:
    """The folder that `train(resume_from_checkpoint=wanted)` means: a folder, "auto" or True; None is a fresh start.

    Raises InputError on all ranks where True finds none, where machines do not share one, and where this run could not
    go on as the one that wrote it.
    """
    if wanted in (True, "auto"):
        if trainer.args.save_only_model:
            raise InputError(NO_OPTIMIZER_STATE)
        folder = trainer.args.output_dir
        found = _find_common(trainer)
        if found is None and wanted is True:
            raise InputError(f"resume_from_checkpoint: there is no complete checkpoint in {folder}")
        if found is None:
            logger.info("no complete checkpoint in %s: a fresh start", folder)
        wanted = found
    if not isinstance(wanted, str):
        return None
    # each machine looks at its own disk, and all ranks hear what is wrong with any
    problems = gather_object([next(resume_problems(trainer, Path(wanted)), None)])
    if problem := next(filter(None, problems), None):
        raise InputError(problem)
    logger.info("resuming %s", wanted)
    return wanted


def _find_common(trainer: TrainerInterface) -> str | None:
    """The newest complete checkpoint in output_dir that each machine has, or None where no machine has any."""
    args = trainer.args
    newest = inf
    while True:
        own = find_checkpoint(args.output_dir, newest) if args.local_process_index == 0 else None
        said = gather_object([(args.local_process_index == 0, own and Path(own).name)])
        names = {rank: name for rank, (asked, name) in enumerate(said) if asked}
        if len(set(names.values())) == 1:
            return names[0] and str(Path(args.output_dir, names[0]))
        if None in names.values():
            seen = ", ".join(f"rank {rank}: {name or 'none'}" for rank, name in names.items())
            raise InputError(
                f"resume_from_checkpoint: the machines have no complete checkpoint in common in {args.output_dir} "
                f"({seen}): put output_dir on a disk that all share, or copy a checkpoint to each"
            )
        newest = min(_step(Path(str(name))) for name in names.values())


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def incomplete_parts(folder: Path) -> list[str]:
    """What keeps a checkpoint from being resumed: parts that are not there, and what `damaged_files` says."""
    absent = missing_parts(folder)
    return absent + [name for name in damaged_files(folder) if not (absent and name.startswith("the whole of"))]


def missing_parts(folder: Path) -> list[str]:
    """Parts of a checkpoint of which no file is there."""
    return [name for name, patterns in _PARTS.items() if not any(any(folder.glob(p)) for p in patterns)]


def damaged_files(folder: Path) -> list[str]:
    """What in a checkpoint is not as it was written: files that are gone, shorter, changed or unreadable."""
    try:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        state["global_step"]
        files = state.get("stateful_callbacks", {}).get(LAUNCH_KEY, {}).get("files", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ["trainer_state.json"]
    found = [
        f"the whole of {name}"
        for name, then in files.items()
        if not (file := folder / name).is_file() or (file.suffix in _TENSORS and fingerprint(file) != then)
    ]
    unread = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if not _is_readable(file)]
    return list(dict.fromkeys(found + [f"a readable {name}" for name in unread if f"the whole of {name}" not in found]))


def fingerprint(file: Path) -> list[Any]:
    """[bytes, a hash of them: of large files of 64 blocks, evenly spread]."""
    size = file.stat().st_size
    block = 2**14
    digest = xxhash.xxh3_64()
    with file.open("rb") as opened:
        for start in range(0, size, max(block, size // 64)):
            opened.seek(start)
            digest.update(opened.read(block))
    return [size, digest.hexdigest()]


def _is_read(file: Path) -> bool:
    """Does a resumed run read this file of a checkpoint?"""
    return file.suffix in _TENSORS or file.name in _OTHERS_READ


def _is_readable(file: Path) -> bool:
    """Has a file of a checkpoint the form of its kind? Looks at its beginning and end alone."""
    try:
        if file.name in ("config.json", "adapter_config.json") or file.name.endswith(".index.json"):
            return isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                return True
        if file.suffix in (".pt", ".pth", ".bin"):
            with file.open("rb") as opened:  # torch's zip files, and pickles as DeepSpeed writes them
                return opened.read(2) in (b"PK", b"\x80\x02") and file.stat().st_size > 2
    except (OSError, ValueError, SafetensorError):
        return False
    return True


def resume_problems(trainer: Any, checkpoint: Path) -> Iterator[str]:
    """Why this run would not go on as the one that wrote the checkpoint; the first is to be told."""
    adapter = (checkpoint / "adapter_config.json").exists()
    this = f"the checkpoint {checkpoint}"
    weights = f"model.name_or_path={checkpoint} model.from_scratch=false"
    if adapter:
        weights = f"model.lora=null model.adapter={checkpoint}"
    restart = f"start a new run from its weights ({weights})"
    if not checkpoint.is_dir():
        yield f"resume_from_checkpoint: there is no folder {checkpoint}{path_hint(checkpoint)}"
    if bad := damaged_files(checkpoint):
        yield f"{this} is damaged, without {', '.join(bad)}: take another, or auto"
    if (absent := missing_parts(checkpoint)) and "weights" not in absent:
        yield f"{this} has weights, but no {', '.join(absent)} (save_only_model): {restart}"
    then = _state(checkpoint)
    now = launch_state(trainer)
    if trainer.run_description and not then.get("run"):
        logger.info("%s does not say which settings wrote it: they are not compared with those of this run", checkpoint)
    if not then:
        return  # not written by this package
    (engine_then, processes_then, rows_then), (engine_now, processes_now, rows_now) = (
        [each[key] for key in ("engine", "processes", "rows_per_step")] for each in (then, now)
    )
    # one process and DDP write the same files, whole on rank 0
    if engine_then != engine_now and not {engine_then, engine_now} <= {"single", "ddp"}:
        problem = "its optimizer state cannot be read here. Launch as before"
        yield f"{this} was written under {engine_then} and this run is {engine_now}: {problem}, or {restart}"
    if engine_now.startswith("zero") and processes_then != processes_now:
        counts = f"was written by {processes_then} processes and this run has {processes_now}"
        yield f"{this} {counts}: DeepSpeed cut its optimizer state for the former. Launch as many, or {restart}"
    if rows_then != rows_now and not trainer.args.ignore_data_skip:
        mend = "keep per_device_train_batch_size x gradient_accumulation_steps x processes, or set ignore_data_skip"
        problem = f"rows would be skipped or seen twice: {mend} to begin the epoch again"
        yield f"{this} trained {rows_then} rows a step and this run {rows_now}, so {problem}"
    now_run = dict(trainer.run_description)
    if Path(trainer.scored[0].config.name_or_path) == checkpoint:
        now_run.pop("start_weights", None)  # the model was loaded from the checkpoint, which has them anyway
    if found := run_fingerprint.differences(
        then.get("run", {}), now_run, trainer.args.resume_despite, trainer.method.groups
    ):
        lines = list(found.values())
        sections = dict.fromkeys(key.partition(".")[0] for key in found)
        way = f"{restart}, or set train.resume_despite: [{join_names(sections)}]"
        if fixed := [key for key in found if key in run_fingerprint.OPTIMIZER_STATE_OPTIONS]:
            way = f"or {restart}: the optimizer keeps the former {join_names(fixed)}"
        more = f"; {len(lines) - 6} more" if len(lines) > 6 else ""
        yield f"{this} was written with other settings: {'; '.join(lines[:6])}{more}. To resume, set them back, {way}"


def _find_best(state: TrainerState, output_dir: str, resumed: Path) -> str | None:
    """The best checkpoint of a run that is resumed: in output_dir, next to the one that is, since the folder may have
    been moved, or where it was. By its logs it is told from one that another run has left there.
    """
    if not state.best_global_step:
        return None
    name = f"checkpoint-{state.best_global_step}"
    # output_dir first: where old ones are deleted, the best is known by its path as that spells it
    for place in (Path(output_dir, name), resumed.parent / name, Path(state.best_model_checkpoint or name)):
        with suppress(OSError, ValueError):
            logged = json.loads((place / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
            if json.dumps(logged) == json.dumps(state.log_history[: len(logged)]):  # as text, for NaN
                logger.info("the best checkpoint is %s", place)
                return str(place)
    return None


def _restore_callbacks(trainer: Any) -> None:
    """Give the callbacks what they had counted when the checkpoint was written, such as the patience of early stopping.
    What they were given when they were made stays as it is now.
    """
    of_class: dict[str, list[Any]] = {}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            of_class.setdefault(type(callback).__name__, []).append(callback)
    for name, callbacks in of_class.items():
        # HF's next save looks for each name, and of several of a class adds their states to a list at each save
        new: Any = TrainerState(stateful_callbacks=callbacks).stateful_callbacks
        kept = trainer.state.stateful_callbacks.setdefault(name, new[name])
        latest = kept[-len(callbacks) :] if isinstance(kept, list) else [kept]
        for callback, found in zip(callbacks, latest, strict=False):
            for attribute, value in found["attributes"].items():
                setattr(callback, attribute, value)


@contextmanager
def input_error_on_load(checkpoint: str | None) -> Iterator[None]:
    """Raises InputError where files of a checkpoint are not those of this run's model and optimizer."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, LookupError, OSError, EOFError, UnpicklingError, SafetensorError) as error:
        problem = " ".join(str(error).split())[:300]
        raise InputError(
            f"the checkpoint {checkpoint} cannot be loaded into this run ({problem}): resume it with the model, "
            "adapter and optimizer of the run that wrote it, or start a new run from its weights"
        ) from error


@contextmanager
def safe_unpickling(trainer: TrainerInterface) -> Iterator[None]:
    """DeepSpeed unpickles whatever its checkpoints hold, code too: inside, tensors and its own records alone are read.

    Raises InputError for anything else, unless `pickle` is in resume_despite.
    """
    if not engine.zero_stage(trainer.accelerator) or "pickle" in as_names(trainer.args.resume_despite):
        yield
        return
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get(_FORCED)
    os.environ[_FORCED] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            yield
    except UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise InputError(
            f"the checkpoint would run code when DeepSpeed reads it ({found[1] if found else 'a pickle'}): if it is of "
            "your own writing, train.resume_despite: [pickle] lets it"
        ) from error
    finally:
        os.environ.pop(_FORCED) if before is None else os.environ.update({_FORCED: before})


class ResumeMixin(TrainerInterface):
    """The state from which `PostTrainer` starts or resumes."""

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the passes that are done, and the micro-batches of the next pass to skip.

        A resumed run logs, evaluates and saves as often as its own options say, its callbacks continue, and its best
        checkpoint is found. Trainer takes all steps of a stream as its first pass; but `epoch` counts the passes that
        are done, and each step since then as 1 / max_steps. Raises InputError where the checkpoint is of a later step
        than the last one of this run.
        """
        found = super()._init_training_state(*args, **kwargs)
        checkpoint = args[3]
        if self.state.global_step > (planned := self.state.max_steps):
            raise InputError(
                f"the checkpoint {checkpoint} is of step {self.state.global_step}, and this run takes {planned}: raise "
                "max_steps or num_train_epochs, or train into another output_dir"
            )
        if checkpoint is not None:
            self.state.compute_steps(self.args, planned)  # how often it logs, evaluates and saves may change
            _restore_callbacks(self)
            self.state.best_model_checkpoint = _find_best(self.state, self.args.output_dir, Path(checkpoint))
        if checkpoint is None or has_length(self.train_dataset):
            return found
        whole = json.loads(Path(checkpoint, "trainer_state.json").read_text(encoding="utf-8"))["max_steps"]
        if (steps := round((self.state.epoch or 0) * whole)) == self.state.global_step:
            return found  # in the first pass
        skipped = 0 if self.args.ignore_data_skip else steps % whole
        return steps // whole, skipped * self.args.gradient_accumulation_steps
