"""What of rollout: vllm is refused, most of it before weights are loaded; limits are those of vLLM 0.33.0.

    check_installed  is the package there?
    check       what else shows without weights: the server, the kind of adapter
    served      what the server says of its model
    max_rank    how large an adapter vLLM must be ready for
    call        one request to the server

All raise InputError with one sentence. What an OPDConfig's values refuse is in `rules.methods`.
"""

import http.client
import importlib.util
import json
import urllib.error
import urllib.request
from typing import Any

import peft

from ..errors import InputError

_TIMEOUT = 3600
"""Seconds that one answer of the server may take."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM allows as max_lora_rank (config/lora.py)."""
_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")
"""Of LoRA: the others change the base too (lora/peft_helper.py)."""
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


def check_installed(config: Any) -> None:
    """Raises InputError where an OPDConfig wants vLLM in this environment and it is not there."""
    if config.rollout == "vllm" and config.vllm_mode != "server" and importlib.util.find_spec("vllm") is None:
        raise InputError("rollout: vllm needs the package vllm: pip install vllm, or set vllm_mode: server")


def check(config: Any, peft_config: Any = None) -> None:
    """Raises InputError for a server that is out of reach or too short, and for an adapter that vLLM cannot serve."""
    if config.vllm_mode == "server":
        served(config)
    if peft_config is not None:
        max_rank(peft_config)


def served(config: Any) -> dict[str, Any]:
    """What the server says of its model: id, root (a name or folder), max_model_len.

    Raises InputError where it cannot be asked or has no room for max_length.
    """
    card = json.loads(call(config.vllm_server_base_url, "/v1/models"))["data"][0]  # the base, then adapters
    room = card["max_model_len"]
    if config.max_length is not None and room < config.max_length:
        raise InputError(
            f"max_length={config.max_length} is more than the vLLM server's --max-model-len {room}: lower max_length, "
            "or start the server with more"
        )
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
    """What the server answers to a GET, or to a POST of `body`.

    Raises InputError, with what to do, where there is no server or it refuses.
    """
    url = base_url.rstrip("/") + path
    data = None if body is None else json.dumps(body).encode()
    try:
        asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=_TIMEOUT) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        said = " ".join(error.read().decode(errors="replace").split())[:500]
        hint = f": {_NEEDS[path]}" if error.code == 404 and path in _NEEDS else ""
        raise InputError(f"vllm_server_base_url: {url} answered {error.code} ({said}){hint}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InputError(
            f"vllm_server_base_url: no vLLM server answers at {url} ({getattr(error, 'reason', error)}): start it with "
            "vllm serve, or correct the URL"
        ) from error
