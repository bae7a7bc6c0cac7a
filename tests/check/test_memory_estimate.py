"""The memory estimate: arithmetic of engines on paper, what a forward keeps, and runs of all methods as measured.

The runs are fresh processes. What is measured is the most that the process had resident (VmHWM), with
MALLOC_MMAP_THRESHOLD_ set: otherwise glibc keeps freed tensors in a heap full of holes, which depend on small objects
between them and not on the recipe, and a process holds up to twice as much.
"""

import copy
import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import transformers as tf
import yaml
from models_for_tests import CONFIGS
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import METHODS, names_where, token_rows, trainer_for
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.siglip.modeling_siglip import SiglipEncoder
from vision_for_tests import attach_image_reader, config_of, pictures, processor_of

from hf_posttrain.batching.micro_batch import MicroBatch
from hf_posttrain.check import memory
from hf_posttrain.check.auto_checkpointing import disable_unneeded_checkpointing
from hf_posttrain.check.placement import (
    QUANTIZED_BYTES,
    Engine,
    Shapes,
    Weights,
    engine_from_file,
    model_bytes,
    state_bytes,
)  # fmt: skip
from hf_posttrain.check.vision_memory import measure_vision_memory
from hf_posttrain.data.images import get_image_reader
from hf_posttrain.data.lengths import longest_rows
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.models import adapters
from hf_posttrain.models.config import ModelSection, RewardModelSection
from hf_posttrain.models.load import load_model
from hf_posttrain.recipe import build
from hf_posttrain.recipe.datasets import prepare_data
from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.scoring.cpu import packable_layers
from hf_posttrain.scoring.layouts import Branch, Example, collate

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
    held = model_bytes(Engine(name, 4), FULL, "adamw_torch_fused", mixed=True)
    assert tuple(held.values()) == (parameters, gradients, optimizer, 0)


def test_offloading_moves_bytes_to_the_host():
    held = model_bytes(Engine("zero3", 4, offload_optimizer=True, offload_params=True), FULL, "adamw_torch", mixed=True)
    assert list(held) == ["parameters", "gradients", "optimizer", "host"]
    assert tuple(held.values()) == (200, 0, 0, 16000 / 4)  # on the device gathered layers alone


def test_a_lora_base_is_cut_and_its_adapter_alone_is_trained():
    lora = Weights(frozen=2000, trained=40, numbers=1010, trained_numbers=10, gathered=100)  # bf16 base, float32 LoRA
    assert tuple(model_bytes(Engine("single"), lora, "adamw_torch", mixed=True).values()) == (2040, 40, 80, 0)
    assert model_bytes(Engine("fsdp2", 2), lora, "adamw_torch", mixed=True)["parameters"] == 2040 // 2 + 200


def test_a_frozen_model_is_cut_where_the_policy_is():
    frozen = Weights(frozen=4000, numbers=1000, gathered=100)
    held = {n: model_bytes(Engine(n, 4), frozen, "sgd", mixed=True) for n in ("ddp", "zero2", "zero3", "fsdp2")}
    assert not any(each["gradients"] for each in held.values())
    sizes = {name: each["parameters"] for name, each in held.items()}
    assert sizes == {"ddp": 4000, "zero2": 2000, "zero3": 500 + 200, "fsdp2": 1000 + 200}
    quantised = Weights(frozen=600, numbers=1000, quantized=True)
    assert model_bytes(Engine("zero1", 4), quantised, "sgd", mixed=True)["parameters"] == 600


def test_states_of_optimizers():
    sizes = {name: state_bytes(name, FULL) for name in ("adamw_torch", "sgd", "adafactor", "lion_32bit", "unknown")}
    assert sizes == {"adamw_torch": 8000, "sgd": 0, "adafactor": 0, "lion_32bit": 4000, "unknown": 8000}
    assert state_bytes("adamw_8bit", FULL) == 2000 + int(2000 * 4 / 256)  # two bytes, and a float for each 256 of them


@pytest.mark.parametrize(
    ("method", "lora"),
    [("sft", None), ("sft", {"r": 4}), ("sft", {"r": 4, "modules_to_save": ["lm_head"]}), ("rm", None), ("rm", {})],
)
def test_the_state_of_muon_has_the_bytes_of_its_tensors(method, lora, tmp_path):
    """One momentum of hidden matrices and two moments of the others, without AdamW's numbers of steps."""
    section = section_of(tmp_path / "model", "llama", lora=lora)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    if TABLE[method].head == "score":
        section = RewardModelSection(**vars(section))
    adapter = adapters.lora_config(section)
    options = {"peft_config": adapter, "optim": "muon", "learning_rate": 1e-3}
    trainer = trainer_for(method, load_model(section), token_rows(method), tmp_path, **options)
    trainer.train()
    state = trainer.optimizer.state.values()
    measured = sum(value.nbytes for tensors in state for name, value in tensors.items() if name != "step")
    weights = Shapes(section, True, CPU).weights
    assert state_bytes("muon", weights) == measured
    assert measured < state_bytes("adamw_torch", weights)


def test_engines_of_the_shipped_accelerate_configs():
    found = {path.stem: engine_from_file(path) for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert found["single"] == Engine("single", 1, gpu=True)
    assert found["ddp"] == Engine("ddp", 8, gpu=True)
    assert found["multi_node"] == Engine("fsdp2", 16, gpu=True)
    assert found["fsdp2_offload"] == Engine("fsdp2", 8, True, True, True)
    assert [found[f"zero{n}"] for n in (1, 2, 3)] == [Engine(f"zero{n}", 8, gpu=True) for n in (1, 2, 3)]
    assert found["zero3_offload"] == Engine("zero3", 8, True, True, True)


def test_a_file_that_is_no_accelerate_config(tmp_path):
    (tmp_path / "x.yaml").write_text("method: sft\n")
    with pytest.raises(InputError, match=r"x\.yaml: not a valid accelerate config"):
        engine_from_file(tmp_path / "x.yaml")


def test_deepspeeds_own_file_is_refused_and_empty_sections_are_none(tmp_path):
    asked = {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": None, "fsdp_config": None}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(asked))
    assert engine_from_file(tmp_path / "x.yaml") == Engine("zero2", 8, gpu=True)
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(asked | {"deepspeed_config": {"deepspeed_config_file": "z.json"}}))
    with pytest.raises(InputError, match="deepspeed_config_file is not supported by --check"):
        engine_from_file(tmp_path / "x.yaml")


# ---- shapes


def section_of(folder, architecture, **fields):
    """A model without weights in a folder."""
    CONFIGS[architecture]().save_pretrained(folder)
    return ModelSection(str(folder), from_scratch=True, **fields)


CPU = torch.device("cpu")


@pytest.mark.parametrize("fields", [{}, {"lora": {"r": 4}}, {"dtype": "bfloat16"}], ids=["full", "lora", "bf16"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_weights_are_those_of_the_loaded_model(architecture, fields, tmp_path):
    section = section_of(tmp_path, architecture, **fields)
    real, found = load_model(section), Shapes(section, True, CPU).weights
    whole = sum(p.nbytes for p in real.parameters()) + sum(b.nbytes for b in real.buffers())
    if "lora" in fields:
        assert found.frozen == whole
        assert found.trained == 4 * found.trained_numbers > 0
    else:
        assert found.frozen + found.trained == pytest.approx(whole, rel=1e-3)  # buffers of positions stay float32
        assert found.numbers == found.trained_numbers == sum(p.numel() for p in real.parameters())


def test_quantised_weights(tmp_path, monkeypatch):
    """Linear layers but the head; for training peft makes float32 of the rest. The package itself is not needed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda *args: True)
    section = section_of(tmp_path, "qwen3", lora={"r": 4}, quantization="4bit")
    found, model = Shapes(section, True, CPU).weights, Shapes(section_of(tmp_path, "qwen3"), True, CPU).inner
    linear = sum(m.weight.numel() for n, m in model.named_modules() if hasattr(m, "in_features") and n != "lm_head")
    rest = sum(p.numel() for p in model.parameters()) - linear
    buffers = sum(b.nbytes for b in model.buffers())
    assert found.frozen == int(linear * QUANTIZED_BYTES["4bit"] + rest * 4 + buffers)
    assert found.quantized


BATCH = MicroBatch(
    input_ids=torch.zeros(2, 16, dtype=torch.long),
    position_ids=torch.arange(16).expand(2, -1),
    scored=torch.arange(10),
)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_shapes_run_through_every_architecture(architecture, tmp_path):
    found = Shapes(section_of(tmp_path, architecture), True, CPU)
    found.count(BATCH, torch.bfloat16)
    assert min(found.kept[1:]) > 10 * found.hidden
    (kept, layer), (less, more) = found.training(0), found.training(1)
    assert less < kept
    assert more > layer > 0
    if "moe" not in architecture:  # on shapes torch multiplies groups of experts in bf16 alone
        found.count(BATCH, torch.float32)
        assert found.training(0)[0] > kept


def test_what_is_kept_grows_with_tokens_and_is_less_with_lora(tmp_path):
    full, lora = (Shapes(section_of(tmp_path, "qwen3", lora=lora), True, CPU) for lora in (None, {"r": 4}))
    full.count(BATCH, None)
    lora.count(BATCH, None)
    assert lora.training(1)[0] < 1.5 * full.training(1)[0]
    once = full.training(0)[0]
    twice = {name: BATCH[name].repeat(2, 1) for name in ("input_ids", "position_ids")}
    full.count(BATCH.replace(**twice), None)
    assert full.training(0)[0] == pytest.approx(2 * once, rel=0.01)


def test_a_prompts_keys_are_kept_for_each_of_its_answers(tmp_path):
    """As `attend_by_segment` gathers them."""
    shapes = Shapes(section_of(tmp_path, "qwen3"), True, CPU)
    batch = collate([Example([1] * 40, [Branch([2] * 4)] * 3)], "shared", row_multiple=1)
    keys, config = len(batch["segments"]["gathered"]), shapes.inner.config
    tokens = 39 + 3 * 4  # a branch begins with the prompt's last token, and its own last is not scored
    assert keys == 39 + 3 * (39 + 4)
    shapes.count(batch.replace(segments=None), None)
    without, cache = shapes.kept, shapes.cache
    shapes.count(batch, None)
    one = 2 * 4 * config.num_key_value_heads * config.head_dim  # bytes of a key and of its value
    assert [more - less for more, less in zip(shapes.kept[1:], without[1:], strict=True)] == [
        one * (keys - tokens) + 8 * keys * (layer == 0) for layer in range(len(shapes.layers))
    ]  # their places are kept once
    assert shapes.cache == cache == one * tokens * len(shapes.layers)


def test_the_longest_rows_come_first():
    rows = datasets.Dataset.from_list([{"prompt_ids": [1] * n, "completion_ids": [2] * (9 - n)} for n in (3, 8, 5)])
    rows = rows.add_column("chosen_ids", [[1], [1, 1, 1], [1, 1]])
    assert [len(row["chosen_ids"]) for row in longest_rows(rows, 2)] == [3, 2]
    assert [len(row["prompt_ids"]) for row in longest_rows(rows, 1, ("prompt_ids",))] == [8]


# ---- whole recipes

QWEN = {"head_dim": 64, "max_position_embeddings": 2048, "eos_token_id": 258, "pad_token_id": 256, "bos_token_id": None}
SIZES = {
    "tiny": {"vocab_size": 20000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
    "wide": {"vocab_size": 65536, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4},
    "deep": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 8},
    "big": {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8},
    "small": {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4},
}
PROMPT, ANSWER = 128, 256
"""Tokens."""


def usual(method):
    """Size of the policy and of the teacher, and the train section: by what the method's row in the table says."""
    row = TABLE[method]
    train = {"per_device_train_batch_size": 4}
    if row.rows.sampled:
        train |= {"per_device_train_batch_size": 8, "num_generations": 2, "max_completion_length": 64}
    if row.second == "reference":
        train["precompute_ref_log_probs"] = False
    return "small", "big" if row.second == "teacher" else None, train


TOKENS, PAIRED, LABELLED = (
    names_where(lambda row: row.unit == "tokens" and not row.second)[0], names_where(lambda row: row.rows.paired)[0],
    names_where(lambda row: row.rows.labeled)[0],
)  # fmt: skip
RECIPES = {method: (method, *usual(method), {}) for method in METHODS} | {
    "tiny": (TOKENS, "tiny", None, {"per_device_train_batch_size": 4}, {}),
    "not recomputed": (TOKENS, "wide", None, {"per_device_train_batch_size": 8, "activation_checkpointing": False}, {}),
    "lora": (PAIRED, "deep", None, usual(PAIRED)[2], {"lora": {"r": 16}}),
    "accumulated": (
        LABELLED, "small", None,
        usual(LABELLED)[2] | {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}, {},
    ),
}  # fmt: skip
"""What it shows -> method, size of the policy, of its teacher, train section, more of the model section."""
ONCE = {"max_steps": 2, "use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}


def write_model(folder, size, saved=False):
    heads = SIZES[size]["hidden_size"] // 64
    kind = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "tie_word_embeddings": True}
    config = tf.Qwen3Config(**QWEN, **kind, **SIZES[size])
    (tf.AutoModelForCausalLM.from_config(config) if saved else config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return {"name_or_path": str(folder), "from_scratch": not saved}


def row(method, number):
    """A tokenised row of the method's kind; the second answer is shorter."""
    kind = TABLE[method].rows
    ids = lambda count: [(number + k) % 250 for k in range(count)]  # noqa: E731
    found = {"prompt_ids": ids(PROMPT)} | {name: ids(ANSWER - 56 * n) for n, name in enumerate(kind.answers)}
    if kind.sampled:
        return {"prompt_ids": found["prompt_ids"]}
    return found | ({"label": number % 2 == 0} if kind.labeled else {})


def write_recipe(folder, name):
    """The recipe `name` with its models and data, two optimizer steps long; returns its path."""
    method, size, teacher, train, more = RECIPES[name]
    recipe = {"method": method, "model": write_model(folder / "model", size, saved=bool(more)) | more}
    if teacher:
        recipe["teacher"] = write_model(folder / "teacher", teacher)
    rows = "\n".join(json.dumps(row(method, number)) for number in range(32))
    (folder / "rows.jsonl").write_text(rows)
    recipe["data"] = {"train": {"path": str(folder / "rows.jsonl")}}
    recipe["train"] = train | ONCE | {"output_dir": str(folder / "out")}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def prepared(path, *overrides):
    """The arguments of `memory.estimate`."""
    recipe = load_recipe(path, overrides)
    trainer_class, config = build.configure(recipe)
    tokenizer, _ = build.check_models(recipe)
    return recipe, config, trainer_class, prepare_data(recipe, trainer_class, tokenizer, config)[0]


IMPORT = "import sys; import test_memory_estimate as here; "
ESTIMATE = IMPORT + "print(here.memory.estimate(*here.prepared(*sys.argv[1:])).total)"
TRAIN = "import sys; from hf_posttrain.run import main; assert main(sys.argv[1:]) == 0; "
TRAIN += "print(open('/proc/self/status').read())"


def in_a_process(code, path, *overrides):
    paths = os.pathsep.join(str(ROOT / "tests" / name) for name in ("check", "support"))
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "2", "PYTHONPATH": paths}
    command = [sys.executable, "-c", code, str(path), *overrides]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


SEEING = {
    "tower frozen": ({"lora": {"r": 16}}, {}), "tower trained": ({}, {"train_vision": True}),
    "tower recomputed": ({}, {"train_vision": True, "activation_checkpointing": True}),
}  # fmt: skip
"""What it shows -> more of the model section, more of the train section."""


def write_seeing_recipe(folder, name):
    """Qwen3-VL with a tower as large as its language model, and rows in which a photograph is most of the prompt."""
    config, processor, (more, train) = copy.deepcopy(config_of("qwen3_vl")), processor_of("qwen3_vl"), SEEING[name]
    vision = {"hidden_size": 512, "intermediate_size": 2048, "out_hidden_size": 512, "depth": 6, "patch_size": 16}
    text = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 32000, "head_dim": 64}
    for part, changes in ((config.vision_config, vision), (config.text_config, text)):
        vars(part).update(changes)
    config.text_config.rope_parameters["mrope_section"] = [16, 8, 8]
    processor.image_processor.patch_size, processor.image_processor.size["longest_edge"] = 16, 2**20
    torch.manual_seed(0)
    tf.AutoModelForImageTextToText.from_config(config).save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    content = [{"type": "image", "image": pictures()[0]}, {"type": "text", "text": "Who is it?"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "Grace Hopper. " * 4}]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"messages": turns}) for _ in range(16)))
    recipe = {
        "method": TOKENS, "model": {"name_or_path": str(folder / "model"), "images": True} | more,
        "data": {"train": {"path": str(folder / "rows.jsonl")}},
        "train": ONCE | {"output_dir": str(folder / "out"), "per_device_train_batch_size": 4,
                         "activation_checkpointing": False} | train,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


ROUNDS = {
    "rounds": (TOKENS, {"count": 2}, None), "rounds, a teacher judges": (TOKENS, {"count": 2}, "teacher"),
    "rounds, a reward model judges": (PAIRED, {"count": 2, "judge": {"batch_size": 4}}, "model"),
    "online, a reward model judges": (PAIRED, {"steps": 1}, "model"),
}  # fmt: skip
"""What it shows -> method, what its section of rounds says, the kind of a judge that is larger than the policy."""


def write_recipe_in_rounds(folder, name):
    method, section, judge = ROUNDS[name]
    recipe = {"method": method, "model": write_model(folder / "model", "small")}
    if judge:
        write_model(folder / "judge", "big", saved=True)
    if judge == "model":
        reward_model = tf.AutoModelForSequenceClassification.from_pretrained(folder / "judge", num_labels=1)
        reward_model.save_pretrained(folder / "judge")
    by = {"by": judge, "name": str(folder / "judge")} if judge else {"by": "function", "name": f"{__name__}:lengths"}
    usual = {"num_generations": 4, "max_completion_length": 128, "pair": {"unfinished": True}}
    recipe["rounds"] = usual | section | {"judge": by | section.get("judge", {})}
    rows = [{"prompt_ids": [(n + k) % 250 for k in range(PROMPT)]} for n in range(32)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe["data"] = {"train": {"path": str(folder / "rows.jsonl")}}
    recipe["train"] = ONCE | {"output_dir": str(folder / "out"), "per_device_train_batch_size": 4}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def lengths(prompts, completions, references):
    """A judge."""
    return [float(len(text)) for text in completions]


WRITERS = dict.fromkeys(SEEING, write_seeing_recipe) | dict.fromkeys(ROUNDS, write_recipe_in_rounds)


def vision_memory_of(change=lambda model: None):
    """What is measured of Gemma 3's encoder on the meta device, after a change of the model."""
    reader = get_image_reader(attach_image_reader(processor_of("gemma3")))
    with torch.device("meta"):
        model = tf.AutoModelForImageTextToText.from_config(config_of("gemma3"))
    change(model)
    return measure_vision_memory(model, reader, None)


def test_a_layer_of_an_encoder_may_be_called_by_keyword(monkeypatch):
    usual = vision_memory_of()
    monkeypatch.setattr(SiglipEncoder, "forward", lambda encoder, inputs_embeds, **_: BaseModelOutput(
        encoder.layers[0](hidden_states=inputs_embeds, attention_mask=None)))  # fmt: skip
    assert vision_memory_of() == usual


def test_encoders_that_do_not_fit_the_estimate_are_named(monkeypatch):
    monkeypatch.setattr(SiglipEncoder, "forward", lambda _, inputs_embeds, **__: BaseModelOutput(inputs_embeds))
    with pytest.raises(NotImplementedError, match="Gemma3ForConditionalGeneration ran 0 times instead of once"):
        vision_memory_of()

    def without_list(model):
        encoder = next(module for module in model.modules() if isinstance(module, SiglipEncoder))
        encoder.layers = torch.nn.Sequential(*encoder.layers)

    with pytest.raises(NotImplementedError, match="Gemma3ForConditionalGeneration has no list of layers"):
        vision_memory_of(without_list)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak resident set from /proc")
@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECIPES, *WRITERS])
def test_estimate_and_measured_peak(name, tmp_path):
    path = WRITERS.get(name, write_recipe)(tmp_path, name)
    train = yaml.safe_load(path.read_text())["train"]
    # unset, the run decides by the memory of this machine
    overrides = [] if "activation_checkpointing" in train else ["train.activation_checkpointing=true"]
    estimated = int(in_a_process(ESTIMATE, path, *overrides)[-1])
    assert not (tmp_path / "out").exists()
    [line] = [line for line in in_a_process(TRAIN, path, *overrides) if line.startswith("VmHWM")]
    measured = int(line.split()[1]) * 1024
    print(f"{name}: estimated {estimated / 2**30:.3f} GiB, measured {measured / 2**30:.3f}")
    assert estimated == pytest.approx(measured, rel=0.15)


def test_packed_weights_of_sample_answers_are_counted_in_float32(tmp_path):
    """On CPU. MKL's copies are larger than the weights."""
    path = write_recipe(tmp_path, "lora")
    found = memory.estimate(*prepared(path))
    layers = packable_layers(load_model(load_recipe(path).model))
    weights = sum(layer.weight.nbytes for layer in layers)
    assert found.phases["sample answers"] > found.parameters + found.other + weights
    assert "sample answers" not in memory.estimate(*prepared(path, "train.bf16=true")).phases
    assert "sample answers" not in memory.estimate(*prepared(path), Engine("single", gpu=True), 80).phases


@pytest.mark.parametrize(("section", "stays"), [({"count": 1}, False), ({"steps": 1}, True)], ids=["rounds", "online"])
def test_a_judge_is_on_a_gpu_while_it_judges_or_stays(section, stays, tmp_path):
    config = tf.Qwen3Config(**QWEN | SIZES["tiny"], tie_word_embeddings=True, num_labels=1)
    tf.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "judge")
    byte_tokenizer().save_pretrained(tmp_path / "judge")
    path = write_recipe_in_rounds(tmp_path, "rounds")
    section |= {"max_completion_length": 128, "num_generations": 4}

    def estimate(**judge):
        given = prepared(path, "rounds=" + json.dumps(section | judge))
        given[0].train.pop("use_cpu")
        return memory.estimate(*given, engine=Engine("single", gpu=True), memory_gib=80).phases

    found = estimate(judge={"by": "model", "name": str(tmp_path / "judge")})
    without = estimate(judge={"by": "function", "name": f"{__name__}:lengths"})
    weights = 2 * sum(p.numel() for p in tf.AutoModelForCausalLM.from_config(config).parameters())
    assert found["training step"] - without["training step"] == pytest.approx(weights * stays, rel=0.001)
    assert found["generation"] - without["generation"] == pytest.approx(weights, rel=0.001)
    fewer = estimate(judge={"by": "model", "name": str(tmp_path / "judge"), "batch_size": 4})
    assert weights < fewer["judging"] < found["judging"]


def test_the_head_of_a_teacher_stays_for_its_hidden_states(tmp_path):
    path = write_recipe(tmp_path, "kd")
    top, hidden = (
        memory.estimate(*prepared(path, "teacher.precompute=true", *more)) for more in (["teacher.top_k=8"], [])
    )
    size = SIZES["big"]["vocab_size"] * SIZES["big"]["hidden_size"]
    held = [found.phases["training step"] - found.other for found in (top, hidden)]
    assert held[1] - held[0] == 4 * size
    states = 4 * SIZES["big"]["hidden_size"] * 32 * ANSWER
    assert (top.disk, hidden.disk) == (0, states)
    assert f"hidden states of the teacher on disk: up to {states / 2**30:.2f}" in "\n".join(hidden.lines())


def test_what_does_not_fit_gets_advice(tmp_path):
    given = prepared(write_recipe(tmp_path, "tiny"), "train.activation_checkpointing=false")
    fits = memory.estimate(*given)
    assert fits.total == sum(
        getattr(fits, name) for name in ("parameters", "gradients", "optimizer", "second_model", "activations", "other")
    )
    assert not fits.warnings()
    assert not fits.advice
    assert fits.batch == {"rows": 4, "tokens": 4 * (PROMPT + ANSWER - 1), "layout": "shared"}

    tight = memory.estimate(*given, memory_gib=fits.total / 2**30 - 0.01)
    [warning] = tight.warnings()
    assert "training step needs about" in warning
    assert tight.advice[0].startswith("train.activation_checkpointing=true: ")
    assert tight.advice[-1].endswith("which fits")

    hopeless = memory.estimate(*given, memory_gib=0.001)
    assert hopeless.advice[-1].startswith("remaining options")


def run_of(engine, **config):
    """A run that changes are made of."""
    usual = {
        "activation_checkpointing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
        "precompute_ref_log_probs": True, "optim": "adamw_8bit",
    }  # fmt: skip
    model = SimpleNamespace(lora=None, adapter="a", quantization="4bit")
    recipe = SimpleNamespace(model=model, teacher=None, rounds=None)
    return memory.Run(recipe, SimpleNamespace(**usual | config), engine, None, {}, 0, None)


def test_smaller_batches_are_the_same_step():
    run = run_of(Engine(), per_device_train_batch_size=12, gradient_accumulation_steps=2)

    def needed(run):
        return SimpleNamespace(total=2**30 * run.config.per_device_train_batch_size, fits=False, phase="training step")

    lines = memory.advice(needed(run), run, needed)
    assert lines[0] == "train.per_device_train_batch_size=3 train.gradient_accumulation_steps=8: 3.0 GiB"
    assert run.config.per_device_train_batch_size == 12


@pytest.mark.parametrize(
    ("now", "kinds"),
    [(Engine("fsdp2", 8, gpu=True), ["fsdp2_offload"]),
     (Engine("ddp", 8, gpu=True), ["zero1", "zero2", "fsdp2", "fsdp2_offload"]),
     (Engine("fsdp2", 8, True, True, gpu=True), []), (Engine("fsdp2", 1, gpu=True), [])],
)  # fmt: skip
def test_engines_are_offered_up_to_the_one_that_keeps_all_in_host_memory(now, kinds):
    """Each saves a tenth of what was needed, but that which cuts less than fsdp2 saves nothing. None takes Muon."""
    order = ["ddp", "zero1", "zero2", "fsdp2", "fsdp2_offload"]

    def needed(run):
        name = run.engine.name + "_offload" * run.engine.offload_params
        return SimpleNamespace(total=2**30 * 0.9 ** order.index(name), fits=False, phase="training step")

    run = run_of(now)
    lines = memory.advice(needed(run), run, needed)[:-1]
    assert [line.partition("accelerate_configs/")[2].partition(".yaml")[0] for line in lines] == kinds
    assert all((ROOT / "accelerate_configs" / f"{kind}.yaml").exists() for kind in kinds)
    muon = run_of(now, optim="muon")
    assert not any("accelerate_configs" in line for line in memory.advice(needed(muon), muon, needed))


def test_a_laptop_knows_what_eight_gpus_would_hold(tmp_path):
    given = prepared(write_recipe(tmp_path, "tiny"))
    given[0].train.pop("use_cpu")  # bf16 then, as GPUs have it
    found = memory.estimate(*given, engine=Engine("zero2", 8, gpu=True), memory_gib=80)
    weights = sum(p.numel() for p in tf.AutoModelForCausalLM.from_config(tf.AutoConfig.from_pretrained(
        given[0].model.name_or_path)).parameters())  # fmt: skip
    assert (found.parameters, found.gradients) == (2 * weights, 2 * weights // 8)
    assert found.optimizer == 12 * weights // 8
    assert found.other == memory.CUDA_CONTEXT or torch.cuda.is_available()
    assert "zero2, 8 processes" in found.lines()[0]


@pytest.mark.parametrize(
    ("given", "gpu", "factor"),
    [({}, False, 2.4), ({}, True, None), ({"MALLOC_MMAP_THRESHOLD_": "65536"}, False, None),
     ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False, None), ({"MALLOC_ARENA_MAX": "1"}, False, 2.4)],
)  # fmt: skip
def test_what_glibc_may_keep_is_said_on_cpu_alone(given, gpu, factor, tmp_path, monkeypatch):
    """With an allocator that returns freed tensors the estimate stands alone."""
    for name in memory.HEAP_OPTIONS:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = memory.estimate(*prepared(write_recipe(tmp_path, "tiny")), Engine("single", 1, gpu=gpu), 80)
    said = [line for line in found.lines() if "the process may need" in line]
    if factor is None:
        assert (found.process, said) == (None, [])
    else:
        assert found.process == round(factor * found.total)
        assert f"up to 2.4 times as much, {2.4 * found.total / 2**30:.2f} GiB" in said[0]
        assert found.lines()[1] == said[0]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_device_with_room_needs_no_activation_checkpointing(tmp_path, caplog, on_gpu):
    """Where the recipe leaves it open; the log says it, and why."""
    recipe, config, trainer_class, rows = prepared(write_recipe(tmp_path, "dpo"))
    engine, names = Engine("single", 1, gpu=on_gpu), ("activation_checkpointing", "gradient_checkpointing")
    needed = memory.estimate(recipe, config, trainer_class, rows, engine, 80)
    need = (needed.process or needed.total) / 2**30
    cases = [
        (0.5 * need, {}, False), (80, {}, True), (80, {"activation_checkpointing": True}, False),
        (80, {"activation_checkpointing_kwargs": {"offload": True}}, False),
        (80, {"attn_implementation": "eager"}, False),  # of the model: it keeps scores that are not counted
    ]  # fmt: skip
    for gib, asked, spared in cases:
        given = copy.copy(config)
        vars(given).update(dict.fromkeys(names, True))
        model = dataclasses.replace(recipe.model, attn_implementation=asked.pop("attn_implementation", "sdpa"))
        made = dataclasses.replace(recipe, train=recipe.train | asked, model=model)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            disable_unneeded_checkpointing(made, given, trainer_class, rows, engine, gib)
        assert [getattr(given, name) for name in names] == [not spared] * 2
        assert [line for line in caplog.messages if "activation_checkpointing: off" in line] == caplog.messages * spared


def test_processes_on_cpu_share_its_memory(tmp_path):
    """Each of them is estimated, and all of them may be on this machine."""
    recipe, config, trainer_class, rows = prepared(write_recipe(tmp_path, "dpo"))
    without = copy.copy(config)
    without.activation_checkpointing = False
    needed = memory.estimate(recipe, without, trainer_class, rows, Engine("ddp", 2), 80)
    for processes, off in ((2, True), (8, False)):
        given = copy.copy(config)
        gib = (needed.process or needed.total) * 4 / 0.7 / 2**30  # enough for four processes
        disable_unneeded_checkpointing(recipe, given, trainer_class, rows, Engine("ddp", processes), gib)
        assert given.activation_checkpointing is not off
