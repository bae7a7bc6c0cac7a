"""Model for inference and reader of prompt files, for commands that do not build a trainer.

A model is loaded like a frozen second model (bfloat16 on a GPU, float32 on a CPU). The rows of a file are read as in a
recipe, in every format that has prompts.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import torch
from transformers import PreTrainedTokenizerBase

from ..data.images import get_image_reader
from ..data.prepare import prepare
from ..data.row_schema import PROMPTS, RowKind
from ..data.sources import load
from ..errors import InputError
from ..generation import rollout
from ..generation.hf_generate import NONFINITE_LOGITS
from ..models.config import ModelSection
from ..models.load import check_model, check_tokenizer_fits, load_model, load_tokenizer, sampling_vocab_size
from ..models.policy import find_terminal_ids
from ..recipe.sections import Source
from ..scoring.forward import enable_scoring, score
from ..scoring.head import LogProb, Reward
from ..scoring.layouts import Branch, Example, Prompt, branch_with_reward, collate
from ..scoring.vision_inputs import VisionInputs


class InferenceModel:
    """A frozen model with its tokenizer, its terminal ids and its vision inputs.

    Args:
        section: The model, as in a recipe.
        template_kwargs: Options of the chat template, which may change the terminal ids.
        tokenizer: The tokenizer, if it is loaded already.
        device: Device of the model. Defaults to the GPU if there is one.
        generates: Whether the model generates answers, as a reward model cannot.

    Raises:
        InputError: For a model that cannot be loaded.
    """

    def __init__(
        self,
        section: ModelSection,
        template_kwargs: dict[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | None = None,
        generates: bool = True,
    ) -> None:
        if generates and section.head == "score":
            problem = f"{section.adapter or section.name_or_path} is a reward model and cannot generate text"
            raise InputError(f"{problem}. Use a language model")
        self.section = section
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = tokenizer or load_tokenizer(section)
        check_tokenizer_fits(self.tokenizer, check_model(section), section.name_or_path)
        model: Any = load_model(section, trainable=False, device=self.device)
        self.model = model.to(self.device)
        enable_scoring(self.model)
        reader = get_image_reader(self.tokenizer)
        self.vision = VisionInputs.from_model(self.model, reader) if reader else None
        self.vocabulary = sampling_vocab_size(self.tokenizer, self.model.config)
        self.terminal_ids = find_terminal_ids(self.model, self.tokenizer, template_kwargs)

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        temperature: float | None = None,
        seed: Sequence[int] = (0,),
        batch_size: int | None = None,
    ) -> list[list[int]]:
        """Generate one answer to each prompt.

        Args:
            prompts: Token ids of the prompts, with their images.
            max_new_tokens: Maximum length of an answer.
            temperature: Sampling temperature. None and 0 decode greedily.
            seed: Seed of the sampling. Samples also depend on the prompts that are answered together.
            batch_size: Number of prompts that are answered together. Defaults to all of them.

        Returns:
            The token ids of each answer.

        Raises:
            InputError: For logits that are NaN or infinite.
        """
        try:
            with rollout.seeded(self.device, *seed):
                return rollout.generate(
                    self.model,
                    prompts,
                    max_new_tokens,
                    self.terminal_ids,
                    self.tokenizer.pad_token_id,
                    temperature or None,
                    batch_size,
                    self.vocabulary,
                    self.vision,
                )
        except RuntimeError as error:
            if str(error) != NONFINITE_LOGITS:
                raise
            raise InputError(f"{self.section.name_or_path}: {error}") from error

    def logps(
        self, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        """Return the log-probability of each token of the answers, given their prompts, at a temperature."""
        pairs = zip(prompts, answers, strict=True)
        examples = [Example(prompt, [Branch(ids)], images=prompt.images) for prompt, ids in pairs]
        batch = collate(examples, "padded", vision_inputs=self.vision).to(self.device)
        with torch.no_grad():
            tile = LogProb(batch.targets, temperature, vocabulary=self.vocabulary)
            values = score(self.model, batch, tile).value.float()
        return [values[batch.owner == n].tolist() for n in range(len(answers))]

    def rewards(self, prompts: Sequence[Prompt], answers: Sequence[Sequence[Sequence[int]]]) -> list[tuple[float, ...]]:
        """Return the rewards of the answers to each prompt."""
        examples = [
            Example(prompt, [branch_with_reward(ids) for ids in group], images=prompt.images)
            for prompt, group in zip(prompts, answers, strict=True)
        ]
        batch = collate(examples, "padded", vision_inputs=self.vision).to(self.device)
        with torch.no_grad():
            values = score(self.model, batch, Reward()).value.float()
        return [tuple(values[batch.row[batch.owner] == n].tolist()) for n in range(len(examples))]

    def text(self, ids: Sequence[int]) -> str:
        """Decode an answer without special tokens."""
        return str(self.tokenizer.decode([*ids], skip_special_tokens=True))


@dataclasses.dataclass(frozen=True)
class PromptReader:
    """Replacement for a method, by which `prepare` reads rows that are prompts."""

    name: str = "sample"
    rows: RowKind = PROMPTS


def data_options(**options: object) -> SimpleNamespace:
    """Return the options by which rows are read, in place of a Config and with its defaults.

    Args:
        options: Options that differ from the defaults, such as `max_length` (of prompts here), `apply_chat_template`,
            `chat_template_kwargs` and `image_folder`.
    """
    defaults: dict[str, object] = {
        "max_length": None,
        "max_completion_length": 0,
        "keep_asked": True,
        "dataset_text_field": "text",
    }
    return SimpleNamespace(**(defaults | options))


def read_prompts(
    sources: Source | list[Source], tokenizer: PreTrainedTokenizerBase, options: SimpleNamespace
) -> datasets.Dataset:
    """Return prepared rows (`prompt_ids`, `completion_ids`, `asked`) of files with prompts and optional right answers.

    Raises:
        InputError: For the first invalid row, for a stream, and for rows without prompts.
    """
    paths = [source.path for source in (sources if isinstance(sources, list) else [sources])]
    where = ", ".join(paths)
    name = "prompts" if len(paths) > 1 else Path(paths[0]).name
    rows = prepare(load(sources, "prompts"), PromptReader(), tokenizer, options, name)
    if not isinstance(rows, datasets.Dataset):
        raise InputError(f"{where}: streaming is not supported for prompts. Remove streaming")
    if all(len(ids) < 2 for ids in rows["prompt_ids"]):
        raise InputError(f"{where}: the rows have no prompts to answer. Use data in a format with prompts")
    return rows
