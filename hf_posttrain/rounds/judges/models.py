"""Judges that are models here: a reward model, and a teacher."""

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import AutoModelForSequenceClassification

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
from .question import Question


def check_judge(section: Any) -> tuple[Any, Any]:
    """(config, tokenizer) of a judge that is a model. Raises InputError for what it cannot be, before weights."""
    model = section_from_name(section.name)
    rewards = section.by == "model"
    if model.adapter:
        raise InputError(f"judge: {section.name} is an adapter: merge it into its base first (PEFT's merge_and_unload)")
    config = load.check_model(model)
    if rewards and not load.is_classifier(config):
        kind = ", ".join(config.architectures or ()) or "a model of no known kind"
        raise InputError(f"judge: {section.name} is {kind}: a reward model is a sequence classifier with one label")
    if rewards and config.num_labels != 1:
        raise InputError(f"judge: reward model {section.name} has {config.num_labels} labels, and a score is one")
    if not rewards and load.is_classifier(config):
        raise InputError(f"judge: {section.name} is a sequence classifier, and a teacher writes text: by: model")
    return config, load.load_tokenizer(model)


class ModelJudge:
    """A model that scores answers one by one, sorted by length, `batch_size` at a time."""

    stays = False
    """On its device between two uses, as where they follow each other."""

    def __init__(self, section: Any, tokenizer: Any = None, device: torch.device | str = "cpu"):
        self.section = section
        self.device = torch.device(device)
        self.config, self.tokenizer = check_judge(section)
        with load.unsharded_initialization():  # ZeRO-3 would cut them over ranks that ask at different times
            self.model = self.load()
        self.model.requires_grad_(False).eval()

    def load(self) -> Any:
        """The model, on CPU."""
        raise NotImplementedError

    def key(self) -> str:
        """As `Judge`: a hash of its weights."""
        return weights_key(self.model.state_dict(), sample=64)

    def tokens(self, questions: Sequence[Question]) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Of each answer, question by question, what is read: ids of its prompt, and its own."""
        raise NotImplementedError

    def score_batch(self, examples: list[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """The scores of such pairs of ids."""
        raise NotImplementedError

    def score(self, questions: Sequence[Question]) -> list[list[float | None]]:
        """As `Judge`. An answer without tokens is not judged. Raises InputError for a score that is no number."""
        examples = self.tokens(questions)
        order = sorted((n for n, (_, ids) in enumerate(examples) if ids), key=lambda n: -sum(map(len, examples[n])))
        found: list[float | None] = [None] * len(examples)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            for start in range(0, len(order), self.section.batch_size):
                numbers = order[start : start + self.section.batch_size]
                for number, value in zip(numbers, self.score_batch([examples[n] for n in numbers]), strict=True):
                    found[number] = value
        if broken := next((value for value in found if value is not None and not math.isfinite(value)), None):
            raise InputError(f"judge: {self.section.name} gives the score {broken}: its weights are broken")
        scores = iter(found)
        return [[next(scores) for _ in question.answers] for question in questions]

    def __enter__(self) -> Any:
        self.model.to(self.device)
        return self

    def __exit__(self, *error: Any) -> None:
        if not self.stays:
            self.model.to("cpu")


class RewardModel(ModelJudge):
    """A sequence classifier with one label, whose logit is the score, as TRL's RewardTrainer leaves it."""

    def load(self) -> Any:
        """As `ModelJudge`."""
        name = self.section.name
        section = ModelSection(self.section.name)
        config = self.config
        config.pad_token_id = self.tokenizer.pad_token_id  # by which the last token is found
        config.use_cache = False  # nothing is generated
        dtype = load.weights_dtype(section, config, False, self.device)
        with load.as_input_error("reward model", name):
            return AutoModelForSequenceClassification.from_pretrained(
                name, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False
            )

    def tokens(self, questions: Sequence[Question]) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Whole conversations in the reward model's own template; plain texts as they follow each other. Raises
        InputError where the template refuses them.
        """
        texts = []
        for question in questions:
            more = question.more or {}
            template = ChatTemplate(self.tokenizer, more.get("tools"), more.get("chat_template_kwargs"))
            for answer in question.answers:
                if isinstance(question.prompt, str) or not self.tokenizer.chat_template:
                    texts.append(f"{question.text}{answer}")
                else:
                    turns = [*question.prompt, {"role": "assistant", "content": answer}]
                    texts.append(template.render(turns))
        return [((), ids) for ids in encode(self.tokenizer, texts)]

    def score_batch(self, examples: list[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """Padded on the right; the logit is that of the last token that is no padding, as transformers finds it."""
        longest = max(len(ids) for _, ids in examples)
        rows = [[*ids, *[self.tokenizer.pad_token_id] * (longest - len(ids))] for _, ids in examples]
        mask = [[1] * len(ids) + [0] * (longest - len(ids)) for _, ids in examples]
        given = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}
        return self.model(**send_to_device(given, self.device)).logits[:, 0].float().tolist()


class TeacherJudge(ModelJudge):
    """A causal LM, whose log-probability per token of an answer is its score."""

    def __init__(self, section: Any, tokenizer: Any = None, device: torch.device | str = "cpu"):
        super().__init__(section, tokenizer, device)
        self.same = tokenizer is not None and tokenizer.get_vocab() == self.tokenizer.get_vocab()
        enable_scoring(self.model)

    def load(self) -> Any:
        """As `ModelJudge`."""
        return load.load_model(ModelSection(self.section.name), trainable=False, device=self.device)

    def tokens(self, questions: Sequence[Question]) -> list[tuple[Sequence[int], Sequence[int]]]:
        """The model's own ids, where both have the same tokens; otherwise its texts in the teacher's template, those
        that were cut without an end.
        """
        if self.same and all(question.answer_ids for question in questions):
            return [(q.prompt_ids, ids) for q in questions for ids in q.answer_ids]
        found: list[tuple[Sequence[int], Sequence[int]]] = [((), ()) for q in questions for _ in q.answers]
        each = [(q, answer, not q.stopped or q.stopped[n]) for q in questions for n, answer in enumerate(q.answers)]
        for chat in (True, False):
            numbers = [n for n, (q, answer, _) in enumerate(each) if answer and chat is not isinstance(q.prompt, str)]
            for number, row in zip(numbers, self._prepared([each[n] for n in numbers], chat), strict=True):
                ended = each[number][2]
                found[number] = row["prompt_ids"], row["completion_ids"] if ended else row["completion_ids"][:-1]
        return found

    def _prepared(self, answered: list[tuple[Question, str, bool]], chat: bool) -> Iterator[dict[str, Any]]:
        """Rows of ids of these answers, which are not empty."""
        rows = []
        for question, answer, _ in answered:
            said: Any = [{"role": "assistant", "content": answer}] if chat else answer
            rows.append({"prompt": question.prompt, "completion": said, **(question.more or {})})
        if rows:
            reader: Any = SimpleNamespace(name="judge", rows=SUPERVISED)
            yield from prepare(from_rows(rows), reader, self.tokenizer, SimpleNamespace(max_length=None), "answers")

    def score_batch(self, examples: list[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """The mean over an answer's tokens, its end among them."""
        given = [Example(prompt, [Branch(ids)]) for prompt, ids in examples]
        batch = collate(given, "padded").to(self.device)
        size = causal_lm(self.model).config.get_text_config().vocab_size
        values = score(self.model, batch, LogProb(batch.targets, vocabulary=size)).value.float()
        return [values[batch.owner == n].mean().item() for n in range(len(examples))]
