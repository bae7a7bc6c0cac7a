"""Where the numbers of `hf-posttrain eval` are kept: in a run's folder, next to those of its training."""

import argparse
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import InputError

logger = logging.getLogger(__name__)
EVALUATIONS = "evaluations.json"
RESULTS = "all_results.json"
_IDENTITY = ("model", "adapter", "data", "split", "task")
"""Two evaluations that agree in these are one: the later replaces the earlier."""


def results_folder(given: argparse.Namespace) -> Path | None:
    """Where the numbers are kept: --output, or the folder of the run that is evaluated. Raises InputError where that
    cannot be.
    """
    folder = given.output or Path(given.adapter or given.model)
    if not given.output and not any((folder / name).is_file() for name in ("trainer_state.json", "run.json")):
        return None
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise InputError(f"{folder} cannot be written, where the numbers would be kept: give another --output")
    read_results(folder)  # what is broken there is known before hours pass
    return folder


def read_results(folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The evaluations and the results that a folder has. Raises InputError for files that hold something else."""
    found: list[Any] = []
    for name, empty in {EVALUATIONS: list[Any](), RESULTS: dict[str, Any]()}.items():
        try:
            found.append(json.loads((folder / name).read_text(encoding="utf-8")))
        except FileNotFoundError:
            found.append(empty)
        except (OSError, ValueError) as error:
            raise InputError(f"{folder / name} cannot be read as JSON ({error}): mend it, or move it away") from error
        if type(found[-1]) is not type(empty) or not all(isinstance(each, dict | str) for each in found[-1]):
            raise InputError(f"{folder / name} holds something else than evaluations: move it away")
    return found[0], found[1]


def store_result(folder: Path, found: list[dict[str, Any]]) -> None:
    """Write evaluations into both files of a folder, in the place of earlier ones; each file whole, or not at all."""
    from ..trainer.output_dir import write_json

    kept, results = read_results(folder)
    last = {_stem(entry): _identity(entry) for entry in kept}  # the later ones are those of RESULTS
    for entry in found:
        stem = _stem(entry)
        now = _identity(entry)
        before = last.get(stem, now)
        if differing := [f"{name} {before[name]}, now {now[name]}" for name in _IDENTITY if before[name] != now[name]]:
            said = "%s: the numbers eval_%s_... of an earlier evaluation (%s) are replaced; %s has both"
            logger.warning(said, RESULTS, stem, ", ".join(differing), EVALUATIONS)
        results |= {f"eval_{stem}_{name}": value for name, value in entry["metrics"].items()}
    new = [_identity(entry) for entry in found]
    write_json(folder / EVALUATIONS, [entry for entry in kept if _identity(entry) not in new] + found, indent=4)
    write_json(folder / RESULTS, dict(sorted(results.items())), indent=4)
    logger.info("kept in %s and %s", folder / EVALUATIONS, RESULTS)


def _identity(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry.get(name) for name in _IDENTITY}


def _stem(entry: dict[str, Any]) -> str:
    """What RESULTS calls an evaluation."""
    return str(entry.get("task") or Path(str(entry.get("data")).removesuffix(".gz")).stem)


def as_table(entry: dict[str, Any]) -> str:
    """An evaluation as people read it."""
    width = max(map(len, entry["metrics"]), default=0)
    lines = [f"  {name:{width}}  {value:.6g}" for name, value in entry["metrics"].items()]
    lines += [f"  left out: {line}" for line in entry["left_out"]]
    return "\n".join([f"{entry.get('task') or entry['data']}: {entry['rows']} rows, {entry['model']}", *lines])
