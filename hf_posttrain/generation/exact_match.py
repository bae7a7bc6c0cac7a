"""Evaluation by exact match: answer the prompts of the eval set greedily and compare final answers."""

import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from decimal import Context, Inexact, InvalidOperation
from fractions import Fraction
from functools import partial
from typing import Any

import datasets
import evaluate
import torch

from ..errors import InputError
from .rollout import until_terminal

logger = logging.getLogger(__name__)

# LaTeX as plain text says it, in this order
_PLAIN = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\\left|\\right|\\[!,;:()\[\] ]|\^\{?\\circ\}?|°", ""),  # sizes, spaces, degrees
        (r"\{(?=,\})|(?<=,)\}", ""),  # 5{,}000
        (r"\*{2,}(?!\d)|(?<!\d)\*{2,}", ""),  # Markdown's bold, not a power
        (r"\\([%$])", r"\1"),
        (r"\*\*", "^"),
        (r"\\times|\\cdot|[×·]", "*"),
        (r"\\pi(?![a-zA-Z])", "π"),
        (r"(?<=\d)\s*(?:\\text|\\mathrm|\\mbox)\s*\{\s*[a-zA-Z ]+\}(?:\^\{?\d\}?)?(?=\s*[}$.]|\s*$)", ""),  # units
        (r"\\(?:text|mathrm|mbox|textbf|mathbf|boldsymbol|textit)\s*\{([^{}]*)\}", r"\1"),
        (r"(?<=\d)\s*(?=\\[dtc]?frac)", " "),  # a fraction behind a number is a mixed number
        (r"\\[dtc]?frac\s*(?:\{(-?\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))", r"\1\2/\3\4"),
        (r"\\sqrt\s*(?:\{(\w+)\}|(\d))", r"√\1\2"),
        (r"\^\s*\{(-?\w+)\}", r"^\1"),
        (r" ?([*^√]) ?(?=[\d√-])", r"\1"),
    )
]
# what may follow a number and makes it another one: a fraction, a time of day, a power, a product, a root
_TAIL = r"(?>(?: \d+/\d+(?!\d)|[/:^*]-?√?\d[\d.,]*|√\d[\d.,]*|π)*)"
_VALUE = r"(?>[-+$]*√?[\d.,]*\d(?:[eE][-+]?\d+)?)" + _TAIL
# what equals a number that stands alone, names or arithmetic: 12 - 5 = 7 is 7
_LEFT = rf"(?:(?>(?:\$?[a-zA-Z] *|[-+*/^()\d.,$√π ]+)= *)+(?={_VALUE}(?![\w(]| *[-+*/^])(?![^\n]*=)))?"
_FINAL = re.compile(rf"####[ \t]*{_LEFT}({_VALUE}(?![\w(])|[^\n]*\S)")
_SAID = re.compile(  # an "A" or "answer" alone is a word
    rf"(?:\bA\s*:|\b(?i:answer)\s*(?::|is\b\s*:?))[\s*]*+{_LEFT}({_VALUE}|\$[^$\n]*\\[a-z][^$\n]*\$)"
)
_NUMBER = re.compile(rf"-?√?(?:\d[\d,]*(?:\.\d+)?|(?<!\w)\.\d+){_TAIL}")
_RATIO = re.compile(r"-?(?:\d+ )?\d+/\d+")
_EXACT = Context(prec=999, Emax=999, Emin=-999, traps=[InvalidOperation])  # finite: 1e999999999 is not written out


def final_answer(text: str) -> str:
    r"""The final answer of a solution: after `####`, in `\boxed{}`, or after `A:`, `answer:` or "answer is"; else its
    last number.

    A number is taken with the fraction, power, time or product that it begins, of an equation the one behind the
    last `=`. Thousands separators, currency signs, units in \text{} behind a number and a trailing period or `.0` do
    not count: "$1,200.00" is "1200", and \frac{6}{8} is "0.75".
    """
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    # the marked answer, by the first mark that is there; the last one counts, since solutions may try several
    for find in (_FINAL.findall, _boxed, _SAID.findall, _NUMBER.findall):
        if found := find(text):
            return _normal(found[-1])
    return _normal(text)


def _boxed(text: str) -> list[str]:
    r"""What stands in each \boxed{...} that is closed, with braces of its own."""
    found: list[str] = []
    opened: list[int] = []  # of each open brace, where its \boxed{} begins; 0 for another
    for brace in re.finditer(r"\\[{}]|\\boxed\s*\{|[{}]", text):
        if brace[0] == "}" and opened and (start := opened.pop()):
            found.append(text[start : brace.start()])
        elif brace[0] == "{" or brace[0].startswith(r"\boxed"):
            opened.append(0 if brace[0] == "{" else brace.end())
    return [re.sub(rf"^ *{_LEFT}", "", inside) for inside in found if inside.strip()]


def _normal(answer: str) -> str:
    """One spelling for equal answers."""
    answer = answer.lstrip("$,*% \n\t").rstrip("$.,*% \n\t")
    number = answer.replace(",", "").replace("$", "")
    if _RATIO.fullmatch(number):
        with suppress(ValueError, ArithmeticError):  # too many digits, or by zero
            value = sum(map(Fraction, number.lstrip("-").split())) * (-1 if number.startswith("-") else 1)
            number = str(value)  # in lowest terms, and as a decimal where that is exact
            number = str(Context(prec=99, traps=[Inexact]).divide(value.numerator, value.denominator))
    try:
        return f"{_EXACT.create_decimal(number).normalize(_EXACT):f}"
    except InvalidOperation:
        return (number if "/" in number else answer).lower()


class ExactMatch(evaluate.Metric):
    """Share of predictions whose final answer equals the reference's: {"exact_match": float in 0..1}."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")})
        given = "predictions and references: texts that end in an answer"
        return evaluate.MetricInfo(description="", citation="", inputs_description=given, features=features)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        hits = [final_answer(p) == final_answer(r) for p, r in zip(predictions, references, strict=True)]
        return {"exact_match": sum(hits) / max(len(hits), 1)}


def answerable(rows: Iterable[dict]) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, their right answers) of prepared rows: the chosen or desirable ones.

    Raises InputError for rows without a prompt or an answer.
    """
    kept = [row for row in rows if row.get("label", True)]
    prompts = [row["prompt_ids"] for row in kept]
    gold = [first_turn(row) for row in kept]
    if not kept or not all(gold) or all(len(prompt) < 2 for prompt in prompts):
        raise InputError("eval_exact_match needs eval rows with a prompt and an answer")
    return prompts, gold


def first_turn(row: dict) -> list[int]:
    """The answer of a prepared row, of a conversation of many turns the assistant's first; [] if it has none."""
    answer, mask = row.get("chosen_ids") or row.get("completion_ids") or [], row.get("completion_mask") or []
    return answer[: mask.index(0)] if 0 in mask else answer


def exact_match(trainer: Any, rows: datasets.Dataset) -> float:
    """The share of prompts whose greedy answer has the final answer of the data (of its chosen or desirable answer).

    Raises InputError for rows without a prompt or an answer.
    """
    prompts, gold = answerable(rows)
    # answers of several turns end with the first, and of those that max_length has cut the final answer is not known
    gold = [until_terminal(answer, trainer.terminal_ids) for answer in gold]
    whole = [n for n, answer in enumerate(gold) if answer[-1] in trainer.terminal_ids] or [*range(len(gold))]
    if cut := len(gold) - len(whole):
        logger.warning("eval_exact_match: %d of %d answers of the data do not end: they are left out", cut, len(gold))
    prompts, gold = [prompts[n] for n in whole], [gold[n] for n in whole]
    args, accelerator = trainer.args, trainer.accelerator
    # each rank answers its share of the rows; hits and answers are added up over the ranks
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    answers = trainer.generate(prompts[mine], args.eval_max_completion_length, batch_size=args.eval_batch_size)
    decode = partial(trainer.tokenizer.batch_decode, skip_special_tokens=True)
    hits = torch.zeros(2, device=accelerator.device)
    if answers:  # a rank may have none
        score = ExactMatch().compute(predictions=decode(answers), references=decode(gold[mine]))["exact_match"]
        hits += torch.tensor([score * len(answers), len(answers)], device=accelerator.device)
    right, count = accelerator.reduce(hits, "sum").tolist()
    return right / count
