"""Judges that are models in this process: a reward model, and a teacher."""

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Self, TypeAlias

import torch
from accelerate.utils import send_to_device
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...data.chat import ChatTemplate, encode
from ...data.json_rows import from_rows
from ...data.prepare import prepare
from ...data.row_schema import SUPERVISED
from ...errors import InputError
from ...models import load
from ...models.config import ModelSection, section_from_name
from ...models.score_cache import weights_key
from ...scoring.forward import causal_lm, enable_scoring, score
from ...scoring.head import LogProb
from ...scoring.layouts import Branch, Example, collate
from .config import JudgeSection
from .question import Question

PromptAndAnswer: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Ids of a prompt, and of an answer to it."""


def check_judge(section: JudgeSection) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return the config and the tokenizer of a judge that is a model.

    Raises InputError for an unsuitable model, before its weights are loaded.
    """
    model = section_from_name(str(section.name))
    is_reward_model = section.by == "model"
    if model.adapter and not (is_reward_model and model.head == "score"):
        fix = f"Merge it into its base first: hf-posttrain merge {section.name} OUT"
        raise InputError(f"judge: {section.name} is an adapter. {fix}")
    config = load.check_model(model)
    if is_reward_model and not model.adapter and not load.is_classifier(config):
        kind = ", ".join(config.architectures or ()) or "a model of an unknown kind"
        raise InputError(
            f"judge: {section.name} is {kind}. A reward model must be a sequence classifier with one label"
        )
    if is_reward_model and not model.adapter and config.num_labels != 1:
        raise InputError(f"judge: {section.name} has {config.num_labels} labels. A reward model must have one label")
    if not is_reward_model and load.is_classifier(config):
        raise InputError(
            f"judge: {section.name} is a sequence classifier. A teacher must be a causal LM. Set by: model"
        )
    return config, load.load_tokenizer(model)


class ModelJudge:
    """A model that scores answers one by one, sorted by length, in batches of `batch_size`."""

    stays = False
    """Whether it stays on its device between two uses, as in online training."""

    def __init__(
        self,
        section: JudgeSection,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.section = section
        self.device = torch.device(device)
        self.config, self.tokenizer = check_judge(section)
        with (
            load.unsharded_initialization()
        ):  # ZeRO-3 would shard them over ranks that use the judge at different times
            self.model = self.load()
        self.model.requires_grad_(False).eval()

    def load(self) -> PreTrainedModel:
        """Return the model, on CPU."""
        raise NotImplementedError

    def key(self) -> str:
        """Return a hash of the weights."""
        return weights_key(self.model.state_dict(), sample=64)

    def tokens(self, questions: Sequence[Question]) -> list[PromptAndAnswer]:
        """Return the ids that the model reads for each answer, question by question."""
        raise NotImplementedError

    def score_batch(self, examples: list[PromptAndAnswer]) -> list[float]:
        """Return the scores of a batch of answers."""
        raise NotImplementedError

    def score(self, questions: Sequence[Question]) -> list[list[float | None]]:
        """Return the scores of all answers; None for an answer without tokens.

        Raises InputError for a score that is not finite.
        """
        examples = self.tokens(questions)
        order = sorted((n for n, (_, ids) in enumerate(examples) if ids), key=lambda n: -sum(map(len, examples[n])))
        values: list[float | None] = [None] * len(examples)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            for start in range(0, len(order), self.section.batch_size):
                numbers = order[start : start + self.section.batch_size]
                for number, value in zip(numbers, self.score_batch([examples[n] for n in numbers]), strict=True):
                    values[number] = value
        if broken := next((value for value in values if value is not None and not math.isfinite(value)), None):
            raise InputError(f"judge: {self.section.name} gives the score {broken}. Its weights are broken")
        scores = iter(values)
        return [[next(scores) for _ in question.answers] for question in questions]

    def __enter__(self) -> Self:
        self.model.to(self.device)  # type: ignore[arg-type]
        return self

    def __exit__(self, *error: object) -> None:
        if not self.stays:
            self.model.to("cpu")  # type: ignore[arg-type]


class RewardModel(ModelJudge):
    """A sequence classifier with one label, whose logit is the score, as saved by RewardTrainer here and in TRL."""

    def load(self) -> PreTrainedModel:
        """Return the classifier, on CPU."""
        model = load.load_model(self.section.model_section(), trainable=False, device=self.device)
        config: Any = causal_lm(model).config
        config.get_text_config().pad_token_id = self.tokenizer.pad_token_id  # transformers finds the last token by it
        config.use_cache = False  # nothing is generated
        return model

    def tokens(self, questions: Sequence[Question]) -> list[PromptAndAnswer]:
        """Return whole conversations in the reward model's own template, and plain prompts with their answers.

        An answer to a plain prompt ends with the eos, unless it was truncated.

        Raises InputError if the template rejects the messages.
        """
        texts = []
        ends: list[list[int]] = []
        eos = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        for question in questions:
            options = question.template_options or {}
            template = ChatTemplate(self.tokenizer, options.get("tools"), options.get("chat_template_kwargs"))
            for n, answer in enumerate(question.answers):
                if isinstance(question.prompt, str) or not self.tokenizer.chat_template:
                    texts.append(f"{question.text}{answer}")
                    ends.append(eos if not question.stopped or question.stopped[n] else [])
                else:
                    turns = [*question.prompt, {"role": "assistant", "content": answer}]
                    texts.append(template.render(turns))
                    ends.append([])
        return [
            ((), ids if ids[-1:] == end else ids + end)
            for ids, end in zip(encode(self.tokenizer, texts), ends, strict=True)
        ]

    def score_batch(self, examples: list[PromptAndAnswer]) -> list[float]:
        """Return the logits of the last tokens of a batch that is padded on the right."""
        max_length = max(len(ids) for _, ids in examples)
        rows = [[*ids, *[self.tokenizer.pad_token_id] * (max_length - len(ids))] for _, ids in examples]
        mask = [[1] * len(ids) + [0] * (max_length - len(ids)) for _, ids in examples]
        inputs = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}
        return self.model(**send_to_device(inputs, self.device)).logits[:, 0].float().tolist()


class TeacherJudge(ModelJudge):
    """A causal LM. The score of an answer is its log-probability per token."""

    def __init__(
        self,
        section: JudgeSection,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(section, tokenizer, device)
        self.has_same_tokens = tokenizer is not None and tokenizer.get_vocab() == self.tokenizer.get_vocab()
        enable_scoring(self.model)

    def load(self) -> PreTrainedModel:
        """Return the causal LM, on CPU."""
        return load.load_model(ModelSection(str(self.section.name)), trainable=False, device=self.device)

    def tokens(self, questions: Sequence[Question]) -> list[PromptAndAnswer]:
        """Return the ids of the model that answered, or the texts in the teacher's template if the tokens differ.

        A truncated answer has no terminal id.
        """
        if self.has_same_tokens and all(question.answer_ids for question in questions):
            return [(q.prompt_ids, ids) for q in questions for ids in q.answer_ids]
        examples: list[PromptAndAnswer] = [((), ()) for q in questions for _ in q.answers]
        answers = [(q, answer, not q.stopped or q.stopped[n]) for q in questions for n, answer in enumerate(q.answers)]
        for chat in (True, False):
            numbers = [n for n, (q, text, _) in enumerate(answers) if text and chat is not isinstance(q.prompt, str)]
            for number, row in zip(numbers, self._prepare([answers[n] for n in numbers], chat), strict=True):
                ended = answers[number][2]
                ids = row["completion_ids"] if ended else row["completion_ids"][:-1]
                examples[number] = row["prompt_ids"], ids
        return examples

    def _prepare(self, answers: list[tuple[Question, str, bool]], chat: bool) -> Iterator[dict[str, Any]]:
        """Yield rows of ids of these answers, which are not empty."""
        rows = []
        for question, answer, _ in answers:
            completion: Any = [{"role": "assistant", "content": answer}] if chat else answer
            rows.append({"prompt": question.prompt, "completion": completion, **(question.template_options or {})})
        if rows:
            reader: Any = SimpleNamespace(name="judge", rows=SUPERVISED)
            options: Any = SimpleNamespace(max_length=None)
            yield from prepare(from_rows(rows), reader, self.tokenizer, options, "answers")

    def score_batch(self, examples: list[PromptAndAnswer]) -> list[float]:
        """Return the mean log-probability of the tokens of each answer, including its terminal id."""
        batch = collate([Example(prompt, [Branch(ids)]) for prompt, ids in examples], "padded").to(self.device)
        size = causal_lm(self.model).config.get_text_config().vocab_size
        values = score(self.model, batch, LogProb(batch.targets, vocabulary=size)).value.float()
        return [values[batch.owner == n].mean().item() for n in range(len(examples))]
