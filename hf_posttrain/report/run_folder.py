"""Reads a run's folder: what the run has left so far. Nothing is unpickled, and access tokens are not kept."""

import json
import math
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..errors import InputError, path_hint
from ..methods import METHODS
from ..recipe.yaml_tree import read_tree, write_tree
from ..trainer.method_spec import Method

STATE = "trainer_state.json"
ROUNDS = "_rounds/rounds.json"
HIDDEN = "<hidden>"
_NOT_CURVES = ("step", "epoch", "total_flos", "train_loss", "num_input_tokens_seen")
_TIMES = ("_runtime", "_samples_per_second", "_steps_per_second")


class Series(NamedTuple):
    """The values of one key of the log: optimizer steps, rising, and a value for each, not always finite."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    def finite(self) -> list[tuple[float, float]]:
        """(step, value) where the value is finite."""
        return [(step, value) for step, value in zip(*self, strict=True) if math.isfinite(value)]


History: TypeAlias = Mapping[str, Series]  # key of the log, such as eval_loss -> its values


def read_history(log: Iterable[dict[str, Any]]) -> History:
    """Every number of a log_history (trainer_state.json) but times and totals. Of two at one step the earlier: the
    later are of the best weights, which are loaded at the end.
    """
    found: dict[str, dict[float, float]] = {}
    for entry in log:
        for key, value in _curves(entry).items():
            found.setdefault(key, {}).setdefault(entry.get("step", 0), value)
    return {key: Series(*zip(*sorted(values.items()), strict=True)) for key, values in found.items()}


def _adapter(folder: Path) -> str | None:
    """Where in the folder an adapter is: ".", or the name of one that is not called default."""
    files = (folder / "adapter_config.json", *sorted(folder.glob("*/adapter_config.json")))
    places = [file.parent for file in files if file.exists() and not file.parent.name.startswith("checkpoint-")]
    return places[0].relative_to(folder).as_posix() if places else None


def _curves(entry: dict[str, Any]) -> dict[str, float]:
    """The numbers of an entry of the log that belong to curves; those of an evaluation by a prefix of the user's begin
    with eval_ all the same.
    """
    numbers = {key: float(value) for key, value in entry.items() if isinstance(value, int | float)}
    prefix = next((key.removesuffix("_runtime") for key in numbers if key.endswith("_runtime")), "eval")
    front = "" if prefix in ("eval", "train") or prefix.startswith("eval_") else "eval_"
    return {
        front + key if key.startswith(f"{prefix}_") else key: value
        for key, value in numbers.items()
        if key not in _NOT_CURVES and not key.endswith(_TIMES)
    }


@dataclass(frozen=True)
class Run:
    """What is known of a run; what its folder lacks is empty."""

    folder: Path
    name: str  # the folder's own
    state: dict[str, Any]  # HF's TrainerState: the run's own or its newest checkpoint's
    steps: tuple[int, int]  # taken, planned
    history: History
    last: dict[str, float]  # the last value of each curve, or what is known of the weights that are saved
    best_step: int | None  # the step of those, where they are the best ones and not the last
    recipe: dict[str, Any]  # recipe.yaml as a tree
    recipe_text: str  # and as text
    record: dict[str, Any]  # run.json
    results: dict[str, Any]  # all_results.json, which comes last
    audit: dict[str, Any]  # audit.json
    samples: list[dict[str, Any]]  # samples.json
    rounds_section: dict[str, Any]  # the section of a run in rounds, as the recipe or else run.json has it
    rounds: list[dict[str, Any]]  # _rounds/rounds.json: of such a run, what each gave
    evaluations: list[dict[str, Any]]  # evaluations.json: of `hf-posttrain eval`, afterwards
    method: str  # sft, dpo, ...
    method_spec: Method | None  # the method's in the table; None for one that this version does not know
    base_model: str  # hub name or folder of the model that was trained
    arguments: dict[str, Any]  # of training: all that matter with run.json, otherwise those that the recipe gives
    adapter: str | None  # where in the folder an adapter is, "." where it is not in one of its own; None: a whole model
    lora: dict[str, Any]  # the adapter's options
    sources: dict[str, list[dict[str, Any]]]  # "train" and "eval" -> where their rows come from, as the recipe has it

    @property
    def takes_images(self) -> bool:
        """Does the model take pictures? Then its processor is saved with it."""
        return (self.folder / "processor_config.json").exists()


def read_run(folder: str | Path) -> Run:
    """The run in `folder`, an output_dir or a checkpoint. Raises InputError where there is none, or a broken file."""
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise InputError(f"there is no folder {folder}{path_hint(folder)}: give a run's output_dir")
    # The state is the run's own, written when it ends, unless a checkpoint is newer: the run is resumed, or not over.
    # Both may be left of an earlier run, where a fresh one has begun in its folder.
    record = _hide_tokens(_read_json(folder / "run.json", {}))
    started = _started(folder / "run.json", record)
    numbered = [(path.parent.name.removeprefix("checkpoint-"), path) for path in folder.glob(f"checkpoint-*/{STATE}")]
    checkpoints = [path for _, path in sorted((int(number), path) for number, path in numbered if number.isdecimal())]
    states = [path for path in (folder / STATE, *checkpoints) if path.exists()]
    own, others = (
        [path for path in kind if path in states and not _is_earlier(path, started)]
        for kind in ([folder / STATE], checkpoints)
    )
    if not states:
        raise InputError(f"{folder}: no run is in it: neither {STATE} nor a checkpoint-* with one")
    state_file, state = _latest([*own, *others[-1:]] or states)
    state = state if own or others else {}
    # Recipe and results of an earlier run may still be there, in a folder that was trained into again.
    results = folder / "all_results.json"
    recipe = folder / "recipe.yaml"
    tree = {}
    text = ""
    if not _is_outdated(recipe, state_file, started):
        given, _ = read_tree(recipe)
        if not isinstance(given, dict):
            raise InputError(f"{recipe} holds no recipe: write it again, or move it away")
        tree = _hide_tokens(given)
        text = recipe.read_text(encoding="utf-8") if tree == given else write_tree(tree)
    # The recipe says what was wanted, run.json what was done; a run from Python has no recipe.
    model = tree.get("model") or {}
    data = tree.get("data") or {}
    method = str(tree.get("method") or record.get("method") or "")
    rounds_section = tree.get("rounds") or record.get("rounds") or {}
    sources = {split: data.get(split) or [] for split in ("train", "eval")}
    arguments = tree.get("train", {}) | record.get("arguments", {})
    # the best weights are loaded when a run ends, which a run's own state is of
    ended = state_file == folder / STATE and not folder.name.startswith("checkpoint-")
    best = saved_best(state) if ended and arguments.get("load_best_model_at_end") else None
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
        adapter=_adapter(folder),
        lora=record.get("lora") or model.get("lora") or {},
        sources={split: found if isinstance(found, list) else [found] for split, found in sources.items()},
    )


def saved_best(state: Mapping[str, Any]) -> int | None:
    """The step of the best checkpoint that was saved, by which a run ends that loads it; None where there is none."""
    step = Path(state.get("best_model_checkpoint") or "").name.removeprefix("checkpoint-")
    return int(step) if step.isdigit() else None


def _last_values(state: dict[str, Any], history: History, best_step: int | None) -> dict[str, float]:
    """Key of the log -> what was logged last; of best weights that were not evaluated again, at their step."""
    found: dict[str, float] = {}
    again = Counter[str]()
    for entry in state.get("log_history", []):
        logged = _curves(entry)
        found |= logged
        again.update(logged.keys() if entry.get("step") == state.get("global_step") else ())
    for key, (steps, values) in history.items():
        if key.startswith("eval_") and best_step in steps and again[key] < 2:
            found[key] = values[steps.index(best_step)]
    return found


def _latest(files: Sequence[Path]) -> tuple[Path, dict[str, Any]]:
    """The latest trainer_state.json and what it holds: of one run that with the longest log, since a copy's files have
    other times; of two runs the file that was written last.
    """
    states = {file: _read_json(file) for file in files}
    logs = {file: json.dumps(state.get("log_history", []))[:-1] for file, state in states.items()}  # as text, for NaN
    newest = max(files, key=lambda file: file.stat().st_mtime)
    longest = max(files, key=lambda file: len(logs[file]))
    found = longest if logs[longest].startswith(logs[newest]) and logs[newest] != "[" else newest
    return found, states[found]


def _started(file: Path, record: dict[str, Any]) -> float | None:
    """When the run of run.json began, in seconds since 1970; None where that is not known, or where its files have the
    times of another clock, as from an archive.
    """
    began = datetime.fromisoformat(record["started"]).timestamp() if "started" in record else None
    return None if began is None or file.stat().st_mtime < began else began


def _is_outdated(file: Path, source: Path, started: float | None) -> bool:
    """Is it missing, or of an earlier run? source: the trainer_state.json that is read; started: of the run."""
    if not file.exists():
        return True
    written = file.stat().st_mtime
    over = file.parent / STATE
    if _is_earlier(file, started):
        return True
    # Not younger than the end of a run, after which `source`, a checkpoint's state, was written
    return source != over and over.exists() and written <= over.stat().st_mtime


def _is_earlier(file: Path, started: float | None) -> bool:
    """Is the file there, and older than the start of the run?"""
    return started is not None and file.exists() and file.stat().st_mtime < started


def command_line() -> str:
    """How this process was started, as a shell would take it, with HIDDEN for tokens and keys."""
    secret = r"(?i)((?:token|key|secret|password)['\"]?[=: ]+)[^\s,}'\"]+"
    return re.sub(secret, rf"\1{HIDDEN}", shlex.join(sys.argv))


def _hide_tokens(tree: object) -> Any:
    """The same tree with HIDDEN for the value of every key that ends in _token, such as hub_token, where it has one."""
    if isinstance(tree, dict):
        secret = {key for key, value in tree.items() if str(key).endswith("_token") and value not in (None, "")}
        return {key: HIDDEN if key in secret else _hide_tokens(value) for key, value in tree.items()}
    return [_hide_tokens(part) for part in tree] if isinstance(tree, list) else tree


def _read_json(file: Path, default: Any = None) -> Any:
    """The file's content, or `default` where it is missing and there is one; of the same type."""
    if default is not None and not file.exists():
        return default
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as JSON ({error}): write it again, or move it away") from error
    expected = dict if default is None else type(default)
    if not isinstance(content, expected):
        raise InputError(f"{file} holds a {type(content).__name__}, a {expected.__name__} was expected")
    return content
