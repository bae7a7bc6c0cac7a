"""The command `hf-posttrain docs TOPIC`, which prints a page of the documentation that comes with the package."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import InputError, name_hint
from ..recipe.cli import Parser, print_output
from .recipes import package_folders


def main(argv: Sequence[str] | None = None) -> int:
    """List the pages, or print one, and return the exit code.

    Raises:
        InputError: For an unknown topic, and for one that several pages have.
    """
    parser = Parser(
        prog="hf-posttrain docs",
        description="Print a page of the documentation, or list all pages.",
        epilog="example: hf-posttrain docs guides/rounds",
    )
    parser.add_argument("topic", metavar="TOPIC", nargs="?", help="name of a page, such as metrics or guides/rounds")
    topic = parser.parse_args(argv).topic
    pages = find_pages()
    if not pages:
        raise InputError("this installation has no documentation. Install the package again")
    if topic is None:
        width = max(map(len, pages))
        print_output("\n".join(f"{name:{width}}  {title(file)}" for name, file in pages.items()))
        return 0
    name = topic.removesuffix(".md").removeprefix("docs/")
    found = [page for page in pages if name in (page, page.rpartition("/")[2])]
    if len(found) > 1:
        raise InputError(f"command line: several pages have the name {topic!r}. Use {' or '.join(found)}")
    if not found:
        names = [*pages, *(page.rpartition("/")[2] for page in pages)]
        similar = [page for page in pages if len(name) > 2 and name in page]
        hint = f". Similar pages: {', '.join(similar)}" if similar else name_hint(name, names, list_valid=False)
        hint = hint or ". List the pages with: hf-posttrain docs"
        raise InputError(f"command line: there is no page {topic!r}{hint}")
    print_output(pages[found[0]].read_text(encoding="utf-8").rstrip())
    return 0


def find_pages() -> dict[str, Path]:
    """Return {name: file} of the pages in a checkout or an installed package, such as `reference/kto`."""
    for root in package_folders():
        files = {file.relative_to(root / "docs"): file for file in sorted((root / "docs").rglob("*.md"))}
        if (root / "docs" / "architecture.md") in files.values():
            return {file.with_suffix("").as_posix(): path for file, path in files.items()}
    return {}


def title(page: Path) -> str:
    """Return the first heading of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "")
