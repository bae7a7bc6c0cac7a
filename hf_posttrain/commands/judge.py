"""`hf-posttrain judge FILE`: a score for each answer of a file, by exact match, a function, a model or a server.

The file has a row for each answer: prompt, completion, and reference where it is known, as `hf-posttrain sample` writes
them. Rows of one prompt are judged together and stand together in the new file, which has the same rows with `judge`
and `score`, of which more is better, or null where the judge gave none.
"""

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError, name_hint, short_repr
from ..recipe.cli import Parser, print_output
from ..recipe.sections import Source
from ..rounds.judges.config import KINDS, JudgeSection, expand_judge, judge_problems
from .resumable_jsonl import ResumableFile, check_new_file

CHUNK_SIZE = 64
"""Prompts whose answers are judged at once."""
_EXAMPLES = """judges:
  --by exact_match                   1 where the final answer is that of `reference`, else 0
  --by function package.module:name  a function of texts (prompts, completions, references)
  --by model REWARD_MODEL            a sequence classifier with one label
  --by teacher MODEL                 a model's log-probability per token of the answer
  --by url http://HOST:PORT          a language model with OpenAI's protocol, pairwise in both orders

examples:
  hf-posttrain judge answers.jsonl --by exact_match --out judged.jsonl
  hf-posttrain judge answers.jsonl --by url http://localhost:8000 --opponents 2 --out judged.jsonl
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file; returns the exit code. Raises InputError for files and judges that cannot be used."""
    parser = Parser(
        prog="hf-posttrain judge",
        description="Give each answer of a file a score.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="answers: prompt, completion (and reference) in each row")
    parser.add_argument("--by", nargs="+", metavar=("KIND", "NAME"), required=True, help="who judges, see below")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="where the rows go: a new file")
    known = JudgeSection()
    parser.add_argument("--served_model", help="of url: which of the server's models (the first)")
    parser.add_argument("--question", metavar="FILE", type=Path, help="of url: a Jinja template of what is asked")
    parser.add_argument("--opponents", type=int, default=known.opponents, help="of url: comparisons of each answer")
    parser.add_argument("--timeout", type=float, default=known.timeout, help="of url: seconds that an answer may take")
    parser.add_argument("--batch_size", type=int, default=known.batch_size, help="of model and teacher")
    given = parser.parse_args(argv)
    section = judge_section(given)
    check_new_file(given.out)
    rows = read_answers(given.file)
    if section.by == "exact_match":
        unknown = (number for number, row in enumerate(rows) if row.get("reference") is None)
        if (number := next(unknown, None)) is not None:
            problem = "column 'reference': missing or null, and exact_match compares with the right answer in it"
            raise InputError(f"{given.file}, row {number}: {problem}")
    count = 0
    total = 0.0
    for row in judge_rows(rows, section, given):
        if row["score"] is not None:
            count = count + 1
            total = total + row["score"]
    mean = f", {total / count:.4g} on average" if count else ""
    print_output(f"{count} of {len(rows)} answers have a score{mean}; they are in {given.out}")
    return 0


def judge_section(given: Any) -> JudgeSection:
    """The judge of the arguments. Raises InputError for a kind that does not exist, and what contradicts."""
    kind, *name = given.by
    if not name:  # a short form, as recipes have it
        short = expand_judge(kind)
        kind = short["by"]
        name = [short["name"]] if "name" in short else []
    if len(name) > 1:
        raise InputError(f"command line: --by takes a kind and a name, and was given {' '.join(given.by)}")
    question = None
    if given.question is not None:
        try:
            question = given.question.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--question: {given.question} cannot be read: {error}") from error
    if kind not in KINDS:
        raise InputError(
            f"command line: --by {kind}: one of {', '.join(KINDS)} is wanted{name_hint(kind, KINDS, False)}"
        )
    section = JudgeSection(
        kind, name[0] if name else None, given.served_model, question, given.opponents, given.timeout, given.batch_size
    )
    for _, problem in judge_problems(section):
        raise InputError(f"command line: --by {' '.join(given.by)}: {problem}")
    return section


def read_answers(path: str, score: bool = False) -> list[dict[str, Any]]:
    """The rows of a file of answers. score: each has one. Raises InputError for a file or row that has none."""
    from ..data.sources import load

    rows: list[dict[str, Any]] = [*load(Source(path), "answers")]
    if not rows:
        raise InputError(f"{path} has no rows")
    wanted = ["prompt", "completion", *(["score"] if score else [])]
    if lacking := [name for name in wanted if name not in rows[0]]:
        how = "hf-posttrain judge writes it" if lacking == ["score"] else "hf-posttrain sample writes such rows"
        raise InputError(f"{path}: there is no column {lacking[0]!r}: {how}")
    for number, row in enumerate(rows):
        for name in ("prompt", "completion", *(["messages"] if row.get("messages") is not None else [])):
            given = row[name]
            turns = isinstance(given, list) and bool(given) and all(isinstance(turn, dict) for turn in given)
            text = isinstance(given, str) and name != "messages" and bool(given or name == "completion")
            if not turns and not text:
                raise InputError(f"{path}, row {number}: {name} is {short_repr(given)}, a text or messages are wanted")
        if score and not (isinstance(row["score"], int | float | None) and math.isfinite(row["score"] or 0)):
            raise InputError(f"{path}, row {number}: score is {short_repr(row['score'])}, a number or null is wanted")
    return rows


def group_by_prompt(rows: Iterable[dict[str, Any]], *also: str) -> list[list[dict[str, Any]]]:
    """The rows of each prompt, wherever they stand. also: columns that are the same in a group too."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(repr((row["prompt"], row.get("images"), *map(row.get, also))), []).append(row)
    return [*groups.values()]


def completion_text(answer: Any) -> str:
    """A completion as a text: of messages, what the assistant said last."""
    return answer if isinstance(answer, str) else str(answer[-1].get("content") or "")


def make_question(group: list[dict[str, Any]]) -> Any:
    """What a judge is asked of the answers to a prompt."""
    from ..rounds.judges.question import Question

    first = group[0]
    more = {name: first[name] for name in ("tools", "chat_template_kwargs") if first.get(name)}
    stopped = [row.get("stopped") is not False for row in group]
    answers = [completion_text(row["completion"]) if row.get("answered") is None else row["answered"] for row in group]
    prompt = first.get("messages") or first.get("asked") or first["prompt"]
    return Question(prompt, answers, first.get("reference"), more, stopped=stopped)


def judge_rows(rows: list[dict[str, Any]], section: JudgeSection, given: Any) -> Iterator[dict[str, Any]]:
    """Write the file, then give its rows. Raises InputError where the judge cannot be asked."""
    import torch
    import xxhash

    from ..rounds.judges import make_judge

    groups = group_by_prompt(rows, "reference")
    made = make_judge(section, None, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    read = xxhash.xxh3_64_hexdigest(repr(rows).encode())
    key = {"judge": section.described(), "version": made.key(), "rows": read}
    asked = [make_question(group) for group in groups]
    with ResumableFile(given.out, key) as file, made:
        for first in file.left(range(0, len(groups), CHUNK_SIZE), "judge"):
            scores = made.score(asked[first : first + CHUNK_SIZE])
            pairs = zip(groups[first : first + CHUNK_SIZE], scores, strict=True)
            judged = [(row, score) for group, own in pairs for row, score in zip(group, own, strict=True)]
            file.write(row | {"score": score, "judge": str(section)} for row, score in judged)
        yield from file.finish()
