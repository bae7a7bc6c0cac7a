"""The reference of DPO and KTO: what it is, that it never moves, that its cache is right and notices every change."""

import copy
import json
import logging
import math
import re
from functools import partial

import datasets
import peft
import pyarrow as pa
import pytest
import torch
from accelerate import Accelerator
from architectures import tiny
from models_for_tests import tiny_model
from peft.tuners.tuners_utils import BaseTunerLayer
from training_for_tests import LORA, names_where, token_rows, trainer_for

import hf_posttrain
from hf_posttrain import DPOConfig, DPOTrainer
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.models import score_cache
from hf_posttrain.models.config import ModelSection
from hf_posttrain.models.frozen import branch_logps
from hf_posttrain.models.reference import REFERENCE_ADAPTER
from hf_posttrain.recipe.read import train_config
from hf_posttrain.recipe.sections import DataSection, Recipe, Source
from hf_posttrain.scoring import forward as scoring
from hf_posttrain.scoring.head import LogProb

LN2 = 0.6931472


def lora(**options):
    return peft.LoraConfig(r=4, target_modules="all-linear", **options)


def parameters_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_sft_lora_continues_into_dpo_with_one_base(tmp_path):
    sft = trainer_for(
        "sft", tiny_model(), token_rows("sft"), tmp_path, max_steps=3, learning_rate=1e-2, peft_config=lora()
    )
    sft.train()
    sft.save_model(tmp_path / "adapter")
    base = tiny_model()
    size = sum(p.numel() for p in base.parameters())
    policy = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)

    dpo = trainer_for("dpo", policy, token_rows("dpo"), tmp_path, max_steps=4, learning_rate=1e-2)
    assert not dpo.second_models  # no second base
    adapters = sum(p.numel() for name, p in dpo.model.named_parameters() if "lora_" in name)
    assert sum(p.numel() for p in dpo.model.parameters()) == size + adapters
    assert adapters == 2 * sum(p.numel() for n, p in sft.model.named_parameters() if "lora_" in n)
    before = {n: p for n, p in parameters_of(dpo.model).items() if f".{REFERENCE_ADAPTER}." in n}
    dpo.train()
    first, last = dpo.state.log_history[0], dpo.state.log_history[3]
    assert first["loss"] == pytest.approx(LN2, abs=1e-5)
    assert first["rewards/chosen"] == pytest.approx(0, abs=1e-5)
    assert last["loss"] < 0.6
    assert before
    assert all(torch.equal(p, dict(dpo.model.named_parameters())[name]) for name, p in before.items())

    dpo.save_model(tmp_path / "done")
    assert not (tmp_path / "done" / REFERENCE_ADAPTER).exists()
    again = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / "done")
    trained = peft.get_peft_model_state_dict(dpo.model, adapter_name="default")
    for name, value in peft.get_peft_model_state_dict(again).items():
        assert torch.equal(value, trained[name])


@pytest.mark.parametrize("method", names_where(lambda method: method.second == "reference"))
def test_a_policy_changed_in_memory_is_its_own_reference(method, tmp_path):
    policy = tiny_model()
    policy.config._name_or_path = "somebody/elses-model"  # a reload by name would fail, or find other weights
    with torch.no_grad():
        policy.model.layers[0].mlp.up_proj.weight.mul_(1.7)
    trainer = trainer_for(method, policy, token_rows(method), tmp_path, max_steps=3, learning_rate=1e-3)
    before = parameters_of(trainer.second_models[0].model)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0.5 if TABLE[method].rows.labeled else LN2, abs=1e-5)
    assert all(torch.equal(p, before[name]) for name, p in trainer.second_models[0].model.named_parameters())
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_a_resumed_run_keeps_the_first_reference(tmp_path):
    """The policy of the checkpoint has moved; its reference is still the model that the run began with."""
    config = {"max_steps": 4, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2}
    trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path, **config).train()
    resumed = trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path, **config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    log = next(log for log in resumed.state.log_history if log["step"] == 3)
    assert log["rewards/margins"] > 0.1  # against a reference loaded from the checkpoint it would be 0


def test_a_policy_that_starts_away_from_its_reference_warns(tmp_path, caplog):
    for dropout, expected in ((False, True), (True, False)):
        caplog.clear()
        model = tiny_model("gpt2")
        trainer = trainer_for("dpo", model, token_rows("dpo"), tmp_path, disable_dropout=dropout)
        with caplog.at_level(logging.WARNING):
            trainer.train()
        assert ("differs from its reference" in caplog.text) == expected


def test_rows_whose_scores_are_of_another_model_are_named(tmp_path, caplog):
    trainer = trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path, precompute_ref_log_probs=True)
    add = lambda row: {"ref_logps": [score + 9 * (row["index"] in (1, 2)) for score in row["ref_logps"]]}  # noqa: E731
    trainer.train_dataset = trainer.train_dataset.map(add)
    trainer.scored_rows.append(trainer.train_dataset)  # or they would not be taken
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "in 2 of 4 rows, prepared row 1 first" in caplog.text


@pytest.mark.parametrize("method", names_where(lambda method: method.second == "reference"))
def test_disable_dropout_reaches_lora_and_attention(method, tmp_path):
    model = tiny_model(attention_dropout=0.3)
    trainer = trainer_for(method, model, token_rows(method), tmp_path, peft_config=lora(lora_dropout=0.3))
    rates = [m.p for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout)]
    rates += [m.attention_dropout for m in trainer.model.modules() if hasattr(m, "attention_dropout")]
    assert rates
    assert not any(rates)


NOISY = {
    "starcoder2": ("residual_dropout", "attention_dropout", "embedding_dropout"),
    "falcon": ("hidden_dropout", "attention_dropout"),  # read from the config in each forward
    "persimmon": ("hidden_dropout", "attention_dropout"),
    "mixtral": ("attention_dropout", "router_jitter_noise"),
    "phimoe": ("attention_dropout", "input_jitter_noise"),  # its router also draws experts in training
}


@pytest.mark.parametrize("name", NOISY)
def test_disable_dropout_reaches_rates_by_any_name(name, tmp_path, caplog):
    model = tiny(name, **dict.fromkeys(NOISY[name], 0.5))
    with caplog.at_level(logging.INFO):
        trainer = trainer_for("dpo", copy.deepcopy(model), token_rows("dpo"), tmp_path)
    assert "disable_dropout: disabled" in caplog.text
    assert all(rate.removeprefix("router_") in caplog.text for rate in NOISY[name])
    policy, ids = trainer.model, torch.arange(20)[None]
    with torch.no_grad():
        expected = model(ids).logits  # in eval mode
        assert torch.equal(policy.train()(ids, use_cache=False).logits, expected)
        assert not torch.equal(model.train()(ids, use_cache=False).logits, expected)
    # what is saved has the rates that the model came with, and the policy goes on without
    trainer.save_model(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert all(config[rate] == 0.5 for rate in NOISY[name])
    with torch.no_grad():
        assert torch.equal(policy.train()(ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("made", [
    partial(peft.LoHaConfig, rank_dropout=0.5, module_dropout=0.5),
    partial(peft.LoKrConfig, rank_dropout=0.5, module_dropout=0.5),
    partial(peft.BOFTConfig, boft_block_size=4, boft_dropout=0.5),
], ids=["loha", "lokr", "boft"])  # fmt: skip
def test_disable_dropout_reaches_adapters_that_keep_their_own_rates(made, tmp_path):
    """In a dictionary, or in a dropout that is none of torch's."""
    config = made(target_modules=["q_proj", "v_proj"], init_weights=False)
    rows, ids = token_rows("dpo"), torch.arange(20)[None]
    trainer = trainer_for("dpo", tiny_model("llama"), rows, tmp_path, peft_config=config)
    batch, policy = trainer.data_collator([trainer.train_dataset[n] for n in range(4)]), trainer.model
    before = trainer.reference.logps(policy, batch)
    trainer.save_model(tmp_path / "saved")
    assert torch.equal(trainer.reference.logps(policy, batch), before)
    with torch.no_grad():
        assert torch.equal(policy.train()(ids, use_cache=False).logits, policy.eval()(ids, use_cache=False).logits)
    trainer_for("dpo", policy, rows, tmp_path)
    policy = trainer_for("sft", policy, token_rows("sft"), tmp_path, disable_dropout=False).model
    with torch.no_grad():
        noisy = {policy.train()(ids, use_cache=False).logits.sum().item() for _ in range(9)}
    assert len(noisy) > 1


@pytest.mark.parametrize("method", names_where(lambda method: method.second == "reference"))
def test_the_reference_of_an_adapter_with_biases_stays(method, tmp_path):
    """It trains biases of the base, which are not gone when it is switched off."""
    trainer = trainer_for(
        method, tiny_model("gpt2"), token_rows(method), tmp_path, peft_config=lora(bias="all"), max_steps=2,
        learning_rate=0.1, num_train_epochs=1,
    )  # fmt: skip
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(4)])
    before = trainer.reference.logps(trainer.model, batch)
    trainer.train()
    assert torch.equal(trainer.reference.logps(trainer.model, batch), before)


def test_an_adapter_that_trains_biases_is_continued_where_the_base_has_none(tmp_path):
    policy = peft.get_peft_model(tiny_model("llama"), lora(bias="all", init_lora_weights=False))
    trainer = trainer_for("dpo", policy, token_rows("dpo"), tmp_path, max_steps=2, learning_rate=0.1)
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(4)])
    with torch.no_grad():
        before = branch_logps(policy, batch).view(4, -1)
    trainer.train()
    torch.testing.assert_close(trainer.reference.logps(trainer.model, batch), before)


def test_the_next_trainer_of_a_model_has_its_dropout_again(tmp_path):
    model = tiny_model("gpt2")
    rates = lambda: sorted(m.p for m in model.modules() if isinstance(m, torch.nn.Dropout))  # noqa: E731
    own = rates()
    trainer_for("dpo", model, token_rows("dpo"), tmp_path, disable_dropout=True)
    assert {*rates()} == {0.0}
    trainer_for("sft", model, token_rows("sft"), tmp_path, disable_dropout=False)
    assert rates() == own
    assert model.config.attn_pdrop == own[0] > 0


@pytest.mark.parametrize("method", names_where(lambda method: method.second == "reference"))
def test_the_reference_of_a_base_with_unfrozen_weights_stays(method, tmp_path):
    policy = peft.get_peft_model(tiny_model("llama"), lora())
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or "norm" in name)
    trainer = trainer_for(method, policy, token_rows(method), tmp_path, max_steps=2, learning_rate=0.1)
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(4)])
    before = trainer.reference.logps(trainer.model, batch)
    trainer.train()
    assert torch.equal(trainer.reference.logps(trainer.model, batch), before)


def test_trained_copies_and_tokens_of_an_adapter_need_no_second_model(tmp_path):
    for option in ({"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [5, 6]}):
        trainer = trainer_for(
            "dpo", tiny_model("llama"), token_rows("dpo"), tmp_path, peft_config=lora(**option), max_steps=2,
            learning_rate=0.1,
        )  # fmt: skip
        assert not trainer.second_models
        batch = trainer.data_collator([trainer.train_dataset[n] for n in range(4)])
        before = trainer.reference.logps(trainer.model, batch)
        trainer.train()
        assert torch.equal(trainer.reference.logps(trainer.model, batch), before)


def test_two_active_adapters_are_refused(tmp_path):
    """PEFT would save and merge one of them."""
    policy = peft.get_peft_model(tiny_model("llama"), lora(init_lora_weights=False))
    policy.add_adapter("other", lora(init_lora_weights=False))
    policy.base_model.set_adapter(["default", "other"])
    with pytest.raises(InputError, match=r"several adapters are active \(default, other\)"):
        trainer_for("dpo", policy, token_rows("dpo"), tmp_path)


def test_a_continued_adapter_may_have_any_name(tmp_path):
    policy = peft.get_peft_model(tiny_model("llama"), lora(init_lora_weights=False), adapter_name="reference")
    trainer = trainer_for("dpo", policy, token_rows("dpo"), tmp_path, max_steps=2, learning_rate=0.1)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(LN2, abs=1e-5)
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "reference" / "adapter_model.safetensors").exists()


def test_each_round_of_training_one_adapter_begins_at_its_own_reference(tmp_path):
    """Iterative DPO: the policy of one trainer goes into the next, with the copy that was its reference."""
    rows, config = token_rows("dpo"), {"learning_rate": 1e-2}
    policy = trainer_for("dpo", tiny_model(), rows, tmp_path, peft_config=peft.LoraConfig(**LORA)).model
    losses = []
    for _ in range(3):
        trainer = trainer_for("dpo", policy, rows, tmp_path, **config)
        trainer.train()
        losses += [trainer.state.log_history[0]["loss"], trainer.evaluate(rows)["eval_loss"]]
    assert losses[::2] == pytest.approx([0.6931472] * 3, abs=1e-5)
    assert all(abs(loss - 0.6931472) > 1e-3 for loss in losses[1::2])
    assert sorted(policy.peft_config) == ["default", REFERENCE_ADAPTER]


@pytest.mark.parametrize(
    "config",
    [
        peft.AdaLoraConfig(r=4, init_r=4, target_r=2, total_step=10, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    ],
    ids=["adalora", "prompt tuning"],
)
def test_adapters_that_need_more_than_a_forward_are_refused_new_and_continued(config, tmp_path):
    for given in ({"peft_config": config}, {}):
        model = tiny_model("llama") if given else peft.get_peft_model(tiny_model("llama"), config)
        with pytest.raises(InputError, match="Use an adapter that acts only inside layers"):
            trainer_for("dpo", model, token_rows("dpo"), tmp_path, **given)


def test_cache_notices_what_changes_the_numbers(tmp_path):
    keys = []

    def key_of(model, rows, **config):
        trainer = trainer_for("dpo", model, rows, tmp_path, **config)
        return score_cache.model_key(trainer.model), score_cache.rows_key(trainer.train_dataset)

    rows = token_rows("dpo")
    base = key_of(tiny_model(), rows)
    assert key_of(tiny_model(), rows) == base
    assert key_of(tiny_model(seed=1), rows)[0] != base[0]
    assert key_of(tiny_model(), rows, max_length=6)[1] != base[1]
    assert key_of(tiny_model(), token_rows("dpo", seed=1))[1] != base[1]
    assert key_of(tiny_model(), rows.select([1, 0, *range(2, 8)]))[1] != base[1]
    keys.append(base)


def test_eval_rows_are_scored_by_the_reference_not_the_trained_policy(tmp_path):
    rows = token_rows("dpo")
    trainer = trainer_for(
        "dpo", tiny_model(), rows, tmp_path, eval_rows=rows.select(range(5)), precompute_ref_log_probs=True,
        max_steps=4, learning_rate=1e-2,
    )  # fmt: skip
    assert not trainer.second_models
    # before training, the policy scores other rows as its own reference
    first = trainer.evaluate(token_rows("dpo", seed=3))
    assert first["eval_rewards/margins"] == 0
    assert first["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    trainer.train()
    assert trainer.evaluate()["eval_rewards/margins"] > 0.1
    with pytest.raises(InputError, match="Cannot compute reference log-probs"):
        trainer.evaluate(trainer.prepare(token_rows("dpo", seed=3), trainer.tokenizer, trainer.args, "other"))


def test_second_run_takes_the_cache(tmp_path, monkeypatch):
    rows, model = token_rows("dpo", seed=8), tiny_model(seed=8)
    first = trainer_for("dpo", copy.deepcopy(model), rows, tmp_path, precompute_ref_log_probs=True)
    monkeypatch.setattr(score_cache, "score_rows", lambda *args: pytest.fail("scored again"))
    second = trainer_for("dpo", copy.deepcopy(model), rows, tmp_path, precompute_ref_log_probs=True)
    assert first.train_dataset["ref_logps"][:] == second.train_dataset["ref_logps"][:]


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("planned", "cached"),
    [({"max_steps": 2}, False), ({"max_steps": 3}, True), ({"max_steps": 1, "per_device_train_batch_size": 64}, False),
     ({"max_steps": -1, "num_train_epochs": 1}, False),
     ({"max_steps": -1, "num_train_epochs": 2}, True)],
)  # fmt: skip
def test_left_to_itself_the_reference_scores_once_what_is_seen_twice(planned, cached, lora, tmp_path, caplog):
    rows = token_rows("dpo")  # 8, two steps a pass
    given = {"peft_config": peft.LoraConfig(**LORA)} if lora else {}
    with caplog.at_level(logging.INFO):
        trainer = trainer_for(
            "dpo", tiny_model(), rows, tmp_path, eval_rows=rows.select(range(5)), learning_rate=1e-2,
            precompute_ref_log_probs=None, **planned, **given,
        )  # fmt: skip
    for part in (trainer.train_dataset, trainer.eval_dataset):
        assert ("ref_logps" in part.column_names) == cached
    assert ("scored once in advance" in caplog.text) == cached
    trainer.train()
    online = trainer.prepare(token_rows("dpo").select(range(5)), trainer.tokenizer, trainer.args, "other")
    later = trainer.evaluate(online)  # rows that come later are scored by the reference that was kept
    assert trainer.evaluate()["eval_loss"] == pytest.approx(later["eval_loss"], rel=1e-5)
    assert later["eval_rewards/margins"] > 0.01


def test_chosen_change_is_logged_and_nll_lifts_it(tmp_path):
    changes = {}
    for coefficient in (0.0, 1.0):
        trainer = trainer_for(
            "dpo", tiny_model(), token_rows("dpo"), tmp_path, max_steps=8, learning_rate=3e-3, nll_coef=coefficient
        )
        trainer.train()
        changes[coefficient] = trainer.state.log_history[7]["logps/chosen_change"]
    assert changes[1.0] > changes[0.0] + 0.1


@pytest.mark.parametrize("loss_type", ["simpo", "orpo"])
def test_reference_free_losses_keep_no_reference(loss_type, tmp_path):
    trainer = trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path, loss_type=loss_type, max_steps=2)
    assert trainer.reference is None
    trainer.train()
    assert trainer.args.beta == (2.0 if loss_type == "simpo" else 0.1)
    problem = f"ref_model has no effect: loss_type {loss_type} does not use a reference. Remove ref_model"
    with pytest.raises(InputError, match=f"^{re.escape(problem)}$"):
        trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path, loss_type=loss_type, second=tiny_model())
    config = DPOConfig(output_dir=str(tmp_path), use_cpu=True, loss_type=loss_type)
    with pytest.raises(InputError, match=f"^{re.escape(problem)}$"):  # before anything is loaded
        DPOTrainer("no/such/model", args=config, train_dataset=token_rows("dpo"), ref_model="nowhere")
    with pytest.raises(InputError, match=f"^{re.escape(problem)}$"):
        DPOTrainer("no/such/model", config, train_dataset=token_rows("dpo"), ref_model="nowhere")


def test_losses_combine_with_weights(tmp_path):
    single = {}
    for name in ("sigmoid", "ipo"):
        trainer = trainer_for(
            "dpo", tiny_model(), token_rows("dpo"), tmp_path, loss_type=name, second=tiny_model(seed=9)
        )
        trainer.train()
        single[name] = trainer.state.log_history[0]["loss"]
    both = trainer_for(
        "dpo", tiny_model(), token_rows("dpo"), tmp_path, loss_type=["sigmoid", "ipo"], loss_weights=[0.8, 0.1],
        second=tiny_model(seed=9),
    )  # fmt: skip
    both.train()
    expected = 0.8 * single["sigmoid"] + 0.1 * single["ipo"]
    assert both.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_recipe_may_name_one_loss_or_a_list():
    for given in ("ipo", ["ipo"]):
        train = {"output_dir": "z", "loss_type": given}
        recipe = Recipe("dpo", ModelSection("x"), DataSection(Source("y")), train=train)
        assert train_config(recipe, hf_posttrain.DPOConfig).loss_type == ["ipo"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"loss_type": "sigmod"}, "is not one of"), ({"loss_type": "exo_pair"}, "requires label_smoothing above 0"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "below 0.5"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "not with loss_type 'ipo'"),
        ({"loss_weights": [1.0, 2.0]}, "2 values for 1 loss_type"),
        ({"beta": 0.0}, "must be positive"), ({"beta": 1e-30}, "must be positive"),
        ({"loss_weights": [-1.0]}, "numbers from 0 to 1e6"), ({"loss_weights": [1e400]}, "numbers from 0 to 1e6"),
        ({"loss_weights": "half"}, "numbers from 0 to 1e6"), ({"loss_weights": [0]}, "and not all 0"),
        ({"loss_type": ["simpo", "sigmoid"]}, "Set beta"), ({"label_smoothing_factor": 0.1}, "is not supported"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(config, message, tmp_path):
    with pytest.raises(InputError, match=message):
        trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path, **config)


@pytest.mark.parametrize("loss_type", ["kto", "bco", "apo_zero_unpaired"])
def test_cached_equals_online_for_every_unpaired_loss(loss_type, tmp_path):
    logs = []
    for cached in (False, True):
        trainer = trainer_for(
            "kto", tiny_model(), token_rows("kto", 7), tmp_path, max_steps=3, learning_rate=1e-3, loss_type=loss_type,
            precompute_ref_log_probs=cached,
        )  # fmt: skip
        trainer.train()
        logs.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)


def test_a_pissa_adapter_keeps_the_policy_as_it_was(tmp_path):
    policy = peft.get_peft_model(tiny_model(), lora(init_lora_weights="pissa"))
    ids = torch.tensor([[1, 2, 3]])
    before = policy(ids).logits
    trainer = trainer_for("dpo", policy, token_rows("dpo"), tmp_path)
    torch.testing.assert_close(trainer.model(ids).logits, before)


def test_an_explicit_reference_is_not_replaced_by_the_base_for_other_rows(tmp_path):
    trainer = trainer_for(
        "dpo", tiny_model(), token_rows("dpo"), tmp_path, second=tiny_model(seed=9), peft_config=lora(),
        precompute_ref_log_probs=True,
    )  # fmt: skip
    with pytest.raises(InputError, match="Cannot compute reference log-probs"):
        trainer.evaluate(token_rows("dpo", seed=5))


def test_equal_rows_share_a_cache_whatever_made_them():
    rows = token_rows("dpo")
    again = rows.map(lambda row: row, load_from_cache_file=False)
    assert again._fingerprint != rows._fingerprint
    assert score_cache.rows_key(again) == score_cache.rows_key(rows)


def test_the_key_of_an_adapters_config_is_the_same_in_every_process():
    """Python orders the strings of a set anew in each process."""
    config = peft.LoraConfig(target_modules={"q_proj", "k_proj", "v_proj", "o_proj", "up_proj"}).to_dict()
    written = json.loads(json.dumps(config, default=score_cache.json_default))
    assert written["target_modules"] == ["k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def test_the_key_of_a_model_has_the_config_of_its_active_adapter():
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, lora_alpha=2, target_modules="all-linear"))
    key, base = score_cache.model_key(model), score_cache.model_key(model, with_adapter=False)
    model.peft_config["default"].lora_alpha = 4  # scales what the same weights compute
    assert score_cache.model_key(model) != key
    assert score_cache.model_key(model, with_adapter=False) == base


def test_the_key_of_a_model_says_which_adapters_are_on():
    """Two of one config; the weights of both are in the state dict whichever is on."""
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(), config, adapter_name="a")
    model.add_adapter("b", config)
    keys = [score_cache.model_key(model)]
    model.set_adapter("b")
    keys.append(score_cache.model_key(model))
    model.base_model.set_adapter(["a", "b"])
    keys.append(score_cache.model_key(model))
    with model.disable_adapter():
        keys.append(score_cache.model_key(model))
    for layer in (module for module in model.modules() if isinstance(module, BaseTunerLayer)):
        layer.set_scale("a", 3.0)
    keys.append(score_cache.model_key(model))
    assert len({*keys}) == 5


@pytest.mark.parametrize("left", ["an empty folder", "cut files", "whole record batches"])
def test_a_cache_that_was_tidied_up_is_made_again(left, tmp_path, monkeypatch):
    """Also one that a full disk has cut between two record batches, which Arrow reads without an error."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    values = [*range(2500)]
    accelerator, made = Accelerator(cpu=True), []
    parts = [[{"x": value} for value in values[start : start + 1000]] for start in (0, 1000, 2000)]

    def damage(file):
        if left == "an empty folder":
            file.unlink()
        elif file.suffix == ".arrow":
            data = file.read_bytes()
            reader = pa.ipc.open_stream(source := pa.BufferReader(data))
            reader.read_next_batch()
            file.write_bytes(data[: source.tell() if left == "whole record batches" else 20])

    for _ in range(3):
        found = score_cache.load_or_compute(
            ["key"], len(values), lambda: made.append(0) or parts, "reference", accelerator
        )
        assert found["x"][:] == values
        if len(made) == 1:
            for file in tmp_path.rglob("*.*"):
                damage(file)
    assert len(made) == 2


def test_a_cached_reference_in_bf16_is_that_of_its_layout(tmp_path, monkeypatch):
    """Scores of one layout were taken for another one, where bf16 rounds otherwise: with a real model DPO began at
    0.7061 instead of ln 2."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = token_rows("dpo", 8)
    for number, layout in enumerate(("shared", "packed", "padded"), 1):
        trainer = trainer_for(
            "dpo", tiny_model(), rows, tmp_path, precompute_ref_log_probs=True, bf16=True, layout=layout, max_steps=1,
            logging_steps=1,
        )  # fmt: skip
        trainer.train()
        assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert len([*(tmp_path / "cache/hf_posttrain").glob("reference-*")]) == number


def test_two_runs_may_compute_the_same_cache_at_once(tmp_path, monkeypatch):
    """The second begins and ends while the first computes."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    rows, accelerator = [[{"x": 1}], [{"x": 2}]], Accelerator(cpu=True)

    def compute():
        score_cache.load_or_compute(["key"], 2, lambda: rows, "reference", accelerator)
        return rows

    assert score_cache.load_or_compute(["key"], 2, compute, "reference", accelerator)["x"][:] == [1, 2]
    [folder] = (tmp_path / "hf_posttrain").iterdir()
    assert folder.name.startswith("reference-")


def test_a_reference_that_a_later_trainer_has_replaced_is_refused(tmp_path):
    """Both would keep theirs next to the one adapter; with weights of the whole model each has a copy."""
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(**LORA))
    first = trainer_for("dpo", model, token_rows("dpo"), tmp_path, eval_rows=token_rows("dpo"))
    first.evaluate()
    second = trainer_for("dpo", model, token_rows("dpo"), tmp_path, eval_rows=token_rows("dpo"))
    second.evaluate()
    with pytest.raises(InputError, match=r"^a later trainer of this model has replaced the reference. Build this"):
        first.evaluate()


@pytest.mark.parametrize(
    ("method", "name"), [("dpo", "ref_model is the policy"), ("kd", "teacher_model is the student")]
)
def test_a_second_model_that_shares_trained_weights_is_refused(method, name, tmp_path):
    """They would move in it, or be frozen in the policy; those that are frozen in both may be shared."""
    model, other = tiny_model(), tiny_model(seed=1)
    other.model.layers[0] = model.model.layers[0]
    with pytest.raises(InputError, match=f"{name} itself, or shares weights with it"):
        trainer_for(method, model, token_rows(method), tmp_path, other)
    model.model.layers[0].requires_grad_(False)
    trainer_for(method, model, token_rows(method), tmp_path, other)


def test_a_base_that_is_unfrozen_later_would_move_its_reference(tmp_path):
    trainer = trainer_for("dpo", tiny_model(), token_rows("dpo"), tmp_path, peft_config=peft.LoraConfig(**LORA))
    weight = trainer.model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(InputError, match=r"norm.weight was frozen when the trainer was built, and the reference would"):
        trainer.train()
    weight.requires_grad_(False)
    trainer_for("dpo", trainer.model, token_rows("dpo"), tmp_path).train()


def test_another_adapter_than_the_trainers_is_refused(tmp_path):
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(**LORA))
    model.add_adapter("b", peft.LoraConfig(**LORA))
    trainer = trainer_for("dpo", model, token_rows("dpo"), tmp_path)
    model.set_adapter("b")
    with pytest.raises(InputError, match=r"adapter 'b' is active, but the trainer was built for 'default'"):
        trainer.train()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", names_where(lambda method: method.second == "reference"))
def test_a_copy_under_bf16_keeps_its_products_in_bf16_with_the_same_scores(method, tied, tmp_path):
    """Autocast rounds them at each use anyway. Norms and embeddings stay as they are, and a head that is one."""
    name = "qwen3" if tied else "llama"
    trainer = trainer_for(
        method, tiny_model(name), token_rows(method), tmp_path, precompute_ref_log_probs=False, bf16=True
    )
    policy, copied = trainer.scored
    dtypes = {name: weight.dtype for name, weight in copied.named_parameters()}
    low = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert low == {name for name in dtypes if "_proj" in name} | (set() if tied else {"lm_head.weight"})
    batch = trainer._prepare_inputs(trainer.data_collator([trainer.train_dataset[n] for n in range(4)]))
    with torch.no_grad(), trainer.accelerator.autocast():
        one, other = (scoring.score(model.eval(), batch, LogProb(batch.targets)).value for model in (policy, copied))
    assert torch.equal(one, other)
