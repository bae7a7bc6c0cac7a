"""The micro-batch of OPD."""

from dataclasses import dataclass

from torch import Tensor

from ..batching.micro_batch import Deferred
from ..teachers.inputs import DistillationBatch


@dataclass
class RolloutBatch(DistillationBatch):
    """A micro-batch of prompts, and later of their rollouts; a share of the prompts may be answered by the data."""

    prompts: Deferred = None  # type: ignore[assignment]  # prepared rows, until they are laid out with their rollouts
    sampled: Tensor = None  # type: ignore[assignment]  # bool [rows of data], answered by the student
    grades: Tensor = None  # type: ignore[assignment]  # [rows of data, K], of the reward
    repeated: Tensor = None  # type: ignore[assignment]  # [rollouts], share of tokens in repeated n-grams
    sampler_logps: Tensor | None = None  # [N], where the tokens were sampled; NaN for completions of the data
    importance_logps: Tensor | None = None  # [N], `sampler_logps` where importance weights are due, NaN elsewhere
    reward_advantage: Tensor | None = None  # [N], what a reward adds to the advantage of a token
    token_weights: Tensor | None = None  # [N], of `token_weights`
