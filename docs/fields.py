"""hf_posttrain/recipe/fields.json and recipes/schema.json, written from the classes of the installed packages: python
docs/fields.py (or make fields).

fields.json has names, types and defaults of the fields of every method's Config and of peft.LoraConfig, so that the
keys of a recipe are checked without importing torch. A method that it lacks is imported instead, which takes longer.
schema.json is the JSON Schema of a recipe, for editors. A test fails if a file differs from what this script would
write of the methods that fields.json has.
"""

import json
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hf_posttrain.methods import METHODS
from hf_posttrain.recipe.fields import FILE, TYPES, Fields, choices, fields_of, lora_fields, train_fields, union_members
from hf_posttrain.recipe.schema import recipe_schema
from hf_posttrain.trainer.config import PostTrainConfig

SCHEMA = Path(__file__).parents[1] / "recipes" / "schema.json"


def table(fields: Fields) -> dict[str, Any]:
    """{name: (types, default)}: a type that has no name in TYPES is "any", a default that is no JSON is null."""
    names = {kind: name for name, kind in TYPES.items()}
    found = {}
    for name, (annotation, default) in fields.items():
        default = getattr(default, "value", default)  # of an enum
        plain = isinstance(default, str | int | float | list | dict)
        kinds = [choices(kind) or names.get(kind, "any") for kind in union_members(annotation)]
        found[name] = (kinds, default if plain else None)
    return found


def text(methods: Iterable[str] = METHODS) -> str:
    """What the file should hold, one line a field; of a method, what is its own or differs from PostTrainConfig."""
    shared = table(fields_of(PostTrainConfig))
    tables = {"versions": {name: version(name) for name in ("transformers", "peft")}, "train": shared}
    for method in methods:
        own = table(train_fields(method, from_class=True))
        tables[f"train.{method}"] = {name: field for name, field in own.items() if shared.get(name) != field}
    tables["model.lora"] = table(lora_fields(from_class=True))
    sections = []
    for section, fields in tables.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(field)}" for name, field in fields.items()]
        sections.append(f"{json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def schema_text() -> str:
    """What schema.json should hold."""
    return json.dumps(recipe_schema(), indent=1) + "\n"


def main() -> int:
    """Write the files anew."""
    FILE.write_text(text(), encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
