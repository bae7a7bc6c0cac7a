"""`hf-posttrain eval`: its numbers are those of a plain slow loop; what it keeps, and what it refuses."""

import importlib
import json
import math
import shutil
import sys
from pathlib import Path
from statistics import fmean

import peft
import pytest
import torch
from models_for_tests import tiny_model
from PIL import Image
from runs_for_tests import leave_run
from tokenizers_for_tests import QWEN3, byte_tokenizer
from vision_for_tests import seeing

from hf_posttrain import report, run
from hf_posttrain.commands import evaluate, results
from hf_posttrain.commands import metrics as loading
from hf_posttrain.commands.inference import InferenceModel
from hf_posttrain.data.images import get_image_reader, to_stored_image
from hf_posttrain.generation.final_answer import final_answer
from hf_posttrain.models.config import ModelSection
from hf_posttrain.monitoring import progress
from hf_posttrain.scoring.layouts import Prompt
from hf_posttrain.scoring.vision_inputs import VisionInputs

END, LONGEST = 258, 12
WORDS = ["What is 7 and 3?", "Hi", "Name a colour, please:", "1+1=", "Yes?", "The capital of France is", "?", "Say no."]
OVERLAP = '''
import datasets
import evaluate


class Overlap(evaluate.Metric):
    """Shared characters: of all answers, and the least of one."""

    def _info(self):
        features = datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        print("a script may print")
        shares = [len({*p} & {*r}) / len({*p} | {*r}) for p, r in zip(predictions, references)]
        return RETURNED
'''


def stopping(seed=0):
    """A model of which some answers end by themselves, and some do not."""
    model = tiny_model(seed=seed, vocab_size=259)
    with torch.no_grad():
        model.get_input_embeddings().weight[END] *= 2
    return model


def write_rows(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_metric(name, returned):
    Path("metrics", name).mkdir(parents=True)
    Path("metrics", name, f"{name}.py").write_text(OVERLAP.replace("RETURNED", returned), encoding="utf-8")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model, `tiny`."""
    folder = tmp_path_factory.mktemp("made")
    stopping().save_pretrained(folder / "tiny")
    byte_tokenizer().save_pretrained(folder / "tiny")
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """The current directory, in which `tiny` is a model, `qa.jsonl` eight prompts with answers, of which the model
    gives half, and `pairs.jsonl` eight pairs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(run.COMMANDS, "eval", "hf_posttrain.commands.evaluate")
    (tmp_path / "tiny").symlink_to(made / "tiny")
    tokenizer, model = byte_tokenizer(), stopping()
    said = [tokenizer.decode(greedy(model, list(text.encode())), skip_special_tokens=True) for text in WORDS]
    rows = [{"prompt": text, "completion": (n % 2 and said[n].strip()) or f"#### {n}"} for n, text in enumerate(WORDS)]
    write_rows("qa.jsonl", rows)
    pairs = [{"prompt": text, "chosen": "ab" * (n + 1), "rejected": "c?" * (8 - n)} for n, text in enumerate(WORDS)]
    write_rows("pairs.jsonl", pairs)
    return tmp_path


def evaluated(capsys, *arguments):
    """The evaluation that is printed for machines."""
    capsys.readouterr()
    assert evaluate.main([*arguments, "--max_completion_length", str(LONGEST), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def metrics(capsys, *arguments):
    [entry] = evaluated(capsys, *arguments)
    return entry["metrics"]


# ---- the plain slow loop


def rows_of(name):
    return [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]


def greedy(model, ids):
    """Token by token, the whole text each time."""
    answer = []
    while len(answer) < LONGEST and answer[-1:] != [END]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids + answer])).logits[0, -1, :259]
        answer.append(int(logits.argmax()))
    return answer


def logps(model, prompt, answer, ids=259, **more):
    """Log-probabilities of the answer's ids behind the prompt's, among so many."""
    with torch.no_grad():
        found = model(input_ids=torch.tensor([prompt + answer]), **more).logits[0, :, :ids].log_softmax(-1)
    return [float(found[len(prompt) - 1 + n, token]) for n, token in enumerate(answer)]


def plain_text(row, answer="completion"):
    return list(row["prompt"].encode()), [*row[answer].encode(), END]


def of_prompts(model, rows):
    """The metrics of prompts and answers that are plain text."""
    tokenizer, pairs = byte_tokenizer(), [plain_text(row) for row in rows]
    answers = [greedy(model, prompt) for prompt, _ in pairs]
    said = [final_answer(tokenizer.decode(ids, skip_special_tokens=True)) for ids in answers]
    nll = -fmean(value for pair in pairs for value in logps(model, *pair))
    return {
        "exact_match": fmean(a == final_answer(row["completion"]) for a, row in zip(said, rows, strict=True)),
        "stopped": fmean(ids[-1] == END for ids in answers), "length": fmean(map(len, answers)),
        "answer_nll": nll, "perplexity": math.exp(nll),
    }  # fmt: skip


def close(expected):
    return pytest.approx(expected, rel=1e-5, abs=1e-6)


# ---- numbers


def test_prompts_with_answers(folder, capsys):
    [entry] = evaluated(capsys, "tiny", "--data", "qa.jsonl")
    expected = of_prompts(stopping(), rows_of("qa.jsonl"))
    assert entry["metrics"] == close(expected)
    assert 0 < expected["stopped"] < 1
    assert 0 < expected["exact_match"] < 1
    assert entry["rows"] == 8
    assert entry["left_out"] == ["pair_accuracy, pair_accuracy_per_token: there are no columns chosen and rejected"]


def test_pairs(folder, capsys):
    [entry] = evaluated(capsys, "tiny", "--data", "pairs.jsonl")
    sums, means = [], []
    for row in rows_of("pairs.jsonl"):
        good, bad = (logps(stopping(), *plain_text(row, name)) for name in ("chosen", "rejected"))
        sums.append(sum(good) > sum(bad))
        means.append(fmean(good) > fmean(bad))
    assert entry["metrics"] == {"pair_accuracy": fmean(sums), "pair_accuracy_per_token": fmean(means)}
    assert fmean(sums) != fmean(means)
    [line] = entry["left_out"]
    assert line.startswith("exact_match, stopped, length, perplexity, answer_nll: pairs")


def test_conversations(folder, capsys):
    """Answered at the last turn, and scored in all turns of the assistant's and nowhere else."""
    asked = [("user", "2+2?"), ("assistant", "four"), ("user", "Sure?"), ("assistant", "yes")]
    chats = [asked, [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello there")], asked[:3]]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    write_rows("chats.jsonl", rows)
    model, tokenizer, values, answers = stopping(), byte_tokenizer(), [], []
    for chat in chats:
        ids = []
        for role, text in chat:
            ids += tokenizer.encode(f"<|im_start|>{role}\n")
            said = tokenizer.encode(f"{text}<|im_end|>")
            values += logps(model, ids, said) if role == "assistant" else []
            ids += [*said, 10]
        last = chat[:-1] if chat[-1][0] == "assistant" else chat
        turns = [{"role": role, "content": text} for role, text in last]
        answers.append(greedy(model, tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]))
    [entry] = evaluated(capsys, "tiny", "--data", "chats.jsonl")
    assert entry["metrics"]["answer_nll"] == close(-fmean(values))
    assert entry["metrics"]["length"] == fmean(map(len, answers))
    assert "exact_match of some rows (1): their answers are missing" in "\n".join(entry["left_out"])


def test_conversations_without_answers_are_answered(folder, capsys):
    write_rows("chats.jsonl", [{"messages": [{"role": "user", "content": text}]} for text in WORDS])
    [entry] = evaluated(capsys, "tiny", "--data", "chats.jsonl")
    assert [*entry["metrics"]] == ["stopped", "length"]
    _, scored, compared = entry["left_out"]
    assert scored.startswith("perplexity, answer_nll: chats.jsonl, row 0: ")
    assert compared == "exact_match: the rows have no right answers"


def test_texts_and_bare_prompts(folder, capsys):
    write_rows("texts.jsonl", [{"text": text} for text in WORDS])
    [entry] = evaluated(capsys, "tiny", "--data", "texts.jsonl")
    ids = [[*text.encode(), END] for text in WORDS]
    nll = -fmean(value for each in ids for value in logps(stopping(), each[:1], each[1:]))
    assert entry["metrics"] == close({"perplexity": math.exp(nll), "answer_nll": nll})
    assert entry["left_out"][1] == "exact_match, stopped, length: the rows have no prompts to answer"
    write_rows("asked.jsonl", [{"prompt": text, "response": "a"} for text in WORDS])
    [entry] = evaluated(capsys, "tiny", "--data", "asked.jsonl")
    assert [*entry["metrics"]] == ["stopped", "length"]
    no_answers = "exact_match, perplexity, answer_nll: the rows have no right answers. Try --columns"
    assert entry["left_out"][1] == f"{no_answers} completion=response"


def test_answers_that_are_labelled_false_do_not_count(folder, capsys):
    rows = rows_of("qa.jsonl")
    write_rows("labelled.jsonl", [row | {"label": n < 5} for n, row in enumerate(rows)])
    [entry] = evaluated(capsys, "tiny", "--data", "labelled.jsonl")
    assert entry["metrics"] == close(of_prompts(stopping(), rows[:5]))
    assert entry["left_out"][1] == "rows with label false: 3"


def test_cut_answers_are_not_compared(folder, capsys):
    """Their final answer is not known; what is left of them is scored."""
    write_rows("long.jsonl", [*rows_of("qa.jsonl")[:3], {"prompt": "Hi", "completion": "no " * 40 + "#### 8"}])
    [entry] = evaluated(capsys, "tiny", "--data", "long.jsonl", "--max_length", "50")
    assert entry["left_out"][1].startswith("exact_match of some rows (1)")
    assert entry["metrics"]["exact_match"] == of_prompts(stopping(), rows_of("qa.jsonl")[:3])["exact_match"]


@pytest.mark.parametrize("data", ["qa.jsonl", "pairs.jsonl"])
def test_no_number_depends_on_the_batch_size(folder, capsys, data):
    one, eight = (metrics(capsys, "tiny", "--data", data, "--batch_size", size) for size in ("1", "8"))
    assert one == close(eight)
    assert all(one[name] == eight[name] for name in one if name not in ("perplexity", "answer_nll"))


def test_columns_limit_and_template(folder, capsys):
    rows = rows_of("qa.jsonl")
    write_rows("theirs.jsonl", [{"question": row["prompt"], "answer": row["completion"]} for row in rows])
    named = "--columns", "prompt=question", "completion=answer"
    found = metrics(capsys, "tiny", "--data", "theirs.jsonl", *named, "--limit", "3")
    assert found == close(of_prompts(stopping(), rows[:3]))
    turns = [{"prompt": [{"role": "user", "content": row["prompt"]}],
              "completion": [{"role": "assistant", "content": row["completion"]}]} for row in rows]  # fmt: skip
    write_rows("turns.jsonl", turns)
    as_turns = metrics(capsys, "tiny", "--data", "qa.jsonl", "--apply_chat_template")
    assert as_turns == close(metrics(capsys, "tiny", "--data", "turns.jsonl"))
    assert as_turns["answer_nll"] != close(of_prompts(stopping(), rows)["answer_nll"])


def test_options_of_the_template_and_rows_of_ids(folder, capsys):
    stopping().save_pretrained("thinks")
    byte_tokenizer(QWEN3).save_pretrained("thinks")
    switch = "--chat_template_kwargs", '{"enable_thinking": false}', "--apply_chat_template"
    found = metrics(capsys, "thinks", "--data", "qa.jsonl", *switch)
    tokenizer, rows = byte_tokenizer(), []
    for row in rows_of("qa.jsonl"):
        start = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        answer = tokenizer.encode(f"{row['completion']}<|im_end|>")
        rows.append({"prompt_ids": tokenizer.encode(start), "completion_ids": answer})
    assert found["answer_nll"] == close(-fmean(value for row in rows for value in logps(stopping(), *row.values())))
    write_rows("ids.jsonl", rows)
    assert metrics(capsys, "tiny", "--data", "ids.jsonl") == close(found)


def test_an_adapter_stands_for_its_base_with_it(folder, capsys):
    policy = peft.get_peft_model(stopping(), peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    policy.peft_config["default"].base_model_name_or_path = "tiny"
    policy.save_pretrained("out")
    leave_run(folder / "out")
    found = metrics(capsys, "out", "--data", "qa.jsonl")
    assert found == close(of_prompts(policy.eval(), rows_of("qa.jsonl")))
    assert found["answer_nll"] != close(metrics(capsys, "tiny", "--data", "qa.jsonl")["answer_nll"])
    assert found == metrics(capsys, "tiny", "--adapter", "out", "--data", "qa.jsonl")
    kept = rows_of_json("out/evaluations.json")
    assert [(entry["model"], entry["adapter"]) for entry in kept] == [("out", None), ("tiny", "out")]
    assert not Path("tiny/evaluations.json").exists()


def test_pictures_are_seen(folder, capsys):
    model, tokenizer = seeing("qwen3_vl", scale=3.0)
    model.save_pretrained("sees")
    get_image_reader(tokenizer).processor.save_pretrained("sees")
    Path("seen").mkdir()
    for seed in (1, 2):
        Image.effect_noise((40, 40), 60 * seed).convert("RGB").save(f"seen/{seed}.png")
    asked, said = {"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "noise"}
    write_rows("seen.jsonl", [{"prompt": [asked], "completion": [said], "images": [f"{n}.png"]} for n in (1, 2)])
    found = metrics(capsys, "sees", "--data", "seen.jsonl", "--images", "--image_folder", "seen", "--batch_size", "2")
    values, answer = [], tokenizer.encode("noise<|im_end|>")
    for n in (1, 2):
        picture = to_stored_image(f"seen/{n}.png")
        seen = f"<|vision_start|>{get_image_reader(tokenizer).expansion(picture)}<|vision_end|>"
        ids = tokenizer.encode(f"<|im_start|>user\n{seen}What?<|im_end|>\n<|im_start|>assistant\n")
        shown = VisionInputs.from_model(model, get_image_reader(tokenizer)).prompt_arguments(
            [picture], torch.tensor([ids + answer]), model
        )
        values.append(logps(model, ids, answer, len(tokenizer), **shown))
    assert found["answer_nll"] == pytest.approx(-fmean(value for each in values for value in each), abs=1e-4)
    assert values[0] != pytest.approx(values[1])


def test_metrics_of_a_script(folder, capsys):
    write_metric("overlap", "{'overlap': sum(shares) / len(shares), 'least': min(shares)}")
    found = metrics(capsys, "tiny", "--data", "qa.jsonl", "--metrics", "metrics/overlap")
    model, tokenizer, shares = stopping(), byte_tokenizer(), []
    for row in rows_of("qa.jsonl"):
        said = {*tokenizer.decode(greedy(model, plain_text(row)[0]), skip_special_tokens=True)}
        shares.append(len(said & {*row["completion"]}) / len(said | {*row["completion"]}))
    assert {name: found[name] for name in ("overlap", "overlap_least")} == close(
        {"overlap": fmean(shares), "overlap_least": min(shares)}
    )


# ---- what is kept


def rows_of_json(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def test_results_stay_with_the_run(folder, capsys):
    leave_run(folder / "out", all_results={"train_loss": 0.5, "eval_loss": 1.5})
    stopping().save_pretrained("out")
    byte_tokenizer().save_pretrained("out")
    assert evaluate.main(["out/", "--data", "qa.jsonl", "--limit", "2", "--max_completion_length", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("qa.jsonl: 2 rows, out\n")
    [entry] = rows_of_json("out/evaluations.json")
    assert all(f"  {name:{11}}  {value:.6g}\n" in printed for name, value in entry["metrics"].items())
    assert (entry["model"], entry["adapter"], entry["data"], entry["dtype"]) == ("out", None, "qa.jsonl", "float32")
    assert entry["options"] == {"limit": 2, "max_completion_length": 4}
    assert entry["version"]
    assert entry["date"]
    # another file is added, the same one replaces; other results stay
    found = metrics(capsys, "out", "--data", "qa.jsonl")
    metrics(capsys, "out", "--data", "pairs.jsonl")
    first, second = rows_of_json("out/evaluations.json")
    assert (first["data"], first["metrics"], first["rows"], second["data"]) == ("qa.jsonl", found, 8, "pairs.jsonl")
    results = {f"eval_qa_{name}": value for name, value in found.items()}
    results |= {f"eval_pairs_{name}": value for name, value in second["metrics"].items()}
    assert rows_of_json("out/all_results.json") == {"train_loss": 0.5, "eval_loss": 1.5} | results
    assert Path("out/all_results.json").read_text().startswith('{\n    "eval_loss": 1.5,\n    "eval_pairs_')
    assert not [*Path("out").glob("*.tmp")]
    report.write("out")  # still reads the folder


def test_only_a_run_or_output_is_written_into(folder, capsys):
    before = {*Path().rglob("*")}
    metrics(capsys, "tiny", "--data", "qa.jsonl")
    assert {*Path().rglob("*")} == before
    metrics(capsys, "tiny", "--data", "qa.jsonl", "--output", "new/results")
    assert sorted(path.name for path in Path("new/results").iterdir()) == ["all_results.json", "evaluations.json"]


def test_numbers_that_another_file_of_the_same_name_replaces_are_told(folder, capsys, caplog):
    Path("other").mkdir()
    shutil.copy("qa.jsonl", "other/qa.jsonl")
    shutil.copytree("tiny", "same")
    for model, data, told in (
        ("tiny", "qa.jsonl", ""), ("tiny", "qa.jsonl", ""), ("tiny", "other/qa.jsonl", "data qa.jsonl, now other/"),
        ("tiny", "other/qa.jsonl", ""), ("same", "other/qa.jsonl", "(model tiny, now same) are replaced"),
    ):  # fmt: skip
        caplog.clear()
        metrics(capsys, model, "--data", data, "--limit", "2", "--output", "kept")
        assert told in caplog.text
        assert bool(told) == ("an earlier evaluation" in caplog.text)
    assert len(rows_of_json("kept/evaluations.json")) == 3


def test_a_file_is_written_whole_or_not_at_all(folder, monkeypatch):
    entry = {"model": "m", "data": "a.jsonl", "metrics": {"x": 1.0}}
    results.store_result(folder, [entry])
    before = Path("evaluations.json").read_text()

    def breaks(path, *args, **kwargs):
        path.write_bytes(b"[{")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", breaks)
    with pytest.raises(OSError, match="No space"):
        results.store_result(folder, [entry | {"data": "b.jsonl"}])
    assert Path("evaluations.json").read_text() == before


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("tiny", "nothing to evaluate. Add --data FILE or --tasks NAME"),
        ("--data qa.jsonl", "required: MODEL"),
        ("tiny --data qa.jsonl --limit 0", "--limit: must be a whole number of at least 1, not 0"),
        ("tiny --data qa.jsonl --batch_size x", "--batch_size: must be a whole number of at least 1, not x"),
        ("tiny --data qa.jsonl --columns question", "'question' must have the form NAME=COLUMN"),
        ("tiny --data qa.jsonl --columns prompt=promt", "no column 'promt' for 'prompt' (did you mean 'prompt'?)"),
        ("tiny --data qa.jsonl --num_fewshot 1", "--num_fewshot is only valid with --tasks"),
        ("tiny --tasks x --metrics y", "--metrics is only valid with --data"),
        ("tiny --tasks x --task_folder nowhere", "--task_folder: there is no folder nowhere"),
        ("tiny --data qa.jsonl --metrics a/length", "there is already a metric length"),
        ("tiny --data qa.jsonl --metrics no_such", "--metrics no_such: the metric cannot be loaded"),
        (
            "tiny --data pairs.jsonl --metrics metrics/fine",
            "requires prompts with an answer to compare with, which pairs.jsonl lacks",
        ),
        (
            "tiny --data qa.jsonl --metrics metrics/texts",
            "texts: the values of the metric must be numbers, not {'texts': 'many'}",
        ),
        ("tiny --data qa.jsonl --metrics metrics/fails", "fails: the metric cannot compare texts (ZeroDivisionError"),
        ("tiny --data qa.jsonl --chat_template_kwargs {", "--chat_template_kwargs: expected a mapping"),
        ("tiny --data nothing.jsonl", "there is no file or folder nothing.jsonl"),
        ("tiny --data other.jsonl", "not question, answer. Try --columns prompt=question completion=answer"),
        ("tiny --data odd.jsonl", "not a, b. Rename them with --columns NAME=COLUMN"),
        ("tiny --data bad.jsonl", "bad.jsonl, row 1: column 'prompt'"),
        ("tiny --data false.jsonl", "false.jsonl: there is nothing to evaluate"),
        ("tiny --data qa.jsonl --output qa.jsonl", "qa.jsonl cannot be written"),
        ("tiny --data qa.jsonl --output broken", "evaluations.json cannot be read as JSON"),
        ("tiny --data qa.jsonl --output strange", "all_results.json must contain only evaluations"),
        ("nowhere --data qa.jsonl", "MODEL: model nowhere: no such folder"),
        ("tiny --data qa.jsonl --images", "does not support images"),
        ("unfinished --data qa.jsonl", "unfinished has no model yet. Use one of its checkpoints, such as unf"),
        ("broken_model --data qa.jsonl", "broken_model: the model's logits are NaN"),
        (
            "lost --data qa.jsonl",
            "lost/adapter_config.json names the base model ./gone, which does not exist on this machine",
        ),
        ("lost --adapter lost --data qa.jsonl", "MODEL cannot be an adapter if --adapter is set, and lost is one"),
        ("tiny --adapter tiny --data qa.jsonl", "tiny has no adapter"),
        (
            "tiny --data qa.jsonl --apply_chat_template --tasks x",
            "--tasks requires lm-eval. Install it with: pip install 'hf_posttrain[ev",
        ),
    ],
)
def test_mistakes_are_said_in_a_line(arguments, said, folder, capsys, monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    write_metric("fine", "{'fine': 1}")
    write_metric("texts", "{'texts': 'many'}")
    write_metric("fails", "1 / 0")
    write_rows("odd.jsonl", [{"a": 1, "b": 2}])
    write_rows("other.jsonl", [{"question": "a", "answer": "b"}] * 2)
    write_rows("bad.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": 4, "completion": "b"}])
    write_rows("false.jsonl", [{"prompt": "a", "completion": "b", "label": False}] * 2)
    for name in ("broken", "strange", "lost"):
        Path(name).mkdir()
    Path("broken/evaluations.json").write_text("[{")
    Path("unfinished/checkpoint-3").mkdir(parents=True)
    if "broken_model" in arguments:
        model = stopping()
        model.lm_head.weight.data[0, 0] = math.nan
        model.save_pretrained("broken_model")
        byte_tokenizer().save_pretrained("broken_model")
    Path("strange/all_results.json").write_text("[1]")
    config = peft.LoraConfig(base_model_name_or_path="./gone", target_modules="all-linear", task_type="CAUSAL_LM")
    config.save_pretrained("lost")
    Path("lost/adapter_model.safetensors").touch()
    assert run.main(["eval", *arguments.split()]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line


def test_one_process_evaluates(folder, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run.main(["eval", "tiny", "--data", "qa.jsonl"]) == 2
    assert "without a launcher" in capsys.readouterr().err


def test_the_package_evaluate_is_not_shadowed():
    assert evaluate.__name__ == "hf_posttrain.commands.evaluate"
    assert hasattr(sys.modules["evaluate"], "load")


# ---- lm-eval

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: tasks/rows.jsonl}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
{more}
metadata: {{version: 1.0}}
"""
CHOICE = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc}]"""
ANSWER = """output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["<|im_end|>"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]"""
GROUP = """
group: both
task: [choice, unshown]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
"""


@pytest.fixture
def tasks(folder):
    """A folder with two tasks of multiple choice, one of answers, and a group."""
    pytest.importorskip("lm_eval")
    Path("tasks").mkdir()
    choices = [" yes", " no", " maybe so"]
    model, tokenizer = stopping(), byte_tokenizer()
    rows = [{"question": text, "choices": choices, "gold": n % 3} for n, text in enumerate(WORDS)]
    said = tokenizer.decode(greedy(model, list(WORDS[0].encode())), skip_special_tokens=True)
    write_rows("tasks/rows.jsonl", [rows[0] | {"choices": [said, *choices[1:]]}, *rows[1:]])
    for name, more in {"choice": CHOICE, "unshown": f"{CHOICE}\nnum_fewshot: 0", "answer": ANSWER}.items():
        Path("tasks", f"{name}.yaml").write_text(TASK.format(name=name, more=more))
    Path("tasks", "both.yaml").write_text(GROUP)


def test_tasks_of_lm_eval_agree_with_our_own_scores(tasks, capsys):
    choice, answer = evaluated(
        capsys, "tiny", "--tasks", "choice", "answer", "--task_folder", "tasks", "--output", "out", "--num_fewshot", "0"
    )
    model, hits = InferenceModel(ModelSection("tiny")), []
    for row in rows_of("tasks/rows.jsonl"):
        answers = [model.tokenizer.encode(text) for text in row["choices"]]
        sums = [sum(each) for each in model.logps([Prompt(row["question"].encode())] * 3, answers)]
        hits.append(sums.index(max(sums)) == row["gold"])
    assert choice["metrics"]["acc"] == fmean(hits)
    assert 0 < fmean(hits) < 1
    assert choice["metrics"]["acc_stderr"] == close((fmean(hits) * (1 - fmean(hits)) / 7) ** 0.5)
    assert answer["metrics"]["exact_match"] == 1 / 8
    assert (choice["task"], choice["rows"]) == ("choice", 8)
    assert choice["options"] == {"num_fewshot": 0, "task_folder": "tasks"}
    assert [entry["task"] for entry in rows_of_json("out/evaluations.json")] == ["choice", "answer"]
    assert rows_of_json("out/all_results.json")["eval_choice_acc"] == fmean(hits)


def test_groups_of_tasks_next_to_data(tasks, capsys, monkeypatch):
    its_own = importlib.import_module("lm_eval.tasks").TaskManager
    quick = lambda include_path, include_defaults: its_own(include_path=include_path, include_defaults=False)  # noqa: E731
    monkeypatch.setattr("lm_eval.tasks.TaskManager", quick)  # the thousands that it brings take seconds to read
    given = "--data", "qa.jsonl", "--tasks", "both", "--task_folder", "tasks", "--limit", "4", "--num_fewshot", "1"
    data, *found = evaluated(capsys, "tiny", *given)
    assert (data["data"], data["rows"]) == ("qa.jsonl", 4)
    assert {entry["task"]: entry["rows"] for entry in found} == {"both": 8, "choice": 4, "unshown": 4}
    acc = {entry["task"]: entry["metrics"]["acc"] for entry in found}
    assert acc["both"] == fmean([acc["choice"], acc["unshown"]])
    left_out = {entry["task"]: entry["left_out"] for entry in found}
    assert left_out == {"both": [], "choice": [], "unshown": ["num_fewshot 1: the task sets its own number, 0"]}


@pytest.mark.parametrize(
    ("name", "said"), [("choise", "lm-eval has no task 'choise'; did you mean 'choice'?"), ("away", "--tasks away: ")]
)
def test_tasks_that_cannot_be_run_are_said_in_a_line(tasks, capsys, name, said):
    Path("tasks/away.yaml").write_text(TASK.format(name="away", more=CHOICE).replace("rows.jsonl", "gone.jsonl"))
    assert run.main(["eval", "tiny", "--tasks", name, "--task_folder", "tasks"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line


def test_an_evaluation_that_is_killed_goes_on_and_says_what_is_done(folder, capsys, monkeypatch, caplog):
    """Not on a terminal, where nothing else would be seen for many minutes."""
    arguments = ("tiny", "--data", "qa.jsonl", "--batch_size", "2", "--output", "kept")
    whole = metrics(capsys, "tiny", "--data", "qa.jsonl", "--batch_size", "2")
    real, calls = InferenceModel.generate, []

    def killed(self, prompts, *args, **kwargs):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, prompts, *args, **kwargs)

    monkeypatch.setattr(InferenceModel, "generate", killed)
    monkeypatch.setattr(progress, "LOG_INTERVAL", -1.0)
    with caplog.at_level("INFO"), pytest.raises(KeyboardInterrupt):
        evaluate.main([*arguments, "--max_completion_length", str(LONGEST)])
    assert "answering: 4 of 8 rows are done" in caplog.text
    [part] = Path("kept").glob(".eval_*.part")
    part.write_text(part.read_text() + '{"7": [1')  # as it was being written
    assert metrics(capsys, *arguments) == whole
    assert sum(calls[3:]) == len(rows_of("qa.jsonl")) - 4
    assert not [*Path("kept").glob(".eval_*")]
    # of other rows nothing is taken
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        evaluate.main([*arguments, "--max_completion_length", str(LONGEST)])
    write_rows("qa.jsonl", rows_of("qa.jsonl")[::-1][:5])
    metrics(capsys, *arguments)
    assert sum(calls[3:]) == 5
