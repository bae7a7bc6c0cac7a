"""The check of layouts and heads before the first batch, whatever the precision."""

import logging

import peft
import pytest
import torch
from architectures import WINDOW, tiny
from models_for_tests import CONFIGS, tiny_model
from training_for_tests import fix_rollouts, quick, token_rows, trainer_for
from transformers import Qwen3ForQuestionAnswering, Qwen3Model

from hf_posttrain.errors import InputError
from hf_posttrain.scoring import attention, forward, parity_check
from hf_posttrain.scoring.layout_selection import verified_layout
from hf_posttrain.scoring.parity_check import parity_error, tolerance

LOW = {"bf16 weights": (torch.bfloat16, False), "autocast": (torch.float32, True), "both": (torch.bfloat16, True)}


def scoring(model, dtype=torch.float32):
    forward.enable_scoring(model)
    return model.to(dtype)


@pytest.mark.parametrize("name", quick("qwen3", "gemma2", among=CONFIGS))
@pytest.mark.parametrize(("dtype", "autocast"), LOW.values(), ids=LOW)
def test_the_check_is_as_exact_in_low_precision(name, dtype, autocast):
    model = scoring(tiny_model(name), dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), parity_check.InFloat32():
        assert parity_error(model, "shared") < 1e-4


@pytest.mark.parametrize(("dtype", "autocast"), LOW.values(), ids=LOW)
def test_an_unknown_softcap_is_found_in_low_precision(dtype, autocast, caplog):
    """RecurrentGemma caps its logits by a name of its own."""
    model = scoring(tiny("recurrent_gemma"), dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), caplog.at_level(logging.WARNING):
        assert verified_layout([model], "padded", explicit=False) == "padded"
    assert getattr(model, forward.USES_OWN_LOGITS)
    assert "Its own forward is used" in caplog.text


@pytest.mark.parametrize(("dtype", "autocast"), LOW.values(), ids=LOW)
def test_a_leaking_layout_is_found_in_low_precision(dtype, autocast, monkeypatch):
    """Packed documents of a model that does not get their bounds."""
    monkeypatch.setattr(attention, "arguments", lambda _, batch: {"attention_mask": batch.attention_mask})
    model = scoring(tiny("opt", scale=3.0), dtype)
    low = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    with low, pytest.raises(InputError, match="layout=padded"):
        verified_layout([model], "packed", explicit=True)


def test_a_window_of_the_config_that_the_model_lacks_is_found():
    """Moshi's config has one, its text model sees everything."""
    model = scoring(tiny("moshi"))
    assert verified_layout([model], "shared", explicit=False) == "padded"
    # rows that are never longer than the window cannot show it, nor need they
    assert verified_layout([model], "shared", explicit=False, max_length=WINDOW) == "shared"


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_a_vocabulary_of_a_few_ids_is_checked_too(layout):
    assert parity_error(scoring(tiny_model(vocab_size=6, pad_token_id=5, eos_token_id=4)), layout) < 1e-4


def test_a_model_that_looks_ahead_is_refused():
    encoder = scoring(tiny("bert"))
    with pytest.raises(
        InputError, match=r"BertLMHeadModel is not a causal LM, because a token attends to later .*is_decoder"
    ):
        verified_layout([encoder], "padded", explicit=False)
    assert verified_layout([scoring(tiny("bert", is_decoder=True))], "padded", explicit=False) == "padded"


@pytest.mark.parametrize("kind", [Qwen3Model, Qwen3ForQuestionAnswering])
def test_a_model_without_logits_of_tokens_is_refused(kind):
    other = kind(tiny_model().config)
    with pytest.raises(
        InputError,
        match=rf"{kind.__name__} is not a causal LM, because it does not return logits .* AutoModelForCausalLM",
    ):
        verified_layout([scoring(other)], "padded", explicit=False)


def test_products_of_several_tensors_in_one_argument_are_in_float32():
    """As ProphetNet's einsum has them."""
    pair = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3, 2, dtype=torch.bfloat16)
    with parity_check.InFloat32():
        assert torch.einsum("ij,jk->ik", pair).dtype == torch.einsum("ij,jk->ik", *pair).dtype == torch.float32


def test_only_what_rounds_by_itself_is_given_more():
    assert tolerance(tiny_model()) == 1e-3
    model = tiny_model()
    model.is_loaded_in_8bit = True
    assert tolerance(model) == 0.1


def test_a_kernel_that_takes_no_float32_is_checked_as_it_is(monkeypatch, caplog):
    def refuse(*args):
        raise RuntimeError("only bfloat16 here")

    monkeypatch.setattr(parity_check.InFloat32, "__enter__", refuse)
    with caplog.at_level(logging.INFO):
        assert verified_layout([scoring(tiny_model(), torch.bfloat16)], "shared", explicit=True) == "shared"
    assert "check in float32 failed with: only bfloat16 here" in caplog.text
    verified_layout([odd := scoring(tiny("recurrent_gemma", logits_soft_cap=1.0))], "padded", explicit=False)
    assert getattr(odd, forward.USES_OWN_LOGITS)


BROKEN = {
    "embedding": (lambda model: model.get_input_embeddings().weight[7, 3:], float("nan"), "1 of its weights"),
    "layer": (
        lambda model: model.model.layers[1].mlp.up_proj.weight[0],
        float("inf"),
        r"of which is \S+up_proj.weight\.",
    ),
    "row of the head": (lambda model: model.lm_head.weight[9], float("-inf"), "the first of which is lm_head.weight"),
    "norm": (lambda model: model.model.norm.weight, float("nan"), "the first of which is model.norm.weight"),
}


@pytest.mark.parametrize("role", ["policy", "teacher", "reference"])
@pytest.mark.parametrize("place", BROKEN)
def test_weights_that_are_no_numbers_are_named(place, role, tmp_path):
    part, value, message = BROKEN[place]
    method = {"policy": "sft", "teacher": "kd", "reference": "dpo"}[role]
    models = tiny_model("llama", tie_word_embeddings=False), tiny_model("llama", seed=9, tie_word_embeddings=False)
    with torch.no_grad():
        part(models[role != "policy"]).fill_(value)
    trainer = trainer_for(method, models[0], token_rows(method), tmp_path, None if role == "policy" else models[1])
    with pytest.raises(InputError, match=message):
        trainer.train()


def test_logits_that_overflow_are_told_from_a_wrong_layout(tmp_path):
    model = tiny_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.model.norm.weight.fill_(1e30)
        model.lm_head.weight.mul_(1e30)
    trainer = trainer_for("sft", model, token_rows("sft"), tmp_path)
    with pytest.raises(InputError, match=r"its logits are NaN or infinite, although its weights are finite"):
        trainer.train()


@pytest.mark.parametrize("value", [-3e38, float("-inf"), -1e4])
@pytest.mark.parametrize("method", ["kd", "opd"])
def test_a_teacher_that_forbids_tokens_by_numbers_that_overflow_is_refused(method, value, tmp_path, monkeypatch):
    fix_rollouts(monkeypatch)
    teacher = tiny_model("llama", seed=9, tie_word_embeddings=False)
    teacher.lm_head = torch.nn.Linear(32, 300)
    with torch.no_grad():
        teacher.lm_head.bias[5:40] = value
    trainer = trainer_for(method, tiny_model("llama"), token_rows(method), tmp_path, teacher)
    if value == -1e4:
        trainer.train()
        assert torch.tensor(trainer.state.log_history[0]["loss"]).isfinite()
        return
    with pytest.raises(InputError, match=r"the teacher: 35 tokens have logits down to .* Set these logits to -1e4"):
        trainer.train()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_dora_on_a_head_with_a_row_of_zeros_begins_at_the_base(method, tied, tmp_path):
    """The row of padding is zero, and DoRA divides by its norm."""
    model = tiny_model("llama", tie_word_embeddings=tied)
    with torch.no_grad():
        model.get_output_embeddings().weight[256] = 0
    ids = torch.tensor([[1, 2, 3, 4]])
    expected = model(ids).logits
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], use_dora=True, task_type="CAUSAL_LM")
    trainer = trainer_for(method, model, token_rows(method), tmp_path, peft_config=config, learning_rate=1e-2)
    torch.testing.assert_close(trainer.model.eval()(ids).logits, expected, atol=1e-3, rtol=0)
    trainer.train()
    trainer.save_model()
    base = tiny_model("llama", tie_word_embeddings=tied)
    with torch.no_grad():
        base.get_output_embeddings().weight[256] = 0
    saved = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(saved(ids).logits, trainer.model.eval()(ids).logits)
