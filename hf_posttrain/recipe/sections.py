"""Sections of a recipe as dataclasses. The section of a model is in `models.config`."""

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
from .yaml_tree import location_of, write_tree

_NAMES: Any = Literal[tuple(METHODS)]


@dataclass
class Source:
    """A source of rows."""

    path: str = option(
        help="A .jsonl, .json, .csv or .parquet file, a folder or a hub name. "
        "A folder contains such files or a saved dataset."
    )
    name: str | None = option(None, "Configuration of the hub dataset.")
    split: str = option(
        "train", "Split of the data. That of a file is `train`. Slices such as `train[:90%]` are allowed."
    )
    columns: dict[str, str] | None = option(
        None, "Columns that have other names in the data, such as {prompt: question, completion: answer}."
    )
    limit: int | None = option(None, "Number of rows to read from the start. By default all.")
    weight: float = option(
        1.0, "Number of times that its rows are used (0.5: a random half), or the share of a stream in a mixture."
    )
    streaming: bool = option(False, "Read rows during training, instead of all of them before.")


@dataclass
class DataSection:
    """Rows for training and evaluation. A list of sources is mixed by weight."""

    train: Source | list[Source] = option(help="Training rows.")
    eval: Source | list[Source] | None = option(None, "Evaluation rows.")

    def splits(self) -> Iterator[tuple[str, Source | list[Source]]]:
        """Yield ("train", sources) and, if there are evaluation rows, ("eval", sources)."""
        yield "train", self.train
        if self.eval is not None:
            yield "eval", self.eval


@dataclass
class Recipe:
    """A run."""

    method: _NAMES = option(help="The training method.")
    model: ModelSection = option(help="The policy or student.")
    data: DataSection = option(help="Training and evaluation rows.")
    teacher: TeacherSection | None = option(None, "The teacher, for methods with one.")
    teachers: dict[str, TeacherSection] | None = option(
        None, "Several teachers by name, in place of `teacher`. The column `teacher` names the teacher of each row."
    )
    rounds: RoundsSection | None = option(
        None, "Train in rounds on judged answers of the model itself. The data contain prompts."
    )
    train: dict[str, Any] = option(help="Arguments of the method's Config.", default_factory=dict)

    # not keys of a recipe
    path: Path = field(default=Path("recipe"), metadata={"hidden": True})
    """File that the recipe was read from."""
    locations: dict[str, str] = field(default_factory=dict, repr=False, compare=False, metadata={"hidden": True})
    """Location of each dotted key, file:line or "command line"."""
    validated_train: dict[str, Any] | None = field(default=None, repr=False, compare=False, metadata={"hidden": True})
    """The train section that was validated by the rules of its method."""

    def where(self, key: str) -> str:
        """Return the location of a dotted key, or of its closest parent with a location."""
        return location_of(self.locations, key)

    @property
    def data_method(self) -> Method:
        """The method with the row kind of the data, which is prompts in rounds."""
        method = METHODS[self.method]
        return dataclasses.replace(method, rows=PROMPTS) if self.rounds else method

    def models(self) -> Iterator[tuple[str, ModelSection]]:
        """Yield ("model", section), and (key, section) of each teacher whose weights are loaded.

        Teachers on a server and the student as its own teacher are left out.
        """
        yield "model", self.model
        yield from ((key, section) for key, section in self.teacher_sections() if not (section.url or section.self))

    def teacher_sections(self) -> Iterator[tuple[str, TeacherSection]]:
        """Yield ("teacher", section) of the teacher, or ("teachers.NAME", section) of each of several teachers."""
        if self.teacher:
            yield "teacher", self.teacher
        for name, section in (self.teachers or {}).items():
            yield f"teachers.{name}", section

    def sources(self) -> Iterator[tuple[str, Source]]:
        """Yield (dotted key, source) of every source."""
        for name, sources in self.data.splits():
            for number, source in enumerate(sources if isinstance(sources, list) else [sources]):
                yield f"data.{name}.{number}" if isinstance(sources, list) else f"data.{name}", source

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved recipe with every key of every section.

        The section `train` has only the keys that are set, without secrets.
        """
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
        """Return the resolved recipe as YAML, which `load_recipe` can read.

        Args:
            defaults: Options to append to the section `train`.
        """
        text = f"# resolved from {self.path}\n" + write_tree(self.to_dict())
        if defaults:
            text += "  # not set; these are the defaults of the version that trained\n"
            text += textwrap.indent(write_tree(dict(defaults)), "  ")
        return text
