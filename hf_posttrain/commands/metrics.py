"""Metrics of the package `evaluate`, and tasks of EleutherAI's lm-eval, by name."""

import argparse
import importlib.util
import logging
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, name_hint, short_repr

if TYPE_CHECKING:
    from .inference import InferenceModel


def load_metric(name: str) -> Any:
    """A metric of the package `evaluate`. Raises InputError where it cannot be loaded, or does not compare texts."""
    import evaluate

    try:
        metric = evaluate.load(name)
    except Exception as error:  # of the hub, or of a script
        mend = f"without the hub give a folder with its script, such as metrics/{Path(name).stem}"
        raise InputError(f"--metrics {name}: it cannot be loaded ({error}): {mend}") from error
    measure(Path(name).stem, metric, ["some", "more"], ["some", "more"])  # what it refuses is known before hours pass
    return metric


def measure(name: str, metric: Any, predictions: list[str], references: list[str]) -> dict[str, float]:
    """{name, or name_key of values that have another: value}. Raises InputError for errors, and for other values."""
    try:
        result = metric.compute(predictions=predictions, references=references)
    except Exception as error:
        raise InputError(f"--metrics {name}: it cannot compare texts ({type(error).__name__}: {error})") from error
    if not isinstance(result, dict) or not result or not all(isinstance(each, Real) for each in result.values()):
        raise InputError(f"--metrics {name}: it gives {short_repr(result)}, and numbers are wanted")
    return {name if key == name else f"{name}_{key}": float(value) for key, value in result.items()}


def load_tasks(given: argparse.Namespace) -> tuple[Any, list]:
    """(lm-eval's manager of tasks, what it has of these names). Raises InputError without lm-eval, for names that are
    none of its tasks, and for tasks that it cannot read.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("--tasks needs lm-eval: pip install 'hf_posttrain[eval]'")
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    for its_own in (False, True):  # thousands of files, which take seconds to read
        manager = TaskManager(include_path=given.task_folder, include_defaults=its_own)
        if {*given.tasks} <= {*manager.all_subtasks}:
            break
    found = []
    for name in given.tasks:
        if name not in manager.all_tasks:
            raise InputError(f"--tasks: lm-eval has no {name!r}{name_hint(name, manager.all_tasks, list_valid=False)}")
        try:
            loaded = manager.load([name])
        except Exception as error:  # of data that are not there, or of what a .yaml says
            raise InputError(f"--tasks {name}: {type(error).__name__}: {error}") from error
        found += [loaded["groups"][name]] if name in loaded["groups"] else [*loaded["tasks"].values()]
    return manager, found


def run_tasks(answerer: "InferenceModel", given: argparse.Namespace, manager: Any, tasks: list) -> list[dict[str, Any]]:
    """An evaluation for each task, and group with numbers of its own. Raises InputError for what lm-eval refuses."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    model = HFLM(
        pretrained=answerer.model,
        tokenizer=answerer.tokenizer,
        batch_size=given.batch_size,
        max_length=given.max_length,
        chat_template_args=given.chat_template_kwargs,
    )
    try:
        results = lm_eval.simple_evaluate(
            model,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=given.num_fewshot,
            limit=given.limit,
            apply_chat_template=given.apply_chat_template,
            log_samples=False,
        )
    except ValueError as error:  # of code that it does not run unasked, for one
        raise InputError(f"--tasks: {error}") from error
    found = []
    for name, values in results["results"].items():
        numbers = [(*key.split(","), value) for key, value in values.items() if "," in key and isinstance(value, Real)]
        metrics = {key if filter == "none" else f"{key}_{filter}": float(value) for key, filter, value in numbers}
        shots = results["n-shot"].get(name, given.num_fewshot)
        fixed = [f"num_fewshot {given.num_fewshot}: the task has {shots} of its own"]
        left_out = fixed if given.num_fewshot not in (None, shots) else []
        if metrics:
            found.append({"task": name, "rows": values["sample_len"], "metrics": metrics, "left_out": left_out})
    return found
