"""The parity check: a model must score a laid-out batch as its own forward scores each example alone."""

import inspect
import logging
import math
import random
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..batching.micro_batch import MicroBatch
from ..data.images import some_picture
from ..errors import InputError
from ..losses.divergence import log_softmax
from . import forward
from .attention_selection import row_multiple
from .head import LOW, LogProb, score_tokens
from .layouts import Branch, Example, collate
from .recurrent_segments import got_pieces
from .rotary import rope_switch
from .varlen import has_varlen_kernel
from .vision_inputs import VisionInputs

logger = logging.getLogger(__name__)
SPANS = re.compile("^(?!.*(layers|experts|heads)).*(window|chunk|local)")
"""Names of config fields that limit the distance at which a layer attends."""
LOWEST = -1e30
"""Smallest logit of a teacher. A divergence multiplies it by probabilities, and gradients by it."""
ROUGH = 0.1
"""Tolerance of int8 products and of FlashAttention, which computes in 16 bits."""
ROUGHEST = 0.3
"""Tolerance of a forward that computes everything in 16 bits."""


class InFloat32(TorchFunctionMode):
    """Products, norms and attention in float32, whatever the weights' dtype, autocast or engine: for a check, in which
    rounding would hide a fault. Each weight is cast when it is used; quantised ones keep their own products.
    """

    FUNCTIONS = frozenset(
        {
            F.linear,
            F.conv1d,
            F.layer_norm,
            F.rms_norm,
            F.group_norm,
            F.scaled_dot_product_attention,
            torch.matmul,
            Tensor.matmul,
            Tensor.__matmul__,
            torch.mm,
            Tensor.mm,
            torch.bmm,
            Tensor.bmm,
            torch.addmm,
            torch.baddbmm,
            torch.einsum,
        }
    )
    CASTS = frozenset({Tensor.to, Tensor.bfloat16, Tensor.half, Tensor.type_as})

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            return _raised(func(*args, **kwargs))
        # FSDP2 casts what goes into each layer, mixtures of experts what goes into each product
        if func in self.CASTS and args[0].dtype == torch.float32:
            cast = func(*args, **kwargs)
            return args[0].to(cast.device) if cast.dtype in LOW else cast
        if (func not in self.FUNCTIONS and "grouped_mm" not in str(func)) or "out" in kwargs:
            return func(*args, **kwargs)
        if func is torch.einsum and not isinstance(args[1], Tensor):
            args = (args[0], *args[1])  # a list of them, the older form
        device = next(value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        with torch.autocast(device, enabled=False):
            return func(*map(_raised, args), **{name: _raised(value) for name, value in kwargs.items()})


def _raised(value: object) -> Any:
    """A tensor of less than float32 in float32; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value


def check(
    model: nn.Module,
    layout: str,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
    in_float32: bool = True,
    pictures: Any = None,
    beside: Sequence[PreTrainedModel] = (),
) -> float:
    """Score prompts with their answers on `device` and compare with the model's own forward on each answer alone.

    Where the model has a window or chunks shorter than `max_length`, one row is longer than they are. With `pictures`,
    the `VisionInputs` of a model that sees, one has a picture. beside: other models for which batches are laid out.
    Returns the mean difference of a token's log-probability. in_float32: is it inside `InFloat32`?
    """
    inner = forward.causal_lm(model)
    examples = _check_rows(inner, max_length, pictures)
    found = []
    alone = [(example, branch.ids) for example in examples for branch in example.branches]
    laid_out = collate(examples, layout, row_multiple=row_multiple([inner, *beside]), pictures=pictures)
    batch = laid_out.to(device)
    with torch.no_grad(), forward.eval_mode(model):
        values = token_logps(model, batch, in_float32)
        if layout != "padded" and not got_pieces(inner):
            return math.inf  # of weights that are not trained yet states are too small to show in the values
        for k, (example, ids) in enumerate(alone):
            own = [*example.prompt, *ids[:-1]]
            shown = {}
            if example.pictures:
                shown = pictures.of_prompts(example.pictures, torch.tensor([own], device=device), inner)
            logps = log_softmax(own_logits(model, own, len(ids), shown))
            expected = logps.gather(-1, torch.tensor(ids, device=device)[:, None])[:, 0]
            found.append((values[batch.owner == k] - expected).abs())
    return torch.cat(found).mean().item()


def token_logps(model: nn.Module, batch: MicroBatch, in_float32: bool) -> Tensor:
    """The log-probabilities of the scored tokens of a batch, [N], as a step has them; on request by a float32 head."""
    tile = LogProb(batch.targets)

    def scorer(head: forward.LMHead, hidden: Tensor) -> dict[str, Tensor]:
        states = forward.scored_states(hidden, batch)
        if not in_float32:
            return {"value": head.score(states, tile)[0]}
        states = _raised(states)
        with torch.autocast(states.device.type, enabled=False):
            if (plain := head.plain) is None:
                return {"value": head.score(states, tile)[0]}
            return {"value": score_tokens(*plain.cast(states, states.dtype), tile)[0]}

    value: Tensor = forward.run(model, batch, scorer)["value"]
    return value


def within(measure: Callable[[bool], float], limits: tuple[float | None, float], what: str) -> bool:
    """Does `measure(in_float32)` find at most its limit, in float32 or, where a kernel takes none or the limit is None,
    in the model's own precision? False where it fails in both: the log has the errors, `what` they are of.
    """
    for in_float32, limit in zip((True, False), limits, strict=True):
        if limit is None:
            continue
        try:
            with InFloat32() if in_float32 else nullcontext():
                return measure(in_float32) <= limit
        except torch.OutOfMemoryError:
            raise
        # such a kernel, a head that does not fit the backbone's states (ELECTRA's), what transformers' generate refuses
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            logger.info("%s, check in %s: %s", what, "float32" if in_float32 else "its own precision", error)
    return False


def check_finite(model: nn.Module, teacher: bool = False) -> None:
    """Raises InputError where weights or logits are no numbers, and where a teacher's logits are so low that a
    divergence from it overflows.
    """
    inner = forward.causal_lm(model)
    name = type(inner).__name__.removeprefix("FSDP")
    broken = [place for place, weight in model.named_parameters() if not _is_finite(weight)]
    if broken:
        problem = f"{len(broken)} of its weights hold NaN or infinite numbers, {broken[0]} first"
        raise InputError(f"{name}: {problem}: load another checkpoint of it")
    with torch.no_grad(), forward.eval_mode(model):
        logits = own_logits(model, some_ids(inner)(3), 3)
    if logits.isnan().any() or logits.isposinf().any():
        advice = "in float16 large numbers overflow: load it in bfloat16 or float32"
        cause = advice if model_dtype(inner) == torch.float16 else "the model cannot be used as it is"
        raise InputError(f"{name}: its logits are NaN or infinite, though its weights are finite: {cause}")
    if teacher and logits.min() < LOWEST:
        low = f"{int((logits < LOWEST).any(0).sum())} tokens have logits of {logits.min().item():.2g}"
        raise InputError(f"{name}, the teacher: {low}, so that divergences from it overflow: give them -1e4 instead")


def model_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype in which a model computes here: autocast's where it is on."""
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


def _is_finite(weight: nn.Parameter) -> bool:
    """Return whether a weight holds numbers only, as far as it is here; a bias of -inf forbids a token."""
    if not weight.is_floating_point() or weight.is_meta or isinstance(weight, DTensor) or hasattr(weight, "ds_id"):
        return True
    values = weight.detach()
    if values.sum(dtype=torch.float32).isfinite():  # reads it once, without a copy, and may overflow itself
        return True
    return not (values.isnan() | values.isposinf() | (values.isneginf() & (values.dim() > 1))).any()


def check_causal(model: nn.Module) -> None:
    """Raises InputError where a token sees those behind it."""
    inner = forward.causal_lm(model)
    ids = some_ids(forward.causal_lm(model))(8)
    if (limit := tolerance(inner)) >= ROUGH:
        return  # int8 quantises a whole row at once: another last token moves what is before it
    other = (ids[-1] + 1) % inner.config.get_text_config().vocab_size
    with torch.no_grad(), forward.eval_mode(model):
        one, two = (own_logits(model, [*ids[:-1], last], len(ids))[:-1] for last in (ids[-1], other))
    if (one - two).abs().mean() > limit:
        raise InputError(
            f"{type(inner).__name__} lets a token see those behind it, so it is no causal LM (an encoder becomes one "
            "by is_decoder: true in its config)"
        )


def own_logits(model: nn.Module, ids: Sequence[int], last: int, shown: dict[str, Any] | None = None) -> Tensor:
    """The logits of the last tokens by the model's own forward, [last, V]. shown: what it takes of pictures."""
    inner = forward.causal_lm(model)
    few = {"logits_to_keep": last} if "logits_to_keep" in inspect.signature(type(inner).forward).parameters else {}
    output = model(input_ids=torch.tensor([ids], device=inner.device), use_cache=False, **few, **(shown or {}))
    if not isinstance(logits := getattr(output, "logits", None), Tensor) or logits.ndim != 3:
        problem = "does not give each token the logits of the next: it is no causal LM"
        raise InputError(f"{type(inner).__name__} {problem}, which AutoModelForCausalLM loads")
    return logits[0, -last:].float()


def spans(model: PreTrainedModel) -> list[int]:
    """How far layers see, sizes of chunks and the like, in tokens: what longer rows show and shorter ones do not."""
    config: Any = model.config.get_text_config()
    sizes = {value for key, value in config.to_dict().items() if type(value) is int and SPANS.search(key)}
    return sorted(size for size in {*sizes, rope_switch(model) or 0} if size > 1)


def some_ids(model: PreTrainedModel) -> Callable[[int], list[int]]:
    """A function that draws token ids, always the same ones."""
    size = model.config.get_text_config().vocab_size
    draw = random.Random(0)
    return lambda count: draw.choices(range(min(5, size // 2), min(size, 500)), k=count)


def _check_rows(model: PreTrainedModel, max_length: int | None, pictures: VisionInputs | None = None) -> list[Example]:
    """Two prompts of other lengths with two answers, a short one, one that is longer than what a layer sees, if rows
    may be that, and one with a picture, if the model sees.
    """
    config: Any = model.config.get_text_config()
    ids = some_ids(model)
    first = ids(5)
    second = [(first[-1] + 1) % config.vocab_size, *ids(2)]
    rows = [Example(ids(4), [Branch(first), Branch(second)]), Example(ids(1), [Branch(ids(2))])]
    rows.append(Example(ids(7), [Branch(ids(3)), Branch(ids(2))]))
    most = min(max_length or math.inf, getattr(config, "max_position_embeddings", None) or math.inf)
    if seen := [size for size in spans(model) if size < most]:
        # with two answers: in the shared layout a token's place in the row is then not its position
        rows.append(Example(ids(int(max(1, min(max(seen) + 4, most - 12)))), [Branch(ids(12)), Branch(ids(12))]))
    if pictures is not None:
        picture = some_picture()
        text = [i for i in ids(30) if i not in pictures.reader.token_ids]
        prompt = [*text[:2], *pictures.reader.ids(picture), *text[2:4]]
        rows.append(Example(prompt, [Branch(text[4:8]), Branch(text[8:10])], pictures=[picture]))
    return rows


def is_right(model: nn.Module, layout: str, device: torch.device | str, **given: Any) -> bool:
    """Does a model score in a layout as its own forward does? The first rank's answer, for all. given: to `check`."""
    what = f"layout {layout}"

    def measure(in_float32: bool) -> float:
        return check(model, layout, device, in_float32=in_float32, **given)

    right = within(measure, (tolerance(forward.causal_lm(model)), ROUGHEST), what)
    if has_varlen_kernel(torch.device(device)):  # which takes no float32, so that the above has not run it
        right &= within(measure, (None, ROUGHEST), what)
    [right] = broadcast_object_list([right])
    return right


def tolerance(model: PreTrainedModel) -> float:
    """The most that `check` may find: rounding in float32; of what rounds to fewer bits in spite of it; of int8."""
    if getattr(model, "is_loaded_in_8bit", False) or "flash" in (model.config._attn_implementation or ""):
        return ROUGH
    exact = model.dtype == torch.float32 and not getattr(model, "is_quantized", False)
    return 1e-3 if exact and model.device.type == "cpu" and not torch.is_autocast_enabled("cpu") else 0.02
