"""What a run needs of each device's memory, before anything is loaded, and what to change if it does not fit.

    estimate     -> MemoryEstimate, with advice where it does not fit (`advice.py`)

Weights, gradients and the optimizer's state are arithmetic (`placement.py`). What a forward keeps for its backward is
counted on the longest rows with tensors that are shapes (`activations.py`); the head's tiles, passes without gradient
and generation follow from it. Within 15 % of what a run takes on CPU; `--probe` is the exact answer.
"""

import os
import sys
import warnings
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import datasets
import numpy as np
import psutil
import torch

from ..data.packing import lengths_of
from ..generation.rollout import GrowingLayer
from ..losses.preference import REFERENCE_FREE
from ..recipe.sections import Recipe
from ..scoring.choose_layout import able
from ..scoring.head import KEEP_ELEMENTS, tile_rows
from ..scoring.layouts import Branch, Example, collate
from .activations import Shapes
from .advice import Run, advice
from .placement import Engine, engine_asked, frozen_on, policy_on

GIB = 2**30
HEAP = (
    "glibc keeps freed tensors in its heap: the process may hold twice as much. With MALLOC_MMAP_THRESHOLD_=65536 in"
    " the environment it gives them back, for a quarter more time"
)
CUDA_CONTEXT = GIB // 2
"""Kernels and workspaces of CUDA where there is no GPU to ask: a typical value, not a measured one."""
STREAM_ROWS = 1000
"""So many rows of a stream are looked at."""
PARTS = ("parameters", "gradients", "optimizer", "second_model", "activations", "other")


@dataclass
class MemoryEstimate:
    """Bytes on each device at the peak of the part of the run that needs most."""

    engine: str  # its name, and on how many processes
    phase: str  # at whose peak this is: training step, evaluation, generation, ...
    parameters: int  # weights of the policy, with the layers that an engine gathers
    gradients: int  # of the trained weights, with the buckets that they travel in
    optimizer: int  # its state, with the float32 weights that DeepSpeed keeps
    second_model: int  # reference or teacher
    activations: int  # all other tensors: activations, a tile of the head, masks, the cache of generation
    other: int  # what the process has without tensors; on a GPU its context, and what vLLM keeps
    total: int  # all of these
    available: int | None  # bytes of the device; None where it is not in this machine
    host: int  # bytes that an engine keeps in host memory for this device
    batch: dict[str, Any]  # rows and tokens of the longest micro-batch, and its layout
    phases: dict[str, int] = field(default_factory=dict)  # the total of each part of the run
    notes: list[str] = field(default_factory=list)  # what is not in it
    advice: list[str] = field(default_factory=list)  # what to change if it does not fit, each on top of those before

    @property
    def fits(self) -> bool:
        """As far as it is known."""
        return self.available is None or self.total <= self.available

    def warnings(self) -> list[str]:
        """One line where it does not fit."""
        need, have = (f"{size / GIB:.1f} GiB" for size in (self.total, self.available or 0))
        return [] if self.fits else [f"memory: the {self.phase} needs about {need} on each device, which has {have}"]

    def lines(self) -> list[str]:
        """The estimate for people."""
        limit = "" if self.available is None else f" of {self.available / GIB:.1f}"
        found = [f"memory on each device ({self.engine}): {self.total / GIB:.2f} GiB{limit}, in the {self.phase}"]
        found += [f"  {name.replace('_', ' '):13s}{size / GIB:8.2f}" for name in PARTS if (size := getattr(self, name))]
        found.append("  the longest micro-batch: {rows} rows, {tokens} tokens, layout {layout}".format(**self.batch))
        rest = [f"{name} {size / GIB:.2f}" for name, size in self.phases.items() if name != self.phase]
        found += [f"  other parts of the run: {', '.join(rest)}"] if rest else []
        found += [f"  in host memory for it: {self.host / GIB:.2f}"] if self.host else []
        return found + [f"  {line}" for line in (*self.notes, *self.advice)]


def estimate(
    recipe: Recipe, config: Any, trainer_class: Any, rows: dict, engine: Engine | None = None, gib: float | None = None
) -> MemoryEstimate:
    """The memory that training on `rows`, as `prepare_data` gives them, needs of each device.

    engine: instead of that of this process, such as `placement.engine_of(file)`; for GPUs it means what the recipe
    would be there, bf16 for instance. gib: memory of the device, instead of this machine's.
    """
    run = Run(recipe, config, engine or engine_asked(config))
    if run.engine.gpu and not {"bf16", "fp16", "use_cpu"} & recipe.train.keys():
        run = run.changed("train", bf16=True)
    other, available = machine(run.engine, int(gib * GIB) if gib else None, config)

    def again(run: Run) -> MemoryEstimate:
        return Parts(run, trainer_class, rows).estimate(other, available)

    with warnings.catch_warnings(action="ignore"):
        found = again(run)
        found.advice = [] if found.fits else advice(found, run, again)
    if not run.engine.gpu and sys.platform == "linux" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        found.notes.append(HEAP)
    return found


def machine(engine: Engine, available: int | None, config: Any) -> tuple[int, int | None]:
    """Bytes of a device that are no tensors of the run (of this process so far, or of a GPU's context and vLLM), and
    all that it has, None where it is not in this machine."""
    if not engine.gpu:
        process = psutil.Process().memory_info().rss
        return process, available or psutil.virtual_memory().available + process
    context = CUDA_CONTEXT
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        context, available = total - free - torch.cuda.memory_reserved(), available or total
    colocated = getattr(config, "vllm_mode", None) == "colocate"
    share = (config.vllm_gpu_memory_utilization or 0.3) if colocated else 0
    return context + int(share * (available or 0)), available


class Parts:
    """The models and the longest batch of a run as shapes, and the bytes that follow from them."""

    def __init__(self, run: Run, trainer_class: Any, rows: dict[str, Any]):
        self.run, self.config, self.rows, self.trainer_class = run, run.config, rows, trainer_class
        device, teacher = torch.device("cuda" if run.engine.gpu else "cpu"), run.recipe.teacher
        self.policy = Shapes(run.recipe.model, True, device)
        self.scorer = self.policy if teacher is None else Shapes(teacher, False, device)
        self.mixed, self.notes = bool(self.config.bf16 or self.config.fp16), []
        models = list(dict.fromkeys([self.policy, self.scorer]))
        fitting = able([shapes.inner for shapes in models])[0]
        self.layout = fitting[0] if self.config.layout == "auto" else self.config.layout
        self.train = self.batch("train", self.config.per_device_train_batch_size)
        try:
            for shapes in models:
                shapes.count(self.train, torch.bfloat16 if self.mixed else None)
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            self.notes.append(f"activations are not in it: this model cannot be run on shapes alone ({reason})")

    def batch(self, name: str, size: int) -> dict[str, Any]:
        """The micro-batch of the `size` longest rows; answers that are yet to be sampled have full length."""
        sampled = self.trainer_class.method.rows.sampled
        rows = longest(self.rows[name], size, ("prompt_ids",) if sampled else ())
        examples = [example for row in rows for example in self.trainer_class.examples(row)]
        if sampled:
            branches = [Branch([0] * self.config.max_completion_length)] * self.config.num_generations
            examples = [Example(example.prompt, branches) for example in examples]
        return collate(examples, self.layout) | {"rows": len(rows)}

    def second_model(self) -> tuple[bool, bool, bool]:
        """Is there a second model, does one score rows before training, is it away while the policy trains?"""
        config, engine, recipe, rows = self.config, self.run.engine, self.run.recipe, self.rows["train"]
        leaves = engine.gpu and not engine.shards  # to the host's memory
        if recipe.teacher is not None:
            top_k = getattr(config, "precompute_teacher_top_k", None) is not None
            return True, top_k, top_k or (leaves and recipe.teacher.offload)
        losses = getattr(config, "loss_type", None)
        if not self.trainer_class.method.second or (isinstance(losses, list) and set(losses) <= REFERENCE_FREE):
            return False, False, False
        asked, passes = config.precompute_ref_log_probs, config.num_train_epochs
        if asked is None and isinstance(rows, datasets.Dataset) and config.max_steps > 0:
            step = config.per_device_train_batch_size * config.gradient_accumulation_steps * engine.processes
            passes = config.max_steps * step / len(rows)
        beforehand = passes > 1 and isinstance(rows, datasets.Dataset) if asked is None else asked
        dropped = asked or recipe.model.lora is not None or bool(recipe.model.adapter)
        # weights that an engine has yet to cut or cast cannot score by themselves
        return not dropped or (beforehand and engine.changes_weights), beforehand, dropped or (beforehand and leaves)

    def estimate(self, other: int, available: int | None) -> MemoryEstimate:
        """The sum on one device of the run's engine, in the phase that needs most."""
        run, config, totals = self.run, self.config, {}
        found: dict[str, dict[str, Any]] = {}
        held = policy_on(run.engine, self.policy.weights, config.optim, self.mixed)
        whole = held["parameters"] + self.policy.weights.numbers * (2 if self.mixed else 4) * run.engine.shards
        exists, beforehand, away = self.second_model()
        second = frozen_on(run.engine, self.scorer.weights, self.mixed) * exists

        def add(name: str, activations: int, **changed: int) -> None:
            usual = {"second_model": second * (not away), "activations": activations, "other": other, "gradients": 0}
            found[name] = held | usual | changed
            totals[name] = sum(size for part, size in found[name].items() if part != "host")

        if beforehand:
            size = getattr(config, "precompute_ref_batch_size", None) or config.per_device_eval_batch_size
            batch = self.batch("train", size)
            add("scoring beforehand", self.inference(self.scorer, batch), optimizer=0, second_model=second)
        elif away and exists:
            gradients = held["gradients"] * (config.gradient_accumulation_steps > 1)
            add("the teacher's pass", self.inference(self.scorer, self.train), second_model=second, gradients=gradients)
        add("training step", self.training_step(exists), gradients=held["gradients"])
        if (evaluated := self.rows.get("eval")) is not None:
            add("evaluation", self.inference(self.policy, self.batch("eval", config.per_device_eval_batch_size)))
        # answers of the policy itself: rollouts of an optimizer step, and greedy ones in an evaluation
        if getattr(config, "rollout", None) == "transformers":
            copies = config.num_generations
            count = copies * config.per_device_train_batch_size * config.gradient_accumulation_steps
            count, new = min(count, config.generation_batch_size or count), config.max_completion_length
            add("generation", self.answers("train", count, copies, new), parameters=whole)
        if config.eval_exact_match and evaluated is not None:
            size = self.answers("eval", config.eval_batch_size, 1, config.eval_max_completion_length)
            add("greedy answers", size, parameters=whole)
        most = max(totals, key=lambda name: totals[name])
        batch = {"rows": self.train["rows"], "tokens": self.train["input_ids"].numel(), "layout": self.layout}
        return MemoryEstimate(
            engine=str(run.engine), phase=most, total=totals[most], available=available, batch=batch, phases=totals,
            notes=self.notes, **found[most],
        )  # fmt: skip

    def training_step(self, has_second: bool) -> int:
        """Forward and backward of the longest micro-batch: bytes in addition to the gradients of all weights."""
        config, batch, head, weights = self.config, self.train, self.policy.head, self.policy.weights
        logits, gradient = len(batch["scored"]) * len(head), 4 * head.numel() * head.requires_grad
        options: Any = config.activation_checkpointing_kwargs or {}
        every = options.get("every_n_layers", 1) if config.activation_checkpointing else 0
        kept, layer = self.policy.training(every)
        kept += gradient + self.states(self.policy, batch)
        if has_second and self.scorer is not self.policy:
            kept += self.states(self.scorer, batch)
        if self.trainer_class.method.unit == "examples" and head.requires_grad and logits <= KEEP_ELEMENTS:
            kept += 4 * logits  # an average over examples is not known in the forward: gradients wait for it
        if self.mixed and not self.run.engine.changes_weights:
            kept += 2 * weights.trained_numbers  # autocast's copies
        peak = max(kept + max(layer, self.tiles(batch)), self.inference(self.scorer, batch) * has_second)
        if self.run.engine.name == "single" and config.gradient_accumulation_steps == 1:
            return max(peak - weights.trained, gradient)  # gradients appear while activations go
        return peak

    def inference(self, shapes: Shapes, batch: dict[str, Any]) -> int:
        """A pass without gradient."""
        return shapes.layer(batch["input_ids"].numel()) + self.tiles(batch) + self.states(shapes, batch)

    def states(self, shapes: Shapes, batch: dict[str, Any]) -> int:
        """Hidden states of the scored tokens and their gradient, and the mask of the batch."""
        rows, length = batch["input_ids"].shape
        return 8 * len(batch["scored"]) * shapes.head.shape[1] + ("document" in batch) * rows * length**2

    def tiles(self, batch: dict[str, Any]) -> int:
        """A tile of the head: products, logits and their gradient; with a teacher its logits and probabilities too."""
        vocabulary = len(self.policy.head)
        rows = min(len(batch["scored"]), tile_rows(vocabulary))
        return 4 * rows * vocabulary * (5 if self.run.recipe.teacher is not None else 3)

    def answers(self, name: str, count: int, copies: int, new: int) -> int:
        """`count` answers of `new` tokens at once, `copies` to a prompt: the cache, and what comes on top."""
        prompts = longest(self.rows[name], -(-count // copies), ("prompt_ids",))
        length, config = len(prompts[0]["prompt_ids"]), self.policy.inner.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        item = 2 if self.mixed else self.policy.head.itemsize
        layer = 2 * heads * size * item * count * (length + new + GrowingLayer.SPARE)
        # a layer's cache as it grows, and logits: four times in float32, or once and twice in float64
        step, reading = layer + 20 * count * config.vocab_size, self.policy.layer(len(prompts) * length)
        return layer * config.num_hidden_layers + max(step, reading)


def longest(rows: Any, count: int, columns: tuple[str, ...] = ()) -> list[dict]:
    """The `count` prepared rows with the most tokens, in `columns` or in all, longest first; of a stream, of its first
    rows."""
    if not isinstance(rows, datasets.Dataset):
        rows = datasets.Dataset.from_list(list(islice(rows, STREAM_ROWS)))
    names = columns or tuple(name for name in rows.column_names if name.endswith("_ids"))
    lengths = np.sum([lengths_of(rows, name, of_rows=True) for name in names], axis=0)
    return [rows[int(i)] for i in np.argsort(-lengths, kind="stable")[:count]]
