"""`text_weights` and the column `span_weights`: weights of tokens by their text, and the weighted mean as loss."""

import datasets
import pytest
import torch
from models_for_tests import tiny_model
from templates_for_tests import FAMILIES, family_tokenizer
from tokenizers_for_tests import base_tokenizer, byte_tokenizer
from training_for_tests import one_step, trainer_for

from hf_posttrain import KDConfig, SFTConfig
from hf_posttrain.errors import InputError
from hf_posttrain.methods.sft import SFTTrainer

ROWS = [
    {"prompt": "2 + 2 =", "completion": " <think>\n\n</think>\n\nfour"},
    {"prompt": "naïve?", "completion": " ünïcode <tool>é</tool> end"},
]
PATTERNS = {r"<think>\s*</think>\s*": 0, "<tool>é": 2.5}


def prepared(rows, tmp_path, tokenizer=None, **options):
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True, **options)
    return SFTTrainer.prepare(datasets.Dataset.from_list(rows), tokenizer or byte_tokenizer(), config, "train")


def texts_by_weight(row, tokenizer):
    """{weight: the text of the tokens with this weight that are trained, or masked if it is 0}."""
    found = {}
    for token, mask, weight in zip(row["completion_ids"], row["completion_mask"], row["token_weights"], strict=True):
        assert bool(mask) == bool(weight)
        found.setdefault(weight, []).append(token)
    return {weight: tokenizer.decode(ids, skip_special_tokens=True) for weight, ids in found.items()}


def test_patterns_weight_the_tokens_of_their_text(tmp_path):
    tokenizer = byte_tokenizer()
    first, second = prepared(ROWS, tmp_path, tokenizer, text_weights=PATTERNS)
    assert texts_by_weight(first, tokenizer) == {1.0: " four", 0.0: "<think>\n\n</think>\n\n"}
    assert texts_by_weight(second, tokenizer) == {1.0: " ünïcode </tool> end", 2.5: "<tool>é"}


def test_a_pattern_without_effect_is_told(tmp_path, caplog):
    prepared(ROWS, tmp_path, text_weights=PATTERNS)
    assert not caplog.records
    prepared(ROWS, tmp_path, text_weights={"<thnk>": 0})
    assert "text_weights['<thnk>']: no token has its weight, so that it matches no answer" in caplog.text


def test_spans_weight_the_characters_of_the_answer(tmp_path):
    tokenizer = base_tokenizer()
    spans = [{"start": 1, "end": 8, "weight": 0.5}, {"start": 15, "end": 16, "weight": 3.0}]
    plain = [ROWS[0] | {"span_weights": None}, ROWS[1] | {"span_weights": spans}]
    chat = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}],
         "span_weights": row["span_weights"]}
        for row in plain
    ]  # fmt: skip
    for rows, options in ((plain, {}), (chat, {"assistant_only_loss": True})):
        first, second = prepared(rows, tmp_path, tokenizer, **options)
        assert set(first["token_weights"]) == {1.0}
        found = {}
        for token, weight in zip(second["completion_ids"], second["token_weights"], strict=True):
            found[weight] = [*found.get(weight, []), token]
        assert tokenizer.decode(found[0.5]) == "ünïcode"
        assert tokenizer.decode(found[3.0]) == "é"


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("method", ["sft", "kd"])
def test_the_loss_is_the_weighted_mean(method, layout, tmp_path):
    rows = [
        {"prompt": "2 + 2 =", "completion": " <a>4</a> yes"}, {"prompt": "3 + 4 =", "completion": " <a>7"},
        {"prompt": "1 + 1 =", "completion": " 2</a>"}, {"prompt": "5 =", "completion": " no"},
    ]  # fmt: skip
    patterns = {"<a>": 0, "</a>": 4.0, "[0-9]": 0.5}
    config = {"text_weights": patterns, "layout": layout, "tokenizer": byte_tokenizer()}
    second = {"second": tiny_model(seed=9), "kd_coef": 0.0} if method == "kd" else {}
    data = datasets.Dataset.from_list(rows)
    loss, gradients = one_step(method, tiny_model(), data, tmp_path, **config, **second)

    model = tiny_model()
    total = 0.0
    weight = 0.0
    for row in prepared(rows, tmp_path, text_weights=patterns):
        ids = torch.tensor(row["prompt_ids"] + row["completion_ids"])
        logps = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        weights = torch.tensor(row["token_weights"])
        total = total - (logps[len(row["prompt_ids"]) - 1 :] * weights).sum()
        weight += weights.sum().item()
    (total / weight).backward()
    assert loss == pytest.approx((total / weight).item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7)

    # the same step in micro-batches of one row
    small = one_step(
        method, tiny_model(), data, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, **config,
        **second,
    )  # fmt: skip
    assert small[0] == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(small[1], gradients, rtol=1e-4, atol=1e-7)


def test_the_size_of_all_weights_does_not_matter(tmp_path):
    data = datasets.Dataset.from_list([{"prompt": "2 + 2 =", "completion": " 4 yes"}])
    steps = []
    for weight in (1.0, 0.001):
        options = {"text_weights": {"(?s).": weight, "(?s).*<.*>$|.+": weight}, "tokenizer": byte_tokenizer()}
        steps.append(one_step("sft", tiny_model(), data, tmp_path, **options))
    assert steps[0][0] == pytest.approx(steps[1][0], rel=1e-5)
    torch.testing.assert_close(steps[0][1], steps[1][1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("content", ["i", "end", "im_end"])
def test_spans_are_not_found_in_special_tokens(content, tmp_path):
    tokenizer = base_tokenizer()
    spans = [{"start": 0, "end": len(content), "weight": 5.0}]
    plain = {"prompt": "q", "completion": content, "span_weights": spans}
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}],
            "span_weights": spans}  # fmt: skip
    for row, options in ((plain, {}), (chat, {"assistant_only_loss": True})):
        [found] = prepared([row], tmp_path, tokenizer, **options)
        weighted = [token for token, w in zip(found["completion_ids"], found["token_weights"], strict=True) if w == 5.0]
        assert tokenizer.decode(weighted) == content


def test_a_frequent_pattern_in_a_long_row(tmp_path):
    [row] = prepared(
        [{"prompt": "q", "completion": "4 é" * 3000}], tmp_path, text_weights={"[0-9]": 2.0}, max_length=None
    )
    assert row["token_weights"].count(2.0) == 3000


def test_weights_of_packed_and_truncated_rows(tmp_path):
    rows = [{"prompt": "2 + 2 =", "completion": " <a>four</a> and more text"}, {"prompt": "1", "completion": "<a> 2"}]
    whole = prepared(rows, tmp_path, text_weights={"<a>": 3.0})
    cut = prepared(rows, tmp_path, text_weights={"<a>": 3.0}, max_length=14)
    for row, full in zip(cut, whole, strict=True):
        assert row["token_weights"] == full["token_weights"][: len(row["completion_ids"])]
    options = {"text_weights": {"<a>": 3.0}, "tokenizer": byte_tokenizer(), "per_device_train_batch_size": 2}
    data = datasets.Dataset.from_list(rows)
    packed = one_step("sft", tiny_model(), data, tmp_path, packing=True, max_length=64, **options)
    plain = one_step("sft", tiny_model(), data, tmp_path, **options)
    assert packed[0] == pytest.approx(plain[0], rel=1e-5)


def test_a_row_of_which_no_token_has_a_weight_is_dropped(tmp_path):
    rows = [{"prompt": "1", "completion": "x"}, {"prompt": "2", "completion": "y"}]
    [kept] = prepared(rows, tmp_path, base_tokenizer(), text_weights={"(?s)x.*": 0})
    assert base_tokenizer().decode(kept["completion_ids"], skip_special_tokens=True) == "y"
    assert kept["token_weights"] == [1.0, 1.0]


@pytest.mark.parametrize("config", [SFTConfig, KDConfig])
@pytest.mark.parametrize(
    ("weights", "message"),
    [({"(": 1}, "the regular expression is not valid"), ({"a*": 1}, "matches an empty text"),
     (["a"], "must be a mapping of regular expressions to weights"),
     ({"a": -1}, "must be a number from 0 to 1e6"), ({"a": True}, "must be a number from 0 to 1e6")],
)  # fmt: skip
def test_invalid_patterns(config, weights, message, tmp_path):
    with pytest.raises(InputError, match=message):
        config(output_dir=str(tmp_path), text_weights=weights)


@pytest.mark.parametrize(
    ("row", "message"),
    [({"span_weights": [{"start": 0, "end": 99, "weight": 1.0}]}, 
      r"train, row 0: column 'span_weights': .*from 0 to 1 "),
     ({"span_weights": [{"start": False, "end": 1, "weight": 1.0}]}, "start and end from 0 to 1"),
     ({"span_weights": [{"start": 0, "end": 1, "weight": -1.0}]}, "a weight from 0 to 1e6"),
     ({"completion": [{"role": "assistant", "content": "x"}], "prompt": [{"role": "user", "content": "q"}],
       "span_weights": [{"start": 1, "end": 1, "weight": 1.0}]}, "start and end from 0 to 1")],
)  # fmt: skip
def test_invalid_spans(row, message, tmp_path):
    with pytest.raises(InputError, match=message):
        prepared([{"prompt": "1", "completion": "x"} | row], tmp_path, base_tokenizer())


def test_weights_on_metrics(tmp_path):
    """The logged accuracy and entropy are weighted as the loss is, and evaluation gives the loss of training."""
    data = datasets.Dataset.from_list([{"prompt": "2 + 2 =", "completion": " <a>4</a> yes"}])
    options = {"text_weights": {"</a>": 4.0}, "tokenizer": byte_tokenizer()}
    trainer = trainer_for("sft", tiny_model(), data, tmp_path, eval_rows=data, **options)
    trainer.train()
    log = trainer.state.log_history[0]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(log["loss"], rel=1e-6)


def test_an_answer_that_is_an_end_alone_is_dropped(tmp_path):
    """The earlier turn of the assistant is in the prompt, so that no token is trained."""
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "yes"), ("user", "b"))]
    rows = [
        {"prompt": turns, "completion": [{"role": "assistant", "content": text}]} for text in ("<|im_end|>", "yes yes")
    ]
    tokenizer = family_tokenizer(FAMILIES["chatml"])
    [row] = prepared(rows, tmp_path, tokenizer, train_on="assistant", text_weights={"yes": 2.0})
    assert row["index"] == 0
    trained = [token for token, mask in zip(row["completion_ids"], row["completion_mask"], strict=True) if mask]
    assert tokenizer.decode(trained, skip_special_tokens=True).strip() == "yes yes"
