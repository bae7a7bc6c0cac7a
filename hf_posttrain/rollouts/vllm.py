"""Rollouts by vLLM: an engine in each training process (`vllm_in_process`), or a server (`vllm_server`).

Options that vLLM does not support are rejected, mostly before models are loaded.

    weights         in process                                      server
    all             in memory                                       a file in output_dir, which the server must read
    LoRA            base in memory once, then adapters by folder    adapters by folder, on the student's own base

Every transfer of weights is verified. Before the first one, scrambled weights or a scrambled adapter are sent, so that
the log-probabilities of vLLM show which of them it kept, and whether it loads adapters at all. They are compared with
the student's at that point, after the first transfer, and every `check_steps` transfers.

Tested with vLLM 0.32 on CPU (tests/served), and with stubs of its interface.
"""

import importlib.util
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import peft
import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import load_file, save_file

from ..capabilities import Feature, conflict_message
from ..errors import InputError
from ..generation import rollout
from ..generation.completions_client import UNMODIFIED_SAMPLING, ask_on_all_ranks
from ..scoring import forward as scoring
from ..scoring.head import LogProb
from ..scoring.layouts import Branch, Example
from ..scoring.parity_check import example_ids
from .completion import Completion
from .interface import SamplingInterface
from .options import VLLMColocateOptions
from .weight_sync import WeightTransform, gather_weights_on_first_rank, scramble_adapter_weight

logger = logging.getLogger(__name__)
# smallest logit_bias of vLLM, and the number of ids that may have one (v1/worker/gpu/sample/logit_bias.py)
_EXCLUDED_TOKEN_BIAS = -100.0
_MAX_LOGIT_BIASES = 1024
# LoRA in vLLM: max_lora_rank (config/lora.py), and initializations that leave the base unchanged (lora/peft_helper.py)
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal")
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
"""Number of prompts that are compared after a transfer."""
PROBE_TOKENS = 16
"""Number of tokens of each of these prompts, and of its answer."""
LOGP_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Largest mean difference of a token's log-probability between vLLM and the student, by vLLM's dtype."""
SampledTokens: TypeAlias = tuple[list[int], list[float]]
"""Token ids of a rollout, and the log-probability of each under the distribution it was sampled from."""


class VLLMSampler:
    """Base of both samplers: sampling parameters, files of weights, and verification of transfers.

    Raises InputError for a quantized student, an adapter that vLLM cannot serve, and too many padding ids.
    """

    reports_logps = True
    dtype: str | None = None  # in which vLLM computes

    def __init__(self, trainer: SamplingInterface) -> None:
        model = scoring.unwrap_model(trainer.model)
        if getattr(scoring.causal_lm(model), "is_quantized", False):
            raise InputError(conflict_message(Feature.VLLM, Feature.QUANTIZED))
        self.lora = model.peft_config[model.active_adapter] if isinstance(model, peft.PeftModel) else None
        if self.lora:
            max_lora_rank(self.lora)
        self.trainer = trainer
        self.options = trainer.rollout_options
        self.sampling_parameters = sampling_parameters(trainer)
        self.write_count = 0  # number of folders with weights that were written
        self.transfers = 0  # number of times that vLLM got the policy
        self.adapter: Any = None
        # a new folder in output_dir, the same on all ranks; the first rank removes it when the run ends
        self.temporary = None
        if trainer.is_world_process_zero():
            parent = Path(trainer.args.output_dir).resolve()
            parent.mkdir(parents=True, exist_ok=True)
            self.temporary = tempfile.TemporaryDirectory(prefix="vllm-", dir=parent)  # of mode 0700
        [folder] = broadcast_object_list([self.temporary and self.temporary.name])
        self.folder = Path(folder)

    # ---- weights

    def synchronize(self) -> None:
        """Send the current policy to vLLM, and verify some of the transfers. All ranks call it.

        Raises InputError if vLLM does not have the student's weights afterwards.
        """
        if self.transfers == 0:
            self._open()
            if self.lora:
                self._send(scramble_adapter_weight)
                self._check_adapter_is_used()
        self._send()
        self.transfers += 1
        if self.transfers == 1 or self.transfers % self.options.sampler.check_steps == 0:
            self._check()

    def _open(self) -> None:
        """Prepare vLLM for the first transfer."""
        raise NotImplementedError

    def _send(self, transform: WeightTransform | None = None) -> None:
        """Send the weights, or the adapter, to vLLM, each changed by `transform` if there is one."""
        raise NotImplementedError

    def _check(self) -> None:
        """Raise InputError if vLLM has another model than the student. All ranks call it."""
        differences, tolerance, dtype = self._logp_differences()
        mean, largest = max(differences)
        if any(not mean_of_rank <= tolerance for mean_of_rank, _ in differences):
            raise InputError(
                f"vLLM samples from another model than the student. Log-probabilities of the same tokens differ by "
                f"{mean:.2g} on average, and rounding in {dtype} explains {tolerance:g} at most. {self._likely_cause()}"
            )
        message = "vLLM has the student's weights: log-probabilities of %d tokens differ by %.1e at most (%s)"
        logger.info(message, PROBE_PROMPTS * PROBE_TOKENS, largest, dtype)

    def _check_adapter_is_used(self) -> None:
        """Raise InputError if vLLM has the student's model in spite of a scrambled adapter. All ranks call it."""
        differences, tolerance, _ = self._logp_differences()
        if any(mean <= tolerance for mean, _ in differences):
            raise InputError(
                "vLLM ignores the student's adapter. With a scrambled adapter its log-probabilities are equal to the "
                "unchanged student's. See the server's log for the reason"
            )

    def _logp_differences(self) -> tuple[list[tuple[float, float]], float, str]:
        """Compare log-probabilities of tokens that vLLM samples with the student's. All ranks call it.

        Returns:
            The mean and the largest difference of each rank, the mean that rounding may cause, and the dtype in which
            it occurs.
        """
        trainer = self.trainer
        inner = scoring.causal_lm(self.trainer.model)
        next_ids = example_ids(inner)
        size = min(trainer.vocabulary, inner.config.get_text_config().vocab_size)
        prompts = [[token % size for token in next_ids(PROBE_TOKENS)] for _ in range(PROBE_PROMPTS)]
        with rollout.preserve_rng(trainer.accelerator.device):  # an engine in this process may use the generator
            groups = self._sample_on_all_ranks(partial(self._sample, prompts, 1, [*range(PROBE_PROMPTS)], PROBE_TOKENS))
        ids, logps = zip(*(group[0] for group in groups), strict=True)

        examples = [Example(prompt, [Branch(answer)]) for prompt, answer in zip(prompts, ids, strict=True)]
        batch = trainer._prepare_inputs(trainer.data_collator.lay_out(examples))
        tile = LogProb(batch.targets, self.options.temperature, vocabulary=trainer.vocabulary)
        model = trainer.model_wrapped
        with torch.no_grad(), scoring.eval_mode(model), trainer.accelerator.autocast():
            values = scoring.score(model, batch, tile).value.float()
        student_logps = torch.cat([values[batch.owner == number] for number in range(PROBE_PROMPTS)]).cpu()

        difference = (student_logps - torch.tensor([logp for answer in logps for logp in answer])).abs()
        # each rank may have its own engine
        differences = gather_object([(difference.mean().item(), difference.max().item())])
        # the coarser dtype of both sides
        dtype = max(self.dtype or "bfloat16", compute_dtype(trainer), key=lambda name: LOGP_TOLERANCE[name])
        return differences, LOGP_TOLERANCE[dtype], dtype

    def _likely_cause(self) -> str:
        """Return a likely reason why vLLM has another model, and its fix."""
        raise NotImplementedError

    # ---- rollouts

    def prefetch(self, prompts: Sequence[Sequence[int]], n: int, max_new_tokens: int, seed: Sequence[int]) -> None:
        """Begin to sample what a later `sample` with the same arguments returns. Only a server supports it."""
        raise NotImplementedError

    def sample(
        self, prompts: Sequence[Sequence[int]], n: int, max_new_tokens: int, seed: Sequence[int]
    ) -> list[list[Completion]]:
        """Return n completions of each prompt. Prompt i is sampled with the seed (*seed, i).

        Raises ServerError, and RuntimeError for an id that no rollout may have.
        """
        sample = partial(self._sample, prompts, n, prompt_seeds(prompts, seed), max_new_tokens)
        groups = self._sample_on_all_ranks(sample)
        rollouts = [ids for group in groups for ids, _ in group]
        if not all(rollouts):
            raise RuntimeError("vLLM returned an empty rollout. See its log")
        if rollouts and max(map(max, rollouts)) >= self.trainer.vocabulary:
            raise RuntimeError("vLLM sampled an id of the vocabulary's padding. Set sampler: policy")
        return [[Completion(ids, logps) for ids, logps in group] for group in groups]

    def _sample_on_all_ranks(self, sample: Callable[[], list[list[SampledTokens]]]) -> list[list[SampledTokens]]:
        """Return the result of `sample`. All ranks call it."""
        return sample()

    def _sample(
        self, prompts: Sequence[Sequence[int]], n: int, seeds: list[int], max_new_tokens: int
    ) -> list[list[SampledTokens]]:
        """Return token ids with their log-probabilities, [prompts][n]."""
        raise NotImplementedError

    # ---- files

    def _write(self, transform: WeightTransform | None = None) -> Path:
        """Write the current policy, or its adapter alone, to a new folder, which is returned. All ranks call it.

        transform: change of each weight that is written, if any.
        """
        self.write_count += 1
        first = self.trainer.is_world_process_zero()
        folder = self.folder / str(self.write_count)
        adapter = scoring.unwrap_model(self.trainer.model).active_adapter if self.lora else "default"
        target = folder if adapter == "default" else folder / adapter  # where PEFT saves it
        if self.lora:
            self.trainer.save_model(str(folder), _internal_call=True)
            weights = {}
            file = target / "adapter_model.safetensors"
            if first and transform:
                weights = {name: transform(name, weight) for name, weight in load_file(file).items()}
        else:
            weights = gather_weights_on_first_rank(self.trainer, self.dtype, transform)
            file = target / "model.safetensors"

        def write() -> None:
            if first and weights:
                target.mkdir(exist_ok=True)
                save_file(weights, file, metadata={"format": "pt"})

        ask_on_all_ranks(write)  # the disk may be full
        return target

    def _remove(self, number: int) -> None:
        """Remove the weights that were written as `number`. All ranks call it; the first one waits for the others."""
        self.trainer.accelerator.wait_for_everyone()
        if self.trainer.is_world_process_zero():
            shutil.rmtree(self.folder / str(number), ignore_errors=True)


def compute_dtype(trainer: SamplingInterface) -> str:
    """Return torch's name of the dtype of the policy's matrix products."""
    model_dtype = str(scoring.causal_lm(trainer.model).dtype).removeprefix("torch.")
    return {"bf16": "bfloat16", "fp16": "float16"}.get(trainer.accelerator.mixed_precision, model_dtype)


def prompt_seeds(prompts: Sequence[Sequence[int]], seed: Sequence[int]) -> list[int]:
    """Return a seed of 62 bits for each prompt, because vLLM adds the number of the rollout to it."""
    return [rollout.mix_seed(*seed, number) >> 2 for number in range(len(prompts))]


def sampling_parameters(trainer: SamplingInterface) -> dict[str, Any]:
    """Return parameters with which vLLM samples from exactly the distribution that is scored.

    SamplingParams and the server use the same names. Raises InputError if more ids must be excluded than
    vLLM supports.
    """
    options = trainer.rollout_options
    size = scoring.causal_lm(trainer.model).config.get_text_config().vocab_size
    padding = range(trainer.vocabulary, size)
    if len(padding) > _MAX_LOGIT_BIASES:
        problem = f"the vocabulary has {len(padding)} ids that represent no token, or that the teacher lacks"
        raise InputError(f"{problem}. vLLM can exclude {_MAX_LOGIT_BIASES} ids at most. Set sampler: policy")
    return {
        "temperature": options.temperature,
        **UNMODIFIED_SAMPLING,
        "stop_token_ids": trainer.terminal_ids,
        "ignore_eos": True,  # only our terminal ids stop a rollout, and they stay in it
        "logit_bias": {token: _EXCLUDED_TOKEN_BIAS for token in padding} or None,
    }


# ---- checks before loading


def check_installed(sampler: object) -> None:
    """Raise InputError if a sampler requires vLLM in this environment and it is not installed."""
    if isinstance(sampler, VLLMColocateOptions) and importlib.util.find_spec("vllm") is None:
        raise InputError(
            "sampler: vllm_colocate requires the package vllm. Install it with pip install vllm, or use vllm_server"
        )


def max_lora_rank(config: peft.PeftConfig) -> int:
    """Return the `max_lora_rank` that an adapter requires. Raises InputError for anything but plain LoRA."""
    if config.peft_type != peft.PeftType.LORA:
        raise InputError(
            f"vLLM serves LoRA, not {peft.PeftType(config.peft_type).value}. Use LoRA, or set sampler: policy"
        )
    assert isinstance(config, peft.LoraConfig)
    unsupported = [name for name in _UNSUPPORTED_LORA_OPTIONS if getattr(config, name, None)]
    unsupported += ["bias"] if config.bias != "none" else []
    unsupported += ["init_lora_weights"] if config.init_lora_weights not in _INITIALIZATIONS else []
    if unsupported:
        name = unsupported[0]
        fix = "Name target_modules without experts" if name == "target_parameters" else "Remove it"
        raise InputError(f"vLLM cannot serve LoRA with {name}={getattr(config, name)!r}. {fix}, or set sampler: policy")
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    if rank > _LORA_RANKS[-1]:
        raise InputError(f"vLLM serves LoRA up to rank {_LORA_RANKS[-1]}, not {rank}. Use a lower rank")
    return next(allowed for allowed in _LORA_RANKS if allowed >= rank)
