"""Recipes: what is read, what is refused, and that a message says where, what, and what to do."""

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS, config_class
from hf_posttrain.models import adapters
from hf_posttrain.recipe import rules as of_recipe
from hf_posttrain.recipe.read import load_recipe, read_recipe, train_config
from hf_posttrain.recipe.sections import Recipe
from hf_posttrain.trainer import rules

REPOSITORY = Path(__file__).parents[2]
DPO = """\
method: dpo
model:
  name_or_path: org/name
  lora: {r: 8, alpha: 16}
data:
  train: {path: pairs.jsonl, columns: {prompt: question}}
train:
  learning_rate: 5e-7
  beta: 0.2
"""


@dataclass
class Config:
    """Stands for a method's Config where TrainingArguments plays no part."""

    learning_rate: float = 1.0
    weight: float | str = 1.0
    steps: int = 1
    flag: bool = False
    maybe: float | None = None
    rates: list[float] | None = None
    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    kwargs: dict | str | None = None

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError("steps must not be negative")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """recipe(text, *overrides) writes dpo.yaml in the current directory and loads it."""
    monkeypatch.chdir(tmp_path)

    def load(text=DPO, *overrides, read=load_recipe):
        (tmp_path / "dpo.yaml").write_text(text)
        return read("dpo.yaml", overrides)

    return load


@pytest.fixture
def unchecked(recipe):
    """The same for a train section of other fields than the method's, such as those of Config."""
    return partial(recipe, read=read_recipe)


def refusal(function, *args):
    with pytest.raises(InputError) as caught:
        function(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_reads_sections_and_defaults(recipe):
    loaded = recipe()
    assert (loaded.method, loaded.model.name_or_path, loaded.teacher) == ("dpo", "org/name", None)
    assert (loaded.model.dtype, loaded.model.attn_implementation, loaded.model.quantization) == (
        "default",
        "auto",
        "none",
    )
    assert loaded.data.train.columns == {"prompt": "question"}
    assert (loaded.data.train.split, loaded.data.train.limit, loaded.data.eval) == ("train", None, None)
    assert loaded.train == {"learning_rate": 5e-7, "beta": 0.2}


def test_methods_of_recipe_and_command_are_the_same():
    assert Recipe.__annotations__["method"].__args__ == tuple(METHODS)


def test_list_of_sources(recipe):
    loaded = recipe(DPO, "data.train=[{path: a.jsonl, weight: 2}, {path: b.jsonl}]", "data.train.1.limit=5")
    assert [(s.path, s.weight, s.limit) for s in loaded.data.train] == [("a.jsonl", 2.0, None), ("b.jsonl", 1.0, 5)]


@pytest.mark.parametrize("spelling", ["5e-7", "5E-7", "5.0e-7", "'5e-7'", "0.0000005", "+5e-7"])
def test_5e_7_is_a_float_wherever_the_field_is(unchecked, spelling):
    loaded = unchecked(DPO.split("train:\n  learning")[0] + f"train: {{learning_rate: {spelling}, weight: {spelling}, "
                    f"maybe: {spelling}, rates: [{spelling}], kwargs: {{min_lr: 5e-7}}}}\n")  # fmt: skip
    config = train_config(loaded, Config)
    assert (config.learning_rate, config.weight, config.maybe, config.rates) == (5e-7, 5e-7, 5e-7, [5e-7])
    assert config.kwargs == {"min_lr": 5e-7}
    assert train_config(unchecked(DPO, "train={}", f"train.learning_rate={spelling}"), Config).learning_rate == 5e-7


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ("flag: 'true'", "flag", True),
        ("flag: no", "flag", False),
        ("weight: auto", "weight", "auto"),
        ("weight: 2", "weight", 2.0),
        ("steps: 1e3", "steps", 1000),
        ("steps: '12'", "steps", 12),
        ("maybe: null", "maybe", None),
        ("kwargs: '{}'", "kwargs", "{}"),
        ("kind: ipo", "kind", "ipo"),
    ],
)
def test_values_take_the_type_of_the_field(unchecked, given, field, value):
    config = train_config(unchecked(DPO.split("train:\n  learning")[0] + f"train:\n  {given}\n"), Config)
    assert getattr(config, field) == value
    assert type(getattr(config, field)) is type(value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("steps: 5e-7", "dpo.yaml:8: train.steps must be a whole number, not 5e-07"),
        ("learning_rate: true", "dpo.yaml:8: train.learning_rate must be a number, not true"),
        ("learning_rate: fast", "dpo.yaml:8: train.learning_rate must be a number, not 'fast'"),
        ("flag: 3", "dpo.yaml:8: train.flag must be true or false, not 3"),
        ("rates: [1, x]", "dpo.yaml:8: train.rates must be a list, each item a number or null, not [1, 'x']"),
        ("kind: sigmoids", "dpo.yaml:8: train.kind must be sigmoid or ipo, not 'sigmoids'; did you mean 'sigmoid'?"),
        ("learning_rte: 1", "dpo.yaml:8: unknown key train.learning_rte; did you mean 'learning_rate'?"),
        ("learning-rate: 1", "dpo.yaml:8: unknown key train.learning-rate; did you mean 'learning_rate'?"),
        ("evaluation_strategy: x", "dpo.yaml:8: train.evaluation_strategy does not exist: use eval_strategy"),
        ("padding_free: x", "dpo.yaml:8: train.padding_free does not exist: use layout: packed (or auto)"),
        ("steps: -1", "dpo.yaml:8: steps must not be negative"),
    ],
)
def test_train_section_is_checked_against_the_config(unchecked, given, message):
    loaded = unchecked(DPO.split("train:\n  learning")[0] + f"train:\n  {given}\n")
    assert refusal(train_config, loaded, Config) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle:\n  x: 1\n" + DPO, "dpo.yaml:1: unknown section modle; did you mean 'model'?"),
        (
            DPO.replace("name_or_path", "name_or_pth"),
            "dpo.yaml:3: unknown key model.name_or_pth; did you mean 'name_or_path'?",
        ),
        (DPO.replace("{prompt:", "{promt:"), "dpo.yaml:6: data.train.columns: no method reads a column 'promt'; did"),
        (DPO.replace("columns", "colums"), "dpo.yaml:6: unknown key data.train.colums; did you mean 'columns'?"),
        (
            DPO.replace("dpo\n", "dpoo\n"),
            f"dpo.yaml:1: method must be {' or '.join([', '.join([*METHODS][:-1]), [*METHODS][-1]])}, not 'dpoo';"
            " did you mean 'dpo'?",
        ),
        (DPO.replace("dpo\n", "[dpo]\n"), f"dpo.yaml:1: method must be {next(iter(METHODS))}, "),
        (DPO.replace("method: dpo\n", ""), "dpo.yaml: method is missing"),
        (DPO.replace("path: pairs.jsonl, ", ""), "dpo.yaml:6: data.train.path is missing"),
        (DPO.replace("org/name", "3"), "dpo.yaml:3: model.name_or_path must be a string, not 3"),
        (
            DPO.replace("{prompt: question}", "[a]"),
            "dpo.yaml:6: data.train.columns must be a mapping, each value a string",
        ),
        (DPO.replace("r: 8", "r: 0"), "dpo.yaml:4: model.lora.r=0 must be at least 1"),
        (DPO.replace("r: 8", "r: 8.5"), "dpo.yaml:4: model.lora.r must be a whole number, not 8.5"),
        (DPO + "  beta: 0.3\n", "dpo.yaml:10: duplicate key train.beta (first in line 9)"),
        (DPO + " x: [\n", "dpo.yaml:10: YAML syntax error"),
        (DPO + "\tx: 1\n", "dpo.yaml:10: YAML syntax error while scanning for the next token: found character '\\t'"),
        ("", "dpo.yaml: the recipe must be a mapping of keys to values, not null"),
        ("- 1\n", "dpo.yaml: the recipe must be a mapping of keys to values, not [1]"),
        ("a: &a\n  b: *a\n", "contains itself"),
        ("a: !!int x\n", "dpo.yaml:1: the tag !!int is not supported"),
        ("a: !!timestamp x\n", "tag !!timestamp is not"),
        ("b: 1\n!!bool x: 1\n", "dpo.yaml:2: the tag !!bool"),
        ("a: !mine x\n", "the tag !mine is not supported"),
    ],
)
def test_mistakes_in_the_file_name_the_line_and_the_nearest_key(recipe, text, message):
    assert message in refusal(recipe, text)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["beta"], "command line: 'beta' must have the form section.key=value, such as train.learning_rate=5e-7"),
        (["trian.beta=1"], "command line: unknown section trian; did you mean 'train'?"),
        (["model.lora.r=0"], "command line: model.lora.r=0 must be at least 1"),
        (
            ["data.train.path.x=1"],
            "command line: data.train.path.x cannot be set, since data.train.path is 'pairs.jsonl'",
        ),
        (
            ["data.train=[{path: a}]", "data.train.path=b"],
            "command line: data.train.path cannot be set, since data.train is a list of length 1. Set "
            "data.train.{0..0}",
        ),
        (["train.x={"], "command line: train.x={: YAML syntax error"),
        (["model.quantization=4bit", "model.lora=null"], "model.quantization requires an adapter"),
        (
            ["model.quantization=4bit", "model.from_scratch=true"],
            "model.quantization cannot be combined with model.from_scratch",
        ),
        (
            ["model.from_scratch=true"],
            "dpo.yaml:4: model.lora cannot be combined with model.from_scratch: an adapter is saved without its random "
            "base. Remove model.lora, or save the random model first",
        ),
        (["model.adapter=x"], "model.adapter cannot be combined with model.lora"),
        (
            ["model.lora=null", "model.adapter=x", "model.from_scratch=true"],
            "model.adapter cannot be combined with model.from_scratch",
        ),
        (
            ["model.chat_template=dpo.yml"],
            "command line: model.chat_template: there is no file dpo.yml; did you mean 'dpo.yaml'?",
        ),
        (["teacher.name_or_path=x"], "command line: teacher is only valid with method kd or opd, not dpo"),
        (["method=kd"], "command line: method kd requires a teacher"),
        (["method=opd", "teacher={name_or_path: x, lora: {}}"], "command line: teacher.lora is not supported"),
        (
            ["method=kd", "teacher={name_or_path: x, chat_template: dpo.yaml}"],
            "line: teacher.chat_template is not supported",
        ),
        (["model.offload=true"], "command line: model.offload is only valid for a teacher"),
        (["data.train.limit=0"], "command line: data.train.limit=0 must be at least 1 (or null for all rows)"),
        (["data.train.weight=0"], "command line: data.train.weight=0 must be positive"),
        (["data.train=[]"], "command line: data.train must not be an empty list"),
        (["data.train.path="], "command line: data.train.path must be a string, not null"),
        (["data.eval=x.jsonl"], "command line: data.eval must be a mapping"),
    ],
)
def test_overrides_and_contradictions_are_refused(recipe, overrides, message):
    assert message in refusal(recipe, DPO, *overrides)


def test_overrides_are_yaml_and_make_missing_mappings(unchecked):
    loaded = unchecked(
        DPO, "model.lora=null", "model.lora.r=4", "data.eval.path=e.jsonl", "data.eval.limit=10", "train.flag=true",
        "data.train.columns={prompt: q, completion: a}", "method=kd", "teacher.name_or_path=big",
    )  # fmt: skip
    assert loaded.model.lora == {"r": 4}
    assert (loaded.data.eval.path, loaded.data.eval.limit) == ("e.jsonl", 10)
    assert loaded.data.train.columns == {"prompt": "q", "completion": "a"}
    assert (loaded.method, loaded.teacher.name_or_path, loaded.train["flag"]) == ("kd", "big", True)


def test_an_override_changes_one_of_two_aliased_sections(recipe):
    text = "method: kd\nmodel: &m {name_or_path: a}\nteacher: *m\ndata: {train: {path: x.jsonl}}\n"
    loaded = recipe(text, "model.name_or_path=b")
    assert (loaded.model.name_or_path, loaded.teacher.name_or_path) == ("b", "a")


def test_missing_recipe_names_the_nearest(recipe, tmp_path):
    recipe()
    assert refusal(load_recipe, "dp.yaml") == "there is no recipe dp.yaml; did you mean 'dpo.yaml'?"
    assert refusal(load_recipe, tmp_path / "dp.yaml").endswith(f"did you mean '{tmp_path}/dpo.yaml'?")
    assert refusal(load_recipe, "no/dp.yaml") == "there is no recipe no/dp.yaml, since there is no folder no"
    assert "is a folder" in refusal(load_recipe, ".")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as text" in refusal(load_recipe, "binary.yaml")


def test_to_yaml_reads_back_as_the_same_recipe(unchecked, tmp_path):
    loaded = unchecked(DPO, "data.eval=[{path: e.jsonl}, {path: f.jsonl, weight: 0.5}]", "train.run_name='5e-7'",
                    "train.eval_strategy=no", "train.note='yes: #1'")  # fmt: skip
    (tmp_path / "again.yaml").write_text(loaded.to_yaml())
    again = read_recipe("again.yaml")
    assert dataclasses.replace(again, path=loaded.path) == loaded
    assert again.train["run_name"] == "5e-7"
    assert again.train["eval_strategy"] == "no"


def test_relative_paths_are_also_looked_for_alongside_the_recipe(recipe, tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/pairs.jsonl").write_text("{}")
    (tmp_path / "recipes/dpo.yaml").write_text(DPO)
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe("recipes/dpo.yaml")
    assert (loaded.data.train.path, loaded.model.name_or_path) == ("recipes/pairs.jsonl", "org/name")
    (tmp_path / "pairs.jsonl").write_text("{}")
    assert load_recipe("recipes/dpo.yaml").data.train.path == "pairs.jsonl"


def test_paths_alongside_the_recipe_are_written_without_detours(recipe, tmp_path, monkeypatch):
    for folder in ("recipes", "data", "far/recipes", "far/data"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/recipes")
    for folder in ("data", "far/data"):
        (tmp_path / folder / "pairs.jsonl").write_text("{}")
    (tmp_path / "far/data/only.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for folder, file, path in (
        ("recipes", "../data/pairs.jsonl", "data/pairs.jsonl"),
        ("recipes", "../recipes/../data/pairs.jsonl", "data/pairs.jsonl"),
        ("link", "../data/pairs.jsonl", "link/../data/pairs.jsonl"),  # `data/pairs.jsonl` is another file
        ("link", "../data/only.jsonl", "link/../data/only.jsonl"),
    ):
        (tmp_path / folder / "dpo.yaml").write_text(DPO.replace("pairs.jsonl", file))
        assert load_recipe(f"{folder}/dpo.yaml").data.train.path == path


def test_variables_and_the_home_folder_are_written_out_in_every_path(recipe, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WHERE", "far")
    paths = {
        "model.name_or_path": "${WHERE}/model", "model.chat_template": "~/t.jinja",
        "data.train.path": "$WHERE/rows.jsonl",
        "train.output_dir": "${HOME}/outs", "train.resume_from_checkpoint": "~/outs/checkpoint-1",
        "train.deepspeed": "$HOME/ds.json",
    }  # fmt: skip
    Path("t.jinja").write_text("")
    read = recipe(DPO.replace("lora: {r: 8}", ""), *(f"{key}={path}" for key, path in paths.items()))
    assert (read.model.name_or_path, read.data.train.path) == ("far/model", "far/rows.jsonl")
    assert read.model.chat_template == f"{tmp_path}/t.jinja"
    assert read.train["output_dir"] == f"{tmp_path}/outs"
    assert read.train["resume_from_checkpoint"] == f"{tmp_path}/outs/checkpoint-1"
    assert read.train["deepspeed"] == f"{tmp_path}/ds.json"
    for key in paths:
        said = refusal(recipe, DPO, f"{key}=a/${{NOT_SET}}/b")
        assert said == f"command line: {key}: the environment variable ${{NOT_SET}} is not set"


def test_training_arguments_fields(unchecked, tmp_path):
    from transformers import TrainingArguments
    from transformers.trainer_utils import IntervalStrategy

    text = DPO.split("train:\n  learning")[0] + (
        "train:\n  output_dir: out\n  learning_rate: 5e-7\n  eval_strategy: no\n"
        "  save_strategy: epoch\n  bf16: 'false'\n"
        "  warmup_steps: 0.1\n  lr_scheduler_type: cosine\n  report_to: [none]\n  dataloader_drop_last: true\n"
        "  lr_scheduler_kwargs: {num_cycles: 1}\n  use_cpu: yes\n"
    )
    config = train_config(unchecked(text), TrainingArguments)
    assert (config.learning_rate, config.warmup_steps, config.use_cpu, config.bf16) == (5e-7, 0.1, True, False)
    assert config.eval_strategy == IntervalStrategy.NO
    for override, message in {
        "train.save_strategy=epochs": "no, steps, epoch or best, not 'epochs'; did you mean 'epoch'?",
        "train.optim=adamw_torchh": "did you mean 'adamw_torch'?",
        "train.logging_steps=0": "non-zero --logging_steps",
        "train.warmup_ratio=0.1": "train.warmup_ratio does not exist: use warmup_steps",
        "train.group_by_length=true": "use train_sampling_strategy: group_by_length",
        "train.parallelism_config={sp_siz: 2}": "unknown key train.parallelism_config.sp_siz; did you mean 'sp_size'?",
    }.items():
        refused = refusal(train_config, unchecked(text, override), TrainingArguments)
        assert refused.startswith("command line: ")
        assert message in refused


def test_values_of_trl_that_change_nothing_are_taken_and_left_out(recipe):
    same = ["train.use_vllm=false", "train.padding_free=true"]
    assert recipe(DPO, *same).train == recipe().train
    said = refusal(recipe, DPO, "train.tokenizer=x")
    assert said == "command line: train.tokenizer does not exist: the tokenizer comes from model.name_or_path"


def test_null_takes_an_option_back_that_the_method_does_not_have(recipe):
    assert recipe(DPO, "train.assistant_only_loss=null", "train.temperature=null").train == recipe().train
    for wrong in ("train.assistant_only_loss=true", "train.assistant_only_los=null"):
        assert "train.assistant_only_los" in refusal(recipe, DPO, wrong)


def test_reading_a_recipe_imports_no_torch(recipe, tmp_path):
    recipe()
    code = "import sys, hf_posttrain.recipe.read as r; r.load_recipe('dpo.yaml'); print('torch' in sys.modules)"
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("train", "message"),
    [("{betta: 1}", "unknown key train.betta; did you mean 'beta'?"),
     ("{beta: much}", "train.beta must be a number or null, not 'much'"),
     ("{max_steps: 1.5}", "train.max_steps must be a whole number, not 1.5"),
     ("{warmup_ratio: 0.1}", "train.warmup_ratio does not exist: use warmup_steps"),
     ("{eval_strategy: steps}", "train.eval_strategy: steps requires rows to evaluate on. Set data.eval"),
     ("{merge_lora: 'true'}", "train.merge_lora requires an adapter. Set model.lora or model.adapter")],
)  # fmt: skip
def test_a_wrong_key_or_type_or_contradiction_is_said_before_torch_is_imported(train, message, tmp_path):
    recipe = tmp_path / "dpo.yaml"
    recipe.write_text(f"method: dpo\nmodel: {{name_or_path: m}}\ndata: {{train: {{path: d}}}}\ntrain: {train}\n")
    code = (
        "import sys; from hf_posttrain.run import main; ended = main([sys.argv[1]]); "
        "sys.exit(3 if {'torch', 'transformers'} & {*sys.modules} else ended)"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code, recipe], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {recipe}:4: {message}")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("{dropuot: 0.1}", "unknown key model.lora.dropuot; did you mean 'dropout'?"),
        ("{rank: 8}", "model.lora.rank does not exist: use r"),
        ("{alpha: x}", "model.lora.alpha must be a whole number, not 'x'"),
    ],
)
def test_unknown_lora_names_get_a_suggestion(lora, message, tmp_path):
    path = tmp_path / "dpo.yaml"
    path.write_text(f"method: dpo\nmodel:\n  name_or_path: x\n  lora: {lora}\ndata: {{train: {{path: y}}}}\n")
    with pytest.raises(InputError) as refused:
        load_recipe(path)
    assert str(refused.value).startswith(f"{path}:4: {message}")


def test_lora_has_its_types_and_one_name_for_each_value(tmp_path):
    path = tmp_path / "dpo.yaml"
    lora = "{alpha: '32', dropout: 5e-2}"
    path.write_text(f"method: dpo\nmodel:\n  name_or_path: x\n  lora: {lora}\ndata: {{train: {{path: y}}}}\n")
    section = load_recipe(path).model
    assert section.lora == {"alpha": 32, "dropout": 0.05}
    section.lora |= {"lora_alpha": 2}
    with pytest.raises(InputError, match=r"a\.yaml:4: model\.lora has alpha and lora_alpha, which are the same option"):
        adapters.lora_config(section, "a.yaml:4")


def test_the_rules_of_a_recipe_run_once(recipe, monkeypatch):
    """By `load_recipe`; a Config of a section that has changed since is checked by itself."""
    calls, problems = [], rules.problems
    monkeypatch.setattr(of_recipe, "problems", lambda *args: calls.append("recipe") or problems(*args))
    monkeypatch.setattr(rules, "problems", lambda *args: calls.append("config") or problems(*args))
    loaded = recipe()
    loaded.train |= {"output_dir": "out", "use_cpu": True}
    loaded.validated_train = dict(loaded.train)
    dpo = config_class(METHODS["dpo"])
    assert train_config(loaded, dpo).beta == 0.2
    assert calls == ["recipe"]
    loaded.train["warmup_steps"] = -1
    with pytest.raises(InputError, match="warmup_steps=-1 must be at least 0"):
        train_config(loaded, dpo)
    assert calls == ["recipe", "config"]


def test_a_type_error_is_a_mistake_of_the_recipe_only_with_options_of_accelerate(recipe, monkeypatch):
    dpo = config_class(METHODS["dpo"])
    loaded = recipe()
    loaded.train |= {"output_dir": "out", "use_cpu": True, "accelerator_config": {"splt_batches": True}}
    with pytest.raises(InputError, match="unexpected keyword argument 'splt_batches'"):
        train_config(loaded, dpo)
    del loaded.train["accelerator_config"]
    monkeypatch.setattr(dpo, "_validate", lambda config: len(3))
    with pytest.raises(TypeError, match="has no len"):
        train_config(loaded, dpo)


def test_a_sampler_of_rounds_is_written_with_its_kind(recipe):
    loaded = recipe(DPO + "rounds: {count: 2, sampler: {kind: vllm_server, base_url: 'http://a:1'}}\n")
    assert recipe(loaded.to_yaml()).rounds == loaded.rounds
    assert loaded.rounds.sampler.base_url == "http://a:1"
