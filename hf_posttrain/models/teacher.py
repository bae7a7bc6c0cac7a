"""Teachers of KD and OPD: a model alongside the student, several, the student itself as it was, or one on a server.

All have the same methods, which take the student's batch and answer in the order of its tokens; what they read of it is
`scoring.teacher_view`.

    Teacher         a second model                      any tile function
    Itself          the policy, its adapter off or as it was; moving averages of it
    Teachers        several, of which each example has one
    ServedTeacher   `served_teacher`: top tokens alone
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from ..data.align import Aligner
from ..engines import engine, launch, sharded
from ..errors import InputError
from ..scoring import forward
from ..scoring.chunks import Across
from ..scoring.head import LogProb, TileFunction
from ..scoring.layouts import Example, Reading
from ..scoring.stop_outcome import StopOutcome
from ..scoring.teacher_tiles import TeacherStates
from ..scoring.teacher_view import make_views
from ..scoring.top_tokens import TopTokens
from . import load, score_cache
from .frozen import Frozen, round_products, shares_trained_weights
from .prepare import find_terminal_ids
from .reference import COPY, adapter_reference
from .section import ModelSection, TeacherSection
from .served_teacher import ServedTeacher

logger = logging.getLogger(__name__)
Given = nn.Module | str | TeacherSection
"""A teacher as users give it: a model, its name or folder, or a section of a recipe."""


class Teacher(Frozen, TrainerCallback):
    """A second model that scores for a tile function; as a callback it leaves the device when training ends."""

    name = ""
    """Which of several it is."""
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
        return columns_of(self.score(batch, stop(asked(k, tokens, temperature, vocabulary))))

    def key(self) -> Any:
        """What tells its scores from those of another teacher."""
        return score_cache.model_key(self.model)

    def ends(self, tokenizer: Any, template_kwargs: dict | None) -> list[int]:
        """The ids that end an answer."""
        return find_terminal_ids(self.model, tokenizer, template_kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give back the device's memory; a later evaluation brings the teacher back by itself."""
        self.release()


def asked(k: int, tokens: Tensor, temperature: float, vocabulary: int) -> TileFunction:
    """The tile function of `Teacher.top`."""
    if not k:
        return LogProb(tokens, temperature, vocabulary=vocabulary)
    return TopTokens(k, temperature, vocabulary, tokens)


def columns_of(found: dict[str, Any]) -> dict[str, Tensor]:
    """What `asked` finds, as columns of a batch."""
    names = {"value": "teacher_own", "ids": "teacher_ids", "logps": "teacher_logps"}
    return {column: found[name] for name, column in names.items() if name in found}


# ---- the student's own past


class Itself(Teacher):
    """The policy as its own teacher, with its adapter off or as it was: no second model.

    inside: from the policy to a context in which it is the teacher.
    """

    offload = False

    def __init__(self, trainer: Any, inside: Callable[[Any], Any], described: str):
        self.trainer, self.inside, self.accelerator = trainer, inside, trainer.accelerator
        self.described = described
        self.sharded, self.contexts = engine.shards(trainer.accelerator), ExitStack()

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """The policy."""
        return self.trainer.model_wrapped

    def __enter__(self) -> nn.Module:
        self.contexts.enter_context(forward.eval_mode(self.model))
        self.contexts.enter_context(self.inside(forward.unwrapped(self.model)))
        return self.model

    def __exit__(self, *error: Any) -> None:
        self.contexts.close()

    @property
    def leaves(self) -> bool:
        """An adapter on the head is on again behind the forward."""
        head = forward.causal_lm(self.model).get_output_embeddings()
        return self.sharded or hasattr(head, "base_layer") or hasattr(head, "modules_to_save")

    def key(self) -> Any:
        with self.inside(forward.unwrapped(self.model)):
            return score_cache.model_key(self.model)

    def release(self) -> None:
        """It is where the policy is."""


class MovingAverage(TrainerCallback):
    """Weights of a teacher that follow those of the policy: w <- decay w + (1 - decay) policy, after each step.

    pairs: gives the tensors of both, the teacher's and the policy's, by name. They are saved with a checkpoint.
    """

    FILE = "teacher_average.safetensors"

    def __init__(self, pairs: Callable[[], Mapping[str, tuple[Tensor, Tensor]]], decay: float, writes: bool):
        self.pairs, self.decay, self.writes = pairs, decay, writes

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Follow."""
        for average, now in self.pairs().values():
            average.lerp_(now.to(average), 1 - self.decay)

    @torch.no_grad()
    def begin_run(self, folder: str | None) -> None:
        """Begin as the policy, or as the checkpoint in `folder` has it. Raises InputError where it has none."""
        if folder is None:
            for average, now in self.pairs().values():
                average.copy_(now)
            return
        file = Path(folder, self.FILE)
        if not file.exists():
            raise InputError(f"{folder} has no {self.FILE}: it was written by a run without teacher.self: ema")
        saved = load_file(file)
        for name, (average, _) in self.pairs().items():
            average.copy_(saved[name])

    def give_up(self) -> None:
        """Nothing of it is elsewhere."""

    def save(self, folder: str) -> None:
        """Into a checkpoint. All ranks call it."""
        if not self.writes:
            return
        averages = {name: average.detach().cpu().contiguous() for name, (average, _) in self.pairs().items()}
        save_file(averages, Path(folder, self.FILE))


def _own_past(trainer: Any, section: TeacherSection) -> Teacher:
    """The teacher that a section with `self` asks for. Raises InputError for what cannot be had."""
    policy, accelerator, follows = trainer.model, trainer.accelerator, section.self == "ema"
    if follows and engine.changes_weights(accelerator):
        raise InputError("teacher.self: ema: its weights are kept whole: use one GPU or DDP, or self: start")
    inside = None
    if isinstance(policy, peft.PeftModel):  # a moving average needs a copy of the adapter
        inside = adapter_reference(policy, trainer.new_adapter and not follows)
    if inside is not None:
        if follows:
            _follow(trainer, partial(_adapter_pairs, policy, inside), section.ema)
        return Itself(trainer, inside, f"self: {section.self}")
    whole = sharded.copied(policy, accelerator)
    teacher = Teacher(whole if follows else round_products(whole, accelerator), accelerator, section.offload)
    if follows:
        _follow(trainer, lambda: _weight_pairs(teacher.model, policy), section.ema)
    return teacher


def _follow(trainer: Any, pairs: Callable[[], Mapping[str, tuple[Tensor, Tensor]]], decay: float) -> None:
    low = {str(average.dtype) for average, _ in pairs().values()} - {"torch.float32", "torch.float64"}
    if low:
        problem = f"an average of {low.pop()} weights does not move: set model.dtype: float32"
        raise InputError(f"teacher.self: ema: {problem}")
    average = MovingAverage(pairs, decay, trainer.args.should_save)
    trainer.add_callback(average)
    trainer.kept_in_checkpoints.append(average)


def _weight_pairs(teacher: nn.Module, policy: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    mine = dict(forward.unwrapped(policy).named_parameters())
    trained = {name for name, weight in mine.items() if weight.requires_grad}
    return {name: (weight, mine[name]) for name, weight in teacher.named_parameters() if name in trained}


def _adapter_pairs(policy: nn.Module, copied: Any) -> dict[str, tuple[Tensor, Tensor]]:
    mine = dict(forward.unwrapped(policy).named_parameters())
    of_copy = {name.replace(f".{COPY}", f".{copied.trained}"): weight for name, weight in mine.items()
               if f".{COPY}" in name}  # fmt: skip
    return {name: (weight, mine[name]) for name, weight in of_copy.items() if name in mine}


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
        self._keep_step(batch)
        found = [(view["places"], self.parts[name].states(batch, stop)) for name, view in batch["views"].items()]
        return SharedStates(found, self.vocabulary)

    def _keep_step(self, batch: dict[str, Any]) -> None:
        """Teachers that an engine has cut need all ranks, also one that has nothing for them."""
        for name, part in self.parts.items():
            if name not in batch["views"] and getattr(part, "sharded", False):
                some = next(iter(batch["views"].values()))
                part.score({"views": {name: some}}, LogProb(forward.targets(some)))

    def top(
        self, batch: dict[str, Any], k: int, tokens: Tensor, temperature: float, vocabulary: int, stop: StopOutcome
    ) -> dict[str, Tensor]:
        """As `Teacher.top`."""
        self._keep_step(batch)
        whole: dict[str, Tensor] = {}
        for name, view in batch["views"].items():
            places = view["places"]
            found = self.parts[name].top(batch, k, tokens[places], temperature, vocabulary, stop)
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


# ---- what a trainer is given


def add_teacher(trainer: Any, given: Given | Mapping[str, Given] | None, offload: bool) -> tuple[Any, int]:
    """The trainer's teacher, or several by name, and the number of token ids that all models have.

    A model that is a name is loaded. Raises InputError for a missing teacher, the student itself, names that the Config
    does not know, a server that cannot be asked, and different token ids (padding aside) where `teacher_tokenizer` does
    not name the teacher's own.
    """
    if given is None:
        raise InputError("teacher_model is missing: pass a model, its name or folder, or a TeacherSection")
    several = given if isinstance(given, Mapping) else {"": given}
    names = trainer.args.teacher_names or []
    if isinstance(given, Mapping) and {*names} != {*given}:
        raise InputError(f"teacher_model names {', '.join(given)}, and teacher_names is {names}: they must be the same")
    if names and not isinstance(given, Mapping):
        raise InputError(f"teacher_names is {names}: pass teacher_model as a dict of them")
    made = {name: _made(trainer, one, name, offload) for name, one in several.items()}
    sizes = [forward.causal_lm(trainer.model).config.get_text_config().vocab_size]
    sizes += [size for part, size in made.values() if part.aligner is None or part.aligner.same]
    parts = {name: part for name, (part, _) in made.items()}
    seconds = [part for part in parts.values() if isinstance(part, Frozen) and not isinstance(part, Itself)]
    for part in seconds:
        trainer.add_callback(part)
    trainer.set_second_models(seconds)
    aligners = {name: part.aligner for name, part in parts.items() if part.aligner is not None}
    served = {name for name, part in parts.items() if not part.dense}
    if names or served or aligners or trainer.args.teacher_prompt:
        trainer.data_collator.views = partial(_views, aligners, served)
    elsewhere = [part.described for part in parts.values() if not isinstance(part, Frozen) or isinstance(part, Itself)]
    trainer.second_key = " ".join(filter(None, [trainer.second_key, *elsewhere])) or None
    whole = Teachers(parts, min(sizes)) if names else parts[""]
    return whole, min(sizes)


def _views(
    aligners: Mapping[str, Aligner], served: set[str], examples: Sequence[Example], batch: dict, lay_out: Callable
) -> dict[str, Any]:
    """`make_views`, of answers in the tokens of the teachers that have their own."""
    read = []
    for example in examples:
        reading = example.reading or Reading()
        if (aligner := aligners.get(reading.teacher)) is not None and not aligner.same:
            theirs = reading.prompt or []
            aligned = [aligner(example.prompt, branch.ids, theirs) for branch in example.branches]
            example = replace(example, reading=replace(reading, aligned=aligned))
        read.append(example)
    return make_views(read, batch, lay_out, served)


def _made(trainer: Any, given: Given, name: str, offload: bool) -> tuple[Any, int]:
    """A teacher, and its number of token ids."""
    own = _by_name(trainer.args.teacher_tokenizer, name)
    if isinstance(given, TeacherSection) and given.self:
        return _own_past(trainer, given), forward.causal_lm(trainer.model).config.get_text_config().vocab_size
    if isinstance(given, TeacherSection) and given.url:
        served = ServedTeacher(trainer, given)
        served.check(trainer.args.teacher_top_k or trainer.args.precompute_teacher_top_k or 0)
        served.aligner = _aligner(trainer, served.tokenizer, own, lambda tokenizer: served.ends(tokenizer, None))
        return served, served.vocabulary
    model: Any = given
    if isinstance(given, str | TeacherSection):
        section = ModelSection(name_or_path=given) if isinstance(given, str) else given
        offload = offload or section.offload
        model = load.load_model(section, trainable=False)
    if shares_trained_weights(model, trainer.model):
        problem = "teacher_model is the student itself, or shares weights with it"
        raise InputError(f"{problem}: pass TeacherSection(self='start') to distil from its start")
    path = getattr(model.config, "_name_or_path", "")
    theirs = None
    with suppress(InputError):  # of a model in memory the tokenizer may not be found
        theirs = load.load_tokenizer(ModelSection(name_or_path=path)) if path and own is None else None
    launch.check_model(model, trainer.args)
    if offload and getattr(model, "is_loaded_in_8bit", False):
        raise InputError("teacher offload: bitsandbytes keeps 8-bit weights on the GPU: use 4bit, or do not offload")
    teacher = Teacher(model, trainer.accelerator, offload)
    teacher.aligner = _aligner(trainer, theirs, own, lambda tokenizer: find_terminal_ids(model, tokenizer, None))
    return teacher, forward.causal_lm(model).config.get_text_config().vocab_size


def _aligner(trainer: Any, tokenizer: Any, own: str | None, ends: Callable[[Any], list[int]]) -> Aligner | None:
    """What aligns a teacher's tokens with the student's, if it is to have a tokenizer of its own. Raises InputError
    where it has, and is not to."""
    if own is None:
        if tokenizer is not None:
            load.check_same_vocabulary(trainer.tokenizer, tokenizer)
        return None
    theirs = load.load_tokenizer(ModelSection(name_or_path=own))
    return Aligner(trainer.tokenizer, theirs, trainer.terminal_ids, ends(theirs)[0])


def _by_name(option: Any, name: str) -> Any:
    """What an option says of one of several teachers: it has one value, or a dict by name."""
    return option.get(name) if isinstance(option, Mapping) else option


def find_stop_outcome(trainer: Any, wanted: bool) -> tuple[list[int], StopOutcome]:
    """The terminal ids of the trainer's student and teacher, and which of them are one outcome. wanted: as the option
    `one_stop_outcome`. A teacher with its own tokenizer has its own ids, which `data.align` lays alongside."""
    other = getattr(trainer.teacher, "aligner", None) is not None
    theirs = [] if other else trainer.teacher.ends(trainer.tokenizer, trainer.args.chat_template_kwargs)
    both = list(dict.fromkeys(trainer.terminal_ids + theirs))
    one = [i for i in both if i < trainer.vocabulary] if wanted else []
    if len(one) > 1:
        names = " ".join(trainer.tokenizer.convert_ids_to_tokens(one))
        logger.info("terminal tokens that count as one outcome: %s", names)
    return both, StopOutcome(torch.tensor(one, device=trainer.accelerator.device), trainer.args.temperature)


def find_across(trainer: Any) -> Any:
    """The `Across` of a trainer whose teacher has its own tokenizer; None: it has the student's."""
    aligner = getattr(trainer.teacher, "aligner", None)
    if aligner is None or aligner.same:
        return None
    ends = trainer.teacher.ends(aligner.teacher, trainer.args.chat_template_kwargs)
    return Across(aligner, trainer.stop, ends, trainer.args.device)


def ask_server(trainer: Any, batches: list[dict[str, Any]], k: int | None) -> list[dict[str, Any]]:
    """The micro-batches of a window with what a served teacher says of them, all asked for at once; unchanged where the
    teacher is no server, or has said it before. All ranks call it."""
    if not isinstance(trainer.teacher, ServedTeacher) or "teacher_ids" in batches[0] or find_across(trainer):
        return batches
    given = [trainer.stop.of(forward.targets(batch)) for batch in batches]
    asked = trainer.args.temperature, trainer.vocabulary, trainer.stop
    found = trainer.teacher.top_of_all(batches, k or 0, given, *asked)
    return [batch | more for batch, more in zip(batches, found, strict=True)]


def precompute_top_k(trainer: Any) -> None:
    """Give the trainer's rows teacher_ids and teacher_logps, [trained tokens][K] each, from the cache or scored now.

    The cache is bound to the teacher's weights, the rows' token ids, the tokenizer, K, temperature and precision.
    Raises InputError for streams.
    """
    args, k, size = trainer.args, trainer.args.precompute_teacher_top_k, trainer.vocabulary
    trainer.check_scoring(trainer.model)
    one = trainer.stop.ids.tolist()
    key = [
        trainer.teacher.key(), sorted(trainer.tokenizer.get_vocab().items()),
        k, args.temperature, args.bf16, args.fp16, size, *([one] if one else []),
    ]  # fmt: skip

    def score(batch: dict) -> list[dict[str, Any]]:
        tokens = trainer.stop.of(forward.targets(batch))
        found = trainer.teacher.top(batch, k, tokens, args.temperature, size, trainer.stop)
        ids, logps = found["teacher_ids"].int().cpu().numpy(), found["teacher_logps"].float().cpu().numpy()
        own = [(batch["owner"] == number).cpu().numpy() for number in range(len(batch["index"]))]
        return [{"teacher_ids": ids[mask], "teacher_logps": logps[mask]} for mask in own]

    score_cache.add_scores(trainer, "precompute_teacher_top_k", "teacher", key, args.per_device_eval_batch_size, score)
    for second in trainer.second_models:
        trainer.remove_callback(second)
    trainer.set_second_models([])
    trainer.data_collator.views = None
