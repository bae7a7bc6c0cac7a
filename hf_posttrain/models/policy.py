"""Setup of the policy: a loaded model becomes one that is ready to train, with its adapter and generation config."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import peft
import torch
from peft import PeftConfig
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin, set_seed

from ..data import chat
from ..data.images import attach_image_reader, get_image_reader
from ..data.template import template_problem
from ..errors import InputError
from ..scoring import forward
from ..scoring.attention_selection import choose_attention, disable_cudnn_attention
from ..scoring.rotary import rope_switch_length
from . import load
from .acceleration import apply_liger_and_compile, warn_if_not_compiled
from .adapter_base_check import warn_if_base_changed
from .adapters import adapted_layers, add_adapter, check_adapter_kind, describe_adapter, skip_needless_casts
from .config import ModelSection, RewardModelSection, resolve_path

if TYPE_CHECKING:
    from ..trainer.config import PostTrainConfig

logger = logging.getLogger(__name__)


def resolve_model(
    model: nn.Module | str,
    tokenizer: PreTrainedTokenizerBase | None,
    peft_config: PeftConfig | None,
    args: "PostTrainConfig",
    images: bool = False,
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Return a model and its tokenizer, and load the model if it is a name and the tokenizer if it is missing.

    Args:
        model: The model, its hub name or its folder.
        tokenizer: The tokenizer or processor, or None to load that of the model.
        peft_config: Config of a new adapter.
        args: The Config, of which `model_init_kwargs`, `trust_remote_code` and `chat_template_path` are read.
        images: Whether the rows hold images. A vision-language model is then loaded as one, with its processor.

    Raises:
        InputError: If the model or its tokenizer cannot be found, or do not fit each other.
    """
    is_processor = isinstance(tokenizer, ProcessorMixin)
    if is_processor:
        tokenizer = attach_image_reader(tokenizer)
    if isinstance(model, str):
        section_class = RewardModelSection if args.method.head == "score" else ModelSection
        section = section_class(name_or_path=model, lora=None if peft_config is None else {})
        section.trust_remote_code = args.trust_remote_code
        options = load.apply_model_init_kwargs(section, args.model_init_kwargs or {})
        if tokenizer is None:
            config = load.check_model(section)
            section.images = load.is_vision_only(config) or (images and load.saved_with_vision(config))
        else:
            section.images = is_processor
        set_seed(args.seed)  # for the score layer of a reward model
        model = load.load_model(section, options=options)
        tokenizer = tokenizer or load.load_tokenizer(section)

    if tokenizer is None:
        name = getattr(getattr(model, "config", None), "_name_or_path", None)
        if not name:
            raise InputError("processing_class is missing. Pass the model's tokenizer")
        section = ModelSection(name_or_path=name, trust_remote_code=args.trust_remote_code)
        section.images = images and forward.is_vision_language_model(model)
        tokenizer = load.load_tokenizer(section)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InputError(f"processing_class must be a tokenizer or a processor, not {type(tokenizer).__name__}")
    if get_image_reader(tokenizer) and not forward.is_vision_language_model(model):
        name = type(forward.causal_lm(model)).__name__
        raise InputError(
            f"{name} does not support images. Load it with AutoModelForImageTextToText, or pass its tokenizer"
        )
    if args.chat_template_path is not None:
        if problem := template_problem(args.chat_template_path):
            raise InputError(f"chat_template_path must be a Jinja file: {problem}")
        load.set_chat_template(tokenizer, args.chat_template_path)
    _check_head(model, args)
    return model, load.with_pad_token(tokenizer)


def _check_head(model: nn.Module, args: "PostTrainConfig") -> None:
    """Raise InputError if the last layer of a loaded model is not the one that the method trains."""
    inner = forward.causal_lm(model)
    name = type(inner).__name__
    if forward.is_reward_model(model):
        if args.method.head == "language":
            raise InputError(f"{name} is a sequence classifier and cannot generate text. Use a language model")
        if not isinstance(getattr(inner, "score", None), nn.Linear) or inner.num_labels != 1:
            problem = f"{name} has {inner.num_labels} labels. A reward model must have one label, and a score layer"
            raise InputError(f"{problem}. Load it with num_labels=1")
    elif args.method.head == "score":
        fix = "Load it with AutoModelForSequenceClassification and num_labels=1, or pass its name"
        raise InputError(f"{name} has no score layer, which a reward model requires. {fix}")


def find_terminal_ids(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None
) -> list[int]:
    """Return the ids that end an answer, from the chat template, the tokenizer and the generation config."""
    config = getattr(forward.causal_lm(model), "generation_config", None)
    return terminal_ids_from_config(config, tokenizer, template_kwargs)


def terminal_ids_from_config(
    config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None
) -> list[int]:
    """Return the ids that end an answer, as `find_terminal_ids`, given the generation config of the model, if any."""
    ids = [chat.turn_end_id(tokenizer, template_kwargs)] if tokenizer.chat_template else []
    eos = getattr(config, "eos_token_id", None)
    # only special or added tokens of this tokenizer: in a config that belongs to another one, ids may be common words
    special_ids = chat.marker_ids(tokenizer)
    ids += [tokenizer.eos_token_id, *(i for i in (eos if isinstance(eos, list) else [eos]) if i in special_ids)]
    return [i for i in dict.fromkeys(ids) if i is not None]


def align_generation(model: nn.Module, tokenizer: PreTrainedTokenizerBase, terminal_ids: list[int]) -> None:
    """Make generation stop at every terminal id, in memory and, by `set_generation_config`, in the saved model."""
    generation = set_generation_config(model, terminal_ids)
    config = forward.causal_lm(model).config.get_text_config()
    # both configs get the special ids of the tokenizer
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        if (value := getattr(tokenizer, name)) is not None:
            setattr(config, name, value)
            setattr(generation, name, value)
    generation.eos_token_id = _eos_value(terminal_ids)


def set_generation_config(model: nn.Module, terminal_ids: list[int]) -> GenerationConfig:
    """Set and return a copy of the model's generation config that transformers can save.

    The user may have replaced the config of the model. A config that transformers does not save is changed to sample
    (some releases have a temperature without it), or else replaced by the default one. A config without eos gets the
    terminal ids.
    """
    inner = forward.causal_lm(model)
    wrapper = forward.unwrap_model(model)
    # a config on the wrapper of an adapter takes precedence over that of the model inside
    configs = (vars(module).get("generation_config") for module in (wrapper, inner))
    current = next(filter(None, configs), None)
    generation = copy.deepcopy(current) or GenerationConfig.from_model_config(inner.config)
    if problem := _validation_problem(generation):
        generation.do_sample = True
        if _validation_problem(generation):
            logger.warning("generation_config: replaced by the default one, since it cannot be saved: %s", problem)
            generation = GenerationConfig.from_model_config(inner.config)
        else:
            logger.warning("generation_config: do_sample set to true, since sampling options are not saved without it")
    if generation.eos_token_id is None:
        generation.eos_token_id = _eos_value(terminal_ids)
    vars(wrapper).pop("generation_config", None)
    inner.generation_config = generation
    return generation


def _eos_value(terminal_ids: list[int]) -> list[int] | int | None:
    """Return `eos_token_id` of a generation config: a list only if there are several ids."""
    if len(terminal_ids) > 1:
        return terminal_ids
    return terminal_ids[0] if terminal_ids else None


def _validation_problem(generation: GenerationConfig) -> str:
    """Return why transformers does not save the config, or an empty string."""
    try:
        generation.validate(strict=True)
    except ValueError as error:
        return " ".join(str(error).split())[:300]
    return ""


def prepare_policy(model: nn.Module, peft_config: PeftConfig | None, args: "PostTrainConfig") -> nn.Module:
    """Return the model ready to train: with a new adapter, without dropout, and with a forward that takes a scorer.

    Args:
        model: The loaded model.
        peft_config: Config of a new adapter, or None.
        args: The Config.

    Raises:
        InputError: For an adapter on an adapter, and for kinds of adapters that cannot be trained here.
    """
    if not isinstance(model, peft.PeftModel) and getattr(model, "peft_config", None):
        raise InputError(
            "the model contains an adapter that transformers has loaded (its folder has adapter_config.json, or "
            "add_adapter was called). Load the base alone, and the adapter with PEFT (model.adapter)"
        )
    if any(layer.merged for layer in adapted_layers(model)):
        raise InputError("the adapter is merged into the weights. Call unmerge_adapter() before training")
    for adapter in (*getattr(model, "peft_config", {}).values(), *([] if peft_config is None else [peft_config])):
        check_adapter_kind(adapter)
    if peft_config is not None or isinstance(model, peft.PeftModel):
        warn_if_base_changed(model)

    if not args.train_vision:
        freeze_vision(model)
    if peft_config is not None:
        model = add_adapter(model, peft_config, vision=args.train_vision)
    elif isinstance(model, peft.PeftModel) and (base := forward.causal_lm(model).config.name_or_path):
        for adapter in model.peft_config.values():  # a saved adapter names the base on which it is now trained
            if resolve_path(str(adapter.base_model_name_or_path)) != resolve_path(base):
                adapter.base_model_name_or_path = base
                adapter.revision = None
    for adapter in getattr(model, "peft_config", {}).values():  # by a path that is valid from any folder
        if adapter.base_model_name_or_path:
            adapter.base_model_name_or_path = resolve_path(adapter.base_model_name_or_path)
    active: Any = model.base_model.active_adapters if isinstance(model, peft.PeftModel) else []
    if len(active) > 1:
        names = ", ".join(active)
        raise InputError(f"several adapters are active ({names}), but PEFT saves only one. Merge them, or activate one")

    if not args.disable_dropout:
        restore_dropout(model)
    elif rates := disable_dropout(model):
        logger.info("disable_dropout: disabled %s", ", ".join(rates))

    module: Any
    for module in model.modules():
        # on CPU, bitsandbytes repacks weights in a first forward without gradient, and its backward reads them wrongly
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InputError(
            "nothing to train, since no parameter of the model requires a gradient. Unfreeze weights, or add an adapter"
        )
    if isinstance(model, peft.PeftModel):
        if args.activation_checkpointing:
            if getattr(model.active_peft_config, "alora_invocation_tokens", None):
                raise InputError(
                    "alora_invocation_tokens cannot be combined with activation_checkpointing. Set "
                    "activation_checkpointing: false"
                )
            model.enable_input_require_grads()  # required by checkpointed layers, since the base is frozen
        logger.info("%s", describe_adapter(model, peft_config))
        skip_needless_casts(model, args.device.type)
        # trained copies of layers (modules_to_save) have the base's dtype, and in bf16 they would hardly move
        for parameter in trained:
            if args.bf16 and parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()
    elif low := {parameter.dtype for parameter in trained} & {torch.bfloat16, torch.float16}:
        logger.warning(
            "all weights are trained in %s, whose steps are coarser than most updates. In a test with a learning rate "
            "of 5e-7, weights moved by 1.4 %% of the expected change. Use float32 (model.dtype: default) with bf16 "
            "autocast, or lora",
            low.pop(),
        )

    forward.enable_scoring(model)
    switch_length = rope_switch_length(forward.causal_lm(model))
    if switch_length and args.method.rows.sampled and (args.max_length is None or args.max_length > switch_length):
        raise InputError(
            f"max_length={args.max_length} must be at most {switch_length}. Above, the model has other rotary "
            "frequencies (LongRoPE or dynamic NTK), and a longer rollout is not scored as it was sampled. Set "
            f"max_length={switch_length}"
        )
    apply_liger_and_compile(model, args)
    if args.layout == "padded":  # in this layout, a row is one document
        disable_cudnn_attention(args.device)
    else:
        choose_attention(forward.causal_lm(model), args.device)
    warn_if_not_compiled(forward.causal_lm(model), args)
    return model


def freeze_vision(model: nn.Module) -> None:
    """Freeze all parts of a vision-language model except its language model and head."""
    for weight in forward.vision_weights(model):
        weight.requires_grad_(False)


def with_supported_checkpointing(model: nn.Module, args: "PostTrainConfig") -> Any:
    """Return the Config, or a copy without activation checkpointing if the model does not support it."""
    inner = forward.causal_lm(model)
    if not args.activation_checkpointing or getattr(inner, "supports_gradient_checkpointing", True):
        return args
    logger.warning("activation_checkpointing is off, since %s does not support it", type(inner).__name__)
    args = copy.copy(args)
    args.activation_checkpointing = args.gradient_checkpointing = False
    return args


def disable_dropout(model: nn.Module) -> list[str]:
    """Set every dropout rate to 0, and let routers route in training as in evaluation.

    Rates are in modules (LoRA's too), in attributes that a forward reads, and in the config if a forward reads that.
    `original_dropout` restores them for saving, `restore_dropout` permanently.

    Returns:
        The names of the rates and routers that were active.
    """
    names: set[str] = set()
    inner = forward.causal_lm(model)
    # an earlier trainer of the same model may have saved rates
    inner.original_dropout_rates = getattr(inner, "original_dropout_rates", [])
    owner: Any
    for owner in (inner.config, inner.config.get_text_config(), *model.modules()):
        rates = {name: value for name, value in vars(owner).items() if "drop" in name and _is_active(value)}
        if "Dropout" in type(owner).__name__ and _is_active(getattr(owner, "p", None)):  # of torch, of PEFT for BOFT
            rates["p"] = owner.p
        if rates:
            inner.original_dropout_rates.append((owner, rates))
            vars(owner).update(_zeroed(rates))
            names.update("dropout" if name == "p" else name for name in rates)

    module: Any
    for module in model.modules():
        # routers with jitter, or that sample experts; the rate itself may have a meaning in evaluation (PhiMoE)
        if any("jitter" in name for name in vars(module)):
            module.train = MethodType(_stay_in_eval_mode, module)
            module.eval()
            names.update(name for name, rate in vars(module).items() if "jitter" in name and rate)
    return sorted(names)


def _is_active(rate: object) -> bool:
    """Return whether a dropout rate is above 0. PEFT has a dict of rates, one for each adapter."""
    return any(map(_is_active, rate.values())) if isinstance(rate, dict) else isinstance(rate, float) and rate > 0


def _zeroed(rates: dict[str, Any]) -> dict[str, Any]:
    return {name: _zeroed(rate) if isinstance(rate, dict) else 0.0 for name, rate in rates.items()}


def restore_dropout(model: nn.Module) -> None:
    """Restore the dropout rates that an earlier trainer has set to 0."""
    original = vars(forward.causal_lm(model)).pop("original_dropout_rates", [])
    for owner, rates in reversed(original):  # the first of several trainers has saved the rates of the user
        vars(owner).update(rates)
    for module in model.modules():
        if getattr(vars(module).get("train"), "__func__", None) is _stay_in_eval_mode:
            del module.train
    if original:
        logger.info("disable_dropout: false: restored dropout that an earlier trainer had disabled")


def _stay_in_eval_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(module, False)


@contextmanager
def original_dropout(model: nn.Module) -> Iterator[None]:
    """Give modules and config their original dropout rates inside the context, in order to save the config."""
    original = getattr(forward.causal_lm(model), "original_dropout_rates", [])
    current = [(owner, {name: vars(owner)[name] for name in rates}) for owner, rates in original]
    for owner, rates in reversed(original):
        vars(owner).update(rates)
    try:
        yield
    finally:
        for owner, rates in current:
            vars(owner).update(rates)
