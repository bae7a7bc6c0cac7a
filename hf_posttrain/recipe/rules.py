"""Rules between a recipe's keys and for their values, as far as YAML alone shows it; all yield (dotted keys, sentence)."""

import re
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from ..methods import METHODS
from ..trainer.method import BELOW_ONE, COUNT, POSITIVE, Limit, Problem
from ..trainer.rules import beyond, merge_problem, one_of, problems
from .files import template_problem
from .sections import Recipe

_LORA_LIMITS = {"r": COUNT, "alpha": COUNT, "dropout": BELOW_ONE}
_SOURCE_LIMITS = {"limit": Limit(COUNT.holds, "must be at least 1 (or null for all rows)"), "weight": POSITIVE}
_EXCLUDE_EACH_OTHER = (  # keys of a model section, and why
    ("quantization", "from_scratch", "no weights to load"),
    ("adapter", "from_scratch", "it belongs to saved weights"),
    ("lora", "from_scratch", "an adapter is saved without its random base; drop {key}.lora, or save the random model"
     " first"),
    ("adapter", "lora", "continue an adapter or begin a new one"),
)  # fmt: skip
ATTENTION = "auto", "eager", "sdpa", "flex_attention", *(f"flash_attention_{version}" for version in (2, 3, 4))
"""What transformers knows by itself; a kernel of the hub is owner/name, and a model's own code may bring others."""
_WANTS_EVAL = {  # values of the train section that ask for rows to evaluate on
    "load_best_model_at_end": (True,), "eval_strategy": ("steps", "epoch"), "eval_on_start": (True,),
    "eval_exact_match": (True,),
}  # fmt: skip


def between_sections(recipe: Recipe) -> Iterator[Problem]:
    """What makes no sense in the model, teacher and data sections."""
    # the teacher: methods either need one or cannot use it
    method, with_teacher = recipe.method, [name for name, row in METHODS.items() if row.second == "teacher"]
    if method in with_teacher and recipe.teacher is None:
        yield ("method",), f"method {method} needs a teacher section (teacher.name_or_path: ...)"
    if method not in with_teacher and recipe.teacher:
        users = " and ".join(with_teacher)
        yield ("teacher", "method"), f"method {method} uses no teacher; that section belongs to {users}"
    for key, section in recipe.models():
        if not section.name_or_path.strip():
            yield (f"{key}.name_or_path",), f"{key}.name_or_path is empty"
        given = {name for name, value in vars(section).items() if value not in (None, False, "none", "")}
        for one, other, why in _EXCLUDE_EACH_OTHER:
            if {one, other} <= given:
                keys = f"{key}.{one}", f"{key}.{other}"
                yield keys, f"{keys[0]} and {keys[1]} exclude each other: {why.format(key=key)}"
        if key == "model" and "quantization" in given and not given & {"adapter", "lora"}:
            problem = "model.quantization needs model.lora or model.adapter: all weights cannot be trained"
            yield ("model.quantization",), problem
        # kernels of the hub, and what a model's own code brings, cannot be known here
        if not section.trust_remote_code and not re.search("[/|]", section.attn_implementation):
            yield from one_of(f"{key}.attn_implementation", section.attn_implementation, ATTENTION)
        if section.chat_template and (wrong := template_problem(section.chat_template)):
            yield (f"{key}.chat_template",), f"{key}.chat_template: {wrong}"
        if section.lora is not None:
            yield from _below(f"{key}.lora", beyond(_LORA_LIMITS, SimpleNamespace(**section.lora)))
            if section.lora.get("target_modules") in ("", []):
                yield (f"{key}.lora.target_modules",), f"{key}.lora.target_modules must not be empty"
    # what only one of the two models can have
    if recipe.model.offload:
        problem = "model.offload is for a teacher; for a policy use accelerate_configs/zero3_offload.yaml"
        yield ("model.offload",), problem
    if recipe.teacher and recipe.teacher.lora is not None:
        problem = "teacher.lora makes no sense: the teacher is not trained (teacher.adapter loads one)"
        yield ("teacher.lora",), problem
    for name, sources in recipe.data.given():
        if sources == []:
            yield (f"data.{name}",), f"data.{name} is an empty list of sources: name one at least"
    for key, source in recipe.sources():
        if not source.path.strip():
            yield (f"{key}.path",), f"{key}.path is empty"
        yield from _below(key, beyond(_SOURCE_LIMITS, source))


def with_train(recipe: Recipe, values: Any) -> Iterator[Problem]:
    """What makes no sense in the train section, read into `values`, by itself or with the others; HF's Trainer finds
    some of it with the model loaded, or only in the first evaluation."""
    for name, wanting in _WANTS_EVAL.items():
        if (value := getattr(values, name)) in wanting and recipe.data.eval is None:
            shown = "true" if value is True else getattr(value, "value", value)
            yield (f"train.{name}",), f"train.{name}: {shown} needs data.eval, the rows to evaluate on"
    # the trainer says the next two as well, but only when the weights are loaded
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
    yield from _below("train", problems(values, METHODS[recipe.method]))


def _below(section: str, problems: Iterable[Problem]) -> Iterator[Problem]:
    """Problems of the fields of an object, which is the `section` of a recipe, as problems of the recipe's keys."""
    for names, said in problems:
        yield tuple(f"{section}.{name}" for name in names), f"{section}.{said}" if said.startswith(names) else said
