"""Groups of options, and their names in the last release."""

import dataclasses
import re

import numpy as np
import pytest

from hf_posttrain import DPOConfig, KDConfig, OPDConfig, SFTConfig
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS
from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.rollouts.options import (
    ROLLOUTS,
    SAMPLERS,
    OnPolicyRollouts,
    PolicySamplerOptions,
    ReplayRollouts,
    VLLMServerOptions,
)
from hf_posttrain.teachers.options import TEACHER, TeacherOptions
from hf_posttrain.trainer import run_fingerprint

SERVER = {"kind": "vllm_server", "base_url": "http://a:1"}
POLICY = SAMPLERS.build("sampler", "policy").fingerprint()
OLD = [  # method, options of the last release, options now
    ("opd", {"rollouts": "live"}, {"rollouts": "on_policy"}),
    ("opd", {"rollouts": "live", "fresh": 0.25, "replay_windows": 16, "teacher_rest": "tail", "skew_alpha": 0.1,
             "rollout": "transformers", "rollout_ahead": 0}, {"rollouts": "on_policy"}),
    ("opd", {"rollouts": "replay", "fresh": 0.5, "replay_windows": 4},
     {"rollouts": {"source": "replay", "fresh_fraction": 0.5, "replay_steps": 4}}),
    ("opd", {"rollouts": "frozen", "horizon": 3}, {"rollouts": {"source": "frozen", "train_max_tokens": 3}}),
    ("opd", {"horizon": {"from": 1, "to": 4, "steps": 3}},
     {"rollouts": {"train_max_tokens": {"from": 1, "to": 4, "steps": 3}}}),
    ("opd", {"rollout": "transformers", "generation_batch_size": 4}, {"sampler": {"batch_size": 4}}),
    ("opd", {"rollout": "vllm", "vllm_mode": "server", "vllm_server_base_url": "http://a:1", "rollout_ahead": 1},
     {"sampler": SERVER | {"prefetch": True}}),
    ("opd", {"rollout": "vllm", "vllm_mode": "server", "vllm_server_base_url": "http://a:1", "vllm_check_steps": 3,
             "rollout_ahead": 0}, {"sampler": SERVER | {"check_steps": 3}}),
    ("opd", {"teacher_top_k": 4, "teacher_rest": "residual", "one_stop_outcome": False},
     {"teacher": {"top_k": 4, "top_k_remainder": "residual", "merge_eos": False}}),
    ("kd", {"precompute_teacher_top_k": 8}, {"teacher": {"top_k": 8, "precompute": True}}),
    ("kd", {"teacher_prompt": "{{ prompt }}!"}, {"teacher": {"prompt": "{{ prompt }}!"}}),
    ("kd", {"divergence": "skew_forward_kl", "skew_alpha": 0.3}, {"divergence": "skew_forward_kl", "beta": 0.3}),
    ("kd", {"one_stop_outcome": True, "teacher_top_k": None}, {"teacher": {"merge_eos": True}}),
]  # fmt: skip
CONFIGS = {"dpo": DPOConfig, "kd": KDConfig, "opd": OPDConfig, "sft": SFTConfig}
RECIPE = """\
method: {method}
model: {{name_or_path: student}}
teacher: {{name_or_path: teacher}}
data: {{train: {{path: rows.jsonl}}}}
train:
  output_dir: out
"""


def config(method, folder, **options):
    return CONFIGS[method](output_dir=str(folder), use_cpu=True, **options)


@pytest.mark.parametrize(
    ("group", "value", "expected"),
    [
        (ROLLOUTS, "on_policy", OnPolicyRollouts()),
        (ROLLOUTS, None, OnPolicyRollouts()),
        (ROLLOUTS, {"source": "replay", "fresh_fraction": "0.5"}, ReplayRollouts(fresh_fraction=0.5)),
        (ROLLOUTS, '{"train_max_tokens": 4}', OnPolicyRollouts(train_max_tokens=4)),
        (SAMPLERS, {"batch_size": 2}, PolicySamplerOptions(2)),
        (SAMPLERS, SERVER | {"prefetch": "true"}, VLLMServerOptions(base_url="http://a:1", prefetch=True)),
        (TEACHER, {}, TeacherOptions()),
        (TEACHER, {"top_k": 4, "names": ["a"]}, TeacherOptions(top_k=4, names=["a"])),
    ],
)
def test_a_group_is_a_name_or_a_mapping(group, value, expected):
    built = group.build("option", value)
    assert built == expected
    assert group.build("option", built.to_dict()) == built
    assert group.build("option", built) == built
    assert group.restore({**built.to_dict(), "of_another_release": 1}) == built


@pytest.mark.parametrize(
    ("group", "value", "message"),
    [
        (SAMPLERS, "vllm", "option='vllm' is not one of policy, vllm_colocate, vllm_server"),
        (SAMPLERS, 3, "option must be one of policy, vllm_colocate, vllm_server, or a mapping such as {kind: policy}"),
        (SAMPLERS, "{", "option must be one of"),
        (SAMPLERS, {"batchsize": 3}, "not an option of kind policy, the default; did you mean 'batch_size'?"),
        (SAMPLERS, {"prefetch": True}, "not an option of kind policy, the default. Set option.kind: vllm_server, or"),
        (SAMPLERS, {"batch_size": True}, "option.batch_size must be a whole number or null, not True"),
        (SAMPLERS, {"batch_size": 0}, "option.batch_size=0 must be at least 1"),
        (SAMPLERS, {"kind": "vllm_server"}, "option requires option.base_url of kind vllm_server"),
        (TEACHER, "top_k", "option must be a mapping with the options top_k, top_k_remainder, precompute"),
        (TEACHER, {"top_k": 1.5}, "option.top_k must be a whole number or null, not 1.5"),
    ],
)
def test_a_problem_names_the_option(group, value, message):
    with pytest.raises(InputError) as caught:
        group.build("option", value)
    assert message in str(caught.value)


def test_a_config_shows_its_groups_as_plain_values(tmp_path):
    args = config("opd", tmp_path, rollouts={"source": "replay"}, token_weights="top_share")
    assert args.to_dict()["rollouts"] == {
        "source": "replay", "train_max_tokens": None, "fresh_fraction": 0.25, "replay_steps": 16,
    }  # fmt: skip
    assert args.to_dict()["token_weights"] == {"name": "top_share", "share": 0.5}
    assert args.to_dict()["reward"] is None
    assert OPDConfig(**{key: args.to_dict()[key] for key in ("output_dir", "rollouts", "token_weights")}).rollouts == (
        ReplayRollouts()
    )


def test_a_group_that_is_assigned_later_is_read(tmp_path):
    args = config("opd", tmp_path)
    args.rollouts = "replay"
    args.check_changes()
    assert args.rollouts == ReplayRollouts()
    args.sampler = {"batch": 3}
    with pytest.raises(InputError, match=r"sampler\.batch is not an option"):
        args.check_changes()


@pytest.mark.parametrize(("method", "old", "new"), OLD)
def test_old_names_work_with_one_warning(method, old, new, tmp_path, caplog):
    expected = config(method, tmp_path, **new)
    assert caplog.messages == []
    found = config(method, tmp_path, **old)
    groups = METHODS[method].groups
    assert {key: getattr(found, key) for key in groups} == {key: getattr(expected, key) for key in groups}
    assert found.beta == expected.beta
    assert len(caplog.messages) == 1
    assert "options have new names; the old ones work in this release only: " in caplog.text
    for name in old.keys() - {"divergence", "rollouts"}:
        assert f"{name} -> " in caplog.text


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"fresh": 0.25}, "fresh -> remove it (its default)"),
        ({"horizon": None}, "horizon -> remove it (its default)"),
        ({"rollouts": "live"}, "rollouts: live -> rollouts: 'on_policy'"),
        ({"rollout": "vllm", "vllm_mode": "server", "vllm_server_base_url": "http://a:1"},
         "rollout -> sampler.kind: 'vllm_server'; vllm_mode -> sampler.kind: 'vllm_server'; "
         "vllm_server_base_url -> sampler.base_url: 'http://a:1'"),
        ({"precompute_teacher_top_k": 4, "rollouts": "frozen"},
         "precompute_teacher_top_k -> teacher.top_k: 4, teacher.precompute: true"),
    ],
)  # fmt: skip
def test_the_warning_of_an_old_name_has_the_new_values(options, warning, tmp_path, caplog):
    config("opd", tmp_path, **options)
    assert caplog.messages == [f"options have new names; the old ones work in this release only: {warning}"]


@pytest.mark.parametrize(("method", "old", "new"), [case for case in OLD if "teacher_prompt" not in case[1]])
def test_old_names_work_in_a_recipe(method, old, new, tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(method=method))
    overrides = [f"train.{name}={value}".replace("'", '"') for name, value in old.items()]
    recipe = load_recipe("recipe.yaml", [text.replace("None", "null") for text in overrides])
    groups = METHODS[method].groups
    for key, value in new.items():
        given = recipe.train[key]
        assert groups[key].build(key, given) == groups[key].build(key, value) if key in groups else given == value
    assert caplog.text.count("options have new names") == 1
    with pytest.raises(InputError, match=r"train\.teacher\.prompt is not supported in a recipe\. Use teacher\.prompt"):
        load_recipe("recipe.yaml", ["train.teacher_prompt='{{ prompt }}!'"])


def test_an_error_of_an_old_name_has_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(method="opd") + "  horizon: 4000\n")
    with pytest.raises(InputError, match=r"recipe.yaml:7: train.rollouts.train_max_tokens=4000 must be from 1 to"):
        load_recipe("recipe.yaml")
    overridden = load_recipe("recipe.yaml", ["train.rollouts={train_max_tokens: 3}"])
    assert overridden.train["rollouts"]["train_max_tokens"] == 3
    with pytest.raises(InputError, match=r"^command line: train.rollouts\.train_max_tokens is also set .*\. Remove h"):
        load_recipe("recipe.yaml", ["train.rollouts={train_max_tokens: 3}", "train.horizon=4"])
    with pytest.raises(InputError, match=r"^command line: train.vllm_mode is only valid with rollout: vllm"):
        load_recipe("recipe.yaml", ["train.vllm_mode=server"])


def test_options_of_the_comparison_stand_in_the_teacher_section(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = RECIPE.format(method="kd").replace("{name_or_path: teacher}", "{name_or_path: teacher, top_k: 5}")
    (tmp_path / "recipe.yaml").write_text(text)
    assert load_recipe("recipe.yaml").train["teacher"] == {"top_k": 5}
    recipe = load_recipe("recipe.yaml", ["teacher.precompute=true"])
    assert recipe.train["teacher"] == {"top_k": 5, "precompute": True}
    assert load_recipe("recipe.yaml", ["train.teacher={top_k: 3}"]).train["teacher"] == {"top_k": 3}
    (tmp_path / "recipe.yaml").write_text(text.replace("top_k: 5", "top_k: 0"))
    with pytest.raises(InputError, match=r"recipe.yaml:3: train.teacher.top_k=0 must be at least 1"):
        load_recipe("recipe.yaml")


def test_a_method_without_the_group_says_where_the_option_went(tmp_path):
    with pytest.raises(InputError, match=r"SFTConfig has no horizon: its name is now rollouts.train_max_tokens, of me"):
        config("sft", tmp_path, horizon=3)
    args = config("opd", tmp_path)
    args.horizon = 3
    with pytest.raises(InputError, match=r"has no effect: its name is now rollouts.train_max_tokens"):
        args.check_changes()


@pytest.mark.parametrize(
    ("changed", "different"),
    [
        ({}, []),
        ({"rollouts": "replay"}, ["rollouts.fresh_fraction", "rollouts.replay_steps", "rollouts.source"]),
        ({"teacher": {"top_k": 4}}, ["teacher.top_k"]),
        ({"sampler": {"batch_size": 2}}, ["sampler.batch_size"]),
        ({"token_weights": "top_share"}, ["token_weights"]),
    ],
)
def test_a_checkpoint_of_the_last_release_is_compared(changed, different, tmp_path):
    then = {
        "method": "opd", "rollouts": "live", "fresh": 0.25, "replay_windows": 16, "horizon": None,
        "teacher_rest": "tail",
        "precompute_teacher_top_k": None, "teacher_top_k": None, "one_stop_outcome": True, "rollout": "transformers",
        "generation_batch_size": None, "rollout_ahead": 0, "skew_alpha": 0.1, "beta": None, "reward": None,
        "token_weights": None, "teacher_prompt": None, "teacher_tokenizer": None, "teacher_names": None,
    }  # fmt: skip
    args = config("opd", tmp_path, **changed)
    groups = METHODS["opd"].groups
    now = {key: options and options.fingerprint() for key, options in ((key, getattr(args, key)) for key in groups)}
    found = run_fingerprint.differences(then, now | {"method": "opd", "beta": None}, None, groups)
    assert sorted(found) == different


def test_both_kinds_of_vllm_resume_each_other(tmp_path):
    server = SAMPLERS.build("sampler", SERVER)
    assert server.fingerprint() == SAMPLERS.build("sampler", "vllm_colocate").fingerprint()
    assert server.fingerprint() != SAMPLERS.build("sampler", SERVER | {"prefetch": True}).fingerprint()
    assert server.fingerprint() != SAMPLERS.build("sampler", "policy").fingerprint()


def test_every_option_of_a_group_has_a_help_text():
    for method in METHODS.values():
        for group in method.groups.values():
            for kind in group.kinds.values():
                for option in dataclasses.fields(kind):
                    assert option.metadata["help"].endswith("."), (kind, option.name)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("opd", {"vllm_mode": "server"}, "vllm_mode is only valid with rollout: vllm"),
        ("opd", {"teacher_top_k": 5, "precompute_teacher_top_k": 8}, "teacher_top_k cannot be combined with prec"),
        ("opd", {"rollout": "vllm", "rollout_ahead": 2}, "rollout_ahead=2 must be 0 or 1"),
        ("opd", {"loss_type": "jsd", "skew_alpha": 0.3}, "skew_alpha, now beta, is only valid with skew_forward_kl"),
        ("opd", {"teacher_top_k": 5, "teacher": {"top_k": 6}}, "teacher.top_k is also set under its old name"),
        ("opd", {"rollout": ["vllm"]}, r"sampler.kind=\['vllm'\] is not one of"),
        ("dpo", {"skew_alpha": 0.3}, "DPOConfig has no skew_alpha"),
        (
            "kd",
            {"divergence": "jsd", "teacher": {"top_k": 4, "top_k_remainder": "generalized"}},
            "top_k_remainder: generalized is only valid with divergence forward_kl or reverse_kl, not jsd. Set tail",
        ),
        ("kd", {"teacher": {"top_k_remainder": "generalized"}}, "top_k_remainder requires teacher.top_k"),
        (
            "opd",
            {"loss_type": "policy_gradient", "teacher": {"top_k": 4, "top_k_remainder": "generalized"}},
            "generalized is only valid with loss_type forward_kl or reverse_kl, not policy_gradient",
        ),
        ("kd", {"teacher_rest": "residual"}, "top_k_remainder='residual' is only valid with method opd"),
        ("opd", {"rollouts": {"source": ["a"]}}, "is not one of on_policy, frozen, replay"),
        ("opd", {"sampler": {"kind": {}}}, "is not one of policy"),
    ],
)
def test_old_options_that_excluded_each_other_still_do(method, options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        config(method, tmp_path, **options)


def test_the_same_option_under_both_names_is_taken(tmp_path):
    args = config("opd", tmp_path, teacher_top_k=5, teacher={"top_k": None})
    assert args.teacher.top_k == 5
    assert dataclasses.replace(args, teacher_top_k=5).teacher.top_k == 5


def test_a_group_that_is_assigned_later_has_the_defaults_of_its_method(tmp_path):
    for method, merges in (("kd", False), ("opd", True)):
        args = config(method, tmp_path)
        args.teacher = {"top_k": 9}
        args.check_changes()
        assert args.teacher == TeacherOptions(top_k=9, merge_eos=merges)
    args.reward = {"function": "nowhere:grade"}
    args.loss_type, args.num_generations, args.teacher = "policy_gradient", 2, {}
    with pytest.raises(InputError, match=r"nowhere:grade"):
        args.check_changes()


@pytest.mark.parametrize(
    ("then", "changed", "different"),
    [
        ({"skew_alpha": 0.2, "loss_type": "skew_reverse_kl"}, {"beta": 0.2}, []),
        ({"skew_alpha": 0.2, "loss_type": "skew_reverse_kl"}, {"beta": 0.3}, ["beta"]),
        ({"skew_alpha": 0.1, "loss_type": "skew_reverse_kl"}, {}, []),
        ({"rollout": "vllm", "rollout_ahead": 1}, {"sampler": SERVER | {"prefetch": True}}, []),
        ({"rollout": "vllm", "rollout_ahead": 1}, {"sampler": SERVER}, ["sampler.prefetch"]),
        ({"rollout": "vllm"}, {"sampler": SERVER}, []),
        ({"rounds": {"count": 2, "rollout": "transformers"}}, {"rounds": {"count": 2, "sampler": POLICY}}, []),
        ({"rounds": {"sampler": "policy"}}, {"rounds": {"sampler": POLICY}}, []),
        ({"rounds": {"sampler": "vllm"}}, {"rounds": {"sampler": {"kind": "vllm", "prefetch": False}}}, []),
        (
            {"rounds": {"sampler": POLICY}},
            {"rounds": {"sampler": POLICY | {"batch_size": 2}}},
            ["rounds.sampler.batch_size"],
        ),
        (
            {"rounds": {"rollout": "vllm"}},
            {"rounds": {"sampler": POLICY}},
            ["rounds.sampler.kind", "rounds.sampler.prefetch"],
        ),
    ],
)
def test_options_of_the_last_release_in_a_checkpoint(then, changed, different, tmp_path):
    groups = METHODS["opd"].groups
    rounds = changed.pop("rounds", None)
    args = config("opd", tmp_path, **{"loss_type": then.get("loss_type", "reverse_kl")} | changed)
    now = {key: options and options.fingerprint() for key, options in ((key, getattr(args, key)) for key in groups)}
    now |= {"beta": args.beta, "loss_type": args.loss_type, "rounds": rounds}
    old = {"method": "opd", "rollouts": "live", "horizon": None, "beta": None, "one_stop_outcome": True, "rounds": None}
    found = run_fingerprint.differences(old | {"loss_type": args.loss_type} | then, now, None, groups)
    assert sorted(found) == different


@pytest.mark.parametrize(("options", "written"), [
    ({}, "on_policy"),
    ({"rollouts": {"source": "replay"}}, "replay"),
    ({"rollouts": {"source": "replay", "replay_steps": 3}}, "{source: replay, replay_steps: 3}"),
])  # fmt: skip
def test_a_group_is_shown_as_a_recipe_has_it(options, written, tmp_path):
    assert str(OPDConfig(str(tmp_path), use_cpu=True, **options).rollouts) == written
    assert str(OPDConfig(str(tmp_path), use_cpu=True, teacher={"top_k": 4}).teacher) == "{top_k: 4, merge_eos: True}"


@pytest.mark.parametrize(("config", "options", "message"), [
    (DPOConfig, {"beta": "x"}, "beta must be a number or null, not 'x'"),
    (DPOConfig, {"max_length": "a"}, "max_length must be a whole number or null, not 'a'"),
    (OPDConfig, {"num_generations": 1.5}, "num_generations must be a whole number, not 1.5"),
    (OPDConfig, {"temperature": True}, "temperature must be a number, not True"),
    (SFTConfig, {"learning_rate": "fast"}, "learning_rate must be a number, not 'fast'"),
    (SFTConfig, {"packing": 1}, "packing must be true or false, not 1"),
    (KDConfig, {"divergence": None}, "divergence must be a text, not None"),
])  # fmt: skip
def test_an_option_of_another_type_is_rejected_in_python(config, options, message, tmp_path):
    with pytest.raises(InputError, match=re.escape(message)):
        config(str(tmp_path), use_cpu=True, **options)


def test_numbers_of_numpy_and_paths_are_options(tmp_path):
    args = SFTConfig(str(tmp_path), use_cpu=True, learning_rate=np.float32(1e-4), max_length=np.int64(64))
    assert args.max_length == 64
    assert SFTConfig(str(tmp_path), use_cpu=True, image_folder=tmp_path).image_folder == tmp_path
    args.max_length = "64"
    with pytest.raises(InputError, match="max_length must be a whole number or null, not '64'"):
        args.check_changes()
