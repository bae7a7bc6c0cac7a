"""KD from log-probabilities that are recorded in the rows: their format, their alignment, and recipes with them."""

import json
from pathlib import Path

import datasets
import pytest
from models_for_tests import tiny_model
from recorded_for_tests import as_completion, recorded
from tokenizers_for_tests import CHATML, byte_tokenizer
from training_for_tests import assert_same_step, one_step, trainer_for

from hf_posttrain import KDConfig, KDTrainer, OPDConfig, run
from hf_posttrain.errors import InputError
from hf_posttrain.recipe.read import load_recipe

SIZE = 259
"""Ids of `byte_tokenizer`."""
FACTOR = 2**-9


def marked(ids):
    """Entries for a row: two tokens each, of which the first is the row's own and has the position as its logprob."""
    return [
        [{"token": f"token_id:{token}", "logprob": -1 - FACTOR * position}, {"token": "token_id:258", "logprob": -3}]
        for position, token in enumerate(ids)
    ]


def prepared(rows, tmp_path, top_k=1, name="train", column="logprobs", **config):
    options = {"teacher": {"top_k": top_k, "logprobs_column": column}, "report_to": "none", "use_cpu": True}
    args = KDConfig(str(tmp_path), **options | config)
    return KDTrainer.prepare(rows, byte_tokenizer(CHATML), args, name)


@pytest.mark.parametrize(
    ("config", "positions", "dropped"),
    [({}, range(20, 60), 0), ({"max_length": 50}, range(20, 50), 0), ({"max_length": 30}, range(20, 35), 5),
     ({"completion_only_loss": False}, range(1, 60), 0), ({"completion_only_loss": False, "max_length": 50},
      range(1, 50), 0), ({"completion_only_loss": False, "max_length": 30}, range(6, 35), 5)],
)  # fmt: skip
def test_entries_belong_to_the_end_of_the_row_before_truncation(config, positions, dropped, tmp_path):
    """20 tokens of the prompt and 40 of the answer; a prompt that is truncated has 15."""
    ids = [(7 * n) % 250 for n in range(60)]
    recorded_from = 0 if "completion_only_loss" in config else 20
    row = {"prompt_ids": ids[:20], "completion_ids": ids[20:], "logprobs": marked(ids)[recorded_from:]}
    [found] = prepared([row], tmp_path, **config)
    kept = [*found["prompt_ids"], *found["completion_ids"]]
    assert kept == ids[dropped : dropped + len(kept)]
    assert [token for [token] in found["teacher_ids"]] == [ids[n] for n in positions]
    assert found["teacher_logps"] == [[-1 - FACTOR * n] for n in positions]


def test_only_trained_tokens_have_entries(tmp_path):
    """The others may be null, and the tokens are sorted."""
    ids = [1, 2, 3, 4, 5, 6]
    entries = [None, None, *[entry[::-1] for entry in marked(ids)[2:]]]
    entries[4] = []
    rows = [{"prompt_ids": ids[:2], "completion_ids": ids[2:], "completion_mask": [1, 1, 0, 1], "logprobs": entries},
            {"prompt_ids": ids, "completion_ids": [], "completion_mask": [], "logprobs": None}]  # fmt: skip
    for value in (entries, as_completion(entries)):
        rows[0]["logprobs"] = value
        [found] = prepared(rows, tmp_path, top_k=2)
        assert found["teacher_ids"] == [[3, 258], [4, 258], [6, 258]]
        assert found["teacher_logps"] == [[-1 - FACTOR * n, -3] for n in (2, 3, 5)]


def test_arrow_columns_and_streams_are_read(tmp_path):
    ids = [1, 2, 3, 4, 5, 6]
    row = {"prompt_ids": ids[:2], "completion_ids": ids[2:]}
    for value in (marked(ids)[2:], as_completion([None, *marked(ids)[1:]])):
        table = datasets.Dataset.from_list([row | {"logprobs": value}] * 3)
        assert "token" in str(table.features)  # Arrow's own types
        found = [prepared(rows, tmp_path, top_k=2) for rows in (table, table.to_iterable_dataset())]
        for rows in map(list, found):
            assert [row["teacher_ids"] for row in rows] == [[[i, 258] for i in ids[2:]]] * 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda entries: None, 'None is not a list of log-probabilities; expected a list of {"token"'),
        (lambda entries: {"text": []}, r"{'text': \[\]} is not a list of log-probabilities"),
        (lambda entries: [*entries[:1], None], "entry 1 has no tokens, and it belongs to a trained token"),
        (lambda entries: as_completion([*entries[:1], []]), "entry 1 has no tokens"),
        (lambda entries: [*entries[:1], [{"id": 3}]], r"entry 1 has {'id': 3}; expected a list of"),
        (lambda entries: [*entries[:1], "x"], "entry 1 has 'x'; expected a list of"),
        (lambda entries: [*entries[:1], [{"token": " 4", "logprob": -1.0}]],
         "entry 1 has the text ' 4' in place of a token id .* Record with return_tokens_as_token_ids: true of vLLM"),
        (lambda entries: [*entries[:1], [{"token": "token_id:259", "logprob": -1.0}]],
         "entry 1 has token id 259, which is not in the tokenizer's 259 ids"),
        (lambda entries: [*entries[:1], [{"token": "token_id:3", "logprob": 0.5}]], "entry 1 has the logprob 0.5"),
        (lambda entries: [*entries[:1], [{"token": f"token_id:{n}", "logprob": -0.1} for n in (3, 4)]],
         "the probabilities of entry 1 sum to 1.81, above 1. Record natural logarithms"),
        (lambda entries: entries[1:], "1 entries for the 2 tokens from the first trained one to the end of the row"),
        (lambda entries: [[{"token": "token_id:9", "logprob": -1.0}] * 2] * 2,
         "only 0 of the 2 trained tokens are among the recorded tokens, so they are of another tokenizer"),
        (lambda entries: [*entries[:1], entries[1][:1]],
         "entry 1 has 1 tokens, and teacher.top_k is 2. Set teacher.top_k to at most 1"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_column_is_told_with_its_row(change, problem, tmp_path):
    row = {"prompt_ids": [1], "completion_ids": [2, 3]}
    entries = marked([2, 3])
    rows = [row | {"logprobs": value} for value in (entries, change(entries))]
    with pytest.raises(InputError, match=f"^eval, row 1: column 'logprobs': {problem}"):
        prepared(rows, tmp_path, top_k=2, name="eval")


def test_a_missing_column_is_told(tmp_path):
    row = {"prompt_ids": [1], "completion_ids": [2], "logprobs": marked([2])}
    with pytest.raises(InputError, match=r"train: teacher.logprobs_column: there is no column 'logprob'; did you mean"):
        prepared([row], tmp_path, column="logprob")


def test_prepared_rows_are_read_again_and_only_with_their_k(tmp_path):
    ids = [1, 2, 3, 4, 5, 6]
    rows = datasets.Dataset.from_list(
        [{"prompt_ids": ids[:2], "completion_ids": ids[2:], "logprobs": marked(ids)[2:]}] * 4
    )
    first = prepared(rows, tmp_path, top_k=2)
    assert prepared(first, tmp_path, top_k=2) is first
    with pytest.raises(InputError, match=r"the prepared rows have the 2 most likely tokens, and teacher.top_k is 1"):
        prepared(first, tmp_path, top_k=1)
    assert prepared(rows, tmp_path, top_k=1)._fingerprint != first._fingerprint
    # a teacher in memory does not read them
    trainer = trainer_for("kd", tiny_model(), first, tmp_path, second=tiny_model(seed=9))
    assert "teacher_ids" not in trainer.train_dataset.column_names


@pytest.mark.parametrize(("top_k", "options", "problem"), [
    (None, {}, "teacher.logprobs_column requires teacher.top_k"),
    (4, {"temperature": 2.0}, "temperature=2 cannot be combined with teacher.logprobs_column"),
    (4, {"merge_eos": True}, "teacher.merge_eos cannot be combined with teacher.logprobs_column"),
])  # fmt: skip
def test_options_that_recorded_scores_exclude(top_k, options, problem, tmp_path):
    teacher = {"logprobs_column": "x", "top_k": top_k} | {k: v for k, v in options.items() if k == "merge_eos"}
    rest = {key: value for key, value in options.items() if key != "merge_eos"}
    with pytest.raises(InputError, match=problem):
        KDConfig(str(tmp_path), use_cpu=True, teacher=teacher, **rest)


def test_opd_has_no_recorded_scores(tmp_path):
    with pytest.raises(InputError, match=r"teacher.logprobs_column cannot be combined with method opd.* Use method kd"):
        OPDConfig(str(tmp_path), use_cpu=True, teacher={"logprobs_column": "x", "top_k": 4})


# ---- messages and recipes

CHATS = [
    [{"role": "user", "content": f"What is {n} + {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."},
     {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes" + "!" * n}]
    for n in range(4)
]  # fmt: skip


def chat_rows(model, k=6):
    """Conversations with the entries of all their tokens but the first, as of `prompt_logprobs`."""
    tokenizer = byte_tokenizer(CHATML)
    rows = []
    for chat in CHATS:
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"][:-1]  # without "\n"
        rows.append({"messages": chat, "logprobs": [None, *recorded(model, ids, len(ids) - 1, k)]})
    return rows


@pytest.mark.parametrize(
    "config",
    [{"train_on": "assistant", "max_length": 70}, pytest.param({}, marks=pytest.mark.slow),
     pytest.param({"train_on": "last", "form": as_completion}, marks=pytest.mark.slow)],
)  # fmt: skip
def test_conversations_with_recorded_scores_train_as_with_the_teacher(config, tmp_path):
    student = tiny_model(vocab_size=SIZE)
    teacher = tiny_model(seed=9, vocab_size=SIZE)
    config = {"tokenizer": byte_tokenizer(CHATML), **config}
    rows = chat_rows(teacher)
    plain = [{"messages": row["messages"]} for row in rows]
    form = config.pop("form", list)
    rows = [row | {"logprobs": form(row["logprobs"])} for row in rows]
    found = one_step("kd", student, rows, tmp_path, teacher={"top_k": 6, "logprobs_column": "logprobs"}, **config)
    expected = one_step("kd", student, plain, tmp_path, second=teacher, teacher={"top_k": 6}, **config)
    assert_same_step(found, expected)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a student, recorded rows and their recipe, which is the current one."""
    monkeypatch.chdir(tmp_path)
    tiny_model(vocab_size=SIZE).save_pretrained("student")
    byte_tokenizer(CHATML).save_pretrained("student")
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, chat_rows(tiny_model(seed=9, vocab_size=SIZE)))))
    tree = {
        "method": "kd", "model": {"name_or_path": "student"}, "teacher": {"logprobs_column": "logprobs", "top_k": 5},
        "data": {"train": {"path": "rows.jsonl"}, "eval": {"path": "rows.jsonl"}},
        "train": {"output_dir": "out", "max_steps": 2, "use_cpu": True, "report_to": "none", "logging_steps": 1,
                  "train_on": "last", "save_steps": 1, "eval_strategy": "epoch"},
    }  # fmt: skip
    Path("recipe.yaml").write_text(json.dumps(tree))
    return "recipe.yaml"


def losses(folder):
    log = json.loads(Path(folder, "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


@pytest.mark.slow
def test_a_recipe_with_recorded_scores_runs(home, capsys):
    """And is checked, read back, resumed, and not resumed with other scores."""
    assert run.main([home, "--check"]) in (0, 1)
    printed = capsys.readouterr().out
    assert "teacher: log-probabilities recorded in the column 'logprobs' of the rows" in printed
    assert "not read" not in printed
    assert run.main([home]) == 0
    first = losses("out")
    assert len(first) == 2
    assert load_recipe("out/recipe.yaml").train["teacher"] == {"logprobs_column": "logprobs", "top_k": 5}
    resume = ["train.output_dir=again", "train.resume_from_checkpoint=out/checkpoint-1"]
    assert run.main(["out/recipe.yaml", *resume]) == 0
    assert losses("again") == first

    Path("rows.jsonl").write_text("\n".join(map(json.dumps, chat_rows(tiny_model(seed=8, vocab_size=SIZE)))))
    assert run.main([home, *resume]) == 2
    assert "train_dataset" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("teacher.name_or_path=student", "teacher.logprobs_column cannot be combined with a teacher model"),
        ("teacher=null", "method kd requires a teacher"),
        ("teacher.top_k=null", "train.teacher.logprobs_column requires teacher.top_k"),
        ("teacher.prompt='{{ prompt }}!'", "teacher.logprobs_column cannot be combined with a teacher model"),
    ],
)
def test_a_recipe_that_excludes_recorded_scores_is_told(override, problem, home):
    with pytest.raises(InputError, match=problem):
        load_recipe(home, [override])


def test_a_teacher_in_python_is_excluded(tmp_path):
    rows = chat_rows(tiny_model(seed=9, vocab_size=SIZE))
    config = {"teacher": {"top_k": 6, "logprobs_column": "logprobs"}, "tokenizer": byte_tokenizer(CHATML)}
    student = tiny_model(vocab_size=SIZE)
    with pytest.raises(InputError, match=r"teacher.logprobs_column cannot be combined with a teacher model"):
        trainer_for("kd", student, rows, tmp_path, second=tiny_model(seed=9), **config)
    trainer = trainer_for("kd", student, rows, tmp_path, eval_rows=rows, **config)
    assert trainer.evaluate()["eval_distill/divergence"] > 0
    with pytest.raises(InputError, match=r"eval: teacher.logprobs_column: there is no column 'logprobs'"):
        trainer.evaluate([{"messages": row["messages"]} for row in rows])
