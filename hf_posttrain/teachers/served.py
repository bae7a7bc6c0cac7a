"""A teacher on a server: token ids go in, and out come the log-probabilities of each and of the best ones there.

Any server with OpenAI's completions and `prompt_logprobs` will do; vLLM is the one that this is tested with. Traps, of
which each gives wrong numbers without an error:

- vLLM gives `prompt_logprobs` at temperature 1, whatever it is asked for or started with. At another temperature the
  whole distribution is needed.
- It takes text to mean other tokens than were sampled: so ids are sent, and those that it read are compared.
- It gives the K best and the token itself: for all K = V is asked for.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import datasets
import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..batching.micro_batch import MicroBatch
from ..data.align import Aligner
from ..data.dataset_type import AnyDataset
from ..data.lengths import max_example_lengths
from ..errors import InputError
from ..generation.completions_client import (
    UNMODIFIED_SAMPLING,
    Server,
    ServerError,
    raise_on_all_ranks,
    run_concurrently,
)
from ..models import load
from ..models.config import ModelSection, TeacherSection
from ..models.frozen import FrozenModel
from ..models.policy import terminal_ids_from_config
from ..trainer.config import PostTrainConfig
from ..trainer.interface import TrainerInterface
from .inputs import TeacherBatch, teacher_batch
from .signal import Request, Sampled, TeacherSignal, TopK

logger = logging.getLogger(__name__)
PROBE_TEXT = "1 + 23 = 24, café\n"
"""A text of which other tokenizers make other ids."""
_STATUS_HINTS = {"/v1/completions": "it has no such path, or no such model: see /v1/models"}


class ServedTeacher:
    """The model that a server has. Raises InputError for a server that cannot be asked, ServerError later on."""

    name = ""
    dense = False
    aligner: Aligner | None = None
    models: tuple[FrozenModel, ...] = ()

    def __init__(self, trainer: TrainerInterface, section: TeacherSection, key: str = "teacher"):
        self.trainer = trainer
        self.section = section
        self.url_key = f"{key}.url"
        self.server = Server(str(section.url), self.url_key, _STATUS_HINTS)
        first = raise_on_all_ranks(self.server.card)
        self.model = first["id"]
        self.root = first.get("root")
        self.longest = first.get("max_model_len")
        if not (trainer.args.teacher.prompt or trainer.args.teacher.tokenizer):
            self._check_lengths(trainer.train_dataset, trainer.args)
        if self.root not in (None, section.name_or_path):
            logger.info("%s serves %s; its tokenizer is read from %s", section.url, self.root, section.name_or_path)
        tokens = ModelSection(section.name_or_path, trust_remote_code=section.trust_remote_code)
        self.tokenizer = load.load_tokenizer(tokens)
        own = _vocabulary_size(tokens)
        if own is None:
            logger.info("%s has no config.json: its vocabulary is that of the tokenizer", section.name_or_path)
        self.vocabulary = own or max(self.tokenizer.get_vocab().values()) + 1

    def _check_lengths(self, rows: AnyDataset, args: PostTrainConfig) -> None:
        """Raises InputError where training rows may be longer than what the server scores: it wants space for a token
        behind them.
        """
        if isinstance(self.longest, int) and isinstance(rows, datasets.Dataset) and len(rows):
            longest = int(max_example_lengths(rows, args).max())
            if longest >= self.longest:
                problem = f"rows have up to {longest} tokens, and {self.server.url} a --max-model-len of {self.longest}"
                raise InputError(f"{self.url_key}: {problem}: start it with {longest + 1}, or lower max_length")

    @property
    def description(self) -> str:
        """What a checkpoint stores about it."""
        return f"served {self.root or self.model}"

    def _read(self, batch: MicroBatch) -> tuple[TeacherBatch, list[Any]]:
        """Return this teacher's part of a batch, and its texts: (prompt, answer, mask of scored tokens)."""
        read = teacher_batch(batch, self.name)
        assert isinstance(read, TeacherBatch)
        return read, read.texts.items if read.texts else []

    def signal(self, batch: MicroBatch, request: Request) -> TeacherSignal:
        """Score a batch, see `signal.Teacher`."""
        return self.signals([batch], request)[0]

    def signals(self, batches: Sequence[MicroBatch], request: Request) -> list[TeacherSignal]:
        """Score several batches with all HTTP requests open at once. All ranks call it."""
        if request.kind == "dense":
            raise InputError("a served teacher gives its top tokens alone: set teacher.top_k")

        def ask() -> list[TeacherSignal]:
            ends = request.eos.ids.tolist() if request.eos else []
            answers = self._scores(batches, request.top_k, ends)
            return [self._signal(rows, batch, request) for rows, batch in zip(answers, batches, strict=True)]

        return raise_on_all_ranks(ask)  # an answer that will not do ends all ranks, not the one whose rows it is of

    def join_collective(self, batch: MicroBatch) -> None:
        """Take part in `signal` on a rank that has no token of this teacher."""
        raise_on_all_ranks(lambda: None)

    def _signal(self, rows: Sequence[dict[int, float]], batch: MicroBatch, request: Request) -> TeacherSignal:
        """Convert the answer of a server for one batch. rows: log-probabilities by id, of each token of its texts."""
        read, _ = self._read(batch)
        k = request.top_k
        vocabulary = request.vocabulary
        eos = request.eos
        order = read.order.cpu()
        device = batch.input_ids.device
        targets = eos.merge_ids(batch.targets[read.places])
        fewest = min(map(len, rows), default=vocabulary)
        _check_temperature(request.temperature, fewest, vocabulary)
        width = max([k, *map(len, rows)])
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        logps = torch.full((len(rows), width), -torch.inf)
        for n, row in enumerate(rows):
            ids[n, : len(row)] = torch.tensor([*row], dtype=torch.long)
            logps[n, : len(row)] = torch.tensor([*row.values()])
        ids = ids[order].to(device)
        logps = logps[order].to(device)
        # ids that the student lacks are none; where all others are known, their probabilities add up without them
        logps = logps.masked_fill(ids >= vocabulary, -torch.inf)
        if rows and fewest >= vocabulary:
            logps = torch.log_softmax(logps / request.temperature, -1)
        if eos:  # all ends count as the first of them, with what is known of each
            end = torch.isin(ids, eos.ids)
            mass = logps.masked_fill(~end, -torch.inf).logsumexp(-1, keepdim=True)
            first = end & (end.cumsum(-1) == 1)
            logps = torch.where(first, mass, logps.masked_fill(end, -torch.inf))
            ids = ids.where(~first, eos.ids[0])
        of_targets = logps.masked_fill(ids != targets[:, None], -torch.inf).amax(-1)
        if request.kind == "sampled":
            return Sampled(of_targets)
        best = logps.topk(min(k, width, vocabulary), dim=-1)
        chosen = ids.gather(-1, best.indices)
        if eos:  # two ends among the best are one: in the place of the other an end without probability in both
            chosen = chosen.where(best.values > -torch.inf, eos.ids[1])
        elif best.values.isinf().any():
            lacks = f"ids from {vocabulary} on, which the student lacks, are among the teacher's best {k}"
            raise InputError(f"{self.url_key}: {lacks}: lower teacher.top_k")
        return TopK(chosen, best.values, of_targets)

    def target_logps(self, batch: MicroBatch, ends: Sequence[int]) -> Tensor:
        """The log-probability of each of the teacher's own tokens of a batch, [M], where it has its own tokenizer; all
        of its `ends` are one.
        """
        tokens = [ids for _, answer, _ in self._read(batch)[1] for ids in answer]

        def ask() -> list[Tensor]:
            [rows] = self._scores([batch], 0, ends)
            own = [
                [row[end] for end in ends] if token in ends else [row[token]]
                for row, token in zip(rows, tokens, strict=True)
            ]
            return [torch.tensor(each).logsumexp(0) for each in own]

        return torch.stack(raise_on_all_ranks(ask)).to(batch.input_ids.device)

    def _scores(self, batches: Sequence[MicroBatch], k: int, ends: Sequence[int]) -> list[list[dict[int, float]]]:
        """Of each scored token of each batch, one answer behind the other: ids -> log-probabilities, the k best and its
        own, and those of all `ends` where it is one.
        """
        texts = [self._read(batch)[1] for batch in batches]
        flat = [text for of_batch in texts for text in of_batch]
        found = iter(run_concurrently(lambda text: self._score(text[0], text[1], text[2], k, ends), flat))
        return [[row for _ in of_batch for row in next(found)] for of_batch in texts]

    def _score(
        self, prompt: Sequence[int], answer: Sequence[int], mask: Sequence[int] | None, k: int, ends: Sequence[int]
    ) -> list[dict[int, float]]:
        """Of an answer behind its prompt. Raises ServerError for what is no answer to that."""
        given = [*prompt, *answer]
        if self.longest and len(given) >= self.longest:
            problem = f"{len(prompt)} tokens of prompt and {len(answer)} of answer are too long for {self.server.url}"
            raise ServerError(f"{self.url_key}: {problem}: start it with a --max-model-len above {len(given)}")
        body = {"model": self.model, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k}
        [choice] = self.server.complete(body, given)
        told = choice.get("prompt_logprobs")
        if not isinstance(told, list) or len(told) != len(given):
            what = f"{self.server.url} gives no prompt_logprobs: it must be vLLM, or alike"
            raise ServerError(f"{self.url_key}: {what}")
        scored = [place for place, on in enumerate(mask or [1] * len(answer), len(prompt)) if on]
        rows = [{int(token): each["logprob"] for token, each in told[place].items()} for place in scored]
        for place, row in zip(scored, rows, strict=True):
            if given[place] not in row or len(row) < min(k, self.vocabulary):
                problem = f"{self.server.url} gives {len(row)} log-probabilities of token {place}"
                raise ServerError(f"{self.url_key}: {problem} where {k} and its own were asked for")
        if scored and scored[-1] == len(given) - 1 and given[-1] in ends and not {*ends} <= rows[-1].keys():
            rows[-1] |= self._score_next(given[:-1], ends)
        return rows

    def _score_next(self, given: Sequence[int], wanted: Sequence[int]) -> dict[int, float]:
        """The log-probabilities of some tokens behind others: the prompt's are at hand at the server."""
        body = {"model": self.model, "max_tokens": 1, "temperature": 1.0, "logprobs": 1} | UNMODIFIED_SAMPLING
        how = {"logprob_token_ids": list(wanted), "return_tokens_as_token_ids": True}
        [choice] = self.server.complete(body | how, given)
        told = ((choice.get("logprobs") or {}).get("top_logprobs") or [{}])[0]
        found = {token: told[name] for token in wanted if (name := f"token_id:{token}") in told}
        if len(found) < len({*wanted}):
            problem = f"gives no log-probabilities of {list(wanted)} (logprob_token_ids)"
            mend = "set teacher.merge_eos: false, or take vLLM"
            raise ServerError(f"{self.url_key}: {self.server.url} {problem}: {mend}")
        return found

    def check(self, k: int) -> None:
        """Raises InputError where the server does not give k log-probabilities of each token, or reads a text as other
        ids than the tokenizer of `name_or_path` does. All ranks call it.
        """
        if k:
            _check_temperature(self.trainer.args.temperature, k, self.vocabulary)
        ids = self.tokenizer(PROBE_TEXT)["input_ids"]
        try:
            raise_on_all_ranks(lambda: self._score(ids[:1] * 2, ids[:1], None, k, []))
        except ServerError as error:
            hint = f": start it with --max-logprobs {k}, or lower teacher.top_k" if error.status == 400 and k else ""
            raise ServerError(f"{error}{hint}", error.status) from error
        told = raise_on_all_ranks(
            lambda: self.server.post(
                "/v1/completions",
                {
                    "model": self.model,
                    "prompt": PROBE_TEXT,
                    "max_tokens": 1,
                    "return_token_ids": True,
                },
            )["choices"][0].get("prompt_token_ids")
        )
        if told not in (None, ids):
            read = f"{self.server.url} reads {PROBE_TEXT!r} as ids {told}, and {self.section.name_or_path} has {ids}"
            raise InputError(f"{self.url_key}: {read}: name the tokenizer of the model that it serves")

    def key(self) -> Any:
        """What tells its scores from those of another teacher: its model's name, and four scores, roughly."""
        ids = [token % self.vocabulary for token in range(11, 11 + 24)]
        rows = raise_on_all_ranks(lambda: self._score(ids[:8], ids[8:], None, 0, []))
        some = [round(row[token], 1) for row, token in zip(rows[::4], ids[8::4], strict=True)]
        return f"served {self.model} {self.root} {gather_object([some])[0]}"

    def ends(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None) -> list[int]:
        """The ids that end an answer, as far as its folder says."""
        return terminal_ids_from_config(load.load_generation_config(self.section), tokenizer, template_kwargs)

    def release(self) -> None:
        """It is elsewhere."""


def check_server(section: TeacherSection, key: str, config: Any) -> None:
    """Raises InputError for a served teacher that is not there, or does not go with the Config, before anything else is
    loaded. key: the option that names it.
    """
    Server(str(section.url), key, _STATUS_HINTS).model_info()
    top_k = config.teacher.top_k
    if top_k and config.temperature != 1 and not section.own_tokenizer:
        size = _vocabulary_size(ModelSection(section.name_or_path))
        _check_temperature(config.temperature, top_k, top_k if size is None else size)  # the trainer knows


def _vocabulary_size(section: ModelSection) -> int | None:
    """The number of token ids by config.json; None: there is a tokenizer alone."""
    with suppress(InputError):
        return load.check_model(section).get_text_config().vocab_size
    return None


def _check_temperature(temperature: float, known: int, vocabulary: int) -> None:
    """Raises ServerError where only the whole distribution would do, and `known` tokens of it are there."""
    if temperature != 1 and known < vocabulary:
        raise ServerError(f"temperature={temperature:g}: {_TEMPERATURE_PROBLEM}")


_TEMPERATURE_PROBLEM = (
    "a server gives log-probabilities at temperature 1, from whose top tokens others do not follow: set temperature: 1,"
    " or teacher.top_k to the whole vocabulary (and --max-logprobs -1 at the server)"
)
