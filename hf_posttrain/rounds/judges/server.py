"""A language model as judge, on a server with OpenAI's protocol. It compares answers in pairs, in both orders.

The score of an answer is the share of its comparisons that it wins. Neither answer wins if the result changes with
the order of the answers, because models favor a position (arXiv 2306.05685). A reply without the requested JSON counts
as no comparison.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Self

import urllib3
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...errors import InputError
from ...generation.completions_client import REQUEST_TIMEOUT, Server, ServerError, run_concurrently
from .config import JudgeSection
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
"""Number of requests for a reply with the JSON."""
MAX_FAILED_PROMPTS = 3
"""Number of prompts without any comparison after which the server counts as unable to judge."""
_JSON = re.compile(r"\{[^{}]*\}")


class ServerJudge:
    """Requests comparisons from the server of a section."""

    stays = False

    def __init__(
        self, section: JudgeSection, tokenizer: "PreTrainedTokenizerBase | None" = None, device: object = None
    ) -> None:
        self.section = section
        self.server = Server(str(section.name), "judge")
        self.question = ImmutableSandboxedEnvironment().from_string(section.question or QUESTION)
        self.greedy = {"temperature": 0}
        self.model = section.served_model
        self.last_problem = ""
        self.comparisons = 0  # number of comparisons that succeeded
        self.attempted_prompts = 0  # number of prompts with comparisons to make

    def key(self) -> str:
        """Return the name of the model."""
        self.check()
        return str(self.model)

    def score(self, questions: Sequence[Question]) -> list[list[float | None]]:
        """Return the share of comparisons that each answer wins.

        Raises ServerError if no comparison was made for the first MAX_FAILED_PROMPTS prompts, over all calls.
        """
        pairs = [(q, a, b) for q in questions for a, b in pairs_to_compare(q.answers, self.section.opponents)]
        differing = [(q, a, b) for q, a, b in pairs if q.answers[a] != q.answers[b]]  # of equal answers neither wins
        self.check()
        requests = [(q, *pair) for q, a, b in differing for pair in ((a, b), (b, a))]
        results = iter(run_concurrently(self._compare, requests))
        shares = {id(q): [[] for _ in q.answers] for q in questions}  # type: dict[int, list[list[float]]]
        failed = 0
        for question, a, b in pairs:
            # 1: the first answer of the question is better, 0: the second, 0.5: neither
            is_equal = question.answers[a] == question.answers[b]
            result, swapped = (0.5, 0.5) if is_equal else (next(results), next(results))
            if result is None or swapped is None:
                failed += 1
                continue
            share = (result + 1 - swapped) / 2
            shares[id(question)][a].append(share)
            shares[id(question)][b].append(1 - share)

        if failed:
            message = "judge: %d of %d comparisons were not made, the last: %s"
            logger.warning(message, failed, len(differing), self.last_problem)
        self.comparisons = self.comparisons + len(differing) - failed
        self.attempted_prompts = self.attempted_prompts + len({id(q) for q, _, _ in differing})
        if not self.comparisons and self.attempted_prompts >= MAX_FAILED_PROMPTS:
            problem = f"it made no comparison of the answers to {self.attempted_prompts} prompts"
            raise ServerError(f"{self.last_problem}; {problem}")
        return [[sum(won) / len(won) if won else None for won in shares[id(q)]] for q in questions]

    def check(self) -> None:
        """Find the model that judges. Raises ServerError if the server does not answer."""
        self.model = self.model or self.server.model_info()["id"]

    def _compare(self, request: tuple[Question, int, int]) -> float | None:
        """Return 1 if the first of two answers is better, 0 if the second is, 0.5 for neither, None if unknown."""
        question, first, second = request
        answers = {"first": question.answers[first], "second": question.answers[second]}
        try:
            text = self.question.render(prompt=question.text, reference=question.reference, **answers)
        except Exception as error:  # from the user's template
            raise InputError(f"judge: question: {type(error).__name__}: {error}") from error
        body = {"model": self.model, "messages": [{"role": "user", "content": text}]}
        for _ in range(MAX_TRIES):
            sent = body | self.greedy
            try:
                timeout = urllib3.Timeout(connect=10, read=self.section.timeout)
                response = self.server.post("/v1/chat/completions", sent, timeout=timeout)
                reply = response["choices"][0]["message"]["content"]
            except ServerError as error:
                # the key is wrong, or the server is lost: scores of earlier chunks are kept
                if error.status in (0, 401, 403):
                    raise
                self.last_problem = f"{error}. Raise timeout" if error.status == REQUEST_TIMEOUT else str(error)
                if error.status == 400 and "temperature" in str(error) and "temperature" in sent:
                    self.greedy = {}  # some models support only one temperature
                    continue
                return None
            except (LookupError, TypeError) as error:
                problem = f"did not answer by OpenAI's protocol ({type(error).__name__}: {error})"
                self.last_problem = f"judge: {self.server.url} {problem}"
                return None
            if (better := parse_verdict(reply)) is not None:
                return {0: 0.5, 1: 1.0, 2: 0.0}[better]
            self.last_problem = f"judge: {self.server.url} replied {str(reply)!r:.80}"
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def pairs_to_compare(answers: Sequence[str], opponents: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of the answers to compare, so that every answer has about as many comparisons.

    Each answer is compared with the next `opponents` / 2 answers in a circle, or with all others if they are fewer.
    """
    count = len(answers)
    steps = min(-(-opponents // 2), count // 2)
    pairs = {tuple(sorted((n, (n + step) % count))) for step in range(1, steps + 1) for n in range(count)}
    yield from ((a, b) for a, b in sorted(pairs) if a != b)


def parse_verdict(reply: object) -> int | None:
    """Return 0, 1 or 2 from {"better": ...}, the last such JSON of a text; None without one."""
    for text in reversed(_JSON.findall(reply) if isinstance(reply, str) else []):
        try:
            better = int(json.loads(text)["better"])
        except (ValueError, LookupError, TypeError):
            continue
        if better in (0, 1, 2):
            return better
    return None
