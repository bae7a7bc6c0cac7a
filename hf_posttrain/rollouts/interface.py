"""The attributes of a trainer that samples, for the classes of this subpackage."""

from typing import TYPE_CHECKING, Any, Literal

from ..scoring.forward import LMHead
from ..teachers.eos import MergedEOS
from ..teachers.signal import Request, Teacher
from ..trainer.interface import TrainerInterface
from .completion import Sampler

if TYPE_CHECKING:
    from .builder import RolloutBuilder


class SamplingInterface(TrainerInterface):
    """A trainer with a sampler: of OPD, or an iterative trainer."""

    sampler: Sampler
    rollout_options: Any
    """`temperature`, `max_completion_length`, `num_generations` and `sampler` of its Config or its `rounds` section."""
    vocabulary: int
    """Number of token ids that may be sampled."""
    synchronized: int | None = None
    """Optimizer step whose weights the sampler has."""


class OnPolicyInterface(SamplingInterface):
    """A trainer that scores its rollouts with a teacher."""

    teacher: Teacher | None
    teacher_head: LMHead | None
    rollouts: "RolloutBuilder"

    @property
    def eos(self) -> MergedEOS:
        """Merged EOS ids of student and teacher."""
        raise NotImplementedError

    def request(self, kind: Literal["dense", "sampled"], top_k: int | None) -> Request:
        """Return the request for the teacher's signal that the loss requires."""
        raise NotImplementedError
