"""What a run needs of each device's memory, before anything is loaded, and what to change if it does not fit.

Weights, gradients and the optimizer's state are arithmetic; what a forward keeps is counted on the longest rows as
shapes (both in `placement.py`). Within 15 % of what a run takes on CPU where glibc returns freed tensors, see HEAP_FACTOR;
`--probe` measures the process.
"""

import copy
import os
import sys
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch

from ..batching.micro_batch import MicroBatch
from ..data.lengths import longest_rows, planned_epochs
from ..generation.batch_size import CACHE_MEMORY_SHARE, LOGIT_BYTES, even_batch_size
from ..generation.rollout import GrowingLayer
from ..methods.rules import REFERENCE_FREE_LOSSES
from ..models.config import section_from_name
from ..monitoring.symptoms import as_names
from ..recipe.sections import Recipe
from ..rollouts.options import PolicySamplerOptions, VLLMColocateOptions
from ..rounds.judges.config import MODEL_JUDGES
from ..rounds.sample_and_judge import chunk_size
from ..scoring.attention_selection import row_multiple
from ..scoring.head import BYTES_PER_LOGIT, META_MEMORY, max_kept_logits, tile_rows
from ..scoring.layout_selection import supported_layouts
from ..scoring.layouts import collate
from ..teachers.options import precomputes
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from ..trainer.option_group import OptionKind
from .placement import Engine, Shapes, model_bytes, requested_engine
from .plan import planned_examples

GIB = 2**30
CUDA_CONTEXT = GIB // 2  # kernels and workspaces of CUDA where there is no GPU to ask: typical, not measured
HEAP_FACTOR = 2.4
"""How many times the estimate a process on CPU has needed at most where glibc kept freed tensors in its heap: measured
with DPO and LoRA on SmolLM2 135M. Other runs needed 1.1 to 2.1 times the estimate, see docs/reference/recipes.md."""
HEAP_OPTIONS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Environment variables that make glibc return freed tensors: each turns its growing threshold for mmap off."""


@dataclass
class MemoryEstimate:
    """Bytes on each device at the peak of the part of the run that needs most."""

    engine: str  # its name, and on how many processes
    phase: str  # at whose peak this is: training step, evaluation, generation, ...
    parameters: int  # weights of the policy, with the layers that an engine gathers
    gradients: int  # of the trained weights, with the buckets that they travel in
    optimizer: int  # its state, with the float32 weights that DeepSpeed keeps
    second_model: int  # reference or teacher, and a judge
    activations: int  # all other tensors: activations, a tile of the head, masks, the cache of generation
    other: int  # what the process has without tensors; on a GPU its context, and what vLLM keeps
    total: int  # all of these
    available: int | None  # bytes of the device; None where it is not in this machine
    host: int  # bytes that an engine keeps in host memory for this device
    batch: dict[str, Any]  # rows and tokens of the longest micro-batch, and its layout
    phases: dict[str, int]  # the total of each part of the run
    process: int | None = None  # bytes that the process on CPU may need with glibc's heap; None: as many as `total`
    notes: list[str] = field(default_factory=list)  # what is not in it
    advice: list[str] = field(default_factory=list)  # what to change if it does not fit, each on top of those before

    @property
    def fits(self) -> bool:  # as far as it is known
        return self.available is None or self.total <= self.available

    def warnings(self) -> list[str]:
        need, have = (f"{size / GIB:.1f} GiB" for size in (self.total, self.available or 0))
        return [] if self.fits else [f"memory: the {self.phase} needs about {need} on each device, which has {have}"]

    def lines(self) -> list[str]:
        limit = "" if self.available is None else f" of {self.available / GIB:.1f}"
        found = [f"memory on each device ({self.engine}): {self.total / GIB:.2f} GiB{limit}, in the {self.phase}"]
        if self.process is not None:
            most = f"up to {HEAP_FACTOR:g} times as much, {self.process / GIB:.2f} GiB"
            why = f"glibc keeps freed tensors in its heap unless {HEAP_OPTIONS[0]}=65536 is set (a quarter more time)"
            found.append(f"  an estimate of the tensors: on CPU the process may need {most}, since {why}")
        for name in ("parameters", "gradients", "optimizer", "second_model", "activations", "other"):
            found += [f"  {name.replace('_', ' '):13s}{size / GIB:8.2f}"] if (size := getattr(self, name)) else []
        found.append("  the longest micro-batch: {rows} rows, {tokens} tokens, layout {layout}".format(**self.batch))
        rest = [f"{name} {size / GIB:.2f}" for name, size in self.phases.items() if name != self.phase]
        found += [f"  other parts of the run: {', '.join(rest)}"] if rest else []
        found += [f"  in host memory for it: {self.host / GIB:.2f}"] if self.host else []
        return found + [f"  {line}" for line in (*self.notes, *self.advice)]


@dataclass
class Run:
    """A run, and the bytes of its models and of its longest batch as shapes."""

    recipe: Recipe
    config: Any
    engine: Engine
    trainer_class: Any
    rows: dict[str, Any]
    other: int  # bytes of the device that are no tensors of the run
    available: int | None  # all that it has

    def changed(self, section: str, fields: dict[str, Any]) -> "Run":
        """The same with other values in a section: train, model, teacher or engine."""
        if section == "engine":
            return replace(self, engine=replace(self.engine, **fields))
        if section == "train":
            changed = replace(self, config=copy.copy(self.config))
            vars(changed.config).update(fields)
            return changed
        return replace(self, recipe=replace(self.recipe, **{section: replace(getattr(self.recipe, section), **fields)}))

    def batch(self, name: str, size: int) -> MicroBatch:
        """Return the micro-batch of the `size` longest rows."""
        rows = longest_rows(self.rows[name], size, ("prompt_ids",) if self.trainer_class.data_method.rows.sampled else ())
        examples = planned_examples(rows, self.trainer_class, self.config)
        batch_class = self.trainer_class.collator_class.batch_class
        return collate(examples, self.layout, row_multiple=self.multiple, batch_class=batch_class)

    @property
    def teachers(self) -> list[Any]:
        """Those whose weights are loaded."""
        return [section for _, section in self.recipe.models()][1:]

    def second_stays(self) -> bool:
        """Are second models on the device while the policy trains?"""
        config = self.config
        model = self.recipe.model
        leaves = self.engine.gpu and not self.engine.shards  # to the host's memory
        by_adapter = model.adapter or (model.lora is not None and model.lora.get("bias", "none") == "none")
        taught = [section for _, section in self.recipe.teacher_sections()]
        if taught:
            stays = [section for section in taught if not section.url and not (section.self and by_adapter)]
            stays = [section for section in stays if not (leaves and section.offload)]
            return bool(stays) and not precomputes(config)
        reference_free = {*as_names(getattr(config, "loss_type", "none"))} <= REFERENCE_FREE_LOSSES
        if not self.trainer_class.method.second or reference_free or by_adapter:
            return False
        if self.recipe.rounds and self.recipe.rounds.reference == "round":
            return False
        if config.precompute_ref_log_probs is None:  # scored before training if rows are seen more than once
            step = config.per_device_train_batch_size * config.gradient_accumulation_steps * self.engine.processes
            return not leaves or planned_epochs(self.rows["train"], config, step) <= 1
        return not config.precompute_ref_log_probs

    def estimate(self) -> MemoryEstimate:
        """The sum on one device, in the phase that needs most."""
        glibc = sys.platform == "linux" and not self.engine.gpu and not {*HEAP_OPTIONS} & {*os.environ}
        config = self.config
        engine = self.engine
        notes = list[str]()
        device = torch.device("cuda" if engine.gpu else "cpu")
        self.mixed = bool(config.bf16 or config.fp16)
        self.gpu_memory = (self.available or META_MEMORY) if engine.gpu else None  # by which the head chooses its tiles
        self.policy = Shapes(self.recipe.model, True, device, config.train_vision)
        scorers = [Shapes(section, False, device) for section in self.teachers] or [self.policy]
        self.scorer = max(scorers, key=lambda shapes: shapes.weights.numbers)
        models = list(dict.fromkeys([self.policy, *scorers]))
        inner = [shapes.inner for shapes in models]
        rounds = self.recipe.rounds
        judge = None
        if rounds and rounds.judge.by in MODEL_JUDGES:
            try:
                judge = Shapes(
                    section_from_name(str(rounds.judge.name)), False, device
                )  # a reward model's has a head more
                models.append(judge)
            except Exception as error:  # no decoder, or an architecture's own code
                reason = str(error).partition("\n")[0]
                notes.append(f"the judge {rounds.judge.name} is not in it: it is not built as shapes alone ({reason})")
        fitting, _ = supported_layouts(inner, config.max_length)
        self.multiple = row_multiple(inner, device)
        self.layout = fitting[0] if config.layout == "auto" else config.layout
        self.train = self.batch("train", config.per_device_train_batch_size)
        self.train_rows = int(self.train.row.max()) + 1
        try:
            for shapes in models:
                shapes.count(self.train, torch.bfloat16 if self.mixed and shapes is not judge else None)
        except Exception as error:  # an architecture's own code may raise anything
            reason = str(error).partition("\n")[0]
            notes.append(f"activations are not in it: this model cannot be run on shapes alone ({reason})")
        # the parts of the run, and what each holds on the device
        held = model_bytes(engine, self.policy.weights, config.optim, self.mixed)
        # a frozen model is cut and cast as the policy is, but never kept in host memory
        frozen = replace(engine, offload_params=False)
        second = sum(model_bytes(frozen, shapes.weights, "sgd", self.mixed)["parameters"] for shapes in scorers)
        if not self.teachers and self.mixed and engine.name in ("single", "ddp"):
            second -= self.scorer.rounding
        # a judge comes to a GPU while a round is drawn, unless there is one each step
        judge_stays = rounds is not None and (not engine.gpu or rounds.steps is not None)
        judged = judge.weights.frozen if judge else 0
        seconds = second * self.second_stays()
        training = held | {"second_model": seconds + judged * judge_stays, "other": self.other}
        resting = training | {"gradients": 0}  # between optimizer steps
        drawing = resting | {"second_model": seconds + judged}
        phases: dict[str, Any] = {"training step": training | {"activations": self.training_step()}}
        if judge is not None:
            phases["judging"] = drawing | {"activations": self.judging(judge)}
        if self.teachers and not self.second_stays():  # it comes to the device for its own pass
            own = {"second_model": second, "activations": self.inference(self.scorer, self.train)}
            in_a_step = not precomputes(config)
            phases["teacher's pass"] = (training if in_a_step else resting | {"optimizer": 0}) | own
        if self.rows.get("eval") is not None:
            batch = self.batch("eval", config.per_device_eval_batch_size)
            phases["evaluation"] = resting | {"activations": self.inference(self.policy, batch)}
        if isinstance(getattr(rounds or config, "sampler", None), PolicySamplerOptions):
            whole = held["parameters"] + self.policy.weights.numbers * (2 if self.mixed else 4) * engine.shards
            phases["generation"] = drawing | {"parameters": whole}
            phases["generation"]["activations"] = self.generation(sum(phases["generation"].values()))
        totals = {name: sum(parts.values()) - parts["host"] for name, parts in phases.items()}
        most = max(totals, key=lambda name: totals[name])
        return MemoryEstimate(
            engine=str(engine),
            phase=most,
            total=totals[most],
            available=self.available,
            phases=totals,
            notes=notes,
            process=round(HEAP_FACTOR * totals[most]) if glibc else None,
            batch={"rows": self.train_rows, "tokens": self.train.input_ids.numel(), "layout": self.layout},
            **phases[most],
        )

    def training_step(self) -> int:
        """Forward and backward of the longest micro-batch: bytes in addition to the gradients of all weights."""
        config = self.config
        batch = self.train
        head = self.policy.head
        weights = self.policy.weights
        logits = len(batch.scored) * len(head)
        gradient = 4 * head.numel() * head.requires_grad
        every = (config.activation_checkpointing_kwargs or {}).get("every_n_layers", 1)
        again = every if config.activation_checkpointing else 0
        kept, layer = self.policy.training(again)
        states, tiles = self.at_head(self.policy, batch)
        features, tower_layer = self.policy.picture_bytes(batch)
        tower = features + self.policy.kept_by_tower(batch, again)
        kept += gradient + states + tower
        size = 2 if self.mixed and self.engine.gpu else 4
        few = logits <= max_kept_logits(self.gpu_memory, size)
        if self.trainer_class.method.unit == "examples" and head.requires_grad and few:
            kept += size * logits  # an average over examples is not known in the forward: gradients wait for it
        if self.mixed and self.engine.name in ("single", "ddp"):
            kept += 2 * weights.trained_numbers  # autocast's copies
        peak = max(kept + max(layer, tiles), tower_layer, self.inference(self.scorer, batch) * self.second_stays())
        # at the end of the backward, a layer of the tower again
        tower += int(1.5 * tower_layer) if config.train_vision else 0
        if self.engine.name == "single" and config.gradient_accumulation_steps == 1:
            return max(peak - weights.trained, gradient, tower)  # gradients appear while activations go
        return max(peak, tower)

    def inference(self, shapes: Shapes, batch: MicroBatch) -> int:
        """A pass without gradient."""
        features, tower_layer = shapes.picture_bytes(batch)
        layer = shapes.layer(batch.input_ids.numel())
        return max(features + layer, tower_layer) + sum(self.at_head(shapes, batch))

    def judging(self, judge: Shapes) -> int:
        """A judge's pass over its batch of the longest answers to the longest prompts."""
        options: Any = self.recipe.rounds
        rows = min(options.judge.batch_size, self.answers_at_once())
        longest_answer = options.max_completion_length
        scored = torch.empty(rows * longest_answer)
        batch = MicroBatch(input_ids=torch.empty(rows, self.longest_prompt() + longest_answer), scored=scored)
        head = sum(self.at_head(judge, batch)) if options.judge.by == "teacher" else 0
        return judge.layer(batch.input_ids.numel()) + head

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that is answered in training."""
        return len(longest_rows(self.rows["train"], 1, ("prompt_ids",))[0]["prompt_ids"])

    def answers_at_once(self) -> int:
        """Answers that a generation call is asked for: those of an optimizer step, or of a piece of a round."""
        config = self.config
        rounds = self.recipe.rounds
        step = config.per_device_train_batch_size * config.gradient_accumulation_steps
        if not rounds:
            return config.num_generations * step
        prompts = step * self.engine.processes * rounds.steps if rounds.steps else len(self.rows["train"])
        return rounds.num_generations * min(chunk_size(rounds), prompts)

    def at_head(self, shapes: Shapes, batch: MicroBatch) -> tuple[int, int]:
        """(Hidden states of the scored tokens, their gradient and the mask; a tile's products, logits and gradient)."""
        rows, length = batch.input_ids.shape
        scored = len(batch.scored)
        vocabulary = len((self.policy if shapes is self.scorer else shapes).head)  # a teacher's is cut to the student's
        mask = rows * length**2 if batch.document is not None and not self.multiple else 0
        states = 8 * scored * shapes.head.shape[1] + mask
        each = BYTES_PER_LOGIT if self.engine.gpu else 4 * (5 if any(self.recipe.teacher_sections()) else 3)
        if self.engine.gpu and getattr(self.config, "diagnostics", False):
            each += 16  # `Diagnostics.scratch`
        return states, each * min(scored, tile_rows(vocabulary, self.gpu_memory)) * vocabulary

    def generation(self, held: int) -> int:
        """The rollouts of an optimizer step, or as many as fit beside what is held: the cache, and what is on top."""
        config = self.config
        policy = self.policy
        options = self.recipe.rounds or self.config
        copies = options.num_generations
        count = self.answers_at_once()
        length = self.longest_prompt()
        row = policy.cache * (length + config.max_completion_length + GrowingLayer.SPARE) // policy.tokens
        if options.sampler.batch_size:
            count = min(count, options.sampler.batch_size)
        elif self.engine.gpu and self.available:  # as `rollout.rows_that_fit` does
            logits = LOGIT_BYTES * len(policy.head)
            count = even_batch_size(count, int(CACHE_MEMORY_SHARE * max(self.available - held, 0)) // (row + logits))
        # what GrowingLayer makes space for: SPARE tokens behind a prompt, and again when these are full
        spare = GrowingLayer.SPARE
        more = max(0, config.max_completion_length - 1 - GrowingLayer.SPARE)
        cache = policy.cache * (length + spare + -(-more // (1 + spare)) * (1 + spare)) // policy.tokens * count
        # on top: a layer's cache as it grows and logits, some in float64; or before that, reading the prompts
        step = cache // len(policy.layers) + LOGIT_BYTES * count * len(policy.head)
        prompts = -(-count // copies)
        pictures = sum(policy.picture_bytes(self.train)) * prompts // self.train_rows
        return cache + max(step, policy.layer(prompts * length) + pictures)


def estimate(
    recipe: Recipe,
    config: PostTrainConfig,
    trainer_class: type[PostTrainer],
    rows: dict,
    engine: Engine | None = None,
    gib: float | None = None,
) -> MemoryEstimate:
    """The memory that training on `rows`, as `prepare_data` gives them, needs of each device. engine: in place of this
    process's; for GPUs it means what the recipe would be there, bf16 for instance. gib: in place of this machine's.
    """
    engine = engine or requested_engine(config)
    available = int(gib * GIB) if gib else None
    if not engine.gpu:
        other = psutil.Process().memory_info().rss
        available = available or psutil.virtual_memory().available + other
    else:
        other = CUDA_CONTEXT
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            other = total - free - torch.cuda.memory_reserved()
            available = available or total
        options: Any = recipe.rounds or config
        if isinstance(sampler := getattr(options, "sampler", None), VLLMColocateOptions):
            other += int(sampler.gpu_memory_utilization * (available or 0))
    run = Run(recipe, config, engine, trainer_class, rows, other, available)
    if engine.gpu and not {"bf16", "fp16", "use_cpu"} & recipe.train.keys():
        run = run.changed("train", {"bf16": True})
    with warnings.catch_warnings(action="ignore"):
        found = run.estimate()
        found.advice = [] if found.fits else advice(found, run, Run.estimate)
    return found


def advice(found: Any, run: Run, again: Any) -> list[str]:
    """Overrides for an estimate that does not fit, each estimated on top of those before it, up to what fits; those
    come first that leave the numbers of the run as they are. again: the estimate of a changed run.
    """
    config = run.config
    model = run.recipe.model
    teacher = run.recipe.teacher
    engine = run.engine
    size = config.per_device_train_batch_size
    steps = config.gradient_accumulation_steps
    # a quarter of the rows at a time, and the same rows a step
    fewer = max(n for n in range(1, max(size // 4, 1) + 1) if size % n == 0)
    smaller = {"per_device_train_batch_size": fewer, "gradient_accumulation_steps": steps * size // fewer}
    adapted = model.lora is not None or model.adapter
    several = engine.processes > 1 and not engine.offload_params
    # does it apply, section, its new fields
    changes: list[tuple[Any, str, dict[str, Any]]] = [
        (not config.activation_checkpointing, "train", {"activation_checkpointing": True}),
        (size > 1, "train", smaller),
        (
            not (run.recipe.rounds or getattr(config, "precompute_ref_log_probs", True)),
            "train",
            {"precompute_ref_log_probs": True},
        ),
        (engine.gpu and teacher is not None and not (teacher.offload or teacher.url), "teacher", {"offload": True}),
        (fewer > 1, "train", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": steps * size}),
        (True, "train", {"per_device_eval_batch_size": 1}),
        (
            isinstance(getattr(config, "sampler", None), PolicySamplerOptions),
            "train",
            {"sampler": PolicySamplerOptions(batch_size=1)},
        ),
        # engines from the fastest to the one that needs least
        *(
            (
                several and (name, host) != (engine.name, False),
                "engine",
                {"name": name, "offload_params": host, "offload_optimizer": host},
            )
            for name, host in (("zero1", False), ("zero2", False), ("fsdp2", False), ("fsdp2", True))
        ),
        (engine.gpu and engine.name in ("single", "ddp") and not several, "train", {"optim": "adamw_8bit"}),
        (not adapted and not model.from_scratch, "model", {"lora": {"r": 16}}),
        (engine.gpu and model.quantization == "none" and not model.from_scratch, "model", {"quantization": "4bit"}),
    ]
    lines = []
    before = found
    for applies, section, fields in changes:
        if before.fits or not applies:
            continue
        changed = run.changed(section, fields)
        if (after := again(changed)).total >= 0.98 * before.total:
            continue
        run = changed
        before = after
        plain = {name: value.to_dict() if isinstance(value, OptionKind) else value for name, value in fields.items()}
        said = " ".join(f"{section}.{name}={str(value).lower()}" for name, value in plain.items()).replace("'", "")
        if section == "engine":
            file = fields["name"] + "_offload" * fields["offload_params"]
            said = f"accelerate launch --config_file accelerate_configs/{file}.yaml"
        lines.append(f"{said}: {after.total / GIB:.1f} GiB{', which fits' if after.fits else ''}")
    if not before.fits:
        lines.append("what is left to change: shorter rows (train.max_length), a smaller model, more or larger devices")
    return lines
