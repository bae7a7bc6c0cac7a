"""A recipe's sections -> the objects of a run, in functions that stand in the order of a run.

Heavy imports come with the first use, so that errors of the recipe are quick. Mistakes are InputErrors with a place.
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
from typing import TYPE_CHECKING, Any

from .. import is_of_used_kernel
from ..errors import InputError, error_context
from ..methods import METHODS, config_class, trainer_class
from ..rounds.judges.config import MODEL_JUDGES
from . import rules
from .read import raise_first_problem, train_config
from .sections import Recipe

if TYPE_CHECKING:
    from peft import PeftConfig

    from ..trainer.config import PostTrainConfig

logger = logging.getLogger(__name__)


def check_inputs(recipe: Recipe, training: bool = False) -> None:
    """The files that are read and, for a training, what it writes, before torch. Raises InputError at once."""
    raise_first_problem(recipe, rules.input_problems(recipe))
    if training:
        raise_first_problem(recipe, rules.run_problems(recipe))
    if any(section.quantization != "none" for _, section in recipe.models()):
        logging.getLogger("bitsandbytes.backends.cpu.ops").removeFilter(is_of_used_kernel)


def configure(recipe: Recipe, training: bool = False) -> tuple[Any, Any]:
    """(trainer class, the method's Config), after `check_inputs`. Raises InputError for what is wrong in the recipe
    alone, and for a training whose checkpoint is not whole.
    """
    check_inputs(recipe, training)
    method = METHODS[recipe.method]
    import_quietly(method.module)
    from ..engines.launch import quantisation_problem
    from ..trainer.checkpoint import lacking

    config = train_config(recipe, config_class(method))
    for name, section in recipe.models():
        if section.quantization != "none" and (problem := quantisation_problem(section.quantization, config)):
            raise InputError(f"{recipe.where(f'{name}.quantization')}: {name}.quantization: {problem}")
    # "auto" passes over what is not whole
    wanted = config.resume_from_checkpoint if training else None
    if isinstance(wanted, str) and wanted != "auto" and (absent := lacking(Path(wanted))):
        place = recipe.where("train.resume_from_checkpoint")
        raise InputError(f"{place}: the checkpoint {wanted} is incomplete, without {', '.join(absent)}")
    return (trainer_class(method), config) if recipe.rounds is None else _with_rounds(recipe, config)


def _with_rounds(recipe: Recipe, config: "PostTrainConfig") -> tuple[Any, Any]:
    """`configure` of a recipe with rounds."""
    from ..generation.graders import find_grader
    from ..rollouts.vllm import check_installed
    from ..rounds.iterative_trainer import config_for_rounds, in_rounds

    rounds: Any = recipe.rounds
    with error_context(recipe.where("rounds.sampler")):
        check_installed(rounds.sampler)
    if rounds.judge.by == "function":
        with error_context(recipe.where("rounds.judge.name")):
            find_grader(rounds.judge.name)
    return in_rounds(trainer_class(METHODS[recipe.method]), rounds), config_for_rounds(config, rounds)


def without_hardware_options(recipe: Recipe) -> Recipe:
    """The recipe without those keys of its train section that want a launcher or a GPU and do not change the data; what
    is as large as fp16 and runs on CPU is bf16.
    """
    wanting = (
        "deepspeed",
        "fsdp",
        "parallelism_config",
        "tf32",
        "sampler",
        "use_liger_kernel",
        "liger_kernel_config",
    )
    train = {
        "bf16" if value is True and name == "fp16" else name: value
        for name, value in recipe.train.items()
        if not name.startswith(wanting)
    }
    # Of the options of checkpointing only this one wants a GPU.
    if isinstance(checkpointed := train.get("activation_checkpointing_kwargs"), dict):
        left = {name: value for name, value in checkpointed.items() if name != "offload"}
        train["activation_checkpointing_kwargs"] = left
    rounds: Any = recipe.rounds
    if rounds:
        rounds = replace(rounds, sampler="policy")
    return replace(recipe, rounds=rounds, train=train | {"use_cpu": True})


def import_quietly(module: str) -> Any:
    """The module, with torch and transformers, imported without garbage collections: they find nothing in 1 s of 5."""
    gc.disable()
    try:
        # with WANDB_MODE=offline transformers prints a line when it is imported, whether W&B is used or not
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module(module)
    finally:
        gc.enable()


def check_models(recipe: Recipe, config: Any = None) -> tuple[Any, Any]:
    """(tokenizer, LoRA config or None), after everything about both models that shows without weights; with the config
    of a run, its vLLM server must be there and serve such adapters. Raises InputError.
    """
    import torch

    from ..data.chat import check_template_options
    from ..models import adapters
    from ..models import load as models

    # tokenizers and vocabularies
    with error_context(recipe.where("model.name_or_path")):
        tokenizer = models.load_tokenizer(recipe.model)
        models.check_tokenizer_fits(tokenizer, models.check_model(recipe.model), recipe.model.name_or_path)
    with error_context(recipe.where("train.chat_template_kwargs")):
        check_template_options(tokenizer, recipe.train.get("chat_template_kwargs") or {})
    for name, taught in recipe.teacher_sections():
        if not (taught.own_tokenizer or taught.self):
            with error_context(recipe.where(f"{name}.name_or_path")):
                models.check_same_vocabulary(tokenizer, models.load_tokenizer(taught))
    if recipe.rounds and recipe.rounds.judge.by in MODEL_JUDGES:
        from ..rounds.judges.models import check_judge

        with error_context(recipe.where("rounds.judge.name")):
            check_judge(recipe.rounds.judge)
    # an attention that the model or the machine may not have: eager and sdpa are always there
    for key, section in recipe.models():
        if section.attn_implementation not in ("auto", "eager", "sdpa"):
            with error_context(recipe.where(f"{key}.attn_implementation")):
                models.load_skeleton(section)
    if config is not None and config.device.type == "cpu" and recipe.model.attn_implementation == "flex_attention":
        key = "model.attn_implementation"
        raise InputError(f"{recipe.where(key)}: {key}: flex_attention has no backward on CPU: leave it out here")
    # the adapter, and what it names in the model
    peft_config = adapters.lora_config(recipe.model, recipe.where("model.lora"))
    if not (recipe.model.lora or {}).keys() <= {"r", "alpha", "dropout"}:
        try:
            with torch.device("meta"):
                adapters.add_adapter(models.load_skeleton(recipe.model), peft_config)
        except InputError as error:
            option = str(error).split(": ")[1]
            raise InputError(f"{recipe.where(f'model.lora.{option}')}: {error}") from error
    for problem in server_problems(recipe, config, peft_config) if config is not None else ():
        raise problem
    return tokenizer, peft_config


def server_problems(
    recipe: Recipe, config: "PostTrainConfig", peft_config: "PeftConfig | None"
) -> Iterator[InputError]:
    """What is wrong with the servers that a run would ask: one that is not there, or cannot do what is needed."""
    from ..rollouts import vllm_server
    from ..rollouts.options import VLLMOptions
    from ..rounds.judges.server import ServerJudge
    from ..teachers import served

    asked: list[tuple[str, Callable[[], Any]]] = [
        (f"{name}.url", partial(served.check_server, taught, f"{name}.url", config))
        for name, taught in recipe.teacher_sections()
        if taught.url
    ]
    for section, options in (("train", config), ("rounds", recipe.rounds)):
        if isinstance(getattr(options, "sampler", None), VLLMOptions):
            check = partial(vllm_server.check_server, options, peft_config, config.max_length)
            asked.append((f"{section}.sampler", check))
    if recipe.rounds and recipe.rounds.judge.by == "url":
        asked.append(("rounds.judge.name", ServerJudge(recipe.rounds.judge).check))
    for key, ask in asked:
        try:
            with error_context(recipe.where(key)):
                ask()
        except InputError as error:
            yield error


def make_output_dir(recipe: Recipe, config: Any) -> None:
    """Make config.output_dir. Raises InputError where the system refuses it."""
    from ..trainer.checkpoint import find_checkpoint

    folder = Path(config.output_dir)
    if not config.resume_from_checkpoint:
        if found := find_checkpoint(config.output_dir):
            said = "%s is of an earlier run, whose files this one overwrites: train.resume_from_checkpoint=auto goes on"
            logger.warning(said, found)
        elif (folder / "trainer_state.json").exists():
            logger.warning("%s holds an earlier run: its files will be overwritten", folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        place = recipe.where("train.output_dir")
        raise InputError(f"{place}: train.output_dir: {folder} cannot be made ({error.strerror})") from error


def load_models(recipe: Recipe, config: "PostTrainConfig") -> dict[str, Any]:
    """The trainer's model and, for methods with one, its teacher; random weights are drawn from train.seed."""
    from transformers import set_seed

    from ..engines import launch
    from ..models import load as models

    set_seed(config.seed)
    storage = launch.quantised_storage(config)
    loaded: dict[str, Any] = {}
    for name, section in recipe.models():
        with error_context(recipe.where(f"{name}.name_or_path")):
            policy = section is recipe.model
            loaded[name] = models.load_model(section, device=config.device, storage=storage, trainable=policy)
    # servers, and the student's own past, are their sections
    taught = {name: loaded.get(name, section) for name, section in recipe.teacher_sections()}
    if not taught:
        return {"model": loaded["model"]}
    several = {name.partition(".")[2]: teacher for name, teacher in taught.items()}
    offload = {name.partition(".")[2]: section.offload for name, section in recipe.teacher_sections()}
    if not recipe.teachers:
        return {"model": loaded["model"], "teacher_model": several[""], "teacher_offload": offload[""]}
    return {"model": loaded["model"], "teacher_model": several, "teacher_offload": offload}
