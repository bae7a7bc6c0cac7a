"""The attributes of a trainer that samples, for the classes of this subpackage."""

from typing import Any, Literal

from ..teachers.eos import MergedEOS
from ..teachers.signal import Request, Teacher
from ..trainer.interface import TrainerInterface
from .completion import Sampler


class SamplingInterface(TrainerInterface):
    """A trainer with a sampler: of OPD, or of rounds."""

    sampler: Sampler
    rollout_options: Any
    """`temperature`, `max_completion_length`, `num_generations` and `sampler` of its Config or its `rounds` section."""
    vocabulary: int
    """Number of token ids that may be sampled."""
    synchronised: int | None = None
    """The optimizer step whose weights the sampler has."""


class OnPolicyInterface(SamplingInterface):
    """A trainer that scores its rollouts with a teacher."""

    teacher: Teacher | None
    eos: MergedEOS
    rollouts: Any
    """A `RolloutBuilder`."""

    def request(self, kind: Literal["dense", "sampled"], top_k: int | None) -> Request:
        """Return what the loss needs from the teacher."""
        raise NotImplementedError
