"""--preprocess-only and the cache: rows are tokenised once, and other processes wait however long that takes."""

import importlib
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch.distributed as dist
from models_for_tests import tiny_model
from processes_for_tests import on_two
from rows_for_tests import raw_row
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import quick
from transformers import Qwen3Config

from hf_posttrain import SFTConfig, SFTTrainer, run
from hf_posttrain.data.row_schema import SUPERVISED
from hf_posttrain.engines import launch
from hf_posttrain.methods import METHODS
from hf_posttrain.models import load as models
from hf_posttrain.recipe import build
from hf_posttrain.recipe.read import load_recipe

prepare = importlib.import_module("hf_posttrain.data.prepare")
REPOSITORY = Path(__file__).parents[2]
RECIPE = """\
method: sft
model: {name_or_path: tiny, from_scratch: true}
data: {train: {path: rows.jsonl}, eval: {path: eval.jsonl}}
train: {output_dir: out, max_steps: 1, per_device_train_batch_size: 2, use_cpu: true, save_strategy: no}
"""
ONLY = "--preprocess-only"
VARIANTS = {
    **{name: (name, []) for name in METHODS},
    "sft, packed": ("sft", ["train.packing=true"]), "sft, chat": ("sft", ["train.apply_chat_template=true"]),
}  # fmt: skip


def options_of(method):
    """What a recipe of the method needs beyond that of SFT."""
    row = METHODS[method]
    teacher = ["teacher={name_or_path: tiny, from_scratch: true}"] if row.second == "teacher" else []
    return [f"method={method}", *teacher, *(["train.max_completion_length=4"] if row.rows.sampled else [])]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with recipe.yaml and a tiny model; `write_rows` adds its data."""
    Qwen3Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, vocab_size=300,
    ).save_pretrained(tmp_path / "tiny")  # fmt: skip
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    write_rows(tmp_path, SUPERVISED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(folder, kind):
    for name in ("rows", "eval"):
        rows = [json.dumps(raw_row(kind, f"{name} {n}", "b", "c")) for n in range(8)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))


def cached():
    return {path for path in Path(datasets.config.HF_DATASETS_CACHE).rglob("*.arrow")}


@pytest.fixture
def tokenised(monkeypatch):
    """Numbers of rows of each batch that this process tokenises."""
    sizes, encode = [], prepare.encode
    monkeypatch.setattr(prepare, "encode", lambda *args: (sizes.append(len(args[0])), encode(*args))[1])
    return sizes


# ---- once


@pytest.mark.parametrize("variant", quick("dpo", "opd", "sft, packed", among=VARIANTS))
def test_training_tokenises_nothing_after_preprocess_only(folder, monkeypatch, capsys, tokenised, variant):
    method, options = VARIANTS[variant]
    options = options_of(method) + options
    write_rows(folder, METHODS[method].rows)
    with monkeypatch.context() as patch:
        patch.setattr(models, "load_model", lambda *args, **kwargs: pytest.fail("a model is loaded"))
        assert run.main(["recipe.yaml", ONLY, *options]) == 0
    assert tokenised == [8, 8]
    assert not Path("out").exists()
    files = cached()
    assert run.main(["recipe.yaml", *options]) == 0
    assert tokenised == [8, 8]
    assert cached() == files
    assert Path("out/model.safetensors").exists()


def test_a_line_for_each_data_set(folder, capsys):
    assert run.main(["recipe.yaml", ONLY, "train.max_length=8", "data.train.limit=2"]) == 0
    train, evaluation = capsys.readouterr().out.splitlines()
    assert train.startswith("train: rows: 2, tokens: 16, cached in ")  # "rows 0" is 6 tokens, "b" and the end 2
    assert evaluation.startswith("eval: rows: 8, tokens: 64, cached in ")
    assert list(Path(train.split(" cached in ")[1]).glob("cache-*.arrow"))


def test_a_stream_has_nothing_to_cache(folder, capsys):
    assert run.main(["recipe.yaml", "data.train.streaming=true", ONLY, "data.eval=null"]) == 0
    assert capsys.readouterr().out == "train: a stream, which is not cached, since it is tokenized while it is read\n"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.max_lenght=3", "command line: unknown key train.max_lenght"),
        ("train.fsdp=[1]", "command line: train.fsdp must be"),
        ("train.merge_lora=true", "command line: train.merge_lora requires an adapter. Set model.lora"),
        ("data.train.columns={completion: answer}", "no column 'answer'"),
        ("data.train.path=bad.jsonl", "command line: train (bad.jsonl), row 0 (line 1): column 'completion': expected"),
    ],
)
def test_mistakes_are_found_by_preprocess_only(folder, capsys, override, message):
    (folder / "bad.jsonl").write_text('{"prompt": "q", "completion": 7}\n')
    assert run.main(["recipe.yaml", ONLY, override]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "override",
    [
        "train.fsdp=true", "train.deepspeed=none.json", "train.bf16=true", "train.fp16=true", "train.tf32=true",
        "train.use_cpu=false", "train.parallelism_config={sp_size: 2}", "train.optim=adamw_torch_fused",
    ],
)  # fmt: skip
def test_preprocess_only_needs_no_engine_and_no_gpu(folder, tokenised, override):
    assert run.main(["recipe.yaml", ONLY, override]) == 0
    assert run.main(["recipe.yaml", ONLY]) == 0
    assert tokenised == [8, 8]


@pytest.mark.parametrize("workers", [(1, 2), (2, 1), (2, 3), (3, "null")])
def test_the_cache_holds_for_any_number_of_processes(folder, workers):
    found = []
    for count in workers:
        assert run.main(["recipe.yaml", ONLY, f"train.dataset_num_proc={count}"]) == 0
        found.append(cached())
    assert found[0] == found[1]


def test_rows_and_fingerprint_are_the_same_for_any_number_of_processes(folder):
    config = {"output_dir": "out", "use_cpu": True, "report_to": "none"}
    rows = []
    for count in (None, 2):
        raw = datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir=f"cache {count}")
        rows.append(SFTTrainer.prepare(raw, byte_tokenizer(), SFTConfig(dataset_num_proc=count, **config), "train"))
    one, several = rows
    assert one[:] == several[:]
    assert one._fingerprint == several._fingerprint


# ---- several processes


def prepared_slowly(rank, folder, timeout, drop_in):
    """(rows that this rank tokenised, tokens of all) where that takes longer than a collective may."""
    os.chdir(folder)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))  # what ddp_timeout sets, but not with use_cpu
    sizes, encode = [], prepare.encode

    def slow(samples, *args):
        time.sleep(timeout + 2)
        sizes.append(len(samples))
        return encode(samples, *args)

    prepare.encode = slow
    if drop_in:
        raw = datasets.load_dataset("json", data_files="rows.jsonl", split="train")
        args = SFTConfig(output_dir="out", use_cpu=True, report_to="none")
        rows = SFTTrainer(tiny_model(), args, train_dataset=raw, processing_class=byte_tokenizer()).train_dataset
    else:
        recipe = load_recipe("recipe.yaml", ["data.eval=null"])
        trainer_class, config = build.configure(recipe)
        from hf_posttrain.recipe.datasets import prepare_data

        rows = prepare_data(recipe, trainer_class, build.check_models(recipe)[0], config)[0]["train"]
    dist.barrier()
    return sizes, sum(map(len, rows["prompt_ids"])), rows._fingerprint


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize("drop_in", [False, True], ids=["recipe", "drop-in"])
def test_tokenising_longer_than_ddp_timeout_goes_on(folder, drop_in):
    first, second = on_two(prepared_slowly, "ddp", str(folder), 2, drop_in)
    assert first[0] == [8]
    assert second[0] == []  # it found the cache
    assert first[1:] == second[1:]


def in_turn(rank, log, fails):
    """Four processes on two machines, of which the second is slower; each writes down when it begins and ends."""
    dist.init_process_group("gloo")
    done = []
    for turn in range(2):
        try:
            with launch.main_process_first(SimpleNamespace(local_process_index=rank % 2)):
                done.append((turn, time.time()))
                time.sleep(0.5 * (rank == 2))
                done.append((turn, time.time()))
                if fails:
                    raise ValueError("a mistake")
        except ValueError:
            done.append((turn, "failed"))
    return done, time.time()


@pytest.mark.engines
@pytest.mark.parametrize("fails", [False, True])
def test_the_first_process_of_each_machine_goes_first(tmp_path, fails):
    """And none goes on before the first of every machine is done, or a collective would wait for that machine."""
    ranks = on_two(in_turn, "ddp", str(tmp_path), fails, world=4)
    for turn in range(2):
        spans = [[at for number, at in done if number == turn and at != "failed"] for done, _ in ranks]
        assert max(spans[0][1], spans[2][1]) <= min(spans[1][0], spans[3][0])
    assert all(left >= ranks[2][0][-1 - fails][1] for _, left in ranks)
    assert all(((1, "failed") in done) == fails for done, _ in ranks)


def test_progress_is_shown_by_the_first_process_alone(monkeypatch):
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "0")
        monkeypatch.setattr(run, "ERROR_DELAY", 0)
        run.main(["none.yaml"])
        assert os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] == rank


def command(*arguments, cache):
    env = os.environ | {"HF_DATASETS_CACHE": str(cache), "HF_DATASETS_DISABLE_PROGRESS_BARS": "0"}
    line = [sys.executable, *arguments]
    env |= {"PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(line, env=env, text=True, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr, {path for path in cache.rglob("*.arrow")}


@pytest.mark.slow
@pytest.mark.engines
def test_two_launched_processes_find_what_the_command_prepared(folder):
    """Prepared with no launcher and another number of processes; one line each from the first rank alone."""
    cache, launcher = folder / "cache", ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    workers = "train.dataset_num_proc=2"
    out, err, files = command("-m", "hf_posttrain.run", "recipe.yaml", ONLY, workers, cache=cache)
    lines = [line for line in out.splitlines() if "cached in" in line]
    assert [line.split()[0] for line in lines] == ["train:", "eval:"]
    assert "Tokenizing train (rows.jsonl)" in err
    assert "Tokenizing eval (eval.jsonl)" in err
    again, err, same = command(*launcher, "-m", "hf_posttrain.run", "recipe.yaml", ONLY, cache=cache)
    assert [line for line in again.splitlines() if "cached in" in line] == lines
    assert "Tokenizing" not in err
    _, err, after = command(*launcher, "-m", "hf_posttrain.run", "recipe.yaml", cache=cache)
    assert "Tokenizing" not in err
    assert files == same == after
