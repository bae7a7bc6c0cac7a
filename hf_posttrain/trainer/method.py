"""Method: what the rest of the package knows of a training method, as one row of the table in `methods`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..data.kinds import RowKind

Problem = tuple[tuple[str, ...], str]  # names of the fields that are wrong, the one to change first; and a sentence


@dataclass(frozen=True)
class Paper:
    """A paper on arXiv."""

    key: str  # of its BibTeX entry
    arxiv: str
    year: int
    title: str
    authors: str  # with "and" between them


@dataclass(frozen=True)
class Limit:
    """What a number must keep to."""

    holds: Callable[[float], bool]
    otherwise: str  # the end of a sentence about a number that does not


COUNT = Limit(lambda n: n >= 1, "must be at least 1")
NOT_NEGATIVE = Limit(lambda x: 0 <= x < float("inf"), "must be at least 0")
LARGEST = 1e6
"""Largest factor of a loss, and the largest that is divided by. Adam squares gradients, and float32 ends at 3e38."""
COEFFICIENT = Limit(lambda x: 0 <= x <= LARGEST, "must be from 0 to 1e6")
POSITIVE = Limit(lambda x: 1 / LARGEST <= x <= LARGEST, "must be positive, from 1e-6 to 1e6")
ABOVE_ZERO = Limit(lambda x: 1e-38 <= x < float("inf"), "must be at least 1e-38, the smallest number of float32")
SHARE = Limit(lambda x: 0 <= x <= 1, "is not in [0, 1]")
SOME = Limit(lambda x: 0 < x <= 1, "is not in (0, 1]")
BELOW_ONE = Limit(lambda x: 0 <= x < 1, "is not in [0, 1)")


@dataclass(frozen=True)
class Method:
    """A training method."""

    name: str  # in recipes; its module, Config and Trainer are named after it
    title: str  # in words, for pages and cards
    rows: RowKind  # what it trains on
    unit: Literal["tokens", "examples"]  # what its loss is averaged over
    key_metrics: Mapping[str, str]  # key of the log -> name on the progress bar; what tells best if it works is first
    second: Literal["", "reference", "teacher"] = ""  # the frozen model that scores alongside the policy
    paper: Paper | None = None  # where it comes from
    loss_papers: Mapping[str, str] = field(default_factory=dict)  # loss_type with a paper of its own -> papers.yaml
    limits: Mapping[str, Limit] = field(default_factory=dict)  # option -> what its number must keep to; null is allowed
    rules: tuple[Callable[[Any], Iterable[Problem]], ...] = ()  # what the Config's fields, as given, exclude
    symptoms: Mapping[str, str] = field(default_factory=dict)
    """Name in `watch.symptoms` -> what to change when a run shows it. Symptoms that are not here do not apply."""
    sequence_parallel: bool = False  # can its rows be cut over ranks?

    @property
    def module(self) -> str:
        return f"hf_posttrain.methods.{self.name}"

    @property
    def config_name(self) -> str:
        return f"{self.name.upper()}Config"

    @property
    def trainer_name(self) -> str:
        return f"{self.name.upper()}Trainer"
