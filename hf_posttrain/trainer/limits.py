"""What single values of a Config must keep to: numbers within limits, and texts among names.

LIMITS      {"shared" or method: {field: Limit}}; None is always allowed
beyond      the problems of values outside them
one_of      the problem of a text that is none of the names allowed
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ..recipe.fields import nearest

Problem = tuple[tuple[str, ...], str]
"""Names of the fields, the one to change first; and a sentence."""


class Limit(NamedTuple):
    """What a number must keep to, and the end of a sentence about one that does not."""

    holds: Callable[[float], bool]
    otherwise: str


_COUNT = Limit(lambda n: n >= 1, "must be at least 1")
_NOT_NEGATIVE = Limit(lambda x: 0 <= x < float("inf"), "must be at least 0")
_POSITIVE = Limit(lambda x: 0 < x < float("inf"), "must be positive")
_SHARE = Limit(lambda x: 0 <= x <= 1, "is not in [0, 1]")
_DECAY = Limit(lambda x: 0 <= x < 1, "is not in [0, 1)")
_SEED = Limit(lambda n: 0 <= n < 2**32, "is no seed: they are 0 to 4294967295")

LIMITS: dict[str, dict[str, Limit]] = {
    "shared": {
        "per_device_train_batch_size": _COUNT, "per_device_eval_batch_size": _COUNT,
        "gradient_accumulation_steps": _COUNT, "eval_accumulation_steps": _COUNT, "dataset_num_proc": _COUNT,
        "torch_empty_cache_steps": _COUNT, "dataloader_num_workers": _NOT_NEGATIVE, "learning_rate": _NOT_NEGATIVE,
        "weight_decay": _NOT_NEGATIVE, "warmup_steps": _NOT_NEGATIVE, "max_grad_norm": _NOT_NEGATIVE,
        "neftune_noise_alpha": _NOT_NEGATIVE, "router_aux_loss_coef": _NOT_NEGATIVE, "adam_epsilon": _NOT_NEGATIVE,
        "adam_beta1": _DECAY, "adam_beta2": _DECAY, "seed": _SEED, "data_seed": _SEED,
        "max_steps": Limit(lambda n: n == -1 or n > 0, "trains nothing: steps to train, or -1 for num_train_epochs"),
        "max_length": Limit(lambda n: n >= 2, "is too short: a prompt and a completion need 2 tokens at least"),
    },
    "dpo": {
        "label_smoothing": _DECAY, "beta": _POSITIVE, "nll_coef": _NOT_NEGATIVE, "precompute_ref_batch_size": _COUNT,
    },
    "kto": {"beta": _POSITIVE, "precompute_ref_batch_size": _COUNT},
    "kd": {"kd_coef": _SHARE, "temperature": _POSITIVE, "precompute_teacher_top_k": _COUNT},
    "opd": {
        "lmbda": _SHARE, "discount": _SHARE, "temperature": _POSITIVE, "max_completion_length": _COUNT,
        "num_generations": _COUNT, "generation_batch_size": _COUNT,
    },
}  # fmt: skip


def beyond(kind: str, values: Any) -> Iterator[Problem]:
    """The numbers of `values` that do not keep to LIMITS[kind]."""
    for name, limit in LIMITS.get(kind, {}).items():
        value = getattr(values, name, None)
        if isinstance(value, int | float) and not limit.holds(value):
            yield (name,), f"{name}={value:g} {limit.otherwise}"


def one_of(name: str, value: Any, allowed: Iterable[str]) -> Iterator[Problem]:
    """A problem where `value` of the field `name` is none of those allowed, with the nearest."""
    allowed = list(allowed)
    if value not in allowed:
        hint = nearest(str(value), allowed, listed=False)
        yield (name,), f"{name}={value!r} is not one of {', '.join(allowed)}{hint}"
