"""`hf-posttrain recipes`: the recipes that come with the package, listed, shown, or copied to begin from.

In a checkout they are in folders next to the package; a wheel installs them below share/hf_posttrain.
"""

import os
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from ..errors import InputError, name_hint
from ..recipe.cli import Parser, print_output
from ..recipe.yaml_tree import read_tree

FOLDERS = {"recipes": "recipes", "accelerate_configs": "accelerate configs, for accelerate launch --config_file"}
"""Folder -> what the list calls its files."""
_SHARE = f"share/{__package__.partition('.')[0]}"


def main(argv: Sequence[str] | None = None) -> int:
    """List, print or copy recipes; returns the exit code. Raises InputError for names that do not exist and for files
    that are there already or cannot be written.
    """
    parser = Parser(
        prog="hf-posttrain recipes",
        usage="hf-posttrain recipes [NAME ... [--to FOLDER] | --show NAME]",
        description="List the recipes that come with the package, print one, or copy some to begin from.",
        epilog="example: hf-posttrain recipes fsdp2 zero3 --to mine",
        allow_abbrev=False,
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="recipes and accelerate configs to copy")
    parser.add_argument("--to", metavar="FOLDER", type=Path, help="where they are copied to (the current folder)")
    parser.add_argument("--show", metavar="NAME", help="print this one")
    given = parser.parse_intermixed_args(argv)
    if given.show and (given.names or given.to):
        parser.error("--show prints one file and copies none: drop it, or the names to copy and --to")
    if given.to and not given.names:
        parser.error("--to: name the recipes to copy; without a name they are listed")
    shipped = find_shipped()
    if not any(shipped.values()):
        raise InputError(f"this installation has no recipes: there is no {_SHARE} in {sysconfig.get_path('data')}")
    if given.show:
        print_output(_file(given.show, shipped).read_text(encoding="utf-8").rstrip())
    elif given.names:
        copy_files([_file(name, shipped) for name in dict.fromkeys(given.names)], given.to or Path())
    else:
        print_output("\n\n".join(describe_files(shipped[folder], title) for folder, title in FOLDERS.items()))
    return 0


def find_shipped() -> dict[str, dict[str, Path]]:
    """{folder: {name: file}} of the first place that has files in all of FOLDERS; no files where there is none."""
    for root in _places():
        found = {folder: {file.stem: file for file in sorted((root / folder).glob("*.yaml"))} for folder in FOLDERS}
        if all(found.values()):
            return found
    return {folder: {} for folder in FOLDERS}


def _places() -> Iterator[Path]:
    """Where the folders may be: in a checkout, where pip says that it put them, and where others put data files."""
    above = Path(__file__).parents[2]
    yield above
    try:
        installed = metadata.files(__package__.partition(".")[0]) or []
    except metadata.PackageNotFoundError:
        installed = []
    ours = (file for file in installed if file.match(f"{_SHARE}/recipes/*.yaml"))
    yield from (Path(str(file.locate())).resolve().parents[1] for file in ours)
    yield from (Path(base, _SHARE) for base in (sysconfig.get_path("data"), above))  # the last of pip's --target


def _file(name: str, shipped: dict[str, dict[str, Path]]) -> Path:
    """The file of a name, with .yaml or without. Raises InputError with the nearest name."""
    known = {stem: file for files in shipped.values() for stem, file in files.items()}
    stem = name.removesuffix(".yaml")
    if stem not in known:
        found = name_hint(stem, known, list_valid=False) or "; hf-posttrain recipes lists them"
        raise InputError(f"command line: no recipe {name!r} comes with the package{found}")
    return known[stem]


def describe_files(files: dict[str, Path], title: str) -> str:
    """A line for each file below `title`: name, method and model where it is a recipe, and its first comment."""
    rows = []
    for name, file in files.items():
        tree, _ = read_tree(file)
        first = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
        about = first.partition(": accelerate launch")[0]  # the path behind that is of a checkout
        rows.append([name, *([tree["method"], tree["model"]["name_or_path"]] if "method" in tree else []), about])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows]
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])


def copy_files(files: Sequence[Path], folder: Path) -> None:
    """Copy the files into the folder, or none where one is there already: that raises InputError."""
    targets = {file: folder / file.name for file in files}
    if there := next(filter(os.path.lexists, targets.values()), None):
        raise InputError(f"{there} is there already: nothing was copied; name another folder with --to, or delete it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, path in targets.items():
            shutil.copyfile(file, path)
            print_output(str(path))
    except OSError as error:
        raise InputError(f"{error.filename2 or error.filename} cannot be written ({error.strerror})") from error
