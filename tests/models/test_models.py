"""Tokenizers, models and adapters from a recipe's section; vocabularies; layouts; what a saved model stops at."""

import copy
import json
import logging
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import peft
import pytest
import torch
from architectures import tiny
from models_for_tests import tiny_model
from tokenizers_for_tests import CHATML, base_tokenizer, bos_tokenizer, byte_tokenizer, words_tokenizer
from training_for_tests import assert_same_step, one_step, token_rows, trainer_for
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config

import hf_posttrain
from hf_posttrain.errors import InputError
from hf_posttrain.models import adapters, policy
from hf_posttrain.models import load as models
from hf_posttrain.models.config import ModelSection
from hf_posttrain.scoring import forward as scoring
from hf_posttrain.scoring import layout_selection, parity_check
from hf_posttrain.scoring.layouts import Branch, Example, collate
from hf_posttrain.teachers.local import TeacherStates


def tiny_config(vocab_size=300):
    return Qwen3Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=64, vocab_size=vocab_size,
    )  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A saved tiny Qwen3 with the byte tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config()).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def adapter(folder, tmp_path_factory):
    """A saved LoRA adapter for `folder` whose B is not zero."""
    path = tmp_path_factory.mktemp("adapters") / "lora"
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = peft.get_peft_model(model, adapters.lora_config(ModelSection(folder, lora={"r": 2})))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    model.save_pretrained(path)
    return str(path)


def refusal(function, *args, **kwargs):
    with pytest.raises(InputError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_tokenizer_and_chat_template_file(folder, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    assert models.load_tokenizer(ModelSection(folder)).chat_template == CHATML
    tokenizer = models.load_tokenizer(ModelSection(folder, chat_template=str(tmp_path / "t.jinja")))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"padding_side": "left"}))
    assert models.load_tokenizer(ModelSection(str(tmp_path))).padding_side == "left"  # as it is saved again


def test_pad_token_is_a_spare_one_or_eos(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "none")
    assert models.load_tokenizer(ModelSection(str(tmp_path / "none"))).pad_token == "<|im_end|>"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|vision_pad|>"]})
    tokenizer.save_pretrained(tmp_path / "spare")
    assert models.load_tokenizer(ModelSection(str(tmp_path / "spare"))).pad_token == "<|vision_pad|>"


def test_weights_that_may_not_be_read_are_named(folder, monkeypatch):
    """By a stand-in of the system's refusal, since root may read everything: safetensors says `No such file`."""
    weights = f"{folder}/model.safetensors"
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != weights)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", Mock(side_effect=FileNotFoundError(weights)))
    problem = f"there is no permission to read {weights}. Its owner can grant it with chmod a+r"
    assert refusal(models.load_model, ModelSection(folder)) == f"model {folder}: {problem}"


def test_missing_names_are_one_line(folder, tmp_path, monkeypatch):
    sibling = folder[:-1] + "z"
    assert refusal(models.load_tokenizer, ModelSection(sibling)) == (
        f"tokenizer {sibling}: no such folder; did you mean '{folder}'?"
    )
    monkeypatch.setattr(models, "HF_HUB_OFFLINE", False)
    assert refusal(models.load_tokenizer, ModelSection("no/such")).endswith(
        ". Check the network, or use the folder of a model"
    )
    monkeypatch.undo()
    assert "model no/such: no such folder, and HF_HUB_OFFLINE disables the hub" in refusal(
        models.load_model, ModelSection("no/such")
    )
    assert "config.json" in refusal(models.load_model, ModelSection(str(tmp_path)))
    # a model in the cache of the Hub is not missing
    with pytest.raises(InputError) as caught, models.as_input_error("model", "owner/name"):
        raise ValueError("owner/name contains custom code.\nPlease pass the argument `trust_remote_code=True`")
    fix = "Set trust_remote_code to true if you trust the code"
    assert str(caught.value) == f"model owner/name: owner/name contains custom code. {fix}"
    assert f"adapter {tmp_path / 'a'}: no such folder" in refusal(
        models.check_model, ModelSection(folder, adapter=str(tmp_path / "a"))
    )
    tiny_config().save_pretrained(tmp_path / "bare")
    assert "has no tokenizer" in refusal(models.load_tokenizer, ModelSection(str(tmp_path / "bare")))
    assert "safetensors" in refusal(models.load_model, ModelSection(str(tmp_path / "bare")))


def test_from_scratch_is_seeded_and_float32(folder):
    section, drawn = ModelSection(folder, from_scratch=True), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(models.load_model(section).get_input_embeddings().weight)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert drawn[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "lora", "trainable", "device", "expected"),
    [
        ("default", None, True, "cpu", torch.float32),
        ("default", None, True, "cuda", torch.float32),
        ("default", {}, True, "cpu", torch.float32),
        ("default", {}, True, "cuda", torch.bfloat16),
        ("default", None, False, "cpu", torch.float32),
        ("default", None, False, "cuda", torch.bfloat16),
        ("auto", {}, True, "cpu", torch.float32),
        ("bfloat16", {}, True, "cpu", torch.bfloat16),
        ("float16", None, False, "cpu", torch.float16),
    ],
)
def test_dtype_rule(folder, dtype, lora, trainable, device, expected, caplog):
    model = models.load_model(ModelSection(folder, dtype=dtype, lora=lora), trainable, torch.device(device))
    assert {p.dtype for p in model.parameters()} == {expected}
    assert {p.requires_grad for p in model.parameters()} == {trainable}
    assert not caplog.records


def test_attention_implementation(folder, tmp_path):
    assert models.load_model(ModelSection(folder)).config._attn_implementation == "sdpa"
    assert models.load_model(ModelSection(folder, attn_implementation="eager")).config._attn_implementation == "eager"
    assert "attn_implementation" in refusal(models.load_model, ModelSection(folder, attn_implementation="bogus"))


def test_a_model_that_refuses_sdpa_falls_back_to_eager(tmp_path):
    """Gemma 2 refuses it from some transformers 5.2x on; either way it is scored as its own forward scores."""
    from models_for_tests import CONFIGS

    CONFIGS["gemma2"]().save_pretrained(tmp_path)
    model = models.load_model(ModelSection(str(tmp_path), from_scratch=True))
    scoring.enable_scoring(model)
    assert parity_check.parity_error(model, "shared") < 1e-4
    asked = ModelSection(str(tmp_path), from_scratch=True, attn_implementation="sdpa")
    if model.config._attn_implementation == "eager":
        assert "does not support an attention implementation" in refusal(models.load_model, asked)
    else:
        assert models.load_model(asked).config._attn_implementation == "sdpa"


def test_a_layout_is_logged_when_it_is_new(caplog):
    model, flash = (AutoModelForCausalLM.from_config(tiny_config()) for _ in range(2))
    flash.config._attn_implementation = "flash_attention_2"
    caplog.set_level(logging.INFO, "hf_posttrain")
    current = None
    for alongside in ([], [model], [], [flash]):  # a trainer's own model, then with a second one
        current = layout_selection.choose_layout([model, *alongside], "auto", current=current)
    assert [message.split(" (")[0] for message in caplog.messages] == ["layout: shared", "layout: packed"]


def test_quantization_needs_its_package(folder, monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    assert "pip install bitsandbytes" in refusal(models.check_model, ModelSection(folder, quantization="8bit"))


def test_quantised_lora_base(folder):
    pytest.importorskip("bitsandbytes")
    model = models.load_model(ModelSection(folder, quantization="4bit", lora={}))
    assert model.is_loaded_in_4bit


@pytest.mark.parametrize("trainable", [True, False])
def test_adapter_is_continued_or_frozen(folder, adapter, trainable):
    model = models.load_model(ModelSection(folder, adapter=adapter), trainable)
    assert isinstance(model, peft.PeftModel)
    lora = [p for n, p in model.named_parameters() if "lora_" in n]
    assert {p.requires_grad for p in lora} == {trainable}
    assert any((p == 0.1).all() for p in lora)
    assert not any(p.requires_grad for n, p in model.named_parameters() if "lora_" not in n)


def test_a_continued_adapter_brings_its_template_and_its_base_is_compared(folder, adapter, tmp_path, caplog):
    adapter = Path(shutil.copytree(adapter, tmp_path / "lora"))
    (adapter / "chat_template.jinja").write_text("of the adapter")
    section = ModelSection(folder, adapter=str(adapter))
    assert models.load_tokenizer(section).chat_template == "of the adapter"
    tokenizer = models.load_tokenizer(ModelSection(folder))
    tokenizer.add_tokens(["<call>"])
    tokenizer.save_pretrained(tmp_path / "lora")
    assert "<call>" in models.load_tokenizer(section).get_vocab()
    for base, warned in ((folder, False), ("other/base", True)):
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))
        caplog.clear()
        models.load_model(section)
        assert ("was trained on other/base, not on" in caplog.text) == warned


def test_a_continued_adapter_names_the_base_that_it_is_trained_on(folder, adapter, tmp_path):
    adapter = Path(shutil.copytree(adapter, tmp_path / "lora"))
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "other/base"}))
    policy = models.load_model(ModelSection(folder, adapter=str(adapter)))
    trainer = trainer_for("sft", policy, token_rows("sft"), tmp_path)
    trainer.save_model(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(folder)


def test_lora_config_friendly_names():
    assert adapters.lora_config(ModelSection("x")) is None
    made = adapters.lora_config(ModelSection("x", lora={"r": 4, "alpha": 32, "dropout": 0.05, "use_rslora": True}))
    assert (made.r, made.lora_alpha, made.lora_dropout, made.use_rslora) == (4, 32, 0.05, True)
    assert (made.target_modules, made.task_type) == ("all-linear", "CAUSAL_LM")
    made = adapters.lora_config(
        ModelSection("x", lora={"target_modules": ["q_proj"], "init_lora_weights": "pissa_niter_4"})
    )
    assert (made.target_modules, made.init_lora_weights) == ({"q_proj"}, "pissa_niter_4")


def test_same_ids_with_other_padding_pass():
    models.check_same_vocabulary(byte_tokenizer(), byte_tokenizer())


@pytest.mark.parametrize("other", [bos_tokenizer, words_tokenizer])
def test_other_vocabularies_are_refused_even_at_equal_size(other):
    message = refusal(models.check_same_vocabulary, byte_tokenizer(), other())
    assert "student and teacher have different vocabularies" in message


def test_swapped_and_added_tokens_are_refused():
    swapped = bos_tokenizer()  # 260 tokens, as the next one
    grown = byte_tokenizer()
    grown.add_tokens(["<extra>"])
    assert len(grown) == len(swapped)
    assert "id 256 is '<|endoftext|>' for the student, '<s>' for the teacher" in refusal(
        models.check_same_vocabulary, grown, swapped
    )
    message = refusal(models.check_same_vocabulary, byte_tokenizer(), grown)
    assert "(259 and 260 ids, 1 differ; id 259 is None for the student, '<extra>' for the teacher)" in message


def test_special_roles_alone_do_not_matter():
    models.check_same_vocabulary(byte_tokenizer(), base_tokenizer())


def test_tokenizer_larger_than_the_model_is_refused():
    message = "the tokenizer of tiny uses id 258 ('<|im_end|>'), but the model has only 258 tokens"
    assert message in refusal(models.check_tokenizer_fits, byte_tokenizer(), Qwen3Config(vocab_size=258), "tiny")


def test_reloaded_model_stops_at_the_trained_turn_end(tmp_path):
    tokenizer = base_tokenizer()  # eos is <|endoftext|> 256, turns end with <|im_end|> 258
    model = AutoModelForCausalLM.from_config(tiny_config())
    model.generation_config.eos_token_id = 2  # of another tokenizer
    policy.align_generation(model, tokenizer, [258, 256])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reloaded.generation_config.eos_token_id == [258, 256]
    assert reloaded.generation_config.pad_token_id == 256
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 256
    with torch.no_grad():  # every position predicts the turn end
        reloaded.model.norm.weight.zero_()
        reloaded.lm_head = torch.nn.Linear(32, 300)
        reloaded.lm_head.bias.copy_(torch.nn.functional.one_hot(torch.tensor(258), 300) * 50.0)
    out = reloaded.generate(torch.tensor([[65, 66]]), max_new_tokens=5, do_sample=False)
    assert out.tolist() == [[65, 66, 258]]


def test_an_adapter_of_another_vocabulary_is_refused(folder, tmp_path):
    resized = models.load_model(ModelSection(folder))
    resized.resize_token_embeddings(310)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    peft.get_peft_model(resized, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(InputError, match=r"adapter \S+adapter does not fit .*: size mismatch"):
        models.load_model(ModelSection(folder, adapter=str(tmp_path / "adapter")))


def test_adapter_model_and_unsaveable_generation_config(folder, adapter, tmp_path):
    model = models.load_model(ModelSection(folder, adapter=adapter))
    model.generation_config.temperature = 0.6  # without do_sample: HF refuses to save this
    policy.align_generation(model, byte_tokenizer(), [258])
    model.generation_config.save_pretrained(tmp_path)
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert (saved.eos_token_id, saved.pad_token_id, saved.do_sample) == (258, 256, True)


def test_a_4bit_base_has_the_gradients_of_its_dequantised_weights(tmp_path):
    """After a forward in eval mode too, which the check of the first batch makes."""
    pytest.importorskip("bitsandbytes")
    tiny_model(hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path / "base")
    section = ModelSection(str(tmp_path / "base"), quantization="4bit", lora={})

    def step(change):
        model = change(models.load_model(section))
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
        return one_step("sft", adapted, token_rows("sft"), tmp_path)

    assert_same_step(step(lambda model: model), step(lambda model: model.dequantize().float()), relative=1e-4)


def test_adapters_that_would_not_be_what_was_trained_are_refused(tmp_path):
    plain, lora = tiny_model(), {"target_modules": ["q_proj"], "r": 2}
    for config, message in [
        (
            {"init_lora_weights": "pissa_niter_4"},
            "pissa_niter_4 is not supported, since it starts from a random part of the weights",
        ),
        ({"init_lora_weights": True, "rank_pattern": {"(": 2}}, "unterminated subpattern"),
    ]:
        with pytest.raises(InputError, match=message):
            trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path, peft_config=peft.LoraConfig(**lora, **config))
    plain.peft_config = {"default": peft.LoraConfig(**lora)}  # as add_adapter does, for which 5.24 wants a PEFT to come
    with pytest.raises(InputError, match="the model contains an adapter that transformers has loaded"):
        trainer_for("sft", plain, token_rows("sft"), tmp_path)
    merged = peft.get_peft_model(tiny_model(), peft.LoraConfig(**lora))
    merged.merge_adapter()
    with pytest.raises(InputError, match="the adapter is merged into the weights"):
        trainer_for("sft", merged, token_rows("sft"), tmp_path)


UNMATCHED = [
    ({"modules_to_save": ["lm_haed"]}, "modules_to_save: 'lm_haed' matches nothing in the model; did you mean"),
    ({"target_modules": ["q_proj", "k_prj"]}, "target_modules: 'k_prj' matches nothing in the model; did you mean"),
    ({"modules_to_save": ["q_proj"]}, "target_modules: 'q_proj' is excluded by other options"),
    ({"exclude_modules": ["q_proj.1"]}, "exclude_modules: 'q_proj.1' matches nothing in the model"),
    ({"exclude_modules": ".*layer"}, "exclude_modules: '.*layer' matches nothing"),
    ({"target_parameters": ["experts.up"]}, "target_parameters: 'experts.up' matches nothing in the model"),
    ({"layers_to_transform": [0, 2]}, "layers_to_transform: requests layers [0, 2], but adapters are in [0]"),
    ({"layers_to_transform": 2}, "You specified 'layers_to_transform': 2"),
    ({"layers_to_transform": [0], "target_parameters": ["experts.down_proj"]}, "[0], but adapters are in [0, 1]"),
    ({"rank_pattern": {"v_proj": 4}}, "rank_pattern: 'v_proj' matches no layer with an adapter"),
    ({"alpha_pattern": {"q_proj": 4, "0.self_attn.q_proj": 2}}, "alpha_pattern: '0.self_attn.q_proj' matches no layer"),
    ({"trainable_token_indices": [5, 300]}, "trainable_token_indices: 300 is not one of the 300 tokens of the model"),
    ({"trainable_token_indices": {"lm_head": [-1]}}, "trainable_token_indices: -1 is not one of the 300 tokens"),
    ({"target_modules": ["lm_head"], "ensure_weight_tying": True}, "LoRA on a tied head does not stay tied"),
    *(  # wrappers of PEFT that are nested
        ({"rank_pattern": {"v_proj": 4}, name: value}, "rank_pattern: 'v_proj' matches no layer with an adapter")
        for name, value in (
            ("trainable_token_indices", [3]),
            ("trainable_token_indices", {"embed_tokens": [3]}),
            ("modules_to_save", ["norm"]),
            ("target_parameters", ["experts.down_proj"]),
        )
    ),
]


@pytest.mark.parametrize(("options", "message"), UNMATCHED)
def test_what_an_adapter_names_and_the_model_lacks_is_refused(options, message):
    """PEFT adapts what is left, in silence. The model is as it was, for another try, and may be on the meta device."""
    model = tiny_model("qwen3_moe", tie_word_embeddings=True)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(model.config)
    for each in (model, skeleton):
        names = [name for name, _ in each.named_modules()]
        config = peft.LoraConfig(**{"target_modules": ["q_proj", "k_proj"], "r": 2} | copy.deepcopy(options))
        with pytest.raises(InputError, match=re.escape(message)):
            adapters.add_adapter(each, config)
        assert [name for name, _ in each.named_modules()] == names
        assert each.lm_head.weight is each.model.embed_tokens.weight


def test_what_an_adapter_names_and_the_model_has_is_taken():
    """Expressions, endings of names and whole names; the config may be used for another model."""
    taken = {"layers_to_transform": [1], "layers_pattern": ["h", "layers"]}, {"layers_to_transform": 0}
    taken += {"rank_pattern": {r".*\.0\..*q_proj": 4, "q_proj": 1}}, {"exclude_modules": ["lm_head", "model.norm"]}
    taken += {"target_modules": r".*\.q_proj", "exclude_modules": r".*1\.self_attn.*"}, {"target_modules": "all-linear"}
    for options in (*taken, {"target_parameters": ["experts.down_proj"], "rank_pattern": {"down_proj": 4}}):
        config = peft.LoraConfig(**{"target_modules": ["q_proj", "self_attn.k_proj"], "r": 2} | options)
        before = copy.deepcopy(config)
        adapters.add_adapter(tiny_model("qwen3_moe"), config)
        assert config == before


def test_a_base_that_is_not_the_one_that_the_adapter_names_is_told(folder, tmp_path, caplog):
    """Whoever loads the adapter gets the base from the folder, and other answers than were trained."""
    options, rows = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}, token_rows("sft")
    message = f"is not that of {folder}, which the adapter will name"

    def said(model, config=None):
        caplog.clear()
        trainer_for("sft", model, rows, tmp_path, peft_config=config)
        return message in caplog.text

    for dtype in (None, torch.float16, torch.bfloat16):  # lower precision, also cast back, is no other base
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        assert not said(model.float(), peft.LoraConfig(**options))
    merged = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(**options, init_lora_weights=False)
    ).merge_and_unload()
    assert said(copy.deepcopy(merged), peft.LoraConfig(**options))
    assert said(peft.get_peft_model(copy.deepcopy(merged), peft.LoraConfig(**options)))
    # without PiSSA's kind nothing of the base moves into an adapter
    assert said(peft.get_peft_model(copy.deepcopy(merged), peft.LoraConfig(**options, init_lora_weights="gaussian")))
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not said(again, peft.LoraConfig(**options))
    rotated = tiny_config().rope_parameters | {"rope_theta": 5e5}
    assert said(AutoModelForCausalLM.from_pretrained(folder, rope_parameters=rotated), peft.LoraConfig(**options))
    assert "(rope_parameters is not that of" in caplog.text
    # biases of the base are saved with the adapter that trains them
    config = tiny_config()
    config.attention_bias = True
    biased = AutoModelForCausalLM.from_config(config)
    biased.save_pretrained(tmp_path / "biased")
    trained = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "biased"), peft.LoraConfig(**options, bias="all")
    )
    torch.nn.init.ones_(trained.get_base_model().model.layers[0].self_attn.q_proj.base_layer.bias)
    assert not said(trained)
    # PiSSA moves a part of the base into the adapter, and is saved with what undoes that
    assert not said(AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(**options, init_lora_weights="pissa"))


def test_checkpointing_that_an_architecture_lacks_is_off(tmp_path, caplog):
    """It is on by default; the Config may serve another trainer."""
    trainer = trainer_for("sft", tiny("openai-gpt"), token_rows("sft"), tmp_path, activation_checkpointing=True)
    assert "activation_checkpointing is off, since OpenAIGPTLMHeadModel does not support it" in caplog.text
    trainer.train()
    config = hf_posttrain.SFTConfig(str(tmp_path), use_cpu=True, report_to="none")
    hf_posttrain.SFTTrainer(tiny("openai-gpt"), config, None, token_rows("sft"), None, byte_tokenizer())
    assert config.activation_checkpointing


def test_the_folder_of_an_adapter_is_no_model(adapter, tmp_path):
    told = r"is an adapter. Load its base model and pass PeftModel.from_pretrained\("
    config = hf_posttrain.SFTConfig(str(tmp_path), use_cpu=True)
    with pytest.raises(InputError, match=told):
        hf_posttrain.SFTTrainer(adapter, config, train_dataset=token_rows("sft"))
    with pytest.raises(InputError, match=told):
        trainer_for("kd", tiny_model(), token_rows("kd"), tmp_path, second=str(adapter))


def test_one_layer_may_be_named_without_a_list():
    for word in ("q_proj", "self_attn.q_proj"):
        assert adapters.lora_config(ModelSection("x", lora={"target_modules": word})).target_modules == {word}
    whole = adapters.lora_config(ModelSection("x", lora={"target_modules": "all-linear", "exclude_modules": "lm_head"}))
    assert (whole.target_modules, whole.exclude_modules) == ("all-linear", {"lm_head"})
    pattern = r".*layers\.[01]\.self_attn\.(q|v)_proj"  # is left to PEFT
    assert adapters.lora_config(ModelSection("x", lora={"target_modules": pattern})).target_modules == pattern


def test_an_adapter_that_does_not_fit_is_refused_in_one_line(tmp_path):
    config = peft.LoraConfig(target_modules=["nowhere"])
    assert "nowhere" in refusal(trainer_for, "sft", tiny_model(), token_rows("sft"), tmp_path, peft_config=config)


def test_all_linear_leaves_out_routers_that_return_several_tensors(tmp_path):
    config = peft.LoraConfig(r=2, target_modules="all-linear")
    trainer = trainer_for("sft", tiny("llama4_text"), token_rows("sft"), tmp_path, peft_config=config)
    trainer.train()
    assert not any("router" in name for name, p in trainer.model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("kept", [0.5, 0.001])
def test_weights_that_are_cut_short_are_one_line(folder, kept, tmp_path):
    shutil.copytree(folder, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: int(weights.stat().st_size * kept)])
    assert str(tmp_path / "cut") in refusal(models.load_model, ModelSection(str(tmp_path / "cut")))


class Int8Head(torch.nn.Module):
    """A head of 8-bit weights that casts by itself, as bitsandbytes' do."""

    def __init__(self, head):
        super().__init__()
        self.scale, self.out_features = head.weight.detach().abs().max() / 127, head.out_features
        rounded = (head.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(rounded, requires_grad=False)

    def forward(self, hidden):
        return hidden @ (self.weight.float() * self.scale).T.to(hidden.dtype)


def test_a_teacher_with_a_quantised_head_is_scored_through_it():
    model = tiny_model("llama")
    model.lm_head = Int8Head(model.lm_head)
    scoring.enable_scoring(model)
    batch = collate([Example([5, 6, 7], [Branch([8, 9, 10])])], "shared")
    with torch.no_grad():
        states = TeacherStates.from_model(model, batch, is_copied=False)
        expected = model(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits[0, 2:]
    assert states.hidden.dtype == torch.float32  # not that of the weight
    torch.testing.assert_close(states.logits(slice(None)), expected)
    with pytest.raises(InputError, match="not a plain linear layer"):  # where it would have to be copied
        TeacherStates.from_model(model, batch, is_copied=True)


def test_an_8bit_teacher_cannot_be_offloaded(tmp_path):
    teacher = tiny_model(seed=9)
    teacher.is_loaded_in_8bit = True
    config = hf_posttrain.KDConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    arguments = (tiny_model(), config, None, token_rows("kd"), None, byte_tokenizer())
    options = {"teacher_model": teacher, "teacher_offload": True}
    assert "Use 4bit, or do not offload" in refusal(hf_posttrain.KDTrainer, *arguments, **options)
