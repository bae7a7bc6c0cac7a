"""Score a batch inside the model's own forward: backbone -> hidden states of the scored tokens -> tiled head.

`enable_scoring` teaches a causal LM's forward one more argument, `scorer`; `score` calls the (wrapped) model with it.
It has to happen inside the forward: there FSDP2 unshards, ZeRO-3 gathers, DDP hooks and autocast apply.
`attention_mask` builds what the layouts of `batch.py` need; `choose_layout` picks the one that a model can take.

Legend: R rows, L row length, N scored tokens, V vocabulary, H hidden size.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .errors import InputError
from .head import Finish, Head, TileFunction, score_tokens, score_tokens_through

logger = logging.getLogger(__name__)


@dataclass
class LMHead:
    """What a scorer is given: the model's head, whatever its kind, with its weights gathered."""

    module: nn.Module
    original_forward: Callable[[Tensor], Tensor]
    finish: Finish

    @classmethod
    def of(cls, model: PreTrainedModel) -> "LMHead":
        """The head of a causal LM."""
        module = model.get_output_embeddings()
        return cls(module, module.forward, Finish.of(model.config.get_text_config()))

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V], as the model itself computes them."""
        return self.finish(self.original_forward(hidden))

    @property
    def plain(self) -> Head | None:
        """The head as a weight and a bias, or None where it is more than that (an adapter on it, a quantised one)."""
        module = self.module
        if hasattr(module, "modules_to_save"):  # PEFT's trained copy of the head
            module = module.modules_to_save[module.active_adapters[0]] if not module.disable_adapters else module.original_module
        return Head(module.weight, module.bias, self.finish) if type(module) is nn.Linear else None

    def score(self, hidden: Tensor, tile: TileFunction, weights: Tensor | None = None) -> tuple[Tensor, dict]:
        """`head.score_tokens` on hidden states [N, H], by the way that this head allows."""
        if (head := self.plain) is not None:
            return score_tokens(head, hidden, tile, weights)
        vocabulary = getattr(self.module, "out_features", 2**15)
        return score_tokens_through(self.original_forward, self.finish, hidden, tile, vocabulary)


Scorer = Callable[[LMHead, Tensor], dict[str, Tensor]]
"""(head, last hidden states [R, L, H]) -> named tensors: they leave through the model's output."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the engines' wrappers, its adapter included."""
    while hasattr(model, "module"):
        model = model.module
    return model


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The causal LM inside wrappers and adapters."""
    model = unwrapped(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def enable_scoring(model: nn.Module) -> None:
    """Let the causal LM inside `model` take `scorer=`. A bound method, so that a deepcopy of the model is itself enabled."""
    inner = causal_lm(model)
    inner.forward = MethodType(_scoring_forward(type(inner)), inner)


@functools.cache
def _scoring_forward(model_class: type) -> Callable:
    @functools.wraps(model_class.forward)
    def forward(self, *args, scorer: Scorer | None = None, **kwargs):
        if scorer is None:
            return model_class.forward(self, *args, **kwargs)
        # PEFT passes every argument on, most of them None
        outputs = self.base_model(*args, **{name: value for name, value in kwargs.items() if value is not None})
        head = LMHead.of(self)
        with _replaced_forward(head.module, lambda hidden: scorer(head, hidden)):
            scores = head.module(outputs.last_hidden_state)
        router_logits = getattr(outputs, "router_logits", None)
        return scores if router_logits is None else scores | {"router_logits": router_logits}

    return forward


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Run `forward` where the module is called, with the module's hooks (ZeRO-3 gathers in them) around it."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def score(
    model: nn.Module, batch: dict[str, Tensor], tile: TileFunction | None, weights: Tensor | None = None,
    router_logits: bool = False,
) -> dict[str, Any]:
    """Values and stats of the N scored tokens of a batch from `batch.collate`, and the hidden states behind them.

    Returns {"value": [N], "hidden": [N, H], **stats of the tile function, and "router_logits" on request}.
    tile None returns the hidden states alone: a teacher's, whose head runs later beside the student's.
    """

    def scorer(head: LMHead, hidden: Tensor) -> dict[str, Tensor]:
        hidden = hidden.flatten(0, 1).index_select(0, batch["scored"])
        if tile is None:
            return {"hidden": hidden}
        value, stats = head.score(hidden, tile, weights)
        return {"value": value, **stats}

    return run(model, batch, scorer, **({"output_router_logits": True} if router_logits else {}))


def run(model: nn.Module, batch: dict[str, Tensor], scorer: Scorer, **kwargs: Any) -> dict[str, Any]:
    """One forward over the batch's tokens with the mask of its layout."""
    return model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=attention_mask(causal_lm(model), batch),
        use_cache=False,  # with a cache transformers does not separate packed documents
        scorer=scorer,
        **kwargs,
    )


def full_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """[R, L, V] of the batch: for compute_metrics and for checks; the only place where they exist."""

    def scorer(head: LMHead, hidden: Tensor) -> dict[str, Tensor]:
        return {"logits": head.logits(hidden)}

    return run(model, batch, scorer)["logits"]


def allowed(batch: dict[str, Tensor], window: int | None = None) -> Tensor:
    """[R, L, L] bool, may query i see key j: j <= i, same document, and j in the prompt or in i's own branch.

    window: how many positions back a sliding layer sees, itself included. Every query sees at least itself.
    """
    document, branch, position = batch["document"], batch["branch"], batch["position_ids"]
    length = document.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document.device).tril()
    same_document = document[:, :, None] == document[:, None, :]
    visible_branch = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    mask = causal & same_document & visible_branch
    return mask if window is None else mask & (position[:, :, None] - position[:, None, :] < window)


def attention_mask(model: PreTrainedModel, batch: dict[str, Tensor]) -> Any:
    """What to pass as `attention_mask`: None, the padding mask [R, L], or prepared masks, one for each kind of layer."""
    if "document" not in batch:
        return batch.get("attention_mask")
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    make = functools.partial(_prepared_mask, batch, config._attn_implementation, model.dtype)
    if "sliding_attention" in kinds:
        return {"full_attention": make(None), "sliding_attention": make(window)}
    return make(None if kinds else window)  # Mistral has a window and no layer types


def _prepared_mask(batch: dict[str, Tensor], implementation: str, dtype: torch.dtype, window: int | None) -> Any:
    """A mask in the form of the attention kernel; transformers takes a prepared 4D mask as it is."""
    if implementation == "flex_attention":
        return flex_mask(batch, window)
    mask = allowed(batch, window)[:, None]
    if implementation == "sdpa":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def flex_mask(batch: dict[str, Tensor], window: int | None) -> Any:
    """The same rule as `allowed` as a BlockMask, which never exists as L x L (GPU)."""
    from torch.nn.attention.flex_attention import create_block_mask

    document, branch, position = batch["document"], batch["branch"], batch["position_ids"]

    def rule(r, _head, i, j):
        visible = (branch[r, j] == 0) | (branch[r, j] == branch[r, i])
        mask = (j <= i) & (document[r, i] == document[r, j]) & visible
        return mask if window is None else mask & (position[r, i] - position[r, j] < window)

    rows, length = document.shape
    return create_block_mask(rule, rows, None, length, length, device=str(document.device))


def choose_layout(model: nn.Module, layout: str) -> str:
    """The layout to use: an explicit one that the model can take, or for `auto` the cheapest, with the reason logged.

    Raises InputError where the model cannot take the explicit layout.
    """
    inner = causal_lm(model)
    implementation = inner.config.get_text_config()._attn_implementation or "eager"
    able, reason = _able(inner, implementation)
    if layout == "auto":
        choice = able[0]
        logger.info("layout: %s (%s)", choice, reason)
        return choice
    if layout not in able:
        raise InputError(f"layout={layout!r} does not work with {type(inner).__name__} on {implementation}: {reason}; "
                         f"use layout={able[0]!r} or auto")
    return layout


def _able(model: PreTrainedModel, implementation: str) -> tuple[list[str], str]:
    """Layouts that work, the cheapest first, and why."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return ["padded"], f"it has layers that take no custom mask: {', '.join(sorted(kinds))}"
    if not getattr(model, "_supports_sdpa", False) and not getattr(model, "_supports_flex_attn", False):
        return ["padded"], "the architecture declares no attention that takes a custom mask"
    if "flash" in implementation:
        return ["packed", "padded"], "FlashAttention keeps packed documents apart and takes no custom mask"
    if implementation in ("sdpa", "eager", "flex_attention"):
        return ["shared", "packed", "padded"], f"{implementation} takes a custom mask, so a prompt is computed once"
    return ["padded"], f"attention implementation {implementation!r} is not known to take a custom mask"
