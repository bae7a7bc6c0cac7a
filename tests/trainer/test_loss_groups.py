"""`log_loss_by`: the loss by the values of a column, and by the source of a recipe."""

import json
import math
from functools import partial

import datasets
import pytest
import yaml
from models_for_tests import tiny_model
from tokenizers_for_tests import base_tokenizer
from training_for_tests import trainer_for

from hf_posttrain import SFTConfig
from hf_posttrain.data.prepare import columns_read
from hf_posttrain.data.sources import load
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS
from hf_posttrain.methods.sft import SFTTrainer
from hf_posttrain.recipe.sections import Source
from hf_posttrain.run import main

TOPICS = ["sums", "words", "sums", "sums"]


def rows_of(method):
    """Four rows of two topics."""
    kind = METHODS[method].rows
    answers = ["chosen", "rejected"] if kind.paired else ["completion", *(["label"] if kind.labeled else [])]
    rows = [
        {"prompt": f"{n} + 2 =", "completion": f" {n + 2}", "chosen": f" {n + 2}", "rejected": " no",
         "label": n % 2 == 0, "topic": topic}
        for n, topic in enumerate(TOPICS)
    ]  # fmt: skip
    return datasets.Dataset.from_list(rows).select_columns(["prompt", "topic", *answers])


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_of_each_value_is_that_of_its_rows(method, tmp_path):
    rows = rows_of(method)
    second = tiny_model(seed=9) if METHODS[method].second == "teacher" else None
    options = {"tokenizer": base_tokenizer(), "second": second, "log_loss_by": "topic"}
    trainer = trainer_for(method, tiny_model(), rows, tmp_path, eval_rows=rows, **options)
    assert trainer.groups == ["sums", "words"]
    trainer.train()
    log = trainer.state.log_history[0]
    found = trainer.evaluate()
    for topic in trainer.groups:
        if METHODS[method].rows.sampled:  # other rollouts
            assert math.isfinite(log[f"loss/{topic}"])
            assert math.isfinite(found[f"eval_loss/{topic}"])
        elif METHODS[method].rows.labeled:  # each row is compared with another one of its batch
            assert log[f"loss/{topic}"] == pytest.approx(found[f"eval_loss/{topic}"], rel=1e-5)
        else:
            part = rows.select([n for n, name in enumerate(TOPICS) if name == topic])
            alone = trainer.evaluate(part)["eval_loss"]
            assert found[f"eval_loss/{topic}"] == pytest.approx(alone, rel=1e-5)
            assert log[f"loss/{topic}"] == pytest.approx(alone, rel=1e-5)


def test_packed_rows_are_logged_by_value(tmp_path):
    rows = rows_of("sft")
    logs = []
    for packing in (False, True):
        options = {"tokenizer": base_tokenizer(), "log_loss_by": "topic", "packing": packing, "max_length": 64}
        trainer = trainer_for("sft", tiny_model(), rows, tmp_path, **options)
        trainer.train()
        log = trainer.state.log_history[0]
        logs.append([log["loss/sums"], log["loss/words"]])
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "column", "message"),
    [([{"text": "a b", "topic": None}], "topic", "train, row 0: column 'topic': None is not a text or an integer"),
     ([{"text": "a b", "topic": "x"}], "topics", "log_loss_by: there is no column 'topics'; did you mean 'topic'"),
     ([{"text": f"a {n}", "topic": n} for n in range(51)], "topic", "the column has 51 values")],
)  # fmt: skip
def test_invalid_columns(rows, column, message, tmp_path):
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, log_loss_by=column)
    with pytest.raises(InputError, match=message):
        SFTTrainer(tiny_model(), args, train_dataset=rows, processing_class=base_tokenizer())


def test_values_of_a_later_data_set_and_of_prepared_rows(tmp_path):
    rows = rows_of("sft")
    trainer = trainer_for("sft", tiny_model(), rows, tmp_path, log_loss_by="topic", tokenizer=base_tokenizer())
    later = datasets.Dataset.from_list([{"prompt": "1", "completion": "2", "topic": "numbers"}])
    found = trainer.evaluate(later)
    assert found["eval_loss/numbers"] == pytest.approx(found["eval_loss"], rel=1e-6)
    without = trainer_for("sft", tiny_model(), trainer.train_dataset, tmp_path, tokenizer=base_tokenizer())
    without.train()
    assert not any(name.startswith("loss/") for name in without.state.log_history[0])


def test_a_recipe_logs_the_loss_of_each_source(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    base_tokenizer().save_pretrained(tmp_path / "model")
    for name, texts in (("sums", ["1 + 1 = 2", "2 + 2 = 4"]), ("words", ["a cat sat"])):
        lines = [json.dumps({"text": text}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = [{"path": str(tmp_path / f"{name}.jsonl")} for name in ("sums", "words")]
    train = {"output_dir": str(tmp_path / "out"), "use_cpu": True, "max_steps": 2, "logging_steps": 1,
             "report_to": "none"}  # fmt: skip
    recipe = {"method": "sft", "model": {"name_or_path": str(tmp_path / "model")}, "data": {"train": sources},
              "train": train}  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main([str(tmp_path / "recipe.yaml"), "--check"]) == 0
    assert main([str(tmp_path / "recipe.yaml")]) == 0
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    log = state["log_history"][0]
    assert min(log["loss/sums"], log["loss/words"]) < log["loss"] < max(log["loss/sums"], log["loss/words"])
    # a streamed evaluation set has no such column, and neither have sources with different weights of spans
    recipe["data"]["eval"] = sources[0] | {"streaming": True}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main([str(tmp_path / "recipe.yaml"), "train.output_dir=" + str(tmp_path / "again")]) == 0


def test_sources_may_lack_weights_of_spans(tmp_path):
    rows = [{"prompt": "1", "completion": " 2"}]
    weighted = [rows[0] | {"span_weights": [{"start": 1, "end": 2, "weight": 3.0}]}]
    for name, part in (("plain", rows), ("weighted", weighted)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(part[0]))
    sources = [Source(str(tmp_path / f"{name}.jsonl")) for name in ("plain", "weighted")]
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    raw = load(sources, "train", partial(columns_read, method=METHODS["sft"], config=args), with_source=True)
    prepared = SFTTrainer.prepare(raw, base_tokenizer(), args, "train")
    assert [max(weights) for weights in prepared["token_weights"]] == [1.0, 3.0]
