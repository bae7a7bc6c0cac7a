"""The memory estimate: arithmetic of engines on paper, rehearsals against real steps, and five runs against the system.

The runs are fresh processes. What is measured is the most that the process had resident (VmHWM), with
MALLOC_MMAP_THRESHOLD_ set: otherwise glibc keeps freed tensors in a heap full of holes, which hang on small objects
between them and not on the recipe, and a process holds up to twice as much.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import peft
import pytest
import torch
import transformers as tf
import yaml
from models_for_tests import CONFIGS, tiny_model
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import LORA, METHODS, fix_rollouts, token_rows, trainer_for

import hf_posttrain
from hf_posttrain.check import advice, memory, phases, rehearsal, shapes
from hf_posttrain.check.placement import Engine, Held, Weights, engine_of, frozen_on, policy_on, state_bytes
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.models.section import ModelSection
from hf_posttrain.recipe import build as parts
from hf_posttrain.recipe.datasets import prepare_data
from hf_posttrain.recipe.read import load_recipe

ROOT = Path(__file__).parents[2]
FULL = Weights(frozen=0, trained=4000, numbers=1000, trained_numbers=1000, gathered=100)
"""1000 float32 weights, all trained; a layer or two have 100."""


# ---- engines, on paper


@pytest.mark.parametrize(
    ("name", "parameters", "gradients", "optimizer"),
    [
        ("single", 4000, 4000, 8000),  # float32 weights and gradients, two moments: 16 bytes a weight
        ("ddp", 4000, 8000, 8000),  # and buckets that gradients travel in: 20
        ("zero1", 2000, 2000, 12000 / 4),  # bf16, bf16, and a share of float32 weights and moments: 4 + 12/N
        ("zero2", 2000, 2000 / 4, 12000 / 4),  # 2 + 14/N
        ("zero3", 2000 / 4 + 200, 2000 / 4, 12000 / 4),  # 16/N, and 100 gathered weights in bf16
        ("fsdp2", 4000 / 4 + 200, 4000 / 4, 8000 / 4),  # 16/N likewise: the shards are float32
    ],
)
def test_bytes_of_full_training_on_four_devices(name, parameters, gradients, optimizer):
    held = policy_on(Engine(name, 4), FULL, "adamw_torch_fused", mixed=True)
    assert (held.parameters, held.gradients, held.optimizer, held.host) == (parameters, gradients, optimizer, 0)


def test_offloading_moves_bytes_to_the_host():
    held = policy_on(Engine("zero3", 4, offload_optimizer=True, offload_params=True), FULL, "adamw_torch", mixed=True)
    assert (held.parameters, held.gradients, held.optimizer) == (200, 0, 0)  # gathered layers alone
    assert held.host == 16000 / 4


def test_a_lora_base_is_cut_and_its_adapter_alone_is_trained():
    lora = Weights(frozen=2000, trained=40, numbers=1010, trained_numbers=10, gathered=100)  # bf16 base, float32 LoRA
    assert policy_on(Engine("single"), lora, "adamw_torch", mixed=True) == Held(2040, gradients=40, optimizer=80)
    assert policy_on(Engine("fsdp2", 2), lora, "adamw_torch", mixed=True).parameters == 2040 // 2 + 200


def test_a_frozen_model_is_cut_where_the_policy_is():
    frozen = Weights(frozen=4000, numbers=1000, gathered=100)
    sizes = {name: frozen_on(Engine(name, 4), frozen, mixed=True) for name in ("ddp", "zero2", "zero3", "fsdp2")}
    assert sizes == {"ddp": 4000, "zero2": 2000, "zero3": 500 + 200, "fsdp2": 1000 + 200}
    quantised = Weights(frozen=600, numbers=1000, quantised=True)
    assert frozen_on(Engine("zero1", 4), quantised, mixed=True) == 600


def test_states_of_optimizers():
    sizes = {name: state_bytes(name, FULL) for name in ("adamw_torch", "sgd", "adafactor", "lion_32bit", "unknown")}
    assert sizes == {"adamw_torch": 8000, "sgd": 0, "adafactor": 0, "lion_32bit": 4000, "unknown": 8000}
    assert state_bytes("adamw_8bit", FULL) == 2000 + int(2000 * 4 / 256)  # two bytes, and a float for each 256 of them


def test_engines_of_the_shipped_accelerate_configs():
    found = {path.stem: engine_of(path) for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert found["single"] == Engine("single", 1, gpu=True)
    assert found["ddp"] == Engine("ddp", 8, gpu=True)
    assert found["multi_node"] == Engine("fsdp2", 16, gpu=True)
    assert found["fsdp2_offload"] == Engine("fsdp2", 8, True, True, True)
    assert [found[f"zero{n}"] for n in (1, 2, 3)] == [Engine(f"zero{n}", 8, gpu=True) for n in (1, 2, 3)]
    assert found["zero3_offload"] == Engine("zero3", 8, True, True, True)


def test_a_file_that_is_no_accelerate_config(tmp_path):
    (tmp_path / "x.yaml").write_text("method: sft\n")
    with pytest.raises(InputError, match=r"x\.yaml: no accelerate config"):
        engine_of(tmp_path / "x.yaml")


def test_quantised_weights():
    section = ModelSection("folder", quantization="4bit")
    model = tiny_model()
    linear = sum(
        m.weight.numel() for n, m in model.named_modules() if isinstance(m, shapes.nn.Linear) and n != "lm_head"
    )
    rest = sum(p.numel() for p in model.parameters()) - linear
    model.requires_grad_(False)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    found = shapes.weights_of(model, section).frozen
    assert found == int(linear * (0.5 + 1 / 64 + 4 / 16384) + rest * 4) + buffers


# ---- rehearsals against real steps


def both_trainers(method, tmp_path, monkeypatch, **config):
    """The method's trainer on a tiny model, and its rehearsal on the same rows."""
    fix_rollouts(monkeypatch)
    rows = token_rows(method)
    fake = shapes.Shapes()
    seconds = {"second": tiny_model(seed=1)} if TABLE[method].second == "teacher" else {}
    real = trainer_for(method, tiny_model(), rows, tmp_path, **seconds, **config)
    with fake.mode:
        models = [tf.AutoModelForCausalLM.from_config(CONFIGS["qwen3"]()) for _ in range(2)]
    given = {"teacher_model": models[1]} if TABLE[method].second == "teacher" else {}
    trainer_class = getattr(hf_posttrain, f"{method.upper()}Trainer")
    with rehearsal.quiet():
        rehearsed = rehearsal.rehearsed(
            trainer_class, real.args, model=models[0], train_dataset=rows, processing_class=byte_tokenizer(),
            peft_config=config.get("peft_config"), **given,
        )  # fmt: skip
    if hasattr(real, "rollouts"):
        real.rollouts = rehearsed.rollouts
    if getattr(real, "reference", None) is not None:
        real.reference.checked = True  # a copy of the policy's score that the rehearsal does not take
    return real, rehearsed, [rows[i] | {"index": i} for i in range(4)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("config", [{}, {"gradient_accumulation_steps": 2}], ids=["once", "accumulated"])
def test_a_rehearsed_step_takes_what_a_real_one_takes(method, config, tmp_path, monkeypatch):
    real, rehearsed, rows = both_trainers(method, tmp_path, monkeypatch, **config)
    expected = phases.training_step(real, rows)
    assert expected > 100_000
    assert phases.training_step(rehearsed, rows) == expected


def test_a_rehearsed_step_with_lora(tmp_path, monkeypatch):
    real, rehearsed, rows = both_trainers("dpo", tmp_path, monkeypatch, peft_config=peft.LoraConfig(**LORA))
    assert phases.training_step(rehearsed, rows) == phases.training_step(real, rows)


@pytest.mark.parametrize("method", METHODS)
def test_a_rehearsed_evaluation_takes_what_a_real_one_takes(method, tmp_path, monkeypatch):
    real, rehearsed, rows = both_trainers(method, tmp_path, monkeypatch)
    assert phases.evaluation(rehearsed, rows) == phases.evaluation(real, rows) > 0


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_a_rehearsed_generation_takes_what_a_real_one_takes(temperature, tmp_path, monkeypatch):
    real, rehearsed, _ = both_trainers("opd", tmp_path, monkeypatch)
    prompts = [[5] * length for length in (9, 7, 4)]
    expected = phases.generation(real, prompts, 2, 40, temperature)
    assert phases.generation(rehearsed, prompts, 2, 40, temperature) == expected > 0


def test_many_rows_are_in_proportion():
    assert phases.in_proportion(lambda rows: 100 + 7 * len(rows), [None] * 500) == 100 + 7 * 500


def test_the_longest_rows_come_first():
    rows = datasets.Dataset.from_list([{"prompt_ids": [1] * n, "completion_ids": [2] * (9 - n)} for n in (3, 8, 5)])
    rows = rows.add_column("chosen_ids", [[1], [1, 1, 1], [1, 1]])
    assert [len(row["chosen_ids"]) for row in rehearsal.longest(rows, 2)] == [3, 2]
    assert [len(row["prompt_ids"]) for row in rehearsal.longest(rows, 1, ("prompt_ids",))] == [8]


# ---- whole recipes

QWEN = {"head_dim": 64, "max_position_embeddings": 2048, "eos_token_id": 258, "pad_token_id": 256, "bos_token_id": None}
SIZES = {
    "tiny": {"vocab_size": 20000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
    "wide": {"vocab_size": 65536, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4},
    "deep": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 8},
    "big": {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8},
    "small": {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4},
}
LENGTHS = {"sft": (128, 384), "dpo": (256, 256), "kto": (100, 156), "kd": (200, 312), "opd": (128, 1)}
"""Tokens of prompt and answer."""
RECIPES = {
    "sft": ("tiny", {"per_device_train_batch_size": 4}),
    "sft_wide": ("wide", {"per_device_train_batch_size": 8, "activation_checkpointing": False}),
    "dpo_lora": ("deep", {"per_device_train_batch_size": 4, "precompute_ref_log_probs": False}),
    "kto_copied_reference": (
        "small", {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "precompute_ref_log_probs": False}
    ),
    "kd_larger_teacher": ("small", {"per_device_train_batch_size": 4}),
    "opd": ("small", {"per_device_train_batch_size": 8, "num_generations": 2, "max_completion_length": 64}),
}  # fmt: skip
TEACHERS = {"kd_larger_teacher": "big", "opd": "deep"}


def write_model(folder, size, saved=False):
    heads = SIZES[size]["hidden_size"] // 64
    kind = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "tie_word_embeddings": True}
    config = tf.Qwen3Config(**QWEN, **kind, **SIZES[size])
    (tf.AutoModelForCausalLM.from_config(config) if saved else config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return {"name_or_path": str(folder), "from_scratch": not saved}


def row(method, number):
    prompt, answer = ([(number + k) % 250 for k in range(count)] for count in LENGTHS[method])
    if method == "dpo":
        return {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": answer[:200]}
    if method == "opd":
        return {"prompt_ids": prompt}
    return {"prompt_ids": prompt, "completion_ids": answer} | ({"label": number % 2 == 0} if method == "kto" else {})


def write_recipe(folder, name):
    """The recipe `name` with its models and data, two optimizer steps long; returns its path."""
    method, (size, train) = name.partition("_")[0], RECIPES[name]
    lora = {"lora": {"r": 16}} if name.endswith("lora") else {}
    recipe = {"method": method, "model": write_model(folder / "model", size, saved=bool(lora)) | lora}
    if name in TEACHERS:
        recipe["teacher"] = write_model(folder / "teacher", TEACHERS[name])
    rows = "\n".join(json.dumps(row(method, number)) for number in range(32))
    (folder / "rows.jsonl").write_text(rows)
    recipe["data"] = {"train": {"path": str(folder / "rows.jsonl")}}
    recipe["train"] = train | {
        "output_dir": str(folder / "out"), "max_steps": 2, "use_cpu": True, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def prepared(path, *overrides):
    """The arguments of `memory.estimate`."""
    recipe = load_recipe(path, overrides)
    trainer_class, config = parts.configure(recipe)
    tokenizer, _ = parts.check_models(recipe)
    return recipe, config, trainer_class, prepare_data(recipe, trainer_class, tokenizer, config), tokenizer


IMPORT = "import sys; sys.path[:0] = ['tests/check', 'tests/support']; import test_memory_estimate as here; "
ESTIMATE = IMPORT + "print(here.memory.estimate(*here.prepared(sys.argv[1])).total)"
TRAIN = "import sys; from hf_posttrain.run import main; print(main(sys.argv[1:]), open('/proc/self/status').read())"


def in_a_process(code, path):
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak resident set from /proc")
@pytest.mark.parametrize(
    "name", [name if name == "sft" else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_estimate_and_measured_peak(name, tmp_path):
    path = write_recipe(tmp_path, name)
    estimated = int(in_a_process(ESTIMATE, path)[-1])
    assert not (tmp_path / "out").exists()
    [line] = [line for line in in_a_process(TRAIN, path) if line.startswith("VmHWM")]
    measured = int(line.split()[1]) * 1024
    print(f"{name}: estimated {estimated / 2**30:.3f} GiB, measured {measured / 2**30:.3f}")
    assert estimated == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "kto_copied_reference"])
def test_deep_models_are_on_the_line_through_shallow_ones(name, tmp_path, monkeypatch):
    path = write_recipe(tmp_path, name)
    config = tmp_path / "model" / "config.json"
    whole = json.loads(config.read_text())
    config.write_text(json.dumps(whole | {"num_hidden_layers": 13, "layer_types": ["full_attention"] * 13}))
    given = prepared(path, "train.activation_checkpointing=false")
    by_line = memory.estimate(*given)
    monkeypatch.setattr(memory, "DEEP", 13)
    in_full = memory.estimate(*given)
    assert by_line.parameters == in_full.parameters
    assert by_line.activations == pytest.approx(in_full.activations, rel=0.02)


@pytest.mark.slow
def test_what_does_not_fit_gets_advice(tmp_path):
    given = prepared(write_recipe(tmp_path, "sft"), "train.activation_checkpointing=false")
    fits = memory.estimate(*given)
    assert fits.total == sum(
        getattr(fits, name)
        for name in ("parameters", "gradients", "optimizer", "second_model", "activations", "other")
    )
    assert not fits.warnings()
    assert not fits.advice
    assert fits.batch == {"rows": 4, "tokens": 4 * 511, "layout": "shared"}

    tight = memory.estimate(*given, available_gib=fits.total / 2**30 - 0.01)
    [warning] = tight.warnings()
    assert "training step needs about" in warning
    assert tight.advice[0].startswith("train.activation_checkpointing=true: ")
    assert tight.advice[-1].endswith("which fits")

    hopeless = memory.estimate(*given, available_gib=0.001)
    assert hopeless.advice[-1].startswith("what is left")


def test_smaller_batches_are_the_same_step():
    config = hf_posttrain.SFTConfig(output_dir="x", per_device_train_batch_size=12, gradient_accumulation_steps=2)
    said, changed = advice.smaller_batches(advice.Run(None, config, Engine()), "training step")
    assert said == "train.per_device_train_batch_size=3 train.gradient_accumulation_steps=8"
    assert (changed.config.per_device_train_batch_size, config.per_device_train_batch_size) == (3, 12)


@pytest.mark.parametrize(
    ("now", "kinds"),
    [(Engine("fsdp2", 8, gpu=True), ["fsdp2_offload"]), (Engine("ddp", 8, gpu=True), [*advice.ENGINES]),
     (Engine("fsdp2", 8, True, True, gpu=True), []), (Engine("fsdp2", 1, gpu=True), [])],
)  # fmt: skip
def test_engines_are_offered_up_to_the_one_that_keeps_all_in_host_memory(now, kinds):
    """Each saves a tenth of what was needed, but that which cuts less than fsdp2 saves nothing."""
    order = ["ddp", "zero1", "zero2", "fsdp2", "fsdp2_offload"]

    def needed(run):
        name = run.engine.name + "_offload" * run.engine.offload_params
        return SimpleNamespace(total=2**30 * 0.9 ** order.index(name), fits=False, phase="training step")

    config = SimpleNamespace(
        activation_checkpointing=True, per_device_train_batch_size=1, gradient_accumulation_steps=1,
        precompute_ref_log_probs=True, optim="adamw_8bit",
    )  # fmt: skip
    model = SimpleNamespace(lora=None, adapter="a", quantization="4bit")
    run = advice.Run(SimpleNamespace(model=model, teacher=None), config, now)
    lines = advice.advice(needed(run), run, needed)[:-1]
    assert [line.partition("accelerate_configs/")[2].partition(".yaml")[0] for line in lines] == kinds


def test_a_laptop_knows_what_eight_gpus_would_hold(tmp_path):
    given = prepared(write_recipe(tmp_path, "sft"))
    given[0].train.pop("use_cpu")  # bf16 then, as GPUs have it
    found = memory.estimate(*given, engine=Engine("zero2", 8, gpu=True), available_gib=80)
    weights = sum(p.numel() for p in tf.AutoModelForCausalLM.from_config(tf.AutoConfig.from_pretrained(
        given[0].model.name_or_path)).parameters())  # fmt: skip
    assert (found.parameters, found.gradients) == (2 * weights, 2 * weights // 8)
    assert found.optimizer == 12 * weights // 8
    assert found.other == memory.CUDA_CONTEXT or torch.cuda.is_available()
    assert "zero2, 8 processes" in found.lines()[0]
