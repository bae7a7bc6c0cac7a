"""Record type of the registry of training methods in `methods`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..data.row_schema import RowKind
from ..options import OptionValues
from .limits import Limit, Problem
from .option_group import OptionGroup


@dataclass(frozen=True)
class Paper:
    """A paper on arXiv.

    Attributes:
        key: Key of the BibTeX entry.
        arxiv: Identifier on arXiv.
        year: Year of publication.
        title: Title.
        authors: Names of the authors, joined with "and".
    """

    key: str
    arxiv: str
    year: int
    title: str
    authors: str


@dataclass(frozen=True)
class Method:
    """A training method.

    Attributes:
        name: Name in recipes. The module, the Config and the Trainer are named after it.
        title: Full name, for reports and model cards.
        rows: Kind of rows that the method trains on.
        unit: Unit over which the loss is averaged.
        key_metrics: Log keys with their names on the progress bar. The best indicator of success is first.
        second: The frozen model that scores batches in addition to the policy.
        paper: Paper that introduced the method.
        loss_papers: Keys in papers.yaml of the `loss_type` values that have another paper.
        limits: Limits of numeric options. A value of None is always valid.
        groups: Options that are groups, with their kinds.
        rules: Functions that yield the problems of the options that a Config is built from.
        symptoms: Names in `monitoring.symptoms`, with the change that fixes a run with the symptom. Other symptoms do
            not apply to the method.
        sequence_parallel: Whether rows can be sharded over ranks.
        head: Last layer of the model that is trained, see `ModelSection.head`.
        initial_rate: Learning rate of all weights that `init` writes, by default that of the Config.
        class_prefix: First part of the names of Config and Trainer, by default the name in capital letters.
    """

    name: str
    title: str
    rows: RowKind
    unit: Literal["tokens", "examples"]
    key_metrics: Mapping[str, str]
    second: Literal["", "reference", "teacher"] = ""
    paper: Paper | None = None
    loss_papers: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)
    groups: Mapping[str, OptionGroup] = field(default_factory=dict)
    rules: tuple[Callable[[OptionValues], Iterable[Problem]], ...] = ()
    symptoms: Mapping[str, str] = field(default_factory=dict)
    sequence_parallel: bool = False
    head: Literal["language", "score"] = "language"
    initial_rate: float | None = None
    class_prefix: str = ""

    @property
    def module(self) -> str:
        """Dotted name of the module."""
        return f"hf_posttrain.methods.{self.name}"

    @property
    def config_name(self) -> str:
        """Name of the Config class."""
        return f"{self.class_prefix or self.name.upper()}Config"

    @property
    def trainer_name(self) -> str:
        """Name of the Trainer class."""
        return f"{self.class_prefix or self.name.upper()}Trainer"
