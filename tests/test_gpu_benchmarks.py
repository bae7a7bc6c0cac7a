"""The benchmarks for a GPU, without one: no part harms another, and each checks its own result before it is timed."""

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from cases_for_tests import exits, hangs, is_killed, raises, two_results

from benchmarks.gpu import correctness, generation, inputs, lengths, lm_head, profiling, summary, supervisor, training
from benchmarks.gpu.__main__ import ORDER, parts_of
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.supervisor import Case, Part, Records, run_parts
from hf_posttrain.scoring import head

REPOSITORY = Path(__file__).parents[1]
COMMAND_CHARACTERS = 2000
"""The longest command that the GPU machine takes."""


@pytest.fixture
def records(tmp_path, monkeypatch):
    """An empty file of results; processes are started with torch alone imported."""
    monkeypatch.setattr(supervisor, "PRELOAD", "torch")
    return Records(tmp_path / "records.jsonl")


@pytest.fixture
def settings(tmp_path):
    """Those of a rehearsal."""
    return Settings("cpu", True, tmp_path / "inputs")


# ---- one measurement does not harm another


def test_a_measurement_that_raises_hangs_or_is_killed_leaves_the_others_alone(records):
    bad = [raises, hangs, is_killed, exits]
    cases = [Case(function.__name__, function, 2 if function is hangs else None) for function in bad]
    good = Case("good", two_results)
    run_parts([Part("a", "bad", 60, [*cases, good]), Part("b", "good", 60, [good])], records, 120, "cpu")
    found = [record for record in records.read() if record["case"] != "part"]
    values = [(record["part"], record["case"], record["value"]) for record in found if "value" in record]
    assert values == [*(("a", case.name, 1) for case in cases), *((part, "good", n) for part in "ab" for n in (1, 2))]
    assert [record["error"] for record in found if "error" in record] == [
        "ValueError: no such kernel", "killed after its limit of 2 s", "the process ended with SIGKILL",
        "the process ended with exit code 3",
    ]  # fmt: skip
    assert subprocess.run(["pgrep", "-f", "^sleep 612$"], capture_output=True, check=False).stdout == b""


def test_a_part_ends_at_its_limit_and_the_next_one_begins(records):
    cases = [Case("hangs", hangs), Case("never", two_results)]
    run_parts([Part("a", "slow", 4, cases), Part("b", "good", 30, [Case("good", two_results)])], records, 60, "cpu")
    found = records.read()
    assert [record["case"] for record in found if "left_out" in record] == ["never"]
    assert [record["value"] for record in found if record["part"] == "b" and "value" in record] == [1, 2]
    assert [record["limit"] for record in found if record["case"] == "part"] == [4, 30]


def test_no_part_begins_after_the_limit_of_all(records):
    run_parts([Part("a", "late", 60, [Case("good", two_results)])], records, 0, "cpu")
    assert [record.get("left_out") for record in records.read() if record["case"] == "good"] == ["no time left"]


def test_where_a_forked_process_cannot_use_the_device_processes_are_fresh(records, capfd):
    run_parts([Part("a", "good", 60, [Case("good", two_results)])], records, 60, "cuda")
    assert "a forked process cannot use cuda" in capfd.readouterr().out
    assert [record["value"] for record in records.read() if "value" in record] == [1, 2]


def test_a_line_that_a_killed_process_left_unfinished_is_skipped(records):
    records.add("a", "one", {"value": 1})
    with records.path.open("a") as file:
        file.write('{"part": "a", "ca')
    assert records.read() == [{"part": "a", "case": "one", "value": 1}]


# ---- each measurement checks its own result


def test_wrong_masks_and_wrong_gradients_of_the_head_are_seen(settings, monkeypatch):
    forms = "mask", "varlen"
    assert all(found["right"] for found in correctness.check_attention(settings, forms))
    assert all(found["right"] for found in correctness.check_head(settings))
    assert all(found["right"] for found in correctness.check_layouts(settings))
    batches = iter(range(9))
    whole = correctness.random_batch

    def without_branches(*args):
        batch = whole(*args)
        return batch | ({"branch": torch.zeros_like(batch["branch"])} if next(batches) == 0 else {})

    monkeypatch.setattr(correctness, "random_batch", without_branches)
    found = [*correctness.check_attention(settings, forms)]
    assert [record["right"] for record in found] == [True, False]
    assert ["ms" in record for record in found] == [True, False]
    for name in ("LogProb", "dense"):
        monkeypatch.setattr(correctness, name, partial(halved, getattr(correctness, name)))
    assert not any(found["right"] for found in correctness.check_head(settings))


def halved(function, *args, **options):
    """The tile function with half of the softmax in its gradient."""
    tile = function(*args, **options)

    def wrong(*given):
        found = tile(*given)
        found.grad[found.grad * (1 if function is head.LogProb else -1) < 0] *= 0.5
        return found

    return wrong


def test_a_head_with_a_wrong_gradient_is_not_timed(settings, monkeypatch):
    [right] = lm_head.measure(settings, "ours", 32)
    assert right["right"]
    assert right["ms"] > 0
    wrong = lambda hidden, weight, targets: lm_head.ours(hidden, weight, targets) + 1e-3 * weight.float().sum()  # noqa: E731
    monkeypatch.setitem(lm_head.LOSSES, "ours", wrong)
    [found] = lm_head.measure(settings, "ours", 32)
    assert not found["right"]
    assert "ms" not in found


def test_generated_tokens_that_are_not_the_best_ones_are_not_timed(settings, monkeypatch):
    [right] = generation.measure(settings, "ours", 2)
    assert right["right"]
    assert right["tokens_per_second"] > 0
    monkeypatch.setitem(generation.GENERATE, "ours", lambda model, prompts, new: [[3] * new for _ in prompts])
    [found] = generation.measure(settings, "ours", 2)
    assert not found["right"]
    assert "tokens_per_second" not in found


def test_a_profile_names_operations_and_counts_reads(settings):
    list(inputs.write_inputs(settings))
    [found] = profiling.measure(settings, "dpo")
    assert any(name == "aten::mm" for name, _, _ in found["operations"])
    assert 0 < found["device_ms"] <= 1.5 * found["step_ms"]
    assert len(found["operations"]) == profiling.MOST


def test_checkpointing_that_changes_gradients_is_an_error(settings, monkeypatch):
    assert [record["length"] for record in lengths.measure(settings) if record["ms"]] == [32, 64]
    monkeypatch.setitem(lengths.TOLERANCE, torch.bfloat16, -1.0)
    [found] = lengths.measure(settings)
    assert not found["right"]
    assert "ms" not in found


# ---- the summary, and what starts it


RUN = {"side": "ours", "tokens_per_second": 60_000.0, "peak_gib": 20.0, "mfu": 0.5, "right": True}


def full_records():
    """A record of every kind, as of a whole run on a GPU."""
    yield {"part": "a", "case": "device", "versions": {"torch": "2.11.0", "triton": None}}
    yield {"part": "a", "case": "device", "name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.6}
    yield {"part": "a", "case": "device", "copy_tb_per_s": 3.0}
    yield {"part": "a", "case": "device", "dtype": "bfloat16", "matmul_tflop_per_s": 790.0}
    yield {"part": "a", "case": "layouts", "layout": "shared", "values": 1e-6, "gradient": 2e-6, "right": True}
    for rows in (512, 1024):
        yield {"part": "a", "case": "tiles", "by": "kernels", "rows": rows, "default": rows == 1024, "ms": 9.0,
               "tokens": 8192, "right": True}  # fmt: skip
    for method in training.METHODS:
        for side, rate in (("ours", 90_000.0), ("trl", 60_000.0)):
            yield RUN | {"part": "b", "case": "", "method": method, "side": side, "tokens_per_second": rate}
    for size in (1024, 4096):
        for by in ("products", "ours", "full logits", "TRL", "Liger"):
            yield {"part": "c", "case": by, "by": by, "hidden_size": size, "ms": 42.0, "peak_gib": 2.0,
                   "added_gib": 1.0}  # fmt: skip
    for shape in training.LORA_BATCHES:
        yield RUN | {"part": "d", "case": shape}
    for name in ("plain", "liger", "compile", "liger + compile"):
        yield RUN | {"part": "e", "case": name, "first_step_seconds": 9.0}
    for rows in generation.BATCHES:
        for by in generation.GENERATE:
            yield {"part": "f", "case": by, "by": by, "rows": rows, "tokens_per_second": 9e3, "ms_per_step": 15.0,
                   "added_gib": 1.0, "right": True}  # fmt: skip
    for method in summary.PUBLIC_MEMORY:
        yield RUN | {"part": "g", "case": f"gemma {method}", "method": method}
    for length in lengths.LENGTHS:
        yield {"part": "g", "case": "lengths", "right": True, "length": length, "ms": 9.0, "tokens_per_second": 9e3,
               "peak_gib": 9.0, "added_gib": 1.0}  # fmt: skip
    for method in ("dpo", "opd"):
        yield {"part": "h", "case": method, "method": method, "step_ms": 99.0, "device_ms": 90.0, "launches": 9,
               "waits": 1, "reads": 2, "operations": [["aten::mm", 9.0, 3]] * 20}  # fmt: skip
    for part in ORDER:
        yield {"part": part, "case": "part", "seconds": 50.0, "limit": 60}


def test_the_summary_of_a_whole_run_fits_and_has_every_part():
    lines = summary.render([*full_records()]).splitlines()
    assert len(lines) <= summary.MOST_LINES
    assert {line[0] for line in lines[:-1]} == {*ORDER}
    text = "\n".join(lines)
    assert not [line for line in lines if "FAILED" in line]
    assert "1.50x (goal 1.2)" in text
    assert "published 167 ms, 13.1 GiB" in text
    assert lines[-1].startswith("seconds of each part and its limit: a 50/60")


def test_the_summary_begins_with_what_failed_and_survives_a_part_that_was_killed():
    records = [{"part": "b", "case": f"sft {n}", "error": "OutOfMemoryError"} for n in range(20)]
    records += [{"part": "f", "case": "ours 8", "rows": 8, "right": False}, {"part": "g", "case": "x", "left_out": "y"}]
    records += [{"part": "c", "case": "cut", "hidden_size": 4096, "by": "cut"}, *full_records()]
    lines = summary.render(records).splitlines()
    assert lines[0] == "FAILED b sft 0: OutOfMemoryError"
    assert "FAILED: 13 more, listed in records.jsonl" in lines
    assert "left out for lack of time: g x" in lines
    assert "FAILED to summarise lm_head: KeyError: 'ms'" in lines
    assert any(line.startswith("b  opd") for line in lines)


def test_every_part_has_a_limit_and_together_they_fit_a_command(settings):
    parts = parts_of(ORDER, "cpu", True, settings.folder)
    limits = {part.letter: part.seconds for part in parts}
    assert {letter: limits[letter] for letter in "abcdefg"} == dict(a=60, b=150, c=60, d=90, e=60, f=60, g=45)
    assert sum(seconds for letter, seconds in limits.items() if letter in "abcdfe") < 560


@pytest.mark.parametrize(("arguments", "said"), [
    (["--parts", "az", "--device", "cpu", "--tiny"], "--parts: there is no part z"),
    (["--device", "cpu"], "--device cpu requires --tiny"),
])  # fmt: skip
def test_what_cannot_be_run_is_told_before_anything_starts(arguments, said):
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr


def test_documented_commands_fit_the_machines_limit():
    text = (REPOSITORY / "docs/benchmarks.md").read_text(encoding="utf-8")
    commands = [block for block in re.findall(r"```bash\n(.*?)```", text, re.S) if "benchmarks/gpu.sh" in block]
    assert commands
    assert all(len(command) <= COMMAND_CHARACTERS for command in commands)


@pytest.mark.slow
def test_the_whole_rehearsal_runs_from_wheels_in_an_environment_like_the_machines(tmp_path):
    """In a copy of what git tracks. It takes 4 GB of downloads the first time."""
    if not (shutil.which("python3.12") or [*Path.home().glob(".pyenv/versions/3.12*/bin/python3.12")]):
        pytest.skip("there is no Python 3.12, which the GPU machine has")
    copy = tmp_path / "copy"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    for name in filter(None, files.decode().split("\0")):
        if (REPOSITORY / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)
    out = tmp_path / "out"
    command = ["make", "gpu-rehearsal", f"OUT={out}", f"GPU_VENV={REPOSITORY / '.venv-gpu'}"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (out / "summary.txt").read_text().splitlines()
    assert len(lines) <= summary.MOST_LINES
    assert {line[0] for line in lines[:-1]} == {*ORDER}
    assert not any("FAILED" in line or "left out" in line for line in lines)
    rows = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert {row["versions"]["torch"].partition("+")[0] for row in rows if "versions" in row} == {"2.11.0"}
    assert {row["side"] for row in rows if row["part"] == "b" and "side" in row} == {"ours", "trl"}
    assert re.search(r"wheels [\d.]+ MB, working tree [\d.]+ MB, together [\d.]+ MiB", done.stdout)
