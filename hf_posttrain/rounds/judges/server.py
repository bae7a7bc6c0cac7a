"""A language model as judge: it compares answers two by two, in both orders, behind a server with OpenAI's protocol.

An answer's score is the share of its comparisons that it won; one that comes out otherwise when the answers change
places is a draw, since models favour the place (arXiv 2306.05685). What the server does not answer in the form that is
asked for counts as no comparison.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import urllib3
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...errors import InputError
from ...generation.completions_client import REQUEST_TIMEOUT, Server, ServerError, run_concurrently
from .question import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
QUESTION = """\
Compare two answers to the same question. Judge whether they are right and helpful, not how long they are.

[Question]
{{ prompt }}
{% if reference %}
[The right answer]
{{ reference }}
{% endif %}
[Answer 1]
{{ first }}

[Answer 2]
{{ second }}

Reply with JSON alone: {"better": 1} or {"better": 2}, or {"better": 0} if neither is better."""
MAX_TRIES = 2
"""How often a question is asked whose answer is not of that form."""
MAX_FAILED_PROMPTS = 3
"""Prompts of which no comparison is made at all before the server counts as none that judges."""
_JSON = re.compile(r"\{[^{}]*\}")


class ServerJudge:
    """Asks the server of a section."""

    stays = False

    def __init__(self, section: Any, tokenizer: "PreTrainedTokenizerBase | None" = None, device: object = None):
        self.section = section
        self.server = Server(section.name, "judge")
        self.question = ImmutableSandboxedEnvironment().from_string(section.question or QUESTION)
        # a key goes to no server that anybody on the way could read it of
        host = urlsplit(section.name)
        key = os.environ.get("OPENAI_API_KEY")
        private = host.scheme == "https" or host.hostname in ("localhost", "127.0.0.1", "::1")
        self.headers = {"Authorization": f"Bearer {key}"} if key and private else {}
        self.greedy = {"temperature": 0}
        self.model = section.served_model
        self.last = ""  # what went wrong last
        self.made = 0
        self.tried = 0  # comparisons, and prompts that had some to make

    def key(self) -> str:
        """As `Judge`: the name of the model."""
        self.check()
        return str(self.model)

    def score(self, questions: Sequence[Question]) -> list[list[float | None]]:
        """As `Judge`. Raises ServerError where of MAX_FAILED_PROMPTS prompts, over all calls, no comparison at all was made."""
        pairs = [(q, a, b) for q in questions for a, b in pairs_to_compare(q.answers, self.section.opponents)]
        differ = [(q, a, b) for q, a, b in pairs if q.answers[a] != q.answers[b]]  # of equal ones neither is better
        self.check()
        found = iter(run_concurrently(self._ask, [(q, *pair) for q, a, b in differ for pair in ((a, b), (b, a))]))
        won = {id(q): [[] for _ in q.answers] for q in questions}  # type: dict[int, list[list[float]]]
        lost = 0
        for question, a, b in pairs:
            # 1: the first that is shown is better, 0: the second, 0.5: neither
            one, other = (next(found), next(found)) if question.answers[a] != question.answers[b] else (0.5, 0.5)
            if one is None or other is None:
                lost += 1
                continue
            result = (one + 1 - other) / 2
            won[id(question)][a].append(result)
            won[id(question)][b].append(1 - result)
        if lost:
            logger.warning("judge: %d of %d comparisons were not made, the last: %s", lost, len(differ), self.last)
        self.made = self.made + len(differ) - lost
        self.tried = self.tried + len({id(q) for q, _, _ in differ})
        if not self.made and self.tried >= MAX_FAILED_PROMPTS:
            raise ServerError(f"{self.last}; it made no comparison of the answers to {self.tried} prompts")
        return [[sum(mine) / len(mine) if mine else None for mine in won[id(q)]] for q in questions]

    def check(self) -> None:
        """Which model judges. Raises ServerError where the server cannot be asked."""
        self.model = self.model or self.server.model_info(headers=self.headers)["id"]

    def _ask(self, asked: tuple[Question, int, int]) -> float | None:
        """Which of two answers, in this order, is better: 1, 0, or 0.5; None where that is not known."""
        question, first, second = asked
        shown = {"first": question.answers[first], "second": question.answers[second]}
        try:
            text = self.question.render(prompt=question.text, reference=question.reference, **shown)
        except Exception as error:  # of the user's template
            raise InputError(f"judge: question: {type(error).__name__}: {error}") from error
        body = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        for _ in range(MAX_TRIES):
            sent = body | self.greedy
            try:
                answer = self.server.post("/v1/chat/completions", sent, **self._options())
                said = answer["choices"][0]["message"]["content"]
            except ServerError as error:
                if error.status in (401, 403):
                    raise ServerError(f"{error}: the key is read from OPENAI_API_KEY", error.status) from error
                if not error.status:  # nobody is there any more: what was judged before is kept
                    raise
                self.last = f"{error}: raise timeout" if error.status == REQUEST_TIMEOUT else str(error)
                if error.status == 400 and "temperature" in str(error) and "temperature" in sent:
                    self.greedy = {}  # some models have but one
                    continue
                return None
            except (LookupError, TypeError) as error:
                problem = f"answered otherwise than OpenAI's protocol has it ({type(error).__name__}: {error})"
                self.last = f"judge: {self.server.url} {problem}"
                return None
            if (better := parse_verdict(said)) is not None:
                return {0: 0.5, 1: 1.0, 2: 0.0}[better]
            self.last = f"judge: {self.server.url} said {str(said)!r:.80}"
        return None

    def _options(self) -> dict[str, Any]:
        return {"headers": self.headers, "timeout": urllib3.Timeout(connect=10, read=self.section.timeout)}

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def pairs_to_compare(answers: Sequence[str], opponents: int) -> Iterator[tuple[int, int]]:
    """Which answers are compared: each with the `opponents` next ones in a circle, or fewer where half the circle has
    all pairs. Every answer has about as many comparisons.
    """
    count = len(answers)
    steps = min(-(-opponents // 2), count // 2)
    pairs = {tuple(sorted((n, (n + step) % count))) for step in range(1, steps + 1) for n in range(count)}
    yield from ((a, b) for a, b in sorted(pairs) if a != b)


def parse_verdict(said: Any) -> int | None:
    """0, 1 or 2 of {"better": ...}, the last such JSON of a text; None without one."""
    for text in reversed(_JSON.findall(said) if isinstance(said, str) else []):
        try:
            better = int(json.loads(text)["better"])
        except (ValueError, LookupError, TypeError):
            continue
        if better in (0, 1, 2):
            return better
    return None
