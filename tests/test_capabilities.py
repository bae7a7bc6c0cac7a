"""The table of what cannot be combined: each pair is rejected, by a Config, a recipe or a trainer."""

import itertools

import pytest

from hf_posttrain import CPOConfig, DPOConfig, KDConfig, KTOConfig, OPDConfig, RewardConfig, SFTConfig
from hf_posttrain.capabilities import CONFLICTS, Feature, conflict_message, conflicts, option_features
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS
from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.recipe.rules import recipe_features
from hf_posttrain.trainer.option_group import build_groups

POLICY_GRADIENT = {"loss_type": "policy_gradient", "num_generations": 2}
OPTIONS = {  # feature -> options that select it
    Feature.MERGE_LORA: {"merge_lora": True},
    Feature.PACKING: {"packing": True},
    Feature.GROUP_BY_LENGTH: {"train_sampling_strategy": "group_by_length"},
    Feature.EXACT_MATCH: {"eval_exact_match": True},
    Feature.LOSS_BY_VALUE: {"log_loss_by": "topic"},
    Feature.NEFTUNE: {"neftune_noise_alpha": 5.0},
    Feature.ASSISTANT_ONLY: {"assistant_only_loss": True},
    Feature.PROMPT_TRAINED: {"completion_only_loss": False},
    Feature.SYNC_REFERENCE: {"sync_ref_model": True},
    Feature.MUON: {"optim": "muon"},
    Feature.AUTO_WEIGHTS: {"undesirable_weight": "auto"},
    Feature.REFERENCE_CACHE: {"precompute_ref_log_probs": True},
    Feature.OFF_POLICY: {"rollouts": {"source": "replay"}},
    Feature.SCORED_EACH_STEP: {"rollouts": {"source": "on_policy"}},
    Feature.FROZEN: {"rollouts": {"source": "frozen"}},
    Feature.REPLAY: {"rollouts": {"source": "replay"}},
    Feature.VLLM: {"sampler": {"kind": "vllm_server", "base_url": "http://a:1"}},
    Feature.PREFETCH: {"sampler": {"kind": "vllm_server", "base_url": "http://a:1", "prefetch": True}},
    Feature.POLICY_GRADIENT: POLICY_GRADIENT,
    Feature.DATA_SHARE: {"lmbda": 0.5},
    Feature.NO_ROLLOUTS: {"lmbda": 0.0},
    Feature.REWARD: POLICY_GRADIENT | {"reward": {"function": "exact_match"}},
    Feature.ADVANTAGE_WEIGHTS: POLICY_GRADIENT | {"token_weights": "sign"},
    Feature.TEACHER: {"teacher": {}},
    Feature.TOP_K: {"teacher": {"top_k": 4}},
    Feature.RESIDUAL: {"teacher": {"top_k": 4, "top_k_remainder": "residual"}},
    Feature.PRECOMPUTE: {"teacher": {"top_k": 4, "precompute": True}},
    Feature.SEVERAL: {"teacher": {"names": ["a", "b"]}},
    Feature.OWN_PROMPT: {"teacher": {"prompt": "{{ prompt }}!"}},
    Feature.OWN_TOKENIZER: {"teacher": {"tokenizer": "x"}},
    Feature.RECORDED: {"teacher": {"logprobs_column": "x", "top_k": 4}},
}
CONFIGS = {
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
    "cpo": CPOConfig,
    "rm": RewardConfig,
    "kd": KDConfig,
    "opd": OPDConfig,
}
PAIRS = [(conflict.first, conflict.second) for conflict in CONFLICTS]
OF_OPTIONS = [pair for pair in PAIRS if {*pair} <= OPTIONS.keys()]
ELSEWHERE = {  # features that no option selects, and recipes that do
    Feature.IMAGES: {"model.images": "true"},
    Feature.QUANTIZED: {"model.quantization": "4bit", "model.lora.r": 8},
    Feature.STREAM: {"data.train.streaming": "true", "train.max_steps": "1"},
    Feature.SERVED: {"teacher.url": "http://a:1", "train.loss_type": "policy_gradient"},
    Feature.MOVING_AVERAGE: {"teacher.self": "ema", "teacher.name_or_path": "''", "teacher.prompt": "'{{ prompt }}!'"},
    Feature.TEACHER_MODEL: {"teacher.name_or_path": "teacher"},
    Feature.ROUNDS: {"rounds": "2"},
    Feature.REWARD_MODEL: {"method": "rm", "data.eval.path": "rows.jsonl"},
    Feature.MODEL_JUDGE: {"rounds": "{judge: {by: model, name: judge}}"},
}
APART = (Feature.PREFETCH, Feature.ROUNDS)
"""The sampler of rounds, in a test of its own: the option of the train section belongs to a method with a teacher."""
OF_TRAINERS = {Feature.SEQUENCE_PARALLEL, Feature.SHARDED, Feature.FLATTENED, Feature.SAMPLE_URL}
"""Features that only a trainer or a command knows: tests of engines and `sample` have their errors."""


def merged(first, second):
    """The options of both, those of one group together."""
    both = {**first, **second}
    for key in first.keys() & second.keys():
        if isinstance(first[key], dict):
            both[key] = first[key] | second[key]
    return both


def methods_with(options):
    """The methods whose Config has all these options."""
    return [name for name, config in CONFIGS.items() if options.keys() <= config.__dataclass_fields__.keys()]


def test_every_feature_is_in_a_conflict_and_is_tried_here():
    used = set(itertools.chain.from_iterable(PAIRS))
    assert used == {*Feature}
    assert {*Feature} == OPTIONS.keys() | ELSEWHERE.keys() | OF_TRAINERS
    assert len({frozenset(pair) for pair in PAIRS}) == len(PAIRS)


@pytest.mark.parametrize("feature", OPTIONS)
def test_options_select_a_feature(feature, tmp_path):
    """Of a Config that leaves it out the feature is not found."""
    for method in methods_with(OPTIONS[feature]):
        given = {name: field.default for name, field in CONFIGS[method].__dataclass_fields__.items()}
        given |= {"teacher": {}} if METHODS[method].second == "teacher" else {}
        row = METHODS[method]
        values = build_groups(type("Values", (), {})(), {})
        values.__dict__.update(given | OPTIONS[feature])
        assert feature in option_features(build_groups(values, row.groups))
        values.__dict__.update(given)
        usual = {Feature.SCORED_EACH_STEP, Feature.TEACHER}
        assert (feature in option_features(build_groups(values, row.groups))) is (feature in usual)


@pytest.mark.parametrize("pair", OF_OPTIONS, ids=" and ".join)
def test_a_config_rejects_a_pair_of_options(pair, tmp_path):
    options = merged(OPTIONS[pair[0]], OPTIONS[pair[1]])
    methods = methods_with(options)
    assert methods
    for method in methods:
        given = {"output_dir": str(tmp_path), "use_cpu": True, **options}
        with pytest.raises(InputError) as caught:
            CONFIGS[method](**given)
        # of several teachers each has its tokenizer by name, which is a rule of its own
        assert "cannot be combined with" in str(caught.value) or Feature.SEVERAL in pair


@pytest.mark.parametrize(
    "pair",
    [p for p in PAIRS if {*p} & ELSEWHERE.keys() and not {*p} & OF_TRAINERS and p != APART],
    ids=" and ".join,
)  # fmt: skip
def test_a_recipe_knows_both_features(pair, tmp_path, monkeypatch):
    """And says so with the place of each, unless it is rejected for one of the two by itself."""
    monkeypatch.chdir(tmp_path)
    options = merged(*(OPTIONS.get(name, {}) for name in pair))
    overrides = {key: value for name in pair for key, value in ELSEWHERE.get(name, {}).items()}
    if Feature.TEACHER in pair or any(key.startswith("teacher") for key in overrides):
        options |= {"teacher": options.get("teacher", {})}
    if "rounds" in overrides and "teacher" not in options and "method" not in overrides:
        options |= {"beta": 0.1}
    method = next(name for name in ("sft", "dpo", "kto", "kd", "opd") if name in methods_with(options))
    if any(key.startswith("train.loss") for key in overrides) or "rollouts" in options:
        method = "opd"
    teacher = options.pop("teacher", {})
    lines = [f"method: {method}", "model: {name_or_path: student}", "data: {train: {path: rows.jsonl}}"]
    lines += ["teacher: {name_or_path: teacher}"] if METHODS[method].second == "teacher" else []
    (tmp_path / "recipe.yaml").write_text("\n".join([*lines, "train: {output_dir: out}"]))
    own = {"prompt": teacher.pop("prompt", None), "own_tokenizer": bool(teacher.pop("tokenizer", None))}
    given = [f"teacher.{key}='{value}'" for key, value in own.items() if value]
    if names := teacher.pop("names", None):
        (tmp_path / "recipe.yaml").write_text("\n".join([*lines[:3], "train: {output_dir: out}"]))
        given += [f"teachers.{name}.name_or_path=x" for name in names]
    given += [f"teacher.{key}={str(value).lower()}" for key, value in teacher.items()]
    given += [f"train.{key}={value}".replace("'", '"').replace("True", "true") for key, value in options.items()]
    given += [f"{key}={value}" for key, value in overrides.items()]
    with pytest.raises(InputError) as caught:
        load_recipe("recipe.yaml", given)
    assert conflict_message(*pair) in str(caught.value)
    assert "command line" in str(caught.value)


def test_rounds_do_not_prefetch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sampler = "{kind: vllm_server, base_url: 'http://a:1', prefetch: true}"
    (tmp_path / "recipe.yaml").write_text(
        "method: dpo\nmodel: {name_or_path: student}\ndata: {train: {path: rows.jsonl}}\n"
        f"rounds: {{count: 2, sampler: {sampler}}}\ntrain: {{output_dir: out}}\n"
    )
    with pytest.raises(InputError, match=r"recipe.yaml:4: sampler.prefetch cannot be combined with rounds"):
        load_recipe("recipe.yaml")


def test_conflicts_name_the_options():
    features = {Feature.REPLAY: "train.rollouts", Feature.IMAGES: "model.images", Feature.VLLM: "train.sampler"}
    found = dict(conflicts(features))
    assert found.keys() == {("train.rollouts", "model.images"), ("train.sampler", "model.images")}
    assert found["train.rollouts", "model.images"].startswith("rollouts: replay cannot be combined with images: ")
    with pytest.raises(KeyError):
        conflict_message(Feature.PACKING, Feature.EXACT_MATCH)


def test_a_recipe_without_them_has_no_features(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "method: sft\nmodel: {name_or_path: student}\ndata: {train: {path: rows.jsonl}}\ntrain: {output_dir: out}\n"
    )
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    assert recipe_features(recipe, SFTConfig(output_dir=str(tmp_path), use_cpu=True)) == {}
