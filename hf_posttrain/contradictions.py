"""What the names and types of a recipe's keys allow and that still makes no sense, as far as YAML alone shows it.

    between_sections    in the model, teacher and data sections
    with_train          between the train section and the others

Both yield (key, problem), without importing torch. Contradictions within the train section are found by its Config.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .strict import nearest_path, typed

if TYPE_CHECKING:
    from .recipe import ModelSection, Recipe

_LORA_LIMITS = {  # name: (type, allowed, what is wrong otherwise); other names are checked against peft by models.py
    "r": (int, lambda r: r > 0, "must be at least 1"),
    "alpha": (int, lambda alpha: alpha > 0, "must be at least 1"),
    "dropout": (float, lambda p: 0 <= p < 1, "must be at least 0 and below 1"),
    "target_modules": (str | list[str], bool, "must not be empty"),
}
_WANTS_EVAL = {"eval_strategy": ("steps", "epoch"), "eval_on_start": (True,), "eval_exact_match": (True,)}
"""Values of the train section that ask for rows to evaluate on."""


def between_sections(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What makes no sense in the model, teacher and data sections."""
    distils = recipe.method in ("kd", "opd")
    if distils and recipe.teacher is None:
        yield "method", f"method {recipe.method} needs a teacher section (teacher.name_or_path: ...)"
    if recipe.teacher and not distils:
        yield "teacher", f"method {recipe.method} uses no teacher; that section belongs to kd and opd"
    yield from _model_contradictions(recipe.model, "model", recipe)
    if recipe.model.offload:
        yield "model.offload", "model.offload is for a teacher; for a policy use accelerate_configs/zero3_offload.yaml"
    if recipe.teacher:
        yield from _model_contradictions(recipe.teacher, "teacher", recipe)
        if recipe.teacher.lora is not None:
            yield "teacher.lora", "teacher.lora makes no sense: the teacher is not trained (teacher.adapter loads one)"
    if recipe.data.train == [] or recipe.data.eval == []:
        yield "data.train" if recipe.data.train == [] else "data.eval", "an empty list of sources"
    for key, source in recipe.sources():
        if not source.path.strip():
            yield f"{key}.path", f"{key}.path is empty"
        if source.limit is not None and source.limit < 1:
            yield f"{key}.limit", f"{key}.limit must be at least 1 (or null for all rows), not {source.limit}"
        if not 0 < source.weight < float("inf"):
            yield f"{key}.weight", f"{key}.weight must be a number above 0, not {source.weight}"


def with_train(recipe: Recipe, given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Where the train section, its values `given`, contradicts the others; HF's Trainer finds it with the model loaded,
    and some of it only in the first evaluation."""
    for name, values in _WANTS_EVAL.items():
        if (value := given.get(name)) in values and recipe.data.eval is None:
            shown = "true" if value is True else value
            yield f"train.{name}", f"train.{name}: {shown} needs data.eval, the rows to evaluate on"
    merges = given.get("merge_lora")
    if merges and not recipe.model.lora and not recipe.model.adapter:
        yield "train.merge_lora", "train.merge_lora: true needs model.lora or model.adapter, the adapter to merge"
    if merges and recipe.model.quantization != "none":
        yield "train.merge_lora", "train.merge_lora: true: a quantised base would round the adapter away, merge later"
    if given.get("rollout") == "vllm" and recipe.model.quantization != "none":
        yield "train.rollout", "train.rollout: vllm takes no quantised student: drop it, or model.quantization"
    metric = given.get("metric_for_best_model") or given.get("load_best_model_at_end")  # that means eval_loss
    if given.get("save_strategy") == "best" and not metric:
        yield "train.save_strategy", "train.save_strategy: best needs train.metric_for_best_model, such as eval_loss"
    for name, source in recipe.sources():
        if name.startswith("data.train") and source.streaming and given.get("max_steps", -1) <= 0:
            key = f"{name}.streaming"
            yield key, f"{key}: true needs train.max_steps, since the length of a stream is not known"


def _model_contradictions(section: ModelSection, key: str, recipe: Recipe) -> Iterator[tuple[str, str]]:
    if not section.name_or_path.strip():
        yield f"{key}.name_or_path", f"{key}.name_or_path is empty"
    quantised = section.quantization != "none"
    if quantised and section.from_scratch:
        yield f"{key}.quantization", f"{key}.quantization and {key}.from_scratch exclude each other: no weights to load"
    if section.adapter and section.from_scratch:
        yield f"{key}.adapter", f"{key}.adapter and {key}.from_scratch exclude each other: it belongs to saved weights"
    if section.lora is not None and section.from_scratch:
        problem = f"{key}.lora and {key}.from_scratch exclude each other: an adapter is saved without its random base"
        yield f"{key}.lora", f"{problem}; drop {key}.lora, or save the random model first"
    if section.adapter and section.lora is not None:
        yield f"{key}.lora", f"{key}.adapter and {key}.lora exclude each other: continue an adapter or begin a new one"
    if quantised and key == "model" and not section.adapter and section.lora is None:
        yield (
            f"{key}.quantization",
            "model.quantization needs model.lora or model.adapter: all weights cannot be trained",
        )
    if section.chat_template and not Path(section.chat_template).is_file():
        hint = nearest_path(Path(section.chat_template))
        yield f"{key}.chat_template", f"{key}.chat_template: no file {section.chat_template}{hint}"
    for name, (kind, allowed, problem) in _LORA_LIMITS.items():
        full, value = f"{key}.lora.{name}", (section.lora or {}).get(name)
        if value is not None and not allowed(typed(value, kind, full, recipe.where)):
            yield full, f"{full} {problem}, not {value!r}"
