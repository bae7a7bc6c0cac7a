"""`hf-posttrain prune`: the layers that are kept, of models of several kinds, and what cannot be pruned."""

import json
from pathlib import Path

import pytest
import torch
from architectures import tiny
from models_for_tests import tiny_model
from tokenizers_for_tests import byte_tokenizer
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3NextConfig

from hf_posttrain import run
from hf_posttrain.commands.prune import format_layers, read_layers
from hf_posttrain.errors import InputError
from hf_posttrain.models.prune import evenly_spaced, keep_layers, layer_influence

IDS = torch.arange(5, 17)[None]


def save(model, folder="model"):
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def deep(name, layers):
    """A tiny model with this number of layers."""
    changes = {"num_hidden_layers": layers}
    if name in ("qwen3", "gemma2", "qwen3_moe"):
        kinds = ["sliding_attention", "full_attention"] if name == "gemma2" else ["full_attention"]
        changes["layer_types"] = (kinds * layers)[:layers]
    return tiny_model(name, **({"n_layer": layers} if name == "gpt2" else changes))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "total", "expected"),
    [
        ("1", 4, [0]), ("2", 4, [0, 3]), ("3", 5, [0, 2, 4]), ("15", 30, evenly_spaced(15, 30)),
        ("0-2,5", 8, [0, 1, 2, 5]), (" 3 , 4 ", 8, [3, 4]),
    ],
)  # fmt: skip
def test_layers_are_a_number_or_a_list(text, total, expected):
    assert read_layers(text, total) == expected
    assert len({*expected}) == len(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "0 must be from 1 to 3, since the model has 4 layers"), ("4", "4 must be from 1 to 3"),
        ("1-9", "the model has no layer 4. Its layers are 0 to 3"), ("a", "'a' is neither a number nor a range"),
        ("2,1", "must name layers in ascending order"), ("1,1", "each once"), ("0-3", "are all layers of the model"),
        ("3-1", "must name layers"),
    ],
)  # fmt: skip
def test_layers_that_make_no_sense_are_told(text, message):
    with pytest.raises(InputError, match=message):
        read_layers(text, 4)


def test_layers_are_written_as_ranges():
    assert format_layers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2", "gpt2", "qwen3_moe"])
def test_the_kept_layers_are_those_of_the_model(name, capsys):
    model = save(deep(name, 4))
    assert run.main(["prune", "model", "out", "--keep_layers", "0,2-3"]) == 0
    assert "wrote out: layers 0, 2-3 of the 4 layers of model" in capsys.readouterr().out
    pruned = AutoModelForCausalLM.from_pretrained("out").eval()
    assert pruned.config.num_hidden_layers == 3
    weights = dict(model.named_parameters())
    names = {new: old for new, old in enumerate((0, 2, 3))}
    for key, weight in pruned.named_parameters():
        parts = key.split(".")
        number = next((n for n, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            parts[number] = str(names[int(parts[number])])
        assert torch.equal(weight, weights[".".join(parts)])
    keep_layers(model, [0, 2, 3])
    assert torch.equal(pruned(IDS).logits, model.eval()(IDS).logits)
    assert (Path("out") / "tokenizer.json").is_file()


def test_kinds_of_layers_stay_with_their_layers():
    """Sliding and full attention, and hybrids with linear attention."""
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8,
             "num_key_value_heads": 2, "num_hidden_layers": 6, "pad_token_id": 256}  # fmt: skip
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    torch.manual_seed(0)
    save(AutoModelForCausalLM.from_config(Gemma3TextConfig(**shape, layer_types=kinds, sliding_window=4)))
    assert run.main(["prune", "model", "out", "--keep_layers", "1,4,5"]) == 0
    assert json.loads(Path("out/config.json").read_text())["layer_types"] == [kinds[n] for n in (1, 4, 5)]

    hybrid = Qwen3NextConfig(
        **shape, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=0, mlp_only_layers=[*range(6)],
    )  # fmt: skip
    save(AutoModelForCausalLM.from_config(hybrid), "hybrid")
    assert run.main(["prune", "hybrid", "small", "--keep_layers", "0,3"]) == 0
    config = json.loads(Path("small/config.json").read_text())
    assert config["layer_types"] == [hybrid.layer_types[n] for n in (0, 3)]
    assert config["mlp_only_layers"] == [0, 1]


def test_layers_with_the_least_influence_are_removed(capsys):
    """The second layer adds nothing to its input."""
    model = deep("qwen3", 3)
    layer = model.get_decoder().layers[1]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    save(model)
    influence = layer_influence(model, [IDS[0].tolist(), [7, 8, 9]])
    assert influence[1] == pytest.approx(0, abs=1e-6)
    assert min(influence[0], influence[2]) > 0.01
    Path("rows.jsonl").write_text("\n".join(json.dumps({"question": "1+1=", "answer": str(n)}) for n in range(4)))
    columns = ["--columns", "prompt=question", "completion=answer"]
    assert run.main(["prune", "model", "out", "--keep_layers", "2", "--data", "rows.jsonl", *columns]) == 0
    assert "layers 0, 2 of the 3 layers" in capsys.readouterr().out
    assert torch.allclose(AutoModelForCausalLM.from_pretrained("out")(IDS).logits, model(IDS).logits, atol=1e-5)


def test_rows_are_measured_with_the_chat_template(monkeypatch):
    save(deep("qwen3", 3))
    Path("rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2"}))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained("model")
    measured = []

    def layer_influence(model, rows):
        measured.extend(tokenizer.decode(ids) for ids in rows)
        return [0.0, 2.0, 1.0]

    monkeypatch.setattr("hf_posttrain.models.prune.layer_influence", layer_influence)
    command = ["prune", "model", "out", "--keep_layers", "2", "--data", "rows.jsonl"]
    assert run.main(command) == 0
    assert run.main([*command[:2], "chat", *command[3:], "--apply_chat_template"]) == 0
    assert "<user>" not in measured[0]
    assert measured[1].startswith("<user>1+1=<assistant>2")


def test_a_model_whose_layers_follow_another_rule_is_not_saved(capsys, monkeypatch):
    """The saved model is compared with the one in memory."""
    save(deep("qwen3", 3))
    monkeypatch.setattr("hf_posttrain.models.prune.torch.equal", lambda *tensors: False)
    assert run.main(["prune", "model", "out", "--keep_layers", "2"]) == 2
    assert "depend on their numbers in a way that is not supported" in capsys.readouterr().err
    assert not Path("out").exists()
    assert [*Path().glob(".out*")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model", "model", "--keep_layers", "1"], "OUT: model exists"),
        (["none", "out", "--keep_layers", "1"], "none"),
        (["model", "out", "--keep_layers", "0,1", "--data", "x.jsonl"], "--data requires a number of layers"),
        (["model", "out", "--keep_layers", "1", "--apply_chat_template"], "converts the rows of --data"),
    ],
)
def test_mistakes_are_told(arguments, message, capsys):
    save(deep("qwen3", 3))
    assert run.main(["prune", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", "gemma3n_text", "deepseek_v3", "qwen3_5_text", "granitemoehybrid", "olmo3"])
def test_other_architectures_are_pruned_or_rejected(name, capsys):
    try:
        model = tiny(name, num_hidden_layers=4)
    except Exception as error:
        pytest.skip(f"{name} does not build at a small size: {error}")
    save(model)
    code = run.main(["prune", "model", "out", "--keep_layers", "2"])
    assert code == 0 or "not supported" in capsys.readouterr().err or "cannot be removed" in capsys.readouterr().err
    assert Path("out").exists() == (code == 0)
