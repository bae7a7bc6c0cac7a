"""Rollouts by an engine of vLLM in each training process."""

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
from .weight_sync import scramble_weight


class VLLMInProcessSampler(VLLMSampler):
    """An engine of vLLM in this process, on the GPU that it trains on; each rank samples with its own."""

    llm: Any = None

    def _open(self) -> None:
        """Start vLLM's engine with the student's config and random weights; the base of a LoRA policy, which never
        changes, is sent now.
        """
        self.llm = self._start()
        self._give_weights(scramble_weight)
        if self.lora:
            self._give_weights()

    def _send(self, change: Any = None) -> None:
        """Weights in memory, or a newly written adapter."""
        from vllm.lora.request import LoRARequest

        if self.lora:
            written = self._write(change)
            self.adapter = LoRARequest(lora_name=str(self.count), lora_int_id=self.count, lora_path=str(written))
            self._remove(self.count - 1)  # the newest stays: vLLM may read it again
        else:
            self._give_weights(change)
        # what is cached of prompts is of the old weights
        self.llm.reset_prefix_cache()

    def _start(self) -> Any:
        """VLLM's engine with the student's config and random weights."""
        from vllm import LLM

        trainer = self.trainer
        accelerator = self.trainer.accelerator
        inner = scoring.causal_lm(trainer.model)
        place = self.folder / "model"
        # a folder without weights, which come from memory: config and tokenizer are all that vLLM reads
        if trainer.is_world_process_zero():
            config = copy.deepcopy(inner.config)
            config.architectures = [sharded.original_class(inner).__name__]
            if accelerator.device.type == "cpu":  # there vLLM keeps a tied head as it was first
                config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
            config.save_pretrained(place)
            trainer.tokenizer.save_pretrained(place)
        accelerator.wait_for_everyone()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where the weights are
        lengths = trainer.args.max_length, getattr(inner.config.get_text_config(), "max_position_embeddings", None)
        self.dtype = compute_dtype(trainer)
        lora = {"enable_lora": True, "max_lora_rank": max_lora_rank(self.lora)} if self.lora else {}
        with rollout.seeded(accelerator.device, trainer.args.seed):  # vLLM seeds the process
            return LLM(
                model=str(place),
                load_format="dummy",
                generation_config="vllm",
                dtype=self.dtype,
                max_model_len=min(filter(None, lengths), default=None),
                gpu_memory_utilization=self.options.sampler.gpu_memory_utilization,
                logprobs_mode="processed_logprobs",  # of the distribution that is drawn from
                enable_prefix_caching=True,  # K rollouts read their prompt once
                distributed_executor_backend="uni" if accelerator.num_processes == 1 else "external_launcher",
                **lora,
            )

    def _give_weights(self, change: Any = None) -> None:
        """All weights but the adapter's, in memory. All ranks call it. change: (name, weight) -> another."""
        with torch.no_grad(), engine.gather_policy(self.trainer.model_wrapped, self.trainer.accelerator) as model:
            weights = hub_weights(scoring.causal_lm(model), dict(named_weights(model)))
            given = ((name, (change(name, weight) if change else weight).detach()) for name, weight in weights.items())
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": given})

    def _sample(
        self, prompts: Sequence[Sequence[int]], n: int, seeds: list[int], max_new_tokens: int
    ) -> list[list[SampledTokens]]:
        from vllm import SamplingParams

        if not prompts:
            return []
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        shared = self.sampling | {"n": n, "max_tokens": max_new_tokens, "detokenize": False, "logprobs": 0}
        how = [SamplingParams(**shared, seed=seed) for seed in seeds]
        with torch.autocast(self.trainer.args.device.type, enabled=False):  # evaluation is inside the policy's
            outputs = self.llm.generate(given, how, use_tqdm=False, lora_request=self.adapter)
        return [[_tokens_and_logps(one) for one in output.outputs] for output in outputs]

    def _likely(self) -> str:
        return "vLLM computes this architecture otherwise, or did not take all weights: set rollout: transformers"


def _tokens_and_logps(output: Any) -> SampledTokens:
    """A completion of vLLM's engine."""
    ids = list(output.token_ids)
    return ids, [given[token].logprob for token, given in zip(ids, output.logprobs, strict=True)]
