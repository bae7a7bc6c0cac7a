"""The benchmarks still run, and count what they say they count."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import flops, gpu, layouts, prompts, run, scaling, setting
from hf_posttrain.scoring import head

REPOSITORY = Path(__file__).parents[1]
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
    assert flops.of_row(costs, "opd", row, cached=False) == 5 * one
    assert flops.of_row(costs, "dpo", pair, cached=True) == 3 * costs.forward(10, 4, 4)
    assert flops.of_row(costs, "dpo", pair, cached=False) == 4 * costs.forward(10, 4, 4)
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


def test_the_checks_on_a_gpu_see_what_is_wrong(monkeypatch):
    given = SimpleNamespace(shape="tiny", device="cpu", vocabulary=512, tokens=64, repeats=1)
    assert all(found["right"] for part in (gpu.check_head, gpu.compare_attention) for found in part(given))
    made = iter(range(9))
    whole = gpu.random_batch

    def blind(*args):
        batch = whole(*args)
        return batch | ({"branch": torch.zeros_like(batch["branch"])} if next(made) == 0 else {})

    monkeypatch.setattr(gpu, "random_batch", blind)
    assert not all(found["right"] for found in gpu.compare_attention(given))
    for name in ("LogProb", "dense"):
        monkeypatch.setattr(gpu, name, partial(halved, getattr(gpu, name)))
    assert not any(found["right"] for found in gpu.check_head(given))


def halved(function, *args, **options):
    """The tile function with half of the softmax in its gradient."""
    tile = function(*args, **options)

    def wrong(*given):
        found = tile(*given)
        found.grad[found.grad * (1 if function is head.LogProb else -1) < 0] *= 0.5
        return found

    return wrong


def test_slopes():
    points = [{"value": v, "seconds": 3 * v**2, "added_gb": 7.0} for v in (1, 2, 4)]
    assert scaling.slope(points, "seconds") == pytest.approx(2)
    assert scaling.slope(points, "added_gb") == pytest.approx(0)


def test_layouts_are_equal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["layouts", "--shape", "tiny", "--device", "cpu"])
    assert layouts.main() == 0
    assert capsys.readouterr().out.count("equal") == 5
    monkeypatch.setitem(layouts.TOLERANCE, torch.float32, -1.0)
    assert layouts.main() == 1


COMPARED = {
    "small": [case for cases in run.CASES.values() for case in cases],
    "large": [cases[0] for cases in run.CASES.values()],
    "compiled": [*run.CASES["sft"]], "lora": [*run.CASES["dpo"]], "long": [*run.CASES["sft"]],
}  # fmt: skip
"""Part of gpu.sh -> cases."""


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


def test_the_gpu_script_names_what_it_has_no_time_for(tmp_path):
    environment = os.environ | {"DRY": "1", "LIMIT": "-1", "PYTHON": sys.executable, "OUT": str(tmp_path)}
    command = ["bash", "benchmarks/gpu.sh"]
    done = subprocess.run([*command, "small", "lora"], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("left out for want of time: small lora"), done.stderr[-3000:]
    done = subprocess.run([*command, "smal"], cwd=REPOSITORY, env=environment | {"LIMIT": "9"}, capture_output=True)
    assert (done.returncode, b"no part smal; there are layouts" in done.stderr) == (2, True)


@pytest.mark.slow
def test_the_gpu_script_runs_on_cpu(tmp_path):
    environment = os.environ | {"DRY": "1", "PYTHON": sys.executable, "OUT": str(tmp_path)}
    command = ["bash", "benchmarks/gpu.sh"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not any(said in done.stdout for said in ("left out", "FAILED"))
    found = {name: json.loads((tmp_path / f"{name}.json").read_text())["summary"] for name in COMPARED}
    assert {name: [*cases] for name, cases in found.items()} == COMPARED
    results = found["small"]
    assert (tmp_path / "small.md").read_text() in done.stdout
    assert all(sides["ours"]["tokens"] > 0 and 0 < sides["ours"]["busy"] < 1 for sides in results.values())
    parts = json.loads((tmp_path / "kernels.json").read_text())
    assert all(found.get("right", True) for name in ("head", "tiles", "attention", "shapes") for found in parts[name])
    assert [found["form"] for found in parts["attention"]] == ["mask", "pieces"]
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
