"""Which layout a model's attention can take, and the proof that it scores there as its own forward does."""

import logging
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import InputError
from . import forward
from .cpu import BY_DOCUMENT
from .head import LogProb
from .layouts import Branch, Example, collate

logger = logging.getLogger(__name__)


def choose_layout(models: Sequence[PreTrainedModel], layout: str) -> str:
    """The layout to use for all of `models`: an explicit one that they can take, or for `auto` the cheapest.

    That is logged unless it is what the models before the last one have already.
    Raises InputError where a model cannot take the explicit layout.
    """
    fitting, why = able(models)
    if layout == "auto":
        if len(models) == 1 or fitting[0] != able(models[:-1])[0][0]:
            logger.info("layout: %s (%s)", fitting[0], why)
        return fitting[0]
    if layout not in fitting:
        raise InputError(f"layout={layout!r} does not work here ({why}): use layout={fitting[0]!r} or auto")
    return layout


def able(models: Sequence[PreTrainedModel]) -> tuple[list[str], str]:
    """The layouts that all of `models` can take, the cheapest first, and why these."""
    found = [_able(model) for model in models]
    fitting = [name for name in ("shared", "packed", "padded") if all(name in theirs for theirs, _ in found)]
    reasons = [f"{type(model).__name__}: {reason}" for model, (_, reason) in zip(models, found, strict=True)]
    return fitting, "; ".join(dict.fromkeys(reasons))


def _able(model: PreTrainedModel) -> tuple[list[str], str]:
    """Layouts that work, and why."""
    config = model.config.get_text_config()
    implementation = config._attn_implementation or "eager"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return ["padded"], f"it has layers that take no custom mask: {', '.join(sorted(kinds))}"
    if not getattr(model, "_supports_sdpa", False) and not getattr(model, "_supports_flex_attn", False):
        return ["padded"], "the architecture declares no attention that takes a custom mask"
    if "flash" in implementation:
        return ["packed", "padded"], "FlashAttention keeps packed documents apart and takes no custom mask"
    if implementation in ("sdpa", BY_DOCUMENT, "eager", "flex_attention"):
        name = "sdpa" if implementation == BY_DOCUMENT else implementation
        return ["shared", "packed", "padded"], f"{name} takes a custom mask, so a prompt is computed once"
    return ["padded"], f"attention implementation {implementation!r} is not known to take a custom mask"


def check(model: nn.Module, layout: str, device: torch.device | str = "cpu") -> float:
    """Score a prompt with two answers on `device` and compare with the model's own forward on each answer alone.

    Returns the mean difference of a token's log-probability. It is rounding where layout and head are right.
    """
    prompt, answers = [5, 9, 6, 7], [[8, 5, 7, 9, 6], [6, 8, 5]]
    examples = [Example(prompt, [Branch(ids) for ids in answers]), Example([7], [Branch([5, 6])])]
    alone = [(example.prompt, branch.ids) for example in examples for branch in example.branches]
    batch = {name: tensor.to(device) for name, tensor in collate(examples, layout).items()}
    found = []
    with torch.no_grad(), forward.eval_mode(model):
        values = forward.score(model, batch, LogProb(forward.targets(batch)))["value"]
        for k, (before, ids) in enumerate(alone):
            whole = torch.tensor([[*before, *ids]], device=device)
            logits = model(input_ids=whole, use_cache=False).logits[0]
            logps = torch.log_softmax(logits[len(before) - 1 : -1].float(), dim=-1)
            expected = logps.gather(-1, torch.tensor(ids, device=device)[:, None])[:, 0]
            found.append((values[batch["owner"] == k] - expected).abs())
    return torch.cat(found).mean().item()


def trusted_layout(
    models: Sequence[nn.Module], layout: str, explicit: bool, tolerance: float, device: torch.device | str = "cpu"
) -> str:
    """`layout` if every model scores in it as its own forward does; otherwise `padded`, said in the log.

    A model that is wrong even then does something behind its head that `LogitTransform` does not know: it is set to be
    scored by its own logits, said as well. Raises InputError where the layout was the user's explicit choice.
    """
    for model in models:
        name = type(forward.causal_lm(model)).__name__
        wrong = not check(model, layout, device) <= tolerance
        if wrong and layout != "padded" and check(model, "padded", device) <= tolerance:
            if explicit:
                raise InputError(
                    f"layout={layout!r} gives {name} other numbers than its own forward: use layout=padded"
                )
            logger.warning("%s scores wrongly in layout %s: using padded", name, layout)
            layout, wrong = "padded", False
        if wrong:
            setattr(forward.causal_lm(model), forward.OWN_LOGITS, True)
            said = "the head of %s does more than scale, softcap and bias: its own forward is used, with all logits"
            logger.warning(said, name)
    return layout
