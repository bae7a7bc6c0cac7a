"""The JSON Schema of recipes accepts and rejects the names and types that `load_recipe` does."""

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from test_rules import PINNED

from hf_posttrain import run
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS, config_class
from hf_posttrain.recipe.fields import train_fields, union_members
from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.recipe.schema import recipe_schema
from hf_posttrain.recipe.yaml_tree import read_tree, write_tree
from hf_posttrain.trainer.rules import trl_values_without_effect

REPOSITORY = Path(__file__).parents[2]
FOLDERS = [REPOSITORY / "recipes" / folder for folder in (".", "tiny", "real")]
RECIPES = [file for folder in FOLDERS for file in sorted(folder.glob("*.yaml"))]
OF_NAMES_AND_TYPES = re.compile(
    r"unknown (key|section) |does not exist: | is missing$|(?<!kwargs\.a) is not an option"
    r"|: [\w.]+ must be (?!above|at least|in )"
    r"| requires [\w.]+ of kind| must map expressions| requires [\w.]+, which is one of "
    # code of a model may define other implementations of attention
    r"|: (?!\S*attn_implementation)[\w.]+=.* is not one of "
)
VALUES = [None, True, 0, 3, -2, 1.5, "5e-7", "12", "yes", "text", [], ["a"], [1], {}, {"a": 1}, {"kind": "none"}]
"""Values that replace those of a recipe."""


@pytest.fixture(scope="module")
def validator():
    schema = recipe_schema()
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def references(node):
    """The value of each $ref in a schema."""
    if isinstance(node, dict):
        yield from [node["$ref"]] if "$ref" in node else []
        node = [*node.values()]
    for part in node if isinstance(node, list) else []:
        yield from references(part)


def test_each_reference_has_a_definition():
    schema = recipe_schema()
    assert len({*references(schema)}) > 100
    for reference in {*references(schema)}:
        part = schema
        for name in reference.removeprefix("#/").split("/"):
            part = part[name]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipes_of_the_repository_are_valid(file, validator):
    assert [error.message for error in validator.iter_errors(read_tree(file)[0])] == []


@PINNED
def test_the_shipped_schema_is_that_of_the_installed_packages(validator):
    shipped = json.loads((REPOSITORY / "recipes/schema.json").read_text(encoding="utf-8"))
    assert shipped == json.loads(json.dumps(validator.schema)), "run `make fields`"


def test_each_method_has_its_own_options(validator):
    recipe = {"method": "dpo", "model": {"name_or_path": "m"}, "data": {"train": {"path": "f"}}, "train": {"beta": 0.1}}
    assert validator.is_valid(recipe)
    assert not validator.is_valid(recipe | {"method": "sft"})
    assert validator.is_valid(recipe | {"method": "sft", "train": {"beta": None}})


@pytest.mark.parametrize("method", METHODS)
def test_values_of_trl_that_have_no_effect_are_valid(method, validator, tmp_path):
    recipe = {"method": method, "model": {"name_or_path": "m"}, "data": {"train": {"path": "f"}}}
    recipe |= {"teacher": {"name_or_path": "t"}} if METHODS[method].second == "teacher" else {}
    tested = 0
    for name, values in trl_values_without_effect(METHODS[method].config_name).items():
        for value in () if name in train_fields(method) else values:
            changed = recipe | {"train": {"output_dir": "o", name: value}}
            assert verdict(changed, tmp_path / "recipe.yaml") == (True, "")
            assert validator.is_valid(changed), (name, value)
            tested += 1
    assert tested > 40


def mutants(seed, count):
    """Yield recipes with a changed value, an additional or misspelled key, or without a key."""
    draw = random.Random(seed)
    # fields.json does not know the types of a few options of transformers
    options = {
        name: [option for option, field in train_fields(name).items() if Any not in union_members(field.kind)]
        for name in METHODS
    }
    trees = [read_tree(file)[0] for file in RECIPES]
    for _ in range(count):
        tree = copy.deepcopy(draw.choice(trees))
        section = tree
        while (inner := [value for value in section.values() if isinstance(value, dict)]) and draw.random() < 0.7:
            section = draw.choice(inner)
        key = draw.choice([*section])
        change = draw.choice(("value", "value", "value", "option", "option", "trl", "name", "missing"))
        if change == "value":
            section[key] = draw.choice(VALUES)
        elif change == "option":
            tree.setdefault("train", {})[draw.choice(options[tree["method"]])] = draw.choice(VALUES)
        elif change == "trl":
            name, values = draw.choice([*trl_values_without_effect(METHODS[tree["method"]].config_name).items()])
            tree.setdefault("train", {})[name] = draw.choice([*values, *values, *VALUES])
        elif change == "name":
            section[draw.choice((f"{key}s", "colour", key.upper()))] = section.pop(key)
        else:
            del section[key]
        yield tree


def verdict(tree, file):
    """Return whether `load_recipe` accepts names and types, and its message."""
    file.write_text(write_tree(tree), encoding="utf-8")
    try:
        load_recipe(file)
    except InputError as error:
        return not OF_NAMES_AND_TYPES.search(str(error)), str(error)
    return True, ""


def test_verdicts_are_those_of_load_recipe(validator, tmp_path):
    counts = {True: 0, False: 0}
    wrong = []
    for tree in mutants(0, 600):
        accepted, message = verdict(tree, tmp_path / "recipe.yaml")
        counts[accepted] += 1
        if validator.is_valid(tree) != accepted:
            errors = [error.message for error in validator.iter_errors(tree)]
            wrong.append(f"{write_tree(tree)}\nload_recipe: {message}\nschema: {errors}")
    assert not wrong, f"{len(wrong)} of {sum(counts.values())}\n" + "\n\n".join(wrong[:5])
    assert counts[False] > 200
    assert counts[True] > 100


@pytest.mark.parametrize(
    ("method", "option", "valid"),
    [("sft", "loss_type", "eaft"), ("sft", "train_on", "last"), ("sft", "layout", "packed"),
     ("sft", "reasoning", "keep"), ("dpo", "loss_type", "apo_zero"), ("dpo", "loss_type", ["sigmoid", "sft"]),
     ("kto", "loss_type", "bco"), ("dpo", "f_divergence_type", "forward_kl"), ("cpo", "loss_type", "simpo"),
     ("kd", "divergence", "jsd"), ("opd", "loss_type", "policy_gradient")],
)  # fmt: skip
def test_names_of_losses_and_layouts_are_listed(method, option, valid, validator):
    """Editors complete them, and mark a name that `--check` rejects."""
    part = {"method": method, "model": {"name_or_path": "m"}, "data": {"train": {"path": "rows.jsonl"}}}
    part |= {"teacher": {"name_or_path": "t"}} if method in ("kd", "opd") else {}
    unknown = [*valid[:-1], "unknown"] if isinstance(valid, list) else "unknown"
    for value, expected in ((valid, True), (unknown, False)):
        assert validator.is_valid(part | {"train": {"output_dir": "out", option: value}}) is expected
    config = config_class(METHODS[method])
    with pytest.raises(InputError, match=f"{option}.*'unknown'"):
        config(output_dir="out", **{option: unknown})


def test_help_texts_and_defaults_are_in_it(validator):
    options = validator.schema["definitions"]["train"]["properties"]
    assert options["learning_rate"]["default"] == 5e-5
    for method in METHODS:
        section = validator.schema["definitions"][f"train.{method}"]["properties"]
        described = [name for name, option in section.items() if option.get("description") or "$ref" in option]
        assert len(described) > 100
    assert all(option.get("description") for option in options.values())


def test_the_command_prints_it(validator, capsys):
    assert run.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == validator.schema
