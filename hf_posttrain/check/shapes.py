"""Models whose weights are shapes: fake tensors, which have shape, dtype and device, and no memory.

    Shapes        makes them as `models.load_model` makes real ones; nothing is read but the config
    weights_of    what such a model would consist of, quantised layers as they are quantised
"""

from typing import Any

import peft
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..models import load as models
from ..models.section import ModelSection
from .placement import Weights

QUANTISED = {"4bit": 0.5 + 1 / 64 + 4 / (64 * 256), "8bit": 1.0}
"""Bytes of a quantised weight. 4-bit: half a byte, a scale of one byte for each 64 of them, and a float32 for each 256
scales (double quantisation). 8-bit: a byte; the float32 for each row is next to nothing."""


class Shapes:
    """Fake models. Only what touches a fake tensor is fake: the mode is not entered while they run."""

    def __init__(self, layers: int | None = None) -> None:
        """layers: of each model, where it has more; None: all."""
        self.mode, self.layers = FakeTensorMode(allow_non_fake_inputs=True), layers

    def model(
        self, section: ModelSection, trainable: bool, device: torch.device, dtype: torch.dtype | None = None
    ) -> PreTrainedModel:
        """As `models.load_model`; quantised weights have the dtype that they compute in, see `quantise`.

        device: where it would run, which decides the dtype. dtype: instead of that, where an engine casts weights.
        """
        config = models.check_model(section)
        cut(config, self.layers)
        whole = trainable and section.lora is None and not section.adapter
        kwargs: dict[str, Any] = {
            "dtype": dtype or models.weights_dtype(section, config, whole, device),
            "trust_remote_code": section.trust_remote_code,
        }
        if section.attn_implementation != "auto":
            kwargs["attn_implementation"] = section.attn_implementation
        with self.mode:
            model = AutoModelForCausalLM.from_config(config, **kwargs)
        if section.quantization != "none":
            self._quantised(model, trainable)
        if section.adapter:
            given = peft.PeftConfig.from_pretrained(section.adapter)
            given.inference_mode = not trainable
            with self.mode:
                model = peft.get_peft_model(model, given)
        return model if trainable else model.requires_grad_(False).eval()

    def _quantised(self, model: PreTrainedModel, trainable: bool) -> None:
        """Layers that take any dtype, as bitsandbytes' do; for training all else becomes float32, as PEFT has it."""
        model.requires_grad_(False)
        linear = _quantised_layers(model)
        for module in linear:
            module.register_forward_pre_hook(lambda m, given: (given[0].to(m.weight.dtype), *given[1:]))
        for module in model.modules() if trainable else ():
            if module not in linear and not [*module.children()]:
                cast(module, torch.float32)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """All weights, as an engine does it."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def cut(config: PretrainedConfig, layers: int | None) -> None:
    """The config of the first `layers` layers, with what it lists for each of them."""
    inner = config.get_text_config()
    depth = inner.num_hidden_layers
    if layers is None or layers >= depth:
        return
    for name, value in list(vars(inner).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(inner, name, value[:layers])
    inner.num_hidden_layers = layers


def weights_of(model: nn.Module, section: ModelSection) -> Weights:
    """What the model, adapters included, would consist of."""
    if section.quantization == "none":
        return Weights.of(model)
    inner: Any = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    linear = {id(module.weight) for module in _quantised_layers(inner)}
    rest = [p for p in model.parameters() if not p.requires_grad]
    per_weight = QUANTISED[section.quantization]
    size = sum(p.numel() * (per_weight if id(p) in linear else p.element_size()) for p in rest)
    return Weights.of(model, int(size))


def _quantised_layers(model: nn.Module) -> set[nn.Module]:
    """All linear layers but the head, and not those of adapters."""
    inner: Any = model
    head = inner.get_output_embeddings()
    return {m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head and "lora_" not in n}

