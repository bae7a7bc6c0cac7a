"""`hf-posttrain judge` and `pair`: scores for the answers of a file, and rows to train on; and files in pieces."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
import torch
from models_for_tests import tiny_model
from tokenizers_for_tests import byte_tokenizer

from hf_posttrain import run
from hf_posttrain.commands import judge as judging
from hf_posttrain.commands import sample as sampling
from hf_posttrain.commands.pair import is_truncated
from hf_posttrain.commands.resumable_jsonl import ResumableFile, write_rows
from hf_posttrain.data.prepare import prepare
from hf_posttrain.errors import InputError
from hf_posttrain.methods import METHODS, config_class


def length(prompts, completions, references):
    """A judge that is called with texts."""
    return [len(text) for text in completions]


def both(prompts, completions, references):
    """A judge that counts letters of both."""
    return [len(prompt + text) for prompt, text in zip(prompts, completions, strict=True)]


def broken(prompts, completions, references):
    """A judge with a mistake."""
    return [{}["score"] for _ in completions]


def lazy(prompts, completions, references):
    """The same as a generator, whose mistake shows when its numbers are asked for."""
    yield {}["score"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path):
    return [json.loads(line) for line in open(path, encoding="utf-8")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answers():
    """Three prompts of three answers: one right of each of the first two, none of the third."""
    said = {"1+1=": ["2", "3", "#### 2"], "2+2=": ["5", "It is 4", "6"], "3+3=": ["1", "2", "3"]}
    right = {"1+1=": "2", "2+2=": "4", "3+3=": "6"}
    return [{"prompt": prompt, "completion": text, "reference": right[prompt], "stopped": True}
            for prompt, texts in said.items() for text in texts]  # fmt: skip


def judged(folder, *arguments, rows=None, out="judged.jsonl"):
    write(folder / "answers.jsonl", rows or answers())
    assert run.main(["judge", "answers.jsonl", "--out", out, *arguments]) == 0
    return read(out)


def paired(method, *arguments, out="rows.jsonl"):
    assert run.main(["pair", "judged.jsonl", "--method", method, "--out", out, *arguments]) == 0
    return read(out)


# ---- judge


def test_exact_match_adds_a_score_to_each_row(folder, capsys):
    rows = judged(folder, "--by", "exact_match")
    assert [row["score"] for row in rows] == [1, 0, 1, 0, 1, 0, 0, 0, 0]
    assert {row["judge"] for row in rows} == {"exact_match"}
    assert [{k: v for k, v in row.items() if k not in ("score", "judge")} for row in rows] == answers()
    assert "wrote judged.jsonl; answers with a score: 9 of 9, 0.3333 on average" in capsys.readouterr().out


def test_a_function_gets_texts_of_messages_too(folder):
    rows = [{"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "abc"}]}]
    [row] = judged(folder, "--by", "function", "test_judge_and_pair:length", rows=rows)
    assert judged(folder, "--by", "test_judge_and_pair:length", rows=rows, out="short.jsonl") == [row]
    assert (row["score"], row["judge"]) == (3, "function test_judge_and_pair:length")


def test_a_teacher_scores_texts_with_their_end(folder):
    """The mean of a plain forward's log-probabilities."""
    model = tiny_model()
    model.save_pretrained("tiny")
    byte_tokenizer(None).save_pretrained("tiny")
    texts = ["cd", "x"]
    rows = [{"prompt": "ab", "completion": text} for text in texts]
    found = judged(folder, "--by", "teacher", "tiny", rows=rows)
    for text, row in zip(texts, found, strict=True):
        ids, answer = [97, 98], [*text.encode(), 258]
        with torch.no_grad():
            logps = model(input_ids=torch.tensor([ids + answer])).logits[0].log_softmax(-1)
        own = logps[len(ids) - 1 : -1].gather(1, torch.tensor(answer)[:, None])
        assert row["score"] == pytest.approx(own.mean().item(), abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--by", "model"], "name is missing"),
        (["--by", "nobody"], "nobody"),
        (["--by", "function", "a:b", "c"], "must be a kind and a name"),
        (["--by", "function", "nowhere:f"], "nowhere"),
        (["--by", "model", "no/such/folder"], "no such folder"),
        (["--by", "url", "http://127.0.0.1:9"], "no server answers"),
        (["--by", "url", "http://x", "--question", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--by", "exact_match", "--out", "answers.jsonl"], "answers.jsonl exists"),
        (["--by", "exact_match", "--out", "no/judged.jsonl"], "There is no folder no"),
        (
            ["--by", "function", "localhost:8000"],
            "is not package.module:name. For a server write http://localhost:8000",
        ),
        (["--by", "function", "test_judge_and_pair:broken"], "KeyError: 'score' (test_judge_and_pair.py, line "),
        (["--by", "function", "test_judge_and_pair:lazy"], "KeyError: 'score' (test_judge_and_pair.py, line "),
        (["--by", "function", "wrong:f"], "function 'wrong:f' cannot be imported (SyntaxError: "),
        (
            ["--by", "function", "failing:f"],
            "function 'failing:f' cannot be imported (ZeroDivisionError: division by zero (failing.py, ",
        ),
    ],
)
def test_what_cannot_judge_is_said_in_a_line(arguments, said, folder, capsys):
    write(folder / "answers.jsonl", answers())
    (folder / "wrong.py").write_text("def f(:")
    (folder / "failing.py").write_text("1 / 0")
    assert run.main(["judge", "answers.jsonl", "--out", "judged.jsonl", *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line
    assert not [*folder.glob("judged*")]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "p"}], "no column 'completion'. Write such rows with hf-posttrain sample"),
        ([{"prompt": "p", "completion": 4}], "row 0: completion must be a text or messages, not 4"),
        ([{"prompt": "", "completion": "a"}], "row 0: prompt must be a text or messages, not ''"),
        ([{"prompt": "p", "completion": "a"}], "answers.jsonl, row 0: column 'reference' is missing or null"),
        ([{"prompt": "p", "completion": []}], "row 0: completion must be a text or messages, not []"),
        ([{"prompt": ["p"], "completion": "a"}], "row 0: prompt must be a text or messages, not ['p']"),
        (
            [{"prompt": "p", "completion": "a", "messages": ["x"]}],
            "row 0: messages must be a text or messages, not ['x']",
        ),
    ],
)
def test_rows_that_cannot_be_judged_are_named(rows, said, folder, capsys):
    write(folder / "answers.jsonl", rows)
    assert run.main(["judge", "answers.jsonl", "--by", "exact_match", "--out", "judged.jsonl"]) == 2
    assert said in capsys.readouterr().err


# ---- pair


def test_pairs_labels_and_answers_of_a_judged_file(folder, capsys):
    judged(folder, "--by", "exact_match")
    assert paired("dpo") == [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {"prompt": "2+2=", "chosen": "It is 4", "rejected": "6"},
    ]  # fmt: skip
    told = capsys.readouterr().out
    assert "wrote rows.jsonl; pairs: 2 from 3 prompts\n  prompts without a row: 1 (answers that differ" in told
    assert len(paired("cpo", "--take", "all", out="all.jsonl")) == 4
    assert paired("sft", out="sft.jsonl") == [
        {"prompt": "1+1=", "completion": "2"}, {"prompt": "2+2=", "completion": "It is 4"},
    ]  # fmt: skip
    labelled = paired("kto", out="kto.jsonl")
    assert len(labelled) == 9
    assert [row["completion"] for row in labelled if row["label"]] == ["2", "#### 2", "It is 4"]


def test_messages_stay_messages_and_cut_answers_are_never_better(folder):
    turns = [{"role": "user", "content": "1+1="}]
    rows = [{"prompt": "<rendered>", "messages": turns, "completion": text, "score": score, "stopped": stopped}
            for text, score, stopped in (("2!", 1.0, False), ("2", 0.9, True), ("3", 0.0, True))]  # fmt: skip
    write(folder / "judged.jsonl", rows)
    say = lambda text: [{"role": "assistant", "content": text}]  # noqa: E731
    assert paired("dpo") == [{"prompt": turns, "chosen": say("2"), "rejected": say("3")}]
    assert run.main(["pair", "judged.jsonl", "--method", "dpo", "--unfinished", "--out", "cut.jsonl"]) == 2
    assert not Path("cut.jsonl").exists()


THINKS = {
    "cut": ("<rendered>", "2!", False), "cut thought": ("<user>q<assistant><think>\n", "let me", False),
    "ends in a thought": ("<rendered>", "<think>\nlet me", True),
    "ends in the prompt's thought": ("<assistant><think>\n", "let me", True),
}  # fmt: skip


def test_an_answer_that_mentions_a_tag_has_an_end():
    row = {"prompt": "q", "completion": "The tag <think> opens a thought.", "stopped": True}
    assert not is_truncated(row)
    assert not is_truncated(row | {"completion": "<think>\nhm</think> The tag <think> opens a thought."})
    assert is_truncated(row | {"stopped": False})
    assert is_truncated(row | {"completion": "<think>\nhm"})


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("kind", THINKS)
def test_an_answer_that_has_no_end_is_written_as_the_tokens_that_were_sampled(kind, chat, folder, capsys):
    """As text a template would close its thought, or write an empty one before it, and an end would be trained."""
    prompt, text, stopped = THINKS[kind]
    rows = [{"prompt": prompt, "completion": said, "score": score, "stopped": ended}
            for said, score, ended in (("<think>\na</think>2", 1.0, True), (text, 0.0, stopped))]  # fmt: skip
    rows = [row | ({"messages": [{"role": "user", "content": "q"}]} if chat else {}) for row in rows]
    write(folder / "judged.jsonl", rows)
    assert run.main(["pair", "judged.jsonl", "--method", "dpo", "--out", "rows.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "judged.jsonl, row 1: the answer did not end, or ends inside a thought" in said
    assert not Path("rows.jsonl").exists()
    ids = [row | {"prompt_ids": [1, 2], "completion_ids": [3, n]} for n, row in enumerate(rows)]
    write(folder / "judged.jsonl", ids)
    assert paired("dpo") == [{"prompt_ids": [1, 2], "chosen_ids": [3, 0], "rejected_ids": [3, 1]}]
    assert "written as token ids, for this tokenizer only: answers that did not end: 1" in capsys.readouterr().out
    write(folder / "judged.jsonl", [ids[0], ids[1] | {"completion": "3", "prompt": "p", "stopped": True}])
    assert "prompt_ids" not in paired("sft", out="whole.jsonl")[0]


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_rows_are_read_by_the_method_and_ids_stay_as_they_were(method, folder):
    said = (("C", [67, 258], 1.0), ("D", [68], 0.0))
    rows = [{"prompt": text, "prompt_ids": [65 + n, 66], "completion": say, "completion_ids": ids, "score": score}
            for n, text in enumerate(("AB", "BB")) for say, ids, score in said]  # fmt: skip
    write(folder / "judged.jsonl", rows)
    for arguments in ([], ["--ids"]):
        out = f"rows{len(arguments)}.jsonl"
        made = paired(method, *arguments, out=out)
        config = config_class(METHODS[method])(output_dir="o", use_cpu=True, max_length=60)
        found = prepare(datasets.Dataset.from_list(made), METHODS[method], byte_tokenizer(), config)
        assert len(found) == len(made)
        column = METHODS[method].rows.answers[0]
        assert found[0][column] == [67, 258]


def test_each_answer_is_compared_with_its_own_reference(folder):
    rows = [{"prompt": "p", "completion": n, "reference": n} for n in ("2", "3")]
    assert [row["score"] for row in judged(folder, "--by", "exact_match", rows=rows)] == [1.0, 1.0]


def test_a_judge_reads_the_texts_that_it_reads_in_a_round(folder):
    """`asked` and `answered`, where prompt and completion have special tokens."""
    rows = [{"prompt": "<s>p", "asked": "p", "completion": "a<eot>", "answered": "a"},
            {"prompt": "p", "completion": "ab"}]  # fmt: skip
    found = judged(folder, "--by", "function", "test_judge_and_pair:both", rows=rows)
    assert [row["score"] for row in found] == [2, 3]


@pytest.mark.parametrize(
    ("rows", "arguments", "said"),
    [
        (
            [{"prompt": "p", "completion": c, "score": 1, "judge": c} for c in "ab"],
            [],
            "row 1: judge must be that of row 0, 'a', not 'b'",
        ),
        ([{"prompt": "p", "completion": "a"}], [], "no column 'score'. Score the rows with hf-posttrain judge"),
        ([{"prompt": "p", "completion": "a", "score": "x"}], [], "row 0: score must be a number or null, not 'x'"),
        (
            [{"prompt": "p", "completion": c, "score": 1} for c in "ab"],
            [],
            "none of the 1 prompts gives a row; prompts without a row: 1",
        ),
        (
            [{"prompt": "p", "completion": c, "score": 1} for c in "ab"],
            ["--threshold", "2"],
            "--threshold is only valid with",
        ),
        (
            [{"prompt": "p", "completion": c, "score": n} for n, c in enumerate("ab")],
            ["--ids"],
            "requires the columns prompt_ids",
        ),
    ],
)
def test_what_gives_no_pairs_is_said_in_a_line(rows, arguments, said, folder, capsys):
    write(folder / "judged.jsonl", rows)
    assert run.main(["pair", "judged.jsonl", "--method", "dpo", "--out", "rows.jsonl", *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line
    assert not (folder / "rows.jsonl").exists()


# ---- pieces


def test_rows_of_a_prompt_are_of_one_prompt_wherever_they_stand(folder):
    rows = answers()
    apart = [*rows[::2], *rows[1::2]]
    write(folder / "answers.jsonl", apart)
    assert run.main(["judge", "answers.jsonl", "--by", "exact_match", "--out", "judged.jsonl"]) == 0
    found = read(folder / "judged.jsonl")
    assert [row["prompt"] for row in found] == [row["prompt"] for row in rows]  # together again
    assert [row["score"] for row in judging.group_by_prompt(found)[0]] == [1.0, 1.0, 0.0]
    write(folder / "judged.jsonl", [*found[::2], *found[1::2]])
    assert len(paired("dpo")) == 2


def test_a_file_goes_on_behind_its_last_whole_piece(tmp_path):
    out, key = tmp_path / "rows.jsonl", {"of": 1}
    with contextlib.suppress(RuntimeError), ResumableFile(out, key) as file:
        file.write([{"n": 0}, {"n": 1}])
        print('{"n": 2}', file=file.file, flush=True)
        raise RuntimeError
    part = tmp_path / "rows.jsonl.part"
    with part.open("a") as cut:
        cut.write('{"n": 3, "tex')
    assert not out.exists()
    with pytest.raises(
        InputError, match=r"was written by an earlier command with other values of n, of. Run that command again"
    ):
        ResumableFile(out, {"of": 2, "n": 1})
    with pytest.raises(
        InputError, match=r"was written by an earlier command with other values of of. Run that command again"
    ):
        ResumableFile(out, {})
    with ResumableFile(out, key) as file:
        assert file.done == 1
        assert [*file.remaining([0, 64, 128], "test")] == [64, 128]
        with pytest.raises(InputError, match="is being written by another process"):
            ResumableFile(out, key)
        file.write([{"n": 2}])
        assert [*file.finish()] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert read(out) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert not part.exists()
    with pytest.raises(InputError, match="exists"):
        ResumableFile(out, key)


def test_a_try_without_a_piece_leaves_nothing(tmp_path):
    with contextlib.suppress(RuntimeError), ResumableFile(tmp_path / "rows.jsonl", {}):
        raise RuntimeError
    assert not [*tmp_path.iterdir()]
    with pytest.raises(InputError, match="cannot be written"):
        ResumableFile(tmp_path / "no" / "rows.jsonl", {})
    with pytest.raises(InputError, match="cannot be written"):
        write_rows(tmp_path / "no" / "rows.jsonl", [])


def test_samples_that_were_killed_are_those_of_a_run_that_was_not(folder, monkeypatch):
    """Killed between any two pieces; and judged likewise."""
    tiny_model().save_pretrained("tiny")
    byte_tokenizer(None).save_pretrained("tiny")
    write(folder / "prompts.jsonl", [{"prompt": f"{n}?", "completion": "1"} for n in range(9)])
    monkeypatch.setattr(sampling, "CHUNK_SIZE", 2)
    monkeypatch.setattr(judging, "CHUNK_SIZE", 2)
    command = ["sample", "tiny", "--prompts", "prompts.jsonl", "--n", "2", "--max_completion_length", "6"]
    assert run.main([*command, "--out", "whole.jsonl"]) == 0
    judge = ["judge", "whole.jsonl", "--by", "function", "test_judge_and_pair:length"]
    assert run.main([*judge, "--out", "judged.jsonl"]) == 0
    write_piece, calls = ResumableFile.write, []

    def killed(self, rows):
        write_piece(self, rows)
        calls.append(self.done)
        raise KeyboardInterrupt

    monkeypatch.setattr(ResumableFile, "write", killed)
    for words, out in ((command, "parts.jsonl"), (judge, "judged_in_parts.jsonl")):
        for number in range(4):
            assert run.main([*words, "--out", out]) == 130
            assert calls[-1] == number + 1
    monkeypatch.setattr(ResumableFile, "write", write_piece)
    both = (command, "parts.jsonl", "whole.jsonl"), (judge, "judged_in_parts.jsonl", "judged.jsonl")
    for words, out, whole in both:
        assert run.main([*words, "--out", out]) == 0
        assert read(out) == read(whole)


@pytest.mark.slow
def test_a_command_that_is_killed_goes_on(folder):
    """SIGKILL of the real command, whenever."""
    tiny_model().save_pretrained("tiny")
    byte_tokenizer(None).save_pretrained("tiny")
    write(folder / "prompts.jsonl", [{"prompt": f"{n} is what?"} for n in range(1200)])
    words = [sys.executable, "-m", "hf_posttrain.run", "sample", "tiny", "--prompts", "prompts.jsonl", "--n", "4",
             "--max_completion_length", "60"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([*words, "--out", "whole.jsonl"], env=environment).returncode == 0
    kills = 0
    while not (folder / "parts.jsonl").exists():
        process = subprocess.Popen([*words, "--out", "parts.jsonl"], env=environment)
        part, before = folder / "parts.jsonl.part", size_of(folder / "parts.jsonl.part")
        while process.poll() is None and size_of(part) <= before + 100_000:
            time.sleep(0.05)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    assert kills >= 3
    assert read(folder / "parts.jsonl") == read(folder / "whole.jsonl")


def size_of(file):
    return file.stat().st_size if file.exists() else 0
