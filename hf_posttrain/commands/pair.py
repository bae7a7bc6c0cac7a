"""The command `hf-posttrain pair FILE`, which selects training rows from judged answers.

The rows are pairs, labeled answers, or only the best answers, depending on the method.
"""

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

Pairs have the columns prompt, chosen and rejected; labeled answers have prompt, completion and label; other rows have
prompt and completion. The page of each method in docs/ describes which of them the method trains on.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file, print the reasons for prompts without a row, and return the exit code.

    Raises:
        InputError: For invalid arguments, and for files without scores.
    """
    methods = [name for name, method in METHODS.items() if not method.rows.sampled]
    parser = Parser(
        prog="hf-posttrain pair",
        description="Select training rows from judged answers.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="judged answers: rows with prompt, completion and score")
    parser.add_argument("--method", choices=methods, required=True, help="method that trains on the rows")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="file to write, which must not exist")
    parser.add_argument(
        "--take",
        choices=["best", "all"],
        help="answers per prompt: the best one (for pairs, and the worst one), or all that are good enough"
        " (default: all for labeled answers, otherwise best)",
    )
    parser.add_argument(
        "--margin",
        type=float,
        default=0.0,
        help="minimum difference of the scores of a pair, or of a score and the threshold for labeled answers (0)",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        help="minimum score of a good answer (default: 0.5 for exact_match; "
        "otherwise the mean of the prompt for labeled answers, and none for other rows)",
    )
    parser.add_argument("--unfinished", action="store_true", help="allow truncated answers as good answers")
    parser.add_argument("--ids", action="store_true", help="write the sampled token ids instead of texts")
    arguments = parser.parse_args(argv)
    kind = METHODS[arguments.method].rows
    section = PairSection(arguments.take, arguments.margin, arguments.threshold, arguments.unfinished)
    for _, problem in pair_problems(section, kind):
        raise InputError(f"command line: --{problem}")
    check_new_file(arguments.out)

    rows = read_answers(arguments.file, score=True)
    have_ids = all(row.get("prompt_ids") and row.get("completion_ids") for row in rows)
    if arguments.ids and not have_ids:
        problem = "--ids requires the columns prompt_ids and completion_ids in all rows"
        raise InputError(f"{arguments.file}: {problem}. Remove --ids")
    for number, row in enumerate(rows):
        if (judge := row.get("judge")) != (first_judge := rows[0].get("judge")):
            problem = f"judge must be that of row 0, {short_repr(first_judge)}, not {short_repr(judge)}"
            raise InputError(f"{arguments.file}, row {number}: {problem}. Write the rows of each judge to another file")

    groups = group_by_prompt(rows)
    selection = pair(groups, kind, section)
    duplicates = sum(len(group) - len({repr(row["completion"]) for row in group}) for group in groups)
    notes = [f"duplicate answers to the same prompt, which count once: {duplicates}"] if duplicates else []
    notes += [f"prompts without a row: {count} ({reason})" for reason, count in selection.left_out.most_common()]
    if not selection.count:
        raise InputError("; ".join([f"{arguments.file}: none of the {len(groups)} prompts gives a row", *notes]))

    selected_ids = {id(row) for row in selected_answers(groups, selection)}
    truncated = [number for number, row in enumerate(rows) if id(row) in selected_ids and is_truncated(row)]
    if truncated and not have_ids:
        problem = (
            "the answer did not end, or ends inside a thought, which only token ids represent, and has no token ids"
        )
        fix = "Remove the row, or sample with `hf-posttrain sample`"
        raise InputError(f"{arguments.file}, row {truncated[0]}: {problem}. {fix}")
    if truncated and not arguments.ids:
        notes.append(f"written as token ids, for this tokenizer only: answers that did not end: {len(truncated)}")

    with error_context(arguments.file):
        write_rows(arguments.out, selected_rows(groups, selection, kind, arguments.ids or bool(truncated)))
    noun = "pairs" if kind.paired else "labeled answers" if kind.labeled else "answers"
    summary = f"wrote {arguments.out}; {noun}: {selection.count} from {len(groups)} prompts"
    print_output("\n  ".join([summary, *notes]))
    return 0


def pair(groups: list[list[dict[str, Any]]], kind: RowKind, section: PairSection) -> SelectedRows:
    """Select the answers of each prompt to train on. A row without `stopped` counts as an answer that ended."""
    answers = [
        [repr(row["completion"]) if completion_text(row["completion"]) else "" for row in group] for group in groups
    ]
    scores = [[row["score"] for row in group] for group in groups]
    stopped = [[row.get("stopped") is not False for row in group] for group in groups]
    threshold = resolve_threshold(section, groups[0][0].get("judge") or "")
    return pair_up(kind, answers, scores, stopped, section, threshold)


def selected_answers(groups: list[list[dict[str, Any]]], selection: SelectedRows) -> list[dict[str, Any]]:
    """Return the answers that are selected."""
    pairs = zip(groups, selection.rows, strict=True)
    return [group[number] for group, rows in pairs for row in rows for number in row.answers]


def is_truncated(row: dict[str, Any]) -> bool:
    """Return whether an answer did not end, or ends inside a thought.

    As text it would be trained with a terminal token, and a chat template would close its thought, or write an empty
    one before it.
    """
    prompt = row.get("prompt")
    answer = row["completion"]
    begin = BEGIN_THOUGHT if isinstance(prompt, str) and prompt.rstrip().endswith(BEGIN_THOUGHT) else ""
    text = (begin + (answer if isinstance(answer, str) else "")).lstrip()
    return row.get("stopped") is False or (text.startswith(BEGIN_THOUGHT) and END_THOUGHT not in text)


def selected_rows(
    groups: list[list[dict[str, Any]]], selection: SelectedRows, kind: RowKind, as_ids: bool
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the file: token ids with `as_ids`, else messages if the prompt is messages, else texts."""
    for group, rows in zip(groups, selection.rows, strict=True):
        for row in rows:
            first = group[row.answers[0]]
            messages = first.get("messages")
            output: dict[str, Any] = {"prompt": messages or first["prompt"]}
            if as_ids:
                output = {"prompt_ids": first["prompt_ids"]}
                messages = None
            for column, number in zip(kind.answers, row.answers, strict=True):
                if as_ids:
                    output[column] = group[number]["completion_ids"]
                    continue
                answer = group[number]["completion"]
                turn = [{"role": "assistant", "content": answer}]
                output[column.removesuffix("_ids")] = turn if messages and isinstance(answer, str) else answer

            if row.label is not None:
                output["label"] = row.label
            options = ("tools", "chat_template_kwargs")
            output |= {name: first[name] for name in options if messages and first.get(name)}
            yield output | ({"images": first["images"]} if first.get("images") else {})
