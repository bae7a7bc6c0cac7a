"""OPD's rollouts by vLLM: an engine in each training process (`Colocated`), or `vllm serve` over HTTP (`Server`).

Both have the methods of `rollout.OwnModel`: synchronise() gives vLLM the policy's weights, and all ranks call it;
generate(prompts, seed) samples K rollouts of each prompt. What vLLM cannot do is refused, mostly before loading.

    weights         Colocated                                       Server
    all             in memory                                       a folder in output_dir, which the server must see
    LoRA            base in memory once, then adapters by folder    adapters by folder, on the student's own base

Written after the source of vLLM 0.33.0: entrypoints/llm.py, sampling_params.py, lora/request.py,
entrypoints/openai/completion/protocol.py, entrypoints/serve/{lora,dev/rpc,dev/cache}/api_router.py,
model_executor/model_loader/reload/inplace.py, v1/executor/uniproc_executor.py. Tested on CPU against stand-ins that
have this interface; not yet with vLLM itself on a GPU.
"""

import copy
import http.client
import importlib.util
import json
import logging
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from ..engines import engine, sharded
from ..errors import InputError
from ..scoring import forward as scoring
from . import rollout

logger = logging.getLogger(__name__)
_REQUESTS = 256  # that a process has open at the server; each is a prompt and its K rollouts
_TIMEOUT = 3600  # seconds that one answer of the server may take
# vLLM's least logit_bias, and the number of ids that may have one (v1/worker/gpu/sample/logit_bias.py)
_NEVER, _MOST_BIASED = -100.0, 1024
# LoRA in vLLM: max_lora_rank (config/lora.py), and initialisations that leave the base as it is (lora/peft_helper.py)
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")
_BEYOND_LORA = (
    "use_dora", "modules_to_save", "lora_bias", "trainable_token_indices", "target_parameters", "layer_replication",
    "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "velora_config",
    "monteclora_config",
)  # fmt: skip
_NEEDS = {
    "/collective_rpc": "set VLLM_SERVER_DEV_MODE=1 in the server's environment, so that it takes weights",
    "/reset_prefix_cache": "set VLLM_SERVER_DEV_MODE=1 in the server's environment",
    "/v1/load_lora_adapter": "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
}


class _Backend:
    """What both have in common: how is sampled, and where weights are written.

    Raises InputError for a quantised student, an adapter that vLLM cannot serve, and too many padding ids.
    """

    def __init__(self, trainer: Any):
        model = scoring.unwrapped(trainer.model)
        if getattr(scoring.causal_lm(model), "is_quantized", False):
            raise InputError("rollout: vllm takes no quantised student: set quantization: none, or drop rollout: vllm")
        self.lora = model.peft_config[model.active_adapter] if isinstance(model, peft.PeftModel) else None
        self.card = check(trainer.args, self.lora, tied=self.lora is None and has_tied_head(model.config))
        self.trainer, self.sampling, self.count = trainer, sampling(trainer), 0
        self.adapter: Any = None
        # a new folder in output_dir, the same on all ranks; what removes it when the run ends is kept by the first
        self.temporary = None
        if trainer.is_world_process_zero():
            parent = Path(trainer.args.output_dir).resolve()
            parent.mkdir(parents=True, exist_ok=True)
            self.temporary = tempfile.TemporaryDirectory(prefix="vllm-", dir=parent)
            os.chmod(self.temporary.name, 0o755)  # a server may be another user's
        [folder] = broadcast_object_list([self.temporary and self.temporary.name])
        self.folder = Path(folder)

    def generate(self, prompts: Sequence[Sequence[int]], seed: Sequence[int], longest: int) -> list[list[int]]:
        """K rollouts of each prompt, one prompt after the other: tokens up to and with the first terminal id, or the
        `longest`.

        Prompt n is sampled by (*seed, n). Raises RuntimeError for an id that no rollout may have.
        """
        if not prompts:
            return []
        # of 62 bits, since vLLM adds the number of the rollout to it
        seeds = [rollout.mix_seed(*seed, number) >> 2 for number in range(len(prompts))]
        rollouts = [list(ids) for group in self._sample(prompts, seeds, longest) for ids in group]
        if not all(rollouts):
            raise RuntimeError("vLLM gave an empty rollout: see its log")
        if max(map(max, rollouts)) >= self.trainer.vocabulary:
            raise RuntimeError("vLLM drew an id of the vocabulary's padding: set rollout: transformers")
        return rollouts

    def _sample(self, prompts: Sequence[Sequence[int]], seeds: list[int], longest: int) -> list[list[Sequence[int]]]:
        """Token ids, [prompts][K][tokens]."""
        raise NotImplementedError

    def _write(self) -> Path:
        """The policy as it is now, or its adapter alone, to a new folder, which is returned. All ranks call it."""
        self.count += 1
        folder = self.folder / str(self.count)
        self.trainer.save_model(str(folder), _internal_call=True)  # whole under every engine, and read again
        self.trainer.accelerator.wait_for_everyone()
        name = scoring.unwrapped(self.trainer.model).active_adapter if self.lora else "default"
        return folder if name == "default" else folder / name  # as PEFT has it

    def _remove(self, number: int) -> None:
        """Remove the weights that were written as `number`. All ranks call it, the first one waits for all others."""
        self.trainer.accelerator.wait_for_everyone()
        if self.trainer.is_world_process_zero():
            shutil.rmtree(self.folder / str(number), ignore_errors=True)


class Colocated(_Backend):
    """An engine of vLLM in this process, on the GPU that it trains on; each rank samples with its own."""

    llm: Any = None

    def synchronise(self) -> None:
        """Weights in memory, or a newly written adapter; the first time it starts the engine."""
        from vllm.lora.request import LoRARequest

        # the base of a LoRA policy never changes: it is sent once, and then an adapter each time
        if self.llm is None:
            self.llm = self._start()
            if self.lora:
                self._give_weights()
        if self.lora:
            written = self._write()
            self.adapter = LoRARequest(lora_name=str(self.count), lora_int_id=self.count, lora_path=str(written))
            self._remove(self.count - 1)  # the newest stays: vLLM may read it again
        else:
            self._give_weights()
        # what is cached of prompts is of the old weights
        self.llm.reset_prefix_cache()

    def _start(self) -> Any:
        """Start vLLM's engine with the student's config and random weights."""
        from vllm import LLM

        trainer, accelerator = self.trainer, self.trainer.accelerator
        inner, place = scoring.causal_lm(trainer.model), self.folder / "model"
        # a folder without weights, which come from memory: config and tokenizer are all that vLLM reads
        if trainer.is_world_process_zero():
            config = copy.deepcopy(inner.config)
            config.architectures = [sharded.plain_class(inner).__name__]
            config.save_pretrained(place)
            trainer.tokenizer.save_pretrained(place)
        accelerator.wait_for_everyone()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where the weights are
        lengths = trainer.args.max_length, getattr(inner.config.get_text_config(), "max_position_embeddings", None)
        names = {"bf16": "bfloat16", "fp16": "float16"}
        lora = {"enable_lora": True, "max_lora_rank": max_rank(self.lora)} if self.lora else {}
        with rollout.seeded(accelerator.device, trainer.args.seed):  # vLLM seeds the process
            return LLM(
                model=str(place), load_format="dummy", generation_config="vllm",
                dtype=names.get(accelerator.mixed_precision, str(inner.dtype).removeprefix("torch.")),
                max_model_len=min(filter(None, lengths), default=None),
                gpu_memory_utilization=trainer.args.vllm_gpu_memory_utilization or 0.3,
                enable_prefix_caching=True,  # K rollouts read their prompt once
                distributed_executor_backend="uni" if accelerator.num_processes == 1 else "external_launcher", **lora,
            )  # fmt: skip

    def _give_weights(self) -> None:
        """All weights but the adapter's, from memory to memory. All ranks call it."""
        with torch.no_grad(), engine.whole_weights(self.trainer.model_wrapped, self.trainer.accelerator) as model:
            weights = iter(hub_weights(model).items())
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def _sample(self, prompts: Sequence[Sequence[int]], seeds: list[int], longest: int) -> list[list[Sequence[int]]]:
        from vllm import SamplingParams

        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        shared = self.sampling | {"max_tokens": longest, "detokenize": False}
        how = [SamplingParams(**shared, seed=seed) for seed in seeds]
        with torch.autocast(self.trainer.args.device.type, enabled=False):  # evaluation is inside the policy's
            outputs = self.llm.generate(given, how, use_tqdm=False, lora_request=self.adapter)
        return [[one.token_ids for one in output.outputs] for output in outputs]


class Server(_Backend):
    """A server that `vllm serve` started; the first rank sends weights, and each rank asks for its own rollouts."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.url, card = trainer.args.vllm_server_base_url, self.card
        self.model, base = card["id"], scoring.causal_lm(trainer.model).name_or_path
        if self.lora and card["root"] != base:
            said = "the vLLM server serves %s, and the student's base is %s: with LoRA they must be the same weights"
            logger.warning(said, card["root"], base or "a model in memory")

    def synchronise(self) -> None:
        """The server reads the weights, or the adapter under a new name, from a folder. Raises InputError."""
        # an adapter's name is new each time: vLLM would take one that it knows from its cache
        path, previous = str(self._write()), self.adapter
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

    def _sample(self, prompts: Sequence[Sequence[int]], seeds: list[int], longest: int) -> list[list[Sequence[int]]]:
        """A request for each prompt, since each has its own seed; vLLM batches what is open."""

        def ask(prompt: Sequence[int], seed: int) -> list[Sequence[int]]:
            body = self.sampling | {"prompt": list(prompt), "seed": seed, "max_tokens": longest}
            body |= {"model": self.adapter or self.model, "return_token_ids": True}
            choices = json.loads(call(self.url, "/v1/completions", body))["choices"]
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
        lacks = f"the student's vocabulary has {len(padding)} ids that the teacher lacks"
        raise InputError(f"{lacks}, and vLLM can be kept from drawing {_MOST_BIASED}: set rollout: transformers")
    return {
        "n": args.num_generations, "temperature": args.temperature,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "stop_token_ids": trainer.terminal_ids, "ignore_eos": True,  # ours alone, and they stay in the rollout
        "logit_bias": {token: _NEVER for token in padding} or None,
    }  # fmt: skip


def hub_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights as `from_pretrained` reads them, {name: tensor}, without those of an adapter."""
    # not by state_dict(), which would cut FSDP2's weights again: parameters, and the buffers that are saved
    inner = scoring.causal_lm(model)
    tensors: dict[str, Tensor] = dict(inner.named_parameters())
    for prefix, module in inner.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}"] = buffer
    plain = {re.sub(r"(\.base_layer)+\.", ".", name): tensor.detach() for name, tensor in tensors.items()}
    weights = {name: tensor for name, tensor in plain.items() if ".lora_" not in name}
    return dict(revert_weight_conversion(inner, weights))


# ---- what is refused


def check_installed(config: Any) -> None:
    """Raises InputError where an OPDConfig wants vLLM in this environment and it is not there."""
    if config.rollout == "vllm" and config.vllm_mode != "server" and importlib.util.find_spec("vllm") is None:
        raise InputError("rollout: vllm needs the package vllm: pip install vllm, or set vllm_mode: server")


def has_tied_head(config: Any) -> bool:
    """Does a model of this config have its embedding as head?"""
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


def check(config: Any, peft_config: Any = None, tied: bool = False) -> dict[str, Any]:
    """What the server, if there is one, says of its model: id, root (a name or folder), max_model_len.

    tied: are all weights sent, of a model whose head is its embedding? vLLM 0.32's server, on CPU, kept the old head
    after each transfer, without an error. Raises InputError for such a student, a server that cannot be asked or takes
    fewer tokens than max_length, and for an adapter that vLLM cannot serve.
    """
    if peft_config is not None:
        max_rank(peft_config)
    if config.vllm_mode != "server":
        return {}
    if tied:
        raise InputError(
            "vllm_mode: server: the student's head is its embedding (tie_word_embeddings), and vLLM may keep the old "
            "head when weights are sent, so rollouts would come from another model: use model.lora, or rollout: "
            "transformers"
        )
    card = json.loads(call(config.vllm_server_base_url, "/v1/models"))["data"][0]  # the base, then adapters
    if config.max_length is not None and card["max_model_len"] < config.max_length:
        longest = f"the vLLM server's --max-model-len {card['max_model_len']}: lower max_length, or start it with more"
        raise InputError(f"max_length={config.max_length} is more than {longest}")
    return card


def max_rank(config: Any) -> int:
    """The max_lora_rank that an adapter needs. Raises InputError for what vLLM cannot serve: it takes plain LoRA."""
    if config.peft_type != peft.PeftType.LORA:
        raise InputError(f"rollout: vllm serves LoRA, not {config.peft_type.value}: use LoRA, or rollout: transformers")
    odd = [name for name in _BEYOND_LORA if getattr(config, name, None)]
    odd += ["bias"] if config.bias != "none" else []
    odd += ["init_lora_weights"] if config.init_lora_weights not in _INITIALISATIONS else []
    if odd:
        given = getattr(config, odd[0])
        how = "name target_modules without experts" if odd[0] == "target_parameters" else "drop it"
        raise InputError(f"rollout: vllm cannot serve LoRA with {odd[0]}={given!r}: {how}, or rollout: transformers")
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    if rank > _RANKS[-1]:
        raise InputError(f"rollout: vllm serves LoRA up to rank {_RANKS[-1]}, not {rank}: lower it")
    return next(allowed for allowed in _RANKS if allowed >= rank)


def call(base_url: str, path: str, body: dict[str, Any] | None = None) -> str:
    """What the server answers to a GET, or to a POST of `body`. Raises InputError where there is none or it refuses."""
    url, data = base_url.rstrip("/") + path, None if body is None else json.dumps(body).encode()
    try:
        asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=_TIMEOUT) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        said = " ".join(error.read().decode(errors="replace").split())[:500]
        hint = f": {_NEEDS[path]}" if error.code == 404 and path in _NEEDS else ""
        raise InputError(f"vllm_server_base_url: {url} answered {error.code} ({said}){hint}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        where = f"no vLLM server answers at {url} ({getattr(error, 'reason', error)})"
        raise InputError(f"vllm_server_base_url: {where}: start it with vllm serve, or correct the URL") from error
