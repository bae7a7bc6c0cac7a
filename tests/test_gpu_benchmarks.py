"""The benchmarks for a GPU, without one: no part harms another, and each checks its own result before it is timed."""

import gzip
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases_for_tests import exits, fails_if_forked, hangs, is_killed, raises, two_results

from benchmarks.gpu import correctness, generation, inputs, lengths, lm_head, profiling, summary, supervisor, training
from benchmarks.gpu.__main__ import ORDER, TOTAL_SECONDS, keep_earlier, parts_of
from benchmarks.gpu.settings import Settings, within
from benchmarks.gpu.supervisor import Case, Part, Records, run_parts
from hf_posttrain.scoring import head

REPOSITORY = Path(__file__).parents[1]
COMMAND_CHARACTERS = 2000
"""The longest command that the GPU machine takes."""


@pytest.fixture
def records(tmp_path, monkeypatch):
    """An empty file of results; processes are started with torch alone imported."""
    monkeypatch.setattr(supervisor, "PRELOAD", "torch")
    supervisor.start_server()
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


@pytest.mark.slow
def test_a_part_ends_at_its_limit_and_the_next_one_begins(records):
    cases = [Case("hangs", hangs), Case("never", two_results)]
    run_parts([Part("a", "slow", 5, cases), Part("b", "good", 30, [Case("good", two_results)])], records, 60, "cpu")
    found = records.read()
    assert {r["case"]: r["left_out"] for r in found if "left_out" in r} == {
        "hangs": "ended by the limit of its part", "never": "no time left",
    }  # fmt: skip
    assert [record["value"] for record in found if record["part"] == "b" and "value" in record] == [1, 2]
    assert [record["limit"] for record in found if record["case"] == "part"] == [5, 30]
    assert "not measured, or not to the end: a all" not in summary.render(found)
    assert "not measured, or not to the end: a never" in summary.render(found)


def test_no_part_begins_after_the_limit_of_all(records):
    run_parts([Part("a", "late", 60, [Case("good", two_results)])], records, 0, "cpu")
    assert [record.get("left_out") for record in records.read() if record["case"] == "good"] == ["no time left"]
    assert "not measured, or not to the end: a all" in summary.render(records.read())


def test_a_run_without_a_usable_device_ends_at_once(records, capfd):
    with pytest.raises(SystemExit, match="no process can use cuda"):
        run_parts([Part("a", "good", 60, [Case("good", two_results)])], records, 60, "cuda")
    said = capfd.readouterr().out
    assert "cuda cannot be used in a process started by forkserver" in said
    assert "cuda cannot be used in a process started by spawn" in said


def test_where_a_forked_process_cannot_use_the_device_processes_are_fresh(records, monkeypatch):
    monkeypatch.setattr(supervisor, "_use_device", fails_if_forked)
    run_parts([Part("a", "good", 60, [Case("good", two_results)])], records, 60, "cpu")
    assert [record["value"] for record in records.read() if "value" in record] == [1, 2]


def test_a_preloaded_module_that_raises_ends_no_run(tmp_path, monkeypatch):
    """The server dies; processes are started fresh."""
    code = """
import sys
from pathlib import Path
sys.path[:0] = ["tests/support"]
from benchmarks.gpu import supervisor
from benchmarks.gpu.supervisor import Case, Part, Records, run_parts
from cases_for_tests import two_results
supervisor.PRELOAD = "raises_when_imported"
supervisor.start_server()
run_parts([Part("a", "good", 60, [Case("good", two_results)])], Records(Path(sys.argv[1])), 60, "cpu")
"""
    (tmp_path / "raises_when_imported.py").write_text("raise RuntimeError")
    records = Records(tmp_path / "records.jsonl")
    path = f"{tmp_path}:{REPOSITORY / 'tests/support'}:{REPOSITORY}"
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code, records.path], cwd=REPOSITORY, env=environment, check=True, timeout=120)
    assert [record["value"] for record in records.read() if "value" in record] == [1, 2]


def test_a_line_that_a_killed_process_left_unfinished_is_skipped_and_harms_no_later_one(records):
    records.add("a", "one", {"value": 1})
    with records.path.open("a") as file:
        file.write('{"part": "a", "ca')
    records.add("a", "two", {"value": 2})
    assert [record["value"] for record in records.read()] == [1, 2]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_interrupted_run_leaves_no_process_and_readable_records(number, code, tmp_path):
    """The measurement that runs is killed with the run; after a signal that can be caught there is a summary too."""
    # a shell that starts pytest in the background has it ignore Ctrl-C
    script = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script += "from cases_for_tests import interrupted; sys.exit(interrupted(sys.argv[1]))"
    path = f"{REPOSITORY / 'tests/support'}:{REPOSITORY}"
    out = tmp_path / "out"
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", script, out]
    run = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL)
    records = Records(out / "records.jsonl")
    deadline = time.monotonic() + 240
    while not any("pid" in record for record in records.read()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    [measurement] = [record["pid"] for record in records.read() if "pid" in record]
    run.send_signal(number)
    assert run.wait(120) == code
    while Path(f"/proc/{measurement}").exists() and "zombie" not in Path(f"/proc/{measurement}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert (out / "summary.txt").exists() == (number != signal.SIGKILL)
    assert "not measured, or not to the end: b all" in summary.render(records.read())


# ---- each measurement checks its own result


@pytest.mark.slow
def test_wrong_masks_and_wrong_gradients_of_the_head_are_seen(settings, monkeypatch):
    forms = "mask", "varlen"
    assert all(found["right"] for found in correctness.compare_attention(settings, forms))
    assert all(found["right"] for found in correctness.check_head(settings))
    assert all(found["right"] for found in correctness.check_layouts(settings))
    batches = iter(range(9))
    whole = correctness.random_batch

    def without_branches(*args):
        batch = whole(*args)
        return batch.replace(branch=torch.zeros_like(batch["branch"])) if next(batches) == 0 else batch

    monkeypatch.setattr(correctness, "random_batch", without_branches)
    found = [*correctness.compare_attention(settings, forms)]
    assert [record["right"] for record in found] == [True, False]
    assert ["ms" in record for record in found] == [True, False]
    for name in ("LogProb", "dense_divergence"):
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


def without_softmax(hidden, weight, targets):
    """The value of the cross-entropy, with the gradient of the target's logit alone."""
    logits = (hidden @ weight.T).float()
    own = logits.gather(-1, targets[:, None])[:, 0]
    return (logits.detach().logsumexp(-1) - own).mean()


def with_nan(hidden, weight, targets):
    """A gradient of the hidden states that is not a number, next to a right loss and a right gradient of the weight."""
    hidden.register_hook(lambda gradient: gradient * math.nan)
    return lm_head.ours(hidden, weight, targets)


@pytest.mark.parametrize("wrong", [without_softmax, with_nan])
def test_a_head_with_a_wrong_gradient_is_not_timed(wrong, settings, monkeypatch):
    [right] = lm_head.measure(settings, "ours", 32)
    assert right["right"]
    assert right["ms"] > 0
    monkeypatch.setitem(lm_head.LOSSES, "ours", wrong)
    [found] = lm_head.measure(settings, "ours", 32)
    assert not found["right"]
    assert "ms" not in found


def test_nan_is_within_no_tolerance():
    assert within([1e-3, 0.0], 1e-2)
    assert not within([1e-3, math.nan], 1e-2)
    logits = torch.full((1, 4, 8), math.nan)
    model = type("Model", (), {"device": "cpu", "__call__": lambda self, input_ids: SimpleNamespace(logits=logits)})()
    assert math.isnan(generation.worst_gap(model, [[1, 2]], [[3, 4]]))
    assert not generation.worst_gap(model, [[1, 2]], [[3, 4]]) <= generation.NEAR_BEST


def test_generated_tokens_that_are_not_the_best_ones_are_not_timed(settings, monkeypatch):
    for by in generation.GENERATE:
        [ends, *timed] = generation.measure(settings, by)
        assert ends["right"]
        assert ends["ended"] >= 1
        assert all(right["right"] and right["tokens_per_second"] > 0 for right in timed)
    monkeypatch.setitem(generation.GENERATE, "ours", lambda model, prompts, new, ends=(): [[3] * new for _ in prompts])
    for found in generation.measure(settings, "ours"):
        assert not found["right"]
        assert "tokens_per_second" not in found


def test_a_run_in_another_layout_than_the_one_to_measure_is_wrong(settings, monkeypatch):
    """As when the trainer's own check of the first batch has found a fault, and chosen padded rows."""
    list(inputs.write_inputs(settings))
    [right] = training.train(settings, "ours", "sft")
    assert right["right"]
    monkeypatch.setattr(training, "measure", lambda *_: right | {"layout": "padded", "peak_gb": 1.0, "token_flops": 1.0,
                                                                 "machine_flops": 1.0})  # fmt: skip
    [found] = training.train(settings, "ours", "sft")
    assert not found["right"]


def test_a_profile_names_operations_counts_reads_and_leaves_a_trace(settings, tmp_path):
    list(inputs.write_inputs(settings))
    [found] = profiling.measure(replace(settings, out=tmp_path), "dpo")
    with gzip.open(tmp_path / "trace-dpo.json.gz", "rt") as file:
        assert any(event["name"] == "aten::mm" for event in json.load(file)["traceEvents"])
    assert any(name == "aten::mm" for name, _, _ in found["operations"])
    assert 0 < found["device_ms"] <= 1.5 * found["step_ms"]
    assert len(found["operations"]) == profiling.MOST
    assert found["host_operations"] == found["operations"]


def test_checkpointing_that_changes_gradients_is_an_error(settings, monkeypatch):
    assert [record["length"] for record in lengths.measure(settings) if record["ms"]] == [32, 64]
    monkeypatch.setitem(lengths.GRADIENTS, torch.bfloat16, -1.0)
    found = [*lengths.measure(settings)]
    assert [record["right"] for record in found] == [False, True]
    assert "ms" not in found[0]


# ---- the summary, and what starts it


RUN = {"side": "ours", "tokens_per_second": 60_000.0, "rows_per_second": 9.0, "peak_gib": 20.0, "mfu": 0.5,
       "right": True, "tokens": 9}  # fmt: skip


def full_records():
    """A record of every kind, as of a whole run on a GPU."""
    yield {"part": "-", "case": "machine", "versions": {"torch": "2.11.0", "triton": None}, "tiny": False}
    yield {"part": "-", "case": "machine", "name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.6}
    yield {"part": "a", "case": "ceilings", "copy_tb_per_s": 3.0}
    yield {"part": "a", "case": "ceilings", "dtype": "bfloat16", "matmul_tflop_per_s": 790.0}
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
                   "peak_gib": 2.0, "added_gib": 1.0, "right": True}  # fmt: skip
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
    assert lines[0] == "NVIDIA H100 80GB HBM3, 80 GiB, torch 2.11.0"
    assert {line[0] for line in lines[1:-1]} == {*ORDER}
    text = "\n".join(lines)
    assert not [line for line in lines if "FAILED" in line]
    assert "1.50x (goal 1.2)" in text
    assert "published 167 ms, 13.1 GiB" in text
    assert lines[-1].startswith("seconds of each part and its limit: a 50/60")


def test_sides_that_train_other_tokens_are_a_failure():
    sides = enumerate(("ours", "trl"))
    rows = [RUN | {"part": "b", "case": "", "method": "sft", "side": side, "tokens": n} for n, side in sides]
    assert "FAILED b sft: the sides train different numbers of tokens: [0, 1]" in summary.render(rows)


def test_the_summary_begins_with_what_failed_and_survives_a_part_that_was_killed():
    records = [{"part": "b", "case": f"sft {n}", "error": "OutOfMemoryError"} for n in range(20)]
    records += [{"part": "f", "case": "ours", "rows": 8, "right": False}, {"part": "g", "case": "x", "left_out": "y"}]
    records += [{"part": "-", "case": "plan", "planned": {"g": ["x", "lengths"], "q": ["z"]}}]
    records += [{"part": "c", "case": "cut", "hidden_size": 4096, "by": "cut"}, *full_records()]
    lines = summary.render(records).splitlines()
    assert lines[1] == "FAILED b sft 0: OutOfMemoryError"
    assert "FAILED: 13 more, listed in records.jsonl" in lines
    assert "not measured, or not to the end: g x; q all" in lines
    assert "FAILED to summarise lm_head: KeyError: 'ms'" in lines
    assert any(line.startswith("b  opd") for line in lines)


def test_every_part_has_a_limit_and_together_they_fit_a_command(settings):
    limits = {part.letter: part.seconds for part in parts_of(ORDER, "cuda", False, settings.folder)}
    rehearsal = {part.letter: part.seconds for part in parts_of(ORDER, "cpu", True, settings.folder)}
    assert rehearsal == {letter: 4 * seconds for letter, seconds in limits.items()}
    assert {letter: limits[letter] for letter in "abcdefg"} == dict(a=60, b=150, c=30, d=100, e=100, f=50, g=60)
    assert sum(limits[letter] for letter in "abcdfeg") < TOTAL_SECONDS  # the last part, h, may be cut


@pytest.mark.parametrize(("arguments", "said"), [
    (["--parts", "az", "--device", "cpu", "--tiny"], "--parts: there is no part z"),
    (["--parts", "", "--device", "cpu", "--tiny"], "--parts is empty"),
    (["--limit", "0", "--device", "cpu", "--tiny"], "--limit must be positive"),
    (["--summary", "docs/reference/benchmarks.md"], "docs/reference/benchmarks.md is no file of records"),
    (["--device", "cpu"], "--device cpu requires --tiny"),
])  # fmt: skip
def test_what_cannot_be_run_is_told_before_anything_starts(arguments, said):
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(("given", "said"), [
    ({"LIMIT": "0"}, "LIMIT must be a positive number"), ({"PARTS": "z"}, "PARTS has letters from a to h"),
    ({"DRY": "yes"}, "DRY must be 1 or 0"), ({"WHEELS": ".nothing"}, "there are no wheels in .nothing"),
])  # fmt: skip
def test_the_script_says_what_is_wrong_before_it_installs_anything(given, said, tmp_path):
    environment = os.environ | {"OUT": str(tmp_path / "out"), "PYTHON": sys.executable} | given
    command = ["bash", "benchmarks/gpu.sh"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_records_of_an_earlier_run_in_the_folder_are_kept(tmp_path):
    for number in (1, 2):
        (tmp_path / "records.jsonl").write_text(str(number))
        keep_earlier(tmp_path / "records.jsonl")
        assert (tmp_path / f"records.{number}.jsonl").read_text() == str(number)


def test_documented_commands_fit_the_machines_limit():
    text = (REPOSITORY / "docs/reference/benchmarks.md").read_text(encoding="utf-8")
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
    subprocess.run("git init -q && git add -A", shell=True, cwd=copy, check=True)  # wheels.sh measures what git tracks
    out = tmp_path / "out"
    command = ["make", "gpu-rehearsal", f"OUT={out}", f"GPU_VENV={REPOSITORY / '.venv-gpu'}"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (out / "summary.txt").read_text().splitlines()
    assert len(lines) <= summary.MOST_LINES
    assert lines[0].startswith("REHEARSAL")
    assert {line[0] for line in lines[1:-1]} == {*ORDER}
    assert not any("FAILED" in line or line.startswith("not measured") for line in lines)
    rows = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert {row["versions"]["torch"].partition("+")[0] for row in rows if "versions" in row} == {"2.11.0"}
    assert {row["side"] for row in rows if row["part"] == "b" and "side" in row} == {"ours", "trl"}
    assert re.search(r"wheels [\d.]+ MB, working tree [\d.]+ MB, together [\d.]+ MB", done.stdout)
