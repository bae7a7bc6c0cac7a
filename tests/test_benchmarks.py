"""The benchmarks still run, and count what they say they count."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

from benchmarks import data, flops, head, prompts, run, scaling, setting, worker

CONFIG = SimpleNamespace(
    vocab_size=100, hidden_size=10, tie_word_embeddings=True, num_attention_heads=2, head_dim=5, num_hidden_layers=3
)


def test_useful_flops():
    costs = flops.Costs.of(CONFIG, 5000, lora=False)
    assert (costs.token, costs.pair, costs.logit, costs.backward) == (8000, 120, 2000, 3)
    one = costs.forward(10, 4)
    assert one == 8000 * 14 + 120 * (10 * 5 + 4 * (10 + 2)) + 2000 * 4
    row = {"prompt_ids": [1] * 10, "completion_ids": [1] * 4, "completion": 4, "mismatch_ids": [1] * 6}
    pair = row | {"chosen_ids": [1] * 4, "rejected_ids": [1] * 4}
    assert flops.of_row(costs, "sft", row, cached=False) == 3 * one
    assert flops.of_row(costs, "kd", row, cached=False) == 4 * one
    assert 3 * one < flops.of_row(costs, "kd", row, cached=True) < 4 * one
    assert flops.of_row(costs, "opd", row, cached=False) == 5 * one
    assert flops.of_row(costs, "dpo", pair, cached=True) == 3 * costs.forward(10, 4, 4)
    assert flops.of_row(costs, "dpo", pair, cached=False) == 4 * costs.forward(10, 4, 4)
    assert flops.of_row(costs, "cpo", pair, cached=False) == 3 * costs.forward(10, 4, 4)
    assert flops.of_row(costs, "rm", pair, cached=False) == 3 * (costs.forward(10, 4, 4) - 2000 * 8)
    other = costs.forward(0, 6, context=10)
    assert flops.of_row(costs, "kto", row, cached=True) == 3 * one + other
    assert flops.Costs.of(CONFIG, 5000, lora=True).backward == 2
    assert flops.machine_rate("cpu", torch.float32, size=64, repeats=3) > 0


def test_rows_with_solved_examples_before_them(tmp_path):
    rows = [{"question": f"q{n} ", "answer": f"a{n}"} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plain = setting.read_rows(tmp_path / "rows.jsonl", "dpo", 5)
    assert plain[0] == {"prompt": "q0 ", "chosen": "a0", "rejected": "a4"}
    shots = setting.read_rows(tmp_path / "rows.jsonl", "dpo", 5, shots=2)
    assert shots[0]["prompt"] == "q1 a1\n\nq2 a2\n\nq0 "
    assert shots[4]["chosen"] == "a4"
    joined = setting.read_rows(tmp_path / "rows.jsonl", "dpo", 5, answers=3)
    assert (joined[0]["chosen"], joined[0]["rejected"]) == ("a0\na1\na2", "a4\na1\na2")


def test_the_table_has_medians_and_ratios():
    base = {"tokens_per_second": 100.0, "peak_gb": 1.0, "added_gb": 0.5, "token_flops": 1e6, "machine_flops": 2e8}
    runs = {
        "ours": [base | {"rows_per_second": rate} for rate in (1.0, 3.0, 2.0)],
        "trl": [base | {"rows_per_second": 1.0, "tokens_per_second": 50.0, "peak_gb": 2.0, "token_flops": 0.0}],
    }
    header, _, ours, theirs = run.table({"sft": run.summary(runs)})
    assert dict(zip(header, ours, strict=True))["rows/s"] == "2.00 (1.00-3.00)"
    assert dict(zip(header, ours, strict=True))["busy"] == "50 %"
    assert dict(zip(header, theirs, strict=True)) | {"rows/s": ""} == {
        "case": "sft", "side": "trl", "rows/s": "", "tokens/s": "50", "busy": "25 %", "peak GB": "2.00",
        "ours: speed": "2.00x", "peak": "0.50x", "beyond model": "1.00x",
    }  # fmt: skip


def test_a_side_is_counted_and_compared_in_its_own_precision():
    base = {"rows_per_second": 1.0, "peak_gb": 1.0, "added_gb": 0.5, "machine_flops": 2e8}
    ours = {"tokens_per_second": 100.0, "token_flops": 1e6}
    runs = {"ours": [base | ours], "ours bf16": [base | {"tokens_per_second": 50.0, "token_flops": 4e6}],
            "trl bf16": [base | {"tokens_per_second": 25.0, "token_flops": 0.0}]}  # fmt: skip
    header, _, *rows = run.table({"opd": run.summary(runs)})
    found = {row[1]: dict(zip(header, row, strict=True)) for row in rows}
    assert [found[side]["busy"] for side in runs] == ["50 %", "100 %", "50 %"]
    assert [found[side]["ours: speed"] for side in runs] == ["", "", "2.00x"]
    del runs["ours bf16"]  # it failed
    assert [row[1:] for row in run.table({"opd": run.summary(runs)})][-1][-3:] == ("", "", "")


def test_a_side_that_fails_takes_nothing_with_it(tmp_path, monkeypatch, capsys):
    def run_worker(spec, *_):
        if spec["side"] == "trl":
            raise RuntimeError("out of memory")
        return {"rows_per_second": 1.0, "tokens_per_second": 9.0, "peak_gb": 1.0, "added_gb": 0.5, "loss": 2.0,
                "tokens": 9.0, "token_flops": 1e6, "machine_flops": 2e8}  # fmt: skip

    rows = [{"question": f"q{n} ", "answer": f"a{n}"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--method", "sft", "--rows", "8", "--batch", "4", "--shape", "tiny", "--vocabulary", "300"]
    places = ["--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "found.json")]
    monkeypatch.setattr(run, "run_worker", run_worker)
    monkeypatch.setattr(run, "find_spec", lambda name: name)  # as where TRL is installed
    monkeypatch.setattr(sys, "argv", ["run", *given, *places])
    monkeypatch.setattr(run, "version", lambda name: "1")
    assert run.main() == 1
    assert capsys.readouterr().err.count("out of memory") == 2  # of the two cases, once each
    found = json.loads((tmp_path / "found.json").read_text())["summary"]
    assert [[*sides] for sides in found.values()] == [["ours"]] * 2


def test_slopes():
    points = [{"value": v, "seconds": 3 * v**2, "added_gb": 7.0} for v in (1, 2, 4)]
    assert scaling.slope(points, "seconds") == pytest.approx(2)
    assert scaling.slope(points, "added_gb") == pytest.approx(0)


def test_a_first_loss_that_is_not_the_plain_one_is_no_result(tmp_path):
    """Neither a loss that another computation disagrees with, nor one that is not a number, is timed."""
    rows = [{"prompt": f" what is {n}?", "completion": " that is a number"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    setting.write_model(tmp_path, tmp_path / "rows.jsonl", "tiny", 300)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    documents = worker.prompts_and_answers(rows, tokenizer)
    spec = {"folder": str(tmp_path), "device": "cpu", "dtype": "float32", "attention": "sdpa", "batch": 4,
            "bf16": False, "variant": "", "max_length": 64, "side": "ours"}  # fmt: skip
    for method in ("sft", "kd"):
        loss = worker.plain_loss(spec | {"method": method}, documents)
        worker.check_first_loss(spec | {"method": method}, loss, loss)
        shifted = [(prompt, [*answer[1:], answer[0]]) for prompt, answer in documents]
        wrong = [1.001 * loss, math.nan, *([worker.plain_loss(spec | {"method": "sft"}, shifted)] * (method == "sft"))]
        for found in wrong:
            with pytest.raises(RuntimeError, match="the plain computation gives"):
                worker.check_first_loss(spec | {"method": method}, found, loss)
    preference = spec | {"method": "kto"}
    with pytest.raises(RuntimeError, match=r"the plain computation gives 0\.5"):
        worker.check_first_loss(preference, math.log(2), worker.plain_loss(preference, documents))
    assert worker.plain_loss(spec | {"method": "opd"}, documents) is None
    assert worker.plain_loss(spec | {"method": "sft", "max_length": 8}, documents) is None  # they are truncated
    with pytest.raises(RuntimeError, match="the plain computation gives None"):
        worker.check_first_loss(spec | {"method": "opd"}, math.inf, None)


def test_a_run_is_measured_after_its_warm_up_and_says_how_it_was_laid_out(tmp_path):
    rows = [{"prompt": f" what is {n}?", "completion": " that is a number"} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    setting.write_model(tmp_path, tmp_path / "rows.jsonl", "tiny", 300)
    spec = {"folder": str(tmp_path), "device": "cpu", "dtype": "float32", "attention": "sdpa", "batch": 4, "warm_up": 2,
            "bf16": False, "variant": "", "max_length": 64, "side": "ours", "method": "sft", "lora": False,
            "liger": False, "compile": False}  # fmt: skip
    found = worker.measure(spec, rows)
    documents = worker.prompts_and_answers(rows[8:], transformers.AutoTokenizer.from_pretrained(tmp_path))
    assert found["steps"] == 4
    assert found["tokens"] == sum(len(answer) for _, answer in documents)
    assert (found["layout"], found["attention"]) == ("shared", "sdpa_by_segment")
    assert found["first_loss"] == pytest.approx(found["expected_loss"], rel=1e-5)
    with pytest.raises(SystemExit, match="give more --rows"):
        worker.measure(spec | {"warm_up": 4}, rows)


@pytest.mark.parametrize("method", ["cpo", "rm"])
def test_the_first_loss_of_pairs_is_the_plain_one(method, tmp_path):
    rows = [{"question": f" what is {n}?", "answer": f" that is {n}" + " a number" * (n % 3)} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    setting.write_model(tmp_path, tmp_path / "rows.jsonl", "tiny", 300)
    spec = {"folder": str(tmp_path), "device": "cpu", "dtype": "float32", "attention": "sdpa", "batch": 4,
            "bf16": False, "variant": "", "max_length": 64, "side": "ours", "method": method, "lora": False,
            "liger": False, "compile": False}  # fmt: skip
    pairs = setting.read_rows(tmp_path / "rows.jsonl", method, 16)
    found = worker.measure(spec, pairs)
    documents = worker.prompts_and_answers(pairs[4:], transformers.AutoTokenizer.from_pretrained(tmp_path))
    assert found["tokens"] == sum(len(answer) for _, answer in documents)
    assert found["first_loss"] == pytest.approx(found["expected_loss"], rel=1e-5)
    swapped = [pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in pairs]
    with pytest.raises(RuntimeError, match="the plain computation gives"):
        worker.check_first_loss(spec, worker.measure(spec, swapped)["first_loss"], found["expected_loss"])


@pytest.mark.slow
def test_prompts_are_timed_and_answers_equal(monkeypatch, capsys):
    small = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setattr(prompts, "TEXT", prompts.TEXT | small | heads)
    monkeypatch.setattr(prompts, "WIDTH", 64)
    monkeypatch.setattr(prompts, "SECTIONS", [4, 6, 6])
    assert prompts.main(["--answer", "4", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [case, layout] for case in ("hybrid", "pictures") for layout in prompts.LAYOUTS
    ]
    assert all(float(line.rpartition(" ")[2]) < 1e-5 for line in lines)


@pytest.mark.parametrize("form", data.METHODS)
def test_the_sides_of_the_data_benchmark_prepare_all_rows(form, tmp_path, monkeypatch):
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(json.dumps({"question": f"q{n} ", "answer": f"a{n}"}) for n in range(data.SOURCE_ROWS)))
    data.write_files(tmp_path, SimpleNamespace(tokenizer=None, data=source, formats=[form], rows=[30]))
    built = []
    build = data.build_ours
    monkeypatch.setattr(data, "build_ours", lambda *given: built.append(build(*given)) or built[-1])
    for side in ("bound", "ours"):
        result = data.measure({"side": side, "form": form, "rows": 30, "folder": str(tmp_path)})
        assert result.keys() == {"seconds", "peak"}
    assert [len(trainer.train_dataset) for trainer in built] == [data.WARM_UP, data.WARM_UP, 30]
    assert len({*map(str, built[-1].train_dataset["prompt_ids"])}) == 30  # no two rows are equal


def test_the_growth_of_preparation_is_a_slope():
    runs = {100: [{"seconds": 1.0, "peak": 0}], 10000: [{"seconds": 100.0, "peak": 2**20}]}
    lines = [
        *data.table(
            "chat", {"bound": runs, "ours": {n: [r[0] | {"seconds": 2 * r[0]["seconds"]}] for n, r in runs.items()}}
        )
    ]
    assert lines[-1].endswith("time grows as rows ** 1.00")
    assert "50 rows/s   2.00 x bound" in lines[-2]
    assert lines[-2].endswith("peak +1 MiB")


@pytest.mark.parametrize("loss", head.LOSSES)
def test_the_sides_of_the_head_benchmark_have_one_loss(loss, monkeypatch):
    monkeypatch.setattr(head, "SHAPES", {"tiny": (300, 16)})
    spec = {"shape": "tiny", "loss": loss, "tokens": 20, "steps": 1, "dtype": "float32", "threads": 1}
    full, ours = (head.measure(spec | {"side": side}) for side in ("full", "ours"))
    assert ours["loss"] == pytest.approx(full["loss"], rel=1e-5)
    assert ours["seconds"] > 0
    assert head.estimate(spec) == 8 * 20 * 16 + 4 * 300 * 16 + 20 * 300 * (20 if loss == "kd" else 12)
