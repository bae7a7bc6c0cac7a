"""The command's arguments: words in any order, options that go together. Mistakes are in test_broken."""

from pathlib import Path

import pytest

from hf_posttrain.errors import InputError
from hf_posttrain.recipe.cli import parse


@pytest.mark.parametrize(
    ("argv", "recipe", "overrides"),
    [
        (["r.yaml"], "r.yaml", []),
        (["r.yaml", "a.b=1", "c=2"], "r.yaml", ["a.b=1", "c=2"]),
        (["a.b=1", "r.yaml", "c=2"], "r.yaml", ["a.b=1", "c=2"]),
        (["a.b=1", "--check", "r.yaml", "--json", "c=2"], "r.yaml", ["a.b=1", "c=2"]),
        (["lr=1/r.yaml", "a.b=1"], "lr=1/r.yaml", ["a.b=1"]),
        (["r.yaml", "word"], "r.yaml", ["word"]),  # refused when it is applied, with what an override looks like
    ],
)
def test_the_recipe_is_the_first_word_that_is_no_override(argv, recipe, overrides, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    (tmp_path / "lr=1/r.yaml").touch()
    found = parse(argv)
    assert (found.recipe, found.overrides) == (recipe, overrides)


def test_switches():
    assert vars(parse(["r.yaml"])) == {
        "recipe": "r.yaml", "overrides": [], "check": False, "probe": False, "json": False, "preprocess_only": False,
        "config_file": None, "device_memory": None,
    }  # fmt: skip
    found = parse(["--json", "r.yaml", "--check", "--probe"])
    assert (found.check, found.probe, found.json) == (True, True, True)
    assert parse(["r.yaml", "--preprocess-only"]).preprocess_only
    found = parse(["r.yaml", "--check", "--config_file", __file__, "--device_memory", "80"])
    assert (found.config_file, found.device_memory) == (Path(__file__), 80.0)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "command line: there is no recipe. Usage: hf-posttrain RECIPE.yaml [section.key=value ...]"),
        (["r.yaml", "--probe"], "command line: --probe is only valid with --check. Add --check, or remove --probe"),
        (["r.yaml", "--check", "--preprocess-only"], "command line: --check cannot be combined with --preprocess-only"),
        (["r.yaml", "--chek"], "command line: unknown option --chek; did you mean --check?"),
        (
            ["r.yaml", "--beta=1"],
            "command line: '--beta=1' must have the form section.key=value without dashes. Use train.beta=1",
        ),
        (["r.yaml", "--device_memory", "80"], "command line: --device_memory is only valid with --check"),
        (["r.yaml", "--check", "--config_file", "no.yaml"], "command line: --config_file: there is no file no.yaml"),
        (["r.yaml", "--check", "--device_memory=-1"], "command line: --device_memory must be a positive number of GiB"),
        (["r.yaml", "--check=3"], "command line: argument --check: ignored explicit argument '3'"),
    ],
)
def test_mistakes_are_one_line(argv, message):
    with pytest.raises(InputError) as refused:
        parse(argv)
    assert str(refused.value).startswith(message)


def test_help_names_the_other_commands(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert "hf-posttrain data FILE" in shown
    assert "hf-posttrain compare RUN RUN" in shown
