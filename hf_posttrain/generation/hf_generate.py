"""transformers' own `generate`, for models whose state between steps is more than keys and values."""

import logging
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig

from ..scoring.forward import causal_lm

logger = logging.getLogger(__name__)
NONFINITE_LOGITS = "the model's logits are NaN or infinite: nothing can be drawn from them"
# options that change the distribution, with the value that does not
_ALTERING = {
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


def generate(
    model: Any,
    ids: Tensor,
    mask: Tensor,
    max_new_tokens: int,
    terminal_ids: list[int],
    pad_id: int,
    sampler: Any,
    more: dict[str, Any] | None = None,
) -> list[list[int]]:
    """Completions of left-padded prompts, ids and mask [n, L]: each may be followed by padding.

    model: with its adapter. sampler: a Sampler. more: arguments of its own `generate`, such as those for pictures or a
    streamer. Raises RuntimeError where the model's logits are NaN or infinite.
    """
    sampling: dict[str, Any] = {"do_sample": False}
    if sampler.temperature is not None:
        sampling = {"do_sample": True, "temperature": sampler.temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=terminal_ids, pad_token_id=pad_id, use_cache=True, **sampling
    )
    own = model.config.get_text_config().vocab_size
    config.suppress_tokens = [*sampler.never, *range(sampler.vocabulary, own)] or None
    # transformers fills options that are not set from the model's own generation config: put that aside
    before = [(each, vars(each).get("generation_config")) for each in dict.fromkeys((model, causal_lm(model)))]
    for each, _ in before:
        each.generation_config = config
    try:  # not synced: whole weights are on each rank, so none waits for another
        given = {"generation_config": config, "logits_processor": [_finite], "synced_gpus": False}
        output = model.generate(input_ids=ids, attention_mask=mask, **given, **(more or {}))
    finally:
        for each, own in before:
            each.generation_config = own
            if own is None:  # a wrapper's is then that of the model inside
                del each.generation_config
    return output[:, ids.shape[1] :].tolist()


def _finite(_: Tensor, scores: Tensor) -> Tensor:
    if not scores.amax().isfinite():
        raise RuntimeError(NONFINITE_LOGITS)
    return scores


def warn_about_ignored_settings(model: nn.Module) -> None:
    """Say which settings of a model's generation config are ignored."""
    config = causal_lm(model).generation_config
    harmless = _ALTERING | ({"top_k": 0, "top_p": 1.0} if config.do_sample else {})
    given = {name: getattr(config, name, None) for name in harmless}
    if found := [f"{name}={value}" for name, value in given.items() if value not in (harmless[name], None)]:
        said = "rollouts ignore the model's generation config, and so do answers in evaluation: %s"
        logger.warning(said, ", ".join(found))
