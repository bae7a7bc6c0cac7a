"""The `generate` of transformers, for models whose state between steps is more than keys and values."""

import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import GenerationConfig

from ..scoring.forward import causal_lm

if TYPE_CHECKING:
    from .rollout import TokenSampler

logger = logging.getLogger(__name__)
NONFINITE_LOGITS = "the model's logits are NaN or infinite, so that no token can be sampled"
_NEUTRAL_VALUES = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "min_p": None,
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "min_length": 0,
    "min_new_tokens": None,
    "guidance_scale": None,
}
"""Options that change the distribution, with the value that does not change it."""


def generate(
    model: Any,
    ids: Tensor,
    mask: Tensor,
    max_new_tokens: int,
    terminal_ids: list[int],
    pad_id: int,
    sampler: "TokenSampler",
    generate_kwargs: dict[str, Any] | None = None,
) -> list[list[int]]:
    """Return completions of left-padded prompts, each of which may be followed by padding.

    Args:
        model: The model with its adapter.
        ids: Token ids of the prompts, [n, L].
        mask: Attention mask, [n, L].
        max_new_tokens: Maximum number of tokens of a completion.
        terminal_ids: Ids that end a completion.
        pad_id: Id of the padding.
        sampler: Choice of the next token.
        generate_kwargs: Further arguments of the model's `generate`, such as those for images or a streamer.

    Raises:
        RuntimeError: If the logits of the model are NaN or infinite.
    """
    sampling: dict[str, Any] = {"do_sample": False}
    if sampler.temperature is not None:
        sampling = {"do_sample": True, "temperature": sampler.temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=terminal_ids, pad_token_id=pad_id, use_cache=True, **sampling
    )
    vocab_size = model.config.get_text_config().vocab_size
    config.suppress_tokens = [*sampler.excluded_ids, *range(sampler.vocabulary, vocab_size)] or None

    # transformers reads options that are not set from the model's own generation config, which is removed meanwhile
    modules = dict.fromkeys((model, causal_lm(model)))
    original_configs = [(module, vars(module).get("generation_config")) for module in modules]
    for module, _ in original_configs:
        module.generation_config = config
    try:
        # not synced, since unsharded weights are on each rank, so that no rank waits for another
        options = {"generation_config": config, "logits_processor": [_raise_if_not_finite], "synced_gpus": False}
        output = model.generate(input_ids=ids, attention_mask=mask, **options, **(generate_kwargs or {}))
    finally:
        for module, original in original_configs:
            module.generation_config = original
            if original is None:  # a wrapper then has the config of the model inside
                del module.generation_config
    return output[:, ids.shape[1] :].tolist()


def _raise_if_not_finite(_: Tensor, scores: Tensor) -> Tensor:
    if not scores.amax().isfinite():
        raise RuntimeError(NONFINITE_LOGITS)
    return scores


def warn_about_ignored_settings(model: nn.Module) -> None:
    """Warn about settings of the model's generation config that change the distribution, and are ignored."""
    config = causal_lm(model).generation_config
    neutral = _NEUTRAL_VALUES | ({"top_k": 0, "top_p": 1.0} if config.do_sample else {})
    values = {name: getattr(config, name, None) for name in neutral}
    if ignored := [f"{name}={value}" for name, value in values.items() if value not in (neutral[name], None)]:
        logger.warning(
            "rollouts and answers in evaluation ignore the model's generation config: %s", ", ".join(ignored)
        )
