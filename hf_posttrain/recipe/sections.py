"""The sections of a recipe as dataclasses; `models.config` has that of a model."""

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..data.row_schema import PROMPTS
from ..methods import METHODS
from ..models.config import ModelSection, TeacherSection
from ..options import option
from ..rounds.config import RoundsSection
from ..trainer.method_spec import Method
from .yaml_tree import place_of, write_tree

_NAMES: Any = Literal[tuple(METHODS)]


@dataclass
class Source:
    """Rows from one place."""

    path: str = option(
        help="A .jsonl, .json, .csv or .parquet file, a folder (of files or saved to disk) or a hub name."
    )
    name: str | None = option(None, "The hub data set's configuration.")
    split: str = option("train", "Split of a hub data set or saved DatasetDict; slices as `train[:90%]` are allowed.")
    columns: dict[str, str] | None = option(
        None, "Our column: the data set's column, such as {prompt: question, completion: answer}."
    )
    limit: int | None = option(None, "Take the first so many rows.")
    weight: float = option(
        1.0, "How many times its rows count (0.5: half of them, drawn at random); the share of a stream."
    )
    streaming: bool = option(False, "Read rows as training goes; never all of them at once.")


@dataclass
class DataSection:
    """What is trained and evaluated on; the sources of a list are mixed by weight."""

    train: Source | list[Source] = option(help="Training rows.")
    eval: Source | list[Source] | None = option(None, "Evaluation rows.")

    def splits(self) -> Iterator[tuple[str, Source | list[Source]]]:
        """("train", sources) and, if there are any, ("eval", sources)."""
        yield "train", self.train
        if self.eval is not None:
            yield "eval", self.eval


@dataclass
class Recipe:
    """A whole run."""

    method: _NAMES = option(help="The training method.")
    model: ModelSection = option(help="The policy or student.")
    data: DataSection = option(help="Training and evaluation rows.")
    teacher: TeacherSection | None = option(None, "The teacher, for methods with one.")
    teachers: dict[str, TeacherSection] | None = option(
        None, "Several teachers by name, in the place of one: a row's column `teacher` says which is its own."
    )
    rounds: RoundsSection | None = option(
        None, "Train on the model's own judged answers, in rounds; the data hold prompts."
    )
    train: dict[str, Any] = option(help="Arguments of the method's Config, as given.", default_factory=dict)
    # not keys of a recipe
    path: Path = field(default=Path("recipe"), metadata={"hidden": True})
    """File that it was read from."""
    places: dict[str, str] = field(default_factory=dict, repr=False, compare=False, metadata={"hidden": True})
    """Place of each dotted key: file:line or "command line"."""
    checked: dict[str, Any] | None = field(default=None, repr=False, compare=False, metadata={"hidden": True})
    """The train section as the rules of its method have checked it."""

    def where(self, key: str) -> str:
        """The place of a dotted key, or of the nearest key above it."""
        return place_of(self.places, key)

    @property
    def reads(self) -> Method:
        """The method's row of the table, with the kind of rows that the data hold: in rounds they are prompts."""
        method = METHODS[self.method]
        return dataclasses.replace(method, rows=PROMPTS) if self.rounds else method

    def models(self) -> Iterator[tuple[str, ModelSection]]:
        """("model", section) and the same of each teacher whose weights are loaded: no server, nor the student."""
        yield "model", self.model
        yield from ((key, section) for key, section in self.teacher_sections() if not (section.url or section.self))

    def teacher_sections(self) -> Iterator[tuple[str, TeacherSection]]:
        """("teacher", section) of the teacher, or ("teachers.NAME", section) of each of several."""
        if self.teacher:
            yield "teacher", self.teacher
        for name, section in (self.teachers or {}).items():
            yield f"teachers.{name}", section

    def sources(self) -> Iterator[tuple[str, Source]]:
        """(dotted key, source) of everything that is read."""
        for name, given in self.data.splits():
            for number, source in enumerate(given if isinstance(given, list) else [given]):
                yield f"data.{name}.{number}" if isinstance(given, list) else f"data.{name}", source

    def to_dict(self) -> dict[str, Any]:
        """The recipe as resolved: every key of every section; `train` holds the given ones, without secrets."""
        tree = dataclasses.asdict(self)
        if self.rounds:
            tree["rounds"]["sampler"] = self.rounds.sampler.to_dict()
        tree["train"] = {name: value for name, value in tree["train"].items() if not name.endswith("_token")}
        names = (
            "method",
            "model",
            "teacher",
            *(["teachers"] if self.teachers else []),
            "data",
            *(["rounds"] if self.rounds else []),
            "train",
        )
        return {name: tree[name] for name in names}

    def to_yaml(self, defaults: Mapping[str, Any] | None = None) -> str:
        """The same as YAML, which `load_recipe` reads back; after the given options of training those of `defaults`."""
        text = f"# resolved from {self.path}\n" + write_tree(self.to_dict())
        if defaults:
            text += "  # not given, with the defaults of the version that trained\n"
            text += textwrap.indent(write_tree(dict(defaults)), "  ")
        return text
