"""What the names and types of a recipe's keys allow and that still makes no sense, as far as YAML alone shows it.

    between_sections    in the model, teacher and data sections
    with_train          between the train section and the others

Both yield (dotted keys, sentence), without importing torch. What the train section alone shows is in `rules`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ..methods import METHODS
from ..models.section import ModelSection
from ..trainer.method import Problem
from ..trainer.rules import merge_problem, one_of
from .files import template_problem
from .sections import Recipe

_LORA_LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {  # name: (allowed, what is wrong otherwise)
    "r": (lambda r: r > 0, "must be at least 1"),
    "alpha": (lambda alpha: alpha > 0, "must be at least 1"),
    "dropout": (lambda p: 0 <= p < 1, "must be at least 0 and below 1"),
    "target_modules": (bool, "must not be empty"),
}
ATTENTION = (
    "auto", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4",
)  # fmt: skip
"""What transformers knows by itself; a kernel of the hub is owner/name, and a model's own code may bring others."""
_WANTS_EVAL = {
    "load_best_model_at_end": (True,), "eval_strategy": ("steps", "epoch"), "eval_on_start": (True,),
    "eval_exact_match": (True,),
}  # fmt: skip
"""Values of the train section that ask for rows to evaluate on."""


def between_sections(recipe: Recipe) -> Iterator[Problem]:
    """What makes no sense in the model, teacher and data sections."""
    distils = METHODS[recipe.method].second == "teacher"
    if distils and recipe.teacher is None:
        yield ("method",), f"method {recipe.method} needs a teacher section (teacher.name_or_path: ...)"
    if recipe.teacher and not distils:
        problem = f"method {recipe.method} uses no teacher; that section belongs to {_with_teacher()}"
        yield ("teacher", "method"), problem
    yield from _of_model(recipe.model, "model")
    if recipe.model.offload:
        problem = "model.offload is for a teacher; for a policy use accelerate_configs/zero3_offload.yaml"
        yield ("model.offload",), problem
    if recipe.teacher:
        yield from _of_model(recipe.teacher, "teacher")
        if recipe.teacher.lora is not None:
            problem = "teacher.lora makes no sense: the teacher is not trained (teacher.adapter loads one)"
            yield ("teacher.lora",), problem
    if recipe.data.train == [] or recipe.data.eval == []:
        key = "data.train" if recipe.data.train == [] else "data.eval"
        yield (key,), f"{key} is an empty list of sources: name one at least"
    for key, source in recipe.sources():
        if not source.path.strip():
            yield (f"{key}.path",), f"{key}.path is empty"
        if source.limit is not None and source.limit < 1:
            yield (f"{key}.limit",), f"{key}.limit must be at least 1 (or null for all rows), not {source.limit}"
        if not 0 < source.weight < float("inf"):
            yield (f"{key}.weight",), f"{key}.weight must be a number above 0, not {source.weight}"


def _with_teacher() -> str:
    """The methods that have a teacher, as messages list them."""
    return " and ".join(name for name, method in METHODS.items() if method.second == "teacher")


def with_train(recipe: Recipe, values: Any) -> Iterator[Problem]:
    """Where the train section, read into `values`, contradicts the others; HF's Trainer finds it with the model loaded,
    and some of it only in the first evaluation."""
    for name, wanting in _WANTS_EVAL.items():
        if (value := getattr(values, name)) in wanting and recipe.data.eval is None:
            shown = "true" if value is True else getattr(value, "value", value)
            yield (f"train.{name}",), f"train.{name}: {shown} needs data.eval, the rows to evaluate on"
    quantised = recipe.model.quantization != "none"
    has_adapter = recipe.model.lora is not None or bool(recipe.model.adapter)
    if values.merge_lora and (problem := merge_problem(has_adapter, quantised)):
        keys = ("train.merge_lora", "model.quantization") if has_adapter else ("train.merge_lora",)
        yield keys, f"train.{problem}"
    if getattr(values, "rollout", None) == "vllm" and quantised:
        problem = "train.rollout: vllm takes no quantised student: drop it, or model.quantization"
        yield ("train.rollout", "model.quantization"), problem
    for name, source in recipe.sources():
        if name.startswith("data.train") and source.streaming and values.max_steps <= 0:
            key = f"{name}.streaming"
            yield (key,), f"{key}: true needs train.max_steps, since the length of a stream is not known"


def _of_model(section: ModelSection, key: str) -> Iterator[Problem]:
    names = {name: f"{key}.{name}" for name in ("name_or_path", "adapter", "lora", "quantization", "from_scratch")}

    def both(one: str, other: str, why: str) -> Problem:
        return (names[one], names[other]), f"{names[one]} and {names[other]} exclude each other: {why}"

    if not section.name_or_path.strip():
        yield (names["name_or_path"],), f"{key}.name_or_path is empty"
    quantised = section.quantization != "none"
    if quantised and section.from_scratch:
        yield both("quantization", "from_scratch", "no weights to load")
    if section.adapter and section.from_scratch:
        yield both("adapter", "from_scratch", "it belongs to saved weights")
    if section.lora is not None and section.from_scratch:
        why = f"an adapter is saved without its random base; drop {key}.lora, or save the random model first"
        yield both("lora", "from_scratch", why)
    if section.adapter and section.lora is not None:
        yield both("adapter", "lora", "continue an adapter or begin a new one")
    if quantised and key == "model" and not section.adapter and section.lora is None:
        problem = "model.quantization needs model.lora or model.adapter: all weights cannot be trained"
        yield (names["quantization"],), problem
    own = section.trust_remote_code or re.search("[/|]", section.attn_implementation)
    if not own:
        yield from one_of(f"{key}.attn_implementation", section.attn_implementation, ATTENTION)
    if section.chat_template and (wrong := template_problem(section.chat_template)):
        yield (f"{key}.chat_template",), f"{key}.chat_template: {wrong}"
    if section.lora is not None:
        for name, (allowed, problem) in _LORA_LIMITS.items():
            if (value := section.lora.get(name)) is not None and not allowed(value):
                yield (f"{key}.lora.{name}",), f"{key}.lora.{name} {problem}, not {value!r}"
