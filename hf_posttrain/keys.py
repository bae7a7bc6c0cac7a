"""The keys of a recipe's `train` section, read from source: unknown names and wrong types are said within a second.

    train_fields   a stand-in for a method's Config, made without importing torch or transformers
    advice         what to use instead of a field of TRL or of older transformers

The Config itself checks again, with what only it knows.
"""

import ast
import dataclasses
import importlib.util
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_GONE = {  # names of other versions and libraries, and what to say instead
    "evaluation_strategy": "use eval_strategy",
    "warmup_ratio": "use warmup_steps, where a value below 1 is a ratio of all steps",
    "group_by_length": "use train_sampling_strategy: group_by_length",
    "save_safetensors": "files are always safetensors",
    "no_cuda": "use use_cpu",
    "use_mps_device": "MPS is used where it is found",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "overwrite_output_dir": "an existing output_dir is used as it is",
    "per_gpu_train_batch_size": "use per_device_train_batch_size",
    "per_gpu_eval_batch_size": "use per_device_eval_batch_size",
    "include_tokens_per_second": "use include_num_input_tokens_seen",
    "include_inputs_for_metrics": "use include_for_metrics",
    "tokenizer": "the tokenizer comes from model.name_or_path",
    "max_seq_length": "use max_length",
    "lr": "use learning_rate",
    "epochs": "use num_train_epochs",
    "batch_size": "use per_device_train_batch_size",
}
_TRL_ADVICE = {
    "padding_free": "use layout: packed (or auto)",
    "pad_to_multiple_of": "rows are packed, there is nothing to pad to",
    "truncation_mode": "the prompt is trimmed from its left first, then the completion from its right",
    "model_init_kwargs": "use the model section (dtype, attn_implementation, ...) or pass a loaded model",
    "teacher_model_init_kwargs": "use the teacher section or pass a loaded teacher_model",
    "teacher_model_name_or_path": "use the teacher section or pass teacher_model",
    "chat_template_path": "use model.chat_template",
    "eos_token": "the turn end of the chat template is found and trained",
    "pad_token": "padding never touches the loss; set it in the tokenizer if you must",
    "dataset_kwargs": "use the data section",
    "shuffle_dataset": "every epoch is shuffled; train_sampling_strategy: sequential turns that off",
    "max_prompt_length": "use max_length: the prompt is trimmed first, the completion kept",
    "ld_alpha": "it is not supported",
    "f_divergence_type": "only reverse KL is supported",
    "f_alpha_divergence_coef": "only reverse KL is supported",
    "use_weighting": "it is not supported",
    "discopop_tau": "it is not supported",
    "sync_ref_model": "the reference never moves",
    "activation_offloading": "use activation_checkpointing_kwargs: {offload: true}",
    "max_new_tokens": "use max_completion_length",
    "seq_kd": "train on the teacher's answers as completions",
    "top_k": "rollouts come from the distribution that is scored: top_k is 0",
    "top_p": "rollouts come from the distribution that is scored: top_p is 1",
    "min_p": "rollouts come from the distribution that is scored: min_p is off",
    "repetition_penalty": "rollouts come from the distribution that is scored: no penalties",
    "use_vllm": "use rollout: vllm",
    "vllm_server_host": "use vllm_server_base_url, such as http://localhost:8000",
    "vllm_server_port": "use vllm_server_base_url, such as http://localhost:8000",
    "vllm_server_timeout": "start the server first: it is asked once",
    "vllm_group_port": "a server reads its weights from output_dir",
    "vllm_max_model_length": "use max_length",
    "vllm_tensor_parallel_size": "give --tensor-parallel-size to vllm serve (vllm_mode: server)",
    "vllm_enable_sleep_mode": "lower vllm_gpu_memory_utilization, or use vllm_mode: server",
    "vllm_model_impl": "vLLM chooses its own",
    "vllm_structured_outputs_regex": "rollouts come from the distribution that is scored",
    "vllm_importance_sampling_correction": "it is not supported: the student scores its rollouts again",
    "eval_packing": "evaluation is exact with any batch; leave it out",
    "packing_strategy": "packing is best-fit decreasing",
    "rpo_alpha": "use nll_coef",
    "loss_type": "kd calls it divergence; sft has one loss",
    "divergence": "opd calls it loss_type",
}


def advice(name: str) -> str | None:
    """What to use instead of a field of TRL or of older transformers that we lack; None for any other name."""
    return _GONE.get(name) or _TRL_ADVICE.get(name)


def train_fields(method: str) -> type:
    """A dataclass with the fields of the method's Config, their defaults left out.

    Annotations that name what only transformers defines (its enums) become Any.
    """
    here = Path(__file__).parent
    classes = [(here / f"{method}.py", f"{method.upper()}Config"), (here / "config.py", "PostTrainConfig")]
    hugging_face = importlib.util.find_spec("transformers")  # finds it, without importing
    if hugging_face is not None and hugging_face.origin is not None:
        classes.append((Path(hugging_face.origin).with_name("training_args.py"), "TrainingArguments"))
    fields = {name: kind for file, cls in reversed(classes) for name, kind in _fields(file, cls)}
    return dataclasses.make_dataclass("TrainSection", [(name, kind, None) for name, kind in fields.items()])


def _fields(file: Path, cls: str) -> Iterator[tuple[str, Any]]:
    """(name, type) of each field that the class itself declares."""
    [body] = [node.body for node in ast.parse(file.read_text(encoding="utf-8")).body
              if isinstance(node, ast.ClassDef) and node.name == cls]  # fmt: skip
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotation = ast.unparse(node.annotation)
            if not annotation.startswith("ClassVar"):
                yield node.target.id, _evaluated(annotation)


def _evaluated(annotation: str) -> Any:
    """The type that an annotation means with nothing but the standard library imported."""
    if '"' in annotation or "'" in annotation:  # a forward reference, or a Literal: the Config checks it
        return Any
    try:
        return eval(annotation, vars(typing) | {"typing": typing})
    except (NameError, AttributeError, TypeError, SyntaxError):
        return Any
