"""The command `hf-posttrain judge FILE`, which scores the answers of a file.

Judges are exact match, a function, a model or a server. The file has one row per answer with `prompt`, `completion`
and, if known, `reference`, as `hf-posttrain sample` writes them. The answers to a prompt are judged together and are
consecutive in the new file. The new file has the same rows with the columns `judge` and `score`. A higher score is
better, and null means that the judge gave no score.
"""

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, name_hint, short_repr
from ..recipe.cli import Parser, print_output
from ..recipe.sections import Source
from ..rounds.judges.config import KINDS, JudgeSection, expand_judge, judge_problems
from .resumable_jsonl import ResumableFile, check_new_file

if TYPE_CHECKING:
    from ..rounds.judges.question import Question

CHUNK_SIZE = 64
"""Number of prompts whose answers are judged and written together."""
PROMPT_COLUMNS = ("messages", "asked", "tools", "chat_template_kwargs")
"""Columns that a judge reads in addition to `prompt`. They are equal in rows of the same prompt."""
_EXAMPLES = """judges:
  --by exact_match                   1 if the final answer equals that of `reference`, else 0
  --by function package.module:name  a function of texts (prompts, completions, references)
  --by model REWARD_MODEL            a sequence classifier with one label
  --by teacher MODEL                 a model's log-probability per token of the answer
  --by url http://HOST:PORT          a language model with OpenAI's protocol, pairwise in both orders

examples:
  hf-posttrain judge answers.jsonl --by exact_match --out judged.jsonl
  hf-posttrain judge answers.jsonl --by url http://localhost:8000 --opponents 2 --out judged.jsonl
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file, and return the exit code.

    Raises:
        InputError: For invalid files and judges.
    """
    parser = Parser(
        prog="hf-posttrain judge",
        description="Score each answer of a file.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="answers: rows with prompt, completion and optional reference")
    parser.add_argument("--by", nargs="+", metavar=("KIND", "NAME"), required=True, help="the judge, see below")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="file to write, which must not exist")
    defaults = JudgeSection()
    parser.add_argument("--served_model", help="with url: name of the server's model (default: the first one)")
    parser.add_argument(
        "--question", metavar="FILE", type=Path, help="with url: file with a Jinja template of the question"
    )
    parser.add_argument(
        "--opponents",
        type=int,
        default=defaults.opponents,
        help="with url: number of other answers that each answer is compared with, an odd number rounded up "
        f"({defaults.opponents})",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=defaults.timeout,
        help=f"with url: seconds to wait for a response ({defaults.timeout:g})",
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        default=defaults.batch_size,
        help=f"with model and teacher: number of answers per batch ({defaults.batch_size})",
    )
    arguments = parser.parse_args(argv)
    section = judge_section(arguments)
    check_new_file(arguments.out)
    rows = read_answers(arguments.file)
    if section.by == "exact_match":
        missing = (number for number, row in enumerate(rows) if row.get("reference") is None)
        if (number := next(missing, None)) is not None:
            problem = "column 'reference' is missing or null. --by exact_match requires the right answer there"
            raise InputError(f"{arguments.file}, row {number}: {problem}")

    count = 0
    total = 0.0
    for row in judge_rows(rows, section, arguments):
        if row["score"] is not None:
            count = count + 1
            total = total + row["score"]
    mean = f", {total / count:.4g} on average" if count else ""
    print_output(f"wrote {arguments.out}; answers with a score: {count} of {len(rows)}{mean}")
    return 0


def judge_section(arguments: argparse.Namespace) -> JudgeSection:
    """Return the judge that the command line describes.

    Raises:
        InputError: For an unknown kind, and for options that cannot be combined.
    """
    kind, *names = arguments.by
    if not names:  # a short form, as in recipes
        expanded = expand_judge(kind)
        kind = expanded["by"]
        names = [expanded["name"]] if "name" in expanded else []
    if len(names) > 1:
        raise InputError(f"command line: --by must be a kind and a name, not {' '.join(arguments.by)}")
    question = None
    if arguments.question is not None:
        try:
            question = arguments.question.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--question: {arguments.question} cannot be read: {error}") from error
    if kind not in KINDS:
        hint = name_hint(kind, KINDS, list_valid=False)
        raise InputError(f"command line: --by must be one of {', '.join(KINDS)}, not {kind}{hint}")

    section = JudgeSection(
        by=kind,
        name=names[0] if names else None,
        served_model=arguments.served_model,
        question=question,
        opponents=arguments.opponents,
        timeout=arguments.timeout,
        batch_size=arguments.batch_size,
    )
    for _, problem in judge_problems(section):
        raise InputError(f"command line: --by {' '.join(arguments.by)}: {problem}")
    return section


def read_answers(path: str, score: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a file of answers.

    Args:
        path: The file.
        score: Whether each row must have a score.

    Raises:
        InputError: For missing columns, and for the first row with an invalid value.
    """
    from ..data.sources import load

    rows: list[dict[str, Any]] = [*load(Source(path), "answers")]
    if not rows:
        raise InputError(f"{path} has no rows")
    required = ["prompt", "completion", *(["score"] if score else [])]
    if missing := [name for name in required if name not in rows[0]]:
        fix = "Score the rows with hf-posttrain judge"
        if missing != ["score"]:
            fix = "Write such rows with hf-posttrain sample"
        raise InputError(f"{path}: there is no column {missing[0]!r}. {fix}")
    for number, row in enumerate(rows):
        for name in ("prompt", "completion", *(["messages"] if row.get("messages") is not None else [])):
            value = row[name]
            is_messages = isinstance(value, list) and bool(value) and all(isinstance(turn, dict) for turn in value)
            is_text = isinstance(value, str) and name != "messages" and bool(value or name == "completion")
            if not is_messages and not is_text:
                raise InputError(f"{path}, row {number}: {name} must be a text or messages, not {short_repr(value)}")
        if score and not (isinstance(row["score"], int | float | None) and math.isfinite(row["score"] or 0)):
            raise InputError(f"{path}, row {number}: score must be a number or null, not {short_repr(row['score'])}")
    return rows


def group_by_prompt(rows: Iterable[dict[str, Any]], *columns: str) -> list[list[dict[str, Any]]]:
    """Group the rows of the same prompt (with its images, tools and messages), in the order of their first rows.

    Args:
        rows: The rows, in any order.
        columns: Further columns that are equal within a group.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        key = repr([row.get(name) for name in ("prompt", "images", *PROMPT_COLUMNS, *columns)])
        groups.setdefault(key, []).append(row)
    return [*groups.values()]


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """Return a completion as text, which is the content of the last one of several messages."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")


def make_question(group: list[dict[str, Any]]) -> "Question":
    """Return the question to a judge about the answers to one prompt."""
    from ..rounds.judges.question import Question

    first = group[0]
    template_options = {name: first[name] for name in ("tools", "chat_template_kwargs") if first.get(name)}
    stopped = [row.get("stopped") is not False for row in group]
    answers = [completion_text(row["completion"]) if row.get("answered") is None else row["answered"] for row in group]
    prompt = first.get("messages") or first.get("asked") or first["prompt"]
    return Question(prompt, answers, first.get("reference"), template_options, stopped=stopped)


def judge_rows(
    rows: list[dict[str, Any]], section: JudgeSection, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Judge the rows, write them to the file, and yield them. Nothing is written until the first row is requested.

    Raises:
        InputError: For a judge that cannot be loaded or reached.
    """
    import torch
    import xxhash

    from ..rounds.judges import make_judge

    groups = group_by_prompt(rows, "reference")
    judge = make_judge(section, None, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    rows_key = xxhash.xxh3_64_hexdigest(repr(rows).encode())
    key = {"judge": section.fingerprint(), "version": judge.key(), "rows": rows_key}
    questions = [make_question(group) for group in groups]
    with ResumableFile(arguments.out, key) as file, judge:
        for first in file.remaining(range(0, len(groups), CHUNK_SIZE), "judge"):
            scores = judge.score(questions[first : first + CHUNK_SIZE])
            pairs = zip(groups[first : first + CHUNK_SIZE], scores, strict=True)
            judged = [
                (row, score) for group, group_scores in pairs for row, score in zip(group, group_scores, strict=True)
            ]
            file.write(row | {"score": score, "judge": str(section)} for row, score in judged)
        yield from file.finish()
