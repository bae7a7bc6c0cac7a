"""The command: a recipe -> objects -> train, evaluate, save.

    accelerate launch -m hf_posttrain.run RECIPE.yaml [section.key=value ...]

    main          arguments, exit codes: 0, 2 for a mistake in the input (one line on stderr), 130 for Ctrl-C
    run           the steps in order; everything that can be wrong is found before weights are loaded
    preprocess    --preprocess-only: the steps up to the data, which later runs find in the cache
    save          what is left in train.output_dir

Heavy imports come after the recipe has been read, so that its errors and --help are quick.
"""

import gc
import importlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .arguments import parse
from .errors import InputError
from .recipe import Recipe, check_train, load_recipe, placed, train_config

logger = logging.getLogger("hf_posttrain.run")  # also as __main__

METHODS = {  # method: (module, Config, Trainer), imported when it is used
    "sft": ("hf_posttrain.sft", "SFTConfig", "SFTTrainer"),
    "dpo": ("hf_posttrain.dpo", "DPOConfig", "DPOTrainer"),
    "kto": ("hf_posttrain.kto", "KTOConfig", "KTOTrainer"),
    "kd": ("hf_posttrain.kd", "KDConfig", "KDTrainer"),
    "opd": ("hf_posttrain.opd", "OPDConfig", "OPDTrainer"),
}
OF_THE_MACHINE = (
    "deepspeed", "fsdp", "fsdp_config", "parallelism_config", "tf32", "rollout", "vllm_",
)  # fmt: skip
"""Keys of the train section, or how they begin, that want a launcher or a GPU and do not change the data."""
PATIENCE = 10
"""Seconds that other ranks give the first one to say what is wrong, before they say it too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a recipe; returns the exit code. InputError becomes one line on stderr and 2, anything else a traceback."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_posttrain").setLevel(logging.INFO if first else logging.ERROR)
    if not first:
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # read when datasets is imported
    try:
        arguments = parse(argv)
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        preprocess(recipe) if arguments.preprocess_only else run(recipe)
    except InputError as error:
        if not first:  # the first rank says it, unless the mistake is not one of its own: a launcher ends all at once
            time.sleep(PATIENCE)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def run(recipe: Recipe) -> dict[str, float]:
    """Train, evaluate and save as `recipe` says; returns the metrics. InputErrors come before weights are loaded."""
    trainer_class, config = configure(recipe)
    from .recipe_data import prepare_data

    checkpoint = checkpoint_to_resume(recipe, config)
    tokenizer, peft_config = check_models(recipe)
    check_vllm(recipe, config, peft_config)
    rows = prepare_data(recipe, trainer_class, tokenizer, config)
    make_output_dir(recipe, config)
    trainer = trainer_class(
        args=config,
        processing_class=tokenizer,
        peft_config=peft_config,
        train_dataset=rows["train"],
        eval_dataset=rows.get("eval"),
        **load_models(recipe, config),
    )
    result = trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.preemption.happened:
        logger.info("to go on: the same command with train.resume_from_checkpoint=auto")
        return dict(result.metrics)
    save(trainer, recipe)
    metrics = dict(result.metrics)
    if trainer.has_trained:  # not a finished run that was resumed: its metrics stay
        _keep_metrics(trainer, "train", result.metrics)
    if recipe.data.eval is not None:
        evaluated = trainer.evaluate()
        _keep_metrics(trainer, "eval", evaluated)
        metrics |= evaluated
    trainer.save_state()
    return metrics


def preprocess(recipe: Recipe) -> None:
    """Check and tokenise the data as `run` would, into the cache of `datasets`; print a line of each data set.

    Runs on any machine: what the train section asks of engines and GPUs is checked for its names and types alone.
    """
    check_train(recipe)
    train = {name: value for name, value in recipe.train.items() if not name.startswith(OF_THE_MACHINE)}
    trainer_class, config = configure(replace(recipe, train=train | {"use_cpu": True}))
    from .recipe_data import prepare_data, summary

    tokenizer, _ = check_models(recipe)
    rows = prepare_data(recipe, trainer_class, tokenizer, config)
    if config.local_process_index == 0:
        for name, prepared in rows.items():
            print(f"{name}: {summary(prepared)}")


def configure(recipe: Recipe) -> tuple[Any, Any]:
    """(trainer class, the method's Config). Raises InputError for what is wrong in the recipe alone, and as far as
    possible before torch is imported."""
    check_train(recipe)
    module, config_name, trainer_name = METHODS[recipe.method]
    method = imported(module)
    from .launch import quantisation_problem

    config = train_config(recipe, getattr(method, config_name))
    for name, section in (("model", recipe.model), ("teacher", recipe.teacher)):
        bits = section.quantization if section else "none"
        if bits != "none" and (problem := quantisation_problem(bits, config)):
            raise InputError(f"{recipe.where(f'{name}.quantization')}: {name}.quantization: {problem}")
    return getattr(method, trainer_name), config


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
    from . import models

    with placed(recipe, "model"):
        tokenizer, size = models.load_tokenizer(recipe.model), models.vocabulary_size(recipe.model)
        models.check_tokenizer_fits(tokenizer, size, recipe.model.name_or_path)
    if recipe.teacher:
        with placed(recipe, "teacher"):
            teacher_size = models.vocabulary_size(recipe.teacher)
            models.check_same_vocabulary(tokenizer, models.load_tokenizer(recipe.teacher), size, teacher_size)
    return tokenizer, models.lora_config(recipe.model, recipe.where)


def check_vllm(recipe: Recipe, config: Any, peft_config: Any) -> None:
    """OPD's `rollout: vllm`: is its server there, and does it serve such adapters? Raises InputError."""
    if getattr(config, "rollout", None) == "vllm":
        from . import vllm_options

        key = "train.vllm_server_base_url" if config.vllm_mode == "server" else "train.rollout"
        with placed(recipe, key):
            vllm_options.check(config, peft_config)


def load_models(recipe: Recipe, config: Any) -> dict[str, Any]:
    """The trainer's model and, for kd and opd, its teacher; random weights are drawn from train.seed."""
    from transformers import set_seed

    from . import launch, models

    set_seed(config.seed)
    place: dict[str, Any] = {"device": config.device, "storage": launch.quantised_storage(config)}
    with placed(recipe, "model"):
        loaded: dict[str, Any] = {"model": models.load_model(recipe.model, **place)}
    if recipe.teacher:
        with placed(recipe, "teacher"):
            loaded["teacher_model"] = models.load_model(recipe.teacher, trainable=False, **place)
        loaded["teacher_offload"] = recipe.teacher.offload
    return loaded


def checkpoint_to_resume(recipe: Recipe, config: Any) -> str | None:
    """The folder that `train.resume_from_checkpoint` means. Raises InputError where it is missing or incomplete."""
    from .checkpoint import lacking

    wanted, folder = config.resume_from_checkpoint, config.output_dir
    existing = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problem = "may not be written to" if existing.is_dir() else "is a file, not a folder"
        raise InputError(f"{recipe.where('train.output_dir')}: train.output_dir: {existing} {problem}")
    if wanted is None:
        if (Path(folder) / "trainer_state.json").exists():
            logger.info("%s holds an earlier run: its files will be overwritten", folder)
        return None
    if wanted == "auto":
        return wanted
    place = recipe.where("train.resume_from_checkpoint")
    if not Path(wanted).is_dir():
        raise InputError(f"{place}: train.resume_from_checkpoint: there is no folder {wanted}")
    if any(Path(wanted).glob("checkpoint-*")):
        raise InputError(f"{place}: train.resume_from_checkpoint: {wanted} holds checkpoints: name one, or auto")
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


def save(trainer: Any, recipe: Recipe) -> None:
    """Model or adapter, tokenizer and generation config (by the trainer), and the recipe as resolved."""
    trainer.save_model()
    if trainer.is_world_process_zero():
        (Path(trainer.args.output_dir) / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")


def _keep_metrics(trainer: Any, split: str, metrics: dict[str, float]) -> None:
    """Print them, and add them to all_results.json."""
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)


if __name__ == "__main__":
    sys.exit(main())
