"""Teachers of KD and OPD: a model alongside the student, several, the student itself as it was, or one on a server.

All have the same methods, which take the student's batch and answer in the order of its tokens; what they read of it is
`scoring.teacher_view`.

    Teacher         a second model
    Itself          `own_past`: the policy, its adapter off or as it was
    ServedTeacher   `served_teacher`: over HTTP, top tokens alone
    Teachers        several of these, of which each example has one
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..data.align import Aligner
from ..scoring import forward
from ..scoring.head import LogProb, TileFunction
from ..scoring.stop_outcome import StopOutcome
from ..scoring.teacher_tiles import TeacherStates
from ..scoring.top_tokens import TopTokens
from . import score_cache
from .frozen import Frozen
from .prepare import find_terminal_ids


class Teacher(Frozen, TrainerCallback):
    """A second model that scores for a tile function; as a callback it leaves the device when training ends."""

    name = ""
    """Which of several it is."""
    described = ""
    """What a checkpoint says of it, besides a hash of its weights."""
    dense = True
    """Does it give its whole distribution, by `states`? Otherwise its top tokens."""
    aligner: Aligner | None = None
    """Of a tokenizer that is not the student's."""

    def seen(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What the teacher reads of a batch."""
        return batch["views"][self.name] if "views" in batch else batch

    def score(self, batch: dict[str, Any], tile: TileFunction) -> dict[str, Any]:
        """`forward.score` of the teacher without gradient."""
        with torch.no_grad(), self.accelerator.autocast(), self as model:
            return forward.score(model, self.seen(batch), tile)

    def states(self, batch: dict[str, Any], stop: StopOutcome) -> TeacherStates:
        """The teacher's head and its hidden states at the scored positions, for a tile function that `stop` wraps."""
        # the head is used after the forward: where its weights have left by then, they are copied
        with torch.no_grad(), self.accelerator.autocast(), self as model:
            return TeacherStates.of(model, self.seen(batch), copy_head=self.leaves, stop=stop)

    @property
    def leaves(self) -> bool:
        """Is its head another one once its forward is over?"""
        return self.sharded or self.offload

    def top(
        self, batch: dict[str, Any], k: int, tokens: Tensor, temperature: float, vocabulary: int, stop: StopOutcome
    ) -> dict[str, Tensor]:
        """`teacher_own` [N], the log-probabilities of `tokens`; with a k also `teacher_ids` and `teacher_logps` [N, k],
        of its top tokens."""
        tile: TileFunction = LogProb(tokens, temperature, vocabulary=vocabulary)
        if k:
            tile = TopTokens(k, temperature, vocabulary, tokens)
        found = self.score(batch, stop(tile))
        names = {"value": "teacher_own", "ids": "teacher_ids", "logps": "teacher_logps"}
        return {column: found[name] for name, column in names.items() if name in found}

    def key(self) -> Any:
        """What tells its scores from those of another teacher."""
        return score_cache.model_key(self.model)

    def ends(self, tokenizer: Any, template_kwargs: dict | None) -> list[int]:
        """The ids that end an answer."""
        return find_terminal_ids(self.model, tokenizer, template_kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give back the device's memory; a later evaluation brings the teacher back by itself."""
        self.release()


# ---- several


@dataclass(frozen=True)
class SharedStates:
    """The dense side of several teachers: each has the tokens at its `places`, in order."""

    parts: Sequence[tuple[Tensor, TeacherStates]]
    vocabulary: int  # of the ids that all of them have

    def logits(self, rows: slice) -> Tensor:
        """[n, V], which the caller may overwrite."""
        wanted, out = range(rows.start, rows.stop), None
        for places, states in self.parts:
            low, high = torch.searchsorted(places, torch.tensor([rows.start, rows.stop], device=places.device)).tolist()
            if low == high and out is not None:
                continue
            found = states.logits(slice(low, high))[:, : self.vocabulary]
            out = found.new_zeros(len(wanted), self.vocabulary) if out is None else out
            out[places[low:high] - rows.start] = found
        assert out is not None
        return out


class Teachers:
    """Several teachers as one, by the name that an example has of its own."""

    aligner = None

    def __init__(self, parts: Mapping[str, Any], vocabulary: int):
        self.parts, self.vocabulary = dict(parts), vocabulary
        for name, part in self.parts.items():
            part.name = name

    @property
    def dense(self) -> bool:
        """Do all give their whole distribution?"""
        return all(part.dense for part in self.parts.values())

    def states(self, batch: dict[str, Any], stop: StopOutcome) -> SharedStates:
        """As `Teacher.states`."""
        found = [(places, part.states(batch, stop)) for part, places in self._asked(batch)]
        return SharedStates(found, self.vocabulary)

    def _asked(self, batch: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
        """Each teacher that has tokens of the batch, and their places. One that its engine has cut, or a server, needs
        all ranks, in the same order: where it has none it is asked for nothing."""
        plain = {name: values for name, values in batch.items() if name != "views"}
        for name, part in self.parts.items():
            if name in batch["views"]:
                yield part, batch["views"][name]["places"]
            elif not part.dense:
                part.ask_nothing()
            elif part.sharded:
                part.score(plain, LogProb(forward.targets(plain)))

    def top(
        self, batch: dict[str, Any], k: int, tokens: Tensor, temperature: float, vocabulary: int, stop: StopOutcome
    ) -> dict[str, Tensor]:
        """As `Teacher.top`."""
        whole: dict[str, Tensor] = {}
        for part, places in self._asked(batch):
            found = part.top(batch, k, tokens[places], temperature, vocabulary, stop)
            for column, values in found.items():
                if column not in whole:
                    whole[column] = values.new_zeros(len(tokens), *values.shape[1:])
                whole[column][places] = values
        return whole

    def key(self) -> Any:
        """Those of all."""
        return {name: part.key() for name, part in self.parts.items()}

    def ends(self, tokenizer: Any, template_kwargs: dict | None) -> list[int]:
        """Those of all."""
        found = [end for part in self.parts.values() for end in part.ends(tokenizer, template_kwargs)]
        return list(dict.fromkeys(found))

    def release(self) -> None:
        """All of them."""
        for part in self.parts.values():
            part.release()


def by_teacher(
    teacher: Any, batch: dict[str, Any], name: str, values: Tensor, weights: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """A metric of tokens [N] for each of several teachers, under `name` and theirs."""
    if not isinstance(teacher, Teachers):
        return {}
    found = {}
    for each in teacher.parts:
        mine = torch.zeros_like(weights)
        if each in batch["views"]:
            mine[batch["views"][each]["places"]] = 1
        found[f"{name}_{each}"] = values, weights * mine
    return found
