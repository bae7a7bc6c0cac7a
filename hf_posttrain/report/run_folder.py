"""Reader of a run's folder. Nothing is unpickled, and access tokens are removed."""

import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import InputError, path_hint
from ..methods import METHODS
from ..recipe.yaml_tree import read_tree, write_tree
from ..trainer.method_spec import Method
from ..trainer.run_start import is_earlier, run_start

STATE = "trainer_state.json"
ROUNDS = "_rounds/rounds.json"
HIDDEN = "<hidden>"
_NOT_CURVES = ("step", "epoch", "total_flos", "train_loss", "num_input_tokens_seen")
_TIME_SUFFIXES = ("_runtime", "_samples_per_second", "_steps_per_second")


class Series(NamedTuple):
    """Values of one key of the log, which may be non-finite, at increasing optimizer steps."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    def finite(self) -> list[tuple[float, float]]:
        """Return the (step, value) with a finite value."""
        return [*map(tuple, self.finite_points().tolist())]

    def finite_points(self) -> np.ndarray:
        """Return the steps and values with a finite value, [n, 2]."""
        points = np.array(self, dtype=float).reshape(2, -1).T
        return points[np.isfinite(points[:, 1])]


History: TypeAlias = Mapping[str, Series]
"""Key of the log, such as eval_loss -> its values."""


def read_history(log: Iterable[dict[str, Any]]) -> History:
    """Return the values of a log_history (trainer_state.json), without times and totals.

    Of two values at one step the first is used, since the second belongs to the best weights, which are loaded at the
    end.
    """
    values: dict[str, dict[float, float]] = {}
    for entry in log:
        for key, value in _curves(entry).items():
            values.setdefault(key, {}).setdefault(entry.get("step", 0), value)
    return {key: Series(*zip(*sorted(points.items()), strict=True)) for key, points in values.items()}


def _adapter_location(folder: Path) -> str | None:
    """Return the relative folder of an adapter, which is "." or the name of an adapter other than default, or None."""
    files = (folder / "adapter_config.json", *sorted(folder.glob("*/adapter_config.json")))
    locations = [file.parent for file in files if file.exists() and not file.parent.name.startswith("checkpoint-")]
    return locations[0].relative_to(folder).as_posix() if locations else None


def _curves(entry: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a log entry that belong to curves."""
    names = _curve_names(tuple(key for key, value in entry.items() if isinstance(value, int | float)))
    return {name: float(entry[key]) for key, name in names.items()}


@lru_cache
def _curve_names(keys: tuple[str, ...]) -> dict[str, str]:
    """Return the keys of a log entry that belong to curves, and the names of the curves.

    Names of an evaluation start with eval_, also if the user has set another prefix.
    """
    prefix = next((key.removesuffix("_runtime") for key in keys if key.endswith("_runtime")), "eval")
    added = "" if prefix in ("eval", "train") or prefix.startswith("eval_") else "eval_"
    return {
        key: added + key if key.startswith(f"{prefix}_") else key
        for key in keys
        if key not in _NOT_CURVES and not key.endswith(_TIME_SUFFIXES)
    }


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder. Fields without a file are empty."""

    folder: Path
    name: str
    """Name of the folder."""
    state: dict[str, Any]
    """TrainerState of the run, or of its newest checkpoint."""
    steps: tuple[int, int]
    """Completed and planned optimizer steps."""
    history: History
    last: dict[str, float]
    """Last value of each curve. For saved best weights, the values at their step."""
    best_step: int | None
    """Step of the saved weights, if they are the best ones and not the last."""
    recipe: dict[str, Any]
    """recipe.yaml as a tree."""
    recipe_text: str
    """recipe.yaml as text."""
    record: dict[str, Any]
    """run.json."""
    results: dict[str, Any]
    """all_results.json, which is written last."""
    audit: dict[str, Any]
    """audit.json."""
    samples: list[dict[str, Any]]
    """samples.json."""
    rounds_section: dict[str, Any]
    """Section `rounds` of the recipe, or else of run.json."""
    rounds: list[dict[str, Any]]
    """_rounds/rounds.json, the results of each round."""
    evaluations: list[dict[str, Any]]
    """evaluations.json, which `hf-posttrain eval` writes."""
    method: str
    """sft, dpo, ..."""
    method_spec: Method | None
    """The method, or None if this version does not have it."""
    base_model: str
    """Hub name or folder of the model that was trained."""
    arguments: dict[str, Any]
    """Arguments of training: all relevant ones from run.json, or else the ones in the recipe."""
    adapter: str | None
    """Relative folder of the adapter, "." for the folder itself, or None for a full model."""
    lora: dict[str, Any]
    """Options of the adapter."""
    sources: dict[str, list[dict[str, Any]]]
    """Sources of the rows in the recipe, for "train" and "eval"."""

    @property
    def takes_images(self) -> bool:
        """Whether the model is a vision-language model, whose processor is saved with it."""
        return (self.folder / "processor_config.json").exists()

    @property
    def is_reward_model(self) -> bool:
        """Whether the model is a sequence classifier, which scores answers and generates none."""
        return self.method_spec is not None and self.method_spec.head == "score"


def read_run(folder: str | Path) -> Run:
    """Read a run.

    Args:
        folder: Its output_dir, or a checkpoint.

    Raises:
        InputError: For a folder without a run, and for invalid files.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise InputError(f"there is no folder {folder}{path_hint(folder)}. Use the output_dir of a run")
    # The state of the run is written when it ends. A newer checkpoint means that the run was resumed, or is running.
    # Both files may belong to an earlier run if a new one was started in its folder.
    record = _hide_tokens(_read_json(folder / "run.json", {}))
    started = run_start(folder / "run.json", record)
    numbered = [(path.parent.name.removeprefix("checkpoint-"), path) for path in folder.glob(f"checkpoint-*/{STATE}")]
    checkpoints = [path for _, path in sorted((int(number), path) for number, path in numbered if number.isdecimal())]
    states = [path for path in (folder / STATE, *checkpoints) if path.exists()]
    run_states, checkpoint_states = (
        [path for path in paths if path in states and not is_earlier(path, started)]
        for paths in ([folder / STATE], checkpoints)
    )
    if not states:
        raise InputError(f"{folder} contains no run, since neither the folder nor a checkpoint-* in it has a {STATE}")
    state_file, state = _latest([*run_states, *checkpoint_states[-1:]] or states)
    state = state if run_states or checkpoint_states else {}

    # recipe and results may belong to an earlier run in the same folder
    results = folder / "all_results.json"
    recipe = folder / "recipe.yaml"
    tree = {}
    text = ""
    if not _is_outdated(recipe, state_file, started):
        original, _ = read_tree(recipe)
        if not isinstance(original, dict):
            raise InputError(f"{recipe} is not a recipe. Correct the file, or move it to another folder")
        tree = _hide_tokens(original)
        text = recipe.read_text(encoding="utf-8") if tree == original else write_tree(tree)

    # the recipe contains the requested settings and run.json the actual ones; a run from Python has no recipe
    model = tree.get("model") or {}
    data = tree.get("data") or {}
    method = str(tree.get("method") or record.get("method") or "")
    rounds_section = tree.get("rounds") or record.get("rounds") or {}
    sources = {split: data.get(split) or [] for split in ("train", "eval")}
    arguments = tree.get("train", {}) | record.get("arguments", {})
    # the best weights are loaded when a run ends, and then its own state is written
    is_finished = state_file == folder / STATE and not folder.name.startswith("checkpoint-")
    best = saved_best(state) if is_finished and arguments.get("load_best_model_at_end") else None
    best = None if best == state.get("global_step") else best
    history = read_history(state.get("log_history", []))
    return Run(
        folder=folder,
        name=folder.resolve().name,
        state=state,
        steps=(int(state.get("global_step", 0)), int(state.get("max_steps", 0))),
        history=history,
        last=_last_values(state, history, best),
        best_step=best,
        recipe=tree,
        recipe_text=text,
        record=record,
        results={} if _is_outdated(results, state_file, started) else _read_json(results),
        audit=_read_json(folder / "audit.json", {}),
        samples=_read_json(folder / "samples.json", []),
        rounds_section=rounds_section,
        rounds=_read_json(folder / ROUNDS, []) if rounds_section else [],
        evaluations=_read_json(folder / "evaluations.json", []),
        method=method,
        method_spec=METHODS.get(method),
        base_model=str(model.get("name_or_path") or record.get("base_model") or ""),
        arguments=arguments,
        adapter=_adapter_location(folder),
        lora=record.get("lora") or model.get("lora") or {},
        sources={split: entries if isinstance(entries, list) else [entries] for split, entries in sources.items()},
    )


def saved_best(state: Mapping[str, Any]) -> int | None:
    """Return the step of the best checkpoint that was saved, or None if there is none."""
    step = Path(state.get("best_model_checkpoint") or "").name.removeprefix("checkpoint-")
    return int(step) if step.isdigit() else None


def _last_values(state: dict[str, Any], history: History, best_step: int | None) -> dict[str, float]:
    """Return the last logged value of each key.

    Best weights that were not evaluated again have the values of their step.
    """
    last: dict[str, float] = {}
    counts = Counter[str]()
    for entry in state.get("log_history", []):
        logged = _curves(entry)
        last |= logged
        counts.update(logged.keys() if entry.get("step") == state.get("global_step") else ())
    for key, (steps, values) in history.items():
        if key.startswith("eval_") and best_step in steps and counts[key] < 2:
            last[key] = values[steps.index(best_step)]
    return last


def _latest(files: Sequence[Path]) -> tuple[Path, dict[str, Any]]:
    """Return the latest trainer_state.json and its contents.

    Of the files of one run it is the one with the longest log, since copies have other modification times. Of the files
    of two runs it is the one that was written last.
    """
    states = {file: _read_json(file) for file in files}
    if len(files) == 1:
        return next(iter(states.items()))
    logs = {file: json.dumps(state.get("log_history", []))[:-1] for file, state in states.items()}  # as text, for NaN
    newest = max(files, key=lambda file: file.stat().st_mtime)
    with_longest_log = max(files, key=lambda file: len(logs[file]))
    is_one_run = logs[with_longest_log].startswith(logs[newest]) and logs[newest] != "["
    latest = with_longest_log if is_one_run else newest
    return latest, states[latest]


def _is_outdated(file: Path, state_file: Path, started: float | None) -> bool:
    """Return whether a file does not exist or belongs to an earlier run.

    Args:
        file: The file.
        state_file: The trainer_state.json that is read.
        started: Start of the run.
    """
    if not file.exists():
        return True
    written = file.stat().st_mtime
    run_state = file.parent / STATE
    if is_earlier(file, started):
        return True
    # a run ended after the file was written, and the checkpoint of `state_file` was written after that
    return state_file != run_state and run_state.exists() and written <= run_state.stat().st_mtime


def command_line() -> str:
    """Return the shell command of this process, with HIDDEN in place of tokens and keys."""
    secret = r"(?i)((?:token|key|secret|password)['\"]?[=: ]+)[^\s,}'\"]+"
    return re.sub(secret, rf"\1{HIDDEN}", shlex.join(sys.argv))


def _hide_tokens(tree: object) -> Any:
    """Return the tree with HIDDEN in place of every value whose key ends in _token, such as hub_token."""
    if isinstance(tree, dict):
        secret = {key for key, value in tree.items() if str(key).endswith("_token") and value not in (None, "")}
        return {key: HIDDEN if key in secret else _hide_tokens(value) for key, value in tree.items()}
    return [_hide_tokens(part) for part in tree] if isinstance(tree, list) else tree


def _read_json(file: Path, default: Any = None) -> Any:
    """Return the content of a file.

    Args:
        file: The file.
        default: Result for a missing file, whose type the content must have. Without a default, the file must exist and
            contain an object.
    """
    if default is not None and not file.exists():
        return default
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = f"{file} cannot be read as JSON ({error})"
        raise InputError(f"{problem}. Correct the file, or move it to another folder") from error
    expected = dict if default is None else type(default)
    if not isinstance(content, expected):
        raise InputError(f"{file} must contain a {expected.__name__}, not a {type(content).__name__}")
    return content
