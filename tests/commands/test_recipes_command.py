"""`hf-posttrain recipes`: what is listed, shown and copied, and that an installed wheel has the recipes too."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from hf_posttrain import __version__
from hf_posttrain.commands import recipes
from hf_posttrain.errors import InputError
from hf_posttrain.recipe.read import load_recipe

REPOSITORY = Path(__file__).parents[2]
FILES = [file for folder in recipes.FOLDERS for file in sorted((REPOSITORY / folder).glob("*.yaml"))]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The current directory, which has no recipes."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listed(capsys, *arguments):
    """The printed lines."""
    assert recipes.main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def test_every_recipe_is_listed_with_its_method_model_and_first_comment(capsys, elsewhere):
    lines = listed(capsys)
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [file.stem for file in FILES]
    for file in (file for file in FILES if file.parent.name == "recipes"):
        [line] = [line for line in lines if line.split()[:1] == [file.stem]]
        recipe, about = load_recipe(file), file.read_text().split("\n")[1].removeprefix("# ").split(": accelerate")[0]
        assert line.split()[1:3] == [recipe.method, recipe.model.name_or_path]
        assert line.endswith(f"  {about}")
    assert not [line for line in lines if "accelerate launch -m" in line]
    assert any(line.split() == ["single", "One", "GPU,", "or", "the", "CPU"] for line in lines)


def test_one_is_shown_as_it_is(capsys, elsewhere):
    for file in FILES:
        assert listed(capsys, "--show", file.stem) == file.read_text().rstrip().split("\n")
        assert listed(capsys, "--show", file.name) == file.read_text().rstrip().split("\n")


def test_several_are_copied(capsys, elsewhere):
    assert listed(capsys, "sft", "fsdp2", "sft") == ["sft.yaml", "fsdp2.yaml"]
    assert listed(capsys, "dpo", "--to", "a/b") == ["a/b/dpo.yaml"]
    for path, folder in (("sft.yaml", "recipes"), ("fsdp2.yaml", "accelerate_configs"), ("a/b/dpo.yaml", "recipes")):
        shipped = (REPOSITORY / folder / Path(path).name).read_text(encoding="utf-8")
        schema = f"$schema={REPOSITORY / 'recipes' / 'schema.json'}"
        assert Path(path).read_text(encoding="utf-8") == shipped.replace("$schema=schema.json", schema)


def test_nothing_is_copied_where_one_file_is_there(elsewhere):
    Path("dpo.yaml").write_text("mine")
    Path("kto.yaml").symlink_to("nowhere")
    for name in ("dpo", "kto"):
        with pytest.raises(InputError, match=rf"^{name}.yaml exists, and nothing was copied"):
            recipes.main(["sft", name])
    assert Path("dpo.yaml").read_text() == "mine"
    assert not Path("sft.yaml").exists()


@pytest.mark.parametrize(("arguments", "problem"), [
    (["dop_full"], "there is no recipe 'dop_full' in the package; did you mean 'dpo_full'?"),
    (["sft", "fsdp"], "there is no recipe 'fsdp' in the package; did you mean 'fsdp2'?"),
    (["--show", "!"], "there is no recipe '!' in the package. List them with: hf-posttrain recipes"),
    (["tiny/dpo"], "there is no recipe 'tiny/dpo' in the package"),
    (["--show", "sft", "dpo"], "--show cannot be combined with names to copy"),
    (["--to", "here"], "--to requires the names of the recipes to copy"),
    (["--version"], "unrecognized arguments: --version"),
])  # fmt: skip
def test_mistakes_are_said_in_one_line(elsewhere, arguments, problem):
    with pytest.raises(InputError) as raised:
        recipes.main(arguments)
    assert problem in str(raised.value)
    assert not [*elsewhere.iterdir()]


def test_a_folder_that_cannot_be_made(elsewhere):
    Path("file").write_text("")
    with pytest.raises(InputError, match=r"^file cannot be written \(File exists\)$"):
        recipes.main(["sft", "--to", "file"])


def test_an_installation_without_them(elsewhere, monkeypatch):
    monkeypatch.setattr(recipes, "package_folders", lambda: [elsewhere])
    with pytest.raises(
        InputError, match=r"^this installation has no recipes, since share/hf_posttrain is missing in /"
    ):
        recipes.main([])


def test_a_folder_recipes_of_another_package_is_none_of_ours(elsewhere, monkeypatch):
    """site-packages may have one."""
    (elsewhere / "recipes").mkdir()
    (elsewhere / "recipes" / "cake.yaml").write_text("flour: 1")
    monkeypatch.setattr(recipes, "package_folders", lambda: [elsewhere, REPOSITORY])
    assert "cake" not in recipes.find_shipped()["recipes"]


@pytest.mark.slow
def test_an_installed_wheel_has_them(elsewhere):
    pytest.importorskip("setuptools", minversion="77")
    source, environment = elsewhere / "source", elsewhere / "environment"
    for folder in ("hf_posttrain", "docs", *recipes.FOLDERS):
        shutil.copytree(REPOSITORY / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", source, "--no-deps", "--no-build-isolation", "-w", "wheels"], check=True)
    [wheel] = Path("wheels").iterdir()
    venv.create(environment)
    python = environment / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    # what the package needs is that of the tests, without what makes the checkout importable there
    [site] = environment.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    unset = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def output(*command):
        return subprocess.run(command, env=unset, check=True, capture_output=True, text=True).stdout.splitlines()

    [file] = output(python, "-c", "import hf_posttrain; print(hf_posttrain.__file__)")
    assert Path(file).is_relative_to(environment)
    command = environment / "bin" / "hf-posttrain"
    assert output(command, "--version") == [f"hf-posttrain {__version__}"]
    lines = output(command, "recipes")
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [file.stem for file in FILES]
    output(command, "recipes", "dpo", "zero2")
    schema, *lines = Path("dpo.yaml").read_text(encoding="utf-8").splitlines()
    assert lines == (REPOSITORY / "recipes" / "dpo.yaml").read_text(encoding="utf-8").splitlines()[1:]
    schema_file = Path(schema.partition("$schema=")[2])
    assert schema_file.is_relative_to(environment)
    assert schema_file.read_bytes() == (REPOSITORY / "recipes" / "schema.json").read_bytes()
    assert output(command, "docs", "recipes")[0] == "# Recipes"
    output(command, "init", "sft", "--yes")
    assert load_recipe("sft.yaml").model == load_recipe(REPOSITORY / "recipes" / "sft.yaml").model
