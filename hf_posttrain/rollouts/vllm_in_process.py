"""Rollouts by a vLLM engine in each training process."""

import copy
import os
from collections.abc import Sequence
from typing import Any

import torch

from ..engines import engine, sharded
from ..generation import rollout
from ..models.hub_weights import hub_weights, named_weights
from ..scoring import forward as scoring
from .vllm import SampledTokens, VLLMSampler, compute_dtype, max_lora_rank
from .weight_sync import WeightTransform, scramble_weight


class VLLMInProcessSampler(VLLMSampler):
    """A vLLM engine in this process, on the GPU that it trains on. Each rank samples with its own engine."""

    llm: Any = None

    def _open(self) -> None:
        """Start the engine with random weights.

        The base of a LoRA policy, which never changes, is sent now.
        """
        self.llm = self._start()
        self._load_weights(scramble_weight)
        if self.lora:
            self._load_weights()

    def _send(self, transform: WeightTransform | None = None) -> None:
        """Send weights in memory, or a newly written adapter."""
        from vllm.lora.request import LoRARequest

        if self.lora:
            path = self._write(transform)
            number = self.write_count
            self.adapter = LoRARequest(lora_name=str(number), lora_int_id=number, lora_path=str(path))
            self._remove(self.write_count - 1)  # the newest stays: vLLM may read it again
        else:
            self._load_weights(transform)
        # cached prompts are of the old weights
        self.llm.reset_prefix_cache()

    def _start(self) -> Any:
        """Return an engine with the student's config and random weights."""
        from vllm import LLM

        trainer = self.trainer
        accelerator = self.trainer.accelerator
        inner = scoring.causal_lm(trainer.model)
        folder = self.folder / "model"
        # the folder has no weights, which come from memory: vLLM reads only the config and the tokenizer
        if trainer.is_world_process_zero():
            config = copy.deepcopy(inner.config)
            config.architectures = [sharded.original_class(inner).__name__]
            if accelerator.device.type == "cpu":  # vLLM on CPU never updates a tied head
                config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
            config.save_pretrained(folder)
            trainer.tokenizer.save_pretrained(folder)
        accelerator.wait_for_everyone()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, which has the weights
        lengths = trainer.args.max_length, getattr(inner.config.get_text_config(), "max_position_embeddings", None)
        self.dtype = compute_dtype(trainer)
        lora = {"enable_lora": True, "max_lora_rank": max_lora_rank(self.lora)} if self.lora else {}
        with rollout.seeded(accelerator.device, trainer.args.seed):  # vLLM seeds the process
            return LLM(
                model=str(folder),
                load_format="dummy",
                generation_config="vllm",
                dtype=self.dtype,
                max_model_len=min(filter(None, lengths), default=None),
                gpu_memory_utilization=self.options.sampler.gpu_memory_utilization,
                logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
                enable_prefix_caching=True,  # K rollouts share the computation of their prompt
                distributed_executor_backend="uni" if accelerator.num_processes == 1 else "external_launcher",
                **lora,
            )

    def _load_weights(self, transform: WeightTransform | None = None) -> None:
        """Load all weights except the adapter's into the engine, from memory. All ranks call it.

        transform: change of each weight, if any.
        """
        with torch.no_grad(), engine.gather_policy(self.trainer.model_wrapped, self.trainer.accelerator) as model:
            weights = hub_weights(scoring.causal_lm(model), dict(named_weights(model)))
            sent = (
                (name, (transform(name, weight) if transform else weight).detach()) for name, weight in weights.items()
            )
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": sent})

    def _sample(
        self, prompts: Sequence[Sequence[int]], n: int, seeds: list[int], max_new_tokens: int
    ) -> list[list[SampledTokens]]:
        from vllm import SamplingParams

        if not prompts:
            return []
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        shared = self.sampling_parameters | {"n": n, "max_tokens": max_new_tokens, "detokenize": False, "logprobs": 0}
        parameters = [SamplingParams(**shared, seed=seed) for seed in seeds]
        with torch.autocast(self.trainer.args.device.type, enabled=False):  # an evaluation is inside the policy's
            outputs = self.llm.generate(inputs, parameters, use_tqdm=False, lora_request=self.adapter)
        return [[_tokens_and_logps(completion) for completion in output.outputs] for output in outputs]

    def _likely_cause(self) -> str:
        return "vLLM computes this architecture differently, or did not load all weights. Set sampler: policy"


def _tokens_and_logps(output: Any) -> SampledTokens:
    """Return the ids of a completion of the engine, and their log-probabilities."""
    ids = list(output.token_ids)
    return ids, [logprobs[token].logprob for token, logprobs in zip(ids, output.logprobs, strict=True)]
