"""Method: what the rest of the package knows of a training method, as one row of the table in `methods`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..data.row_schema import RowKind
from .limits import Limit, Problem
from .option_group import OptionGroup


@dataclass(frozen=True)
class Paper:
    """A paper on arXiv."""

    key: str  # of its BibTeX entry
    arxiv: str
    year: int
    title: str
    authors: str  # with "and" between them


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
    groups: Mapping[str, OptionGroup] = field(default_factory=dict)  # option that is a group -> its kinds
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
