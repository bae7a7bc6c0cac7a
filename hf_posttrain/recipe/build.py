"""Construction of the objects of a run from a recipe, in the order of a run.

Heavy imports are deferred to their first use, so that errors of a recipe are reported quickly. Mistakes raise
InputErrors with a location.
"""

import contextlib
import gc
import importlib
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import is_relevant_kernel_record
from ..errors import InputError, error_context
from ..methods import METHODS, config_class, trainer_class
from ..rounds.judges.config import MODEL_JUDGES
from . import rules
from .read import raise_first_problem, train_config
from .sections import Recipe

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedTokenizerBase

    from ..data.dataset_type import AnyDataset
    from ..trainer.base import PostTrainer
    from ..trainer.config import PostTrainConfig

logger = logging.getLogger(__name__)
HARDWARE_OPTIONS = (
    "deepspeed",
    "fsdp",
    "parallelism_config",
    "tf32",
    "sampler",
    "use_liger_kernel",
    "liger_kernel_config",
)
"""Beginnings of the names of training options that require a launcher or a GPU."""


def check_inputs(recipe: Recipe, training: bool = False) -> None:
    """Validate the files that are read, and for training those that are written, without importing torch.

    Args:
        recipe: The recipe.
        training: Whether the run trains.

    Raises:
        InputError: For the first problem.
    """
    raise_first_problem(recipe, rules.input_problems(recipe))
    if training:
        raise_first_problem(recipe, rules.run_problems(recipe))
    if any(section.quantization != "none" for _, section in recipe.models()):
        logging.getLogger("bitsandbytes.backends.cpu.ops").removeFilter(is_relevant_kernel_record)


def configure(recipe: Recipe, training: bool = False) -> "tuple[type[PostTrainer], PostTrainConfig]":
    """Run `check_inputs`, and return the trainer class and the Config of the method.

    Args:
        recipe: The recipe.
        training: Whether the run trains.

    Raises:
        InputError: For problems of the recipe, and for training from an incomplete checkpoint.
    """
    check_inputs(recipe, training)
    method = METHODS[recipe.method]
    import_quietly(method.module)
    from ..engines.launch import quantization_problem

    config = train_config(recipe, config_class(method))
    for name, section in recipe.models():
        if section.quantization != "none" and (problem := quantization_problem(section.quantization, config)):
            raise InputError(f"{recipe.where(f'{name}.quantization')}: {name}.quantization: {problem}")
    if training:
        check_checkpoint(recipe, config)
    return (trainer_class(method), config) if recipe.rounds is None else _configure_rounds(recipe, config)


def check_checkpoint(recipe: Recipe, config: "PostTrainConfig") -> None:
    """Raise InputError if the checkpoint to resume is incomplete. "auto" skips such checkpoints."""
    from ..trainer.checkpoint import incomplete_parts

    checkpoint = config.resume_from_checkpoint
    if isinstance(checkpoint, str) and checkpoint != "auto" and (missing := incomplete_parts(Path(checkpoint))):
        location = recipe.where("train.resume_from_checkpoint")
        problem = f"the checkpoint {checkpoint} is incomplete, without {', '.join(missing)}"
        raise InputError(f"{location}: {problem}. Set another checkpoint, or auto")


def _configure_rounds(recipe: Recipe, config: "PostTrainConfig") -> "tuple[type[PostTrainer], PostTrainConfig]":
    """Return the trainer class and the Config of a recipe with rounds."""
    from ..generation.graders import load_grader
    from ..rollouts.vllm import check_installed
    from ..rounds.iterative_trainer import config_for_rounds, in_rounds

    rounds: Any = recipe.rounds
    with error_context(recipe.where("rounds.sampler")):
        check_installed(rounds.sampler)
    if rounds.judge.by == "function":
        with error_context(recipe.where("rounds.judge.name")):
            load_grader(rounds.judge.name)
    return in_rounds(trainer_class(METHODS[recipe.method]), rounds), config_for_rounds(config, rounds)


def without_hardware_options(recipe: Recipe) -> Recipe:
    """Return the recipe without the training options that require a launcher or a GPU and do not change the data.

    fp16 becomes bf16, which has the same size and runs on a CPU.
    """
    train = {
        "bf16" if value is True and name == "fp16" else name: value
        for name, value in recipe.train.items()
        if not name.startswith(HARDWARE_OPTIONS)
    }
    # the only option of activation checkpointing that requires a GPU
    if isinstance(kwargs := train.get("activation_checkpointing_kwargs"), dict):
        train["activation_checkpointing_kwargs"] = {name: value for name, value in kwargs.items() if name != "offload"}
    rounds: Any = recipe.rounds
    if rounds:
        rounds = replace(rounds, sampler="policy")
    return replace(recipe, rounds=rounds, train=train | {"use_cpu": True})


def import_quietly(module: str) -> ModuleType:
    """Import a module that imports torch and transformers, without their output and without garbage collection.

    Garbage collection takes 1 s of 5 s, and finds nothing.
    """
    gc.disable()
    try:
        # with WANDB_MODE=offline, transformers prints a line when it is imported, even if W&B is not used
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module(module)
    finally:
        gc.enable()


def check_models(
    recipe: Recipe, config: "PostTrainConfig | None" = None
) -> "tuple[PreTrainedTokenizerBase, PeftConfig | None]":
    """Validate everything about the models that does not require their weights.

    Args:
        recipe: The recipe.
        config: The Config of a run, whose servers must be reachable and support its adapters. None skips servers.

    Returns:
        The tokenizer, and the LoRA config or None.

    Raises:
        InputError: For the first problem.
    """
    import torch

    from ..data.chat import check_template_options
    from ..models import adapters
    from ..models import load as models

    # tokenizers and vocabularies
    with error_context(recipe.where("model.name_or_path")):
        model_config = models.check_model(recipe.model)
        tokenizer = models.load_tokenizer(recipe.model)
        models.check_tokenizer_fits(tokenizer, model_config, recipe.model.name_or_path)
        models.check_head(recipe.model, model_config)
    with error_context(recipe.where("train.chat_template_kwargs")):
        check_template_options(tokenizer, recipe.train.get("chat_template_kwargs") or {})
    for name, teacher in recipe.teacher_sections():
        if not (teacher.own_tokenizer or teacher.self):
            with error_context(recipe.where(f"{name}.name_or_path")):
                models.check_same_vocabulary(tokenizer, models.load_tokenizer(teacher))
    if recipe.rounds and recipe.rounds.judge.by in MODEL_JUDGES:
        from ..rounds.judges.models import check_judge

        with error_context(recipe.where("rounds.judge.name")):
            check_judge(recipe.rounds.judge)

    # implementations of attention that the model or the machine may lack; eager and sdpa are always available
    for key, section in recipe.models():
        if section.attn_implementation not in ("auto", "eager", "sdpa"):
            with error_context(recipe.where(f"{key}.attn_implementation")):
                models.load_skeleton(section)
    if config is not None and config.device.type == "cpu" and recipe.model.attn_implementation == "flex_attention":
        key = "model.attn_implementation"
        problem = f"{key}: flex_attention is not supported on CPU, where it has no backward"
        raise InputError(f"{recipe.where(key)}: {problem}. Remove {key}")

    # the adapter, and the modules that it names
    peft_config = adapters.lora_config(recipe.model, recipe.where("model.lora"))
    if not (recipe.model.lora or {}).keys() <= {"r", "alpha", "dropout"}:
        try:
            with torch.device("meta"):
                adapters.add_adapter(models.load_skeleton(recipe.model), peft_config)
        except InputError as error:
            option = str(error).split(": ")[1]
            raise InputError(f"{recipe.where(f'model.lora.{option}')}: {error}") from error
    for server_problem in server_problems(recipe, config, peft_config) if config is not None else ():
        raise server_problem
    return tokenizer, peft_config


def server_problems(
    recipe: Recipe, config: "PostTrainConfig", peft_config: "PeftConfig | None", rows: "AnyDataset | None" = None
) -> Iterator[InputError]:
    """Yield an error for each server of a run that is not reachable or does not support the run.

    Args:
        recipe: The recipe.
        config: Config of the run.
        peft_config: Adapter of the policy, if it has a new one.
        rows: The training rows, or None if they are not prepared yet.
    """
    from ..rollouts import vllm_server
    from ..rollouts.options import VLLMOptions
    from ..rounds.judges.server import ServerJudge
    from ..teachers import served

    checks: list[tuple[str, Callable[[], object]]] = [
        (f"{name}.url", partial(served.check_server, teacher, f"{name}.url", config, rows))
        for name, teacher in recipe.teacher_sections()
        if teacher.url
    ]
    for section, options in (("train", config), ("rounds", recipe.rounds)):
        if isinstance(getattr(options, "sampler", None), VLLMOptions):
            check = partial(vllm_server.check_server, options, peft_config, config.max_length)
            checks.append((f"{section}.sampler", check))
    if recipe.rounds and recipe.rounds.judge.by == "url":
        checks.append(("rounds.judge.name", ServerJudge(recipe.rounds.judge).check))
    for key, check_server in checks:
        try:
            with error_context(recipe.where(key)):
                check_server()
        except InputError as error:
            yield error


def earlier_run_note(config: "PostTrainConfig") -> str | None:
    """Return a sentence about the files of an earlier run that a run overwrites, or None."""
    from ..trainer.checkpoint import find_checkpoint

    output_dir = str(config.output_dir)
    if config.resume_from_checkpoint:
        return None
    if checkpoint := find_checkpoint(output_dir):
        problem = f"{checkpoint} belongs to an earlier run, whose model and report are overwritten"
        return f"{problem}. To resume that run instead, set train.resume_from_checkpoint=auto"
    if (Path(output_dir) / "trainer_state.json").exists():
        return f"{output_dir} contains an earlier run, whose model and report are overwritten"
    return None


def make_output_dir(recipe: Recipe, config: "PostTrainConfig") -> None:
    """Create config.output_dir, and warn about the files of an earlier run.

    Raises:
        InputError: If the folder cannot be created.
    """
    folder = Path(str(config.output_dir))
    if note := earlier_run_note(config):
        logger.warning("%s", note)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        location = recipe.where("train.output_dir")
        raise InputError(f"{location}: train.output_dir: {folder} cannot be created ({error.strerror})") from error


def load_models(recipe: Recipe, config: "PostTrainConfig") -> dict[str, Any]:
    """Load the models of a run. Random weights depend on train.seed.

    Returns:
        The arguments of the trainer: `model` and, for methods with a teacher, `teacher_model` and `teacher_offload`.
    """
    from transformers import set_seed

    from ..engines import launch
    from ..models import load as models

    set_seed(config.seed)
    storage = launch.quantized_storage(config)
    loaded: dict[str, Any] = {}
    for name, section in recipe.models():
        with error_context(recipe.where(f"{name}.name_or_path")):
            is_policy = section is recipe.model
            loaded[name] = models.load_model(section, device=config.device, storage=storage, trainable=is_policy)

    # servers, and the student as its own teacher, are represented by their sections
    teachers = {name.partition(".")[2]: loaded.get(name, section) for name, section in recipe.teacher_sections()}
    if not teachers:
        return {"model": loaded["model"]}
    offload = {name.partition(".")[2]: section.offload for name, section in recipe.teacher_sections()}
    if not recipe.teachers:
        return {"model": loaded["model"], "teacher_model": teachers[""], "teacher_offload": offload[""]}
    return {"model": loaded["model"], "teacher_model": teachers, "teacher_offload": offload}
