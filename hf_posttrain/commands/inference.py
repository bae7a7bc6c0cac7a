"""What commands without a trainer share: a model that answers, and files of prompts or answers.

A model is loaded as a second model is (bfloat16 on a GPU, float32 on a CPU); a file's rows are read as recipes read
theirs, in every format that has prompts.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import torch
from transformers import PreTrainedTokenizerBase

from ..data.images import read_by
from ..data.prepare import prepare
from ..data.row_schema import PROMPTS
from ..data.sources import load
from ..errors import InputError
from ..generation import rollout
from ..generation.hf_generate import BROKEN
from ..models.config import ModelSection
from ..models.load import check_model, check_tokenizer_fits, load_model, load_tokenizer, sampling_vocab_size
from ..models.policy import find_terminal_ids
from ..recipe.sections import Source
from ..scoring.forward import enable_scoring, score
from ..scoring.head import LogProb
from ..scoring.layouts import Branch, Example, Prompt, collate
from ..scoring.vision_inputs import VisionInputs


class InferenceModel:
    """A frozen model, its tokenizer and the ids that end its answers.

    section: the model, as a recipe has it. switches: options of the chat template. tokenizer: where it is loaded
    already. device: a GPU where there is one. Raises InputError for a model that cannot be loaded.
    """

    def __init__(
        self,
        section: ModelSection,
        switches: dict[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | None = None,
    ):
        self.section = section
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = tokenizer or load_tokenizer(section)
        check_tokenizer_fits(self.tokenizer, check_model(section), section.name_or_path)
        model: Any = load_model(section, trainable=False, device=self.device)
        self.model = model.to(self.device)
        enable_scoring(self.model)
        reader = read_by(self.tokenizer)
        self.see = VisionInputs.of(self.model, reader) if reader else None
        self.vocabulary = sampling_vocab_size(self.tokenizer, self.model.config)
        self.ends = find_terminal_ids(self.model, self.tokenizer, switches)

    def generate(
        self,
        prompts: Sequence[Prompt],
        longest: int,
        temperature: float | None = None,
        seed: Sequence[int] = (0,),
        batch_size: int | None = None,
    ) -> list[list[int]]:
        """An answer of at most `longest` tokens to each prompt; temperature None or 0: greedy. What is drawn depends on
        `seed` and on the prompts that are answered together. Raises InputError for logits that are NaN.
        """
        pad_id = self.tokenizer.pad_token_id
        drawn = (temperature or None, batch_size, self.vocabulary, self.see)
        try:
            with rollout.seeded(self.device, *seed):
                return rollout.generate(self.model, prompts, longest, self.ends, pad_id, *drawn)
        except RuntimeError as error:
            if str(error) != BROKEN:
                raise
            raise InputError(f"{self.section.name_or_path}: {error}") from error

    def logps(
        self, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        """Log-probabilities of each answer's tokens behind its prompt, at a temperature."""
        pairs = zip(prompts, answers, strict=True)
        examples = [Example(prompt, [Branch(ids)], pictures=prompt.pictures) for prompt, ids in pairs]
        batch = collate(examples, "padded", pictures=self.see).to(self.device)
        with torch.no_grad():
            tile = LogProb(batch.targets, temperature, vocabulary=self.vocabulary)
            values = score(self.model, batch, tile).value.float()
        return [values[batch.owner == n].tolist() for n in range(len(answers))]

    def text(self, ids: Sequence[int]) -> str:
        """An answer as people read it: without special tokens."""
        return str(self.tokenizer.decode([*ids], skip_special_tokens=True))


@dataclasses.dataclass(frozen=True)
class PromptReader:
    """What `prepare` is told of rows that are prompts."""

    name: str = "sample"
    rows: Any = PROMPTS


def data_options(**given: Any) -> SimpleNamespace:
    """The options by which rows are read, with the defaults of every Config: `max_length` (of prompts here),
    `apply_chat_template`, `chat_template_kwargs`, `image_folder`, ...
    """
    options = {"max_length": None, "max_completion_length": 0, "keep_asked": True, "dataset_text_field": "text"}
    return SimpleNamespace(**(options | given))


def read_prompts(
    sources: Source | list[Source], tokenizer: PreTrainedTokenizerBase, options: SimpleNamespace
) -> datasets.Dataset:
    """Prepared rows (`prompt_ids`, `completion_ids`, `asked`) of files with prompts, and maybe their right answers.
    Raises InputError for the first bad row, and for rows without a prompt.
    """
    paths = [source.path for source in (sources if isinstance(sources, list) else [sources])]
    where = ", ".join(paths)
    name = "prompts" if len(paths) > 1 else Path(paths[0]).name
    rows = prepare(load(sources, "prompts"), PromptReader(), tokenizer, options, name)
    if not isinstance(rows, datasets.Dataset):
        raise InputError(f"{where}: data of known length is wanted: drop streaming")
    if all(len(ids) < 2 for ids in rows["prompt_ids"]):
        raise InputError(f"{where}: its rows have no prompts to answer")
    return rows
