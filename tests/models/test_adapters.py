"""Every kind of adapter of the installed PEFT that takes a causal LM: it starts as the base does or says so, the
reference stays, and what is saved and merged is what was trained."""

import copy
import logging
import warnings

import peft
import pytest
import torch
from architectures import tiny
from models_for_tests import tiny_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from training_for_tests import quick, token_rows, trainer_for
from transformers import AutoModelForCausalLM

from hf_posttrain.errors import InputError
from hf_posttrain.models.adapters import add_adapter, describe_adapter, skip_needless_casts

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
TARGETS = ["q_proj", "v_proj"]
OPTIONS = {
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 10}, "BOFT": {"boft_block_size": 4}, "C3A": {"block_size": 8},
    "FOURIERFT": {"n_frequency": 8, "scaling": 50.0},
    "IA3": {"target_modules": ["k_proj", "v_proj"], "feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]}, "OFT": {"oft_block_size": 4}, "VBLORA": {"vector_length": 8},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": list(range(200))},
}  # fmt: skip
"""What a kind needs for a model of 32 columns."""
QUICK = ("LORA", "VERA", "IA3", "OFT", "LN_TUNING")
KINDS = sorted(kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING)
counts: dict[str, list[str]] = {"tried": [], "refused": [], "equal": []}


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def config_of(kind):
    """A small config of a kind of adapter. Raises whatever PEFT does for one that needs more than that."""
    make = next(make for value, make in PEFT_TYPE_TO_CONFIG_MAPPING.items() if value.value == kind)
    options = {"task_type": "CAUSAL_LM", "target_modules": TARGETS} | OPTIONS.get(kind, {})
    return make(**{name: value for name, value in options.items() if name in make.__dataclass_fields__})


def run_with(kind, tmp_path, **options):
    """A DPO run with such an adapter, before it trains, and its base; None where it is refused in one line."""
    counts["tried"].append(kind)
    base = tiny_model("llama")
    try:
        trainer = trainer_for(
            "dpo", copy.deepcopy(base), token_rows("dpo"), tmp_path, peft_config=config_of(kind), max_steps=4,
            learning_rate=3e-2, **options,
        )  # fmt: skip
    except (InputError, ImportError) as error:  # PEFT's config itself wants a package
        counts["refused"].append(f"{kind}: {error}")
        return None, base
    return trainer, base


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_an_adapter_is_what_was_trained(kind, tmp_path, caplog):
    warnings.filterwarnings("ignore")
    trainer, base = run_with(kind, tmp_path)
    if trainer is None:
        return
    before = logits(trainer.model).clone()
    starts_equal = (before - logits(base)).abs().max() < 1e-4
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(4)])
    reference = trainer.reference.logps(trainer.model, batch)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    # the policy starts as its reference does, or that is said
    first = trainer.state.log_history[0]["loss"]
    assert first == pytest.approx(0.6931472, abs=1e-4) or "differs from its reference" in caplog.text
    assert starts_equal or first == pytest.approx(0.6931472, abs=1e-4) or "differs from its reference" in caplog.text
    torch.testing.assert_close(trainer.reference.logps(trainer.model, batch), reference, atol=1e-4, rtol=0)
    trained = logits(trainer.model)
    assert (trained - before).abs().max() > 1e-4, "nothing was trained"
    trainer.save_model(tmp_path / "saved")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "saved")
    torch.testing.assert_close(logits(loaded), trained, atol=1e-4, rtol=0)
    # merged
    trainer.args.merge_lora = True
    try:
        trainer.save_model(tmp_path / "merged")
    except InputError as error:
        counts["refused"].append(f"{kind}, merged: {error}")
    else:
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(logits(merged), trained, atol=2e-3, rtol=0)
    counts["equal"].append(kind)


WITH_A_LOSS = {
    "pvera": lambda: peft.PveraConfig(target_modules=TARGETS),
    "kasa": lambda: peft.LoraConfig(target_modules=TARGETS, kasa_config=peft.KasaConfig()),
    "monteclora": lambda: peft.LoraConfig(target_modules=TARGETS, monteclora_config=peft.MontecloraConfig()),
}
if not hasattr(peft, "KasaConfig"):
    del WITH_A_LOSS["kasa"]  # it is of PEFT 0.21


@pytest.mark.parametrize("config", [make() for make in WITH_A_LOSS.values()], ids=WITH_A_LOSS)
def test_adapters_with_a_loss_or_noise_of_their_own_are_refused(config, tmp_path):
    with pytest.raises(InputError, match="Use an adapter that acts only inside layers"):
        trainer_for("sft", tiny_model("llama"), token_rows("sft"), tmp_path, peft_config=config)


def test_a_misspelt_target_module_gets_the_name_that_is_meant():
    with pytest.raises(InputError, match=r"Target modules \{'q_prj'\} not found .*; did you mean 'q_proj'\?"):
        add_adapter(tiny_model(), peft.LoraConfig(target_modules=["q_prj"], task_type="CAUSAL_LM"))


def test_an_adapter_is_made_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add_adapter(tiny_model(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


def test_what_peft_would_not_load_again_is_refused():
    """Layers of Laguna that transformers gives other names in loading; without them it is trained."""
    config = peft.LoraConfig(target_modules="all-linear")
    with pytest.raises(InputError, match=r"9 layers of laguna. Set exclude_modules: \[shared_experts") as caught:
        add_adapter(tiny("laguna"), config)
    config.exclude_modules = str(caught.value).partition("[")[2].partition("]")[0].split(", ")
    assert add_adapter(tiny("laguna"), config).targeted_module_names


@pytest.mark.slow
def test_the_counts_of_adapters():
    """After the others: how many kinds were tried."""
    for name, kinds in counts.items():
        print(f"{name}: {len(kinds)} ({'; '.join(kinds)})")
    assert not [message for message in counts["refused"] if "\n" in message]
    assert len(counts["equal"]) + sum(", merged" not in each for each in counts["refused"]) == len(counts["tried"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize("autocast", quick(True, among=(True, False)))
@pytest.mark.parametrize(("checkpointing", "dropout"), [(True, 0.0), (False, 0.0), (False, 0.1)])
def test_inputs_that_are_not_cast_give_the_same_numbers(checkpointing, dropout, autocast, dtype):
    results, casts = [], []
    for skipped in (False, True):
        model = tiny_model().to(dtype)
        config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, lora_dropout=dropout)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, config).train()
        model.enable_input_require_grads()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if skipped:
            skip_needless_casts(model, "cpu")
        torch.manual_seed(1)
        with torch.profiler.profile() as profiler:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=IDS, use_cache=False).logits.float().square().sum()
            loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in model.parameters() if weight.requires_grad)])
        casts.append(sum(event.count for event in profiler.key_averages() if event.key == "aten::_to_copy"))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert (casts[1] < casts[0]) == (autocast and not dropout), casts


def test_what_an_adapter_acts_on_and_leaves_is_told(tmp_path):
    weights = dict(tiny_model().named_parameters())
    acted = sum(weight.numel() for name, weight in weights.items() if name.endswith("q_proj.weight"))
    share = 100 * acted / sum(weight.numel() for weight in weights.values())
    policy = add_adapter(tiny_model(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert describe_adapter(policy).startswith(f"the adapter acts on {share:.0f} % of the model's weights, ")


@pytest.mark.parametrize("init", ["orthogonal", "pissa", "olora"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_experts_have_no_weight_that_an_initialisation_reads(init, device):
    """As PEFT targets them by all-linear; --check, which has no weights, says the same as the run."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=init)
    with pytest.raises(InputError, match=f"init_lora_weights: {init} reads the weight of each layer, but Qwen3Moe"):
        add_adapter(tiny_model("qwen3_moe").to(device), config)
    config.target_modules = {"q_proj"}
    add_adapter(tiny_model("qwen3_moe").to(device), config)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("init", "message"),
    [("gausian", "gausian"), ("corda", "corda requires data before training"),
     ("eva", "eva requires data before training"), ("lora_ga", "lora_ga requires data before training"),
     ("mica", "mica")],
)  # fmt: skip
def test_an_initialisation_that_fails_in_the_run_fails_without_weights_too(init, message, device):
    """And the model is as it was, for another try."""
    model = tiny_model("qwen3_moe").to(device)
    model.tie_weights()  # which a move has undone
    before, trained = [name for name, _ in model.named_modules()], [w.requires_grad for w in model.parameters()]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    config.init_lora_weights = init
    with pytest.raises(InputError, match=message):
        add_adapter(model, config)
    assert [name for name, _ in model.named_modules()] == before
    assert [weight.requires_grad for weight in model.parameters()] == trained
    config.init_lora_weights = True
    add_adapter(model, config)
