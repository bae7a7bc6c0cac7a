"""Experiments with SmolLM2 135M Instruct and Gemma 3 270M.

    python -m recipes.real.experiments [prune lora preferences cross on_policy rounds] [--seeds 0 1 2] [--output FOLDER]

Run `make real-models` first. Each experiment runs the recipes of this folder and commands of hf-posttrain, and writes
its table to FOLDER/NAME.md after each run. A run or file that is complete is not repeated: after an interruption, run
the same command again. The values of all seeds are in FOLDER/NAME.json: with a copy of this file, another machine adds
seeds to the table. `--fast` runs a few steps of each recipe, which shows that everything works.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.scoring.cpu import bf16_instructions

HERE = Path(__file__).parent
MODELS = Path("outputs/real")
"""Folder in which `make real-models` links the models and writes the rows."""
DATA = MODELS / "data"
FAST = [
    "train.max_steps=2",
    "train.logging_steps=1",
    "data.eval.limit=2",
    "data.train.limit=64",
]
"""Overrides that only show that everything runs."""
ROWS = 320
"""Rows of GSM8K that a run trains on."""
ANSWERED = 50
"""Held-out problems of GSM8K that a model is evaluated on, one batch."""
SOLUTION_TOKENS = 144
"""Longest answer to a problem of GSM8K."""
SUM_TOKENS = 12
"""Longest answer to an addition."""
SEEDS = {"prune": [0, 1, 2], "on_policy": [0, 1, 2]}
"""Seeds of the experiments that run with several unless the command line names others."""
Row = dict[str, Any]


@dataclass
class Lab:
    """A folder of runs, each of which is computed once."""

    home: Path
    seeds: list[int]
    fast: bool

    def train(self, recipe: str, name: str, *overrides: str) -> Path:
        """Return the folder of a run of the recipe, which runs unless it is complete."""
        file = HERE / f"{recipe}.yaml"
        options = [*overrides, f"train.output_dir={self.home / name}", *(FAST if self.fast else [])]
        if self.fast:
            lengths = {"max_completion_length", "eval_max_completion_length"} & {*load_recipe(file).train}
            options += [f"train.{name}=8" for name in sorted(lengths)]
        options += ["train.bf16=true"] if bf16_instructions() else []
        return self.run_once(name, "-m", "hf_posttrain.run", file, *options)

    def train_trl(self, name: str, seed: int) -> Path:
        """Return the folder of a run of trl_lora.py, which runs unless it is complete."""
        steps = ["--max_steps", 2] if self.fast else []
        return self.run_once(name, "-m", "recipes.real.trl_lora", self.home / name, "--seed", seed, *steps)

    def run_once(self, name: str, *words: object) -> Path:
        """Return the folder of a run with these words, which runs unless it is complete."""
        folder = self.home / name
        if not (folder / "seconds.json").is_file():
            began = time.perf_counter()
            self.python(*words, logged=True)
            (folder / "seconds.json").write_text(f"{time.perf_counter() - began:.1f}\n", encoding="utf-8")
        return folder

    def write(self, command: str, *words: object, out: Path) -> Path:
        """Return the file or folder that a command writes, which runs unless it exists."""
        if not out.exists():
            self.command(command, *words, *([out] if command in ("merge", "prune") else ["--out", out]))
        return out

    def evaluate(self, model: Path, name: str, *options: object) -> dict[str, float]:
        """Return what `hf-posttrain eval` prints for a model, which is kept in a file of the given name."""
        kept = self.home / "evaluations" / f"{model.name}_{name}.json"
        if not kept.is_file():
            limit = ["--limit", 2] if self.fast else []
            printed = self.command("eval", model, *options, "--output", kept.with_suffix(""), "--json", *limit)
            write_text(kept, printed)
        metrics: dict[str, float] = json.loads(kept.read_text(encoding="utf-8"))[0]["metrics"]
        return metrics

    def command(self, *words: object) -> str:
        """Run a command of hf-posttrain in a process of its own, and return its output."""
        return self.python("-m", "hf_posttrain.run", *words)

    def python(self, *words: object, logged: bool = False) -> str:
        """Run Python in a process of its own, and return its output, or write it to the log."""
        print(time.strftime("%H:%M:%S"), *words, flush=True)
        with (self.home / "log.txt").open("a", encoding="utf-8") as log:
            done = subprocess.run(
                [sys.executable, *map(str, words)],
                stdout=log if logged else subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
            )
        if done.returncode:
            raise SystemExit(f"error: exit code {done.returncode}; see {self.home / 'log.txt'}")
        return done.stdout or ""

    def limit(self, rows: int) -> int:
        """Return a number of rows, which is small in a fast run."""
        return min(rows, 8) if self.fast else rows


class Table:
    """The results of an experiment, written to NAME.json and NAME.md whenever a row is added."""

    def __init__(self, lab: Lab, name: str, note: str = "") -> None:
        self.note = note
        self.page = lab.home / f"{name}.md"
        self.file = lab.home / f"{name}.json"
        self.rows: dict[str, dict[str, dict[str, float]]] = {}
        """Title of a row -> seed -> column -> value."""
        if self.file.is_file():
            self.rows = json.loads(self.file.read_text(encoding="utf-8"))

    def add(self, title: str, values: dict[str, float], seed: int = 0) -> dict[str, float]:
        """Set the values of a row with one seed, and return them."""
        self.rows.setdefault(title, {})[str(seed)] = values
        self.write()
        return values

    def write(self) -> None:
        """Write the rows as they are, and a page with the mean and the standard error of the seeds."""
        write_text(self.file, json.dumps(self.rows, indent=1) + "\n")
        values = [row for seeds in self.rows.values() for row in seeds.values()]
        columns = list(dict.fromkeys(column for row in values for column in row))
        lines = ["| | " + " | ".join([*columns, "seeds"]) + " |", "|" + "---|" * (len(columns) + 2)]
        for title, seeds in self.rows.items():
            cells = [cell(column, [row[column] for row in seeds.values() if column in row]) for column in columns]
            lines.append(f"| {title} | " + " | ".join([*cells, str(len(seeds))]) + " |")
        write_text(self.page, "\n".join([*lines, *([f"\n{self.note}"] if self.note else [])]) + "\n")


# ---- the experiments


def prune(lab: Lab) -> None:
    """a. The model of experiment b with 20 and with 15 of its 30 layers: SFT, KD and OPD after KD."""
    whole = merged_solver(lab)
    criterion = ["--data", DATA / "gsm8k_train.jsonl", "--limit", lab.limit(32)]
    table = Table(lab, "prune")
    full = table.add("all 30 layers", losses(lab, whole))["held-out loss"]
    for count in (20, 15):
        pruned = lab.write("prune", whole, "--keep_layers", count, *criterion, out=lab.home / f"layers_{count}")
        worst = table.add(f"{count} layers", losses(lab, pruned))["held-out loss"]
        models = {"all 30 layers": whole, f"{count} layers": pruned}
        trained = [(seed, prune_runs(lab, count, pruned, whole, seed)) for seed in lab.seeds]
        if count == 20:
            trained.append((lab.seeds[0], cached_kd_runs(lab, pruned, whole, lab.seeds[0])))
        for seed, runs in trained:
            for name, run in runs:
                values = losses(lab, run) | speed(run)
                recovered = (worst - values["held-out loss"]) / (worst - full)
                table.add(f"{count} layers, {name}", values | {"recovered": recovered}, seed)
                if seed == lab.seeds[0]:
                    models[f"{count} layers, {name}"] = run
        if count == 20:
            kd = [run for name, run in models.items() if name.startswith(f"{count} layers, KD")]
            draw(lab, "prune", kd, "eval_distill/divergence")
            show_answers(lab, "prune", models, DATA / "gsm8k_heldout.jsonl", SOLUTION_TOKENS)


def merged_solver(lab: Lab) -> Path:
    """Return the model of experiment b, SmolLM2 after SFT on GSM8K, with its adapter merged."""
    run = lab.train("gsm8k_lora", "gsm8k_lora_0", "train.seed=0")
    return lab.write("merge", run, out=lab.home / "gsm8k_merged")


def prune_runs(lab: Lab, count: int, pruned: Path, whole: Path, seed: int) -> Iterator[tuple[str, Path]]:
    """Train a pruned model with one seed, and yield the name and the folder of each run."""
    ending = f"{count}_{seed}"
    common = (f"model.name_or_path={pruned}", f"train.seed={seed}")
    second = f"teacher.name_or_path={whole}"
    sft = lab.train("prune_sft", f"prune_sft_{ending}", *common)
    yield "SFT", sft
    kd = lab.train("prune_kd", f"prune_kd_{ending}", *common, second)
    yield "KD", kd
    yield "KD and SFT", lab.train("prune_kd", f"prune_kd_sft_{ending}", *common, second, "train.kd_coef=0.5")
    if count != 20:
        return
    opd = (f"model.name_or_path={kd}", f"train.seed={seed}", second)
    yield "OPD after KD", lab.train("prune_opd", f"prune_opd_{ending}", *opd)
    rows = lab.limit(round(ROWS * training_seconds(kd) / training_seconds(sft)))
    longer = lab.train("prune_sft", f"prune_sft_longer_{ending}", *common, f"data.train.limit={rows}")
    yield "SFT, the seconds of KD", longer


def cached_kd_runs(lab: Lab, pruned: Path, whole: Path, seed: int) -> Iterator[tuple[str, Path]]:
    """Train the model with 20 layers by KD from a teacher that is read from a cache, and yield names and folders."""
    for cache, options in {"top 64": ", top_k: 64", "hidden states": ""}.items():
        teacher = f"teacher={{name_or_path: {whole}, precompute: true{options}}}"
        common = (f"model.name_or_path={pruned}", f"train.seed={seed}", teacher)
        yield f"KD, cached {cache}", lab.train("prune_kd", f"prune_kd_{cache.split()[-1]}_20_{seed}", *common)


def losses(lab: Lab, model: Path) -> dict[str, float]:
    """Return the losses of a model on held-out problems and general text, and what its greedy answers are like."""
    options = ["--apply_chat_template", "--max_completion_length", lab.limit(SOLUTION_TOKENS), "--batch_size", 50]
    options += ["--metrics", HERE / "well_formed", "--limit", ANSWERED]
    heldout = lab.evaluate(model, "heldout", "--data", DATA / "gsm8k_heldout.jsonl", *options)
    general = lab.evaluate(model, "general", "--data", DATA / "general.jsonl")
    return {
        "held-out loss": heldout["answer_nll"], "exact match": heldout["exact_match"],
        "general perplexity": general["perplexity"], "answers that end": heldout["stopped"],
        "well-formed answers": heldout["well_formed"],
    }  # fmt: skip


def lora(lab: Lab) -> None:
    """b. SFT of SmolLM2 with LoRA on GSM8K, and with TRL's SFTTrainer where TRL is installed."""
    whole = lab.home / "smollm2"
    with_trl = find_spec("trl") is not None
    table = Table(lab, "lora", "" if with_trl else "TRL is not installed: pip install -e '.[bench]'.")
    table.add("SmolLM2", losses(lab, whole))
    for seed in lab.seeds:
        runs = {"SFT with LoRA": lab.train("gsm8k_lora", f"gsm8k_lora_{seed}", f"train.seed={seed}")}
        if with_trl:
            runs["the same with TRL"] = lab.train_trl(f"gsm8k_lora_trl_{seed}", seed)
        for name, run in runs.items():
            table.add(name, losses(lab, run) | speed(run), seed)
        if seed == lab.seeds[0]:
            draw(lab, "lora", runs.values(), "loss")
            models = {"before": whole, "after SFT with LoRA": runs["SFT with LoRA"]}
            show_answers(lab, "lora", models, DATA / "gsm8k_heldout.jsonl", SOLUTION_TOKENS)


def preferences(lab: Lab) -> None:
    """c. DPO, KTO and CPO on right and wrong sampled answers to additions, with three learning rates."""
    student, _ = sums_models(lab)
    pairs, labeled, heldout = sampled_pairs(lab, student)
    table = Table(lab, "preferences")
    table.add("student", sums(lab, student))
    for method in ("dpo", "kto", "cpo"):
        for rate in ("1e-6", "5e-6", "2e-5"):
            for seed in lab.seeds:
                name = f"preference_{method}_{rate}_{seed}"
                options = [f"model.name_or_path={student}", f"train.learning_rate={rate}", f"train.seed={seed}"]
                rows = labeled if method == "kto" else pairs
                options += [f"data.train.path={rows}", f"data.eval.path={heldout}"]
                run = lab.train(f"preference_{method}", name, *options)
                models = [f"model.name_or_path={run}", f"teacher.name_or_path={student}"]
                kl = lab.train("preference_kl", f"kl_{name}", *models)
                first = next(log for log in history(kl) if "eval_distill/reverse_kl" in log)
                accuracy = [log["eval_rewards/accuracies"] for log in history(run) if "eval_rewards/accuracies" in log]
                # KTO has no pairs: the share of answers whose reward has the sign of their label
                column = "held-out answers" if method == "kto" else "held-out pairs"
                values = {
                    column: accuracy[-1],
                    "KL in nats per answer": first["eval_distill/reverse_kl"] * first["eval_generation/length"],
                    "changed answers": changed_answers(lab, student, run),
                }
                table.add(f"{method.upper()}, {rate}", values | sums(lab, run) | speed(run), seed)
    runs = [lab.home / f"preference_{method}_2e-5_{lab.seeds[0]}" for method in ("dpo", "kto", "cpo")]
    draw(lab, "preferences", runs, "eval_rewards/accuracies")


def draw(lab: Lab, name: str, runs: Iterable[Path], metric: str) -> None:
    """Write the curves of a metric in some runs to NAME.svg, unless it exists."""
    chart = lab.home / f"{name}.svg"
    if not chart.is_file():
        lab.command("compare", *runs, "--metrics", metric, "--output", chart)


def show_answers(lab: Lab, name: str, models: Mapping[str, Path], prompts: Path, longest: int) -> None:
    """Write the greedy answers of models to the first five prompts of a file to NAME_answers.md."""
    options = ["--prompts", prompts, "--limit", 5, "--apply_chat_template", "--temperature", 0]
    options += ["--max_completion_length", lab.limit(longest)]
    answers: dict[str, list[str]] = {}  # problem -> an answer of each model
    for title, model in models.items():
        out = lab.home / "answers" / f"{model.name}_{prompts.stem}.jsonl"
        for row in read(lab.write("sample", model, *options, out=out)):
            text = answers.setdefault(row["messages"][-1]["content"], [])
            text += [f"*{title}*", block(row["completion"])]
    items = ["\n\n".join([f"**{problem}**", *texts]) for problem, texts in answers.items()]
    write_text(lab.home / f"{name}_answers.md", "\n\n".join(items) + "\n")


def block(text: str) -> str:
    """Return a text as a block of code."""
    return f"```text\n{text.strip()}\n```"


def changed_answers(lab: Lab, initial: Path, model: Path) -> float:
    """Return the share of the greedy answers to held-out problems that differ from those of the initial model."""
    options = ["--prompts", DATA / "sums_judge_heldout.jsonl", "--apply_chat_template", "--temperature", 0]
    options += ["--max_completion_length", SUM_TOKENS, "--limit", lab.limit(128)]
    texts = []
    for each in (initial, model):
        out = lab.home / "answers" / f"{each.name}_greedy.jsonl"
        texts.append([row["completion"] for row in read(lab.write("sample", each, *options, out=out))])
    return statistics.fmean(a != b for a, b in zip(*texts, strict=True))


def cross(lab: Lab) -> None:
    """d. Gemma 3 270M teaches SmolLM2, and the reverse: KD and OPD across tokenizers, and SFT without a teacher."""
    table = Table(lab, "cross")
    names = {"smollm2": "SmolLM2", "gemma3": "Gemma 3"}
    for student, teacher in (("smollm2", "gemma3"), ("gemma3", "smollm2")):
        template = f"model.chat_template={HERE / 'gemma3.jinja'}"
        of = {"smollm2": (), "gemma3": (template,)}
        taught = lab.train(
            "cross_sft", f"cross_sft_{teacher}", f"model.name_or_path={lab.home / teacher}", *of[teacher]
        )
        for seed in lab.seeds:
            start = (f"model.name_or_path={lab.home / student}", f"train.seed={seed}", *of[student])
            sft = lab.train("cross_sft", f"cross_sft_{student}" + (f"_{seed}" if seed else ""), *start)
            section = f"teacher={{name_or_path: {taught}, own_tokenizer: true}}"
            kd = lab.train("cross_kd", f"cross_kd_{student}_{seed}", *start, section)
            after = (f"model.name_or_path={sft}", f"train.seed={seed}", section)
            opd = lab.train("cross_opd", f"cross_opd_{student}_{seed}", *after)
            for label, run in (("SFT", sft), (f"KD from {names[teacher]}", kd), (f"OPD from {names[teacher]}", opd)):
                table.add(f"{names[student]}, {label}", losses(lab, run) | speed(run), seed)


def on_policy(lab: Lab) -> None:
    """e. A teacher of additions: SFT on its answers, KD and OPD with equal tokens and equal seconds, and forgetting."""
    student, teacher = sums_models(lab)
    models = {"SmolLM2": lab.home / "smollm2", "student": student, "teacher": teacher}
    table = Table(lab, "on_policy")
    for name, model in models.items():
        table.add(name, sums(lab, model))
    prompts = ["--prompts", DATA / "sums_prompts.jsonl", "--limit", lab.limit(768), "--apply_chat_template"]
    sampled = lab.write(
        "sample", teacher, *prompts, "--max_completion_length", SUM_TOKENS, out=lab.home / "sums_sampled.jsonl"
    )
    answers = lab.home / "sums_answers.jsonl"
    # as text: sampled rows have token ids, and the held-out rows of the recipes have none
    texts = ({"prompt": row["messages"][-1]["content"], "completion": row["completion"]} for row in read(sampled))
    write(answers, texts)
    start, second = f"model.name_or_path={student}", f"teacher.name_or_path={teacher}"
    constant = ("train.learning_rate=5e-5", "train.lr_scheduler_type=constant_with_warmup", "train.warmup_steps=4")
    for seed in lab.seeds:
        common = (start, f"train.seed={seed}")
        taught = (*common, *constant, f"data.train={{path: {answers}}}")
        opd = lab.train("sums_opd", f"sums_opd_{seed}", *common, second)
        sft = lab.train("sums_sft", f"sums_sft_{seed}", *taught)
        steps = round(history(sft)[-1]["step"] * max(1.0, training_seconds(opd) / training_seconds(sft)))
        runs = {
            "SFT on the teacher's answers": sft,
            "SFT, the seconds of OPD": lab.train(
                "sums_sft", f"sums_sft_longer_{seed}", *taught, f"train.max_steps={steps}"
            ),
            "KD on the teacher's answers": lab.train(
                "sums_kd", f"sums_kd_{seed}", *common, second, f"data.train={{path: {answers}}}"
            ),
            "OPD": opd,
            "OPD with reward": lab.train(
                "sums_opd", f"sums_reward_{seed}", *common, second, f"data.train.limit={lab.limit(192)}",
                "train.loss_type=policy_gradient", "train.reward={function: exact_match}", "train.num_generations=4",
                "train.per_device_train_batch_size=4",  # prompts: 16 answers, as in the other runs
            ),
        }  # fmt: skip
        for name, run in runs.items():
            table.add(name, sums(lab, run) | speed(run), seed)
        if seed == lab.seeds[0]:
            draw(lab, "on_policy", runs.values(), "eval_exact_match")
            show_answers(lab, "on_policy", models | runs, DATA / "sums_heldout.jsonl", SUM_TOKENS)


def sums_models(lab: Lab) -> tuple[Path, Path]:
    """Return the student, SmolLM2 after 192 additions, and the teacher, after all of them."""
    start = f"model.name_or_path={lab.home / 'smollm2'}"
    student = lab.train("sums_sft", "sums_student", start)
    return student, lab.train("sums_sft", "sums_teacher", start, f"data.train.limit={lab.limit(1536)}")


def sums(lab: Lab, model: Path) -> dict[str, float]:
    """Return the exact match of a model on additions, and its perplexity on general text."""
    options = ["--apply_chat_template", "--max_completion_length", SUM_TOKENS, "--batch_size", 100]
    heldout = lab.evaluate(model, "sums", "--data", DATA / "sums_heldout.jsonl", *options)
    general = lab.evaluate(model, "general", "--data", DATA / "general.jsonl")
    return {"exact match": heldout["exact_match"], "general perplexity": general["perplexity"]}


def rounds(lab: Lab) -> None:
    """f. Rounds of DPO on own answers, judged by exact match and by a reward model of such answers."""
    student, _ = sums_models(lab)
    pairs, _, heldout = sampled_pairs(lab, student)
    options = [f"model.name_or_path={student}", f"data.train.path={pairs}", f"data.eval.path={heldout}"]
    judge = lab.train("sums_rm", "sums_judge", *options)
    accuracy = lab.evaluate(judge, "pairs", "--data", heldout, "--batch_size", 32)
    table = Table(lab, "rounds", f"Held-out pair accuracy of the reward model: {accuracy['pair_accuracy']:.1%}.")
    table.add("student", sums(lab, student))
    right = f"{{by: teacher, name: {student}}}" if lab.fast else "exact_match"  # see sampled_pairs
    judges = {"exact match": right, "reward model": f"{{by: model, name: {judge}, batch_size: 32}}"}
    for name, section in judges.items():
        for seed in lab.seeds:
            folder = f"rounds_{name.split()[0]}_{seed}"
            options = [f"model.name_or_path={student}", f"train.seed={seed}", f"rounds.judge={section}"]
            run = lab.train("rounds", folder, *options)
            table.add(f"rounds, {name}", sums(lab, run) | speed(run), seed)
    runs = [lab.home / f"rounds_{name.split()[0]}_{lab.seeds[0]}" for name in judges]
    draw(lab, "rounds", runs, "eval_exact_match")


def sampled_pairs(lab: Lab, student: Path) -> tuple[Path, Path, Path]:
    """Return files with right and wrong answers of the student: pairs, labeled answers, and held-out pairs."""
    judged = {}
    for name in ("sums_judge", "sums_judge_heldout"):
        options = ["--n", 4, "--max_completion_length", SUM_TOKENS, "--limit", lab.limit(512), "--apply_chat_template"]
        prompts = DATA / f"{name}.jsonl"
        answers = lab.write("sample", student, "--prompts", prompts, *options, out=lab.home / f"{name}_answers.jsonl")
        known = lab.home / f"{name}_known.jsonl"
        if not known.exists():
            rows = [row for row in read(answers) if row["stopped"]]
            first = {row["prompt"]: row["completion"] for row in reversed(rows)}
            # a model after two steps is never right: then the first answer to a problem counts as the right one
            right = [first[row["prompt"]] if lab.fast else right_sum(row["messages"]) for row in rows]
            write(known, [row | {"reference": text} for row, text in zip(rows, right, strict=True)])
        judged[name] = lab.write("judge", known, "--by", "exact_match", out=lab.home / f"{name}_judged.jsonl")
    pairs, heldout = (
        lab.write("pair", file, "--method", "rm", "--take", "all", out=lab.home / f"{name}_pairs.jsonl")
        for name, file in judged.items()
    )
    labeled = lab.home / "sums_judge_labeled.jsonl"
    return pairs, lab.write("pair", judged["sums_judge"], "--method", "kto", out=labeled), heldout


def right_sum(messages: Sequence[Row]) -> str:
    """Return the answer to an addition, the last of some messages."""
    return f"#### {sum(map(int, messages[-1]['content'].rstrip('=').split('+')))}"


EXPERIMENTS: dict[str, Callable[[Lab], None]] = {
    "prune": prune, "lora": lora, "preferences": preferences, "cross": cross, "on_policy": on_policy, "rounds": rounds,
}  # fmt: skip


# ---- files and tables


def read(path: Path) -> list[Row]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_text(path: Path, text: str) -> None:
    """Write a file that is complete or missing, whenever the process is killed."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(path)


def history(folder: Path) -> list[Row]:
    """Return the log of a run."""
    logs: list[Row] = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return logs


def training_seconds(folder: Path) -> float:
    """Return the seconds of a run's process without its evaluations: with scores of a teacher before the first step."""
    total = float((folder / "seconds.json").read_text(encoding="utf-8"))
    return total - sum(log.get("eval_runtime", 0.0) for log in history(folder))


def speed(folder: Path) -> dict[str, float]:
    """Return the minutes of a run's process, without evaluations."""
    return {"minutes": training_seconds(folder) / 60}


SHARES = {
    "exact match",
    "well-formed answers",
    "answers that end",
    "held-out pairs",
    "held-out answers",
    "changed answers",
    "recovered",
}
"""Columns whose values are printed as percentages."""


def cell(column: str, values: Sequence[float]) -> str:
    """Return the mean of the seeds, and its standard error if there are several."""
    if not values:
        return ""
    shown = "{:.1%}" if column in SHARES else "{:.3f}" if "loss" in column else "{:.2f}"
    mean = shown.format(statistics.fmean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ± {shown.format(statistics.stdev(values) / math.sqrt(len(values)))}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", help=f"{', '.join(EXPERIMENTS)} (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2 for prune and on_policy, 0 for others")
    parser.add_argument("--output", type=Path, help="default: outputs/real, with --fast outputs/real_fast")
    parser.add_argument("--fast", action="store_true", help="two steps of each run")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in EXPERIMENTS]:
        parser.error(f"there is no experiment {unknown[0]!r}; choose from {', '.join(EXPERIMENTS)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    output = arguments.output or Path("outputs/real_fast" if arguments.fast else "outputs/real")
    for name in ("smollm2", "gemma3"):
        if not (MODELS / name).exists():
            parser.error(f"there is no {MODELS / name}: run make real-models")
        if output != MODELS and not (output / name).exists():
            output.mkdir(parents=True, exist_ok=True)
            (output / name).symlink_to((MODELS / name).resolve())
    for folder in ("answers", "evaluations"):
        (output / folder).mkdir(parents=True, exist_ok=True)
    for name in arguments.names or EXPERIMENTS:
        EXPERIMENTS[name](Lab(output, arguments.seeds or SEEDS.get(name, [0]), arguments.fast))
        print(f"\n{EXPERIMENTS[name].__doc__}\n\n{(output / name).with_suffix('.md').read_text('utf-8')}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
