"""Score a batch inside the model's own forward: backbone -> hidden states of the scored tokens -> tiled head.

    enable_scoring   teaches a causal LM's forward one more argument, `scorer`
    score            calls the (wrapped) model with it: values and stats of the scored tokens
    full_logits      the same forward with all logits, for compute_metrics
    trusted_layout   on a few tokens: are these the numbers of the model's own forward? If not, what is right instead

It has to happen inside the forward: there FSDP2 unshards, ZeRO-3 gathers, DDP hooks and autocast apply.

Legend: R rows, L row length, N scored tokens, V vocabulary, H hidden size.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..engines.engine import plain_class
from ..errors import InputError
from .attention import attention_mask
from .head import Finish, Head, score_tokens, score_tokens_through
from .layouts import Branch, Example, collate, targets
from .tiles import LogProb, TileFunction

logger = logging.getLogger(__name__)
OWN_LOGITS = "scores_by_own_logits"
"""Set on a model whose head does something that `head.Finish` does not know: its own logits are used, [B, T, V]."""


@dataclass
class LMHead:
    """What a scorer is given: the model's head, whatever its kind, with its weights gathered."""

    module: nn.Module
    """The layer, or an identity where the model's own logits take the place of hidden states."""
    original_forward: Callable[[Tensor], Tensor]
    finish: Finish

    @classmethod
    def of(cls, model: PreTrainedModel) -> "LMHead":
        """The head of a causal LM."""
        if getattr(model, OWN_LOGITS, False):
            return cls(nn.Identity(), lambda logits: logits, Finish())
        module = model.get_output_embeddings()
        return cls(module, module.forward, Finish.of(model.config.get_text_config()))

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V], as the model itself computes them."""
        return self.finish(self.original_forward(hidden))

    @property
    def plain(self) -> Head | None:
        """The head as a weight and a bias, or None where it is more than that (an adapter on it, a quantised one)."""
        module: Any = self.module
        if hasattr(module, "modules_to_save"):  # PEFT's trained copy of the head
            own = module.original_module if module.disable_adapters else None
            module = own or module.modules_to_save[module.active_adapters[0]]
        return Head(module.weight, module.bias, self.finish) if plain_class(module) is nn.Linear else None

    @property
    def dtype(self) -> torch.dtype | None:
        """Of its weights, or None without any."""
        return getattr(getattr(self.module, "weight", None), "dtype", None)

    def copied(self) -> "LMHead":
        """The same head with weights of its own. Raises InputError where it is more than a linear layer."""
        if isinstance(self.module, nn.Identity):
            return self
        if (head := self.plain) is None:
            raise InputError(
                "the teacher's head is no plain linear layer (an adapter on it, or quantised): merge it, or do not "
                "shard or offload the teacher"
            )
        weight, bias = head.weight.detach().clone(), None if head.bias is None else head.bias.detach().clone()
        return LMHead(self.module, lambda hidden: nn.functional.linear(hidden, weight, bias), self.finish)

    def score(self, hidden: Tensor, tile: TileFunction, weights: Tensor | None = None) -> tuple[Tensor, dict]:
        """`head.score_tokens` on hidden states [N, H], by the way that this head allows."""
        if (head := self.plain) is not None:
            return score_tokens(head, hidden, tile, weights)
        vocabulary = getattr(self.module, "out_features", hidden.shape[-1])
        return score_tokens_through(self.original_forward, self.finish, hidden, tile, vocabulary)


Scorer = Callable[[LMHead, Tensor], dict[str, Tensor]]
"""(head, last hidden states [R, L, H]) -> named tensors: they leave through the model's output."""


def unwrapped(model: Any) -> Any:
    """The model inside the engines' wrappers, its adapter included."""
    while hasattr(model, "module"):
        model = model.module
    return model


def causal_lm(model: Any) -> Any:
    """The causal LM (a PreTrainedModel) inside wrappers and adapters."""
    model = unwrapped(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def enable_scoring(model: nn.Module) -> None:
    """Let the causal LM inside `model` take `scorer=`. A bound method, so that a deepcopy is bound to itself."""
    inner = causal_lm(model)
    inner.forward = MethodType(_scoring_forward(type(inner)), inner)  # type: ignore[arg-type]


@functools.cache
def _scoring_forward(model_class: Any) -> Callable:
    @functools.wraps(model_class.forward)
    def forward(self, *args, scorer: Scorer | None = None, **kwargs):
        if scorer is None:
            return model_class.forward(self, *args, **kwargs)
        head = LMHead.of(self)
        if getattr(self, OWN_LOGITS, False):
            return scorer(head, model_class.forward(self, *args, **kwargs).logits)
        # PEFT passes every argument on, most of them None
        outputs = self.base_model(*args, **{name: value for name, value in kwargs.items() if value is not None})
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


def score(
    model: nn.Module,
    batch: dict[str, Tensor],
    tile: TileFunction,
    weights: Tensor | None = None,
    router_logits: bool = False,
) -> dict[str, Any]:
    """Values and stats of the N scored tokens of a batch from `batch.collate`.

    Returns {"value": [N], **stats of the tile function, and "router_logits" on request}.
    """

    def scorer(head: LMHead, hidden: Tensor) -> dict[str, Tensor]:
        value, stats = head.score(_scored(hidden, batch), tile, weights)
        return {"value": value, **stats}

    return run(model, batch, scorer, **({"output_router_logits": True} if router_logits else {}))


def hidden_states(model: nn.Module, batch: dict[str, Tensor], copy_head: bool) -> tuple[LMHead, Tensor]:
    """A teacher's head, to run later beside the student's, and its hidden states [N, H] at the scored positions.

    copy_head: the head's weights are whole inside the forward alone, so they are copied there.
    """
    heads: list[LMHead] = []

    def scorer(head: LMHead, hidden: Tensor) -> dict[str, Tensor]:
        heads.append(head.copied() if copy_head else head)
        return {"hidden": _scored(hidden, batch)}

    hidden = run(model, batch, scorer)["hidden"]
    return heads[0], hidden


def _scored(hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """[R, L, H] -> [N, H]."""
    return hidden.flatten(0, 1).index_select(0, batch["scored"])


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


def check(model: nn.Module, layout: str, device: torch.device | str = "cpu") -> float:
    """Score a prompt with two answers on `device` and compare with the model's own forward on each answer alone.

    Returns the mean difference of a token's log-probability. It is rounding where layout and head are right.
    """
    prompt, answers = [5, 9, 6, 7], [[8, 5, 7, 9, 6], [6, 8, 5]]
    examples = [Example(prompt, [Branch(ids) for ids in answers]), Example([7], [Branch([5, 6])])]
    alone = [(example.prompt, branch.ids) for example in examples for branch in example.branches]
    batch = {name: tensor.to(device) for name, tensor in collate(examples, layout).items()}
    found = []
    with torch.no_grad(), eval_mode(model):
        values = score(model, batch, LogProb(targets(batch)))["value"]
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

    A model that is wrong even then does something behind its head that `Finish` does not know: it is set to be scored
    by its own logits, said as well. Raises InputError where the layout was the user's explicit choice and is wrong.
    """
    for model in models:
        name = type(causal_lm(model)).__name__
        wrong = not check(model, layout, device) <= tolerance
        if wrong and layout != "padded" and check(model, "padded", device) <= tolerance:
            if explicit:
                raise InputError(
                    f"layout={layout!r} gives {name} other numbers than its own forward: use layout=padded"
                )
            logger.warning("%s scores wrongly in layout %s: using padded", name, layout)
            layout, wrong = "padded", False
        if wrong:
            setattr(causal_lm(model), OWN_LOGITS, True)
            said = "the head of %s does more than scale, softcap and bias: its own forward is used, with all logits"
            logger.warning(said, name)
    return layout
