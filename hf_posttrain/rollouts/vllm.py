"""Rollouts by vLLM: an engine in each training process (`vllm_in_process`), or a server (`vllm_server`).

What vLLM cannot do is rejected, mostly before loading.

    weights         in process                                      server
    all             in memory                                       a file in output_dir, which the server must see
    LoRA            base in memory once, then adapters by folder    adapters by folder, on the student's own base

That they arrive is not taken on trust. Before the first transfer scrambled weights are sent, or a scrambled adapter:
what vLLM keeps of those, and whether it reads adapters at all, shows in its log-probabilities. They are compared with
the student's own then, after the first transfers, and every `check_steps` steps.

Tested with vLLM 0.32 on CPU (tests/served), and against stand-ins that have its interface.
"""

import importlib.util
import logging
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import load_file, save_file

from ..capabilities import Feature, conflict_message
from ..errors import InputError
from ..generation import rollout
from ..generation.completions_client import UNMODIFIED_SAMPLING, raise_on_all_ranks
from ..scoring import forward as scoring
from ..scoring.head import LogProb
from ..scoring.layouts import Branch, Example
from ..scoring.parity_check import example_ids
from ..trainer.interface import TrainerInterface
from .completion import Completion, is_finished
from .options import VLLMColocateOptions
from .weight_sync import gather_weights_on_first_rank, scramble_adapter_weight

logger = logging.getLogger(__name__)
# vLLM's least logit_bias, and the number of ids that may have one (v1/worker/gpu/sample/logit_bias.py)
_EXCLUDED_TOKEN_BIAS = -100.0
_MAX_LOGIT_BIASES = 1024
# LoRA in vLLM: max_lora_rank (config/lora.py), and initialisations that leave the base as it is (lora/peft_helper.py)
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")
_UNSUPPORTED_LORA_OPTIONS = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)
PROBE_PROMPTS = 4
PROBE_TOKENS = 16
"""Prompts that are compared after a transfer, and tokens of each and of its answer."""
LOGP_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""By how much a token's log-probability may differ on average between vLLM and the student, by vLLM's dtype."""
SampledTokens = tuple[list[int], list[float]]
"""A rollout's token ids, and the log-probability of each under the distribution that it was drawn from."""


class VLLMSampler:
    """What both have in common: how is sampled, where weights are written, and the proof that they have arrived.

    Raises InputError for a quantised student, an adapter that vLLM cannot serve, and too many padding ids.
    """

    reports_logps = True
    dtype: str | None = None  # that vLLM computes in

    def __init__(self, trainer: Any):
        model = scoring.unwrap_model(trainer.model)
        if getattr(scoring.causal_lm(model), "is_quantized", False):
            raise InputError(conflict_message(Feature.VLLM, Feature.QUANTIZED))
        self.lora = model.peft_config[model.active_adapter] if isinstance(model, peft.PeftModel) else None
        if self.lora:
            max_lora_rank(self.lora)
        self.trainer = trainer
        self.options = trainer.rollout_options
        self.sampling = sampling_parameters(trainer)
        self.count = 0
        self.sent = 0  # what was written, and how often vLLM got the policy
        self.adapter: Any = None
        # a new folder in output_dir, the same on all ranks; what removes it when the run ends is kept by the first
        self.temporary = None
        if trainer.is_world_process_zero():
            parent = Path(trainer.args.output_dir).resolve()
            parent.mkdir(parents=True, exist_ok=True)
            self.temporary = tempfile.TemporaryDirectory(prefix="vllm-", dir=parent)  # of mode 0700
        [folder] = broadcast_object_list([self.temporary and self.temporary.name])
        self.folder = Path(folder)

    # ---- weights

    def synchronise(self) -> None:
        """Give vLLM the policy as it is now, and see now and then that it has arrived. All ranks call it. Raises
        InputError where it has not.
        """
        if self.sent == 0:
            self._open()
            if self.lora:
                self._send(scramble_adapter_weight)
                self._check_otherwise()
        self._send()
        self.sent += 1
        if self.sent == 1 or self.sent % self.options.sampler.check_steps == 0:
            self._check()

    def _open(self) -> None:
        """Before the first transfer."""
        raise NotImplementedError

    def _send(self, change: Any = None) -> None:
        """Give vLLM the weights, or the adapter. change: (name, weight) -> what it gets in its place."""
        raise NotImplementedError

    def _check(self) -> None:
        """Raises InputError where vLLM has another model than the student, by `_gaps`. All ranks call it."""
        found, rounding, dtype = self._gaps()
        mean, most = max(found)
        if any(not each <= rounding for each, _ in found):
            raise InputError(
                f"vLLM samples from another model than the student: log-probabilities of the same tokens differ by "
                f"{mean:.2g} on average, and rounding in {dtype} by {rounding:g} at most. {self._likely()}"
            )
        said = "vLLM has the student's weights: log-probabilities of %d tokens differ by %.1e at most (%s)"
        logger.info(said, PROBE_PROMPTS * PROBE_TOKENS, most, dtype)

    def _check_otherwise(self) -> None:
        """Raises InputError where vLLM has the student's model in spite of a scrambled adapter. All ranks call it."""
        found, rounding, _ = self._gaps()
        if any(each <= rounding for each, _ in found):
            raise InputError(
                "vLLM passes over the student's adapter: with a scrambled one it gives the log-probabilities of the "
                "student as it is: see what the server's log says of it"
            )

    def _gaps(self) -> tuple[list[tuple[float, float]], float, str]:
        """By how much log-probabilities that vLLM gives for what it samples differ from the student's own, as ([(mean,
        largest) of each rank], what rounding may do, in which dtype). All ranks call it.
        """
        trainer = self.trainer
        inner = scoring.causal_lm(self.trainer.model)
        draw = example_ids(inner)
        size = min(trainer.vocabulary, inner.config.get_text_config().vocab_size)
        prompts = [[token % size for token in draw(PROBE_TOKENS)] for _ in range(PROBE_PROMPTS)]
        with rollout.preserve_rng(trainer.accelerator.device):  # an engine in this process may draw
            groups = self._agreed(lambda: self._sample(prompts, 1, [*range(PROBE_PROMPTS)], PROBE_TOKENS))
        ids, logps = zip(*(group[0] for group in groups), strict=True)
        examples = [Example(prompt, [Branch(answer)]) for prompt, answer in zip(prompts, ids, strict=True)]
        batch = trainer._prepare_inputs(trainer.data_collator.lay_out(examples))
        tile = LogProb(batch.targets, self.options.temperature, vocabulary=trainer.vocabulary)
        model = trainer.model_wrapped
        with torch.no_grad(), scoring.eval_mode(model), trainer.accelerator.autocast():
            values = scoring.score(model, batch, tile).value.float()
        ours = torch.cat([values[batch.owner == number] for number in range(PROBE_PROMPTS)]).cpu()
        gap = (ours - torch.tensor([logp for answer in logps for logp in answer])).abs()
        found = gather_object([(gap.mean().item(), gap.max().item())])  # each rank may have its own engine
        # the coarser of both sides
        dtype = max(self.dtype or "bfloat16", compute_dtype(trainer), key=lambda name: LOGP_TOLERANCE[name])
        return found, LOGP_TOLERANCE[dtype], dtype

    def _likely(self) -> str:
        """Why vLLM may have another model."""
        raise NotImplementedError

    # ---- rollouts

    def prefetch(self, prompts: Sequence[Sequence[int]], n: int, max_new_tokens: int, seed: Sequence[int]) -> None:
        """Begin to sample what a later `sample` with the same arguments returns; only a server can."""
        raise NotImplementedError

    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, max_new_tokens: int, seed: Sequence[int]
    ) -> list[list[Completion]]:
        """Return n completions of each prompt; prompt i is sampled by (*seed, i).

        Raises ServerError, and RuntimeError for an id that no rollout may have.
        """
        groups = self._agreed(partial(self._sample, prompts, n, prompt_seeds(prompts, seed), max_new_tokens))
        rollouts = [ids for group in groups for ids, _ in group]
        if not all(rollouts):
            raise RuntimeError("vLLM gave an empty rollout: see its log")
        if rollouts and max(map(max, rollouts)) >= self.trainer.vocabulary:
            raise RuntimeError("vLLM drew an id of the vocabulary's padding: set sampler: policy")
        ends = self.trainer.terminal_ids
        return [[Completion(ids, logps, is_finished(ids, ends)) for ids, logps in group] for group in groups]

    def _agreed(self, sample: Any) -> list[list[SampledTokens]]:
        """What `sample` gives, on each rank."""
        return sample()

    def _sample(
        self, prompts: Sequence[Sequence[int]], n: int, seeds: list[int], max_new_tokens: int
    ) -> list[list[SampledTokens]]:
        """Return token ids with their log-probabilities, [prompts][n]."""
        raise NotImplementedError

    # ---- files

    def _write(self, change: Any = None) -> Path:
        """The policy as it is now, or its adapter alone, to a new folder, which is returned. All ranks call it. change:
        (name, weight) -> what is written in its place.
        """
        self.count += 1
        first = self.trainer.is_world_process_zero()
        folder = self.folder / str(self.count)
        adapter = scoring.unwrap_model(self.trainer.model).active_adapter if self.lora else "default"
        place = folder if adapter == "default" else folder / adapter  # as PEFT has it
        if self.lora:
            self.trainer.save_model(str(folder), _internal_call=True)
            weights = {}
            file = place / "adapter_model.safetensors"
            if first and change:
                weights = {name: change(name, weight) for name, weight in load_file(file).items()}
        else:
            weights = gather_weights_on_first_rank(self.trainer, self.dtype, change)
            file = place / "model.safetensors"

        def write() -> None:
            if first and weights:
                place.mkdir(exist_ok=True)
                save_file(weights, file, metadata={"format": "pt"})

        raise_on_all_ranks(write)  # the disk may be full
        return place

    def _remove(self, number: int) -> None:
        """Remove the weights that were written as `number`. All ranks call it, the first one waits for all others."""
        self.trainer.accelerator.wait_for_everyone()
        if self.trainer.is_world_process_zero():
            shutil.rmtree(self.folder / str(number), ignore_errors=True)


def compute_dtype(trainer: TrainerInterface) -> str:
    """The dtype of the policy's products, by torch's name."""
    own = str(scoring.causal_lm(trainer.model).dtype).removeprefix("torch.")
    return {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.accelerator.mixed_precision, own)


def prompt_seeds(prompts: Sequence[Any], seed: Sequence[int]) -> list[int]:
    """A seed for each prompt, of 62 bits, since vLLM adds the number of the rollout to it."""
    return [rollout.mix_seed(*seed, number) >> 2 for number in range(len(prompts))]


def sampling_parameters(trainer: Any) -> dict[str, Any]:
    """How vLLM samples from exactly the distribution that is scored: names of SamplingParams and of the server alike.

    Raises InputError where more ids must never be drawn than vLLM can be told.
    """
    options = trainer.rollout_options
    size = scoring.causal_lm(trainer.model).config.get_text_config().vocab_size
    padding = range(trainer.vocabulary, size)
    if len(padding) > _MAX_LOGIT_BIASES:
        lacks = f"the vocabulary has {len(padding)} ids that stand for no token, or that the teacher lacks"
        raise InputError(f"{lacks}, and vLLM can be kept from drawing {_MAX_LOGIT_BIASES}: set sampler: policy")
    return {
        "temperature": options.temperature,
        **UNMODIFIED_SAMPLING,
        "stop_token_ids": trainer.terminal_ids,
        "ignore_eos": True,  # ours alone, and they stay in the rollout
        "logit_bias": {token: _EXCLUDED_TOKEN_BIAS for token in padding} or None,
    }


# ---- what is refused


def check_installed(sampler: Any) -> None:
    """Raise InputError if a sampler requires vLLM in this environment and it is not installed."""
    if isinstance(sampler, VLLMColocateOptions) and importlib.util.find_spec("vllm") is None:
        raise InputError("sampler: vllm_colocate requires the package vllm: pip install vllm, or use vllm_server")


def max_lora_rank(config: Any) -> int:
    """The max_lora_rank that an adapter needs. Raises InputError for what vLLM cannot serve: it takes plain LoRA."""
    if config.peft_type != peft.PeftType.LORA:
        raise InputError(f"vLLM serves LoRA, not {config.peft_type.value}. Use LoRA, or sampler: policy")
    odd = [name for name in _UNSUPPORTED_LORA_OPTIONS if getattr(config, name, None)]
    odd += ["bias"] if config.bias != "none" else []
    odd += ["init_lora_weights"] if config.init_lora_weights not in _INITIALISATIONS else []
    if odd:
        given = getattr(config, odd[0])
        how = "name target_modules without experts" if odd[0] == "target_parameters" else "drop it"
        raise InputError(f"vLLM cannot serve LoRA with {odd[0]}={given!r}: {how}, or use sampler: policy")
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    if rank > _LORA_RANKS[-1]:
        raise InputError(f"vLLM serves LoRA up to rank {_LORA_RANKS[-1]}, not {rank}: lower it")
    return next(allowed for allowed in _LORA_RANKS if allowed >= rank)
