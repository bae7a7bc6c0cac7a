"""Reads a run's folder: whatever the run has left so far, and nothing for what it has not.

Nothing is unpickled, and values of access tokens are not read along.
"""

import json
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..recipe.yaml_tree import read_tree, write_tree
from .charts import History, history_of

STATE = "trainer_state.json"
HIDDEN = "<hidden>"


@dataclass(frozen=True)
class Run:
    """What is known of a run; what its folder lacks is empty.

    state: HF's TrainerState, the run's own or its newest checkpoint's; history: what it logged, by metric; recipe and
    recipe_text: recipe.yaml as a tree and as text; record: run.json; results: all_results.json, which comes last;
    audit and samples: the JSON files of these names.
    """

    folder: Path
    state: dict[str, Any]
    history: History
    recipe: dict[str, Any]
    recipe_text: str
    record: dict[str, Any]
    results: dict[str, Any]
    audit: dict[str, Any]
    samples: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def method(self) -> str:
        """sft, dpo, ...; empty where nothing says it."""
        return str(self.recipe.get("method") or self.record.get("method") or "")

    @property
    def base_model(self) -> str:
        """Hub name or folder of the model that was trained; empty where nothing says it."""
        return str(self.recipe.get("model", {}).get("name_or_path") or self.record.get("base_model") or "")

    @property
    def arguments(self) -> dict[str, Any]:
        """Training arguments: all that matter with run.json, otherwise those that the recipe gives."""
        return self.recipe.get("train", {}) | self.record.get("arguments", {})

    @property
    def adapter(self) -> bool:
        """Does the folder hold an adapter, not a whole model?"""
        return (self.folder / "adapter_config.json").exists()

    @property
    def lora(self) -> dict[str, Any]:
        """The adapter's options; empty without one."""
        return self.record.get("lora") or self.recipe.get("model", {}).get("lora") or {}

    @property
    def steps(self) -> tuple[int, int]:
        """(steps taken, steps planned)."""
        return int(self.state.get("global_step", 0)), int(self.state.get("max_steps", 0))

    def sources(self, split: str) -> list[dict[str, Any]]:
        """The recipe's sources of "train" or "eval", as it gives them."""
        given = self.recipe.get("data", {}).get(split)
        return given if isinstance(given, list) else [given] if given else []


def read(folder: str | Path) -> Run:
    """The run in `folder`, an output_dir or a checkpoint in one.

    Raises InputError where there is no folder, no trainer_state.json in it or its checkpoints, or a broken file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: give a run's output_dir")
    source = _state_file(folder)
    state, record = _json(source), _json(folder / "run.json", {})
    results, recipe = folder / "all_results.json", folder / "recipe.yaml"
    known = recipe.exists() and not _of_earlier_run(recipe, source, record)
    tree, text = _recipe(recipe) if known else ({}, "")
    return Run(
        folder=folder,
        state=state,
        history=history_of(state.get("log_history", [])),
        recipe=tree,
        recipe_text=text,
        record=hidden(record),
        results={} if _of_earlier_run(results, source, record) else _json(results, {}),
        audit=_json(folder / "audit.json", {}),
        samples=_json(folder / "samples.json", []),
    )


def hidden(tree: Any) -> Any:
    """The same tree with HIDDEN for the value of every key that ends in _token, such as hub_token, where it has one."""
    if isinstance(tree, dict):
        secret = {key for key, value in tree.items() if str(key).endswith("_token") and value not in (None, "")}
        return {key: HIDDEN if key in secret else hidden(value) for key, value in tree.items()}
    return [hidden(part) for part in tree] if isinstance(tree, list) else tree


def _recipe(file: Path) -> tuple[dict[str, Any], str]:
    """The file as a tree and as text, without secrets: written anew where one is hidden."""
    tree, _ = read_tree(file)
    shown = hidden(tree)
    return shown, file.read_text(encoding="utf-8") if shown == tree else write_tree(shown)


def _state_file(folder: Path) -> Path:
    """The run's own, written when it ends, unless a checkpoint is newer: a run that is resumed, or not over."""
    numbered = [(re.fullmatch(r"checkpoint-(\d+)", path.parent.name), path) for path in folder.glob(f"*/{STATE}")]
    newest = sorted((int(match[1]), path) for match, path in numbered if match)[-1:]
    candidates = [path for path in (folder / STATE, *(path for _, path in newest)) if path.exists()]
    if not candidates:
        raise InputError(f"{folder}: no run is in it: neither {STATE} nor a checkpoint-* with one")
    return max(candidates, key=lambda path: path.stat().st_mtime)


def _of_earlier_run(file: Path, source: Path, record: dict[str, Any]) -> bool:
    """Is it older than the start in run.json, or of a run that was over before `source`, a checkpoint's state, was
    written?"""
    if not file.exists():
        return False
    written, over = file.stat().st_mtime, file.parent / STATE
    if (started := record.get("started")) and written < datetime.fromisoformat(started).timestamp():
        return True
    return source != over and over.exists() and written <= over.stat().st_mtime


def _json(file: Path, default: Any = None) -> Any:
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
