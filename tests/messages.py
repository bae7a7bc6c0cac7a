"""Every error, warning and log line of the package in one list, to revise them together: python -m tests.messages

Each line has the file, the line, the kind (error, problem, warning or info) and the text of the source, with {...} for
values. `--kind error` or a folder such as `trainer` select some.
"""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "hf_posttrain"
ERRORS = {"InputError", "LaunchError", "RunStopped", "ServerError", "ValueError", "TypeError", "ImportError"}
LOGS = {"debug", "info", "warning", "error", "critical"}


class Message(NamedTuple):
    """A message in the source."""

    file: Path
    line: int
    kind: str
    text: str


def messages(file: Path) -> Iterator[Message]:
    """Yield the messages of a file in the order of its lines."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = []
    for function in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        names = assigned_texts(function)
        for node in own_nodes(function):
            if (message := message_of(node, names)) is not None:
                found.append(Message(file, node.lineno, *message))
    yield from sorted(set(found), key=lambda message: message.line)


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or module without those of the functions in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef):
            yield node
            yield from own_nodes(node)


def assigned_texts(function: ast.AST) -> dict[str, str]:
    """Return the texts that are assigned to local names: name -> text; of several assignments, all of them."""
    texts: dict[str, str] = {}
    for node in own_nodes(function):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        name = node.targets[0].id
        if text := text_of(node.value, texts):
            texts[name] = f"{texts[name]} | {text}" if name in texts else text
    return texts


def message_of(node: ast.AST, names: dict[str, str]) -> tuple[str, str] | None:
    """Return kind and text of a message, None for another node."""
    if isinstance(node, ast.Call) and node.args:
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in ERRORS:
            return "error", text_of(node.args[0], names)
        if isinstance(node.func, ast.Attribute) and name in LOGS and "log" in ast.unparse(node.func.value):
            return name, text_of(node.args[0], names)
    if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
        text = text_of(node.value.elts[1], names)
        return ("problem", text) if " " in text else None
    return None


def text_of(node: ast.AST, names: dict[str, str]) -> str:
    """Return the text of an expression, with {...} for values; the text of a name where it is known."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        inner = text_of(node.value, names)
        return inner if " " in inner else f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp):
        return text_of(node.left, names) + text_of(node.right, names)
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body, names)} / {text_of(node.orelse, names)}"
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    return ""


def main() -> None:
    """Print the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="", help="a subpackage")
    parser.add_argument("--kind", help="error, problem, warning or info")
    given = parser.parse_args()
    for file in sorted((PACKAGE / given.folder).rglob("*.py")):
        for message in messages(file):
            if given.kind in (None, message.kind) and message.text.strip():
                place = f"{message.file.relative_to(PACKAGE)}:{message.line}"
                print(f"{place:45} {message.kind:8} {' '.join(message.text.split())}")


if __name__ == "__main__":
    main()
