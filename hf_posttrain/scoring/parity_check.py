"""Parity check: a model must score a laid-out batch as its own forward scores each example alone."""

import inspect
import logging
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..batching.micro_batch import MicroBatch
from ..data.images import noise_image
from ..errors import InputError
from ..losses.divergence import log_softmax
from . import forward
from .attention_selection import row_multiple
from .head import HALF_DTYPES, LogProb, Reward, score_tokens
from .layouts import Branch, Example, branch_with_reward, collate
from .recurrent_segments import used_segments
from .rotary import rope_switch_length
from .varlen import has_varlen_kernel
from .vision_inputs import VisionInputs

logger = logging.getLogger(__name__)
SPAN_FIELDS = re.compile("^(?!.*(layers|experts|heads)).*(window|chunk|local)")
"""Names of config fields that limit the distance at which a layer attends."""
MIN_TEACHER_LOGIT = -1e30
"""Smallest logit of a teacher. A divergence multiplies it by probabilities, and gradients by it."""
LOW_PRECISION_TOLERANCE = 0.1
"""Tolerance of int8 products, and of FlashAttention, which computes in 16 bits."""
HALF_PRECISION_TOLERANCE = 0.3
"""Tolerance of a forward that computes everything in 16 bits."""


class InFloat32(TorchFunctionMode):
    """Mode that computes products, norms and attention in float32, for any dtype of weights, autocast or engine.

    It is meant for checks, in which rounding would hide a fault. Each weight is cast when it is used. Quantized weights
    keep their own products.
    """

    FUNCTIONS = frozenset(
        {
            functional.linear,
            functional.conv1d,
            functional.layer_norm,
            functional.rms_norm,
            functional.group_norm,
            functional.scaled_dot_product_attention,
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

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.embedding:
            return _to_float32(func(*args, **kwargs))
        # FSDP2 casts the inputs of each layer, and mixtures of experts cast the inputs of each product
        if func in self.CASTS and args[0].dtype == torch.float32:
            cast = func(*args, **kwargs)
            return args[0].to(cast.device) if cast.dtype in HALF_DTYPES else cast
        if not self._is_computed_in_float32(func) or "out" in kwargs:
            return func(*args, **kwargs)
        if func is torch.einsum and not isinstance(args[1], Tensor):
            args = (args[0], *args[1])  # the older form, with a list of tensors
        device = next(value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        with torch.autocast(device, enabled=False):
            return func(*map(_to_float32, args), **{name: _to_float32(value) for name, value in kwargs.items()})

    @classmethod
    @cache
    def _is_computed_in_float32(cls, func: Callable[..., Any]) -> bool:
        """Return whether a function is a product, norm or attention."""
        return func in cls.FUNCTIONS or "grouped_mm" in str(func)


def _to_float32(value: object) -> Any:
    """Return a half-precision tensor in float32, and any other value unchanged."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF_DTYPES else value


def parity_error(
    model: nn.Module,
    layout: str,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
    in_float32: bool = True,
    vision_inputs: VisionInputs | None = None,
    other_models: Sequence[PreTrainedModel] = (),
) -> float:
    """Score prompts with their answers in a layout, and compare with the model's own forward on each answer alone.

    Args:
        model: Model after `enable_scoring`.
        layout: `shared`, `packed` or `padded`.
        device: Device of the batch.
        max_length: Limit of row lengths in tokens. If the model has a window or chunks below this limit, one row is
            longer than these.
        in_float32: Whether the call is inside `InFloat32`.
        vision_inputs: Image inputs of a vision-language model. With them one row has an image.
        other_models: Other models for which batches are laid out.

    Returns:
        The mean absolute difference of a token's log-probability, or of a reward. It is infinite if the model does not
        pass the segments on to its recurrent layers.
    """
    inner = forward.causal_lm(model)
    examples = _check_examples(inner, max_length, vision_inputs)
    errors = []
    answers = [(example, branch.ids) for example in examples for branch in example.branches]
    multiple = row_multiple([inner, *other_models])
    laid_out = collate(examples, layout, row_multiple=multiple, vision_inputs=vision_inputs)
    batch = laid_out.to(device)

    with torch.no_grad(), forward.eval_mode(model):
        values = token_values(model, batch, in_float32)
        if layout != "padded" and not used_segments(inner):
            return math.inf  # the states of weights that are not trained yet are too small to show in the values
        for k, (example, ids) in enumerate(answers):
            inputs = [*example.prompt, *ids[:-1]]
            image_arguments = {}
            if example.images:
                assert vision_inputs is not None
                tokens = torch.tensor([inputs], device=device)
                image_arguments = vision_inputs.prompt_arguments(example.images, tokens, inner)
            if forward.is_reward_model(model):
                expected = reference_logits(model, inputs, 1, image_arguments)[:, 0]
            else:
                logps = log_softmax(reference_logits(model, inputs, len(ids), image_arguments))
                expected = logps.gather(-1, torch.tensor(ids, device=device)[:, None])[:, 0]
            errors.append((values[batch.owner == k] - expected).abs())
    return torch.cat(errors).mean().item()


def token_values(model: nn.Module, batch: MicroBatch, in_float32: bool) -> Tensor:
    """Return the log-probabilities, or rewards, of the scored tokens of a batch, [N], as a training step does.

    Args:
        model: Model after `enable_scoring`.
        batch: Laid-out batch on the device of the model.
        in_float32: Compute the head in float32.
    """
    tile = Reward() if forward.is_reward_model(model) else LogProb(batch.targets)

    def scorer(head: forward.LMHead, hidden: Tensor) -> dict[str, Tensor]:
        states = forward.scored_hidden_states(hidden, batch)
        if not in_float32:
            return {"value": head.score(states, tile)[0]}
        states = _to_float32(states)
        with torch.autocast(states.device.type, enabled=False):
            if (linear := head.linear) is None:
                return {"value": head.score(states, tile)[0]}
            return {"value": score_tokens(*linear.cast(states, states.dtype), tile)[0]}

    value: Tensor = forward.run(model, batch, scorer)["value"]
    return value


def is_within_tolerance(measure: Callable[[bool], float], tolerances: tuple[float | None, float], subject: str) -> bool:
    """Return whether an error is within its tolerance, in float32 or else in the model's own precision.

    The second measurement is made if a kernel does not support float32, or if the first tolerance is None.

    Args:
        measure: Function of `in_float32` that returns the error.
        tolerances: Tolerance in float32 and in the model's own precision.
        subject: Subject of the check, for the log.

    Returns:
        False also if both measurements raise an exception. The exceptions are logged.
    """
    for in_float32, limit in zip((True, False), tolerances, strict=True):
        if limit is None:
            continue
        try:
            with InFloat32() if in_float32 else nullcontext():
                return measure(in_float32) <= limit
        except torch.OutOfMemoryError:
            raise
        # such a kernel, a head that does not match the hidden states (ELECTRA), inputs that `generate` rejects
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            precision = "float32" if in_float32 else "its own precision"
            logger.info("%s: the check in %s failed with: %s", subject, precision, error)
    return False


def check_forward(model: nn.Module, teacher: bool = False) -> None:
    """Raise InputError if weights or logits are not finite, or if a token attends to later tokens.

    Args:
        model: Model after `enable_scoring`.
        teacher: Raise also if logits are so low that a divergence from this teacher overflows.
    """
    inner = forward.causal_lm(model)
    name = type(inner).__name__.removeprefix("FSDP")
    broken = [parameter for parameter, weight in model.named_parameters() if not _is_finite(weight)]
    if broken:
        raise InputError(
            f"{name} has NaN or infinite values in {len(broken)} of its weights, the first of which is {broken[0]}. "
            "Load another checkpoint"
        )

    ids = example_ids(inner)(8)
    last = 1 if forward.is_reward_model(model) else len(ids)
    with torch.no_grad(), forward.eval_mode(model):
        logits = reference_logits(model, ids, last)
    if logits.isnan().any() or logits.isposinf().any():
        in_float16 = model_dtype(inner) == torch.float16
        fix = "Load it in bfloat16 or float32, because large values overflow in float16"
        fix = fix if in_float16 else "Load another checkpoint"
        raise InputError(f"{name}: its logits are NaN or infinite, although its weights are finite. {fix}")
    if teacher and logits.min() < MIN_TEACHER_LOGIT:
        count = int((logits < MIN_TEACHER_LOGIT).any(0).sum())
        raise InputError(
            f"{name}, the teacher: {count} tokens have logits down to {logits.min().item():.2g}, so that divergences "
            "from it overflow. Set these logits to -1e4"
        )
    if not forward.is_reward_model(model):  # which returns one logit for a whole row
        check_causal(model, ids, logits, tolerance(inner))


def check_causal(model: nn.Module, ids: list[int], logits: Tensor, limit: float) -> None:
    """Raise InputError if a token attends to later tokens.

    Args:
        model: Model.
        ids: Token ids of a row.
        logits: Logits of all tokens of the row.
        limit: Largest mean difference of the logits when the last token changes.
    """
    inner = forward.causal_lm(model)
    if tolerance(inner) >= LOW_PRECISION_TOLERANCE:
        return  # int8 quantizes a whole row at once, so that another last token changes the values before it

    other = (ids[-1] + 1) % inner.config.get_text_config().vocab_size
    with torch.no_grad(), forward.eval_mode(model):
        changed = reference_logits(model, [*ids[:-1], other], len(ids))
    if (changed - logits)[:-1].abs().mean() > limit:
        raise InputError(
            f"{type(inner).__name__} is not a causal LM, because a token attends to later tokens. If it is an encoder, "
            "set is_decoder: true in its config"
        )


def model_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype in which a model computes here, which is the dtype of autocast if it is on."""
    device = model.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


def _is_finite(weight: nn.Parameter) -> bool:
    """Return whether a weight, as far as it is on this rank, is finite. A bias may be -inf, which forbids a token."""
    if not weight.is_floating_point() or weight.is_meta or isinstance(weight, DTensor) or hasattr(weight, "ds_id"):
        return True
    values = weight.detach()
    if values.sum(dtype=torch.float32).isfinite():  # reads the weight once, without a copy; the sum itself may overflow
        return True
    return not (values.isnan() | values.isposinf() | (values.isneginf() & (values.dim() > 1))).any()


def reference_logits(
    model: nn.Module, ids: Sequence[int], last: int, image_arguments: Mapping[str, Any] | None = None
) -> Tensor:
    """Return the logits of the last tokens from the model's own forward, [last, V].

    A reward model returns one logit, that of the last token, so that it reads one row for each token.

    Args:
        model: Model.
        ids: Token ids of one row.
        last: Number of tokens at the end of the row whose logits are returned.
        image_arguments: Arguments of the forward for the images of the row.
    """
    inner = forward.causal_lm(model)
    if forward.is_reward_model(model) and last > 1:
        return torch.cat([reference_logits(model, ids[:end], 1) for end in range(len(ids) - last + 1, len(ids) + 1)])
    parameters = inspect.signature(type(inner).forward).parameters
    options = {"logits_to_keep": last} if "logits_to_keep" in parameters else {}
    output = model(
        input_ids=torch.tensor([ids], device=inner.device), use_cache=False, **options, **(image_arguments or {})
    )
    if forward.is_reward_model(model):
        return output.logits.float()
    if not isinstance(logits := getattr(output, "logits", None), Tensor) or logits.ndim != 3:
        raise InputError(
            f"{type(inner).__name__} is not a causal LM, because it does not return logits of the next token. "
            "Load a model that AutoModelForCausalLM supports"
        )
    return logits[0, -last:].float()


def attention_spans(model: PreTrainedModel) -> list[int]:
    """Return the lengths in tokens above which a row may be computed differently, such as windows and chunks."""
    config: Any = model.config.get_text_config()
    sizes = {value for key, value in config.to_dict().items() if type(value) is int and SPAN_FIELDS.search(key)}
    return sorted(size for size in {*sizes, rope_switch_length(model) or 0} if size > 1)


def example_ids(model: PreTrainedModel) -> Callable[[int], list[int]]:
    """Return a function that returns random token ids of a model, with a fixed seed."""
    size = model.config.get_text_config().vocab_size
    # a reward model reads the score before padding at the end of a row
    padding = {model.config.get_text_config().pad_token_id} if forward.is_reward_model(model) else set()
    ids = [i for i in range(min(5, size // 2), min(size, 500)) if i not in padding]
    generator = random.Random(0)

    def random_ids(count: int) -> list[int]:
        return generator.choices(ids, k=count)

    return random_ids


def _check_examples(
    model: PreTrainedModel, max_length: int | None, vision_inputs: VisionInputs | None = None
) -> list[Example]:
    """Return the examples of the check.

    They are three prompts of different lengths, of which the second has two answers, one that is longer than the span
    of a layer if the length limit allows it, and one with an image for a vision-language model.
    """
    config: Any = model.config.get_text_config()
    ids = example_ids(model)
    first = ids(5)
    second = [(first[-1] + 1) % config.vocab_size, *ids(2)]
    pair = Example(ids(4), [Branch(first), Branch(second)])
    examples = [Example(ids(1), [Branch(ids(2))]), pair, Example(ids(7), [Branch(ids(3))])]

    limit = min(max_length or math.inf, getattr(config, "max_position_embeddings", None) or math.inf)
    if spans := [size for size in attention_spans(model) if size < limit]:
        # with two answers, because in the shared layout the index of a token in the row then differs from its position
        prompt = ids(int(max(1, min(max(spans) + 4, limit - 12))))
        examples.append(Example(prompt, [Branch(ids(12)), Branch(ids(12))]))

    if vision_inputs is not None:
        image = noise_image()
        text = [i for i in ids(30) if i not in vision_inputs.reader.token_ids]
        prompt = [*text[:2], *vision_inputs.reader.expansion_ids(image), *text[2:4]]
        examples.append(Example(prompt, [Branch(text[4:8]), Branch(text[8:10])], images=[image]))
    if forward.is_reward_model(model):
        return [replace(e, branches=[branch_with_reward(branch.ids) for branch in e.branches]) for e in examples]
    return examples


def passes_parity_check(model: nn.Module, layout: str, device: torch.device | str, **options: Any) -> bool:
    """Return whether a model scores in a layout as its own forward does. All ranks return the result of the first one.

    Args:
        model: Model after `enable_scoring`.
        layout: `shared`, `packed` or `padded`.
        device: Device of the batch.
        options: Further arguments of `parity_error`.
    """
    subject = f"layout {layout}"

    def measure(in_float32: bool) -> float:
        return parity_error(model, layout, device, in_float32=in_float32, **options)

    passes = is_within_tolerance(measure, (tolerance(forward.causal_lm(model)), HALF_PRECISION_TOLERANCE), subject)
    if has_varlen_kernel(torch.device(device)):  # it does not support float32, so that the first check has not run it
        passes &= is_within_tolerance(measure, (None, HALF_PRECISION_TOLERANCE), subject)
    [passes] = broadcast_object_list([passes])
    return passes


def tolerance(model: PreTrainedModel) -> float:
    """Return the largest acceptable `parity_error` of a model.

    It is small for rounding in float32, larger for operations that round to fewer bits inside `InFloat32`, and largest
    for int8 and FlashAttention.
    """
    if getattr(model, "is_loaded_in_8bit", False) or "flash" in (model.config._attn_implementation or ""):
        return LOW_PRECISION_TOLERANCE
    exact = model.dtype == torch.float32 and not getattr(model, "is_quantized", False)
    return 1e-3 if exact and model.device.type == "cpu" and not torch.is_autocast_enabled("cpu") else 0.02
