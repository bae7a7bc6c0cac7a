"""The tables of options in these pages, written from the dataclasses: python docs/options.py (or make docs).

    <!-- options DPOConfig -->   a row for each field that the class declares: name, default and help text as in the
    <!-- end -->                 source; the last column is the page's own, and is kept by the name of the option
    <!-- group opd rollouts -->  a row for each option of a group of options of a method, with the kinds that have it
    <!-- end -->
    <!-- conflicts all -->       the features that cannot be combined, and why
    <!-- end -->
    <!-- shared DPOConfig -->    what the class has beyond those from PostTrainConfig, as one paragraph
    <!-- end -->

A test fails where a page is not what this script would write, or where a last column is empty.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_posttrain.capabilities import CONFLICTS, Conflict
from hf_posttrain.methods import METHODS, config_class
from hf_posttrain.methods.distillation import DistillationConfig
from hf_posttrain.methods.sft import SupervisedOptions
from hf_posttrain.models.config import ModelSection, TeacherSection
from hf_posttrain.recipe.sections import Source
from hf_posttrain.rounds.config import PairSection, RoundsSection
from hf_posttrain.rounds.judges.config import JudgeSection
from hf_posttrain.trainer.config import PostTrainConfig, ReferenceOptions

HERE = Path(__file__).parent
CONFIGS = [config_class(method) for method in METHODS.values()]
CLASSES = {
    cls.__name__: cls
    for cls in (
        *CONFIGS,
        PostTrainConfig,
        ReferenceOptions,
        SupervisedOptions,
        DistillationConfig,
        ModelSection,
        TeacherSection,
        Source,
        RoundsSection,
        PairSection,
        JudgeSection,
    )
}
_HEAD = "| option | default | meaning | change it when |\n|---|---|---|---|\n"
_GROUP_HEAD = "| option | default | meaning |\n|---|---|---|\n"
_PART = re.compile(r"(<!-- (options|shared|group|conflicts) ([\w ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def declared(cls: type) -> Iterator[tuple[str, str]]:
    """(name, help text) of each field in the body of a dataclass."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in cls.__annotations__:
        if name in fields and "help" in fields[name].metadata:
            yield name, fields[name].metadata["help"]


def default(cls: type, name: str) -> str:
    """The default of a field as a recipe writes it."""
    [field] = [field for field in dataclasses.fields(cls) if field.name == name]
    if field.default is field.default_factory is dataclasses.MISSING:
        return "needed"
    given: Any = field.default_factory() if field.default is dataclasses.MISSING else field.default
    if isinstance(given, list) and len(given) == 1:
        [given] = given
    if dataclasses.is_dataclass(given):  # a section of its own
        given = {}
    text = given if isinstance(given, str) else json.dumps(given)
    return f"`{re.sub(r'e-0', 'e-', text)}`"


def table(cls: type, before: str) -> str:
    """The options that `cls` declares, their last column from the table that was there before."""
    rows = [re.split(r"(?<!\\)\|", line) for line in before.splitlines() if line.startswith("| `")]
    kept = {row[1].strip(): row[4].strip() for row in rows}
    lines = []
    for name, meaning in declared(cls):
        cells = (f"`{name}`", default(cls, name), meaning.replace("|", "\\|"), kept.get(f"`{name}`", ""))
        lines.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(lines)


def paragraph(cls: type) -> str:
    """The options that `cls` has from PostTrainConfig and does not declare anew."""
    own = {name for name, _ in declared(cls)}
    shared = [f"`{name}` ({default(cls, name)})" for name, _ in declared(PostTrainConfig) if name not in own]
    return f"{', '.join(shared)}.\n"


def group_table(method: str, key: str) -> str:
    """The options of all kinds of a group; an option of some kinds names them."""
    group = METHODS[method].groups[key]
    lines = {}
    for kind in group.kinds.values():
        for field in dataclasses.fields(kind):
            owners = group.kinds_with_option(field.name)
            of_kinds = f" ({', '.join(f'`{owner}`' for owner in owners)})" if len(owners) < len(group.kinds) else ""
            meaning = field.metadata["help"].replace("|", "\\|")
            cells = f"`{key}.{field.name}`{of_kinds}", default(kind, field.name), meaning
            lines[f"{field.name} {cells[1]}"] = f"| {' | '.join(cells)} |\n"
    return _GROUP_HEAD + "".join(lines.values())


def conflict_table() -> str:
    """The pairs of features that cannot be combined, those with one reason in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for first, second, reason, fix in CONFLICTS:
        text = reason if fix == Conflict._field_defaults["fix"] else f"{reason}. {fix}"
        rows.setdefault((first, text), []).append(second)
    lines = [f"| {first} | {', '.join(others)} | {text} |\n" for (first, text), others in rows.items()]
    return "| feature | cannot be combined with | because |\n|---|---|---|\n" + "".join(lines)


def written(page: str) -> str:
    """A page with its tables and paragraphs as they should be."""

    def part(found: re.Match[str]) -> str:
        begin, kind, name, inner, end = found.groups()
        if kind == "conflicts":
            return begin + conflict_table() + end
        if kind == "group":
            return begin + group_table(*name.split()) + end
        cls = CLASSES[name]
        return begin + (table(cls, inner) if kind == "options" else paragraph(cls)) + end

    return _PART.sub(part, page)


def main() -> int:
    """Write every page anew."""
    for path in sorted(HERE.rglob("*.md")):
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
