"""The command `hf-posttrain recipes`, which lists, prints and copies the recipes that come with the package.

In a checkout they are in folders next to the package. A wheel installs them in share/hf_posttrain.
"""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from ..errors import InputError, name_hint
from ..recipe.cli import Parser, print_output
from ..recipe.yaml_tree import read_tree

FOLDERS = {"recipes": "recipes", "accelerate_configs": "accelerate configs, for accelerate launch --config_file"}
"""Folder -> title of its files in the list."""
SCHEMA_COMMENT = "# yaml-language-server: $schema="
"""Start of the comment in which editors read the path of the schema."""
_SHARE = f"share/{__package__.partition('.')[0]}"


def main(argv: Sequence[str] | None = None) -> int:
    """List, print or copy recipes, and return the exit code.

    Raises:
        InputError: For unknown names, and for files that exist or cannot be written.
    """
    parser = Parser(
        prog="hf-posttrain recipes",
        usage="hf-posttrain recipes [NAME ... [--to FOLDER] | --show NAME]",
        description="List the recipes that come with the package, print one of them, or copy some of them.",
        epilog="example: hf-posttrain recipes fsdp2 zero3 --to mine",
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="recipes and accelerate configs to copy")
    parser.add_argument("--to", metavar="FOLDER", type=Path, help="folder to copy to (default: the current folder)")
    parser.add_argument("--show", metavar="NAME", help="print this recipe")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.show and (arguments.names or arguments.to):
        parser.error("--show cannot be combined with names to copy or --to. Remove one of them")
    if arguments.to and not arguments.names:
        parser.error("--to requires the names of the recipes to copy. Add them")

    shipped = find_shipped()
    if not any(shipped.values()):
        problem = f"this installation has no recipes, since {_SHARE} is missing in {sysconfig.get_path('data')}"
        raise InputError(f"{problem}. Install the package again")
    if arguments.show:
        print_output(_find_file(arguments.show, shipped).read_text(encoding="utf-8").rstrip())
    elif arguments.names:
        files = [_find_file(name, shipped) for name in dict.fromkeys(arguments.names)]
        copy_files(files, arguments.to or Path())
    else:
        print_output("\n\n".join(describe_files(shipped[folder], title) for folder, title in FOLDERS.items()))
    return 0


def find_shipped() -> dict[str, dict[str, Path]]:
    """Return {folder: {name: file}} from the first location with files in all of FOLDERS, or without files."""
    for root in package_folders():
        files = {folder: {file.stem: file for file in sorted((root / folder).glob("*.yaml"))} for folder in FOLDERS}
        if all(files.values()):
            return files
    return {folder: {} for folder in FOLDERS}


def package_folders() -> Iterator[Path]:
    """Yield possible parents of the folders: a checkout, pip's record, and the data folders of other installers."""
    checkout = Path(__file__).parents[2]
    yield checkout
    try:
        installed = metadata.files(__package__.partition(".")[0]) or []
    except metadata.PackageNotFoundError:
        installed = []
    recipes = (file for file in installed if file.match(f"{_SHARE}/recipes/*.yaml"))
    yield from (Path(str(file.locate())).resolve().parents[1] for file in recipes)
    yield from (Path(base, _SHARE) for base in (sysconfig.get_path("data"), checkout))  # the last one is pip --target


def _find_file(name: str, shipped: dict[str, dict[str, Path]]) -> Path:
    """Return the file with a name, which may end in .yaml.

    Raises:
        InputError: For an unknown name, with the most similar one.
    """
    known = {stem: file for files in shipped.values() for stem, file in files.items()}
    stem = name.removesuffix(".yaml")
    if stem not in known:
        hint = name_hint(stem, known, list_valid=False) or ". List them with: hf-posttrain recipes"
        raise InputError(f"command line: there is no recipe {name!r} in the package{hint}")
    return known[stem]


def schema_comment(recipe: Path) -> str:
    """Return the comment with the absolute path of the schema next to a shipped recipe."""
    return f"{SCHEMA_COMMENT}{recipe.resolve().with_name('schema.json')}"


def schema_lines(recipes: dict[str, Path]) -> list[str]:
    """Return the comment for a new recipe, or nothing in an installation without recipes."""
    return [schema_comment(file) for file in list(recipes.values())[:1]]


def describe_files(files: dict[str, Path], title: str) -> str:
    """Return a table with one line per file: name, method and model of a recipe, and the first comment."""
    rows = []
    for name, file in files.items():
        tree, _ = read_tree(file)
        lines = file.read_text(encoding="utf-8").splitlines()
        first_line = next(line for line in lines if not line.startswith(SCHEMA_COMMENT)).removeprefix("#").strip()
        comment = first_line.partition(": accelerate launch")[0]  # the path after that is relative to a checkout
        model = [tree["method"], tree["model"]["name_or_path"]] if "method" in tree else []
        rows.append([name, *model, comment])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows]
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])


def copy_files(files: Sequence[Path], folder: Path) -> None:
    """Copy the files into the folder.

    Raises:
        InputError: If a file cannot be written, or if one exists. In the latter case no file is copied.
    """
    targets = {file: folder / file.name for file in files}
    if existing := next(filter(os.path.lexists, targets.values()), None):
        raise InputError(f"{existing} exists, and nothing was copied. Set another folder with --to, or delete the file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, path in targets.items():
            text = file.read_text(encoding="utf-8")
            path.write_text(text.replace(f"{SCHEMA_COMMENT}schema.json", schema_comment(file)), encoding="utf-8")
            print_output(str(path))
    except OSError as error:
        raise InputError(f"{error.filename2 or error.filename} cannot be written ({error.strerror})") from error
