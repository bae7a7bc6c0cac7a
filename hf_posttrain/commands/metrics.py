"""Metrics of the package `evaluate` and tasks of EleutherAI's lm-eval, loaded by name."""

import argparse
import importlib.util
import logging
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import InputError, name_hint, short_repr

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from .inference import InferenceModel


class TextMetric(Protocol):
    """A metric that compares texts, such as one of the package `evaluate`."""

    def compute(self, *, predictions: list[str], references: list[str]) -> object:
        """Return a dictionary of the metric's values."""


def load_metric(name: str) -> TextMetric:
    """Load a metric of the package `evaluate`.

    Raises:
        InputError: For a metric that cannot be loaded or does not compare texts.
    """
    import evaluate

    try:
        metric = evaluate.load(name)
    except Exception as error:  # raised by the hub or by a script
        fix = f"Without access to the hub, set it to a folder with its script, such as metrics/{Path(name).stem}"
        raise InputError(f"--metrics {name}: the metric cannot be loaded ({error}). {fix}") from error
    measure(Path(name).stem, metric, ["some", "more"], ["some", "more"])  # fails before the model generates
    return metric


def measure(name: str, metric: TextMetric, predictions: list[str], references: list[str]) -> dict[str, float]:
    """Return the values of a metric as {name: value}, or {name_key: value} for values with another key.

    Raises:
        InputError: If the metric fails, or returns something other than numbers.
    """
    try:
        result = metric.compute(predictions=predictions, references=references)
    except Exception as error:
        problem = f"the metric cannot compare texts ({type(error).__name__}: {error})"
        raise InputError(f"--metrics {name}: {problem}") from error
    if not isinstance(result, dict) or not result or not all(isinstance(value, Real) for value in result.values()):
        raise InputError(f"--metrics {name}: the values of the metric must be numbers, not {short_repr(result)}")
    return {name if key == name else f"{name}_{key}": float(value) for key, value in result.items()}


def load_tasks(arguments: argparse.Namespace) -> tuple["TaskManager", list[Any]]:
    """Return lm-eval's task manager, and its tasks with the names of --tasks.

    Raises:
        InputError: If lm-eval is not installed, and for tasks that do not exist or cannot be read.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("--tasks requires lm-eval. Install it with: pip install 'hf_posttrain[eval]'")
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    for include_defaults in (False, True):  # lm-eval's own tasks are thousands of files, which take seconds to read
        manager = TaskManager(include_path=arguments.task_folder, include_defaults=include_defaults)
        if {*arguments.tasks} <= {*manager.all_subtasks}:
            break

    tasks = []
    for name in arguments.tasks:
        if name not in manager.all_tasks:
            hint = name_hint(name, manager.all_tasks, list_valid=False)
            raise InputError(f"--tasks: lm-eval has no task {name!r}{hint}")
        try:
            loaded = manager.load([name])
        except Exception as error:  # missing data, or an invalid .yaml file
            raise InputError(f"--tasks {name}: {type(error).__name__}: {error}") from error
        tasks += [loaded["groups"][name]] if name in loaded["groups"] else [*loaded["tasks"].values()]
    return manager, tasks


def run_tasks(
    inference: "InferenceModel", arguments: argparse.Namespace, manager: "TaskManager", tasks: list[Any]
) -> list[dict[str, Any]]:
    """Return one evaluation for each task, and for each group with aggregated metrics.

    Raises:
        InputError: For tasks that lm-eval rejects.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    model = HFLM(
        pretrained=inference.model,
        tokenizer=inference.tokenizer,
        batch_size=arguments.batch_size,
        max_length=arguments.max_length,
        chat_template_args=arguments.chat_template_kwargs,
    )
    try:
        results = lm_eval.simple_evaluate(
            model,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=arguments.num_fewshot,
            limit=arguments.limit,
            apply_chat_template=arguments.apply_chat_template,
            log_samples=False,
        )
    except ValueError as error:  # for example, code that lm-eval does not run without permission
        raise InputError(f"--tasks: {error}") from error

    evaluations = []
    for name, values in results["results"].items():
        numbers = [(*key.split(","), value) for key, value in values.items() if "," in key and isinstance(value, Real)]
        metrics = {key if filter == "none" else f"{key}_{filter}": float(value) for key, filter, value in numbers}
        shots = results["n-shot"].get(name, arguments.num_fewshot)
        left_out = []
        if arguments.num_fewshot not in (None, shots):
            left_out = [f"num_fewshot {arguments.num_fewshot}: the task sets its own number, {shots}"]
        if metrics:
            evaluations.append({"task": name, "rows": values["sample_len"], "metrics": metrics, "left_out": left_out})
    return evaluations
