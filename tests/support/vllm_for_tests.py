"""Stand-ins for vLLM 0.33.0 on CPU, with a transformers model inside: the server's endpoints, and the colocated engine.

    Serving       a server on a real port: with Serving(model) as server: ... server.url
    install       puts a module `vllm` with LLM, SamplingParams and LoRARequest where `import vllm` finds it
    sampled       what both sample with: whole logits, one token after the other

Names of parameters are vLLM's; `test_the_stand_ins_have_vllms_names` compares them where vLLM is installed.
"""

import copy
import importlib.machinery
import json
import sys
import threading
import types
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import peft
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from hf_posttrain.generation import rollout

COMPLETION_FIELDS = {
    "model", "prompt", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "stop_token_ids", "ignore_eos", "logit_bias", "seed", "return_token_ids",
    "logprobs", "prompt_logprobs", "logprob_token_ids", "return_tokens_as_token_ids",
}  # fmt: skip
"""Those of CompletionRequest that this server reads."""
ENGINE_FIELDS = {
    "load_format", "generation_config", "max_model_len", "enable_prefix_caching", "distributed_executor_backend",
    "enable_lora", "max_lora_rank", "logprobs_mode",
}  # fmt: skip
"""Those of EngineArgs that LLM passes on."""


NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
           "frequency_penalty": 0.0}  # fmt: skip


def sampled(model, prompt, n, seed, max_tokens, temperature, stop_token_ids, logit_bias=None, **others):
    """[n][tokens], and their log-probabilities: rollout i is drawn by seed + i, as vLLM numbers them."""
    assert others == NEUTRAL | {"ignore_eos": True, "logprobs": 0}
    bias = torch.zeros(model.config.vocab_size)
    for token, value in (logit_bias or {}).items():
        bias[int(token)] = value
    rollouts, logps = [], [[] for _ in range(n)]
    for index in range(n):
        ids, own = list(prompt), torch.Generator().manual_seed(rollout.mix_seed(seed + index))
        with torch.no_grad():
            while len(ids) < len(prompt) + max_tokens and (len(ids) == len(prompt) or ids[-1] not in stop_token_ids):
                logits = model(input_ids=torch.tensor([ids])).logits[0, -1].float() + bias
                drawn_from = torch.log_softmax(logits / temperature, -1)
                ids.append(int(torch.multinomial(drawn_from.exp(), 1, generator=own)))
                logps[index].append(drawn_from[ids[-1]].item())
        rollouts.append(ids[len(prompt) :])
    return rollouts, logps


def with_adapter(model, folder):
    """A copy of the base with the adapter of the folder."""
    return peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


# ---- the server


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # of its five a busy machine resets some, where many prompts are asked at once


class Serving:
    """A server of `model` on a port of its own; `without` are endpoints that it lacks, as without their environment."""

    def __init__(self, model, max_model_len=1024, without=(), tokenizer=None):
        self.tokenizer = tokenizer  # of texts, which only a question for ids has
        self.model, self.base, self.adapters, self.log = model, model, {}, []
        self.max_model_len, self.without, self.busy = max_model_len, without, False
        self.process, self.logprobs_mode, self.max_lora_rank = "first", "processed_logprobs", 64
        self.keeps = ()  # names of weights that no transfer changes
        self.lock = threading.Lock()

    def __enter__(self):
        handler = type("Handler", (_Handler,), {"serving": self})
        self.http = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.http.shutdown()
        self.http.server_close()

    def models(self):
        cards = [{"id": "student", "root": "served", "max_model_len": self.max_model_len}]
        return {"object": "list", "data": cards + [{"id": name, "parent": "student"} for name in self.adapters]}

    def server_info(self):
        told = {"dtype": "torch.float32", "logprobs_mode": self.logprobs_mode}
        lora, load = {"max_lora_rank": self.max_lora_rank}, {"load_format": "dummy"}
        known = {"model_config": told, "lora_config": lora, "load_config": load, "instance_id": self.process}
        return {"vllm_config": known}

    def collective_rpc(self, method, args=(), kwargs=None):
        if method == "update_config":
            assert list(args) == [{"load_config": {"load_format": "auto"}}]
            return {"results": [None]}
        assert (method, *kwargs) == ("reload_weights", "weights_path")
        weights = load_file(f"{kwargs['weights_path']}/model.safetensors")
        weights = {name: tensor for name, tensor in weights.items() if name not in self.keeps}
        self.model = copy.deepcopy(self.model)
        missing, _ = self.model.load_state_dict(weights, strict=False)
        assert set(missing) <= set(self.keeps)
        return {"results": [None]}

    def reset_prefix_cache(self):
        return {"success": not self.busy}

    def load_lora_adapter(self, lora_name, lora_path):
        assert lora_name not in self.adapters
        self.adapters[lora_name] = with_adapter(self.base, lora_path)
        return f"Success: LoRA adapter '{lora_name}' added successfully."

    def unload_lora_adapter(self, lora_name):
        del self.adapters[lora_name]
        return f"Success: LoRA adapter '{lora_name}' removed successfully."

    def completions(self, model, prompt, return_token_ids, **how):
        assert how.keys() | {"model", "prompt", "return_token_ids"} <= COMPLETION_FIELDS
        assert return_token_ids is True
        if isinstance(prompt, str):
            ids = self.tokenizer and self.tokenizer(prompt)["input_ids"]
            return {"choices": [{"index": 0, "token_ids": [0], "prompt_token_ids": ids}]}
        if "prompt_logprobs" in how:
            return {"choices": [self.scores(prompt, **how)]}
        if "logprob_token_ids" in how:
            return {"choices": [self.next_scores(prompt, how)]}
        policy = self.model if model == "student" else self.adapters[model]
        with self.lock:  # seeds are of the process
            rollouts, logps = sampled(policy, prompt, **how)
        told = {"prompt_token_ids": prompt}
        return {"choices": [told | {"index": i, "token_ids": ids, "logprobs": {"token_logprobs": logps[i]}}
                            for i, ids in enumerate(rollouts)]}  # fmt: skip

    def scores(self, prompt, prompt_logprobs, max_tokens, temperature):
        """The choice of a request for scores: at temperature 1, as vLLM gives them whatever it is asked for."""
        assert (max_tokens, temperature) == (1, 0.0)
        assert len(prompt) < self.max_model_len
        with self.lock, torch.no_grad():
            table = torch.log_softmax(self.model(input_ids=torch.tensor([prompt])).logits[0].float(), -1)
        told = [None]
        for row, token in zip(table, prompt[1:], strict=False):
            ids = {token, *row.topk(min(prompt_logprobs, len(row))).indices.tolist()}
            told.append({str(i): {"logprob": row[i].item(), "rank": 1, "decoded_token": "x"} for i in ids})
        return {"index": 0, "token_ids": [0], "prompt_token_ids": prompt, "prompt_logprobs": told}

    def next_scores(self, prompt, how):
        """The choice of a request for some tokens' scores behind a prompt."""
        assert (how["max_tokens"], how["temperature"], how["return_tokens_as_token_ids"]) == (1, 1.0, True)
        assert how.items() >= NEUTRAL.items()  # or the model's own generation config would hold
        with self.lock, torch.no_grad():
            row = torch.log_softmax(self.model(input_ids=torch.tensor([prompt])).logits[0, -1].float(), -1)
        told = {f"token_id:{token}": row[token].item() for token in how["logprob_token_ids"]}
        return {"index": 0, "token_ids": [0], "prompt_token_ids": prompt, "logprobs": {"top_logprobs": [told]}}


class _Handler(BaseHTTPRequestHandler):
    """Paths of vLLM to methods of Serving."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        assert self.headers["Content-Type"] == "application/json"
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body):
        path = urlsplit(self.path).path
        self.serving.log.append((path, body))
        if path in self.serving.without:
            self.send(404, {"detail": "Not Found"})
            return
        try:
            found = getattr(self.serving, path.rpartition("/")[2])(**body)
            self.send(200, found)
        except Exception as error:
            self.send(500, {"error": {"message": repr(error), "code": 500}})

    def send(self, status, content):
        text = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


# ---- the engine


@dataclass
class SamplingParams:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    detokenize: bool = True
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class LLM:
    """The engine; `fields` are its arguments, `log` what was asked of it."""

    def __init__(self, model, *, dtype="auto", gpu_memory_utilization=0.92, **kwargs):
        assert kwargs.keys() <= ENGINE_FIELDS
        self.fields = kwargs | {"dtype": dtype, "gpu_memory_utilization": gpu_memory_utilization}
        assert AutoTokenizer.from_pretrained(model).eos_token_id is not None
        config = AutoConfig.from_pretrained(model)
        torch.manual_seed(0)  # as vLLM does
        [architecture] = config.architectures
        model = getattr(transformers, architecture)(config)  # not through from_config: DeepSpeed would cut it
        self.policy, self.log = model.to(getattr(torch, dtype)).eval(), []

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        assert (method, *kwargs) == ("reload_weights", "weights_iterator")
        weights = dict(kwargs["weights_iterator"])
        assert not any(tensor.requires_grad for tensor in weights.values())
        missing, unexpected = self.policy.load_state_dict(weights, strict=False)
        assert not unexpected
        assert set(missing) <= set(self.policy.all_tied_weights_keys)
        self.policy.tie_weights()
        self.log.append("weights")
        return [None]

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        self.log.append("reset")
        return True

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True, lora_request=None):
        assert len(prompts) == len(sampling_params)
        self.log.append(("generate", len(prompts), lora_request and lora_request.lora_int_id))
        policy = with_adapter(self.policy, lora_request.lora_path) if lora_request else self.policy
        outputs = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            how = vars(params).copy()
            assert how.pop("detokenize") is False
            found = zip(*sampled(policy, prompt["prompt_token_ids"], **how), strict=True)
            outputs.append(types.SimpleNamespace(outputs=[_output(*one) for one in found]))
        return outputs


def _output(ids, logps):
    told = [{token: types.SimpleNamespace(logprob=logp)} for token, logp in zip(ids, logps, strict=True)]
    return types.SimpleNamespace(token_ids=tuple(ids), logprobs=told)


def install(modules=sys.modules):
    """`import vllm` finds the stand-ins."""
    vllm, lora, request = (types.ModuleType(name) for name in ("vllm", "vllm.lora", "vllm.lora.request"))
    vllm.LLM, vllm.SamplingParams, request.LoRARequest = LLM, SamplingParams, LoRARequest
    vllm.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    for module in (vllm, lora, request):
        modules[module.__name__] = module
