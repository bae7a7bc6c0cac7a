"""2,000 mutated recipes: each is refused with exit code 2 and one line, or it would run; never a traceback.

All recipes but those of the experiments on real models, with small local models and rows, are changed at random: a
value of another kind, a key renamed, moved, doubled or gone, sections of other recipes, broken YAML. Each goes
through the whole command in this process, up to the point at which a run would write files and load weights. The seed
of a mutation is its number.
"""

import copy
import json
import math
import os
import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hub_for_tests import ROWS
from models_for_tests import tiny_model
from tokenizers_for_tests import QWEN3, byte_tokenizer
from vision_for_tests import processor_of, seeing

from hf_posttrain import run
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS
from hf_posttrain.models.config import ModelSection
from hf_posttrain.recipe import build, fields
from hf_posttrain.recipe.fields import fields_of, lora_fields, train_fields
from hf_posttrain.recipe.sections import Source
from hf_posttrain.recipe.yaml_tree import write_tree

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted(path for path in (REPOSITORY / "recipes").rglob("*.yaml") if path.parent.name != "real")
MUTATIONS, QUICK = 2000, 100
TRAIN = sorted({name for method in METHODS for name in train_fields(method)})
ODD = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**64, 10**40, 0.0, 0.5, 1e-320, 1e308, math.nan, math.inf, -math.inf,
    "", " ", "\n", "a\tb", "true", "null", "nan", "1e400", "-1", "5e-7", "1_000", "0x10", "é", "\u202e", "\x7f", "💥",
    "9" * 400, "x" * 5000, "x/" * 200, ".", "~", "~nobody/x", "${HOME}", "$NOT_SET/x", "/dev/null", "/proc/none",
    "rows.jsonl", "student", "train[:50%]", "train[", "%s%n", "{{7*7}}", "http://localhost:1", "s3://x/y", "auto",
    "all-linear", "steps", "epoch", "best", "no", "cosine", "adamw_torch", "wandb", "all", "none", "vllm", "2020-01-01",
    [], {}, [[]], [{}], {"": ""}, [None], [1, 2], ["a", "b"], ["a", 1, None], {"a": {"b": [1]}}, {1: 2}, {True: 1},
    {"path": "rows.jsonl"}, [{"path": "rows.jsonl"}] * 2, {"r": 8}, {"r": -1}, {"r": "x"}, {"r": 10**30},
]  # fmt: skip
PIECES = [
    *":{}[]&*!|>'\"%@`#,-? \t\\", "\x00", "\x1b[2J", "\ufeff", "\x0b", "\x85", "\u2028", "é", "!!bool ", "!!int ",
    "!!set ", "!!float ", "!!null ", "!!timestamp ", "!!binary ", "<<: ", "? ", "- ", "*a", "&a ", "|\n", "[1,",
    "{a: b", '"\\ud800"',
]  # fmt: skip


class WouldRun(BaseException):
    """Raised where a run would begin to write."""


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """The texts of all recipes, with models and rows that are in the current directory."""
    for seed, name in enumerate(("student", "teacher")):
        tiny_model("qwen3", seed).save_pretrained(tmp_path / name)
        byte_tokenizer(QWEN3).save_pretrained(tmp_path / name)
    seeing("qwen3_vl")[0].save_pretrained(tmp_path / "seeing")
    processor_of("qwen3_vl").save_pretrained(tmp_path / "seeing")
    texts = []
    for path in RECIPES:
        text = path.read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
        student = "seeing" if tree["model"].get("images") else "student"
        renamed = {tree["model"]["name_or_path"]: student, tree["train"]["output_dir"]: "out"}
        renamed |= {tree["teacher"]["name_or_path"]: "teacher"} if "name_or_path" in tree.get("teacher", {}) else {}
        for split in ("train", "eval"):
            if source := tree["data"].get(split):
                file = f"{path.parent.name}_{path.stem}_{split}.jsonl"
                if (REPOSITORY / source["path"]).is_file():
                    lines = (REPOSITORY / source["path"]).read_text().splitlines()[:6]
                else:
                    lines = [json.dumps(ROWS[source["path"]](n)) for n in range(6)]
                (tmp_path / file).write_text("\n".join(lines))
                renamed[source["path"]] = file
        for old, new in sorted(renamed.items(), key=lambda pair: -len(pair[0])):
            text = text.replace(old, new)
        text = re.sub(r"split: [\w\[\]:%]+", "split: train", text)  # a file has no others
        texts.append(text)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return texts


def paths(tree, above=()):
    """Where every key of a tree is."""
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*above, name)
        yield from paths(value, (*above, name))


def mutate_tree(tree, draw):
    """One change, in place."""
    *above, key = draw.choice(list(paths(tree)))
    holder = tree
    for name in above:
        holder = holder[name]
    value, odd, what = holder[key], copy.deepcopy(draw.choice(ODD)), draw.randrange(12)
    train, data = tree.get("train"), tree.get("data")
    if what == 0:
        del holder[key]
    elif what == 1:
        holder[key] = odd
    elif what == 2 and isinstance(holder, dict):
        text, at = str(key), draw.randrange(len(str(key)) + 1)
        new = [text[:at] + "_" + text[at:], text[:at] + text[at + 1 :], text.upper(), f"{text}.x", f"train.{text}"]
        holder[draw.choice(new)] = holder.pop(key)
    elif what == 3:
        holder[key] = draw.choice([[value], {"value": value}, [value, value], str(value), [[[[value]]]]])
    elif what == 4 and isinstance(train, dict):  # a key of any method
        train[draw.choice(TRAIN)] = odd
    elif what in (5, 6) and isinstance(train, dict) and tree.get("method") in [*METHODS]:
        known = train_fields(tree["method"])
        name = draw.choice([*known])
        train[name] = draw.choice([value for value in ODD if fits(known[name], value)] or [None])
    elif what == 7:
        section = tree.setdefault(draw.choice(["model", "teacher"]), {"name_or_path": "teacher"})
        if isinstance(section, dict):
            section[draw.choice([*fields_of(ModelSection)])] = odd
    elif what == 8 and isinstance(data, dict) and isinstance(data.get("train"), dict):
        data[draw.choice(["train", "eval"])] = data["train"] | {draw.choice([*fields_of(Source)]): odd}
    elif what == 9 and isinstance(tree.get("model"), dict):
        tree["model"]["lora"] = {draw.choice([*lora_fields()]): odd, **draw.choice([{}, {"r": 2}])}
    elif what > 9 and isinstance(value, bool | int | float):
        holder[key] = not value if isinstance(value, bool) else draw.choice([value * 2, value + 1, value / 2, -value])
    elif isinstance(tree, dict):
        tree["method"] = draw.choice([*METHODS, "SFT", "ppo", None, 1])


def fits(field, value):
    """Is the value of a kind that the field takes?"""
    try:
        return bool(fields.build_kwargs({"x": field}, {"x": value}, "", lambda key: ""))
    except InputError:
        return False


def mutate_text(text, draw):
    """A change of lines or characters."""
    lines = text.split("\n")
    for _ in range(draw.choice([1, 1, 2, 4])):
        at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
        line, place = lines[at], draw.randrange(len(lines[at]) + 1)
        key, colon, value = line.partition(":")
        lines[at] = draw.choice([
            lines[other], f"  {line}", line[2:], f"\t{line}", line[:place] + draw.choice(PIECES) + line[place:],
            f"{key}{colon} {draw.choice(PIECES)}{value.strip()}", f"{value}{colon}{key}", f"{line}\n{lines[other]}", "",
        ])  # fmt: skip
    return "\n".join(lines)


def mutated(texts, number):
    """The text of a mutated recipe."""
    draw = random.Random(number)
    text = draw.choice(texts)
    if draw.random() < 0.3:
        return mutate_text(text, draw)
    tree = yaml.safe_load(text)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        if isinstance(tree, dict) and tree:
            mutate_tree(tree, draw)
    return write_tree(tree)


def hunt(cases, capsys, monkeypatch):
    """(Counter of what the command did with each text, {number: fault}, files that are left)."""

    def stop(recipe, config):
        raise WouldRun

    monkeypatch.setattr(build, "make_output_dir", stop)
    counts, faults, environment, before = Counter(), {}, dict(os.environ), sorted(Path.cwd().rglob("*"))
    for number, text in cases:
        Path("case.yaml").write_text(text, encoding="utf-8")
        capsys.readouterr()
        try:
            code, found = run.main(["case.yaml"]), "refused"
        except WouldRun:
            code, found = 0, "accepted"
        except BaseException as error:
            code, found = repr(error), "traceback"
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        line = said[0] if said else ""
        if found == "refused" and not (
            code == 2 and len(said) == 1 and line.isprintable() and len(line) < InputError.MAX_LENGTH + 20
        ):
            found = "traceback"
        counts[found] += 1
        if found == "traceback":
            faults[number] = f"{code} {line}"
        os.environ.clear()
        os.environ.update(environment)
    Path("case.yaml").unlink()
    left = [path for path in sorted(Path.cwd().rglob("*")) if path not in before]
    return counts, faults, left


@pytest.mark.slow
def test_recipes_run_where_nothing_is_changed(recipes, capsys, monkeypatch):
    counts, faults, _ = hunt(enumerate(recipes), capsys, monkeypatch)
    served = sum("url: http" in text for text in recipes)  # a server is not there
    assert served == 1
    assert (counts, faults) == ({"accepted": len(RECIPES) - served, "refused": served}, {})


SLOW = [pytest.param(start, marks=pytest.mark.slow) for start in range(QUICK, MUTATIONS, QUICK)]


@pytest.mark.parametrize("start", [0, *SLOW])
def test_a_mutated_recipe_is_refused_in_one_line_or_would_run(recipes, capsys, monkeypatch, start):
    began, cases = time.monotonic(), [(n, mutated(recipes, n)) for n in range(start, start + QUICK)]
    counts, faults, left = hunt(cases, capsys, monkeypatch)
    with capsys.disabled():
        seconds = time.monotonic() - began
        print(f"\nmutated recipes {start} to {start + QUICK - 1}: {dict(counts)} in {seconds:.0f} s")
    assert faults == {}
    assert counts.total() == QUICK
    assert counts["refused"] > QUICK // 3
    assert counts["accepted"] > QUICK // 10
    assert left == []
