"""`hf-posttrain pair FILE`: rows to train on, from judged answers: pairs, labelled answers, or the best ones alone."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..data.row_schema import RowKind
from ..errors import InputError, error_context, short_repr
from ..methods import METHODS
from ..recipe.cli import Parser, print_output
from ..rounds.config import PairSection, pair_problems, resolve_threshold
from ..rounds.pairing import SelectedRows, pair_up
from .judge import completion_text, group_by_prompt, read_answers
from .resumable_jsonl import check_new_file, write_rows

BEGIN_THOUGHT = "<think>"
END_THOUGHT = "</think>"
_EXAMPLES = """examples:
  hf-posttrain pair judged.jsonl --method METHOD --out rows.jsonl
  hf-posttrain pair judged.jsonl --method METHOD --take all --margin 0.5 --out rows.jsonl

Rows that are pairs have prompt, chosen and rejected; labelled ones prompt, completion and label; others prompt and
completion. Which of them a method trains on is in its page of docs/.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and say what was left out; returns the exit code. Raises InputError for files without scores."""
    methods = [name for name, method in METHODS.items() if not method.rows.sampled]
    parser = Parser(
        prog="hf-posttrain pair",
        description="Make rows to train on of judged answers.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="judged answers: prompt, completion and score in each row")
    parser.add_argument("--method", choices=methods, required=True, help="what the rows are for")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="where the rows go: a new file")
    parser.add_argument(
        "--take",
        choices=["best", "all"],
        help="the best (and worst) answer, or all that are good enough (all for labels, else best)",
    )
    parser.add_argument(
        "--margin",
        type=float,
        default=0.0,
        help="of pairs, how much better one must be; of labels, how far from the threshold a score must be (0)",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        help="score from which an answer is good (0.5 of exact_match; "
        "else of labels the mean of their prompt, and none)",
    )
    parser.add_argument("--unfinished", action="store_true", help="answers that were cut may be good ones")
    parser.add_argument("--ids", action="store_true", help="write token ids, as they were sampled, in place of texts")
    given = parser.parse_args(argv)
    kind = METHODS[given.method].rows
    section = PairSection(given.take, given.margin, given.threshold, given.unfinished)
    for _, problem in pair_problems(section, kind):
        raise InputError(f"command line: --{problem}")
    check_new_file(given.out)
    rows = read_answers(given.file, score=True)
    have_ids = all(row.get("prompt_ids") and row.get("completion_ids") for row in rows)
    if given.ids and not have_ids:
        raise InputError(f"{given.file}: --ids: its rows have no prompt_ids and completion_ids")
    for number, row in enumerate(rows):
        if (one := row.get("judge")) != (other := rows[0].get("judge")):
            problem = f"judge is {short_repr(one)}, and that of row 0 is {short_repr(other)}: scores of two judges do not compare"
            raise InputError(f"{given.file}, row {number}: {problem}: pair the rows of each by themselves")
    groups = group_by_prompt(rows)
    found = pair(groups, kind, section)
    equal = sum(len(group) - len({repr(row["completion"]) for row in group}) for group in groups)
    reasons = [f"{equal} answers equal another of their prompt: one of each counts"] if equal else []
    reasons += [f"{count} prompts gave none: {reason}" for reason, count in found.left_out.most_common()]
    if not found.count:
        raise InputError("; ".join([f"{given.file}: its {len(groups)} prompts give no row", *reasons]))
    written = {id(row) for row in selected_answers(groups, found)}
    cut = [number for number, row in enumerate(rows) if id(row) in written and is_truncated(row)]
    if cut and not have_ids:
        problem = "its answer did not end, or ends inside a thought, which a text cannot say, and it has no token ids"
        raise InputError(f"{given.file}, row {cut[0]}: {problem}: leave it out, or sample with `hf-posttrain sample`")
    if cut and not given.ids:
        reasons.append(f"they are token ids, for this tokenizer alone: {len(cut)} answers did not end")
    with error_context(given.file):
        write_rows(given.out, selected_rows(groups, found, kind, given.ids or bool(cut)))
    what = "pairs" if kind.paired else "labelled answers" if kind.labelled else "answers"
    print_output("\n  ".join([f"{found.count} {what} of {len(groups)} prompts are in {given.out}", *reasons]))
    return 0


def pair(groups: list[list[dict[str, Any]]], kind: RowKind, section: PairSection) -> SelectedRows:
    """Which answers of each prompt are trained on. A row that does not say whether its answer ended did end."""
    answers = [
        [repr(row["completion"]) if completion_text(row["completion"]) else "" for row in group] for group in groups
    ]
    scores = [[row["score"] for row in group] for group in groups]
    stopped = [[row.get("stopped") is not False for row in group] for group in groups]
    return pair_up(kind, answers, scores, stopped, section, resolve_threshold(section, groups[0][0].get("judge") or ""))


def selected_answers(groups: list[list[dict[str, Any]]], found: SelectedRows) -> list[dict[str, Any]]:
    """The answers that are trained on."""
    pairs = zip(groups, found.rows, strict=True)
    return [group[number] for group, rows in pairs for row in rows for number in row.answers]


def is_truncated(row: dict[str, Any]) -> bool:
    """Did an answer not end, or end inside a thought? As a text it would be trained with an end, and a chat template
    would close its thought, or write an empty one before it.
    """
    prompt = row.get("prompt")
    answer = row["completion"]
    opened = BEGIN_THOUGHT if isinstance(prompt, str) and prompt.rstrip().endswith(BEGIN_THOUGHT) else ""
    text = (opened + (answer if isinstance(answer, str) else "")).lstrip()
    return row.get("stopped") is False or (text.startswith(BEGIN_THOUGHT) and END_THOUGHT not in text)


def selected_rows(
    groups: list[list[dict[str, Any]]], found: SelectedRows, kind: RowKind, as_ids: bool
) -> Iterator[dict[str, Any]]:
    """The rows of the file: messages where the prompt was messages, else texts, or ids."""
    for group, rows in zip(groups, found.rows, strict=True):
        for row in rows:
            first = group[row.answers[0]]
            chat = first.get("messages")
            made: dict[str, Any] = {"prompt": chat or first["prompt"]}
            if as_ids:
                made = {"prompt_ids": first["prompt_ids"]}
                chat = None
            for column, number in zip(kind.answers, row.answers, strict=True):
                if as_ids:
                    made[column] = group[number]["completion_ids"]
                    continue
                answer = group[number]["completion"]
                turn = [{"role": "assistant", "content": answer}]
                made[column.removesuffix("_ids")] = turn if chat and isinstance(answer, str) else answer
            if row.label is not None:
                made["label"] = row.label
            made |= {name: first[name] for name in ("tools", "chat_template_kwargs") if chat and first.get(name)}
            yield made | ({"images": first["images"]} if first.get("images") else {})
