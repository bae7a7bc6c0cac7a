"""OPD's rollouts by vLLM: an engine in each training process (`Colocated`), or `vllm serve` over HTTP (`Server`).

Both have the methods of `rollout.OwnModel`: synchronise() gives vLLM the policy's weights, and all ranks call it;
generate(prompts, seed) samples K rollouts of each prompt. Tokens go in and come out as ids.

    weights         Colocated                                       Server
    all             in memory                                       a folder in output_dir, which the server must see
    LoRA            base in memory once, then adapters by folder    adapters by folder, on the student's own base

Written after the source of vLLM 0.33.0: entrypoints/llm.py, sampling_params.py, lora/request.py,
entrypoints/openai/completion/protocol.py, entrypoints/serve/{lora,dev/rpc,dev/cache}/api_router.py,
model_executor/model_loader/reload/inplace.py, v1/executor/uniproc_executor.py. Tested on CPU against stand-ins that
have this interface; not yet with vLLM itself on a GPU.
"""

import copy
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from ..engines import engine
from ..errors import InputError
from ..scoring import forward as scoring
from . import rollout, vllm_options
from .vllm_options import call

logger = logging.getLogger(__name__)
_REQUESTS = 256
"""How many requests a process has open at the server; each is a prompt and its K rollouts."""
_NEVER, _MOST_BIASED = -100.0, 1024
"""vLLM's least logit_bias, and the number of ids that may have one (v1/worker/gpu/sample/logit_bias.py)."""


class _Backend:
    """What both have in common: how is sampled, and where weights are written.

    Raises InputError for a quantised student, an adapter that vLLM cannot serve, and too many padding ids.
    """

    def __init__(self, trainer: Any):
        model = scoring.unwrapped(trainer.model)
        if getattr(scoring.causal_lm(model), "is_quantized", False):
            raise InputError("rollout: vllm takes no quantised student: set quantization: none, or drop rollout: vllm")
        self.lora = model.peft_config[model.active_adapter] if isinstance(model, peft.PeftModel) else None
        vllm_options.check(trainer.args, self.lora)
        self.trainer, self.sampling, self.count = trainer, sampling(trainer), 0
        self.adapter: Any = None
        self._temporary, self.folder = _shared_folder(trainer)

    def generate(self, prompts: Sequence[Sequence[int]], seed: Sequence[int]) -> list[list[int]]:
        """K rollouts of each prompt, one prompt after the other: tokens up to and with the first terminal id.

        Prompt n is sampled by (*seed, n). Raises RuntimeError for an id that no rollout may have.
        """
        if not prompts:
            return []
        seeds = [_mixed(*seed, number) for number in range(len(prompts))]
        rollouts = [list(ids) for group in self._sampled(prompts, seeds) for ids in group]
        if not all(rollouts):
            raise RuntimeError("vLLM gave an empty rollout: see its log")
        if max(map(max, rollouts)) >= self.trainer.vocabulary:
            raise RuntimeError("vLLM drew an id of the vocabulary's padding: set rollout: transformers")
        return rollouts

    def _sampled(self, prompts: Sequence[Sequence[int]], seeds: list[int]) -> list[list[Sequence[int]]]:
        """[prompts][K][tokens]"""
        raise NotImplementedError

    def _written(self) -> Path:
        """A folder with the policy as it is now, or with its adapter alone. All ranks call it."""
        self.count += 1
        folder = self.folder / str(self.count)
        self.trainer.save_model(str(folder), _internal_call=True)  # whole under every engine, and read again
        self.trainer.accelerator.wait_for_everyone()
        name = scoring.unwrapped(self.trainer.model).active_adapter if self.lora else "default"
        return folder if name == "default" else folder / name  # as PEFT has it

    def _remove(self, number: int) -> None:
        """The weights that were written as `number`. All ranks call it, and none goes on before the first rank does."""
        self.trainer.accelerator.wait_for_everyone()
        if self.trainer.is_world_process_zero():
            shutil.rmtree(self.folder / str(number), ignore_errors=True)


class Colocated(_Backend):
    """An engine of vLLM in this process, on the GPU that it trains on; each rank samples with its own."""

    llm: Any = None

    def synchronise(self) -> None:
        """Weights in memory, or a newly written adapter; the first time it starts the engine."""
        from vllm.lora.request import LoRARequest

        if self.llm is None:
            self.llm = self._started()
            if self.lora:
                self._give_weights()
        if self.lora:
            written = self._written()
            self.adapter = LoRARequest(lora_name=str(self.count), lora_int_id=self.count, lora_path=str(written))
            self._remove(self.count - 1)  # the newest stays: vLLM may read it again
        else:
            self._give_weights()
        self.llm.reset_prefix_cache()

    def _started(self) -> Any:
        """vLLM's engine with the student's config and random weights."""
        from vllm import LLM

        trainer, accelerator = self.trainer, self.trainer.accelerator
        inner, place = scoring.causal_lm(trainer.model), self.folder / "model"
        if trainer.is_world_process_zero():
            config = copy.deepcopy(inner.config)
            config.architectures = [engine.plain_class(inner).__name__]
            config.save_pretrained(place)
            trainer.tokenizer.save_pretrained(place)
        accelerator.wait_for_everyone()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where the weights are
        lengths = trainer.args.max_length, getattr(inner.config.get_text_config(), "max_position_embeddings", None)
        names = {"bf16": "bfloat16", "fp16": "float16"}
        lora = {"enable_lora": True, "max_lora_rank": vllm_options.max_rank(self.lora)} if self.lora else {}
        with rollout.seeded(accelerator.device, trainer.args.seed):  # vLLM seeds the process
            return LLM(
                model=str(place), load_format="dummy", generation_config="vllm",
                dtype=names.get(accelerator.mixed_precision, str(inner.dtype).removeprefix("torch.")),
                max_model_len=min(filter(None, lengths), default=None),
                gpu_memory_utilization=trainer.args.vllm_gpu_memory_utilization or 0.3,
                enable_prefix_caching=True,  # K rollouts read their prompt once
                distributed_executor_backend="uni" if accelerator.num_processes == 1 else "external_launcher",
                **lora,
            )  # fmt: skip

    def _give_weights(self) -> None:
        """All weights but the adapter's, from memory to memory. All ranks call it."""
        with torch.no_grad(), engine.whole_weights(self.trainer.model_wrapped, self.trainer.accelerator) as model:
            weights = iter(hub_weights(model).items())
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def _sampled(self, prompts: Sequence[Sequence[int]], seeds: list[int]) -> list[list[Sequence[int]]]:
        from vllm import SamplingParams

        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        how = [SamplingParams(**self.sampling, seed=seed, detokenize=False) for seed in seeds]
        with torch.autocast(self.trainer.args.device.type, enabled=False):  # evaluation is inside the policy's
            outputs = self.llm.generate(given, how, use_tqdm=False, lora_request=self.adapter)
        return [[one.token_ids for one in output.outputs] for output in outputs]


class Server(_Backend):
    """A server that `vllm serve` started; the first rank sends weights, and each rank asks for its own rollouts."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.url, card = trainer.args.vllm_server_base_url, vllm_options.served(trainer.args)
        self.model, base = card["id"], scoring.causal_lm(trainer.model).name_or_path
        if self.lora and card["root"] != base:
            said = "the vLLM server serves %s, and the student's base is %s: with LoRA they must be the same weights"
            logger.warning(said, card["root"], base or "a model in memory")

    def synchronise(self) -> None:
        """The server reads the weights, or the adapter under a new name, from a folder. Raises InputError."""
        path, previous = str(self._written()), self.adapter
        if self.lora:
            self.adapter = f"{self.folder.name}-{self.count}"
        if self.trainer.is_world_process_zero() and self.lora:
            call(self.url, "/v1/load_lora_adapter", {"lora_name": self.adapter, "lora_path": path})
            if previous is not None:
                call(self.url, "/v1/unload_lora_adapter", {"lora_name": previous})
        elif self.trainer.is_world_process_zero():
            call(self.url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
            if not json.loads(call(self.url, "/reset_prefix_cache", {}))["success"]:
                raise InputError(f"the vLLM server {self.url} has requests of others: it must serve this run alone")
        self._remove(self.count - 1 if self.lora else self.count)  # the newest adapter stays: vLLM may read it again

    def _sampled(self, prompts: Sequence[Sequence[int]], seeds: list[int]) -> list[list[Sequence[int]]]:
        """A request for each prompt, since each has its own seed; vLLM batches what is open."""

        def ask(prompt: Sequence[int], seed: int) -> list[Sequence[int]]:
            body = self.sampling | {"model": self.adapter or self.model, "prompt": list(prompt), "seed": seed}
            choices = json.loads(call(self.url, "/v1/completions", body | {"return_token_ids": True}))["choices"]
            return [choice["token_ids"] for choice in choices]

        with ThreadPoolExecutor(_REQUESTS) as pool:
            return list(pool.map(ask, prompts, seeds))


def sampling(trainer: Any) -> dict[str, Any]:
    """How vLLM samples from exactly the distribution that is scored: names of SamplingParams and of the server alike.

    Raises InputError where more ids must never be drawn than vLLM can be told.
    """
    args, size = trainer.args, scoring.causal_lm(trainer.model).config.get_text_config().vocab_size
    padding = range(trainer.vocabulary, size)
    if len(padding) > _MOST_BIASED:
        raise InputError(
            f"the student's vocabulary has {len(padding)} ids that the teacher lacks, and vLLM can be kept from drawing"
            f" {_MOST_BIASED}: set rollout: transformers"
        )
    return {
        "n": args.num_generations, "max_tokens": args.max_completion_length, "temperature": args.temperature,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "stop_token_ids": trainer.terminal_ids, "ignore_eos": True,  # ours alone, and they stay in the rollout
        "logit_bias": {token: _NEVER for token in padding} or None,
    }  # fmt: skip


def hub_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights as `from_pretrained` reads them, {name: tensor}, without those of an adapter."""
    inner = scoring.causal_lm(model)  # not by its state_dict(), which would cut FSDP2's weights again
    buffers = [
        (f"{prefix}.{name}", buffer)
        for prefix, module in inner.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]
    weights = {
        re.sub(r"(\.base_layer)+\.", ".", name): tensor.detach()
        for name, tensor in chain(inner.named_parameters(), buffers)
        if ".lora_" not in name
    }
    return dict(revert_weight_conversion(inner, weights))


def _shared_folder(trainer: Any) -> tuple[Any, Path]:
    """(what removes it when the run ends, a new folder in output_dir), the same on all ranks."""
    temporary = None
    if trainer.is_world_process_zero():
        parent = Path(trainer.args.output_dir).resolve()
        parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix="vllm-", dir=parent)
        os.chmod(temporary.name, 0o755)  # a server may be another user's
    [name] = broadcast_object_list([temporary and temporary.name])
    return temporary, Path(name)


def _mixed(*seed: int) -> int:
    """One seed of 62 bits: vLLM adds the number of the rollout to it."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(2))
