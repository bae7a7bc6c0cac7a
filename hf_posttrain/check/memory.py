"""Memory that a run needs on each device, estimated before anything is loaded, and changes that make it fit.

Weights, gradients and the optimizer's state are computed from their numbers. Tensors that a forward saves are counted
on the longest rows, on shapes alone (both in `placement.py`). The estimate is within 15 % of what a run takes on CPU if
glibc returns freed tensors, see HEAP_FACTOR. `--probe` measures the process.
"""

import copy
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import pyarrow.compute as pc
import torch

from ..batching.micro_batch import MicroBatch
from ..data.dataset_type import AnyDataset
from ..data.lengths import longest_rows, planned_epochs
from ..errors import count_noun
from ..generation.batch_size import CACHE_MEMORY_SHARE, LOGIT_BYTES, even_batch_size
from ..generation.rollout import GrowingLayer
from ..methods.rules import REFERENCE_FREE_LOSSES
from ..models.config import ModelSection
from ..monitoring.symptoms import as_list
from ..recipe.sections import Recipe
from ..report.callbacks import MAX_NEW_TOKENS, NUM_SAMPLES, pick_prompts
from ..rollouts.options import PolicySamplerOptions, VLLMColocateOptions
from ..rounds.judges.config import MODEL_JUDGES
from ..rounds.sample_and_judge import chunk_size
from ..scoring.attention_selection import row_multiple
from ..scoring.cpu import MIN_PACKED_ROWS, packable_layers, packed_bytes
from ..scoring.head import BYTES_PER_LOGIT, META_MEMORY, max_kept_logits, tile_rows
from ..scoring.layout_selection import supported_layouts
from ..scoring.layouts import collate
from ..teachers.options import caches_hidden_states, precomputes
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from ..trainer.option_group import OptionKind
from ..trainer.rules import MUON
from .placement import Engine, Shapes, engine_from_config, model_bytes
from .plan import planned_examples

GIB = 2**30
CUDA_CONTEXT = GIB // 2
"""Bytes of kernels and workspaces of CUDA if there is no GPU to ask: typical, not measured."""
HEAP_FACTOR = 2.4
"""Largest ratio of a process on CPU to the estimate, if glibc keeps freed tensors in its heap: measured with DPO and
LoRA on SmolLM2 135M. Other runs needed 1.1 to 2.1 times the estimate, see docs/reference/recipes.md."""
HEAP_OPTIONS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Environment variables with which glibc returns freed tensors: each turns its growing threshold for mmap off."""


@dataclass
class MemoryEstimate:
    """Bytes on each device at the peak of the phase of the run that needs most."""

    engine: str  # its name, and the number of processes
    phase: str  # training step, evaluation, generation, ...
    parameters: int  # weights of the policy, with the layers that an engine gathers
    gradients: int  # of the trained weights, with communication buckets
    optimizer: int  # its state, with the float32 weights that DeepSpeed keeps
    second_model: int  # reference or teacher, and a judge
    activations: int  # all other tensors: activations, a tile of the head, masks, the cache of generation
    other: int  # memory of the process without tensors; on a GPU its context, and the share that vLLM reserves
    total: int  # sum of all of these
    available: int | None  # bytes of the device; None for a device that this machine does not have
    host: int  # bytes that an engine keeps in host memory for this device
    disk: int  # largest size of the cached hidden states of a teacher, for all devices
    batch: dict[str, Any]  # rows and tokens of the longest micro-batch, and its layout
    phases: dict[str, int]  # total of each phase of the run
    process: int | None = (
        None  # bytes that the process on CPU may need with glibc's heap; None if not more than `total`
    )
    notes: list[str] = field(default_factory=list)  # parts that are not included
    advice: list[str] = field(default_factory=list)  # changes that make it fit, each in addition to those before it

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory, as far as its memory is known."""
        return self.available is None or self.total <= self.available

    def warnings(self) -> list[str]:
        """Return problems that would end the run."""
        need, have = (f"{size / GIB:.1f} GiB" for size in (self.total, self.available or 0))
        return [] if self.fits else [f"memory: the {self.phase} needs about {need} on each device, which has {have}"]

    def lines(self) -> list[str]:
        """Return the lines of the page."""
        limit = "" if self.available is None else f" of {self.available / GIB:.1f}"
        lines = [f"memory on each device ({self.engine}): {self.total / GIB:.2f} GiB{limit}, in the {self.phase}"]
        if self.process is not None:
            most = f"up to {HEAP_FACTOR:g} times as much, {self.process / GIB:.2f} GiB"
            reason = (
                f"glibc keeps freed tensors in its heap unless {HEAP_OPTIONS[0]}=65536 is set (a quarter more time)"
            )
            lines.append(f"  an estimate of the tensors: on CPU the process may need {most}, since {reason}")
        for name in ("parameters", "gradients", "optimizer", "second_model", "activations", "other"):
            meaning = "  of the process, without tensors" if name == "other" else ""
            if size := getattr(self, name):
                lines.append(f"  {name.replace('_', ' '):13s}{size / GIB:8.2f}{meaning}")
        rows = count_noun(self.batch["rows"], "row")
        lines.append(f"  the longest micro-batch: {rows}, {self.batch['tokens']} tokens, layout {self.batch['layout']}")
        others = [f"{name} {size / GIB:.2f}" for name, size in self.phases.items() if name != self.phase]
        lines += [f"  other parts of the run: {', '.join(others)}"] if others else []
        lines += [f"  in host memory for it: {self.host / GIB:.2f}"] if self.host else []
        lines += [f"  hidden states of the teacher on disk: up to {self.disk / GIB:.2f} GiB"] if self.disk else []
        return lines + [f"  {line}" for line in (*self.notes, *self.advice)]


@dataclass
class Run:
    """A run, and the bytes of its models and of its longest batch on shapes alone."""

    recipe: Recipe
    config: Any  # a Config, or the options of it that a test needs
    engine: Engine
    trainer_class: type[PostTrainer]
    rows: Mapping[str, Any]
    other: int  # bytes of the device that are no tensors of the run
    available: int | None  # all bytes of the device

    def with_changes(self, section: str, fields: dict[str, Any]) -> "Run":
        """Return the run with other values in a section: train, model, teacher or engine."""
        if section == "engine":
            return replace(self, engine=replace(self.engine, **fields))
        if section == "train":
            changed = replace(self, config=copy.copy(self.config))
            vars(changed.config).update(fields)
            return changed
        return replace(self, recipe=replace(self.recipe, **{section: replace(getattr(self.recipe, section), **fields)}))

    def batch(self, name: str, size: int) -> MicroBatch:
        """Return the micro-batch of the `size` longest rows of a data set."""
        columns = ("prompt_ids",) if self.trainer_class.data_method.rows.sampled else ()
        examples = planned_examples(list(longest_rows(self.rows[name], size, columns)), self.trainer_class, self.config)
        batch_class = self.trainer_class.collator_class.batch_class
        return collate(examples, self.layout, row_multiple=self.multiple, batch_class=batch_class)

    @property
    def teachers(self) -> list[ModelSection]:
        """Sections of the models besides the policy that are loaded."""
        return [section for _, section in self.recipe.models()][1:]

    def second_models_stay(self) -> bool:
        """Return whether second models are on the device while the policy trains."""
        config = self.config
        model = self.recipe.model
        can_leave = self.engine.gpu and not self.engine.shards  # to the host's memory
        by_adapter = model.adapter or (model.lora is not None and model.lora.get("bias", "none") == "none")
        teachers = [section for _, section in self.recipe.teacher_sections()]
        if self.trainer_class.method.second == "teacher":
            staying = [section for section in teachers if not section.url and not (section.self and by_adapter)]
            staying = [section for section in staying if not (can_leave and section.offload)]
            return bool(staying) and not precomputes(config)
        reference_free = {*as_list(getattr(config, "loss_type", "none"))} <= REFERENCE_FREE_LOSSES
        if not self.trainer_class.method.second or reference_free or by_adapter:
            return False
        if self.recipe.rounds and self.recipe.rounds.reference == "round":
            return False
        if config.precompute_ref_log_probs is None:  # scored before training if each row is trained more than once
            step = config.per_device_train_batch_size * config.gradient_accumulation_steps * self.engine.processes
            return not can_leave or planned_epochs(self.rows["train"], config, step) <= 1
        return not config.precompute_ref_log_probs

    def estimate(self) -> MemoryEstimate:
        """Return the sum on one device, in the phase that needs most."""
        glibc = sys.platform == "linux" and not self.engine.gpu and not {*HEAP_OPTIONS} & {*os.environ}
        config = self.config
        engine = self.engine
        notes = list[str]()
        device = torch.device("cuda" if engine.gpu else "cpu")
        self.mixed = bool(config.bf16 or config.fp16)
        self.gpu_memory = (self.available or META_MEMORY) if engine.gpu else None  # determines the tiles of the head
        self.policy = Shapes(self.recipe.model, True, device, config.train_vision)
        scorers = [Shapes(section, False, device) for section in self.teachers] or [self.policy]
        self.scorer = max(scorers, key=lambda shapes: shapes.weights.numbers)
        models = list(dict.fromkeys([self.policy, *scorers]))
        inner = [shapes.inner for shapes in models]
        rounds = self.recipe.rounds
        judge = None
        if rounds and rounds.judge.by in MODEL_JUDGES:
            try:
                judge = Shapes(rounds.judge.model_section(), False, device)
                models.append(judge)
            except Exception as error:  # no decoder, or an architecture's own code
                reason = str(error).partition("\n")[0]
                notes.append(
                    f"not included: the judge {rounds.judge.name}, which cannot be built without weights ({reason})"
                )
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
            notes.append(f"not included: activations, because this model cannot run without values ({reason})")

        # the phases of the run, and the bytes that each has on the device
        policy = model_bytes(engine, self.policy.weights, config.optim, self.mixed)
        # a frozen model is sharded and cast as the policy is, but never offloaded to host memory
        frozen = replace(engine, offload_params=False)
        second = sum(model_bytes(frozen, shapes.weights, "sgd", self.mixed)["parameters"] for shapes in scorers)
        if not self.teachers and self.mixed and engine.name in ("single", "ddp"):
            second -= self.scorer.precast_savings
        # a judge is on a GPU while a round is sampled, and in online training always
        judge_stays = rounds is not None and (not engine.gpu or rounds.steps is not None)
        judge_bytes = judge.weights.frozen if judge else 0
        second_in_training = second * self.second_models_stay()
        if caches_hidden_states(config):
            second_in_training += self.scorer.head.nbytes
        training = policy | {"second_model": second_in_training + judge_bytes * judge_stays, "other": self.other}
        between_steps = training | {"gradients": 0}
        sampling = between_steps | {"second_model": second_in_training + judge_bytes}
        phases: dict[str, Any] = {"training step": training | {"activations": self.training_step()}}
        if judge is not None:
            phases["judging"] = sampling | {"activations": self.judging(judge)}
        if self.teachers and not self.second_models_stay():  # it moves to the device for its own pass
            pass_bytes = {"second_model": second, "activations": self.inference(self.scorer, self.train)}
            in_a_step = not precomputes(config)
            phases["teacher's pass"] = (training if in_a_step else between_steps | {"optimizer": 0}) | pass_bytes
        if self.rows.get("eval") is not None:
            batch = self.batch("eval", config.per_device_eval_batch_size)
            phases["evaluation"] = between_steps | {"activations": self.inference(self.policy, batch)}
        is_sampled = isinstance(getattr(rounds or config, "sampler", None), PolicySamplerOptions)
        has_samples = self.trainer_class.method.head != "score" and (not engine.shards or is_sampled)
        if has_samples and (packed := self.packed_weights(NUM_SAMPLES)):
            phases["sample answers"] = between_steps | {"activations": packed + self.sample_answers()}
        if is_sampled:
            gathered = policy["parameters"] + self.policy.weights.numbers * (2 if self.mixed else 4) * engine.shards
            phases["generation"] = sampling | {"parameters": gathered}
            phases["generation"]["activations"] = self.generation(sum(phases["generation"].values()))

        totals = {name: sum(parts.values()) - parts["host"] for name, parts in phases.items()}
        largest = max(totals, key=totals.__getitem__)
        return MemoryEstimate(
            engine=str(engine),
            phase=largest,
            total=totals[largest],
            available=self.available,
            phases=totals,
            notes=notes,
            disk=self.cached_states() if caches_hidden_states(config) else 0,
            process=round(HEAP_FACTOR * totals[largest]) if glibc else None,
            batch={"rows": self.train_rows, "tokens": self.train.input_ids.numel(), "layout": self.layout},
            **phases[largest],
        )

    def cached_states(self) -> int:
        """Return the bytes of the hidden states of the teacher for all rows, of rollouts with the largest length."""
        config = self.config
        tokens = 0
        if self.trainer_class.method.rows.sampled:
            tokens = len(self.rows["train"]) * config.num_generations * config.max_completion_length
        else:
            for rows in self.rows.values():
                tables = [] if rows is None else rows.with_format("arrow").iter(1000)
                tokens += sum(pc.sum(pc.list_value_length(table["completion_ids"])).as_py() for table in tables)
        head = self.scorer.head
        return tokens * head.shape[1] * head.element_size()

    def training_step(self) -> int:
        """Return the bytes of the longest micro-batch, in addition to the gradients of all weights."""
        config = self.config
        batch = self.train
        head = self.policy.head
        weights = self.policy.weights
        logits = len(batch.scored) * len(head)
        head_gradient = 4 * head.numel() * head.requires_grad
        every = (config.activation_checkpointing_kwargs or {}).get("every_n_layers", 1)
        recomputed = every if config.activation_checkpointing else 0
        saved, layer = self.policy.training(recomputed)
        states, tiles = self.head_bytes(self.policy, batch)
        features, encoder_layer = self.policy.image_bytes(batch)
        encoder = features + self.policy.encoder_bytes(batch, recomputed)
        saved += head_gradient + states + encoder
        size = 2 if self.mixed and self.engine.gpu else 4
        is_kept = logits <= max_kept_logits(self.gpu_memory, size)
        if self.trainer_class.method.unit == "examples" and head.requires_grad and is_kept:
            saved += size * logits  # an average over examples is unknown in the forward: gradients wait for it
        if self.mixed and self.engine.name in ("single", "ddp"):
            saved += 2 * weights.trained_numbers  # autocast's copies
        second = self.inference(self.scorer, batch) * self.second_models_stay()
        peak = max(saved + max(layer, tiles), encoder_layer, second)

        # at the end of the backward, the backward of a layer of the vision encoder
        encoder += int(1.5 * encoder_layer) if config.train_vision else 0
        if self.engine.name == "single" and config.gradient_accumulation_steps == 1:
            return max(peak - weights.trained, head_gradient, encoder)  # gradients grow while activations are freed
        return max(peak, encoder)

    def inference(self, shapes: Shapes, batch: MicroBatch) -> int:
        """Return the bytes of a forward without gradient."""
        features, encoder_layer = shapes.image_bytes(batch)
        layer = shapes.layer(batch.input_ids.numel())
        return max(features + layer, encoder_layer) + sum(self.head_bytes(shapes, batch))

    def judging(self, judge: Shapes) -> int:
        """Return the bytes of a judge's forward over a batch of the longest answers to the longest prompts."""
        rounds: Any = self.recipe.rounds
        rows = min(rounds.judge.batch_size, self.answers_per_call())
        answer_length = rounds.max_completion_length
        scored = torch.empty(rows * answer_length)
        batch = MicroBatch(input_ids=torch.empty(rows, self.longest_prompt() + answer_length), scored=scored)
        head = sum(self.head_bytes(judge, batch)) if rounds.judge.by == "teacher" else 0
        return judge.layer(batch.input_ids.numel()) + head

    def longest_prompt(self) -> int:
        """Return the number of tokens of the longest prompt that is answered in training."""
        return len(longest_rows(self.rows["train"], 1, ("prompt_ids",))[0]["prompt_ids"])

    def answers_per_call(self) -> int:
        """Return the number of answers of a generation call: those to an optimizer step, or to a chunk of a round."""
        config = self.config
        rounds = self.recipe.rounds
        step = config.per_device_train_batch_size * config.gradient_accumulation_steps
        if not rounds:
            return config.num_generations * step
        prompts = step * self.engine.processes * rounds.steps if rounds.steps else len(self.rows["train"])
        return rounds.num_generations * min(chunk_size(rounds), prompts)

    def head_bytes(self, shapes: Shapes, batch: MicroBatch) -> tuple[int, int]:
        """Return the bytes at the head of a model.

        Returns:
            Hidden states of the scored tokens with their gradient and the mask, and the products, logits and gradient
            of a tile.
        """
        rows, length = batch.input_ids.shape
        vocabulary = len((self.policy if shapes is self.scorer else shapes).head)  # a teacher's: only the student's ids
        mask = rows * length**2 if batch.document is not None and not self.multiple else 0
        has_teacher = self.trainer_class.method.second == "teacher"
        has_scratch = self.engine.gpu and getattr(self.config, "diagnostics", False)  # `Diagnostics.scratch`
        states, tile = head_bytes(
            len(batch.scored), vocabulary, shapes.head.shape[1], has_teacher, self.gpu_memory, 16 * has_scratch
        )
        return states + mask, tile

    def generation(self, held: int) -> int:
        """Return the bytes of generation: the cache, weights that are packed on CPU, and the largest temporary tensors.

        Rollouts of an optimizer step are sampled together, or as many of them as fit.

        held: bytes of everything else on the device.
        """
        config = self.config
        policy = self.policy
        options: Any = self.recipe.rounds or self.config
        count = self.answers_per_call()
        length = self.longest_prompt()
        row = policy.cache * (length + config.max_completion_length + GrowingLayer.SPARE) // policy.tokens
        if options.sampler.batch_size:
            count = min(count, options.sampler.batch_size)
        elif self.engine.gpu and self.available:  # as `batch_size.max_generation_batch`
            logits = LOGIT_BYTES * len(policy.head)
            free = max(self.available - held, 0)
            count = even_batch_size(count, int(CACHE_MEMORY_SHARE * free) // (row + logits))
        # GrowingLayer allocates SPARE tokens after a prompt, and again whenever these are full
        spare = GrowingLayer.SPARE
        beyond = max(0, config.max_completion_length - 1 - GrowingLayer.SPARE)
        cache = policy.cache * (length + spare + -(-beyond // (1 + spare)) * (1 + spare)) // policy.tokens * count
        # in addition: a layer's cache while it grows, and logits, some in float64; or before that the prompts' forward
        step = cache // len(policy.layers) + LOGIT_BYTES * count * len(policy.head)
        prompts = -(-count // options.num_generations)
        images = sum(policy.image_bytes(self.train)) * prompts // self.train_rows
        return cache + self.packed_weights(count) + max(step, policy.layer(prompts * length) + images)

    def packed_weights(self, count: int) -> int:
        """Return the bytes of weights that are packed on CPU for the decoding of `count` answers."""
        if self.engine.gpu or self.mixed or count < MIN_PACKED_ROWS:
            return 0
        layers = packable_layers(self.policy.inner)
        return packed_bytes(layers, self.available or psutil.virtual_memory().available, self.engine.processes)

    def sample_answers(self) -> int:
        """Return the bytes of the cache and the logits of the sample answers for the report."""
        rows = self.rows["train"] if self.rows.get("eval") is None else self.rows["eval"]
        longest = max((len(prompt) for prompt, _ in pick_prompts(rows)), default=0)
        tokens = NUM_SAMPLES * (longest + MAX_NEW_TOKENS)
        return self.policy.cache * tokens // self.policy.tokens + LOGIT_BYTES * NUM_SAMPLES * len(self.policy.head)


def head_bytes(
    tokens: int, vocabulary: int, width: int, has_teacher: bool, gpu_memory: int | None = None, scratch: int = 0
) -> tuple[int, int]:
    """Return the bytes at a head [V, H].

    Args:
        tokens: Number of scored tokens.
        vocabulary: V.
        width: H.
        has_teacher: Whether the tile also has logits of a teacher.
        gpu_memory: Memory of the GPU in bytes, or None for CPU.
        scratch: Further bytes per logit.

    Returns:
        Hidden states of the scored tokens with their gradient, and the products, logits and gradient of a tile.
    """
    per_logit = 4 * (5 if has_teacher else 3) if gpu_memory is None else BYTES_PER_LOGIT
    return 8 * tokens * width, (per_logit + scratch) * min(tokens, tile_rows(vocabulary, gpu_memory)) * vocabulary


def estimate(
    recipe: Recipe,
    config: PostTrainConfig,
    trainer_class: type[PostTrainer],
    rows: Mapping[str, AnyDataset | None],
    engine: Engine | None = None,
    memory_gib: float | None = None,
    with_advice: bool = True,
) -> MemoryEstimate:
    """Return the memory that a training needs on each device.

    Args:
        recipe: The recipe.
        config: Config of the run.
        trainer_class: Trainer class of the run.
        rows: Prepared rows of each data set, from `prepare_data`.
        engine: Engine in place of this process's. For GPUs the recipe gets its defaults there, such as bf16.
        memory_gib: Memory of a device in GiB, in place of this machine's.
        with_advice: Whether to look for overrides that fit if the run does not, which takes several estimates.
    """
    engine = engine or engine_from_config(config)
    available = int(memory_gib * GIB) if memory_gib else None
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
        run = run.with_changes("train", {"bf16": True})
    with warnings.catch_warnings(action="ignore"):
        result = run.estimate()
        if with_advice and not result.fits:
            result.advice = advice(result, run, Run.estimate)
    return result


def advice(current: MemoryEstimate, run: Run, estimate_run: Callable[[Run], MemoryEstimate]) -> list[str]:
    """Return overrides for an estimate that does not fit, each estimated in addition to those before it.

    The list ends with the first one that fits. Overrides that do not change the numbers of the run come first.

    Args:
        current: The estimate of the run.
        run: The run.
        estimate_run: Function that returns the estimate of a changed run.
    """
    config = run.config
    model = run.recipe.model
    teacher = run.recipe.teacher
    engine = run.engine
    size = config.per_device_train_batch_size
    steps = config.gradient_accumulation_steps
    # a quarter of the rows in a micro-batch, and the same rows in a step
    quarter = max(n for n in range(1, max(size // 4, 1) + 1) if size % n == 0)
    smaller_batches = {"per_device_train_batch_size": quarter, "gradient_accumulation_steps": steps * size // quarter}
    adapted = model.lora is not None or model.adapter
    several = engine.processes > 1 and not engine.offload_params
    # (whether it applies, section, its new fields)
    changes: list[tuple[Any, str, dict[str, Any]]] = [
        (not config.activation_checkpointing, "train", {"activation_checkpointing": True}),
        (size > 1, "train", smaller_batches),
        (
            not (run.recipe.rounds or getattr(config, "precompute_ref_log_probs", True)),
            "train",
            {"precompute_ref_log_probs": True},
        ),
        (engine.gpu and teacher is not None and not (teacher.offload or teacher.url), "teacher", {"offload": True}),
        (quarter > 1, "train", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": steps * size}),
        (True, "train", {"per_device_eval_batch_size": 1}),
        (
            isinstance(getattr(config, "sampler", None), PolicySamplerOptions),
            "train",
            {"sampler": PolicySamplerOptions(batch_size=1)},
        ),
        # engines from the fastest to the one that needs least
        *(
            (
                several and config.optim != MUON and (name, host) != (engine.name, False),
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
    before = current
    for applies, section, fields in changes:
        if before.fits or not applies:
            continue
        changed = run.with_changes(section, fields)
        if (after := estimate_run(changed)).total >= 0.98 * before.total:
            continue
        run = changed
        before = after
        values = {name: value.to_dict() if isinstance(value, OptionKind) else value for name, value in fields.items()}
        override = " ".join(f"{section}.{name}={str(value).lower()}" for name, value in values.items()).replace("'", "")
        if section == "engine":
            file = fields["name"] + "_offload" * fields["offload_params"]
            override = f"accelerate launch --config_file accelerate_configs/{file}.yaml"
        lines.append(f"{override}: {after.total / GIB:.1f} GiB{', which fits' if after.fits else ''}")
    if not before.fits:
        lines.append("remaining options: shorter rows (train.max_length), a smaller model, more or larger devices")
    return lines
