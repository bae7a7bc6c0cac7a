"""The final answer of a solution, in one spelling: which texts say the same.

Of 56 kinds of answer that tests put behind six marks each, math-verify 0.9 reads 15 alike behind all: it is made
for expressions, and takes a number from words, dates, times and choices.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Context, Inexact, InvalidOperation
from fractions import Fraction

# LaTeX and Markdown as plain text says it, in this order
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
        (r"(?<=\d)\s*(?=\\[dtc]?frac)", " "),  # a fraction behind a number is a mixed number
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

# the end of words: of their line, sentence (not an initial or title, as in J. K. Rowling) or clause
_END = (
    r"(?:$|(?<!\b[A-Z])(?<!\b[DMS][rst])(?<!\bMrs)\.(?:\s|$)|[!?;](?:\s|$)| [–—]|,? (?:since|because)\b"
    r"|, (?:as|so|for|but|which|who|where|when|while|if|given|not|it|he|she|they|we)\b)"
)
_WORDS = rf"[^\s,.;:!?)][^\n]*?(?={_END})"
# a number, with what behind it makes it another one: a fraction, date, time, power, product, root
_DIGITS = r"\d+(?:[.,]\d+)*+"
_NUMBER = (
    rf"(?>[-+]?√?(?:{_DIGITS}|(?<!\w)\.\d+)(?:[eE][-+]?\d+)?"
    rf"(?: \d+/\d+(?!\d)|[-/:^*]-?√?{_DIGITS}|√{_DIGITS}|π)*)"
)
# that no formula goes on: not 5x, 5(x) or 5 - 2x, but 5km
_WHOLE = (
    r"(?!(?!(?:[ckm]m|[km]g|ml|mph|mins?|hrs?|st|nd|rd|th)\b)[\w(√]"
    r"| ?(?:[-+*/^<>]|\b(?:or|and|to)\b) ?(?:[\d(\\√]|[a-zA-Z]\b)| ?\\[a-z]| [xyzn]\b)"
)
# what equals a number, names or arithmetic, if no other equation follows: 12 - 5 = 7 is 7
_MORE = rf"(?:[^\n.!?;, =]++|(?!{_END})[^\n=]){{,99}}+="
_LEFT = rf"(?:(?>(?:[a-zA-Z] *|[-+*/^()\d.,√π ]+)= *)+(?={_NUMBER}{_WHOLE}(?!{_MORE})))?"
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
        rf"{_NUMBER}(?>(?:(?:(?:{_UNIT})?(?:,? (?:and|or|to) |, ?)|{_UNIT} ){_NUMBER})*){_WHOLE}",  # one or several
        r'"[^"\n]+"|“[^”\n]+”|`[^`\n]+`|' + r"'[^'\n]+'(?!\w)",
        r"[A-J](?=\s*$|[):.,](?![\s,]*(?:and |or )?[A-Z](?:[),.]|\s*$| and | or )))",  # one choice
        r"(?i:yes|no|true|false)\b(?! ?\w|['-]\w)",
    )
)
# an answer and nothing else, but for units and what a choice says
_ALONE = re.compile(rf"\A\s*+{_LEFT}({_FORM})(?:[a-zA-Z %./]*+(?:\^\d)?|(?<=[A-J])[):.][^\n]*)\s*\Z")
_INSIDE = r"(?:\\.|[^{}\\])*+"
for _ in range(6):  # braces within braces
    _INSIDE = rf"(?:\\.|[^{{}}\\]|\{{{_INSIDE}\}})*+"
_RATIO = re.compile(r"-?(?:\d+ )?\d+/\d+")
_EXACT = Context(prec=999, Emax=999, Emin=-999, traps=[InvalidOperation])  # finite: 1e999999999 is not written out


def _after(mark: str, answer: str) -> Callable[[str], list[str]]:
    """Finds all answers behind a mark and the words that may introduce them."""
    skip = r"[\s*]*+(?:(?:therefore|thus|then|hence|simply|just|about|approximately|exactly|option|choice)\b[\s:]*)*+"
    return re.compile(rf"(?m)(?:{mark}){skip}{_LEFT}({answer})").findall


# a solution may follow a colon: a sentence of four words or more
_IS = r"\b(?i:answer\s++is)\b\s*+:?"
_COLON = r"(?:\bA|\b(?i:answer))\s*:"
_NO_SENTENCE = r"(?!\s*(?=[AI]? ?[a-zA-Z]{2})(?:\S++(?<![a-z\d]{2}[.!?;]) ++){3}\S)"
_FIND = (  # the first that finds some decides
    _after(r"####(?=[ \t]*+\S)", f"{_FORM}|{_WORDS}"),
    re.compile(rf"\\boxed\s*\{{(?!\s*\}})({_INSIDE})\}}").findall,
    _after(f"{_IS}|{_COLON}", _FORM),
    _after(f"{_IS}|{_COLON}{_NO_SENTENCE}", _WORDS),
    _ALONE.findall,
    re.compile(_NUMBER).findall,
    _after(_COLON, _WORDS),
)


def final_answer(text: str) -> str:
    r"""The final answer of a solution: what stands behind `####`, in `\boxed{}`, or behind "answer is", `answer:` or
    `A:`; of a text without these marks its last number, of one without numbers the whole.

    A marked answer is a number, several, a tuple or interval, a date, a quoted text, the letter of a choice, yes or no,
    or words up to the end of their sentence or clause: "The answer is no, since 5 > 3" is "no". ("No, since 5 > 3"
    has no mark and is "3".) Behind a colon a sentence of four words or more is a solution, with its last number.

    A number is taken with the fraction, power, time or product that it begins, of an equation the one behind the
    last `=`. Thousands separators, currency signs, units behind a number and a trailing period or `.0` do not count:
    "$1,200.00" is "1200", and \frac{6}{8} is "0.75".
    """
    for pattern, plain in _PLAIN_TEXT:
        text = pattern.sub(plain, text)
    # the last answer counts, since solutions may try several
    return _normalize(next((found[-1] for find in _FIND if (found := find(text))), text))


def _normalize(answer: str) -> str:
    """One spelling for equal answers."""
    if alone := _ALONE.match(answer):
        answer = alone[1]
    answer = " ".join(answer.strip("*%\"'“”‘’` \n\t").rstrip("$.,*% \n\t\"'“”‘’`").split())
    if re.match(r"[(\[{]|\\\{", answer):
        return re.sub(r"\s|\\(?=[{}])", "", answer).lower()
    # a comma parts thousands, or a list: 1,200 and 1,2
    number = re.sub(r"(?<![\d,])\d{1,3}(?:,\d\d\d?)*,\d{3}(?![\d,])", lambda found: found[0].replace(",", ""), answer)
    if _RATIO.fullmatch(number):
        with suppress(ValueError, ArithmeticError):  # too many digits, or by zero
            value = sum(map(Fraction, number.lstrip("-").split())) * (-1 if number.startswith("-") else 1)
            number = str(value)  # in lowest terms, and as a decimal where that is exact
            number = str(Context(prec=99, traps=[Inexact]).divide(value.numerator, value.denominator))
    try:
        return f"{_EXACT.create_decimal(number).normalize(_EXACT):f}"
    except InvalidOperation:
        return number.lower()
