"""Sampling from exactly the distribution that is scored, and greedy answers for evaluation.

`transformers.generate` computes a full static batch until its last row ends, whereas a step of `decode` costs only the
rows that have not ended. `decode` supports plain decoder caches. Other models use transformers, see
`sampler_selection` and `hf_generate`.

Legend: n rows that have not ended, L length of the padded prompts, V vocabulary, D size of a head.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..scoring.cpu import packed_weights, sample_ids
from ..scoring.forward import cache_argument, causal_lm, eval_mode, precast_weights, unwrap_model
from . import hf_generate, sampler_selection
from .batch_size import max_generation_batch
from .graphs import FixedSteps

if TYPE_CHECKING:
    from ..scoring.vision_inputs import VisionInputs

END_CHECK_INTERVAL = {"cuda": 8}
"""Tokens between two checks for rows that have ended. A check waits for the GPU, and an extra row costs little."""
NGRAM_SIZE = 4
"""Number of tokens whose repetition is counted."""


@dataclass(frozen=True)
class TokenSampler:
    """Choice of the next token."""

    temperature: float | None
    """Tokens are sampled from softmax(logits / temperature), or greedily if it is None."""
    vocabulary: int
    """Ids from this one on are never chosen."""
    excluded_ids: tuple[int, ...] = ()
    """Further ids that are never chosen."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the next ids, [n], for logits [n, V].

        For a row with a logit that is NaN or +infinite the id is `vocabulary`, which does not exist.
        """
        logits = logits[:, : self.vocabulary].float()
        logits = logits.clone() if self.excluded_ids else logits
        for excluded in self.excluded_ids:  # a tensor of ids would be copied to the device at each token
            logits[:, excluded] = -torch.inf
        if self.temperature is None:
            best, token = logits.max(-1)
            nonfinite = ~best.isfinite()
        else:
            probs = torch.softmax(logits / self.temperature, dim=-1)
            nonfinite = probs[:, 0].isnan()  # the entire row is then NaN
            token = sample_ids(probs.masked_fill_(nonfinite[:, None], 1.0))  # NaN would end the process on CUDA
        return token.masked_fill(nonfinite, self.vocabulary)


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    terminal_ids: list[int],
    pad_id: int,
    temperature: float | None = None,
    batch_size: int | None = None,
    vocabulary: int | None = None,
    vision_inputs: "VisionInputs | None" = None,
) -> list[list[int]]:
    """Return a completion of each prompt: the tokens up to and including the first terminal id.

    The generation config of the model is ignored. Tokens are sampled with the global generator, see `seeded`. Prompts
    are sorted by length.

    Args:
        model: The model.
        prompts: Token ids of the prompts. For a vision-language model each is a `layouts.Prompt`.
        max_new_tokens: Maximum number of tokens of a completion.
        terminal_ids: Ids that end a completion.
        pad_id: Id of the padding.
        temperature: Sampling temperature, or None for greedy completions.
        batch_size: Number of prompts that are generated at once. None: all of them, on a GPU as many as fit.
        vocabulary: Ids from this one on are not sampled. A teacher may lack ids that pad the student's vocabulary.
        vision_inputs: Image inputs of a vision-language model.
    """
    inner = causal_lm(model)
    vocab_size = inner.config.get_text_config().vocab_size
    # image tokens in an answer would have no image
    excluded_ids = () if vision_inputs is None else tuple(vision_inputs.reader.token_ids)
    sampler = TokenSampler(temperature, min(vocabulary or vocab_size, vocab_size), excluded_ids)
    lengths = [*map(len, prompts)]
    order = sorted(range(len(prompts)), key=lengths.__getitem__, reverse=True)
    completions: list[list[int]] = [[] for _ in prompts]
    longest = max(lengths, default=0) + max_new_tokens
    backend, checked_length = getattr(inner, "generation_backend", ("", 0))

    def generate_greedily(backend: str, prompts: list[list[int]]) -> list[list[int]]:
        return generate_batch(model, backend, prompts, 3, [vocab_size], pad_id, TokenSampler(None, vocab_size))

    with torch.no_grad(), eval_mode(model), precast_weights(model):
        if prompts and longest > checked_length:
            selection = sampler_selection.select_backend(model, longest, generate_greedily)
            backend, checked_length = inner.generation_backend = selection
        size = 1 if backend == sampler_selection.HF_SINGLE else batch_size
        if size is None:
            size = max(len(prompts), 1)
            if prompts and backend in sampler_selection.NATIVE and inner.device.type == "cuda":
                size = max_generation_batch(inner, growing_cache(inner), size, longest + GrowingLayer.SPARE)
        for start in range(0, len(order), size):
            numbers = order[start : start + size]
            batch = [prompts[i] for i in numbers]
            batch_completions = generate_batch(
                model, backend, batch, max_new_tokens, terminal_ids, pad_id, sampler, vision_inputs
            )
            for i, ids in zip(numbers, batch_completions, strict=True):
                completions[i] = ids
    return completions


def growing_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache for `decode`."""
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def generate_batch(
    model: nn.Module,
    backend: str,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    terminal_ids: list[int],
    pad_id: int,
    sampler: TokenSampler,
    vision_inputs: "VisionInputs | None" = None,
) -> list[list[int]]:
    """Return the completions of one batch, as `generate`, with a backend of `sampler_selection`."""
    images: list[Any] = []
    for prompt in prompts:
        if prompt_images := getattr(prompt, "images", ()):
            assert vision_inputs is not None
            images += vision_inputs.reader.complete_images(prompt, prompt_images)
    if backend in sampler_selection.NATIVE and not images:
        with packed_weights(model):
            replay = backend == sampler_selection.GRAPHS
            return decode(causal_lm(model), prompts, max_new_tokens, terminal_ids, sampler, replay)
    ids, mask = left_pad(prompts, pad_id, causal_lm(model).device)
    kwargs: dict[str, Any] = {}
    if vision_inputs is not None and images:
        kwargs = vision_inputs.prompt_arguments(images, ids, causal_lm(model))
    rows = hf_generate.generate(unwrap_model(model), ids, mask, max_new_tokens, terminal_ids, pad_id, sampler, kwargs)
    return [truncate_at_terminal(row, terminal_ids) for row in rows]


# ---- our own decoding


class GrowingLayer(DynamicLayer):
    """Keys and values of a layer in buffers with space for more tokens, so that a step does not copy earlier tokens."""

    SPARE = 128
    """Extra tokens that new buffers have space for. New buffers are made when a step does not fit."""
    buffers: Sequence[Tensor] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values, [n, heads, new, D] each, and return all, [n, heads, length, D], views of the buffers."""
        # rotary makes keys float32 under autocast, which attention would round at each token
        new_states = (key_states.to(value_states.dtype), value_states)
        used = self.get_seq_length()
        end = used + key_states.shape[-2]
        if not used:
            self.lazy_initialization(*new_states)
        if not self.buffers or self.buffers[0].shape[-2] < end:
            old = [buffer[:, :, :used] for buffer in self.buffers] or [states[:, :, :0] for states in new_states]
            self.buffers = [pad(states, (0, 0, 0, end - used + self.SPARE)) for states in old]
        for buffer, states in zip(self.buffers, new_states, strict=True):
            buffer[:, :, used:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows, with the spare space after them."""
        if length := self.get_seq_length():
            self.buffers = [buffer[indices] for buffer in self.buffers]
            self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)


class GrowingSteps:
    """Forwards of one token of each row without CUDA graphs, with the interface of `graphs.FixedSteps`."""

    shrinks_at = 1.0
    """Share of rows that have not ended at which the others are dropped."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, mask: Tensor, position: Tensor) -> None:
        self.model = model
        self.cache = cache
        self.mask = mask
        self.position = position
        plain = all(type(layer) is GrowingLayer for layer in cache.layers)
        self.prepares_mask = plain and "sdpa" in (model.config.get_text_config()._attn_implementation or "")

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows only, indices [kept]."""
        self.mask = self.mask[rows]
        self.position = self.position[rows]
        self.cache.batch_select_indices(rows)

    def forward(self, tokens: Tensor) -> Tensor:
        """Read one token of each row, [n], and return the logits after it, [n, V]."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.position = self.position + 1
        # otherwise transformers would create it at each token, and query the device whether there is padding
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
    """Return a completion of each prompt: the tokens up to and including the first terminal id.

    Args:
        model: The causal LM.
        prompts: Token ids of the prompts.
        max_new_tokens: Maximum number of tokens of a completion.
        terminal_ids: Ids that end a completion.
        sampler: Choice of the next token.
        replay: Whether to use CUDA graphs.

    Raises:
        RuntimeError: If the logits of the model are NaN or infinite.
    """
    # Read each distinct prompt once. Padding is on the left, so that the next token of every row is in one column.
    number = {prompt: n for n, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    ids, mask = left_pad(list(number), 0, model.device)
    position = mask.cumsum(-1).sub(1).clamp(min=0)
    cache = growing_cache(model)
    logits = _last_logits(model, ids, mask, position, cache)

    # From distinct prompts to a row for each completion: K rollouts of a prompt start as copies of its cache.
    rows = torch.tensor([number[tuple(prompt)] for prompt in prompts], device=ids.device)
    if len(number) < len(prompts):
        cache.batch_select_indices(rows)
    logits = logits[rows]
    state = (model, cache, mask[rows], position[rows, -1:])
    forwards = FixedSteps(*state, max_new_tokens - 1) if replay else GrowingSteps(*state)
    is_terminal = _membership_mask(terminal_ids, sampler.vocabulary, ids.device)
    completion_numbers = torch.arange(len(prompts), device=ids.device)  # [n]: the completion of each row of the batch
    unfinished = torch.ones_like(completion_numbers, dtype=torch.bool)  # [n]: rows that have not ended
    completions = torch.full((len(prompts), max_new_tokens), -1, device=ids.device)
    for step in range(max_new_tokens):
        token = sampler(logits)
        completions[completion_numbers, step] = token.where(unfinished, -1)
        # With NaN logits the id is out of range. It is clamped until the check after the loop raises an error.
        token = token.clamp(max=sampler.vocabulary - 1)
        unfinished &= ~is_terminal[token]
        # Rows that have ended are removed from the batch and the cache. Reading their number waits for the device.
        interval = END_CHECK_INTERVAL.get(ids.device.type, 1)
        if (step + 1) % interval == 0 and (count := int(unfinished.sum())) < len(unfinished):
            if count == 0:
                break
            if count <= forwards.shrinks_at * len(unfinished):
                kept = unfinished.nonzero().squeeze(-1)
                completion_numbers = completion_numbers[kept]
                token = token[kept]
                unfinished = unfinished[kept]
                forwards.keep(kept)
        if step < max_new_tokens - 1:
            logits = forwards.forward(token)

    trimmed = [[token for token in row if token >= 0] for row in completions.tolist()]
    if any(token >= sampler.vocabulary for row in trimmed for token in row):
        raise RuntimeError(hf_generate.NONFINITE_LOGITS)
    return trimmed


def _last_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor, position: Tensor, cache: DynamicCache) -> Tensor:
    """Read `ids`, [n, new], into the cache, and return the logits after the last one, [n, V]."""
    options: dict[str, Any] = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    return model(input_ids=ids, attention_mask=mask, position_ids=position, **options).logits[:, -1]


def _membership_mask(ids: Sequence[int], vocabulary: int, device: torch.device) -> Tensor:
    """Return which ids of a vocabulary are among `ids`, [V] bool. `torch.isin` of many ids would wait for a GPU."""
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[[token for token in ids if 0 <= token < vocabulary]] = True
    return mask.to(device)


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ids and the mask of left-padded prompts, [prompts, L] each."""
    length = max(map(len, prompts))
    ids = [[pad_id] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def truncate_at_terminal(ids: list[int], terminal_ids: Sequence[int]) -> list[int]:
    """Return the tokens up to and including the first terminal id."""
    end = next((n for n, token in enumerate(ids) if token in terminal_ids), len(ids))
    return ids[: end + 1]


# ---- random numbers and statistics


def mix_seed(*seed: int) -> int:
    """Return a number of 64 bits that depends on several."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])


@contextmanager
def seeded(device: torch.device, *seed: int) -> Iterator[None]:
    """Make random numbers depend on `seed` alone (seed, step, rank), and restore the global generators afterwards."""
    with preserve_rng(device):
        torch.manual_seed(mix_seed(*seed))
        yield


def preserve_rng(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores the global generators of the CPU and of this device afterwards."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def repeated_ngram_share(ids: Sequence[int]) -> float:
    """Return the share of n-grams (NGRAM_SIZE tokens) of a rollout that occurred before, 0 for a shorter rollout."""
    ngrams = Counter(zip(*(ids[start:] for start in range(NGRAM_SIZE)), strict=False))
    return 1 - len(ngrams) / ngrams.total() if ngrams else 0.0
