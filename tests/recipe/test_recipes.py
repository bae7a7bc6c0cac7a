"""Every shipped recipe: it loads, its train section builds the method's config, and it really runs.

The runs change nothing but model, teacher, data and size, by overrides on the command line; rows have the columns of
the hub data set that the recipe names.
"""

import json
from pathlib import Path

import pytest
from hub_for_tests import ROWS, small_rounds
from models_for_tests import CONFIGS, tiny_model
from tokenizers_for_tests import QWEN3, byte_tokenizer, merging_tokenizer
from vision_for_tests import processor_of, seeing
from vllm_for_tests import Serving

from hf_posttrain.methods import METHODS, config_class
from hf_posttrain.recipe.read import load_recipe, train_config
from hf_posttrain.run import main

RECIPES = Path(__file__).parents[2] / "recipes"
ALL = sorted(RECIPES.rglob("*.yaml"))
REAL = sorted(RECIPES.glob("*.yaml"))
SMALL = [
    "train.max_steps=2", "train.use_cpu=true", "train.per_device_train_batch_size=2", "train.max_length=96",
    "train.gradient_accumulation_steps=1", "train.logging_steps=1", "train.save_strategy=no", "train.eval_strategy=no",
]  # fmt: skip


def name(path):
    """The recipe's name in test ids."""
    return str(path.relative_to(RECIPES))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folders of four tiny saved models: two with one tokenizer, whose template is in the shape of Qwen3's, one with a
    tokenizer of its own, and one that sees."""
    folders = [tmp_path_factory.mktemp(which) for which in ("student", "teacher", "other")]
    for seed, folder in enumerate(folders):
        tokenizer = merging_tokenizer() if seed == 2 else byte_tokenizer(QWEN3)
        tokenizer.save_pretrained(folder)
        tiny_model("qwen3", seed, vocab_size=500 if seed == 2 else 300).save_pretrained(folder)
    folders.append(tmp_path_factory.mktemp("seeing"))
    seeing("qwen3_vl")[0].save_pretrained(folders[-1])
    processor_of("qwen3_vl").save_pretrained(folders[-1])
    return folders


@pytest.fixture
def servers():
    """URLs of a server that scores as the teacher, and of one that takes the student's weights."""
    with Serving(tiny_model("qwen3", 1)) as teacher, Serving(tiny_model("qwen3", 7)) as student:
        yield teacher.url, student.url


def small_overrides(recipe, student, teacher, other, sees, folder, servers):
    """What replaces model, teacher and data of a recipe on the hub by files in `folder`."""
    model = sees if recipe.model.images else student
    overrides = [*SMALL, f"model.name_or_path={model}", f"train.output_dir={folder / 'out'}"]
    if recipe.teacher and not recipe.teacher.self:
        overrides += [f"teacher.name_or_path={other if recipe.teacher.own_tokenizer else teacher}"]
    if recipe.teacher and recipe.teacher.url:
        overrides += [f"teacher.url={servers[0]}", f"train.sampler.base_url={servers[1]}"]
    if METHODS[recipe.method].rows.sampled:
        overrides += ["train.max_completion_length=8"]
    if recipe.rounds:
        overrides += small_rounds()
    if recipe.train.get("eval_exact_match"):
        overrides += ["train.eval_max_completion_length=8"]
    for split in ("train", "eval"):
        source = getattr(recipe.data, split)
        if source is None:
            continue
        file = folder / f"{split}.jsonl"
        file.write_text("\n".join(json.dumps(ROWS[source.path](n)) for n in range(6)))
        overrides += [f"data.{split}.path={file}", f"data.{split}.name=null", f"data.{split}.split=train"]
    return overrides


def test_the_five_methods_have_a_recipe():
    assert {load_recipe(path).method for path in REAL} == set(METHODS)
    assert set(METHODS) <= {path.stem for path in REAL}
    assert "qwen3" in CONFIGS


@pytest.mark.parametrize("path", ALL, ids=name)
def test_recipe_loads_and_its_train_section_is_the_methods_config(path):
    recipe = load_recipe(path, ["train.use_cpu=true"])
    args = train_config(recipe, config_class(METHODS[recipe.method]))
    given = load_recipe(path).train
    assert given["output_dir"] == args.output_dir
    assert args.learning_rate == pytest.approx(float(given["learning_rate"]))


@pytest.mark.parametrize("path", REAL, ids=name)
def test_every_line_of_a_real_recipe_says_why(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    bare = [line for line in lines if line.strip() and not line.rstrip().endswith(":") and " # " not in line]
    assert [line for line in bare if not line.startswith("#")] == []


@pytest.mark.parametrize("path", [
    pytest.param(path, marks=[] if path.stem in ("sft", "dpo", "opd") else pytest.mark.slow, id=name(path))
    for path in REAL
])  # fmt: skip
def test_real_recipe_trains_when_model_and_data_are_overridden(path, tiny, tmp_path, servers):
    recipe = load_recipe(path)
    assert main([str(path), *small_overrides(recipe, *tiny, tmp_path, servers)]) == 0
    out = tmp_path / "out"
    state = json.loads((out / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    results = json.loads((out / "all_results.json").read_text())
    assert len(losses) == state["global_step"] == 2
    result = results["eval_score" if recipe.rounds else "eval_loss"]
    assert all(loss == loss and abs(loss) < 1e4 for loss in [*losses, result])
    assert ("eval_exact_match" in results) == bool(recipe.train.get("eval_exact_match"))
    assert (out / ("adapter_model.safetensors" if recipe.model.lora else "model.safetensors")).exists()
