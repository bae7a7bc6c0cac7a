"""Teacher that is a second model in memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..batching.micro_batch import MicroBatch
from ..data.align import Aligner
from ..errors import InputError
from ..losses.divergence import log_softmax
from ..models import score_cache
from ..models.frozen import FrozenModel
from ..models.policy import find_terminal_ids
from ..scoring import forward
from ..scoring.forward import LMHead
from ..scoring.head import LogProb, TileFunction, tiles
from ..scoring.teacher_tiles import at_temperature
from ..scoring.top_tokens import TopTokens
from .eos import MergedEOS
from .inputs import teacher_batch
from .signal import Dense, Request, Sampled, TeacherSignal, TopK


@dataclass(frozen=True)
class TeacherStates:
    """Head of the teacher and its hidden states [N, H] at the scored positions, as `teacher_tiles.TeacherLogits`."""

    head: LMHead
    hidden: Tensor
    eos: MergedEOS | None = None

    @classmethod
    def from_model(
        cls, model: nn.Module, batch: MicroBatch, is_copied: bool, eos: MergedEOS | None = None
    ) -> "TeacherStates":
        """Run the forward pass of the teacher.

        Args:
            model: The teacher.
            batch: The batch of the teacher.
            is_copied: Whether to copy the weights of the head during the forward pass, because they are not available
                after it.
            eos: EOS ids to merge in the logits.

        Raises:
            InputError: The head must be copied and is not a plain linear layer.
        """
        heads: list[LMHead] = []

        def scorer(head: LMHead, hidden: Tensor) -> dict[str, Tensor]:
            heads.append(copy_head(head) if is_copied else head)
            return {"hidden": forward.scored_hidden_states(hidden, batch)}

        hidden = forward.run(model, batch, scorer)["hidden"]
        weight = getattr(heads[0].module, "weight", None)
        if weight is None or not weight.is_floating_point():  # a quantized head casts its input
            return cls(heads[0], hidden, eos)
        return cls(heads[0], hidden.to(weight.dtype), eos)

    def logits(self, rows: slice) -> Tensor:
        """Return the logits of the teacher with merged EOS ids, [n, V]. The caller may overwrite them."""
        with torch.no_grad():
            logits = self.head.logits(self.hidden[rows])
            logits = logits.clone() if isinstance(self.head.module, nn.Identity) else logits
            if self.eos:
                self.eos.merge_logits(logits)
            return logits

    def select(self, positions: Tensor) -> "TeacherStates":
        """Return the states at some of the positions."""
        return TeacherStates(self.head, self.hidden[positions], self.eos)

    def tiles(self, temperature: float) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of each tile and the log-probabilities of the teacher, [n, V]."""
        size = getattr(self.head.module, "out_features", self.hidden.shape[-1])
        for rows in tiles(self.hidden, size):
            yield rows, log_softmax(at_temperature(self.logits(rows), temperature))


def copy_head(head: LMHead) -> LMHead:
    """Return the head with a copy of its weights.

    Raises:
        InputError: The head is not a plain linear layer.
    """
    if isinstance(head.module, nn.Identity):
        return head
    if (linear := head.linear) is None:
        problem = "the head of the teacher is not a plain linear layer, because it has an adapter or is quantized"
        raise InputError(
            f"{problem}. Merge the adapter, or do not shard or offload the teacher, nor cache its hidden states"
        )
    copied = nn.Linear(linear.weight.shape[1], linear.weight.shape[0], linear.bias is not None, device="meta")
    for name in dict(copied.named_parameters()):
        setattr(copied, name, nn.Parameter(getattr(linear, name).detach().clone(), requires_grad=False))
    return LMHead(copied, copied.forward, head.transform)


class LocalTeacher(FrozenModel, TrainerCallback):
    """Teacher that is a second model in memory. As a callback it frees its device memory after training."""

    name = ""
    description = ""
    dense = True
    aligner: Aligner | None = None
    average: TrainerCallback | None = None  # of a teacher that follows the policy

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(forward.causal_lm(self.model).config.get_text_config().vocab_size)

    @property
    def models(self) -> list[FrozenModel]:
        """The models in memory, which is this one."""
        return [self]

    def signal(self, batch: MicroBatch, request: Request) -> TeacherSignal:
        """Score a batch, see `signal.Teacher`."""
        inputs = teacher_batch(batch, self.name)
        if request.kind == "dense":
            return Dense(self.states(inputs, request.eos))
        targets = request.eos.merge_ids(inputs.targets)
        if request.kind == "sampled":
            tile: TileFunction = LogProb(targets, request.temperature, vocabulary=request.vocabulary)
            return Sampled(self.score(inputs, request.eos.wrap(tile)).value)
        tile = TopTokens(request.top_k, request.temperature, request.vocabulary, targets)
        scores = self.score(inputs, request.eos.wrap(tile))
        return TopK(scores.ids, scores.logps, scores.value)

    def signals(self, batches: Sequence[MicroBatch], request: Request) -> None:
        """Return None, because scoring one batch at a time is as fast."""

    def join_collective(self, batch: MicroBatch) -> None:
        """Run the forward pass of a sharded model on a batch, and discard the scores."""
        if self.sharded:
            self.score(batch, LogProb(batch.targets))

    def score(self, batch: MicroBatch, tile: TileFunction) -> forward.Scores:
        """Return the scores of a batch of the teacher, without gradient."""
        with torch.no_grad(), self.accelerator.autocast(), self as model:
            return forward.score(model, batch, tile)

    def states(self, batch: MicroBatch, eos: MergedEOS) -> TeacherStates:
        """Return the head and the hidden states of a batch of the teacher, with EOS ids to merge in the logits."""
        # The head is used after the forward pass, so its weights are copied if they are not available by then.
        with torch.no_grad(), self.accelerator.autocast(), self as model:
            return TeacherStates.from_model(model, batch, is_copied=self.needs_head_copy, eos=eos)

    @property
    def needs_head_copy(self) -> bool:
        """Whether the weights of the head are not available after a forward pass."""
        return self.sharded or self.offload

    def key(self) -> object:
        """Return a hash of the model."""
        return score_cache.model_key(self.model)

    def ends(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None) -> list[int]:
        """Return the ids that end an answer."""
        return find_terminal_ids(self.model, tokenizer, template_kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Free the device memory. A later evaluation loads the teacher again."""
        self.release()
