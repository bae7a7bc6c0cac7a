"""The policy: from a loaded model to one that is ready to train, with the adapter and generation config it keeps."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import peft
import torch
from peft import PeftConfig
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments

from ..data import chat
from ..data.images import get_image_reader, attach_image_reader
from ..errors import InputError
from ..scoring import forward
from ..scoring.attention_selection import disable_cudnn_attention, choose_attention
from ..scoring.rotary import rope_switch_length
from . import load
from .acceleration import apply_liger_and_compile, warn_if_not_compiled
from .adapter_base_check import warn_if_base_changed
from .adapters import adapted_layers, add_adapter, check_adapter_kind, describe_adapter, skip_needless_casts
from .config import ModelSection, resolve_path

logger = logging.getLogger(__name__)


def resolve_model(
    model: nn.Module | str,
    tokenizer: PreTrainedTokenizerBase | None,
    peft_config: PeftConfig | None,
    args: Any,
    images: bool = False,
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """A model and its tokenizer, each loaded by name where it is missing. Raises InputError if it cannot be found.

    args: a Config, of which `model_init_kwargs` and `trust_remote_code` are read. images: whether the rows hold images;
    then a vision-language model is loaded as one, with its processor.
    """
    sees = isinstance(tokenizer, ProcessorMixin)
    if sees:
        tokenizer = attach_image_reader(tokenizer)
    if isinstance(model, str):
        section = ModelSection(name_or_path=model, lora=None if peft_config is None else {})
        section.trust_remote_code = args.trust_remote_code
        options = load.apply_model_init_kwargs(section, args.model_init_kwargs or {})
        if tokenizer is None:
            config = load.check_model(section)
            section.images = load.is_vision_only(config) or (images and load.saved_with_vision(config))
        else:
            section.images = sees
        model = load.load_model(section, options=options)
        tokenizer = tokenizer or load.load_tokenizer(section)
    if tokenizer is None:
        name = getattr(getattr(model, "config", None), "_name_or_path", None)
        if not name:
            raise InputError("processing_class is missing: pass the model's tokenizer")
        section = ModelSection(name_or_path=name, trust_remote_code=args.trust_remote_code)
        section.images = images and forward.is_vision_language_model(model)
        tokenizer = load.load_tokenizer(section)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InputError(f"processing_class is no tokenizer or processor but of class {type(tokenizer).__name__}")
    if get_image_reader(tokenizer) and not forward.is_vision_language_model(model):
        name = type(forward.causal_lm(model)).__name__
        raise InputError(f"{name} sees no pictures: load it with AutoModelForImageTextToText, or pass its tokenizer")
    return model, load.with_pad_token(tokenizer)


def find_terminal_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict | None) -> list[int]:
    """The ids that end an answer: the chat template's turn end, the eos, and those of the model's generation config."""
    return terminal_ids_from_config(getattr(forward.causal_lm(model), "generation_config", None), tokenizer, template_kwargs)


def terminal_ids_from_config(config: Any, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict | None) -> list[int]:
    """The same by a generation config, which may be None."""
    ids = [chat.turn_end_id(tokenizer, template_kwargs)] if tokenizer.chat_template else []
    own = getattr(config, "eos_token_id", None)
    # only special or added tokens of this tokenizer: a config that belongs to another one names ordinary words
    named = chat.marker_ids(tokenizer)
    ids += [tokenizer.eos_token_id, *(i for i in (own if isinstance(own, list) else [own]) if i in named)]
    return [i for i in dict.fromkeys(ids) if i is not None]


def align_generation(model: nn.Module, tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> None:
    """Make generation stop at every id of `ends`, in memory and, with `set_generation_config`, saved."""
    generation = set_generation_config(model, ends)
    config = forward.causal_lm(model).config.get_text_config()
    # both configs get the tokenizer's special ids
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        if (value := getattr(tokenizer, name)) is not None:
            setattr(config, name, value)
            setattr(generation, name, value)
    generation.eos_token_id = _eos_value(ends)


def set_generation_config(model: nn.Module, ends: list[int]) -> GenerationConfig:
    """What the model generates by from now on: its own config, which the user may have replaced, with `ends` where that
    has no eos. A copy that HF can save: one that it refuses is made to sample (for a temperature without it, as in some
    releases), or else replaced.
    """
    inner = forward.causal_lm(model)
    wrapper = forward.unwrap_model(model)
    # on an adapter's wrapper it counts before that of the model inside
    given = next(filter(None, (vars(each).get("generation_config") for each in (wrapper, inner))), None)
    generation = copy.deepcopy(given) or GenerationConfig.from_model_config(inner.config)
    if problem := _validation_problem(generation):
        generation.do_sample = True
        if _validation_problem(generation):
            logger.warning("generation_config: HF does not save it, so it is left out: %s", problem)
            generation = GenerationConfig.from_model_config(inner.config)
        else:
            logger.warning("generation_config: do_sample is true now: without it HF saves no options of sampling")
    if generation.eos_token_id is None:
        generation.eos_token_id = _eos_value(ends)
    vars(wrapper).pop("generation_config", None)
    inner.generation_config = generation
    return generation


def _eos_value(ends: list[int]) -> list[int] | int | None:
    return ends if len(ends) > 1 else ends[0] if ends else None


def _validation_problem(generation: GenerationConfig) -> str:
    """Why HF refuses to save it; empty where it does not."""
    try:
        generation.validate(strict=True)
    except ValueError as error:
        return " ".join(str(error).split())[:300]
    return ""


def prepare_policy(model: nn.Module, peft_config: PeftConfig | None, args: Any) -> nn.Module:
    """Add a new adapter, switch dropout off, each where asked for, and let the forward take a scorer.

    Raises InputError for an adapter on an adapter, and for kinds of adapters that cannot be trained here.
    """
    if not isinstance(model, peft.PeftModel) and getattr(model, "peft_config", None):
        raise InputError(
            "transformers has put an adapter into the model (its folder has adapter_config.json, or add_adapter did): "
            "load the base alone, and the adapter with PEFT (model.adapter)"
        )
    if any(layer.merged for layer in adapted_layers(model)):
        raise InputError("the adapter is merged into the weights: call unmerge_adapter() before it is trained")
    for adapter in (*getattr(model, "peft_config", {}).values(), *([] if peft_config is None else [peft_config])):
        check_adapter_kind(adapter)
    if peft_config is not None or isinstance(model, peft.PeftModel):
        warn_if_base_changed(model)
    if not args.train_vision:
        freeze_vision(model)
    if peft_config is not None:
        model = add_adapter(model, peft_config, vision=args.train_vision)
    elif isinstance(model, peft.PeftModel) and (base := forward.causal_lm(model).config.name_or_path):
        for adapter in model.peft_config.values():  # what is saved names the base that it is trained on from now on
            if resolve_path(str(adapter.base_model_name_or_path)) != resolve_path(base):
                adapter.base_model_name_or_path = base
                adapter.revision = None
    for adapter in getattr(model, "peft_config", {}).values():  # and from any folder
        if adapter.base_model_name_or_path:
            adapter.base_model_name_or_path = resolve_path(adapter.base_model_name_or_path)
    active: Any = model.base_model.active_adapters if isinstance(model, peft.PeftModel) else []
    if len(active) > 1:
        named = ", ".join(active)
        raise InputError(f"several adapters are active ({named}), of which PEFT saves one: merge them, or activate one")
    if not args.disable_dropout:
        restore_dropout(model)
    elif rates := disable_dropout(model):
        logger.info("disable_dropout: off are %s", ", ".join(rates))
    module: Any
    for module in model.modules():
        # on CPU bitsandbytes repacks weights in a first forward without gradient, and its backward reads them wrongly
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InputError("no parameter of the model requires a gradient: there is nothing to train")
    if isinstance(model, peft.PeftModel):
        if args.activation_checkpointing:
            if getattr(model.active_peft_config, "alora_invocation_tokens", None):
                raise InputError("alora_invocation_tokens needs activation_checkpointing: false")
            model.enable_input_require_grads()  # which checkpointed layers need, and the base is frozen
        logger.info("%s", describe_adapter(model))
        skip_needless_casts(model, args.device.type)
        # trained copies of layers (modules_to_save) have the base's dtype: in bf16 they would hardly move
        for parameter in trained:
            if args.bf16 and parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()
    elif low := {parameter.dtype for parameter in trained} & {torch.bfloat16, torch.float16}:
        logger.warning(
            "all weights are trained in %s, whose steps are coarser than most updates: in a test at rate 5e-7 weights"
            " moved by 1.4 %% of what they should. Use float32 (model.dtype: default) with bf16 autocast, or lora",
            low.pop(),
        )
    forward.enable_scoring(model)
    switch = rope_switch_length(forward.causal_lm(model))
    if switch and args.method.rows.sampled and (args.max_length is None or args.max_length > switch):
        raise InputError(
            f"max_length={args.max_length}: above {switch} tokens the model has other rotary frequencies (LongRoPE or "
            f"dynamic NTK), so a longer rollout is not scored as it was sampled: set max_length={switch}"
        )
    apply_liger_and_compile(model, args)
    if args.layout == "padded":  # there a row is one document
        disable_cudnn_attention(args.device)
    else:
        choose_attention(forward.causal_lm(model), args.device)
    warn_if_not_compiled(forward.causal_lm(model), args)
    return model


def freeze_vision(model: nn.Module) -> None:
    """Leave all of a model that sees as it is, but its language model and head."""
    for weight in forward.vision_weights(model):
        weight.requires_grad_(False)


def with_supported_checkpointing(model: nn.Module, args: TrainingArguments) -> Any:
    """The Config, or for a model that does not support activation checkpointing a copy with that switched off."""
    inner = forward.causal_lm(model)
    if not args.activation_checkpointing or getattr(inner, "supports_gradient_checkpointing", True):
        return args
    logger.warning("activation_checkpointing is off: %s does not support it", type(inner).__name__)
    args = copy.copy(args)
    args.activation_checkpointing = args.gradient_checkpointing = False
    return args


def disable_dropout(model: nn.Module) -> list[str]:
    """Set every dropout to 0, and let routers route in training as they do in evaluation. Returns what was on.

    Rates are in modules, LoRA's too, in attributes that a forward reads, and in the config where a forward reads that.
    `original_dropout` puts them back for saving, `restore_dropout` for good.
    """
    found: set[str] = set()
    inner = forward.causal_lm(model)
    inner.own_rates = getattr(inner, "own_rates", [])  # of an earlier trainer of the same model
    owner: Any
    for owner in (inner.config, inner.config.get_text_config(), *model.modules()):
        rates = {name: value for name, value in vars(owner).items() if "drop" in name and _is_active(value)}
        if "Dropout" in type(owner).__name__ and _is_active(getattr(owner, "p", None)):  # torch's, PEFT's for BOFT
            rates["p"] = owner.p
        if rates:
            inner.own_rates.append((owner, rates))
            vars(owner).update(_zeroed(rates))
            found.update("dropout" if name == "p" else name for name in rates)
    module: Any
    for module in model.modules():
        # routers with jitter, or which draw experts: the rate itself may have a meaning in evaluation (PhiMoE)
        if any("jitter" in name for name in vars(module)):
            module.train = MethodType(_stay_in_eval_mode, module)
            module.eval()
            found.update(name for name, rate in vars(module).items() if "jitter" in name and rate)
    return sorted(found)


def _is_active(rate: Any) -> bool:
    """Of dropout: a number above 0, or one of those that PEFT keeps for each adapter."""
    return any(map(_is_active, rate.values())) if isinstance(rate, dict) else isinstance(rate, float) and rate > 0


def _zeroed(rates: dict[str, Any]) -> dict[str, Any]:
    return {name: _zeroed(rate) if isinstance(rate, dict) else 0.0 for name, rate in rates.items()}


def restore_dropout(model: nn.Module) -> None:
    """Put the rates back that a trainer has switched off before."""
    found = vars(forward.causal_lm(model)).pop("own_rates", [])
    for owner, rates in reversed(found):  # the first of several trainers has seen the model as it came
        vars(owner).update(rates)
    for module in model.modules():
        if getattr(vars(module).get("train"), "__func__", None) is _stay_in_eval_mode:
            del module.train
    if found:
        logger.info("disable_dropout: false: on again, which a trainer before had switched off")


def _stay_in_eval_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(module, False)


@contextmanager
def original_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, the config has the rates of dropout that the model came with: for saving it."""
    known = getattr(forward.causal_lm(model), "own_rates", [])
    now = [(owner, {name: vars(owner)[name] for name in rates}) for owner, rates in known]
    for owner, rates in reversed(known):
        vars(owner).update(rates)
    try:
        yield
    finally:
        for owner, rates in now:
            vars(owner).update(rates)
