"""All of it in three minutes on two CPU cores: additions of three-digit numbers, learned in four stages.

    python -m recipes.tiny.quickstart [--seed N] [--output FOLDER] [--fast]        from the root of the repository

    1  teacher   SFT from scratch on 8192 worked solutions                           sft_teacher.yaml
    2  student   SFT from scratch, smaller, on 1024 of them                          sft_student.yaml
    3  student   OPD: answers new problems, corrected token by token by the teacher  opd.yaml
    4  student   DPO on its own right and wrong answers to new problems              dpo.yaml

The problems are written by make_data.py, first of all. Each stage is a recipe of this folder, run as
`python -m hf_posttrain.run RECIPE` runs it. Exact match is that of greedy answers to the 500 problems of heldout.jsonl,
which no stage trains on. Left in the output folder: a model for each stage, own_answers.jsonl, log.txt, quickstart.json
and quickstart.png.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin are ten times slower on a machine that is busy
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models so small are quicker on one: 134 s and not 241

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posttrain import run
from hf_posttrain.generation import rollout
from hf_posttrain.generation.final_answer import final_answer
from hf_posttrain.recipe.read import load_recipe

HERE = Path(__file__).parent
ANSWERS = 4
TEMPERATURE = 1.0
LONGEST = 20
"""Own answers to each problem, how they are sampled, and their most tokens."""
FAST = ["train.max_steps=2", "train.eval_steps=1", "data.train.limit=64", "data.eval.limit=8"]
"""Overrides that only show that everything runs."""


@dataclass
class Stage:
    """One training run."""

    name: str
    """Its recipe, without .yaml."""
    title: str
    """For the table."""
    reads: dict[str, str]
    """Recipe key -> file or folder of the output folder."""
    writes: str
    """Folder of the model."""
    curve: dict[int, float] | None = None
    """Step -> exact match on the held-out problems."""
    seconds: float = 0.0
    """Wall clock, of which"""
    training: float = 0.0
    evaluation: float = 0.0
    """these; the rest loads, prepares, samples and writes."""

    @property
    def before(self) -> float:
        """Exact match before the first step."""
        return (self.curve or {}).get(0, float("nan"))

    @property
    def after(self) -> float:
        """Exact match after the last step."""
        return list((self.curve or {0: float("nan")}).values())[-1]


def stages() -> list[Stage]:
    """The four stages in order."""
    student = "model.name_or_path"
    teacher = "teacher.name_or_path"
    return [
        Stage("sft_teacher", "teacher, SFT", {}, "teacher"),
        Stage("sft_student", "student, SFT", {}, "student"),
        Stage("opd", "student, OPD", {student: "student", teacher: "teacher"}, "opd"),
        Stage("dpo", "student, DPO", {student: "opd", "data.train.path": "own_answers.jsonl"}, "dpo"),
    ]


def train(stage: Stage, output: Path, seed: int, extra: Sequence[str]) -> None:
    """Run the stage's recipe, and fill in its curve. What it prints goes to log.txt, progress bars to the terminal."""
    overrides = [f"{key}={output / file}" for key, file in stage.reads.items()]
    overrides += [f"train.output_dir={output / stage.writes}", f"train.seed={seed}", *extra]
    recipe = load_recipe(HERE / f"{stage.name}.yaml", overrides)
    with logged(output / "log.txt"):
        run.run(recipe)
    state = json.loads((output / stage.writes / "trainer_state.json").read_text(encoding="utf-8"))
    stage.curve = {log["step"]: log["eval_exact_match"] for log in state["log_history"] if "eval_exact_match" in log}
    stage.evaluation = sum(log.get("eval_runtime", 0.0) for log in state["log_history"])
    stage.training = sum(log.get("train_runtime", 0.0) for log in state["log_history"]) - stage.evaluation


@contextlib.contextmanager
def logged(path: Path) -> Iterator[None]:
    """Standard output is appended to a file."""
    with path.open("a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        yield


def own_answers(folder: Path, prompts: list[str], seed: int) -> list[list[str]]:
    """ANSWERS sampled answers of the model in `folder` to each prompt, [prompts, ANSWERS]."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [ids for ids in tokenizer(prompts)["input_ids"] for _ in range(ANSWERS)]
    with rollout.seeded(model.device, seed):
        sampled = rollout.generate(
            model, ids, LONGEST, [tokenizer.eos_token_id], tokenizer.pad_token_id, TEMPERATURE, batch_size=2048
        )
    texts = iter(tokenizer.batch_decode(sampled, skip_special_tokens=True))
    return [[next(texts) for _ in range(ANSWERS)] for _ in prompts]


def is_right(prompt: str, answer: str) -> bool:
    """Does the answer to "a+b=" end in the sum?"""
    a, b = prompt.rstrip("=").split("+")
    return final_answer(answer) == str(int(a) + int(b))


def preferences(prompts: list[str], answers: list[list[str]]) -> list[dict[str, str]]:
    """A pair for each different wrong answer to a prompt that also got a right one."""
    rows = []
    for prompt, tries in zip(prompts, answers, strict=True):
        right = [answer for answer in tries if is_right(prompt, answer)]
        wrong = dict.fromkeys(answer for answer in tries if answer and not is_right(prompt, answer))
        rows += [{"prompt": prompt, "chosen": right[0], "rejected": answer} for answer in wrong if right]
    return rows


def write_own_answers(output: Path, seed: int, limit: int | None) -> None:
    """own_answers.jsonl: what the student of stage 3 makes of prompts.jsonl. Too few pairs: those of dpo.jsonl."""
    prompts = [json.loads(line)["prompt"] for line in (HERE / "prompts.jsonl").read_text().splitlines()][:limit]
    answers = own_answers(output / "opd", prompts, seed)
    right = sum(is_right(prompt, answer) for prompt, tries in zip(prompts, answers, strict=True) for answer in tries)
    rows = preferences(prompts, answers)
    print(f"   {right} of {len(prompts) * ANSWERS} own answers are right; {len(rows)} pairs of a right and a wrong one")
    if len(rows) < 64:
        print("   too few: taking the pairs of dpo.jsonl")
        rows = [json.loads(line) for line in (HERE / "dpo.jsonl").read_text().splitlines()]
    (output / "own_answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def table(done: list[Stage]) -> str:
    """Exact match before and after each stage, and where its seconds went."""
    lines = ["stage          before   after   seconds   training  evaluation  rest", "-" * 67]
    for s in done:
        rest = s.seconds - s.training - s.evaluation
        lines.append(
            f"{s.title:<14} {s.before:>6.1%}  {s.after:>6.1%}  {s.seconds:>8.0f}   {s.training:>8.0f}"
            f"  {s.evaluation:>10.0f}  {rest:>4.0f}"
        )
    return "\n".join(lines)


def plot(done: list[Stage], seed: int, path: Path) -> None:
    """Exact match over the steps of the student's three stages, with the teacher's as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    teacher = done[0]
    start = 0
    axes.axhline(teacher.after, color="gray", linestyle="--", label=f"{teacher.title}: {teacher.after:.1%}")
    for stage in done[1:]:
        curve = stage.curve or {}
        label = f"{stage.title}: {stage.before:.1%} to {stage.after:.1%}"
        axes.plot([start + step for step in curve], list(curve.values()), marker="o", label=label)
        start += max(curve, default=0)
        axes.axvline(start, color="lightgray", linewidth=1, zorder=0)
    axes.set(xlabel="optimizer steps of the student", ylabel="exact match, held-out problems", ylim=(0, 1.05))
    axes.set_title(f"Three-digit additions, seed {seed}")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages, print the table, save the plot."""
    parser = argparse.ArgumentParser(description="SFT, OPD and DPO on small additions, in three minutes on CPU.")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and sampling (default 0)")
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart"), help="default: outputs/quickstart")
    parser.add_argument("--fast", action="store_true", help="two steps a stage: shows that everything runs")
    arguments = parser.parse_args(argv)
    output = arguments.output
    started = time.perf_counter()
    done = stages()
    subprocess.run([sys.executable, HERE / "make_data.py"], check=True)
    output.mkdir(parents=True, exist_ok=True)
    (output / "log.txt").write_text("", encoding="utf-8")
    print(f"Three-digit additions on CPU, threads: {torch.get_num_threads()}, seed: {arguments.seed}", flush=True)
    for number, stage in enumerate(done, 1):
        print(f"{number}/{len(done)} {stage.title}  ({HERE.name}/{stage.name}.yaml)", flush=True)
        begun = time.perf_counter()
        if stage.name == "dpo":
            write_own_answers(output, arguments.seed, 16 if arguments.fast else None)
        train(stage, output, arguments.seed, FAST if arguments.fast else [])
        stage.seconds = time.perf_counter() - begun
        print(f"   exact match {stage.before:.1%} -> {stage.after:.1%}", flush=True)
    results = {"seed": arguments.seed, "seconds": time.perf_counter() - started, "stages": [asdict(s) for s in done]}
    (output / "quickstart.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\nExact match of greedy answers to held-out problems\n\n{table(done)}\n")
    print(f"{results['seconds']:.0f} seconds in all; models, log and plot are in {output}")
    plot(done, arguments.seed, output / "quickstart.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
