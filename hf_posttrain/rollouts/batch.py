"""The micro-batch of OPD, and its collator."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..batching.micro_batch import Deferred, MicroBatch
from ..scoring.layouts import IGNORE
from ..teachers.inputs import DistillationBatch, DistillationCollator


@dataclass
class RolloutBatch(DistillationBatch):
    """A micro-batch of prompts, and later of their rollouts.

    Completions of the data may answer a share of the prompts.
    """

    prompts: Deferred = None  # type: ignore[assignment]  # prepared rows, until they are laid out with their rollouts
    sampled: Tensor = None  # type: ignore[assignment]  # bool [rows of data], whether the student sampled the answer
    grades: Tensor = None  # type: ignore[assignment]  # [rows of data, K], grades by the reward
    repeated: Tensor = None  # type: ignore[assignment]  # [rollouts], share of tokens in repeated n-grams
    sampler_logps: Tensor | None = None  # [N], logps under the sampler; NaN for completions of the data
    importance_logps: Tensor | None = None  # [N], `sampler_logps` of tokens with an importance weight, NaN for others
    reward_advantage: Tensor | None = None  # [N], added to the advantage of a token by the reward
    token_weights: Tensor | None = None  # [N], weights by the option `token_weights`


class PromptCollator(DistillationCollator):
    """Keeps the prepared rows of prompts until `RolloutBuilder` has sampled their rollouts."""

    batch_class = RolloutBatch

    def __call__(self, rows: list[dict[str, Any]]) -> MicroBatch:
        """Return a batch with `index`, `prompts`, and `input_ids` of the prompts, padded with -100.

        The `input_ids` are for metrics with `include_for_metrics: inputs`.
        """
        prompts = [torch.tensor(row["prompt_ids"]) for row in rows]
        index = torch.tensor([row.get("index", -1) for row in rows])
        return RolloutBatch(index=index, prompts=Deferred(rows), input_ids=pad_sequence(prompts, True, IGNORE))
