"""Scores of a batch, computed inside the model's own forward: backbone -> hidden states of scored tokens -> tiled head.

`enable_scoring` adds an argument `scorer` to the forward of a causal LM. `score` calls the (wrapped) model with it. The
scores are computed inside the forward, because there FSDP2 unshards, ZeRO-3 gathers, and DDP hooks and autocast apply.

Legend: B examples, K branches of each, R rows, L row length, N scored tokens, V vocabulary, H hidden size.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
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
from .adapted_head import score_tokens_checkpointed
from .head import LinearHead, LogitTransform, TileFunction, score_tokens
from .vision_inputs import zero_with_grad

USES_OWN_LOGITS = "scores_by_own_logits"
"""Attribute of a model whose head computes more than `LogitTransform`, so that its own logits [R, L, V] are used."""


@dataclass
class LMHead:
    """Head of a model inside its forward, where its weights are gathered. A scorer receives it.

    It is the language modeling head of a causal LM, or the score layer of a reward model.
    """

    module: nn.Module  # `scored_layer`, or an identity if the model's own logits replace the hidden states
    original_forward: Callable[[Tensor], Tensor]
    transform: LogitTransform

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "LMHead":
        """Return the head of a causal LM."""
        if getattr(model, USES_OWN_LOGITS, False):
            identity = nn.Identity()
            return cls(identity, identity.forward, LogitTransform())
        module = scored_layer(output_layer(model))
        if is_reward_model(model):
            return cls(module, module.forward, LogitTransform())
        return cls(module, module.forward, LogitTransform.from_config(model.config.get_text_config()))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states [..., H], as the model itself computes them.

        Without gradient they are computed more exactly or faster, if the head is linear.
        """
        if not torch.is_grad_enabled() and (head := self.linear) is not None:
            cast_head, states = head.cast(hidden, head.dtype(hidden.device))
            return cast_head.logits(states.flatten(0, -2)).unflatten(0, hidden.shape[:-1])
        return self.transform(self.original_forward(hidden))

    @property
    def linear(self) -> LinearHead | None:
        """Head as a weight and a bias, or None for any other head (with an adapter, or quantized)."""
        module: Any = self.module
        is_linear = type(module).forward is nn.Linear.forward  # also for FSDP2's subclass of nn.Linear
        return LinearHead(module.weight, module.bias, self.transform) if is_linear else None

    def score(self, hidden: Tensor, tile: TileFunction, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Call `head.score_tokens` on hidden states [N, H], or its slower version for a head that is not linear."""
        if (head := self.linear) is not None:
            return score_tokens(head, hidden, tile, weights)
        vocabulary = getattr(self.module, "out_features", hidden.shape[-1])
        return score_tokens_checkpointed(self.logits, hidden, tile, vocabulary)


Scorer = Callable[[LMHead, Tensor], dict[str, Tensor]]
"""(head, last hidden states [R, L, H]) -> named tensors, which become the model's output."""


# ---- the model's forward


def unwrap_model(model: nn.Module) -> Any:
    """Return the model inside the wrappers of engines, with its adapter."""
    inner: Any = model
    while hasattr(inner, "module"):
        inner = inner.module
    return inner


def causal_lm(model: nn.Module) -> Any:
    """Return the causal LM (a PreTrainedModel) inside wrappers and adapters."""
    inner = unwrap_model(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def is_reward_model(model: nn.Module) -> bool:
    """Return whether a model is a sequence classifier, with a score layer in place of a language modeling head."""
    return "ForSequenceClassification" in type(causal_lm(model)).__name__


def output_layer(model: nn.Module) -> Any:
    """Return the language modeling head, or the score layer of a reward model."""
    inner = causal_lm(model)
    return inner.score if is_reward_model(inner) else inner.get_output_embeddings()


def scored_layer(head: Any) -> nn.Module:
    """Return the module that computes the output of a head: of a layer that PEFT trains whole, its trained copy."""
    if not hasattr(head, "modules_to_save"):
        return head
    return head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]


def cache_argument(model: nn.Module) -> str:
    """Return the name of the cache argument of a causal LM's forward, or an empty string if it takes no cache."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in recurrent_segments.CACHE_ARGUMENTS if name in parameters), "")


def is_vision_language_model(model: nn.Module) -> bool:
    """Return whether a model has a vision encoder."""
    return hasattr(getattr(causal_lm(model), "base_model", None), "get_image_features")


def vision_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of the vision encoder and of its projection, or an empty list without a vision encoder."""
    inner = causal_lm(model)
    if not is_vision_language_model(inner):
        return []
    return [weight for name, weight in inner.named_parameters() if is_vision_parameter(inner, name)]


def is_vision_parameter(model: nn.Module, name: str) -> bool:
    """Return whether a parameter or module of a vision-language model lies outside its language model and head."""
    inner = causal_lm(model)
    language = (inner.get_decoder(), output_layer(inner), inner.get_input_embeddings())
    prefixes = [prefix for prefix, module in inner.named_modules() if any(module is part for part in language)]
    return bool(name) and not any(
        f"{name}.".startswith(f"{prefix}.") or prefix.startswith(f"{name}.") for prefix in prefixes
    )


def enable_scoring(model: nn.Module) -> None:
    """Add the argument `scorer` to the forward of the causal LM inside `model`."""
    inner = causal_lm(model)
    # a bound method, so that a deepcopy is bound to itself
    inner.forward = MethodType(_scoring_forward(type(inner)), inner)  # type: ignore[arg-type]
    inner.trains_vision_encoder = any(weight.requires_grad for weight in vision_weights(inner))
    rotary.enable_per_row_rope(inner)
    inner.has_recurrent_layers = recurrent_segments.enable_segments(inner)


@functools.cache
def _scoring_forward(model_class: type[PreTrainedModel]) -> Callable[..., Any]:
    """Return the forward of a model class with the argument `scorer`."""

    @functools.wraps(model_class.forward)
    def forward(
        model: Any,
        *args: Any,
        scorer: Scorer | None = None,
        vision_inputs: Mapping[str, Tensor] | None = None,
        blank_image: bool = False,
        **kwargs: Any,
    ) -> Any:
        if scorer is None:
            return model_class.forward(model, *args, **kwargs)

        head = LMHead.from_model(model)
        backbone = model.model if model.base_model is model else model.base_model  # Llama 4 names another prefix
        if vision_inputs:  # the vision encoder alone, because the attention arguments of the row do not apply to it
            with torch.set_grad_enabled(torch.is_grad_enabled() and model.trains_vision_encoder):
                features = backbone.get_image_features(**vision_inputs, return_dict=True)
            kwargs |= {} if blank_image else {"mm_encoder_outputs": {"image": features}}

        if getattr(model, USES_OWN_LOGITS, False):
            logits = model_class.forward(model, *args, **kwargs).logits
            return scorer(head, logits + zero_with_grad(features) if blank_image else logits)

        # PEFT passes all arguments on, most of them None
        outputs = backbone(*args, **{name: value for name, value in kwargs.items() if value is not None})
        hidden = outputs.last_hidden_state + zero_with_grad(features) if blank_image else outputs.last_hidden_state
        # the layer is called so that ZeRO-3's hooks gather its weights; the scorer runs inside this call
        with _replaced_forward(head.module, functools.partial(scorer, head)):
            scores = output_layer(model)(hidden)
        router_logits = getattr(outputs, "router_logits", None)
        return scores if router_logits is None else scores | {"router_logits": router_logits}

    return forward


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of a module inside the context, with the module's hooks around it."""
    original = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if original is None:
            del module.forward
        else:
            module.forward = original


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode inside the context, and restore its mode afterwards.

    The wrapper of an engine keeps its mode, because DeepSpeed's wrapper always reports `training`.
    """
    model = unwrap_model(model)
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def autocast_linear_layers(model: nn.Module, device: torch.device) -> Iterator[tuple[nn.Linear, torch.dtype]]:
    """Yield the linear layers whose float32 weights autocast rounds at each use, with the dtype to which it rounds.

    Layers are left out if their adapter reads the weights themselves, as DoRA does for their norm. Nothing is yielded
    if autocast is off.
    """
    if not torch.is_autocast_enabled(device.type):
        return

    def reads_base_weights(module: nn.Module) -> bool:
        return not hasattr(module, "lora_A") or len(getattr(module, "lora_magnitude_vector", ())) > 0

    adapted = (module for module in model.modules() if hasattr(module, "base_layer") and reads_base_weights(module))
    excluded = {id(layer) for module in adapted for layer in module.modules()}
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and id(module) not in excluded:
            yield module, torch.get_autocast_dtype(device.type)


@contextmanager
def precast_weights(model: nn.Module) -> Iterator[None]:
    """Round the weights that autocast rounds at each use once, for the duration of the context.

    The results are the same, and a token of generation reads half as much memory: 1.5x in OPD with bf16 on CPU.
    """
    originals = []
    try:
        for layer, dtype in autocast_linear_layers(model, causal_lm(model).device):
            originals.append((layer, layer.weight))
            layer.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
        yield
    finally:
        for layer, weight in originals:
            layer.weight = weight


# ---- scores of a batch


@dataclass
class Scores(ModelOutput):
    """Scores of the N scored tokens of a batch, [N] each.

    The tile function determines which of them are computed. The others are None, and are not keys of the mapping.
    """

    value: Tensor = None  # type: ignore[assignment]  # value that the tile function differentiates
    entropy: Tensor = None  # type: ignore[assignment]  # entropy of the student's distribution
    correct: Tensor = None  # type: ignore[assignment]  # 1 if the target is the most likely token
    ce: Tensor | None = None  # cross-entropy of the target
    divergence: Tensor | None = None
    student: Tensor = None  # type: ignore[assignment]  # log-probability of the target
    teacher: Tensor = None  # type: ignore[assignment]  # the teacher's log-probability of the target
    alone: Tensor = None  # type: ignore[assignment]  # 1 if a single token of another tokenizer has the same text
    ids: Tensor = None  # type: ignore[assignment]  # [N, k], most likely tokens
    logps: Tensor = None  # type: ignore[assignment]  # [N, k], their log-probabilities
    router_logits: tuple[Tensor, ...] | None = None  # of each mixture-of-experts layer
    stats: dict[str, Tensor] | None = None  # statistics of the tile function with other names

    @classmethod
    def from_dict(cls, named: dict[str, Any]) -> Self:
        """Return the scores for the named tensors of a scorer."""
        known = {field.name for field in fields(cls)}
        stats = {name: value for name, value in named.items() if name not in known}
        if "stats" in named:
            raise InputError("a tile function cannot return a statistic with the reserved name 'stats'. Rename it")
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
        model: Model after `enable_scoring`.
        batch: Batch of `layouts.collate` on the device of the model.
        tile: Tile function, which computes the scores from logits.
        weights: See `head.score_tokens`.
        router_logits: Return the router logits of mixture-of-experts layers too.
    """

    def scorer(head: LMHead, hidden: Tensor) -> dict[str, Tensor]:
        value, stats = head.score(scored_hidden_states(hidden, batch), tile, weights)
        return {"value": value, **stats}

    options = {"output_router_logits": True} if router_logits else {}
    return Scores.from_dict(run(model, batch, scorer, **options))


def run(model: nn.Module, batch: MicroBatch, scorer: Scorer, **kwargs: Any) -> dict[str, Any]:
    """Run the forward over the tokens of a batch with the attention of its layout. Return the output of the scorer."""
    positions = batch.position_ids
    if batch.rope_positions is not None:  # the position in the text first, then one for each axis of images
        positions = torch.cat([positions[None], batch.rope_positions])
    if batch.vision_inputs is not None:
        kwargs |= {"vision_inputs": batch.vision_inputs, "blank_image": bool(batch.blank_image)}
    return model(
        input_ids=batch.input_ids,
        position_ids=positions,
        use_cache=False,
        scorer=scorer,
        **attention.arguments(causal_lm(model), batch),
        **kwargs,
    )


def scored_hidden_states(hidden: Tensor, batch: MicroBatch) -> Tensor:
    """Return the hidden states at the scored positions: [R, L, H] -> [N, H]."""
    return hidden.flatten(0, 1).index_select(0, batch.scored)
