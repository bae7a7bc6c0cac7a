"""Experiments with SmolLM2 135M Instruct and Gemma 3 270M.

    python -m recipes.real.experiments [prune lora preferences cross on_policy rounds] [--seeds 0 1 2] [--output FOLDER]

Run `make real-models` first. Each experiment runs the recipes of this folder and commands of hf-posttrain, and writes
its table to FOLDER/NAME.md after each run. A run or file that is complete is not repeated: after an interruption, run
the same command again. FOLDER/made records how each of them was made. If one is deleted and made again, everything
that was made from it is made again. Rows of `make real-models` are not recorded: use another FOLDER for other rows.
`--fast` runs a few steps of each recipe, which shows that everything works.
"""

import argparse
import os
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from hf_posttrain.data.files import read_rows
from hf_posttrain.recipe.read import load_recipe
from hf_posttrain.recipe.sections import Source
from hf_posttrain.scoring.cpu import bf16_instructions

from .lab import HERE, Lab, Table, history, training_seconds

MODELS = Path("outputs/real")
"""Folder in which `make real-models` links the models and writes the rows."""
DATA = MODELS / "data"
ANSWERED = 50
"""Held-out problems of GSM8K that a model is evaluated on, one batch."""
SOLUTION_TOKENS = 144
"""Longest answer to a problem of GSM8K."""
SUM_TOKENS = 12
"""Longest answer to an addition."""
SEEDS = {"prune": [0, 1, 2], "on_policy": [0, 1, 2]}
"""Seeds of the experiments that run with several unless the command line names others."""
Stages = tuple[str, *tuple[Path, ...]]
"""Name of a model, and the runs that lead to it, of which the last one is the model."""


def prune(lab: Lab) -> None:
    """a. The model of experiment b with 20 and with 15 of its 30 layers: SFT, KD and OPD after KD."""
    whole = merged_solver(lab)
    criterion = ["--data", DATA / "gsm8k_train.jsonl", "--limit", lab.limit(32), "--apply_chat_template"]
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
            for name, *stages in runs:
                run = stages[-1]
                values = losses(lab, run) | lab.minutes(*stages)
                recovered = (worst - values["held-out loss"]) / (worst - full)
                table.add(f"{count} layers, {name}", values | {"recovered": recovered}, seed)
                if seed == lab.seeds[0]:
                    models[f"{count} layers, {name}"] = run
        if count == 20:
            kd = [run for name, run in models.items() if name.startswith(f"{count} layers, KD")]
            lab.draw("prune", kd, "eval_distill/divergence")
            show_answers(lab, "prune", models, DATA / "gsm8k_heldout.jsonl", SOLUTION_TOKENS)


def merged_solver(lab: Lab) -> Path:
    """Return the model of experiment b, SmolLM2 after SFT on GSM8K, with its adapter merged."""
    run = lab.train("gsm8k_lora", "gsm8k_lora_0", "train.seed=0")
    return lab.write("merge", run, out=lab.home / "gsm8k_merged")


def prune_runs(lab: Lab, count: int, pruned: Path, whole: Path, seed: int) -> Iterator[Stages]:
    """Train a pruned model with one seed."""
    ending = f"{count}_{seed}"
    common = (f"model.name_or_path={pruned}", f"train.seed={seed}")
    teacher = f"teacher.name_or_path={whole}"
    sft = lab.train("prune_sft", f"prune_sft_{ending}", *common)
    yield "SFT", sft
    kd = lab.train("prune_kd", f"prune_kd_{ending}", *common, teacher)
    yield "KD", kd
    yield "KD and SFT", lab.train("prune_kd", f"prune_kd_sft_{ending}", *common, teacher, "train.kd_coef=0.5")
    if count != 20:
        return
    rows = lab.limit(round(train_rows("prune_sft") * training_seconds(kd) / training_seconds(sft)))
    limit = f"data.train.limit={rows}"
    longer = lab.train("prune_sft", f"prune_sft_longer_{ending}", *common, limit, measured=(sft, kd))
    yield "SFT, the seconds of KD", longer
    after = (f"model.name_or_path={kd}", f"train.seed={seed}", teacher)
    opd = lab.train("prune_opd", f"prune_opd_{ending}", *after)
    yield "OPD after KD", kd, opd
    rows = lab.limit(round(train_rows("prune_kd") * (1 + training_seconds(opd) / training_seconds(kd))))
    limit = f"data.train.limit={rows}"
    longer = lab.train("prune_kd", f"prune_kd_longer_{ending}", *common, teacher, limit, measured=(kd, opd))
    yield "KD, the seconds of OPD after KD", longer


def train_rows(recipe: str) -> int:
    """Return the number of rows that a recipe trains on."""
    source = load_recipe(HERE / f"{recipe}.yaml").data.train
    assert isinstance(source, Source)
    assert source.limit
    return source.limit


def cached_kd_runs(lab: Lab, pruned: Path, whole: Path, seed: int) -> Iterator[Stages]:
    """Train the model with 20 layers by KD from a teacher that is read from a cache."""
    for cache, options in {"top 64": ", top_k: 64", "hidden states": ""}.items():
        teacher = f"teacher={{name_or_path: {whole}, precompute: true{options}}}"
        common = (f"model.name_or_path={pruned}", f"train.seed={seed}", teacher)
        yield f"KD, cached {cache}", lab.train("prune_kd", f"prune_kd_{cache.split()[-1]}_20_{seed}", *common)


def losses(lab: Lab, model: Path, *template: object) -> dict[str, float]:
    """Return the losses of a model on held-out problems and general text, and what its greedy answers are like.

    `template` is the option with the chat template of a model that has none.
    """
    options = ["--apply_chat_template", "--max_completion_length", lab.limit(SOLUTION_TOKENS), "--batch_size", 50]
    options += ["--metrics", HERE / "well_formed", "--limit", ANSWERED, *template]
    heldout = lab.evaluate(model, "heldout", "--data", DATA / "gsm8k_heldout.jsonl", *options)
    general = lab.evaluate(model, "general", "--data", DATA / "general.jsonl")
    return {
        "held-out loss": heldout["answer_nll"], "well-formed answers": heldout["well_formed"],
        "answers that end": heldout["stopped"], "exact match": heldout["exact_match"],
        "general perplexity": general["perplexity"],
    }  # fmt: skip


def lora(lab: Lab) -> None:
    """b. SFT of SmolLM2 with LoRA on GSM8K, and with TRL's SFTTrainer where TRL is installed."""
    whole = lab.home / "smollm2"
    with_trl = find_spec("trl") is not None
    table = Table(lab, "lora", "" if with_trl else "TRL is not installed: pip install -e '.[bench]'.")
    table.add("SmolLM2", losses(lab, whole))
    for seed in lab.seeds:
        run = lab.train("gsm8k_lora", f"gsm8k_lora_{seed}", f"train.seed={seed}")
        table.add("SFT with LoRA", losses(lab, run) | lab.minutes(run), seed)
        runs = [run]
        if with_trl:
            runs.append(lab.train_trl(f"gsm8k_lora_trl_{seed}", seed))
            table.add("the same with TRL", losses(lab, runs[-1]) | lab.minutes(runs[-1]), seed)
        if seed == lab.seeds[0]:
            lab.draw("lora", runs, "loss")
            models = {"before": whole, "after SFT with LoRA": run}
            show_answers(lab, "lora", models, DATA / "gsm8k_heldout.jsonl", SOLUTION_TOKENS)


def preferences(lab: Lab) -> None:
    """c. DPO, KTO and CPO on right and wrong sampled answers to additions, with three learning rates."""
    student, _ = sums_models(lab)
    pairs, heldout = sampled_pairs(lab, student)
    table = Table(lab, "preferences")
    table.add("student", sums(lab, student))
    for method in ("dpo", "kto", "cpo"):
        for rate in ("1e-6", "5e-6", "2e-5"):
            for seed in lab.seeds:
                name = f"preference_{method}_{rate}_{seed}"
                options = [f"model.name_or_path={student}", f"train.learning_rate={rate}", f"train.seed={seed}"]
                options += [f"data.train.path={pairs}", f"data.eval.path={heldout}"]
                run = lab.train(f"preference_{method}", name, *options)
                models = [f"model.name_or_path={run}", f"teacher.name_or_path={student}"]
                kl = lab.train("preference_kl", f"kl_{name}", *models, bf16=False)
                evaluated = next(log for log in history(kl) if "eval_distill/reverse_kl" in log)
                accuracy = [log["eval_rewards/accuracies"] for log in history(run) if "eval_rewards/accuracies" in log]
                # KTO reads the two answers of a pair apart: the share whose reward has the sign of the label
                column = "held-out answers" if method == "kto" else "held-out pairs"
                # rewards are 0 before DPO and KTO, and the log-probabilities of CPO are not
                before = {f"{column} before training": accuracy[0]} if method == "cpo" else {}
                values = before | {
                    column: accuracy[-1],
                    "KL in nats per answer": evaluated["eval_distill/reverse_kl"] * evaluated["eval_generation/length"],
                    "changed answers": changed_answers(lab, student, run),
                }
                table.add(f"{method.upper()}, {rate}", values | sums(lab, run) | lab.minutes(run), seed)
    runs = {method: lab.home / f"preference_{method}_5e-6_{lab.seeds[0]}" for method in ("dpo", "kto", "cpo")}
    lab.draw("preferences", runs.values(), "eval_rewards/margins")
    shown = {"student": student} | {f"{method.upper()}, 5e-6": run for method, run in runs.items()}
    show_answers(lab, "preferences", shown, DATA / "sums_heldout.jsonl", SUM_TOKENS)


def show_answers(lab: Lab, name: str, models: Mapping[str, Path], prompts: Path, longest: int) -> None:
    """Write the greedy answers of models to the first five prompts of a file to NAME_answers.md."""
    options = ["--prompts", prompts, "--limit", 5, "--apply_chat_template", "--temperature", 0]
    options += ["--max_completion_length", lab.limit(longest)]
    answers: dict[str, list[str]] = {}  # problem -> an answer of each model
    for title, model in models.items():
        out = lab.home / "answers" / f"{model.name}_{prompts.stem}.jsonl"
        for row in read_rows(lab.write("sample", model, *options, out=out)):
            text = answers.setdefault(row["messages"][-1]["content"], [])
            text += [f"*{title}*", block(row["completion"])]
    items = ["\n\n".join([f"**{problem}**", *texts]) for problem, texts in answers.items()]
    (lab.home / f"{name}_answers.md").write_text("\n\n".join(items) + "\n", encoding="utf-8")


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
        texts.append([row["completion"] for row in read_rows(lab.write("sample", each, *options, out=out))])
    return statistics.fmean(a != b for a, b in zip(*texts, strict=True))


def cross(lab: Lab) -> None:
    """d. Gemma 3 270M teaches SmolLM2, and the reverse: KD and OPD across tokenizers, and SFT without a teacher."""
    table = Table(lab, "cross", "The losses of models with different tokenizers cannot be compared.")
    names = {"smollm2": "SmolLM2", "gemma3": "Gemma 3"}
    options = {"smollm2": (), "gemma3": (f"model.chat_template={HERE / 'gemma3.jinja'}",)}

    def start(name: str, seed: int) -> tuple[str, ...]:
        return (f"model.name_or_path={lab.home / name}", f"train.seed={seed}", *options[name])

    def solver(name: str, seed: int) -> Path:
        return lab.train("cross_sft", f"cross_sft_{name}_{seed}", *start(name, seed))

    for name, title in names.items():
        template = ["--chat_template", HERE / "gemma3.jinja"] if name == "gemma3" else []
        table.add(f"{title}, before", losses(lab, lab.home / name, *template))
    for student, teacher in (("smollm2", "gemma3"), ("gemma3", "smollm2")):
        for seed in lab.seeds:
            sft = solver(student, seed)
            section = f"teacher={{name_or_path: {solver(teacher, lab.seeds[0])}, own_tokenizer: true}}"
            kd = lab.train("cross_kd", f"cross_kd_{student}_{seed}", *start(student, seed), section)
            opd = lab.train(
                "cross_opd", f"cross_opd_{student}_{seed}", f"model.name_or_path={sft}", f"train.seed={seed}", section
            )
            runs = {
                "SFT": [sft],
                f"KD from {names[teacher]} and SFT": [kd],
                f"OPD from {names[teacher]} after SFT": [sft, opd],
            }
            for label, stages in runs.items():
                table.add(f"{names[student]}, {label}", losses(lab, stages[-1]) | lab.minutes(*stages), seed)
            if seed == lab.seeds[0]:
                models = {label: stages[-1] for label, stages in runs.items()}
                show_answers(lab, f"cross_{student}", models, DATA / "gsm8k_heldout.jsonl", SOLUTION_TOKENS)


def on_policy(lab: Lab) -> None:
    """e. A teacher of additions: SFT on its answers, KD and OPD with equal tokens and equal seconds, and forgetting."""
    student, teacher = sums_models(lab)
    models = {"SmolLM2": lab.home / "smollm2", "student": student, "teacher": teacher}
    table = Table(lab, "on_policy")
    for name, model in models.items():
        table.add(name, sums(lab, model))
    prompts = ["--prompts", DATA / "sums_prompts.jsonl", "--limit", lab.limit(1536), "--apply_chat_template"]
    options = [*prompts, "--max_completion_length", SUM_TOKENS]
    sampled = lab.write("sample", teacher, *options, out=lab.home / "sums_sampled.jsonl")
    # as text: sampled rows have token ids, and the held-out rows of the recipes have none
    rows = [row for row in read_rows(sampled) if row["stopped"]]
    texts = [{"prompt": row["messages"][-1]["content"], "completion": row["completion"]} for row in rows]
    answers = lab.home / "sums_answers.jsonl"
    lab.write_rows(answers, texts, sampled)
    runs = {}
    for seed in lab.seeds:
        for name, run in on_policy_runs(lab, student, teacher, answers, seed):
            table.add(name, sums(lab, run) | lab.minutes(run), seed)
            if seed == lab.seeds[0]:
                runs[name] = run
    lab.draw("on_policy", runs.values(), "eval_exact_match")
    show_answers(lab, "on_policy", models | runs, DATA / "sums_heldout.jsonl", SUM_TOKENS)


def on_policy_runs(lab: Lab, student: Path, teacher: Path, answers: Path, seed: int) -> Iterator[tuple[str, Path]]:
    """Train the student of additions with one seed in each way of experiment e, and yield names and folders."""
    common = (f"model.name_or_path={student}", f"train.seed={seed}")
    from_teacher = f"teacher.name_or_path={teacher}"
    opd = lab.train("sums_opd", f"sums_opd_{seed}", *common, from_teacher)
    yield "OPD", opd
    constant = ("train.learning_rate=5e-5", "train.lr_scheduler_type=constant_with_warmup", "train.warmup_steps=4")

    count = train_rows("sums_opd")
    rows = f"data.train={{path: {answers}, limit: {lab.limit(count)}}}"
    sft = lab.train("sums_sft", f"sums_sft_{seed}", *common, *constant, rows)
    yield "SFT on the teacher's answers", sft
    # on all answers, which are twice as many, and on some of them twice if OPD takes longer
    steps = round(history(sft)[-1]["step"] * training_seconds(opd) / training_seconds(sft))
    repeated = (f"data.train.path={answers}", "data.train.limit=null", f"train.max_steps={steps}")
    name = f"sums_sft_longer_{seed}"
    longer = lab.train("sums_sft", name, *common, *constant, *repeated, measured=(sft, opd))
    yield "SFT, the seconds of OPD", longer
    yield "KD on the teacher's answers", lab.train("sums_kd", f"sums_kd_{seed}", *common, from_teacher, rows)
    if seed == lab.seeds[0]:
        # 4 prompts with 4 answers each in a step: 16 answers, as in the other runs
        several = [f"data.train.limit={lab.limit(count // 4)}", "train.loss_type=policy_gradient"]
        several += ["train.num_generations=4", "train.per_device_train_batch_size=4"]
        options = (*common, from_teacher, *several)
        yield "OPD by policy gradient", lab.train("sums_opd", f"sums_gradient_{seed}", *options)
        reward = "train.reward={function: exact_match}"
        yield "the same with reward", lab.train("sums_opd", f"sums_reward_{seed}", *options, reward)


def sums_models(lab: Lab) -> tuple[Path, Path]:
    """Return the student, SmolLM2 after 192 additions, and the teacher, after all of them."""
    start = f"model.name_or_path={lab.home / 'smollm2'}"
    # all steps also in a fast run, because models after two steps give empty or wrong answers only
    student = lab.train("sums_sft", "sums_student", start, full=True)
    rows = lab.limit(1536, fast=192)
    return student, lab.train("sums_sft", "sums_teacher", start, f"data.train.limit={rows}", full=True)


def sums(lab: Lab, model: Path) -> dict[str, float]:
    """Return the exact match of a model on additions, and its perplexity on general text."""
    options = ["--apply_chat_template", "--max_completion_length", SUM_TOKENS, "--batch_size", 100]
    heldout = lab.evaluate(model, "sums", "--data", DATA / "sums_heldout.jsonl", *options)
    general = lab.evaluate(model, "general", "--data", DATA / "general.jsonl")
    return {"exact match": heldout["exact_match"], "general perplexity": general["perplexity"]}


def rounds(lab: Lab) -> None:
    """f. Rounds of DPO on own answers, judged by exact match and by a reward model of such answers."""
    student, _ = sums_models(lab)
    pairs, heldout = sampled_pairs(lab, student)
    options = [f"model.name_or_path={student}", f"data.train.path={pairs}", f"data.eval.path={heldout}"]
    judge = lab.train("sums_rm", "sums_judge", *options)
    accuracy = lab.evaluate(judge, "pairs", "--data", heldout, "--batch_size", 32)
    table = Table(lab, "rounds", f"Held-out pair accuracy of the reward model: {accuracy['pair_accuracy']:.1%}.")
    table.add("student", sums(lab, student))
    judges = {"exact match": "exact_match", "reward model": f"{{by: model, name: {judge}, batch_size: 32}}"}
    for name, section in judges.items():
        for seed in lab.seeds:
            folder = f"rounds_{name.split()[0]}_{seed}"
            options = [f"model.name_or_path={student}", f"train.seed={seed}", f"rounds.judge={section}"]
            run = lab.train("rounds", folder, *options)
            table.add(f"rounds, {name}", sums(lab, run) | lab.minutes(run), seed)
    runs = {f"rounds, {name}": lab.home / f"rounds_{name.split()[0]}_{lab.seeds[0]}" for name in judges}
    lab.draw("rounds", runs.values(), "eval_exact_match")
    show_answers(lab, "rounds", {"student": student} | runs, DATA / "sums_heldout.jsonl", SUM_TOKENS)


def sampled_pairs(lab: Lab, student: Path) -> tuple[Path, Path]:
    """Return files with pairs of right and wrong answers of the student, to train on and held-out ones."""
    pairs = []
    for name in ("sums_judge", "sums_judge_heldout"):
        prompts = ["--prompts", DATA / f"{name}.jsonl", "--apply_chat_template"]
        prompts += ["--limit", 64] if lab.fast else []
        options = ["--n", 4, "--max_completion_length", SUM_TOKENS]
        answers = lab.write("sample", student, *prompts, *options, out=lab.home / f"{name}_answers.jsonl")
        judged = lab.write("judge", answers, "--by", "exact_match", out=lab.home / f"{name}_judged.jsonl")
        options = ["--method", "rm", "--take", "all"]
        pairs.append(lab.write("pair", judged, *options, out=lab.home / f"{name}_pairs.jsonl"))
    return pairs[0], pairs[1]


EXPERIMENTS: dict[str, Callable[[Lab], None]] = {
    "prune": prune, "lora": lora, "preferences": preferences, "cross": cross, "on_policy": on_policy, "rounds": rounds,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", help=f"{', '.join(EXPERIMENTS)} (default: all)")
    help_seeds = "seeds of the tables (default: 0 1 2 for prune and on_policy, 0 for others)"
    parser.add_argument("--seeds", type=int, nargs="+", help=help_seeds)
    parser.add_argument("--output", type=Path, help="default: outputs/real, with --fast outputs/real_fast")
    parser.add_argument("--fast", action="store_true", help="two steps of each run")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in EXPERIMENTS]:
        parser.error(f"there is no experiment {unknown[0]!r}; choose from {', '.join(EXPERIMENTS)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    output = arguments.output or Path("outputs/real_fast" if arguments.fast else "outputs/real")
    if arguments.fast and output == MODELS:
        parser.error(f"--fast does not write to {MODELS}, the folder of full runs")
    if arguments.fast and not arguments.output:
        shutil.rmtree(output, ignore_errors=True)
    for name in ("smollm2", "gemma3"):
        if not (MODELS / name).exists():
            parser.error(f"there is no {MODELS / name}: run make real-models")
        if output != MODELS and not (output / name).exists():
            output.mkdir(parents=True, exist_ok=True)
            (output / name).symlink_to((MODELS / name).resolve())
    bf16 = bool(bf16_instructions()) or (torch.cuda.is_available() and torch.cuda.is_bf16_supported())
    for name in arguments.names or EXPERIMENTS:
        EXPERIMENTS[name](Lab(output, arguments.seeds or SEEDS.get(name, [0]), arguments.fast, bf16))
        print(f"\n{EXPERIMENTS[name].__doc__}\n\n{(output / name).with_suffix('.md').read_text('utf-8')}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
