"""Extraction of the final answer of a solution, in a normal form that makes equal answers equal texts.

The tests put 56 kinds of answers after each of six markers. math-verify 0.9 reads only 15 of them alike after all
markers: it is made for expressions, and takes a number from words, dates, times and choices.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Context, Inexact, InvalidOperation
from fractions import Fraction

# conversion of LaTeX and Markdown to plain text, in this order
_PLAIN_TEXT = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"<<[^<>\n]*>>", ""),  # GSM8K's calculator
        (r"\\left|\\right|\\[!,;: ]|\^\{?\\circ\}?|°", ""),  # sizes, spaces, degrees
        (r"\{(?=,\})|(?<=,)\}", ""),  # 5{,}000
        (r"\*{2,}(?!\d)|(?<!\d)\*{2,}", ""),  # Markdown's bold, not a power
        (r"\\%", "%"),
        (r"\*\*", "^"),
        (r"\\times|\\cdot|[×·]", "*"),
        (r"\\pi(?![a-zA-Z])", "π"),
        (r"(?<=\d)\s*(?:\\text|\\mathrm|\\mbox)\s*\{\s*[a-zA-Z ]+\}(?:\^\{?\d\}?)?(?=\s*[}$.]|\s*$)", ""),  # units
        (r"\\(?:text|mathrm|mbox|textbf|mathbf|boldsymbol|textit)\s*\{([^{}]*)\}", r"\1"),
        (r"(?<=\d)\s*(?=\\[dtc]?frac)", " "),  # a fraction after a number is a mixed number
        (r"\\[dtc]?frac\s*(?:\{(-?\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))", r"\1\2/\3\4"),
        (r"\\sqrt\s*(?:\{(\w+)\}|(\d))", r"√\1\2"),
        (r"\^\s*\{(-?\w+)\}", r"^\1"),
        (r" ?([*^√]) ?(?=[\d√-])", r"\1"),
        (r"\\[()\[\]]", "$"),
        (r"\$([^$\n]*\\[a-z][^$\n]*)\$", r"`\1`"),  # a formula is quoted; other dollars are currency
        (r"(?:\bUS)?\\?[$€£]", ""),
        (r"(?<!\w)\(([A-J])\)", r"\1)"),  # a choice
    )
]

# the end of an answer in words: the end of the line, sentence (not of an initial, as in J. K. Rowling) or clause
_END = (
    r"(?:$|(?<!\b[A-Z])(?<!\b[DMS][rst])(?<!\bMrs)\.(?:\s|$)|[!?;](?:\s|$)| [–—]|,? (?:since|because)\b"
    r"|, (?:as|so|for|but|which|who|where|when|while|if|given|not|it|he|she|they|we)\b)"
)
_WORDS = rf"[^\s,.;:!?)][^\n]*?(?={_END})"
# a number with a suffix that changes it: a fraction, date, time, power, product or root
_DIGITS = r"\d+(?:[.,]\d+)*+"
_NUMBER = (
    rf"(?>[-+]?√?(?:{_DIGITS}|(?<!\w)\.\d+)(?:[eE][-+]?\d+)?"
    rf"(?: \d+/\d+(?!\d)|[-/:^*]-?√?{_DIGITS}|√{_DIGITS}|π)*)"
)
# a number is not followed by the rest of a formula: not 5x, 5(x) or 5 - 2x, but 5km
_NO_FORMULA = (
    r"(?!(?!(?:[ckm]m|[km]g|ml|mph|mins?|hrs?|st|nd|rd|th)\b)[\w(√]"
    r"| ?(?:[-+*/^<>]|\b(?:or|and|to)\b) ?(?:[\d(\\√]|[a-zA-Z]\b)| ?\\[a-z]| [xyzn]\b)"
)
# the left side of an equation, names or arithmetic, if no other equation follows: 12 - 5 = 7 is 7
_NEXT_EQUATION = rf"(?:[^\n.!?;, =]++|(?!{_END})[^\n=]){{,99}}+="
_LEFT_SIDE = rf"(?:(?>(?:[a-zA-Z] *|[-+*/^()\d.,√π ]+)= *)+(?={_NUMBER}{_NO_FORMULA}(?!{_NEXT_EQUATION})))?"
_UNIT = r" (?:(?:hour|minute|day|week|month|year|pound|dollar)s?|h|feet|foot|ft)"
_TUPLE = r"(?:[(\[]|\\?\{)[^()\[\]{},\n]*,[^()\[\]{}\n]*+[)\]}]"
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_DAY = r"\d{1,2}(?:st|nd|rd|th)?\b"
_FORM = "|".join(
    (
        rf"{_TUPLE}(?>(?: *(?:∪|\\cup|U|and|or|,) *{_TUPLE})*)(?! *(?:\\[a-z]|[-+*/^=<>(∪∩]))",  # or interval, or set
        rf"{_DAY} (?:of )?{_MONTH}(?:,? \d{{4}})?|{_MONTH} (?:{_DAY}(?:,? \d{{4}})?|\d{{4}})",
        rf"{_NUMBER}(?>(?:(?:(?:{_UNIT})?(?:,? (?:and|or|to) |, ?)|{_UNIT} ){_NUMBER})*){_NO_FORMULA}",  # or several
        r'"[^"\n]+"|“[^”\n]+”|`[^`\n]+`|' + r"'[^'\n]+'(?!\w)",
        r"[A-J](?=\s*$|[):.,](?![\s,]*(?:and |or )?[A-Z](?:[),.]|\s*$| and | or )))",  # one choice
        r"(?i:yes|no|true|false)\b(?! ?\w|['-]\w)",
    )
)
# an answer and nothing else, except for units and the text of a choice
_ALONE = re.compile(rf"\A\s*+{_LEFT_SIDE}({_FORM})(?:[a-zA-Z %./]*+(?:\^\d)?|(?<=[A-J])[):.][^\n]*)\s*\Z")
_INSIDE = r"(?:\\.|[^{}\\])*+"
for _ in range(6):  # braces within braces
    _INSIDE = rf"(?:\\.|[^{{}}\\]|\{{{_INSIDE}\}})*+"
_RATIO = re.compile(r"-?(?:\d+ )?\d+/\d+")
_EXACT = Context(prec=999, Emax=999, Emin=-999, traps=[InvalidOperation])  # finite: 1e999999999 is not written out


def _after(marker: str, answer: str) -> Callable[[str], list[str]]:
    """Return a function that finds all answers after a marker and words that may introduce them."""
    skip = r"[\s*]*+(?:(?:therefore|thus|then|hence|simply|just|about|approximately|exactly|option|choice)\b[\s:]*)*+"
    return re.compile(rf"(?m)(?:{marker}){skip}{_LEFT_SIDE}({answer})").findall


# a solution may follow a colon: a sentence of four words or more
_IS = r"\b(?i:answer\s++is)\b\s*+:?"
_COLON = r"(?:\bA|\b(?i:answer))\s*:"
_NO_SENTENCE = r"(?!\s*(?=[AI]? ?[a-zA-Z]{2})(?:\S++(?<![a-z\d]{2}[.!?;]) ++){3}\S)"
_FIND = (  # the first one that finds an answer is used
    _after(r"####(?=[ \t]*+\S)", f"{_FORM}|{_WORDS}"),
    re.compile(rf"\\boxed\s*\{{(?!\s*\}})({_INSIDE})\}}").findall,
    _after(f"{_IS}|{_COLON}", _FORM),
    _after(f"{_IS}|{_COLON}{_NO_SENTENCE}", _WORDS),
    _ALONE.findall,
    re.compile(_NUMBER).findall,
    _after(_COLON, _WORDS),
)


def final_answer(text: str) -> str:
    r"""Return the final answer of a solution, in normal form.

    It is the text after `####`, in `\boxed{}`, or after "answer is", `answer:` or `A:`. For a text without these
    markers it is the last number, and for a text without numbers the entire text.

    An answer after a marker is a number, several numbers, a tuple or interval, a date, a quoted text, the letter of a
    choice, yes or no, or words up to the end of their sentence or clause: "The answer is no, since 5 > 3" is "no".
    ("No, since 5 > 3" has no marker and is "3".) After a colon, a sentence of four words or more is a solution, with
    its last number.

    A number includes the fraction, power, time or product that it starts. In an equation it is the number after the
    last `=`. Thousands separators, currency signs, units after a number and a trailing period or `.0` are ignored:
    "$1,200.00" is "1200", and \frac{6}{8} is "0.75".
    """
    for pattern, plain in _PLAIN_TEXT:
        text = pattern.sub(plain, text)
    # the last answer counts, since solutions may try several
    return _normalize(next((answers[-1] for find in _FIND if (answers := find(text))), text))


def _normalize(answer: str) -> str:
    """Return the normal form of an answer."""
    if alone := _ALONE.match(answer):
        answer = alone[1]
    answer = " ".join(answer.strip("*%\"'“”‘’` \n\t").rstrip("$.,*% \n\t\"'“”‘’`").split())
    if re.match(r"[(\[{]|\\\{", answer):
        return re.sub(r"\s|\\(?=[{}])", "", answer).lower()
    # a comma separates thousands, or the items of a list: 1,200 and 1,2
    number = re.sub(r"(?<![\d,])\d{1,3}(?:,\d\d\d?)*,\d{3}(?![\d,])", lambda match: match[0].replace(",", ""), answer)
    if _RATIO.fullmatch(number):
        with suppress(ValueError, ArithmeticError):  # too many digits, or by zero
            value = sum(map(Fraction, number.lstrip("-").split())) * (-1 if number.startswith("-") else 1)
            number = str(value)  # in lowest terms, and as a decimal if that is exact
            number = str(Context(prec=99, traps=[Inexact]).divide(value.numerator, value.denominator))
    try:
        return f"{_EXACT.create_decimal(number).normalize(_EXACT):f}"
    except InvalidOperation:
        return number.lower()
