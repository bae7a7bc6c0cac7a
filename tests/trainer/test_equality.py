"""The same numbers whatever flag you flip: loss and every gradient, fp32, against plain full-logits versions.

Each case runs one optimizer step of the real trainer. The policy is moved away from its reference first where that
matters, so that no loss sits at its starting value.
"""

import copy
import itertools

import peft
import pytest
import torch
import transformers as tf
from architectures import tiny
from models_for_tests import CONFIGS, tiny_model
from plain_for_tests import PLAIN, slow_score
from training_for_tests import (
    METHODS,
    assert_same_step,
    fake_generate,
    fix_rollouts,
    has_head,
    names_where,
    one_step,
    quick,
    second_model,
    token_rows,
    trainer_for,
)

from hf_posttrain.errors import InputError
from hf_posttrain.generation.rollout import generate as GENERATE
from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.methods.kto_pairing import find_partners
from hf_posttrain.scoring import forward, head

ARCHITECTURES = [name for name in CONFIGS if name != "gpt2"]


@pytest.fixture(autouse=True)
def _fixed_rollouts(monkeypatch):
    fix_rollouts(monkeypatch)


def second_for(method, architecture):
    """The model alongside the policy: a teacher, or a reference that is not the policy (no loss is at its start)."""
    return second_model(method, architecture, teachers_only=False)


def step(method, architecture, tmp_path, rows=None, **config):
    """One step of a fresh model."""
    rows = token_rows(method) if rows is None else rows
    return one_step(method, tiny_model(architecture), rows, tmp_path, second=second_for(method, architecture), **config)


def partners_of(method, rows, tmp_path):
    if not TABLE[method].rows.labeled:
        return None
    trainer = trainer_for(method, tiny_model(), rows, tmp_path)
    return find_partners(trainer.train_dataset, trainer.args.seed)


def cases(methods):
    """Each method with each architecture. Quick: two architectures (one of them caps its logits), and DPO with all."""
    for method, architecture in itertools.product(methods, ARCHITECTURES):
        if not has_head(method, architecture):
            continue
        slow = architecture not in ("qwen3", "gemma2") and method != "dpo"
        yield pytest.param(method, architecture, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize(("method", "architecture"), cases(PLAIN))
def test_trainer_equals_plain_full_logits(method, architecture, tmp_path):
    rows, policy, second = token_rows(method, 4), tiny_model(architecture), second_for(method, architecture)
    plain = PLAIN[method](
        policy, list(rows), reference=second, teacher=second, partner=partners_of(method, rows, tmp_path),
        rollouts=fake_generate(None, rows["prompt_ids"], 6, [258]),
    )  # fmt: skip
    plain.backward()
    expected = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert_same_step(step(method, architecture, tmp_path, rows), (plain.item(), expected))


@pytest.mark.parametrize(("method", "architecture"), cases(names_where(lambda method: method.second != "teacher")))
def test_fused_scores_train_as_full_logits_do(method, architecture, tmp_path, monkeypatch):
    """A method's own losses, on scores of each answer alone from the model's own forward."""
    found = step(method, architecture, tmp_path)
    monkeypatch.setattr(forward, "score", slow_score)
    assert_same_step(found, step(method, architecture, tmp_path, layout="padded"))


@pytest.mark.parametrize(("method", "architecture"), cases(METHODS))
def test_layouts_agree(method, architecture, tmp_path):
    expected = step(method, architecture, tmp_path, layout="padded")
    for layout in ("shared", "packed"):
        assert_same_step(step(method, architecture, tmp_path, layout=layout), expected)


SHAPE = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 256, "eos_token_id": 258, "bos_token_id": None,
}  # fmt: skip
STATES = {
    "qwen3_next": lambda: tf.Qwen3NextConfig(
        **SHAPE, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=0, mlp_only_layers=[0, 1, 2, 3],
    ),
    "lfm2": lambda: tf.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"] * 2),
    "mamba2": lambda: tf.Mamba2Config(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16,
                                      n_groups=1, state_size=8, pad_token_id=256, bos_token_id=0, eos_token_id=258),
}  # fmt: skip

PADDED = {"mamba2": "the architecture declares no attention that supports a custom mask"}
"""Architectures without the other layouts -> the error."""
if "lfm3" not in tf.CONFIG_MAPPING:  # before, decoder layers of LFM2 do not pass on the arguments of a model's forward
    PADDED["lfm2"] = "its scores differ from its own forward. Use layout=padded"


@pytest.mark.parametrize("architecture", STATES)
def test_the_state_of_a_layer_keeps_to_its_row(architecture, tmp_path):
    """Linear attention, convolution, Mamba: a batch is its rows one by one, in every layout (Mamba alone is padded, and
    others are refused) and in generation from padded prompts, after a long batch too."""
    torch.manual_seed(0)
    model, rows = tf.AutoModelForCausalLM.from_config(STATES[architecture]()).float().eval(), token_rows("dpo")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.dim() > 1 else 1.0)
    sizes = [{"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}]
    together, alone = (one_step("dpo", model, rows, tmp_path, second=copy.deepcopy(model), **size) for size in sizes)
    assert_same_step(together, alone, relative=1e-4)
    for layout in ("shared", "packed"):
        if architecture in PADDED:
            with pytest.raises(InputError, match=PADDED[architecture]):
                one_step("dpo", model, rows, tmp_path, layout=layout)
        else:
            options = {"second": copy.deepcopy(model), "layout": layout}
            assert_same_step(one_step("dpo", model, rows, tmp_path, **options), alone, relative=1e-4)
    prompts = [[1, 2, 3], [4], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12]]
    found = GENERATE(model, prompts, 6, [], 256)
    assert found == [GENERATE(model, [prompt], 6, [], 256)[0] for prompt in prompts]
    ids = list(prompts[1])  # without a cache: obviously right
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert found[1] == ids[1:]


def test_packed_rows_of_gemma_4_train_as_padded_ones(tmp_path):
    torch.manual_seed(0)
    config = tf.Gemma4TextConfig(
        **SHAPE, sliding_window=5, hidden_size_per_layer_input=8, vocab_size_per_layer_input=300,
        num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config).float()
    expected = one_step("sft", model, token_rows("sft"), tmp_path, layout="padded")
    assert_same_step(one_step("sft", model, token_rows("sft"), tmp_path, layout="packed"), expected, relative=1e-4)


def lora():
    return peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


@pytest.mark.parametrize(
    ("method", "architecture", "adapted"),
    [
        pytest.param(
            method, name, adapted,
            marks=[] if name == "qwen3" and adapted is (method in ("kto", "opd")) else pytest.mark.slow,
        )
        for method in METHODS
        for name, adapted in [*zip(ARCHITECTURES, itertools.repeat(False)), ("qwen3", True), ("gemma3", True)]
        if has_head(method, name)
    ],
)  # fmt: skip
def test_accumulation_does_not_matter(method, architecture, adapted, tmp_path):
    runs = []
    for size, accumulation in ((4, 1), (2, 2), (1, 4)):
        torch.manual_seed(3)  # of the adapter
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        runs.append(step(method, architecture, tmp_path, peft_config=lora() if adapted else None, **sizes))
    for run in runs[1:]:
        assert_same_step(run, runs[0])


@pytest.mark.parametrize("layout", quick("shared", among=("shared", "packed", "padded")))
@pytest.mark.parametrize("method", METHODS)
def test_lora_layouts_agree_with_the_merged_model(method, layout, tmp_path):
    """The adapter's loss is that of a full model that holds the merged weights."""
    torch.manual_seed(3)
    adapted = peft.get_peft_model(tiny_model(), lora())
    merged = copy.deepcopy(adapted).merge_and_unload().requires_grad_(True)
    rows, second = token_rows(method), second_for(method, "qwen3")
    expected, _ = one_step(method, merged, rows, tmp_path, second=copy.deepcopy(second), layout="padded")
    found, gradients = one_step(method, adapted, rows, tmp_path, second=second, layout=layout)
    assert found == pytest.approx(expected, rel=1e-5)
    assert all("lora" in name for name in gradients)


@pytest.mark.parametrize(
    ("architecture", "reference"),
    [("qwen3", kind) for kind in ("base", "started adapter", "copy", "explicit")]
    + [pytest.param(name, "copy", marks=pytest.mark.slow) for name in ARCHITECTURES if name != "qwen3"],
)
@pytest.mark.parametrize("method", names_where(lambda method: method.second == "reference"))
def test_cached_reference_equals_online(method, architecture, reference, tmp_path):
    """Three real steps, so that a reference that moved with the policy would be seen; an odd number of rows."""

    def run(**config):
        torch.manual_seed(3)
        model, extra = tiny_model(architecture), {}
        if reference == "started adapter":
            model = peft.get_peft_model(model, lora())
        if reference == "base":
            extra["peft_config"] = peft.LoraConfig(r=4, target_modules="all-linear")
        if reference == "explicit":
            extra["second"] = tiny_model(seed=9)
        config |= {"max_steps": 3, "learning_rate": 1e-3, "eval_strategy": "steps", "eval_steps": 3}
        rows = token_rows(method, 7)
        trainer = trainer_for(method, model, rows, tmp_path, eval_rows=rows.select(range(5)), **extra, **config)
        trainer.train()
        return trainer

    online, cached = run(), run(precompute_ref_log_probs=True)
    keys = ("loss", "grad_norm", "rewards/margins", "eval_loss", "eval_rewards/margins")
    for before, after in zip(online.state.log_history, cached.state.log_history, strict=True):
        for key in [key for key in keys if key in before]:
            assert after[key] == pytest.approx(before[key], rel=1e-4, abs=1e-5), key
    assert online.state.log_history[-1]["step"] == 3
    assert "ref_logps" in cached.train_dataset.column_names


@pytest.mark.parametrize("method", quick("dpo", "opd", among=METHODS))
def test_flags_of_memory_and_speed_change_nothing(method, tmp_path):
    expected = step(method, "qwen3", tmp_path)
    assert_same_step(step(method, "qwen3", tmp_path, activation_checkpointing=True), expected)
    assert_same_step(step(method, "qwen3", tmp_path, dataloader_num_workers=1), expected)


@pytest.mark.parametrize("method", quick("kto", "kd", among=METHODS))
def test_recomputed_and_kept_tiles_agree(method, tmp_path, monkeypatch):
    expected = step(method, "gemma2", tmp_path)
    monkeypatch.setattr(head, "TILE_ELEMENTS", 900)  # 3 tokens of 300 logits
    monkeypatch.setattr(head, "MIN_TILE_ROWS", 1)
    assert_same_step(step(method, "gemma2", tmp_path), expected)
    monkeypatch.setattr(head, "MAX_KEPT_ELEMENTS", 0)
    assert_same_step(step(method, "gemma2", tmp_path), expected)


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
@pytest.mark.parametrize("method", quick("dpo", "opd", among=METHODS))
def test_router_loss_does_not_depend_on_the_layout(method, coefficient, tmp_path):
    config = {"router_aux_loss_coef": coefficient}
    expected = step(method, "qwen3_moe", tmp_path, layout="padded", **config)
    for layout in ("shared", "packed"):
        assert_same_step(step(method, "qwen3_moe", tmp_path, layout=layout, **config), expected)
    if coefficient:
        assert expected[0] > step(method, "qwen3_moe", tmp_path, router_aux_loss_coef=0.0)[0] + 0.05


@pytest.mark.parametrize("name", ["mixtral", "jetmoe"])
def test_router_loss_is_that_of_transformers(name, tmp_path):
    """Over the tokens that are read, with the weight of the model's config, for which JetMoE has another name."""
    model, rows = tiny(name), token_rows("sft").select([0])
    model.config.output_router_logits = True
    setattr(model.config, "aux_loss_coef" if name == "jetmoe" else "router_aux_loss_coef", 0.5)
    read = torch.tensor([rows[0]["prompt_ids"] + rows[0]["completion_ids"]])[:, :-1]
    with torch.no_grad():
        balance = model.eval()(input_ids=read, output_router_logits=True, use_cache=False).aux_loss
    found = []
    for coef in (None, 0.0):
        config = {"router_aux_loss_coef": coef, "per_device_train_batch_size": 1}
        found.append(one_step("sft", copy.deepcopy(model), rows, tmp_path, **config)[0])
    assert found[0] - found[1] == pytest.approx(0.5 * balance.item(), abs=1e-5)


def test_a_router_without_such_a_loss_is_refused_where_one_is_asked_for(tmp_path, caplog):
    """With the switch of the model's config alone it trains, and says that nothing is balanced."""
    model = tiny("glm4_moe")
    model.config.output_router_logits = True
    with pytest.raises(InputError, match=r"this model has no load-balancing loss\. Remove the option"):
        trainer_for("sft", model, token_rows("sft"), tmp_path, router_aux_loss_coef=0.5)
    assert not caplog.text
    trainer_for("sft", model, token_rows("sft"), tmp_path).train()
    assert "so its routers are not balanced" in caplog.text
