"""What holds in on-policy distillation: experiments on the quickstart's additions, with a mean and a spread over seeds.

    python -m benchmarks.opd [--only a f] [--seeds 0 1 2] [--out outputs/opd] [--jobs 2]

EXPERIMENTS says what is compared: settings of a recipe of recipes/tiny, each trained once a seed in a process of its
own on one thread, from that seed's student and teacher, which are trained first. A run that is there is not repeated.
Writes results.json and results.md, with a table for each experiment. docs/reference/opd_experiments.md describes them.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from recipes.tiny.make_data import solution

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "recipes" / "tiny"
STEPS = 400
ROLLOUTS = 64
"""Optimizer steps of a run, and rollouts of each."""
EVALUATIONS = 4
DIVERSE = 16
"""Prompts of experiment g."""
ENDS = ["<eos>", "<end>"]
"""Of experiment a: how the student ends, and how the teacher does."""
GOES_ON = 0.25
"""The share of its rows that say their sum once more, and of those that say it twice more, ...: as text may go on."""
UNLEARNED = -40.0
"""The student's logit of the teacher's end. Where it is just untrained, at -12 of 17 tokens, 200 steps find it."""
Result = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What one run is."""

    options: str = ""
    """Overrides of the train section, with spaces between them."""
    recipe: str = "opd"
    """Of recipes/tiny; `without_tail` is opd with the sum over the teacher's top tokens alone."""
    data: str | None = None
    """The rows, where they are not the recipe's: a file that `prepare` writes."""
    steps: int = STEPS
    seconds_of: str | None = None
    """Take as many steps as fit into the seconds of this setting, at the pace of the setting `pace_of`."""
    pace_of: str | None = None
    models: str = ""
    """Which student and teacher: the plain ones, of two ends, a student that says what it is told (hints), or a teacher
    with a tokenizer of its own (bpe)."""
    teacher: str = ""
    """The recipe's section, where it is not the seed's teacher alone; {home} is the folder of models."""


LONG = "max_completion_length=32 max_length=48"
SAMPLED = "loss_type=policy_gradient learning_rate=5e-4"
"""The recipe's 1.5e-3 is too much for its noise: with seed 0 69 % exact match, 75 % here, 68 % at 2e-4."""
SELF = "max_length=64"
GROUPS = "num_generations=4 per_device_train_batch_size=16 loss_type=policy_gradient learning_rate=3e-4"
GRADED = "function:exact_match,coef:1.0"
OWN = "{self: %s, ema: %s, prompt: '{{ completion }}={{ prompt }}'}"
"""The student of experiment j as its own teacher, which reads the solution and then the problem."""
KNOWN = 512
"""Additions that it has seen solved; with all 1,024 of the plain student it adds at 99 %, as telling helps it too."""
BPE = "{name_or_path: {home}/teacher, own_tokenizer: true}"
BPE_SIZE = 96
"""Tokens of experiment k's teacher; the student has 16."""
EXPERIMENTS: dict[str, tuple[str, dict[str, Setting]]] = {
    "a": (
        "student and teacher end with other tokens",
        {
            f"{name}, {ends}": Setting(f"{LONG} loss_type={loss}{option}", steps=200, models="ends")
            for name, loss in (("reverse KL", "reverse_kl"), ("policy gradient", "policy_gradient"))
            for ends, option in (("one outcome", ""), ("two", " teacher={merge_eos:false}"))
        },
    ),
    "b": (
        "which rollouts",
        {
            "on policy": Setting(),
            "on policy, a quarter of the steps": Setting(steps=STEPS // 4),
            **{
                f"replay, a quarter new, of {steps} steps": Setting(f"rollouts={{source:replay,replay_steps:{steps}}}")
                for steps in (4, 16, 64)
            },
            "frozen, one a prompt": Setting("rollouts=frozen"),
        },
    ),
    "c": (
        "horizon, at equal tokens",
        {
            "full": Setting(),
            "half": Setting("rollouts={train_max_tokens:6} per_device_train_batch_size=128"),
            "growing": Setting("rollouts={train_max_tokens:{from:4,to:16,steps:200}}"),
        },
    ),
    "d": (
        "token weights",
        {
            "none": Setting(),
            **{name: Setting(f"token_weights={name}") for name in ("cumulative", "top_share", "extremes")},
            "policy gradient, none": Setting(SAMPLED),
            "policy gradient, bounded": Setting(f"{SAMPLED} token_weights=bounded"),
            "policy gradient, sign": Setting(f"{SAMPLED} token_weights=sign"),
        },
    ),
    "e": (
        "the teacher's top k of 16",
        {
            "16: all": Setting(),
            "4, tail": Setting("teacher={top_k:4,top_k_remainder:tail}"),
            "4, residual": Setting("teacher={top_k:4,top_k_remainder:residual}"),
            "4, neither": Setting("teacher={top_k:4,top_k_remainder:residual}", recipe="without_tail"),
            "1, tail": Setting("teacher={top_k:1,top_k_remainder:tail}"),
            "1, residual": Setting("teacher={top_k:1,top_k_remainder:residual}"),
            "1, neither": Setting("teacher={top_k:1,top_k_remainder:residual}", recipe="without_tail"),
        },
    ),
    "f": (
        "losses and methods, at equal tokens and at equal seconds",
        {
            "OPD, reverse KL": Setting(),
            "OPD, forward KL": Setting("loss_type=forward_kl"),
            "OPD, JSD": Setting("loss_type=jsd"),
            "OPD, policy gradient": Setting(SAMPLED),
            "KD on the student's 1,024 rows": Setting(recipe="kd"),
            "KD on the teacher's answers": Setting(recipe="kd", data="teacher_answers.jsonl"),
            "SFT on the teacher's answers": Setting("max_length=32", recipe="sft", data="teacher_answers.jsonl"),
            "KD, seconds of OPD": Setting(
                recipe="kd",
                data="teacher_answers.jsonl",
                seconds_of="OPD, reverse KL",
                pace_of="KD on the teacher's answers",
            ),
            "SFT, seconds of OPD": Setting(
                "max_length=32",
                recipe="sft",
                data="teacher_answers.jsonl",
                seconds_of="OPD, reverse KL",
                pace_of="SFT on the teacher's answers",
            ),
        },
    ),
    "g": (
        "how many prompts",
        {
            "4096": Setting(),
            f"{DIVERSE}": Setting(data="few_prompts.jsonl"),
        },
    ),
    "i": (
        "a reward beside the teacher, 4 rollouts of 16 prompts a step",
        {
            "teacher": Setting(GROUPS),
            "both": Setting(f"{GROUPS} reward={{{GRADED}}}", data="solved_prompts.jsonl"),
        },
    ),
    "j": (
        "the student as its own teacher, which reads the solution",
        {
            **{
                f"{name}, {said}": Setting(
                    f"{SELF} loss_type={loss}", data="solved_prompts.jsonl", models="hints", teacher=own
                )
                for name, own in (
                    ("as it began", OWN.replace(", ema: %s", "") % "start"),
                    ("moving average, 0.999", OWN % ("ema", 0.999)),
                )
                for loss, said in (("reverse_kl", "reverse KL"), ("forward_kl", "forward KL"))
            },
            "moving average, 0.99, reverse KL": Setting(
                SELF, data="solved_prompts.jsonl", models="hints", teacher=OWN % ("ema", 0.99)
            ),
            "SFT on the solutions": Setting("max_length=48", recipe="sft", data="solved_prompts.jsonl", models="hints"),
        },
    ),
    "k": (
        "a teacher with a tokenizer of its own",
        {
            "the same tokenizer": Setting(),
            "its own, reverse KL": Setting("learning_rate=5e-4", models="bpe", teacher=BPE),
            "its own, policy gradient": Setting(SAMPLED, models="bpe", teacher=BPE),
            "the same, policy gradient": Setting(SAMPLED),
            "its own, KD on the student's 1,024 rows": Setting(recipe="kd", models="bpe", teacher=BPE),
            "the same, KD on the student's 1,024 rows": Setting(recipe="kd"),
        },
    ),
}
"""Letter -> what is compared, and its settings by name. h is read off the evaluations of f."""


def main() -> int:
    """Run what is not there yet, and write the tables; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.opd", description="Experiments of OPD.")
    parser.add_argument("--only", nargs="+", choices=[*EXPERIMENTS], default=[*EXPERIMENTS], help="which experiments")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("outputs/opd"), help="a folder for everything")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one core each")
    parser.add_argument("--fast", action="store_true", help="two steps a run: shows that everything runs")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, TINY / "make_data.py"], check=True)
    kinds = sorted({setting.models for letter in given.only for setting in EXPERIMENTS[letter][1].values()})
    chosen = {setting: None for letter in given.only for setting in EXPERIMENTS[letter][1].values()}
    with ThreadPoolExecutor(given.jobs) as pool:
        each(pool, lambda seed, kind: prepare(given, seed, kind), [(s, k) for s in given.seeds for k in kinds])
        for seed in given.seeds if "ends" in kinds else ():  # not in threads: transformers loads one model at a time
            unlearn_end(given.out / f"modelsends_{seed}")
        first = [setting for setting in chosen if not setting.seconds_of]
        each(pool, lambda setting, seed: result_of(given, setting, seed), [(x, s) for s in given.seeds for x in first])
        last = [setting for setting in chosen if setting.seconds_of]
        each(pool, lambda setting, seed: result_of(given, setting, seed), [(x, s) for s in given.seeds for x in last])
    results = {
        letter: {
            name: [result_of(given, setting, seed) for seed in given.seeds]
            for name, setting in EXPERIMENTS[letter][1].items()
        }
        for letter in given.only
    }
    page = "\n".join(pages(results, [baseline(given, seed, "") for seed in given.seeds] if "" in kinds else []))
    (given.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (given.out / "results.md").write_text(page + "\n", encoding="utf-8")
    print(page)
    return 0


def each(pool: ThreadPoolExecutor, function: Any, arguments: Sequence[tuple]) -> None:
    """Call the function with all of them. Raises the first error, once all have ended."""
    for done in [pool.submit(function, *some) for some in arguments]:
        done.result()


# ---- runs


def command(words: Sequence[Any], log: Path) -> None:
    """Run python with these words, on one thread; its output goes to a file. Raises RuntimeError where it fails."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run([sys.executable, *map(str, words)], env=environment, stdout=file, stderr=file, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))} failed:\n{log.read_text(encoding='utf-8')[-3000:]}")


def train(given: argparse.Namespace, recipe: str, folder: Path, overrides: Sequence[str]) -> None:
    """A run of recipes/tiny into `folder`, unless it is there."""
    if (folder / "all_results.json").exists():
        return
    module = ["-m", "hf_posttrain.run"]
    if recipe == "without_tail":
        module = ["-m", "benchmarks.opd_without_tail"]
        recipe = "opd"
    if given.fast:
        overrides = [*overrides, "train.max_steps=2", "train.eval_steps=1", "data.eval.limit=8", "data.train.limit=128"]
    start = time.perf_counter()
    command([*module, TINY / f"{recipe}.yaml", *overrides, f"train.output_dir={folder}"], folder / "log.txt")
    print(f"{folder.relative_to(given.out)}: {time.perf_counter() - start:.0f} s", flush=True)


def prepare(given: argparse.Namespace, seed: int, kind: str) -> None:
    """A seed's student and teacher, and the rows that are made of them. kind: `Setting.models`."""
    home = given.out / f"models{kind}_{seed}"
    for name, end in zip(("student", "teacher"), ENDS if kind == "ends" else (None, None), strict=True):
        overrides = [f"model.name_or_path={TINY / name}", f"train.seed={seed}"]
        if kind == "hints" and name == "student":
            write_told_rows(home / "told.jsonl", seed)
            overrides += [f"data.train.path={home / 'told.jsonl'}", "train.max_steps=800"]
        elif kind == "hints":
            continue
        elif kind == "bpe" and name == "teacher":
            overrides[0] = f"model.name_or_path={write_bpe_shape(home / 'teacher_shape')}"
            overrides.append("train.max_steps=1200")
        if end:
            shape = write_shape(home / f"{name}_shape", name, end)
            rows = home / f"{name}.jsonl"
            write_rows_that_go_on(rows, TINY / {"student": "few.jsonl", "teacher": "train.jsonl"}[name], seed)
            overrides += [f"model.name_or_path={shape}", f"data.train.path={rows}"]
        train(given, f"sft_{name}", home / name, overrides)
    if kind in ("ends", "bpe"):
        return
    prompts = (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    (home / "few_prompts.jsonl").write_text("\n".join(prompts[:DIVERSE]) + "\n", encoding="utf-8")
    sums = [map(int, json.loads(line)["prompt"].strip("=").split("+")) for line in prompts]
    solved = [json.dumps(solution(*pair)) for pair in sums]
    (home / "solved_prompts.jsonl").write_text("\n".join(solved) + "\n", encoding="utf-8")
    if kind:
        return
    if not (home / "teacher_answers.jsonl").exists():
        both = [f"{role}.name_or_path={home / 'teacher'}" for role in ("model", "teacher")]
        words = ["-m", "hf_posttrain.run", "sample", TINY / "opd.yaml", *both, f"train.seed={seed}"]
        command([*words, "--out", home / "teacher_answers.jsonl"], home / "sample.txt")


def unlearn_end(home: Path) -> None:
    """Give the student's embedding of the teacher's end the logit UNLEARNED where an answer ends: as in a base model
    that has read for long and never met it."""
    done = home / "unlearned"
    if done.exists():
        return
    model: Any = AutoModelForCausalLM.from_pretrained(home / "student")
    tokenizer = AutoTokenizer.from_pretrained(home / "student")
    rows = [json.loads(line) for line in (home / "student.jsonl").read_text(encoding="utf-8").splitlines()[:64]]
    with torch.no_grad():
        texts = [torch.tensor([tokenizer(row["prompt"] + row["completion"])["input_ids"]]) for row in rows]
        state = torch.cat([model.model(ids).last_hidden_state[0, -1:] for ids in texts]).mean(0)
        embedding = model.get_input_embeddings().weight
        embedding[tokenizer.convert_tokens_to_ids(ENDS[1])] = UNLEARNED * state / state.square().sum()
    model.save_pretrained(home / "student")
    done.touch()


def write_told_rows(file: Path, seed: int) -> None:
    """KNOWN of the student's rows, twice, and four times as many that say what their prompt has told: mere digits in
    the shape of a solution, so that nothing of additions is learned from them."""
    draw = random.Random(seed)
    rows = [json.loads(line) for line in (TINY / "few.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = rows[:KNOWN] * 2
    told = []
    for row in rows * 4:
        made = "".join(draw.choice("0123456789") if c.isdigit() else c for c in row["completion"])
        told.append({"prompt": f"{made}={draw.randrange(100, 1000)}+{draw.randrange(100, 1000)}=", "completion": made})
    lines = [json.dumps(row) for row in rows + told]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_bpe_shape(folder: Path) -> Path:
    """The teacher's shape with a tokenizer of its own: byte pairs of the numbers, so that 579 may be 57 and 9."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(" #### |[0-9]+|."), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    rows = [json.loads(line) for line in (TINY / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    trainer = trainers.BpeTrainer(vocab_size=BPE_SIZE, special_tokens=["<pad>", "<eos>"], show_progress=False)
    backend.train_from_iterator([row["prompt"] + row["completion"] for row in rows], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    config = AutoConfig.from_pretrained(TINY / "teacher")
    config.vocab_size = len(tokenizer)
    config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    return folder


def write_rows_that_go_on(file: Path, source: Path, seed: int) -> None:
    """The rows of `source`; GOES_ON of them say the sum again behind it, and so on."""
    draw = random.Random(seed)
    lines = []
    for row in map(json.loads, source.read_text(encoding="utf-8").splitlines()):
        total = row["completion"].split()[-1]
        while draw.random() < GOES_ON and len(row["completion"]) < 40:
            row["completion"] += f"={total}"
        lines.append(json.dumps(row))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_shape(folder: Path, name: str, end: str) -> Path:
    """recipes/tiny/`name` with a token more, of which one ends: tokenizer and config."""
    tokenizer = AutoTokenizer.from_pretrained(TINY / name)
    config = AutoConfig.from_pretrained(TINY / name)
    tokenizer.add_special_tokens({"additional_special_tokens": [ENDS[1]]})
    tokenizer.eos_token = end
    config.vocab_size = len(tokenizer)
    config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    return folder


def result_of(given: argparse.Namespace, setting: Setting, seed: int) -> Result:
    """What a setting's run with this seed came to; it is trained where it is not there."""
    home = given.out / f"models{setting.models}_{seed}"
    steps = setting.steps
    if setting.seconds_of:
        settings = next(settings for _, settings in EXPERIMENTS.values() if setting in settings.values())
        asked, pace = (result_of(given, settings[str(name)], seed) for name in (setting.seconds_of, setting.pace_of))
        steps = max(EVALUATIONS, round(asked["seconds"] / pace["seconds"] * pace["steps"]))
    overrides = [f"train.{option}" for option in setting.options.split()]
    overrides = [option.replace(",", ", ").replace(":", ": ") for option in overrides]
    overrides = [f"train.max_steps={steps}", f"train.eval_steps={max(steps // EVALUATIONS, 1)}", *overrides]
    overrides += [f"model.name_or_path={home / 'student'}", f"train.seed={seed}"]
    if setting.data:
        overrides.append(f"data.train.path={home / setting.data}")
    recipe = setting.recipe
    if recipe == "sft":  # of the student as it is, as the others go on from it
        recipe = "sft_student"
        overrides += ["model.from_scratch=false", "train.learning_rate=1.5e-3", "train.warmup_steps=10"]
    else:
        overrides.append(f"teacher.name_or_path={home / 'teacher'}")
        if setting.teacher:
            overrides[-1] = f"teacher={setting.teacher.replace('{home}', str(home))}"
    words = [
        setting.recipe,
        setting.options,
        setting.data,
        "seconds" if setting.seconds_of else setting.steps,
        setting.teacher,
    ]
    name = "_".join("".join(c if c.isalnum() else "-" for c in str(word)) for word in words if word)
    folder = given.out / f"{setting.models or 'plain'}_{seed}" / name
    train(given, recipe, folder, overrides)
    return read_result(folder)


def read_result(folder: Path) -> Result:
    """Exact match, divergence, rollouts and seconds of a run."""
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    history = state["log_history"]
    evaluated = [log for log in history if "eval_exact_match" in log]
    last = [log for log in history if "generation/stopped" in log][-3:]
    final = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    mean = lambda name: statistics.fmean(log[name] for log in last) if last else None  # noqa: E731
    curve = [(log["step"], log["eval_exact_match"], log.get("eval_distill/reverse_kl")) for log in evaluated]
    lengths = [log["generation/length"] for log in history if "generation/length" in log]
    evaluation = sum(log["eval_runtime"] for log in evaluated if log["step"])
    return {
        "steps": state["global_step"],
        "curve": curve,
        "exact_match": evaluated[-1]["eval_exact_match"],
        "before": evaluated[0]["eval_exact_match"],
        "reverse_kl": evaluated[-1].get("eval_distill/reverse_kl"),
        "seconds": final["train_runtime"] - evaluation,
        "stopped": mean("generation/stopped"),
        "length": mean("generation/length"),
        "lengths": lengths,
    }


def baseline(given: argparse.Namespace, seed: int, kind: str) -> tuple[float, float]:
    """Exact match of a seed's student and teacher."""
    home = given.out / f"models{kind}_{seed}"
    student, teacher = (read_result(home / name)["exact_match"] for name in ("student", "teacher"))
    return student, teacher


# ---- tables


def pages(results: dict[str, dict[str, list[Result]]], ends: Sequence[tuple[float, float]]) -> Iterator[str]:
    """A table for each experiment, and the line of h."""
    if ends:
        student, teacher = zip(*ends, strict=True)
        yield f"student {spread(student, '.1%')}, teacher {spread(teacher, '.1%')} exact match\n"
    for letter, settings in results.items():
        yield f"## {letter}: {EXPERIMENTS[letter][0]}\n"
        yield "| setting | exact match | of the gap | reverse KL | stopped | length | seconds |"
        yield "|---|---|---|---|---|---|---|"
        for name, runs in settings.items():
            plain = ends and not EXPERIMENTS[letter][1][name].models
            gap = (
                [
                    (run["exact_match"] - low) / (high - low) if high > low else None
                    for run, (low, high) in zip(runs, ends, strict=True)
                ]
                if plain
                else [None]
            )
            columns = [
                ("exact_match", ".1%"),
                ("reverse_kl", ".3f"),
                ("stopped", ".2f"),
                ("length", ".1f"),
                ("seconds", ".0f"),
            ]
            cells = [spread([run[key] for run in runs], form) for key, form in columns]
            yield "| " + " | ".join([name, cells[0], spread(gap, ".0%"), *cells[1:]]) + " |"
        yield ""
    if "f" in results:
        points = np.array(
            [
                (kl**0.5, match)
                for name, runs in results["f"].items()
                if name.startswith("OPD")
                for run in runs
                for _, match, kl in run["curve"]
                if kl is not None and kl > 0
            ]
        )
        slope, constant = np.polyfit(points[:, 0], points[:, 1], 1)
        away = points[:, 1] - (slope * points[:, 0] + constant)
        fit = 1 - (away**2).sum() / ((points[:, 1] - points[:, 1].mean()) ** 2).sum()
        line = f"exact match = {constant:.2f} {slope:+.2f} sqrt(reverse KL)"
        yield f"## h: {line}, R2 {fit:.3f} over {len(points)} evaluations of f"


def spread(values: Sequence[float | None], form: str) -> str:
    """Mean, and least to most."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"{statistics.fmean(known):{form}} ({min(known):{form}} to {max(known):{form}})"


if __name__ == "__main__":
    sys.exit(main())
