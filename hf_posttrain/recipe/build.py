"""A recipe's sections -> the objects that a run is made of.

    check_inputs          what YAML and the file system show, before torch
    configure             the method's Trainer class and Config
    of_any_machine        the recipe without what wants a launcher or a GPU
    check_models, check_vllm    tokenizer and LoRA config, after all that can be said without weights
    load_models           policy and teacher
    checkpoint_to_resume, make_output_dir    train.output_dir

Heavy imports come with the first use, so that errors of the recipe are quick. Mistakes are InputErrors with a place.
"""

import gc
import importlib
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InputError, error_context, nearest
from ..methods import METHODS, config_class, trainer_class
from . import files
from .read import check_train, refuse, train_config
from .sections import Recipe

logger = logging.getLogger(__name__)

OF_THE_MACHINE = (
    "deepspeed", "fsdp", "fsdp_config", "parallelism_config", "tf32", "rollout", "vllm_",
)  # fmt: skip
"""Keys of the train section, or how they begin, that want a launcher or a GPU and do not change the data."""


def configure(recipe: Recipe) -> tuple[Any, Any]:
    """(trainer class, the method's Config). Raises InputError for what is wrong in the recipe alone, and as far as
    possible before torch is imported."""
    check_inputs(recipe)
    method = METHODS[recipe.method]
    imported(method.module)
    from ..engines.launch import quantisation_problem

    config = train_config(recipe, config_class(method))
    for name, section in (("model", recipe.model), ("teacher", recipe.teacher)):
        bits = section.quantization if section else "none"
        if bits != "none" and (problem := quantisation_problem(bits, config)):
            raise InputError(f"{recipe.where(f'{name}.quantization')}: {name}.quantization: {problem}")
    return trainer_class(method), config


def check_inputs(recipe: Recipe, training: bool = False) -> None:
    """The train section, the files that are read and, for a training, what it writes. Raises InputError at once."""
    check_train(recipe)
    refuse(recipe, files.inputs(recipe))
    _hush_bitsandbytes(recipe)
    if training:
        refuse(recipe, files.training(recipe))


def _hush_bitsandbytes(recipe: Recipe) -> None:
    """peft imports it, and it warns of a kernel that only quantised weights on CPU would use."""
    if all(section is None or section.quantization == "none" for section in (recipe.model, recipe.teacher)):
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def of_any_machine(recipe: Recipe) -> Recipe:
    """The recipe as it runs on any machine: what its train section asks of engines and GPUs is checked for names and
    types, and left out. Raises InputError."""
    check_train(recipe)
    train = {name: value for name, value in recipe.train.items() if not name.startswith(OF_THE_MACHINE)}
    return replace(recipe, train=train | {"use_cpu": True})


def imported(module: str) -> Any:
    """The module; where torch comes with it, without garbage collections: they find nothing, and took 2 of 7 s."""
    if "torch" in sys.modules:
        return importlib.import_module(module)
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()  # what is imported stays: a second less at the end
        gc.enable()


def check_models(recipe: Recipe) -> tuple[Any, Any]:
    """(tokenizer, LoRA config or None), after everything about both models that shows without weights."""
    from ..models import load as models
    from ..models.skeleton import load_skeleton

    with error_context(recipe.where("model.name_or_path")):
        tokenizer, size = models.load_tokenizer(recipe.model), models.vocabulary_size(recipe.model)
        models.check_tokenizer_fits(tokenizer, size, recipe.model.name_or_path)
    if recipe.teacher:
        with error_context(recipe.where("teacher.name_or_path")):
            teacher_size = models.vocabulary_size(recipe.teacher)
            models.check_same_vocabulary(tokenizer, models.load_tokenizer(recipe.teacher), size, teacher_size)
    for key, section in (("model", recipe.model), ("teacher", recipe.teacher)):
        if section and section.attn_implementation not in ("auto", "eager", "sdpa"):  # those are always there
            with error_context(recipe.where(f"{key}.attn_implementation")):
                load_skeleton(section)
    peft_config = models.lora_config(recipe.model, recipe.where("model.lora"))
    _check_target_modules(recipe, peft_config)
    return tokenizer, peft_config


def _check_target_modules(recipe: Recipe, peft_config: Any) -> None:
    """Raises InputError for a name in model.lora.target_modules that no layer has."""
    from ..models.skeleton import load_skeleton

    key, wanted = "model.lora.target_modules", getattr(peft_config, "target_modules", None)
    if not isinstance(wanted, list | set):
        return
    layers = [f".{name}" for name, _ in load_skeleton(recipe.model).named_modules()]
    for name in wanted:
        if not any(layer.endswith(f".{name}") for layer in layers):
            hint = nearest(name, {layer.rpartition(".")[2] for layer in layers}, listed=False)
            raise InputError(f"{recipe.where(key)}: {key}: no layer is called {name!r}{hint}")


def load_skeletons(recipe: Recipe) -> list[Any]:
    """The policy and, if any, the teacher, without weights. Raises InputError where a model is not there."""
    from ..models.skeleton import load_skeleton

    found = []
    for key, section in (("model", recipe.model), ("teacher", recipe.teacher)):
        if section:
            with error_context(recipe.where(key)):
                found.append(load_skeleton(section))
    return found


def check_vllm(recipe: Recipe, config: Any, peft_config: Any) -> None:
    """OPD's `rollout: vllm`: is its server there, and does it serve such adapters? Raises InputError."""
    if getattr(config, "rollout", None) == "vllm":
        from ..generation import vllm

        key = "train.vllm_server_base_url" if config.vllm_mode == "server" else "train.rollout"
        with error_context(recipe.where(key)):
            vllm.check(config, peft_config)


def load_models(recipe: Recipe, config: Any) -> dict[str, Any]:
    """The trainer's model and, for kd and opd, its teacher; random weights are drawn from train.seed."""
    from transformers import set_seed

    from ..engines import launch
    from ..models import load as models

    set_seed(config.seed)
    place: dict[str, Any] = {"device": config.device, "storage": launch.quantised_storage(config)}
    with error_context(recipe.where("model.name_or_path")):
        loaded: dict[str, Any] = {"model": models.load_model(recipe.model, **place)}
    if recipe.teacher:
        with error_context(recipe.where("teacher.name_or_path")):
            loaded["teacher_model"] = models.load_model(recipe.teacher, trainable=False, **place)
        loaded["teacher_offload"] = recipe.teacher.offload
    return loaded


def checkpoint_to_resume(recipe: Recipe, config: Any) -> str | None:
    """The folder that `train.resume_from_checkpoint` means, which `check_inputs` has seen. Raises InputError where it
    is incomplete."""
    from ..trainer.checkpoint import lacking

    wanted, folder = config.resume_from_checkpoint, config.output_dir
    if wanted is None:
        if (Path(folder) / "trainer_state.json").exists():
            logger.info("%s holds an earlier run: its files will be overwritten", folder)
        return None
    if wanted == "auto":
        return wanted
    place = recipe.where("train.resume_from_checkpoint")
    if absent := lacking(Path(wanted), config.save_only_model):
        raise InputError(f"{place}: the checkpoint {wanted} is incomplete, without {', '.join(absent)}")
    return wanted


def make_output_dir(recipe: Recipe, config: Any) -> None:
    """Now that nothing else is wrong. Raises InputError where the system refuses it."""
    try:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        place = recipe.where("train.output_dir")
        raise InputError(f"{place}: train.output_dir: {config.output_dir} cannot be made ({error.strerror})") from error
