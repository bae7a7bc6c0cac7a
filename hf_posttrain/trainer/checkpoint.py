"""Checkpoints: complete or invisible, found again, and resumed only where the numbers stay the same."""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers.trainer_utils import sort_checkpoints

from ..engines import engine
from ..errors import InputError

logger = logging.getLogger(__name__)
SAVING = ".saving"  # folder in output_dir where a checkpoint is until it is complete
LAUNCH = "launch"  # key of `launched` among the callbacks' states in trainer_state.json
_PARTS = {  # what a checkpoint holds, under the names of each engine
    "weights": ("*model*.safetensors", "*model*.bin", "pytorch_model_fsdp_0", "global_step*"),
    "optimizer": ("optimizer.pt", "optimizer.bin", "optimizer_0", "global_step*"),
    "scheduler": ("scheduler.pt", "global_step*"),
    "random state": ("rng_state*.pth",),
}
_TENSORS = (".safetensors", ".bin", ".pt", ".pth", ".distcp")


# ---- written


@contextmanager
def complete_or_invisible(trainer: Any) -> Iterator[str]:
    """The folder `output_dir/.saving` for a checkpoint, which is then renamed; older ones are deleted. On all ranks."""
    args, state, accelerator = trainer.args, trainer.state, trainer.accelerator
    run, name = Path(args.output_dir), f"checkpoint-{state.global_step}"
    if args.should_save:
        shutil.rmtree(run / SAVING, ignore_errors=True)  # of a run that was killed
    accelerator.wait_for_everyone()
    yield str(run / SAVING)
    # HF has looked for the best checkpoint in .saving
    best = run / f"checkpoint-{state.best_global_step}"
    if best.name == name or best.is_dir():
        state.best_model_checkpoint = str(best)
    accelerator.wait_for_everyone()
    if args.should_save:
        new = run / SAVING / name
        files = {str(file.relative_to(new)): file.stat().st_size for file in new.rglob("*") if file.suffix in _TENSORS}
        state.stateful_callbacks[LAUNCH] = launched(trainer) | {"files": files}
        state.save_to_json(str(new / "trainer_state.json"))
        # a kill at any moment leaves whole folders: one is renamed in, and renamed away before it is deleted
        if (run / name).exists():  # the same step of an earlier run
            (run / name).rename(run / SAVING / "replaced")
        new.rename(run / name)
        if (limit := args.save_total_limit or 0) > 0:
            # oldest first; the best and the newest stand last and are always kept
            known = state.best_model_checkpoint
            found = [Path(path) for path in sort_checkpoints(str(run), use_mtime=True, best_model_checkpoint=known)]
            kept = max(limit, len({found[-1], Path(known or found[-1])}))
            for old in found[:-kept]:
                old.rename(run / SAVING / old.name)
        shutil.rmtree(run / SAVING)
    accelerator.wait_for_everyone()


def launched(trainer: Any) -> dict[str, Any]:
    """What must be the same again for a resumed run to go on as if nothing had happened."""
    accelerator, name = trainer.accelerator, engine.name(trainer.accelerator)
    if name == "fsdp2":
        name += f" with {accelerator.state.fsdp_plugin.state_dict_type.name}"
    rows = trainer.get_total_train_batch_size(trainer.args)
    return {"engine": name, "processes": accelerator.num_processes, "rows_per_step": rows}


# ---- found again


def find_checkpoint(output_dir: str | os.PathLike[str], weights_only: bool = False) -> str | None:
    """The newest complete `checkpoint-N` in `output_dir`, or None; the log names it, and what is passed over.

    weights_only: of a run with save_only_model.
    """
    for path in map(Path, reversed(sort_checkpoints(str(output_dir)))):
        if not re.fullmatch(r"checkpoint-\d+", path.name):
            continue  # HF takes checkpoint-5-tmp for one too
        if not (absent := lacking(path, weights_only)):
            logger.info("resuming %s", path)
            return str(path)
        logger.warning("%s is incomplete, without %s: passed over", path, ", ".join(absent))
    logger.info("no complete checkpoint in %s: a fresh start", output_dir)
    return None


def find_resumed(trainer: Any, wanted: str | bool | None) -> str | bool | None:
    """The folder that `train(resume_from_checkpoint=wanted)` means: a folder, "auto" or True; None is a fresh start.

    Raises InputError where True finds none, and where this run could not go on as the one that wrote it.
    """
    if wanted in (True, "auto"):
        folder, weights_only = trainer.args.output_dir, trainer.args.save_only_model
        [found] = broadcast_object_list([find_checkpoint(folder, weights_only)])  # the first rank's view of the disk
        if found is None and wanted is True:
            raise InputError(f"resume_from_checkpoint: there is no complete checkpoint in {folder}")
        wanted = found
    if isinstance(wanted, str):
        check_launch(trainer, Path(wanted))
    return wanted


def lacking(folder: Path, weights_only: bool) -> list[str]:
    """What keeps a checkpoint from being resumed: parts, a readable trainer_state.json, files of their full length."""
    # by names, and then by the lengths that were noted when it was written
    wanted = {"weights": _PARTS["weights"]} if weights_only else _PARTS
    absent = [name for name, patterns in wanted.items() if not any(any(folder.glob(p)) for p in patterns)]
    try:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        state["global_step"]
    except (OSError, ValueError, KeyError):
        return [*absent, "trainer_state.json"]
    files = state.get("stateful_callbacks", {}).get(LAUNCH, {}).get("files", {})
    found = {name: (folder / name).stat().st_size for name in files if (folder / name).exists()}
    return absent or [f"the whole of {name}" for name, size in files.items() if found.get(name, 0) < size]


def check_launch(trainer: Any, checkpoint: Path) -> None:
    """Raises InputError where this run would not go on as the one that wrote the checkpoint."""
    adapter = (checkpoint / "adapter_config.json").exists()
    weights = f"model.lora=null model.adapter={checkpoint}" if adapter else f"model.name_or_path={checkpoint}"
    restart = f"start a new run from its weights ({weights})"
    if engine.changes_weights(trainer.accelerator) and (absent := lacking(checkpoint, weights_only=False)):
        raise InputError(
            f"the checkpoint {checkpoint} has weights, but no {', '.join(absent)} (save_only_model), and FSDP2 and "
            f"DeepSpeed cannot resume it: {restart}"
        )
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    then, now = state.get("stateful_callbacks", {}).get(LAUNCH), launched(trainer)
    if then is None:
        return  # not written by this package
    # one process and DDP write the same files, whole on rank 0
    if then["engine"] != now["engine"] and not {then["engine"], now["engine"]} <= {"single", "ddp"}:
        raise InputError(
            f"the checkpoint {checkpoint} was written under {then['engine']} and this run is {now['engine']}: its "
            f"optimizer state cannot be read here. Launch as before, or {restart}"
        )
    if now["engine"].startswith("zero") and then["processes"] != now["processes"]:
        raise InputError(
            f"the checkpoint {checkpoint} was written by {then['processes']} processes and this run has "
            f"{now['processes']}: DeepSpeed cut its optimizer state for the former. Launch as many, or {restart}"
        )
    if then["rows_per_step"] != now["rows_per_step"] and not trainer.args.ignore_data_skip:
        raise InputError(
            f"the checkpoint {checkpoint} trained {then['rows_per_step']} rows a step and this run "
            f"{now['rows_per_step']}, so rows would be skipped or seen twice: keep per_device_train_batch_size x "
            "gradient_accumulation_steps x processes, or set ignore_data_skip to begin the epoch again"
        )
