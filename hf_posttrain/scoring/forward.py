"""Score a batch inside the model's own forward: backbone -> hidden states of the scored tokens -> tiled head.

`enable_scoring` teaches a causal LM's forward one more argument, `scorer`; `score` calls the (wrapped) model with it.
It has to happen inside the forward: there FSDP2 unshards, ZeRO-3 gathers, DDP hooks and autocast apply.

Legend: B examples, K branches of each, R rows, L row length, N scored tokens, V vocabulary, H hidden size.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..batching.micro_batch import MicroBatch
from ..errors import InputError
from . import attention, recurrent_segments, rotary
from .adapted_head import score_tokens_through
from .head import LinearHead, LogitTransform, TileFunction, score_tokens
from .vision_inputs import nothing_of

OWN_LOGITS = "scores_by_own_logits"
"""Set on a model whose head does something that `LogitTransform` does not know: its own logits are used, [R, L, V]."""


@dataclass
class LMHead:
    """What a scorer is given: the model's head, whatever its kind, with its weights gathered."""

    module: nn.Module  # the layer, or an identity where the model's own logits take the place of hidden states
    original_forward: Callable[[Tensor], Tensor]
    transform: LogitTransform

    @classmethod
    def of(cls, model: PreTrainedModel) -> "LMHead":
        """The head of a causal LM."""
        if getattr(model, OWN_LOGITS, False):
            return cls(nn.Identity(), lambda logits: logits, LogitTransform())
        module = model.get_output_embeddings()
        return cls(module, module.forward, LogitTransform.of(model.config.get_text_config()))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V], as the model itself computes them; without gradient more exactly, or more quickly."""
        if not torch.is_grad_enabled() and (head := self.plain) is not None:
            cast, states = head.cast(hidden, head.dtype(hidden.device))
            return cast.logits(states.flatten(0, -2)).unflatten(0, hidden.shape[:-1])
        return self.transform(self.original_forward(hidden))

    @property
    def plain(self) -> LinearHead | None:
        """The head as a weight and a bias, or None where it is more than that (an adapter on it, a quantised one)."""
        module: Any = self.module
        if hasattr(module, "modules_to_save"):  # PEFT's trained copy of the head
            own = module.original_module if module.disable_adapters else None
            module = own or module.modules_to_save[module.active_adapters[0]]
        is_linear = type(module).forward is nn.Linear.forward  # FSDP2's class of it too
        return LinearHead(module.weight, module.bias, self.transform) if is_linear else None

    def score(self, hidden: Tensor, tile: TileFunction, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        """`head.score_tokens` on hidden states [N, H], by the way that this head allows."""
        if (head := self.plain) is not None:
            return score_tokens(head, hidden, tile, weights)
        vocabulary = getattr(self.module, "out_features", hidden.shape[-1])
        return score_tokens_through(self.logits, hidden, tile, vocabulary)


Scorer = Callable[[LMHead, Tensor], dict[str, Tensor]]
"""(head, last hidden states [R, L, H]) -> named tensors: they leave through the model's output."""


# ---- the model's forward


def unwrapped(model: Any) -> Any:
    """The model inside the engines' wrappers, its adapter included."""
    while hasattr(model, "module"):
        model = model.module
    return model


def causal_lm(model: Any) -> Any:
    """The causal LM (a PreTrainedModel) inside wrappers and adapters."""
    model = unwrapped(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def cache_argument(model: nn.Module) -> str:
    """The name under which a causal LM's forward takes a cache; empty: it takes none."""
    taken = inspect.signature(type(model).forward).parameters
    return next((name for name in recurrent_segments.CACHE if name in taken), "")


def sees(model: nn.Module) -> bool:
    """Has a model a tower for pictures?"""
    return hasattr(getattr(causal_lm(model), "base_model", None), "get_image_features")


def vision_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of a causal LM's tower, and of what joins it to the language model; none where it has no tower."""
    inner = causal_lm(model)
    return [weight for name, weight in inner.named_parameters() if is_vision(inner, name)] if sees(inner) else []


def is_vision(model: nn.Module, name: str) -> bool:
    """Has a parameter or module, by its name in a causal LM that sees, nothing of its language model and head?"""
    inner = causal_lm(model)
    language = (inner.get_decoder(), inner.get_output_embeddings(), inner.get_input_embeddings())
    own = [place for place, module in inner.named_modules() if any(module is part for part in language)]
    return bool(name) and not any(f"{name}.".startswith(f"{place}.") or place.startswith(f"{name}.") for place in own)


def enable_scoring(model: nn.Module) -> None:
    """Let the causal LM inside `model` take `scorer=`."""
    inner = causal_lm(model)
    # a bound method, so that a deepcopy is bound to itself
    inner.forward = MethodType(_scoring_forward(type(inner)), inner)  # type: ignore[arg-type]
    inner.trains_vision = any(weight.requires_grad for weight in vision_weights(inner))
    rotary.rotate_by_row(inner)
    inner.keeps_state = recurrent_segments.compute_by_piece(inner)


@functools.cache
def _scoring_forward(model_class: Any) -> Callable[..., Any]:
    """The forward of a model class that takes a scorer."""

    @functools.wraps(model_class.forward)
    def forward(
        model: Any, *args: Any, scorer: Scorer | None = None, visual: Any = None, blind: bool = False, **kwargs: Any
    ) -> Any:
        if scorer is None:
            return model_class.forward(model, *args, **kwargs)
        head = LMHead.of(model)
        backbone = model.model if model.base_model is model else model.base_model  # Llama 4 names another prefix
        if visual:  # the tower by itself: what attention is told of the row is not for it
            with torch.set_grad_enabled(torch.is_grad_enabled() and model.trains_vision):
                features = backbone.get_image_features(**visual, return_dict=True)
            kwargs |= {} if blind else {"mm_encoder_outputs": {"image": features}}
        if getattr(model, OWN_LOGITS, False):
            logits = model_class.forward(model, *args, **kwargs).logits
            return scorer(head, logits + nothing_of(features) if blind else logits)
        # PEFT passes every argument on, most of them None
        outputs = backbone(*args, **{name: value for name, value in kwargs.items() if value is not None})
        hidden = outputs.last_hidden_state + nothing_of(features) if blind else outputs.last_hidden_state
        # the head module is called, so that ZeRO-3's hooks gather its weights; what runs inside is the scorer
        with _replaced_forward(head.module, lambda hidden: scorer(head, hidden)):
            scores = head.module(hidden)
        router_logits = getattr(outputs, "router_logits", None)
        return scores if router_logits is None else scores | {"router_logits": router_logits}

    return forward


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Run `forward` where the module is called, with the module's hooks around it."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode inside, as it was outside; not its wrapper: DeepSpeed's says `training` all the time."""
    model = unwrapped(model)
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def products(model: nn.Module, device: torch.device) -> Iterator[tuple[nn.Linear, torch.dtype]]:
    """Linear layers whose float32 weights autocast, if it is on, rounds at each use, and to which dtype. Not those of
    which an adapter reads the weights themselves, as DoRA takes their norm.
    """
    if torch.is_autocast_enabled(device.type):
        plain = lambda part: hasattr(part, "lora_A") and not len(getattr(part, "lora_magnitude_vector", ()))  # noqa: E731
        adapted = (part for part in model.modules() if hasattr(part, "base_layer") and not plain(part))
        read = {id(layer) for part in adapted for layer in part.modules()}
        for module in model.modules():
            if type(module) is nn.Linear and module.weight.dtype == torch.float32 and id(module) not in read:
                yield module, torch.get_autocast_dtype(device.type)


@contextmanager
def rounded_products(model: nn.Module) -> Iterator[None]:
    """Inside, weights that autocast rounds at each use are rounded once: the same numbers, and half of what a token
    reads in generation. 1.5x in OPD with bf16 on CPU.
    """
    kept = []
    try:
        for layer, low in products(model, causal_lm(model).device):
            kept.append((layer, layer.weight))
            layer.weight = nn.Parameter(layer.weight.detach().to(low), requires_grad=False)
        yield
    finally:
        for layer, weight in kept:
            layer.weight = weight


# ---- scores of a batch


@dataclass
class Scores(ModelOutput):
    """Scores of the N scored tokens of a batch, [N] each.

    Which are computed depends on the tile function. The others are None, and are not keys of the mapping.
    """

    value: Tensor = None  # type: ignore[assignment]  # what the tile function differentiates
    entropy: Tensor = None  # type: ignore[assignment]  # of the student's distribution
    correct: Tensor = None  # type: ignore[assignment]  # 1 where the target is the most likely token
    ce: Tensor | None = None  # cross-entropy of the target
    divergence: Tensor | None = None
    student: Tensor = None  # type: ignore[assignment]  # log-probability of the target
    teacher: Tensor = None  # type: ignore[assignment]  # the teacher's log-probability of the target
    alone: Tensor = None  # type: ignore[assignment]  # 1 where one token of another tokenizer has the same text
    ids: Tensor = None  # type: ignore[assignment]  # [N, k], most likely tokens
    logps: Tensor = None  # type: ignore[assignment]  # [N, k], their log-probabilities
    router_logits: tuple[Tensor, ...] | None = None  # of each mixture-of-experts layer
    stats: dict[str, Tensor] | None = None  # what the tile function returned under other names

    @classmethod
    def from_dict(cls, named: dict[str, Any]) -> Self:
        """Return the scores that a scorer named."""
        known = {field.name for field in fields(cls)}
        stats = {name: value for name, value in named.items() if name not in known}
        if "stats" in named:
            raise InputError("a tile function returned a stat with the name 'stats': give it another name")
        return cls(**{name: value for name, value in named.items() if name in known}, stats=stats or None)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


def score(
    model: nn.Module,
    batch: MicroBatch,
    tile: TileFunction,
    weights: Tensor | None = None,
    router_logits: bool = False,
) -> Scores:
    """Return the scores of the N scored tokens of a batch from `layouts.collate`.

    Args:
        weights: See `head.score_tokens`.
        router_logits: Return those of mixture-of-experts layers too.
    """

    def scorer(head: LMHead, hidden: Tensor) -> dict[str, Tensor]:
        value, stats = head.score(scored_states(hidden, batch), tile, weights)
        return {"value": value, **stats}

    options = {"output_router_logits": True} if router_logits else {}
    return Scores.from_dict(run(model, batch, scorer, **options))


def run(model: nn.Module, batch: MicroBatch, scorer: Scorer, **kwargs: Any) -> dict[str, Any]:
    """Run the model's forward over the batch's tokens, with the attention of its layout."""
    positions = batch.position_ids
    if batch.rope_positions is not None:  # that of a text first, and one for each axis of images
        positions = torch.cat([positions[None], batch.rope_positions])
    if batch.visual is not None:
        kwargs |= {"visual": batch.visual, "blind": bool(batch.blind)}
    return model(
        input_ids=batch.input_ids,
        position_ids=positions,
        use_cache=False,
        scorer=scorer,
        **attention.arguments(causal_lm(model), batch),
        **kwargs,
    )


def scored_states(hidden: Tensor, batch: MicroBatch) -> Tensor:
    """Return the hidden states at the scored positions: [R, L, H] -> [N, H]."""
    return hidden.flatten(0, 1).index_select(0, batch.scored)
