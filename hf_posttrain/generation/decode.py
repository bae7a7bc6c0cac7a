"""Decoding a batch of prompts token by token: shared prompts are read once, finished rows leave the batch.

`transformers.generate` computes a whole static batch until its last row ends; here a step costs the rows that go on.
It is for plain decoder caches (`can_decode`); other models are left to `generate`.

Legend: n rows that go on, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..scoring.cpu import FewRows, draw


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen."""

    temperature: float | None
    """Draws from softmax(logits / temperature); None is greedy."""
    vocabulary: int
    """Ids from there on are never chosen."""

    def __call__(self, logits: Tensor) -> Tensor:
        """[n, V] -> [n], an id that does not exist where a logit is NaN or infinite."""
        logits = logits[:, : self.vocabulary].float()
        if self.temperature is None:
            return logits.argmax(-1)
        return draw(torch.softmax(logits / self.temperature, dim=-1))


class GrowingLayer(DynamicLayer):
    """Keys and values of a layer with room for the next tokens, so that a step does not copy all that came before."""

    ROOM = 128
    """Tokens that it grows by."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """[n, heads, new, D] twice -> all keys and all values, [n, heads, length, D], views of the room."""
        used = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.rooms: list[Tensor] = []
        end = used + key_states.shape[-2]
        if not self.rooms or self.rooms[0].shape[-2] < end:
            self.rooms = [_with_room(old, new, used, end + self.ROOM)
                          for old, new in ((self.keys, key_states), (self.values, value_states))]  # fmt: skip
        for room, new in zip(self.rooms, (key_states, value_states), strict=True):
            room[:, :, used:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self.rooms)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows; they get new room with the next token."""
        super().batch_select_indices(indices)
        self.rooms = []


def _with_room(old: Tensor | None, new: Tensor, used: int, size: int) -> Tensor:
    """[n, heads, size, D] that begins with the `used` tokens of `old`."""
    room = new.new_empty(*new.shape[:2], size, new.shape[-1])
    if old is not None and used:
        room[:, :, :used] = old
    return room


def can_decode(model: PreTrainedModel) -> bool:
    """Does the model keep plain keys and values, and no more, between steps?"""
    if getattr(type(model), "prepare_inputs_for_generation", None) is not GenerationMixin.prepare_inputs_for_generation:
        return False
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    terminal_ids: Sequence[int],
    sampler: Sampler,
) -> list[list[int]]:
    """A completion for each prompt: its tokens up to and with the first terminal id, at most max_new_tokens.

    Raises RuntimeError where the model's logits are NaN or infinite.
    """
    number = {prompt: n for n, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}  # of each distinct one
    ids, mask = left_padded(list(number), 0, model.device)
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    position = mask.cumsum(-1).sub(1).clamp(min=0)
    given = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    logits = model(input_ids=ids, attention_mask=mask, position_ids=position, **given).logits[:, -1]
    rows = torch.tensor([number[tuple(prompt)] for prompt in prompts], device=ids.device)
    if len(number) < len(prompts):
        cache.batch_select_indices(rows)
    logits, mask, position = logits[rows], mask[rows], position[rows, -1:]
    terminal = torch.tensor(list(terminal_ids), device=ids.device)
    alive = torch.arange(len(prompts), device=ids.device)
    completions = torch.full((len(prompts), max_new_tokens), -1, device=ids.device)
    for step in range(max_new_tokens):
        token = sampler(logits)
        completions[alive, step] = token
        token = token.clamp(max=sampler.vocabulary - 1)
        going = torch.isin(token, terminal, invert=True)
        if not going.all():
            kept = going.nonzero().squeeze(-1)
            alive, token, mask, position = alive[kept], token[kept], mask[kept], position[kept]
            cache.batch_select_indices(kept)
        if len(alive) == 0 or step == max_new_tokens - 1:
            break
        mask, position = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1), position + 1
        with FewRows():
            logits = model(input_ids=token[:, None], attention_mask=mask, position_ids=position, **given).logits[:, -1]
    found = [[token for token in row if token >= 0] for row in completions.tolist()]
    if any(token >= sampler.vocabulary for row in found for token in row):
        raise RuntimeError("the model's logits are NaN or infinite: nothing can be drawn from them")
    return found


def left_padded(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """ids and mask, [prompts, longest]."""
    longest = max(map(len, prompts))
    ids = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
