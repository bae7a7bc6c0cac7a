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
        """Return a dictionary of the values of the metric, or None."""


def load_metric(name: str) -> TextMetric:
    """Load a metric of the package `evaluate`.

    Raises:
        InputError: For a metric that cannot be loaded or does not compare texts.
    """
    import evaluate

    try:
        metric = evaluate.load(name)
    except Exception as error:  # raised by the hub or by a script
        fix = f". Without access to the hub, set --metrics to a folder with its script: metrics/{Path(name).stem}"
        fix = "" if isinstance(error, ImportError) else fix  # it names the package to install
        raise InputError(f"--metrics {name}: the metric cannot be loaded ({error}){fix}") from error
    measure(Path(name).stem, metric, ["some", "more"], ["some", "more"])  # fails before the model generates
    return metric


def measure(name: str, metric: TextMetric, predictions: list[str], references: list[str]) -> dict[str, float]:
    """Return the numbers that a metric returns, by name. Lists, such as the precisions of BLEU, are left out.

    The name of a number is `name` if its key is `name`, and otherwise `name_key`.

    Raises:
        InputError: If the metric fails, or returns no number.
    """
    try:
        result = metric.compute(predictions=predictions, references=references)
    except Exception as error:
        problem = f"the metric cannot compare texts ({type(error).__name__}: {error})"
        raise InputError(f"--metrics {name}: {problem}") from error
    values = result if isinstance(result, dict) else {}
    numbers = {key: float(value) for key, value in values.items() if isinstance(value, Real)}
    if not numbers:
        raise InputError(f"--metrics {name}: the values of the metric must be numbers, not {short_repr(result)}")
    return {name if key == name else f"{name}_{key}": number for key, number in numbers.items()}


def load_tasks(arguments: argparse.Namespace) -> tuple["TaskManager", list[Any]]:
    """Return lm-eval's task manager, and the tasks and groups that --tasks names.

    Raises:
        InputError: If lm-eval is not installed, and for tasks that do not exist, cannot be read, occur twice or run
            generated code.
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
        for task_name, task in loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False):
                problem = f"{task_name} runs code that the model generates, which eval does not support"
                raise InputError(f"--tasks {name}: {problem}. Remove it")
    try:
        manager.load(tasks)
    except ValueError as error:  # a task in two of the groups
        raise InputError(f"--tasks: {error}") from error
    return manager, tasks


def run_tasks(
    inference: "InferenceModel", arguments: argparse.Namespace, manager: "TaskManager", tasks: list[Any]
) -> list[dict[str, Any]]:
    """Return an evaluation for each task, and for each group whose metrics are aggregated."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    model = HFLM(
        pretrained=inference.model,
        tokenizer=inference.tokenizer,
        batch_size=arguments.batch_size,
        max_length=arguments.max_length,
        chat_template_args=arguments.chat_template_kwargs,
    )
    results = lm_eval.simple_evaluate(
        model,
        tasks=tasks,
        task_manager=manager,
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        apply_chat_template=arguments.apply_chat_template,
        log_samples=False,
    )

    evaluations = []
    for name, values in results["results"].items():
        metrics = {}
        for key, value in values.items():  # a key is a metric and a filter of the answers, such as "acc,none"
            metric, comma, answer_filter = key.rpartition(",")
            if comma and isinstance(value, Real):
                metrics[metric if answer_filter == "none" else f"{metric}_{answer_filter}"] = float(value)
        shots = results["n-shot"].get(name, arguments.num_fewshot)
        left_out = []
        if arguments.num_fewshot not in (None, shots):
            left_out = [f"num_fewshot {arguments.num_fewshot}: the task sets its own number, {shots}"]
        if metrics:
            evaluations.append({"task": name, "rows": values["sample_len"], "metrics": metrics, "left_out": left_out})
    return evaluations
