"""Generation: rollouts drawn from exactly the distribution that is scored, and greedy answers for evaluation."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from ..scoring.forward import causal_lm, eval_mode
from .decode import Sampler, can_decode, decode, left_padded

logger = logging.getLogger(__name__)
_ALTERING = {
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "min_p": None, "typical_p": 1.0, "top_h": None,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0, "bad_words_ids": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "sequence_bias": None, "min_length": 0, "min_new_tokens": None,
    "guidance_scale": None,
}  # fmt: skip


class OwnModel:
    """OPD's rollouts by the policy itself; `vllm_rollout` has two other backends with the same methods."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def synchronise(self) -> None:
        """The policy has its own weights."""

    def generate(self, prompts: Sequence[Sequence[int]], seed: Sequence[int]) -> list[list[int]]:
        """K rollouts of each prompt, one prompt after the other, from the global generator: see `seeded`."""
        trainer, args = self.trainer, self.trainer.args
        repeated = [prompt for prompt in prompts for _ in range(args.num_generations)]
        options = {"temperature": args.temperature, "batch_size": args.generation_batch_size}
        return trainer.generate(repeated, args.max_completion_length, vocabulary=trainer.vocabulary, **options)


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    terminal_ids: list[int],
    pad_id: int,
    temperature: float | None = None,
    batch_size: int | None = None,
    vocabulary: int | None = None,
) -> list[list[int]]:
    """A completion for each prompt: its tokens up to and with the first terminal id, at most max_new_tokens.

    temperature None is greedy; otherwise tokens are drawn from softmax(logits / temperature) over the whole vocabulary,
    whatever the model's generation config says (it is put aside). Draws from the global generator: see `seeded`.
    vocabulary: ids from there on (padding of the student's vocabulary that a teacher lacks) are never drawn.
    Prompts are sorted by length and generated batch_size at a time (None: all at once).
    """
    inner = causal_lm(model)
    ours = can_decode(inner)
    own = inner.config.get_text_config().vocab_size
    sampler = Sampler(temperature, own if vocabulary is None else min(vocabulary, own))
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    size = batch_size or max(len(prompts), 1)
    completions: list[list[int]] = [[] for _ in prompts]
    with torch.no_grad(), eval_mode(model):
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            given = [prompts[i] for i in chosen]
            if ours:
                found = decode(inner, given, max_new_tokens, terminal_ids, sampler)
            else:
                found = _by_transformers(inner, given, max_new_tokens, terminal_ids, sampler, pad_id)
            for i, ids in zip(chosen, found, strict=True):
                completions[i] = ids
    return completions


def _by_transformers(
    model: Any,
    prompts: list[Sequence[int]],
    max_new_tokens: int,
    terminal_ids: list[int],
    sampler: Sampler,
    pad_id: int,
) -> list[list[int]]:
    """The same by `transformers.generate`, for models whose state between steps is more than keys and values."""
    sampling: dict[str, Any] = {"do_sample": False}
    if sampler.temperature is not None:
        sampling = {"do_sample": True, "temperature": sampler.temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=terminal_ids, pad_token_id=pad_id, use_cache=True, **sampling
    )
    config.suppress_tokens = [*range(sampler.vocabulary, model.config.get_text_config().vocab_size)] or None
    ids, mask = left_padded(prompts, pad_id, model.device)
    with _only(model, config):
        output = model.generate(
            input_ids=ids, attention_mask=mask, generation_config=config, synced_gpus=False
        )  # whole weights on each rank: none waits for another
    return [until_terminal(row, terminal_ids) for row in output[:, ids.shape[1] :].tolist()]


def until_terminal(ids: list[int], terminal_ids: Sequence[int]) -> list[int]:
    """The tokens up to and with the first terminal id."""
    end = next((n for n, token in enumerate(ids) if token in terminal_ids), len(ids))
    return ids[: end + 1]


@contextmanager
def seeded(device: torch.device, *seed: int) -> Iterator[None]:
    """Random numbers that depend on `seed` alone (seed, step, rank); the global generators stay as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
        yield


def warn_if_altered(config: GenerationConfig) -> None:
    """Say which settings of a model's generation config are put aside."""
    found = [
        f"{name}={value}"
        for name, off in _ALTERING.items()
        if (value := getattr(config, name, None)) not in (off, None)
    ]
    if config.do_sample and config.top_k not in (None, 0):
        found.append(f"top_k={config.top_k}")
    if config.do_sample and config.top_p not in (None, 1.0):
        found.append(f"top_p={config.top_p}")
    if found:
        said = "rollouts ignore the model's generation config (%s): they are drawn from the distribution that is scored"
        logger.warning(said, ", ".join(found))


@contextmanager
def _only(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """transformers fills unset options from the model's own generation config: put that aside."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own
