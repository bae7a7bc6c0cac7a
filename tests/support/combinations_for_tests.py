"""Recipes drawn at random, of models, teachers, adapters, rows and options that go together mostly.

make_shelf(folder)          the models, adapters, templates and rows that the recipes name
combination(number)         the recipe of this number, a mapping; the same number gives the same recipe
"""

import json
import random

import peft
import transformers as tf
from models_for_tests import SMALL, tiny_model
from tokenizers_for_tests import (
    CHATML,
    CHATML_GENERATION,
    LLAMA,
    QWEN3,
    base_tokenizer,
    bos_tokenizer,
    byte_tokenizer,
    merging_tokenizer,
    words_tokenizer,
)

from hf_posttrain.methods import METHODS
from hf_posttrain.methods.rules import CONTRASTIVE_LOSSES, DIVERGENCES, PAIRED_LOSSES, POLICY_GRADIENT
from hf_posttrain.recipe.fields import train_fields
from hf_posttrain.rollouts.options import TOKEN_WEIGHTS

ONE_LAYER = {"num_hidden_layers": 1}
MODELS = {  # folder -> what builds its model, and its tokenizer
    "qwen3": (lambda: tiny_model("qwen3"), byte_tokenizer),
    "llama": (lambda: tiny_model("llama", num_hidden_layers=1), lambda: byte_tokenizer(QWEN3)),
    "base": (lambda: tiny_model("qwen3"), base_tokenizer),
    "bos": (lambda: tiny_model("llama", num_hidden_layers=1), bos_tokenizer),
    "plain": (lambda: tiny_model("llama", num_hidden_layers=1), words_tokenizer),
    "gemma2": (lambda: tiny_model("gemma2"), byte_tokenizer),
    "gemma3": (lambda: tiny_model("gemma3"), lambda: byte_tokenizer(CHATML_GENERATION)),
    "mistral": (lambda: tiny_model("mistral"), byte_tokenizer),
    "moe": (lambda: tiny_model("qwen3_moe"), byte_tokenizer),
    "gpt2": (lambda: tiny_model("gpt2"), byte_tokenizer),
    "no_pad": (lambda: tiny_model("qwen3"), lambda: _without(byte_tokenizer(), "pad_token")),
    "short": (lambda: _ropes({"rope_type": "dynamic", "factor": 2.0}, 32), byte_tokenizer),
    "small": (lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL | ONE_LAYER | {"vocab_size": 257})), byte_tokenizer),
    "mamba": (lambda: _mamba(), byte_tokenizer),
    "hybrid": (lambda: _hybrid(), byte_tokenizer),
    # teachers
    "larger": (lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL | ONE_LAYER | {"vocab_size": 320})), byte_tokenizer),
    "merging": (lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL | ONE_LAYER | {"vocab_size": 600})),
                merging_tokenizer),
}  # fmt: skip
TEACHERS = ("larger", "merging")


def _without(tokenizer, token):
    setattr(tokenizer, token, None)
    return tokenizer


def _ropes(parameters, positions):
    sizes = SMALL | ONE_LAYER | {"max_position_embeddings": positions}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, rope_parameters=parameters | {"rope_theta": 10000.0}))


def _mamba():
    return tf.MambaForCausalLM(tf.MambaConfig(
        vocab_size=300, hidden_size=32, state_size=4, num_hidden_layers=1, pad_token_id=256, eos_token_id=258,
        bos_token_id=None,
    ))  # fmt: skip


def _hybrid():
    return tf.Lfm2ForCausalLM(tf.Lfm2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"} | {
        "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3,
    }))  # fmt: skip


def _adapter(base, folder, **options):
    model = tf.AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).save_pretrained(folder)


def make_shelf(folder):
    """Write everything that a combination may name into the folder, which is the current one."""
    for name, (build, tokenizer) in MODELS.items():
        build().save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    _adapter("qwen3", folder / "adapter", r=2, target_modules="all-linear")
    _adapter("qwen3", folder / "whole", r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    _adapter("qwen3", folder / "alora", r=2, target_modules="all-linear", alora_invocation_tokens=[65])
    _adapter("larger", folder / "wide", r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    for name, template in (("chatml", CHATML), ("tags", CHATML_GENERATION), ("llama", LLAMA)):
        (folder / f"{name}.jinja").write_text(template)
    for name in ROWS:
        for file, numbers in ((name, range(4)), (f"{name}_eval", range(4, 7))):
            rows = all_rows(numbers)[name]
            (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- rows


def _turns(n, system=False, long=False):
    turns = [{"role": "system", "content": "Be brief."}] if system else []
    turns += [{"role": "user", "content": f"{n} + 1 = ?" * (30 if long else 1)}]
    return turns, [{"role": "assistant", "content": f"It is {n + 1}."}]


def _with_answers(prompt, good, bad, n):
    """Columns of all kinds of rows."""
    return {"prompt": prompt, "completion": good, "chosen": good, "rejected": bad, "label": n % 2 == 0}


def all_rows(numbers=range(4)):
    """File -> rows that have the columns of every method, but where the name says otherwise."""
    found = {}
    plain = [_with_answers(f"{n} + 1 =", f" {n + 1}", f" {n + 2}", n) for n in numbers]
    found["strings"] = plain
    found["taught"] = [row | {"teacher": "ab"[n % 2], "hint": "add"} for n, row in zip(numbers, plain, strict=True)]
    found["long"] = [row | {"prompt": "x" * 90 + row["prompt"]} for row in plain]
    found["long_answers"] = [
        row | {name: row[name] * 30 for name in ("completion", "chosen", "rejected")} for row in plain
    ]
    found["one"] = plain[:1]
    found["empty_answers"] = [row | {"completion": "", "chosen": ""} if row["label"] else row for row in plain]
    found["nothing"] = [row | {"completion": "", "chosen": "", "rejected": ""} for row in plain]
    found["empty_prompts"] = [row | {"prompt": ""} for row in plain]
    found["good"] = [row | {"label": True} for row in plain]
    found["null"] = [plain[0], plain[1] | {"completion": None, "chosen": None}]
    found["text"] = [{"text": f"{n} + 1 = {n + 1}"} for n in numbers]
    chats = [(*_turns(n, system=n % 2), [{"role": "assistant", "content": "No."}], n) for n in numbers]
    found["chat"] = [_with_answers(*each) for each in chats]
    found["tools"] = [row | {"tools": [{"type": "function", "function": {"name": "add"}}]} for row in found["chat"]]
    found["messages"] = [{"messages": prompt + good, "label": n % 2 == 0} for prompt, good, _, n in chats]
    found["several_turns"] = [{"messages": (ask + good) * 2} for ask, good, *_ in chats if ask[0]["role"] == "user"]
    found["long_messages"] = [{"messages": [*_turns(n, long=True)[0], *_turns(n)[1]]} for n in numbers]
    found["users_alone"] = [{"messages": _turns(n)[0]} for n in numbers]
    ids = [_with_answers([n, 65], [66, n, 258], [67, 258], n) for n in numbers]
    found["ids"] = [{name if name == "label" else f"{name}_ids": value for name, value in row.items()} for row in ids]
    found["masked"] = [row | {"completion_mask": [0, 1, 1]} for row in found["ids"]]
    found["unmasked"] = [row | {"completion_mask": [0, 0, 0]} for row in found["ids"]]
    found["far_ids"] = [row | {"completion_ids": [400, 258], "chosen_ids": [400, 258]} for row in found["ids"]]
    found["padding_ids"] = [row | {"completion_ids": [290, 258], "chosen_ids": [290, 258]} for row in found["ids"]]
    found["other_columns"] = [{"question": "a", "answer": "b"}]
    found["nobody"] = []
    return found


USUAL_ROWS = ("strings", "taught", "chat", "ids", "messages", "long", "masked", "tools")
ROWS = tuple(all_rows())


# ---- a combination


class Draw(random.Random):
    """A generator with the odds of this module."""

    def some(self, share):
        return self.random() < share

    def either(self, usual, odd, share=0.15):
        """One of the usual, and now and then one of the odd."""
        return self.choice(odd if self.some(share) else usual)

    def options(self, table, share=0.2):
        """Some of the names in a table, each with one of its values."""
        return {name: self.choice(values) for name, values in table.items() if self.some(share)}


COMMON = {
    "layout": ["auto", "shared", "packed", "padded"], "max_length": [None, 16, 40, 200], "bf16": [True, False, None],
    "gradient_accumulation_steps": [1, 2, 3], "activation_checkpointing": [True, False],
    "activation_checkpointing_kwargs": [{"every_n_layers": 2}, {}], "disable_dropout": [True, False],
    "neftune_noise_alpha": [0, 5.0, None], "learning_rate": [1e-4, 0.0, "5e-7"], "weight_decay": [0.1],
    "optim": ["adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop", "adamw_torch_fused"],
    "lr_scheduler_type": ["cosine", "constant", "polynomial", "cosine_with_restarts", "inverse_sqrt"],
    "warmup_steps": [0, 1, 0.5, 10], "max_grad_norm": [0, 1.0], "apply_chat_template": [True, False],
    "chat_template_kwargs": [{"enable_thinking": False}, {}], "reasoning": ["keep", "drop"],
    "train_sampling_strategy": ["sequential", "group_by_length", "random"], "router_aux_loss_coef": [0.0, 0.01],
    "save_strategy": ["steps", "epoch"], "save_only_model": [True], "per_device_train_batch_size": [1, 3, 8],
    "per_device_eval_batch_size": [1, 2], "dataloader_drop_last": [True], "seed": [0, 1, 2**32 - 1],
    "include_num_input_tokens_seen": ["all", "no", True], "torch_compile": [False], "use_liger_kernel": [False],
    "stop_on": ["nan", ["nan"]], "train_vision": [False], "logging_steps": [1, 0.5], "torch_empty_cache_steps": [1],
    "average_tokens_across_devices": [False],
}  # fmt: skip
"""Options of all methods with their usual values."""
EVALUATED = {
    "eval_strategy": ["no", "steps", "epoch"], "eval_on_start": [True], "eval_exact_match": [True],
    "eval_max_completion_length": [2], "save_strategy": ["best"], "load_best_model_at_end": [True],
    "metric_for_best_model": ["eval_loss", "eval_exact_match", "loss"],
}  # fmt: skip
SUPERVISED = {
    "completion_only_loss": [True, False, None], "train_on": ["all", "assistant", "last"],
    "assistant_only_loss": [True, False],
}  # fmt: skip
REFERENCED = {"precompute_ref_log_probs": [True, False, None], "precompute_ref_batch_size": [1, 4]}
DISTILLED = {"temperature": [1.0, 0.7, 2], "beta": [0.5, None]}
GROUPS = {  # group -> its options with their usual values
    "teacher": {
        "top_k": [1, 5, 300, None], "merge_eos": [True, False], "precompute": [True, False],
        "top_k_remainder": ["tail", "residual", "generalized"],
    },
    "rollouts": {
        "source": ["on_policy", "frozen", "replay"], "train_max_tokens": [2, {"from": 1, "to": 4, "steps": 3}],
        "fresh_fraction": [0.5, 1.0], "replay_steps": [1, 2],
    },
    "sampler": {"kind": ["policy"], "batch_size": [1, 2]},
}  # fmt: skip
ODD_GROUPS = {
    "teacher": {"top_k": [1000, 0], "precompute": [True], "top_k_remainder": ["nothing"], "prompt": ["x"]},
    "rollouts": {"source": ["nothing"], "train_max_tokens": [5, 100, 0], "fresh_fraction": [0.0]},
    "sampler": {"kind": ["nothing"], "batch_size": [0, "x"]},
}
OWN = {
    "sft": SUPERVISED | {"packing": [True, False]},
    "dpo": REFERENCED | {
        "loss_type": [*PAIRED_LOSSES, ["sigmoid", "sft"], ["sigmoid", "ipo"]], "loss_weights": [[1.0], [0.5, 1.0]],
        "beta": [0.1, 0.5], "label_smoothing": [0.0, 0.1], "nll_coef": [0.0, 0.5],
    },
    "kto": REFERENCED | {
        "loss_type": ["kto", "bco", "apo_zero_unpaired"], "desirable_weight": [1.0, "auto", 0],
        "undesirable_weight": [1.0, "auto"], "beta": [0.1, 1],
    },
    "cpo": {"beta": [0.1, 1], "cpo_alpha": [0.0, 1.0], "loss_type": CONTRASTIVE_LOSSES},
    "rm": {"center_rewards_coefficient": [None, 0.01]},
    "kd": SUPERVISED | DISTILLED | {
        "kd_coef": [0.0, 0.4, 1.0], "divergence": DIVERGENCES,
    },
    "opd": DISTILLED | {
        "loss_type": [POLICY_GRADIENT, *DIVERGENCES], "num_generations": [1, 2], "lmbda": [1.0, 0.5, 0.0],
        "diagnostics": [True, False], "token_weights": [*TOKEN_WEIGHTS.kinds, {"name": "top_share", "share": 0.5}],
    },
}  # fmt: skip
ODD = {  # options of any method, with values at an edge, of other methods, machines and models
    "max_length": [2, 1, 0, 8],
    "activation_checkpointing_kwargs": [{"every_n_layers": 0}, {"use_reentrant": True}, {"x": 1}],
    "neftune_noise_alpha": [-1, 1e308], "seed": [-1, 2**32], "router_aux_loss_coef": [-1.0],
    "optim": ["galore_adamw", "lomo", "stable_adamw", "adamw_anyprecision", "adamw_bnb_8bit", "adamw_torch_4bit",
              "schedule_free_adamw", "apollo_adamw", "grokadamw", "lion_8bit", "ademamix", "paged_adamw_8bit"],
    "optim_args": ["", "a=1", "momentum=0.9", "weight_decay=x"], "optim_target_modules": ["all-linear", ["q_proj"]],
    "lr_scheduler_type": ["reduce_lr_on_plateau", "cosine_with_min_lr", "warmup_stable_decay", "greedy"],
    "lr_scheduler_kwargs": [{"min_lr": 0.1}, {"num_decay_steps": 1}, {"x": 1}], "warmup_steps": [0.5, 10**9, -1],
    "merge_lora": [True], "per_device_train_batch_size": [2**20], "chat_template_kwargs": [{"tokenize": True}],
    "stop_on": ["label_leak", "no_eos", ""], "train_vision": [True], "logging_steps": [2.5, 0],
    "dataset_text_field": ["prompt", "nothing"],
    "learning_rate": [1e308, -1], "adam_beta1": [1.0, 0.0], "max_grad_norm": [None, 1e308], "adam_epsilon": [0, 1e308],
    "num_train_epochs": [0, 0.001, -1], "label_names": [["a"]], "beta": [0, 0.5, 1e308],
    "loss_type": [[], "sigmoid", "nothing", ["simpo", "sigmoid"]], "label_smoothing": [0.5], "simpo_gamma": [1.0],
    "loss_weights": [[0.0]], "undesirable_weight": [0, -1], "kd_coef": [2], "cpo_alpha": [-1],
    "temperature": [1e-30, 1e308], "max_completion_length": [0, 1, 1024],
    "reward": [{"function": "exact_match"}, {"function": "exact_match", "coef": 0.5}, {"function": "nobody"}],
    "packing": [True], "precompute_ref_log_probs": [True], "save_total_limit": [0, 1], "save_steps": [0.5, 0],
    "include_for_metrics": [["loss"]], "dataloader_drop_last": [True], "eval_accumulation_steps": [1],
}  # fmt: skip
LORA = {
    "alpha": [4, 16], "dropout": [0.0, 0.1], "use_dora": [True, False], "use_rslora": [True],
    "target_modules": ["all-linear", ["q_proj", "v_proj"], "q_proj", ["c_attn"], ["nothing"], ["lm_head"],
                       ["embed_tokens", "q_proj"], ["in_proj"]],
    "modules_to_save": [["lm_head"], ["embed_tokens"], ["nothing"]], "rank_pattern": [{"q_proj": 4}, {"x_proj": 4}],
    "alpha_pattern": [{"q_proj": 4}], "bias": ["none", "all", "lora_only"], "lora_bias": [True],
    "target_parameters": [["mlp.experts.gate_up_proj"], ["q_proj.weight"]], "exclude_modules": [["o_proj"], ["none"]],
    "init_lora_weights": [True, False, "gaussian", "pissa", "olora", "eva", "orthogonal", "loftq", "corda"],
    "layers_to_transform": [[0], [5]], "trainable_token_indices": [[1, 2], [9999], {"embed_tokens": [3]}],
    "ensure_weight_tying": [True], "alora_invocation_tokens": [[65]], "layer_replication": [[[0, 1], [0, 1]]],
    "use_qalora": [True], "fan_in_fan_out": [True], "layers_pattern": ["layers"], "arrow_config": [None],
}  # fmt: skip
EDGES = [None, True, False, 0, 1, -1, 2, 3, 0.5, 1e-320, 1e308, 2**31, "", "no", "steps", "auto", [], {}, ["nan"]]
LEFT_OUT = (  # options of launchers, machines and services, and what takes long or writes elsewhere
    "output_dir", "push_to_hub", "hub_", "deepspeed", "fsdp", "parallelism_config", "ddp_", "tf32", "fp16",
    "torch_compile", "use_liger", "liger_", "sampler", "report_to", "trackio", "max_steps", "num_train_epochs",
    "dataloader_", "dataset_num_proc", "use_cpu", "local_rank", "debug", "log_level", "full_determinism",
    "accelerator_config",
    "max_completion_length", "num_generations", "eval_max_completion_length", "run_name", "project", "per_device",
    "gradient_accumulation_steps", "enable_jit_checkpoint", "auto_find", "image_folder", "bf16_full",
    "logging_strategy",
)  # fmt: skip


def combination(number):
    """The recipe of this number."""
    draw = Draw(number)
    method = draw.choice([*METHODS])
    recipe = {"method": method, "model": _model(draw)}
    recipe["train"] = {
        "output_dir": "out", "max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    if METHODS[method].rows.sampled:
        recipe["train"]["max_completion_length"] = draw.choice([4, 8])
    usual = [name for name in USUAL_ROWS if name not in ("messages", "masked") or method in ("sft", "kd")]
    rows = draw.either(usual, ROWS)
    if METHODS[method].second == "teacher" or draw.some(0.003):
        rows = _teachers(draw, recipe, rows)
    recipe["data"] = _data(draw, rows)
    share = draw.choice([0.0, 0.04, 0.12])
    recipe["train"] |= draw.options(COMMON, share) | draw.options(OWN[method], 1.5 * share)
    if recipe["data"].get("eval"):
        recipe["train"] |= draw.options(EVALUATED, 0.2)
    known = train_fields(method)
    for group, options in GROUPS.items():
        if group in known and (given := draw.options(options, 1.5 * share)):
            recipe["train"][group] = recipe["train"].get(group, {}) | given
        if group in known and draw.some(0.02):
            recipe["train"][group] = recipe["train"].get(group, {}) | draw.options(ODD_GROUPS[group], 0.5)
    if draw.some(0.2):
        recipe["train"] |= {name: draw.choice(ODD[name]) for name in draw.sample([*ODD], 2) if name in known}
    if draw.some(0.08):
        _at_an_edge(draw, recipe)
    return recipe


def _model(draw):
    students = [name for name in MODELS if name not in TEACHERS]
    model = {"name_or_path": draw.either(["qwen3", "llama", "base", "bos", "gemma2", "gemma3", "moe"], students, 0.3)}
    kind = draw.choice(["whole", "whole", "lora", "lora", "adapter", "scratch"])
    if kind == "lora":
        model["lora"] = {"r": draw.either([2, 4], [0, 64], 0.05)} | draw.options(LORA, draw.choice([0, 0.04]))
    elif kind == "adapter":
        model |= {"name_or_path": draw.either(["qwen3"], students, 0.2), "adapter": draw.choice(["adapter", "whole"])}
    elif kind == "scratch":
        model["from_scratch"] = True
    table = {
        "dtype": ["float32", "bfloat16", "auto", "float16"],
        "attn_implementation": ["eager", "sdpa", "flash_attention_2"],
        "chat_template": ["chatml.jinja", "tags.jinja", "llama.jinja"], "quantization": ["none", "8bit", "4bit"],
    }  # fmt: skip
    return model | draw.options(table, draw.choice([0, 0, 0.07]))


def _teachers(draw, recipe, rows):
    """Give the recipe a teacher, or several; returns the rows that it can be taught with."""
    kinds = ["same"] * 4 + ["larger"] * 2 + ["own"] * 2 + ["self", "several", "adapter", "prompt", "other"]
    kind = draw.choice(kinds)
    student, train = recipe["model"]["name_or_path"], recipe["train"]
    teacher = {"name_or_path": student}
    if kind == "larger":
        teacher = {"name_or_path": "larger"}
        recipe["model"]["name_or_path"] = draw.either(["qwen3"], [student])
    elif kind == "own":
        teacher = {"name_or_path": draw.choice(["merging", "plain", "bos", "qwen3"]), "own_tokenizer": True}
    elif kind == "self":
        teacher = {"self": draw.choice(["start", "ema"]), "prompt": "{{ prompt }} Hint: {{ hint }}"}
        rows = draw.either(["taught"], [rows])
        teacher |= draw.options({"ema": [0.0, 0.9, 1.0]}, 0.2)
    elif kind == "adapter":
        teacher = {"name_or_path": draw.either(["qwen3"], [student]), "adapter": "adapter"}
        recipe["model"]["name_or_path"] = draw.either(["qwen3"], [student])
    elif kind == "prompt":
        teacher["prompt"] = draw.either(["{{ prompt }} {{ hint }}", "{{ hint }}"], ["{{ prompt", "x", "{{ prompt }}"])
        rows = draw.either(["taught"], [rows])
    elif kind == "other":
        teacher = {"name_or_path": draw.choice([*MODELS])}
    teacher |= draw.options({"from_scratch": [True], "dtype": ["bfloat16"], "offload": [True]}, 0.07)
    if kind == "several":
        recipe["teachers"] = {"a": teacher, "b": draw.choice([teacher, {"name_or_path": "larger"}])}
        rows = draw.either(["taught"], [rows])
    else:
        recipe["teacher"] = teacher
    if draw.some(0.1):
        train["teacher"] = {"top_k": 5, "precompute": True}
    return rows


def _data(draw, rows):
    """The section of data that reads these rows."""
    train = {"path": f"{rows}.jsonl"} | draw.options({"limit": [1, 3, 100], "streaming": [True, False]}, 0.08)
    if draw.some(0.06):
        train["columns"] = draw.choice([{"prompt": "question", "completion": "answer"}, {"hint": "prompt"}])
    if draw.some(0.08):
        train = [train, {"path": f"{draw.choice(ROWS)}.jsonl", "weight": draw.choice([1.0, 0.5, 2])}]
    data = {"train": train}
    if draw.some(0.2):
        data["eval"] = {"path": f"{draw.either([rows], ROWS)}_eval.jsonl"}
    return data


def _at_an_edge(draw, recipe):
    """Give any option a value of an edge."""
    known = {name: field for name, field in train_fields(recipe["method"]).items() if not name.startswith(LEFT_OUT)}
    name = draw.choice([*known])
    recipe["train"][name] = draw.choice(EDGES)
