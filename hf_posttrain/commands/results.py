"""Storage of the metrics of `hf-posttrain eval` in a run's folder, next to the metrics of its training."""

import argparse
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import InputError, count_noun

logger = logging.getLogger(__name__)
EVALUATIONS = "evaluations.json"
RESULTS = "all_results.json"
_IDENTITY = ("model", "adapter", "data", "split", "task")
"""Keys that identify an evaluation. A later evaluation with the same values replaces the earlier one."""


def results_folder(arguments: argparse.Namespace) -> Path | None:
    """Return the folder to store metrics in: --output, or the folder of the evaluated run, or None without a run.

    Raises:
        InputError: For a folder that cannot be written to, or with invalid files.
    """
    folder = arguments.output or Path(arguments.adapter or arguments.model)
    if not arguments.output and not any((folder / name).is_file() for name in ("trainer_state.json", "run.json")):
        return None
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise InputError(f"{folder} cannot be written, and the metrics would be stored there. Set another --output")
    read_results(folder)  # raises before the evaluation, which may take hours
    return folder


def read_results(folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the contents of EVALUATIONS and RESULTS in a folder, empty for missing files.

    Raises:
        InputError: For files with other contents.
    """
    contents: list[Any] = []
    for name, empty in {EVALUATIONS: list[Any](), RESULTS: dict[str, Any]()}.items():
        try:
            contents.append(json.loads((folder / name).read_text(encoding="utf-8")))
        except FileNotFoundError:
            contents.append(empty)
        except (OSError, ValueError) as error:
            problem = f"{folder / name} cannot be read as JSON ({error})"
            raise InputError(f"{problem}. Correct the file, or move it to another folder") from error
        if type(contents[-1]) is not type(empty) or not all(isinstance(item, dict | str) for item in contents[-1]):
            problem = f"{folder / name} must contain only evaluations"
            raise InputError(f"{problem}. Move the file to another folder")
    return contents[0], contents[1]


def store_result(folder: Path, evaluations: list[dict[str, Any]]) -> None:
    """Add evaluations to both files of a folder, in place of earlier ones. Each file is written atomically."""
    from ..trainer.output_dir import write_json

    stored, results = read_results(folder)
    latest = {_stem(entry): _identity(entry) for entry in stored}  # identities of the metrics in RESULTS
    for entry in evaluations:
        stem = _stem(entry)
        new = _identity(entry)
        old = latest.get(stem, new)
        if changes := [f"{name} {old[name]}, now {new[name]}" for name in _IDENTITY if old[name] != new[name]]:
            message = "%s: the metrics eval_%s_... of an earlier evaluation (%s) are replaced. %s has both"
            logger.warning(message, RESULTS, stem, ", ".join(changes), EVALUATIONS)
        results |= {f"eval_{stem}_{name}": value for name, value in entry["metrics"].items()}

    identities = [_identity(entry) for entry in evaluations]
    others = [entry for entry in stored if _identity(entry) not in identities]
    write_json(folder / EVALUATIONS, others + evaluations, indent=4)
    write_json(folder / RESULTS, dict(sorted(results.items())), indent=4)
    logger.info("the metrics are stored in %s and %s", folder / EVALUATIONS, RESULTS)


def _identity(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry.get(name) for name in _IDENTITY}


def _stem(entry: dict[str, Any]) -> str:
    """Return the name of an evaluation in RESULTS."""
    return str(entry.get("task") or Path(str(entry.get("data")).removesuffix(".gz")).stem)


def as_table(entry: dict[str, Any]) -> str:
    """Return an evaluation as text for a terminal."""
    width = max(map(len, entry["metrics"]), default=0)
    lines = [f"  {name:{width}}  {value:.6g}" for name, value in entry["metrics"].items()]
    lines += [f"  left out: {line}" for line in entry["left_out"]]
    title = f"{entry.get('task') or entry['data']}: {count_noun(entry['rows'], 'row')}, {entry['model']}"
    return "\n".join([title, *lines])
