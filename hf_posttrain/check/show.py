"""A check as text: sections, samples with what is trained in colour or in brackets, and a verdict.

    text    Check -> the page that --check prints
"""

import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .pieces import PLAIN, marked
from .tokens import Sample

if TYPE_CHECKING:
    from . import Check

_WRAPPER = textwrap.TextWrapper(
    110, initial_indent="  ", subsequent_indent="    ", replace_whitespace=False, break_on_hyphens=False
)
BOLD, YELLOW, RED = "\033[1m", "\033[33m", "\033[1;31m"


def text(check: "Check", colour: bool) -> str:
    """The whole page. colour: is it for a terminal? Otherwise trained tokens stand in [[double brackets]]."""
    paint = _paint if colour else _plain
    lines = [line for title, body in _sections(check, colour) for line in _section(title, body, paint)]
    return "\n".join([*lines, "", *_verdict(check, paint)])


def _sections(check: "Check", colour: bool) -> Iterator[tuple[str, Iterable[str]]]:
    yield "Recipe", _recipe(check)
    for audit in check.data.values():
        yield f"Data: {audit.name}", audit.lines()
    yield "Tokens", check.tokens.lines()
    for sample in check.tokens.samples:
        yield _headline(sample), [*sample_lines(sample, colour), f"boundary: {sample.boundary}"]
    yield "Plan", check.plan.lines()
    yield "Memory", check.memory.lines()
    if check.probe:
        yield "Probe", check.probe.lines()


def _recipe(check: "Check") -> Iterator[str]:
    yield f"method {check.method}, model {check.recipe['model']['name_or_path']}, read from {check.path}"
    yield "given: " + ", ".join(f"{name}={value}" for name, value in check.given.items())
    yield "defaulted: " + ", ".join(f"{name}={value}" for name, value in check.defaulted.items())


def sample_lines(sample: Sample, colour: bool) -> list[str]:
    """Prompt and completion in one piece, as the model reads them; chosen and rejected on lines of their own."""
    paired = [role for role in ("chosen", "rejected") if any(piece.role == role for piece in sample.pieces)]
    whole = marked([piece for piece in sample.pieces if piece.role not in paired], colour)
    for role in paired:
        whole += f"\n{role}: {marked([piece for piece in sample.pieces if piece.role == role], colour)}"
    return whole.split("\n")


def _headline(sample: Sample) -> str:
    label = "" if sample.label is None else ", desirable" if sample.label else ", undesirable"
    trained = sum(piece.tokens for piece in sample.pieces if piece.trained)
    whole = sum(piece.tokens for piece in sample.pieces)
    return f"Sample: {sample.source}, example {sample.row}{label} ({trained} of {whole} tokens trained)"


def _section(title: str, body: Iterable[str], paint) -> Iterator[str]:
    yield ""
    yield paint(title, BOLD)
    for line in body:
        yield from _WRAPPER.wrap(line) or [""]


def _verdict(check: "Check", paint) -> Iterator[str]:
    for note in check.notes:
        yield f"{paint('note', YELLOW)}: {note}"
    for warning in check.warnings:
        yield f"{paint('warning', RED)}: {warning}"
    yield paint("It can run." if not check.warnings else "It can run, but would not train well.", BOLD)


def _paint(words: str, code: str) -> str:
    return f"{code}{words}{PLAIN}"


def _plain(words: str, code: str) -> str:
    return words
