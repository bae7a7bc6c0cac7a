"""What a forward keeps for its backward, counted on the meta device, where tensors have a shape and no memory."""

import copy
from functools import partial
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface

from ..models import load
from ..models.load import load_skeleton
from ..models.section import ModelSection
from ..scoring import forward
from .placement import Weights

QUANTISED = {"4bit": 0.5 + 1 / 64 + 4 / (64 * 256), "8bit": 1.0}
"""Bytes of a quantised weight. 4-bit: half a byte, a scale of one byte for each 64 of them, and a float32 for each 256
scales (double quantisation). 8-bit: a byte; the float32 for each row is next to nothing."""


class Shapes:
    """A model without memory, with the adapter and the dtypes that it would have on `device`."""

    def __init__(self, section: ModelSection, trainable: bool, device: torch.device):
        model: Any = load_skeleton(section)
        whole = trainable and section.lora is None and not section.adapter
        model.to(load.weights_dtype(section, model.config, whole, device))
        self.inner, self.head = model, model.get_output_embeddings().weight
        linear = {m.weight for m in model.modules() if isinstance(m, nn.Linear) and m.weight is not self.head}
        config, quantised = load.lora_config(section), section.quantization != "none"
        if section.adapter:
            config = peft.PeftConfig.from_pretrained(section.adapter)
            config.inference_mode = False
        if config is not None:
            config = copy.copy(config)
            config.init_lora_weights = True  # others compute with the weights
            with torch.device("meta"):
                model = peft.get_peft_model(model, config)
        self.model, every = model, list(model.parameters())
        self.layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=numbers)
        trained = [p for p in every if p.requires_grad and trainable]
        sizes = {p: p.itemsize for p in every}
        if quantised:
            # peft makes float32 of what is not quantised
            sizes = dict.fromkeys(every, 4) | dict.fromkeys(linear, QUANTISED[section.quantization])
        own = sum(p.numel() * sizes[p] for p in trained)
        frozen = sum(p.numel() * sizes[p] for p in every) - own + sum(buffer.nbytes for buffer in model.buffers())
        gathered = numbers(model) - sum(sorted(map(numbers, self.layers))[:-2])
        self.weights = Weights(
            int(frozen), own, numbers(model), sum(p.numel() for p in trained), gathered, quantised
        )  # fmt: skip
        self.tokens, self.kept, self.hidden = 1, [0] * (1 + len(self.layers)), 0

    def count(self, batch: dict[str, Tensor], dtype: torch.dtype | None) -> None:
        """One forward in `dtype` without the head: bytes that are `kept` outside of layers and of each layer, and of a
        layer's `hidden` input. Raises what a forward that needs values does."""
        eager = self.inner.config.get_text_config()._attn_implementation == "eager"
        AttentionInterface.register("shapes", partial(_attention, eager))
        self.inner.set_attn_implementation("shapes")  # no masks are made either, which would need values
        forward.enable_scoring(self.model.train().to(dtype))
        weights = [each.untyped_storage() for each in (*self.model.parameters(), *self.model.buffers())]
        known = {id(storage): storage for storage in weights}  # they stay, so that none takes the place of another
        kept, place = [0] * len(self.kept), [0]

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[place[0]] += storage.nbytes() * (id(storage) not in known)
            known[id(storage)] = storage
            return tensor

        def enter(number: int, _: Any, given: tuple) -> None:
            place[0], self.hidden = number, given[0].nbytes

        for number, layer in enumerate(self.layers, 1):
            layer.register_forward_pre_hook(partial(enter, number))
            layer.register_forward_hook(lambda *_: place.__setitem__(0, 0))
        given = {name: batch[name].to("meta") for name in ("input_ids", "position_ids", "scored")}
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            forward.run(self.model, given, lambda _, states: {"states": forward.scored_states(states, given)})
        self.tokens, self.kept = batch["input_ids"].numel(), kept

    def training(self, every: int) -> tuple[int, int]:
        """(bytes that a forward keeps, what a layer's backward adds). Each such layer is computed again; 0: none."""
        again = self.kept[1::every] if every else []
        return sum(self.kept) - sum(again) + self.hidden * len(again), int(max(self.kept[1:]) * (1.5 if every else 0.5))

    def layer(self, tokens: int) -> int:
        """Bytes of a forward over so many tokens without gradient: one layer at a time."""
        return max(self.kept[1:]) * tokens // self.tokens


def numbers(module: nn.Module) -> int:
    """How many weights a module has."""
    return sum(p.numel() for p in module.parameters())


class _Attention(torch.autograd.Function):
    """Keeps what a fused kernel keeps: its inputs and its result."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Tensor:
        found = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, found, *more)
        return found


def _attention(eager: bool, module: Any, query: Tensor, key: Tensor, *value: Any, **_: Any) -> tuple[Tensor, None]:
    """[R, heads, L, D] -> [R, L, heads, D]. eager: each pair of tokens is kept too, in float32 and as a weight."""
    pairs = [query.new_empty(*query.shape[:-1], key.shape[-2], dtype=t) for t in (torch.float32, query.dtype) if eager]
    return _Attention.apply(query, key, value[0], *pairs).transpose(1, 2).contiguous(), None
