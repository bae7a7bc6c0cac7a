"""Sampling from exactly the distribution that is scored, and greedy answers for evaluation.

`transformers.generate` computes a whole static batch until its last row ends; in `decode` a step costs the rows that go
on. It is for plain decoder caches; other models are left to transformers, see `choose_way` and `by_transformers`.

Legend: n rows that go on, L length of the padded prompts, V vocabulary, D size of a head.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..scoring.cpu import sample_ids, fast_small_batches
from ..scoring.forward import cache_argument, causal_lm, eval_mode, precast_weights, unwrap_model
from . import hf_generate, sampler_selection
from .batch_size import max_generation_batch
from .graphs import FixedSteps

END_CHECK_INTERVAL = {"cuda": 8}
"""Tokens between two looks for rows that have ended: on a GPU a look waits for it, and a row in vain costs little."""
NGRAM_SIZE = 4
"""Tokens of what counts as repeated."""


@dataclass(frozen=True)
class TokenSampler:
    """How the next token is chosen."""

    temperature: float | None  # draws from softmax(logits / temperature); None is greedy
    vocabulary: int  # ids from there on are never chosen
    never: tuple[int, ...] = ()  # nor are these

    def __call__(self, logits: Tensor) -> Tensor:
        """[n, V] -> [n]. Where a logit is NaN or +infinite, the id is `vocabulary`, which does not exist."""
        logits = logits[:, : self.vocabulary].float()
        logits = logits.clone() if self.never else logits
        for banned in self.never:  # a tensor of them would be copied to the device at each token
            logits[:, banned] = -torch.inf
        if self.temperature is None:
            best, token = logits.max(-1)
            broken = ~best.isfinite()
        else:
            probs = torch.softmax(logits / self.temperature, dim=-1)
            broken = probs[:, 0].isnan()  # as is the whole row then
            token = sample_ids(probs.masked_fill_(broken[:, None], 1.0))  # CUDA would end the process
        return token.masked_fill(broken, self.vocabulary)


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    terminal_ids: list[int],
    pad_id: int,
    temperature: float | None = None,
    batch_size: int | None = None,
    vocabulary: int | None = None,
    see: Any = None,
) -> list[list[int]]:
    """A completion for each prompt: its tokens up to and with the first terminal id, at most max_new_tokens.

    see: the `Pictures` of a model whose prompts are `layouts.Prompt`s. temperature, vocabulary: see `TokenSampler`,
    whatever the model's generation config says (a teacher may lack ids that pad the student's vocabulary). Draws from
    the global generator: see `seeded`.
    Prompts are sorted by length and generated batch_size at a time (None: all at once, on a GPU as many as fit).
    """
    inner = causal_lm(model)
    own = inner.config.get_text_config().vocab_size
    never = () if see is None else tuple(see.reader.token_ids)  # in an answer they would stand for no picture
    sampler = TokenSampler(temperature, min(vocabulary or own, own), never)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    completions: list[list[int]] = [[] for _ in prompts]
    longest = max(map(len, prompts), default=0) + max_new_tokens
    way, proven = getattr(inner, "generation_backend", ("", 0))
    with torch.no_grad(), eval_mode(model), precast_weights(model):
        if prompts and longest > proven:
            try_out = lambda way, some: generate_batch(model, way, some, 3, [own], pad_id, TokenSampler(None, own))  # noqa: E731
            way, proven = inner.generation_backend = sampler_selection.select_backend(model, longest, try_out)
        size = 1 if way == sampler_selection.HF_SINGLE else batch_size
        if size is None:
            size = max(len(prompts), 1)
            if prompts and way in sampler_selection.NATIVE and inner.device.type == "cuda":
                size = max_generation_batch(inner, growing_cache(inner), size, longest + GrowingLayer.SPARE)
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            given = [prompts[i] for i in chosen]
            found = generate_batch(model, way, given, max_new_tokens, terminal_ids, pad_id, sampler, see)
            for i, ids in zip(chosen, found, strict=True):
                completions[i] = ids
    return completions


def growing_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache for `decode`."""
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def generate_batch(
    model: nn.Module,
    way: str,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    terminal_ids: list[int],
    pad_id: int,
    sampler: TokenSampler,
    see: Any = None,
) -> list[list[int]]:
    """`generate` for one batch, in a way of `choose_way`."""
    shown = ((prompt, getattr(prompt, "images", ())) for prompt in prompts)
    pictures = [one for prompt, pictures in shown if pictures for one in see.reader.shown_in(prompt, pictures)]
    if way in sampler_selection.NATIVE and not pictures:
        with fast_small_batches(model):
            replay = way == sampler_selection.GRAPHS
            return decode(causal_lm(model), prompts, max_new_tokens, terminal_ids, sampler, replay)
    padded = left_pad(prompts, pad_id, causal_lm(model).device)
    visual = see.prompt_arguments(pictures, padded[0], causal_lm(model)) if pictures else {}
    rows = hf_generate.generate(unwrap_model(model), *padded, max_new_tokens, terminal_ids, pad_id, sampler, visual)
    return [truncate_at_terminal(row, terminal_ids) for row in rows]


# ---- our own decoding


class GrowingLayer(DynamicLayer):
    """Keys and values of a layer in buffers with space for more tokens: a step does not copy all that came before."""

    SPARE = 128  # extra tokens that new buffers have space for; new ones are made when a step does not fit
    buffers: Sequence[Tensor] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """[n, heads, new, D] twice -> all keys and all values, [n, heads, length, D], views of the buffers."""
        # rotary makes keys float32 under autocast, which attention would round at each token
        new = (key_states.to(value_states.dtype), value_states)
        used = self.get_seq_length()
        end = used + key_states.shape[-2]
        if not used:
            self.lazy_initialization(*new)
        if not self.buffers or self.buffers[0].shape[-2] < end:
            old = [buffer[:, :, :used] for buffer in self.buffers] or [states[:, :, :0] for states in new]
            self.buffers = [pad(states, (0, 0, 0, end - used + self.SPARE)) for states in old]
        for buffer, states in zip(self.buffers, new, strict=True):
            buffer[:, :, used:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, with the space behind them."""
        if length := self.get_seq_length():
            self.buffers = [buffer[indices] for buffer in self.buffers]
            self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)


class GrowingSteps:
    """Forwards of one token of each row as the model is written, with the arguments of `graphs.FixedSteps`."""

    shrinks_at = 1.0  # the share of rows that go on, from which on it pays to drop the others

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, mask: Tensor, position: Tensor):
        self.model = model
        self.cache = cache
        self.mask = mask
        self.position = position
        plain = all(type(layer) is GrowingLayer for layer in cache.layers)
        self.prepares_mask = plain and "sdpa" in (model.config.get_text_config()._attn_implementation or "")

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only, indices [kept]."""
        self.mask = self.mask[rows]
        self.position = self.position[rows]
        self.cache.batch_select_indices(rows)

    def forward(self, tokens: Tensor) -> Tensor:
        """Read one token of each row, [n], and return the logits after it, [n, V]."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.position = self.position + 1
        # else transformers would make it at each token, and ask the device whether there is padding at all
        mask = self.mask[:, None, None].bool() if self.prepares_mask else self.mask
        return _last_logits(self.model, tokens[:, None], mask, self.position, self.cache)


def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    terminal_ids: Sequence[int],
    sampler: TokenSampler,
    replay: bool = False,
) -> list[list[int]]:
    """A completion for each prompt: its tokens up to and with the first terminal id, at most max_new_tokens.

    replay: by CUDA graphs. Raises RuntimeError where the model's logits are NaN or infinite.
    """
    # Read each distinct prompt once. Padding is on the left, so that the next token of every row is in one column.
    number = {prompt: n for n, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    ids, mask = left_pad(list(number), 0, model.device)
    position = mask.cumsum(-1).sub(1).clamp(min=0)
    cache = growing_cache(model)
    logits = _last_logits(model, ids, mask, position, cache)

    # From distinct prompts to a row for each completion: K rollouts of a prompt begin as copies of what it left.
    rows = torch.tensor([number[tuple(prompt)] for prompt in prompts], device=ids.device)
    if len(number) < len(prompts):
        cache.batch_select_indices(rows)
    logits = logits[rows]
    state = (model, cache, mask[rows], position[rows, -1:])
    forwards = FixedSteps(*state, max_new_tokens - 1) if replay else GrowingSteps(*state)
    ends = _membership_mask(terminal_ids, sampler.vocabulary, ids.device)
    alive = torch.arange(len(prompts), device=ids.device)  # [n]: the completion that each row of the batch belongs to
    going = torch.ones_like(alive, dtype=torch.bool)  # [n]: rows that have not ended
    completions = torch.full((len(prompts), max_new_tokens), -1, device=ids.device)
    for step in range(max_new_tokens):
        token = sampler(logits)
        completions[alive, step] = token.where(going, -1)
        # With broken logits the id is out of range: clamped, so that the loop can go on; the check behind it raises.
        token = token.clamp(max=sampler.vocabulary - 1)
        going &= ~ends[token]
        # Rows that have ended leave the batch, and the cache. Asking how many there are waits for the device.
        if (step + 1) % END_CHECK_INTERVAL.get(ids.device.type, 1) == 0 and (count := int(going.sum())) < len(going):
            if count == 0:
                break
            if count <= forwards.shrinks_at * len(going):
                kept = going.nonzero().squeeze(-1)
                alive = alive[kept]
                token = token[kept]
                going = going[kept]
                forwards.keep(kept)
        if step < max_new_tokens - 1:
            logits = forwards.forward(token)

    found = [[token for token in row if token >= 0] for row in completions.tolist()]
    if any(token >= sampler.vocabulary for row in found for token in row):
        raise RuntimeError(hf_generate.NONFINITE_LOGITS)
    return found


def _last_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor, position: Tensor, cache: DynamicCache) -> Tensor:
    """The logits after the last of `ids` [n, new], which are read into the cache: [n, V]."""
    options: dict[str, Any] = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    return model(input_ids=ids, attention_mask=mask, position_ids=position, **options).logits[:, -1]


def _membership_mask(ids: Sequence[int], vocabulary: int, device: torch.device) -> Tensor:
    """Which ids of a vocabulary are among `ids`, [V] bool: `torch.isin` of many ids waits for a GPU."""
    found = torch.zeros(vocabulary, dtype=torch.bool)
    found[[token for token in ids if 0 <= token < vocabulary]] = True
    return found.to(device)


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask, [prompts, L]."""
    longest = max(map(len, prompts))
    ids = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def truncate_at_terminal(ids: list[int], terminal_ids: Sequence[int]) -> list[int]:
    """The tokens up to and with the first terminal id."""
    end = next((n for n, token in enumerate(ids) if token in terminal_ids), len(ids))
    return ids[: end + 1]


# ---- around a generation


def mix_seed(*seed: int) -> int:
    """One number of 64 bits from several."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])


@contextmanager
def seeded(device: torch.device, *seed: int) -> Iterator[None]:
    """Random numbers that depend on `seed` alone (seed, step, rank); the global generators stay as they were."""
    with preserve_rng(device):
        torch.manual_seed(mix_seed(*seed))
        yield


def preserve_rng(device: torch.device) -> AbstractContextManager[None]:
    """What is drawn inside leaves the global generators, of CPU and this device, as they were."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def repeated_ngram_share(ids: Sequence[int]) -> float:
    """The share of a rollout's runs of NGRAM_SIZE tokens that were there before; 0 of a shorter one."""
    grams = Counter(zip(*(ids[start:] for start in range(NGRAM_SIZE)), strict=False))
    return 1 - len(grams) / grams.total() if grams else 0.0
