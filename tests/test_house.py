"""The shape of the package: which room may import which, no circles, one table of methods, no copies."""

import ast
import re
import sys
from pathlib import Path

import pytest
from models_for_tests import tiny_model
from training_for_tests import second_model, token_rows, trainer_for

from hf_posttrain.methods import METHODS

PACKAGE = Path(__file__).parents[1] / "hf_posttrain"
LEVELS = (  # each may import those below it, and its own level without a circle
    {"run"},
    {"check", "report", "commands"},
    {"recipe"},
    {"methods", ""},
    {"rounds"},
    {"rollouts"},
    {"teachers"},
    {"trainer"},
    {"monitoring", "models", "generation", "engines"},
    {"scoring", "data"},
    {"batching", "losses"},
    {"errors", "capabilities", "options"},
)
"""Rooms from the command down to the exceptions; "" is hf_posttrain/__init__.py, with the methods' public names."""
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}


def modules():
    """{dotted name below hf_posttrain: parsed module}, `__init__` by its folder's name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__").removesuffix("__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(name, tree, known):
    """The modules of ours that a module imports when it runs, in functions too, and not for type checkers alone."""
    package = name if (PACKAGE / name.replace(".", "/")).is_dir() else name.rpartition(".")[0]
    for node in running(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if package else []
            base = ".".join([*above, *((node.module or "").split("."))]).strip(".")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hf_posttrain":
            base = node.module.partition(".")[2]
        else:
            continue
        for alias in node.names:
            full = f"{base}.{alias.name}".strip(".")
            yield full if full in known else base


def running(tree):
    """The nodes of a module without those below `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from running(node)


def room(module):
    return module.partition(".")[0]


@pytest.fixture(scope="module")
def arrows():
    """{module: the modules that it imports}."""
    found = modules()
    return {name: {other for other in imports(name, tree, found) if other != name} for name, tree in found.items()}


def test_imported_modules_exist(arrows):
    """Those that are imported within a function too, which nothing else would tell."""
    assert not [f"{name} -> {other}" for name, others in arrows.items() for other in others if other not in arrows]


def test_no_arrow_points_upwards(arrows):
    upwards = [
        f"{name} -> {other}" for name, others in arrows.items() for other in others
        if LEVEL[room(other)] < LEVEL[room(name)]
    ]  # fmt: skip
    assert not upwards


def test_rooms_of_one_level_import_each_other_in_one_direction(arrows):
    """Modules and rooms form no circle."""
    rooms = {}
    for name, others in arrows.items():
        rooms.setdefault(room(name), set()).update(room(other) for other in others if room(other) != room(name))
    assert not list(circles(rooms))
    assert not list(circles(arrows))


def circles(graph):
    """Paths that lead back to where they began."""
    done = set()

    def walk(node, path):
        if node in path:
            yield path[path.index(node) :]
        elif node not in done:
            for other in sorted(graph.get(node, ())):
                yield from walk(other, [*path, node])
            done.add(node)

    for start in sorted(graph):
        yield from walk(start, [])


def test_circles_are_found():
    assert list(circles({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == [["a", "b", "c"]]
    assert not list(circles({"a": {"b", "c"}, "b": {"c"}}))


def test_the_top_level_is_a_page():
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert sum(path.is_file() for path in entries) <= 6
    assert sum(path.is_dir() for path in entries) <= 17


def test_long_tests_exist():
    """A renamed test would be quick again."""
    for line in (PACKAGE.parent / "tests" / "long_tests.txt").read_text(encoding="utf-8").split():
        file, name = line.split("::")
        assert re.search(rf"^def {name}\(", (PACKAGE.parent / file).read_text(encoding="utf-8"), re.MULTILINE), line


def strings(tree):
    """(line, text) of the string constants of a module that are not docstrings."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.lineno, node.value


def test_methods_are_named_in_their_own_room_alone():
    """No list of methods and no comparison with a name elsewhere; `losses` has losses of the same names."""
    named = re.compile(rf"(?<!recipes/)\b({'|'.join(METHODS)})\b", re.IGNORECASE)  # examples may name files
    found = [
        f"{name}:{line}: {text}"
        for name, tree in modules().items() if room(name) not in ("methods", "losses")
        for line, text in strings(tree) if named.search(text)
    ]  # fmt: skip
    assert not found


def code_lines(path):
    """Numbers and texts of the lines of code: without docstrings, signatures, comments, imports and blank lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out |= {*range(node.lineno, node.end_lineno + 1)}
        elif isinstance(node, ast.FunctionDef):
            left_out |= {*range(node.lineno, node.body[0].lineno)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= {*range(node.lineno, node.end_lineno + 1)}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if number not in left_out and line.strip() and not line.strip().startswith("#"):
            yield number, line.strip()


def test_nothing_is_written_twice():
    """No six lines of code in a row stand in two places."""
    seen, found = {}, []
    for path in sorted(PACKAGE.rglob("*.py")):
        code = [(n, line) for n, line in code_lines(path) if len(line) > 3]
        for start in range(len(code) - 5):
            run = tuple(line for _, line in code[start : start + 6])
            here = f"{path.relative_to(PACKAGE)}:{code[start][0]}"
            if run in seen:
                found.append(f"{seen[run]} ~ {here}")
            seen.setdefault(run, here)
    assert not found


def test_the_map_of_files_is_complete():
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    methods = {f"{name}.py" for name in METHODS}  # the map says where they are
    files = {path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"} - methods
    named = set(re.findall(r"\b\w+\.py\b", text.partition("## Files")[2].partition("\n## ")[0]))
    assert files - named == set(), "docs/architecture.md lacks these"
    assert named - files - methods - {"__init__.py"} == set(), "docs/architecture.md names these, and they are gone"


def test_tests_of_known_pains_exist():
    rows = re.findall(r"^\| \d+ \|.*", (Path(__file__).parent / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 30
    for row in rows:
        for file, names in re.findall(r"([\w/]+\.py): ((?:`\w+`(?:, )?)+)", row):
            text = (Path(__file__).parent / file).read_text(encoding="utf-8")
            assert all(f"def {name}(" in text for name in re.findall(r"`(\w+)`", names)), f"{file}: {names}"


@pytest.mark.parametrize(("method", "files", "lines"), [("dpo", 9, 915), ("opd", 23, 1900)])
def test_a_step_is_read_in_few_files(method, files, lines, tmp_path):
    """The modules that `compute_loss` of a step passes, with the rollouts before it, as a reader would follow it, and
    without what a logged step measures besides. lines: of code."""
    seen = set()

    def followed(function):
        def call(*args, **kwargs):
            sys.setprofile(lambda frame, *_: seen.add(frame.f_code.co_filename))
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(None)

        return call

    trainer = trainer_for(method, tiny_model(), token_rows(method), tmp_path, second_model(method))
    trainer.train()  # what happens in a first step alone is behind it
    trainer.args.diagnostics = False
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(4)])
    prepare = followed(trainer.prepare_window) if METHODS[method].rows.sampled else trainer.prepare_window
    [batch] = prepare([batch])
    followed(trainer.compute_loss)(trainer.model, batch)
    ours = [Path(file) for file in seen if file.startswith(str(PACKAGE))]
    assert len(ours) <= files
    total = sum(1 for path in ours for _ in code_lines(path))
    assert total <= lines
