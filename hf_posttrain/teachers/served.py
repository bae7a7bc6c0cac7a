"""Teacher on a server. Token ids are sent, and the log-probabilities of these and of the best tokens are returned.

Any server with the completions API of OpenAI and with `prompt_logprobs` is supported. It is tested with vLLM. Each of
the following properties would give wrong numbers without an error:

- vLLM returns `prompt_logprobs` at temperature 1, whatever the request or the server options are. Another temperature
  requires the whole distribution.
- The server may tokenise a text differently from the tokens that were sampled. Therefore ids are sent, and the ids that
  the server has read are compared.
- The server returns the K best tokens and the token itself. The whole distribution requires K = V.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

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
    ask_on_all_ranks,
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
"""Text whose ids differ between most tokenizers."""
Text: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int] | None]
"""Prompt, answer, and mask of the scored tokens of the answer."""
_STATUS_HINTS = {"/v1/completions": "The path or the model does not exist, see /v1/models"}


class ServedTeacher:
    """Teacher on a server.

    Args:
        trainer: The trainer.
        section: The section of the teacher.
        key: Name of the section in messages.

    Raises:
        InputError: The server cannot be reached, or training rows are too long for it. Later requests that fail raise
            ServerError.
    """

    name = ""
    dense = False
    aligner: Aligner | None = None
    models: tuple[FrozenModel, ...] = ()

    def __init__(self, trainer: TrainerInterface, section: TeacherSection, key: str = "teacher") -> None:
        self.trainer = trainer
        self.section = section
        self.url_key = f"{key}.url"
        self.server = Server(str(section.url), self.url_key, _STATUS_HINTS)
        model_info = ask_on_all_ranks(self.server.model_info)
        self.model = model_info["id"]
        self.root = model_info.get("root")
        self.max_model_len = model_info.get("max_model_len")
        check_lengths(self.server, self.max_model_len, trainer.train_dataset, trainer.args)
        if self.root not in (None, section.name_or_path):
            logger.info(
                "%s serves %s, and its tokenizer is loaded from %s", section.url, self.root, section.name_or_path
            )
        model_section = ModelSection(section.name_or_path, trust_remote_code=section.trust_remote_code)
        self.tokenizer = load.load_tokenizer(model_section)
        size = _vocabulary_size(model_section)
        if size is None:
            logger.info("%s has no config.json, so its vocabulary is that of the tokenizer", section.name_or_path)
        self.vocabulary = size or max(self.tokenizer.get_vocab().values()) + 1

    @property
    def description(self) -> str:
        """Description of the teacher in checkpoints."""
        return f"served {self.root or self.model}"

    def _inputs(self, batch: MicroBatch) -> tuple[TeacherBatch, list[Text]]:
        """Return the input of this teacher for a batch, and its texts."""
        inputs = teacher_batch(batch, self.name)
        assert isinstance(inputs, TeacherBatch)
        return inputs, inputs.texts.items if inputs.texts else []

    def signal(self, batch: MicroBatch, request: Request) -> TeacherSignal:
        """Score a batch, see `signal.Teacher`."""
        return self.signals([batch], request)[0]

    def signals(self, batches: Sequence[MicroBatch], request: Request) -> list[TeacherSignal]:
        """Score several batches with concurrent HTTP requests. All ranks call it."""
        if request.kind == "dense":
            raise InputError("a server returns only the most likely tokens. Set teacher.top_k")

        def score_batches() -> list[TeacherSignal]:
            ends = request.eos.ids.tolist() if request.eos else []
            scores = self._scores(batches, request.top_k, ends)
            return [self._signal(rows, batch, request) for rows, batch in zip(scores, batches, strict=True)]

        return ask_on_all_ranks(score_batches)  # an invalid response must end all ranks

    def join_collective(self, batch: MicroBatch) -> None:
        """Take part in `signal` on a rank that has no token of this teacher."""
        ask_on_all_ranks(lambda: None)

    def _signal(self, rows: Sequence[dict[int, float]], batch: MicroBatch, request: Request) -> TeacherSignal:
        """Return the signal for one batch.

        Args:
            rows: Log-probabilities by token id, for each scored token of the texts of the batch.
            batch: The batch of the student.
            request: The request of the loss.
        """
        inputs, _ = self._inputs(batch)
        k = request.top_k
        vocabulary = request.vocabulary
        eos = request.eos
        order = inputs.order.cpu()
        device = batch.input_ids.device
        targets = eos.merge_ids(batch.targets[inputs.positions])
        min_known = min(map(len, rows), default=vocabulary)
        _check_temperature(request.temperature, min_known, vocabulary)
        width = max([k, *map(len, rows)])
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        logps = torch.full((len(rows), width), -torch.inf)
        for n, row in enumerate(rows):
            ids[n, : len(row)] = torch.tensor([*row], dtype=torch.long)
            logps[n, : len(row)] = torch.tensor([*row.values()])
        ids = ids[order].to(device)
        logps = logps[order].to(device)
        # Ids that the student lacks get no probability. If all others are known, they are normalized without these.
        logps = logps.masked_fill(ids >= vocabulary, -torch.inf)
        if rows and min_known >= vocabulary:
            logps = torch.log_softmax(logps / request.temperature, -1)
        if eos:  # the first EOS id gets the known probability of all EOS ids
            is_eos = torch.isin(ids, eos.ids)
            eos_logps = logps.masked_fill(~is_eos, -torch.inf).logsumexp(-1, keepdim=True)
            is_first = is_eos & (is_eos.cumsum(-1) == 1)
            logps = torch.where(is_first, eos_logps, logps.masked_fill(is_eos, -torch.inf))
            ids = ids.where(~is_first, eos.ids[0])
        target_logps = logps.masked_fill(ids != targets[:, None], -torch.inf).amax(-1)
        if request.kind == "sampled":
            return Sampled(target_logps)
        best = logps.topk(min(k, width, vocabulary), dim=-1)
        best_ids = ids.gather(-1, best.indices)
        if eos:  # an EOS id without probability in both models replaces merged EOS ids among the best tokens
            best_ids = best_ids.where(best.values > -torch.inf, eos.ids[1])
        elif best.values.isinf().any():
            problem = f"the best {k} tokens of the teacher have ids from {vocabulary} on, which the student lacks"
            raise InputError(f"{self.url_key}: {problem}. Lower teacher.top_k")
        return TopK(best_ids, best.values, target_logps)

    def target_logps(self, batch: MicroBatch, ends: Sequence[int]) -> Tensor:
        """Return the log-probabilities of the tokens of a teacher with another tokenizer, [M].

        Args:
            batch: The batch of the student.
            ends: Ids that end an answer, which count as one outcome.
        """
        tokens = [token for _, answer, _ in self._inputs(batch)[1] for token in answer]

        def score_tokens() -> list[Tensor]:
            [rows] = self._scores([batch], 0, ends)
            outcomes = [
                [row[end] for end in ends] if token in ends else [row[token]]
                for row, token in zip(rows, tokens, strict=True)
            ]
            return [torch.tensor(logps).logsumexp(0) for logps in outcomes]

        return torch.stack(ask_on_all_ranks(score_tokens)).to(batch.input_ids.device)

    def _scores(self, batches: Sequence[MicroBatch], k: int, ends: Sequence[int]) -> list[list[dict[int, float]]]:
        """Return log-probabilities by token id for all scored tokens of each batch, in the order of the texts.

        The ids are the k best ones and the token itself, and all `ends` if the token is one of them.
        """
        texts_of_batches = [self._inputs(batch)[1] for batch in batches]
        all_texts = [text for texts in texts_of_batches for text in texts]

        def score_text(text: Text) -> list[dict[int, float]]:
            prompt, answer, mask = text
            return self._score(prompt, answer, mask, k, ends)

        scores = iter(run_concurrently(score_text, all_texts))
        return [[row for _ in texts for row in next(scores)] for texts in texts_of_batches]

    def _score(
        self, prompt: Sequence[int], answer: Sequence[int], mask: Sequence[int] | None, k: int, ends: Sequence[int]
    ) -> list[dict[int, float]]:
        """Return log-probabilities by token id for the scored tokens of an answer after its prompt.

        Raises:
            ServerError: The response of the server is not valid, or the text is too long.
        """
        ids = [*prompt, *answer]
        if self.max_model_len and len(ids) >= self.max_model_len:
            problem = f"{len(prompt)} tokens of prompt and {len(answer)} of answer are too long for {self.server.url}"
            raise ServerError(f"{self.url_key}: {problem}. Start it with a --max-model-len above {len(ids)}")
        body = {"model": self.model, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k}
        [choice] = self.server.complete(body, ids)
        prompt_logprobs = choice.get("prompt_logprobs")
        if not isinstance(prompt_logprobs, list) or len(prompt_logprobs) != len(ids):
            problem = f"{self.server.url} returns no prompt_logprobs"
            raise ServerError(f"{self.url_key}: {problem}. Use vLLM or a compatible server")

        positions = [position for position, flag in enumerate(mask or [1] * len(answer), len(prompt)) if flag]
        rows = [
            {int(token): entry["logprob"] for token, entry in prompt_logprobs[position].items()}
            for position in positions
        ]
        for position, row in zip(positions, rows, strict=True):
            if ids[position] not in row or len(row) < min(k, self.vocabulary):
                problem = f"{self.server.url} returns {len(row)} log-probabilities of token {position}"
                raise ServerError(f"{self.url_key}: {problem}, not the {k} best and that of the token")
        if positions and positions[-1] == len(ids) - 1 and ids[-1] in ends and not {*ends} <= rows[-1].keys():
            rows[-1] |= self._score_next(ids[:-1], ends)
        return rows

    def _score_next(self, ids: Sequence[int], candidates: Sequence[int]) -> dict[int, float]:
        """Return the log-probabilities of candidates for the next token. The server has the text in its cache."""
        body = {"model": self.model, "max_tokens": 1, "temperature": 1.0, "logprobs": 1} | UNMODIFIED_SAMPLING
        body |= {"logprob_token_ids": list(candidates), "return_tokens_as_token_ids": True}
        [choice] = self.server.complete(body, ids)
        top_logprobs = ((choice.get("logprobs") or {}).get("top_logprobs") or [{}])[0]
        logps = {token: top_logprobs[name] for token in candidates if (name := f"token_id:{token}") in top_logprobs}
        if len(logps) < len({*candidates}):
            problem = f"{self.server.url} returns no log-probabilities of {list(candidates)} (logprob_token_ids)"
            raise ServerError(f"{self.url_key}: {problem}. Set teacher.merge_eos: false, or use vLLM")
        return logps

    def check(self, k: int) -> None:
        """Check that the server returns k log-probabilities of each token and has the expected tokenizer.

        All ranks call it.

        Raises:
            InputError: The server does not return k log-probabilities, or its tokenizer differs from that of
                `name_or_path`.
        """
        if k:
            _check_temperature(self.trainer.args.temperature, k, self.vocabulary)
        ids = self.tokenizer(PROBE_TEXT)["input_ids"]
        try:
            ask_on_all_ranks(self._score, ids[:1] * 2, ids[:1], None, k, [])
        except ServerError as error:
            hint = f". Start it with --max-logprobs {k}, or lower teacher.top_k" if error.status == 400 and k else ""
            raise ServerError(f"{error}{hint}", error.status) from error

        body = {"model": self.model, "prompt": PROBE_TEXT, "max_tokens": 1, "return_token_ids": True}
        response = ask_on_all_ranks(lambda: self.server.post("/v1/completions", body)["choices"][0])
        server_ids = response.get("prompt_token_ids")
        if server_ids not in (None, ids):
            reading = f"{self.server.url} reads {PROBE_TEXT!r} as ids {server_ids}"
            problem = f"{reading}, and the tokenizer of {self.section.name_or_path} as {ids}"
            raise InputError(f"{self.url_key}: {problem}. Set name_or_path to the model of the server")

    def key(self) -> object:
        """Return the cache key of the scores, which has the name of the model and four rounded scores."""
        ids = [token % self.vocabulary for token in range(11, 11 + 24)]
        rows = ask_on_all_ranks(self._score, ids[:8], ids[8:], None, 0, [])
        scores = [round(row[token], 1) for row, token in zip(rows[::4], ids[8::4], strict=True)]
        return f"served {self.model} {self.root} {gather_object([scores])[0]}"

    def ends(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None) -> list[int]:
        """Return the ids that end an answer, according to the files in the folder of the model."""
        return terminal_ids_from_config(load.load_generation_config(self.section), tokenizer, template_kwargs)

    def release(self) -> None:
        """Do nothing, because the model is on the server."""


def check_lengths(server: Server, max_model_len: object, rows: AnyDataset, args: PostTrainConfig) -> None:
    """Check the training rows against the length limit of a server, which generates a token after each row.

    A teacher with its own prompt or tokenizer reads other rows, whose lengths are checked when they are scored.

    Args:
        server: The server.
        max_model_len: Its maximum length in tokens, if it is known.
        rows: The training rows.
        args: The Config of the run.

    Raises:
        InputError: Rows may be too long.
    """
    options: Any = args
    reads_rows = not (options.teacher.prompt or options.teacher.tokenizer)
    if reads_rows and isinstance(max_model_len, int) and isinstance(rows, datasets.Dataset) and len(rows):
        length = int(max_example_lengths(rows, args).max())
        if length >= max_model_len:
            problem = f"rows have up to {length} tokens, and {server.url} has a --max-model-len of {max_model_len}"
            raise InputError(f"{server.option}: {problem}. Start it with {length + 1}, or lower max_length")


def check_server(section: TeacherSection, key: str, config: Any, rows: AnyDataset | None = None) -> None:
    """Check a server and its options before anything is loaded.

    Args:
        section: The section of the teacher.
        key: Name of the option with the URL in messages.
        config: The Config of KD or OPD.
        rows: The training rows, or None if they are not prepared yet.

    Raises:
        InputError: The server cannot be reached, cannot be combined with the temperature of the Config, or the rows are
            too long for it.
    """
    server = Server(str(section.url), key, _STATUS_HINTS)
    model_info = server.model_info()
    if rows is not None:
        check_lengths(server, model_info.get("max_model_len"), rows, config)
    top_k = config.teacher.top_k
    if top_k and config.temperature != 1 and not section.own_tokenizer:
        size = _vocabulary_size(ModelSection(section.name_or_path))
        # with an unknown size only the trainer can check the temperature
        _check_temperature(config.temperature, top_k, top_k if size is None else size)


def _vocabulary_size(section: ModelSection) -> int | None:
    """Return the number of token ids in config.json, or None if there is only a tokenizer."""
    with suppress(InputError):
        return load.check_model(section).get_text_config().vocab_size
    return None


def _check_temperature(temperature: float, num_known: int, vocabulary: int) -> None:
    """Raise ServerError if the temperature requires the whole distribution and only a part of it is known."""
    if temperature != 1 and num_known < vocabulary:
        raise ServerError(f"temperature={temperature:g}: {_TEMPERATURE_PROBLEM}")


_TEMPERATURE_PROBLEM = (
    "a server returns log-probabilities at temperature 1, and top tokens are not sufficient for another temperature. "
    "Set temperature: 1, or set teacher.top_k to the whole vocabulary and --max-logprobs -1 at the server"
)
