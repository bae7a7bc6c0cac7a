"""The sections teacher and teachers of a recipe: what they ask of the run, and what is refused in one line."""

import json
from pathlib import Path

import pytest
from models_for_tests import tiny_model
from tokenizers_for_tests import QWEN3, byte_tokenizer, merging_tokenizer
from vllm_for_tests import Serving

from hf_posttrain import run
from hf_posttrain.errors import InputError
from hf_posttrain.recipe.read import load_recipe

TRAIN = {"output_dir": "out", "max_steps": 2, "use_cpu": True, "max_length": 200, "report_to": "none",
         "learning_rate": 1e-3, "logging_steps": 1, "apply_chat_template": True,
         "per_device_train_batch_size": 4}  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a student, teachers and rows, which is the current one."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("student", "teacher", "other")):
        tiny_model("qwen3", seed, vocab_size=500 if name == "other" else 300).save_pretrained(name)
        (merging_tokenizer() if name == "other" else byte_tokenizer(QWEN3)).save_pretrained(name)
    rows = [{"prompt": f"What is {n} + 1?", "completion": f"It is {n + 1}.", "hint": "count on",
             "teacher": ("maths", "code")[n % 2]} for n in range(8)]  # fmt: skip
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def recipe(method, section=None, teachers=None, **train):
    """The file of a recipe."""
    more = {"max_completion_length": 8} if method == "opd" else {}
    tree = {"method": method, "model": {"name_or_path": "student"}, "data": {"train": {"path": "rows.jsonl"}},
            "train": TRAIN | more | train}  # fmt: skip
    tree |= {"teacher": section} if section else {}
    tree |= {"teachers": teachers} if teachers else {}
    Path("recipe.yaml").write_text(json.dumps(tree, indent=1))  # JSON is YAML
    return "recipe.yaml"


LOCAL = {"name_or_path": "teacher"}
TOP_K = {"teacher": {"top_k": 8}}
CACHED = {"teacher": {"top_k": 8, "precompute": True}}
HINTED = "{{ prompt }} ({{ hint }}: {{ completion }})"


def test_a_comparison_option_on_the_command_line_overrides_the_file(home):
    """In either section, since a recipe that a run wrote has it in `train.teacher`."""
    for section, train in ((LOCAL, TOP_K), (LOCAL | {"top_k": 8}, {})):
        path = recipe("kd", section, **train)
        assert load_recipe(path).train["teacher"]["top_k"] == 8
        for key in ("teacher.top_k", "train.teacher.top_k"):
            assert load_recipe(path, [f"{key}=5"]).train["teacher"]["top_k"] == 5
    twice = r"train\.teacher\.top_k cannot be combined with teacher\.top_k"
    with pytest.raises(InputError, match=twice):
        load_recipe(recipe("kd", LOCAL | {"top_k": 8}, **TOP_K))
    with pytest.raises(InputError, match=f"command line: {twice}"):
        load_recipe(recipe("kd", LOCAL), ["teacher.top_k=5", "train.teacher.top_k=6"])
    # null on the command line resets the option of the file
    found = load_recipe(recipe("kd", {**LOCAL, "top_k": 5}), ["train.teacher=null"])
    assert found.train["teacher"] is None
    found = load_recipe(recipe("kd", {**LOCAL, "top_k": 5}), ["train.teacher=null", "teacher.top_k=3"])
    assert found.train["teacher"]["top_k"] == 3


def test_the_command_line_overrides_the_other_name_of_an_option_in_the_file(home):
    old = recipe("kd", LOCAL, teacher_top_k=5)
    assert load_recipe(old, ["teacher.top_k=8"]).train["teacher"]["top_k"] == 8
    new = recipe("kd", {**LOCAL, "top_k": 8})
    assert load_recipe(new, ["train.teacher_top_k=5"]).train["teacher"]["top_k"] == 5
    with pytest.raises(InputError, match=r"teacher.top_k is also set under its old name"):
        load_recipe(recipe("kd", {**LOCAL, "top_k": 8}, teacher_top_k=5), [])


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("teacher.topk=5", "teacher.topk does not exist: use teacher.top_k"),
        ("teacher.merge_eoss=true", "use teacher.merge_eos"),
        ("teachers={a: {name_or_path: x, top_k: 5}}", "use train.teacher.top_k"),
    ],
)
def test_a_misspelt_comparison_option_is_told(override, hint, home):
    with pytest.raises(InputError, match=hint):
        load_recipe(recipe("kd", LOCAL), [override])


@pytest.mark.parametrize(
    ("method", "teacher", "teachers", "train"),
    [
        pytest.param("opd", {"self": "start", "prompt": HINTED}, None, {}, marks=pytest.mark.slow),
        pytest.param(
            "opd", {"self": "ema", "ema": 0.9, "prompt": HINTED}, None, {"save_steps": 1}, marks=pytest.mark.slow
        ),
        pytest.param("opd", {**LOCAL, "prompt": HINTED}, None, {"rollouts": "frozen", **CACHED},
                     marks=pytest.mark.slow),
        pytest.param("kd", {**LOCAL, "prompt": HINTED}, None, CACHED, marks=pytest.mark.slow),
        pytest.param("opd", None, {"maths": LOCAL, "code": {"self": "start", "prompt": HINTED}}, {"lmbda": 0.5},
                     marks=pytest.mark.slow),
        pytest.param("kd", None, {"maths": LOCAL, "code": LOCAL}, {}, marks=pytest.mark.slow),
        pytest.param("opd", {"name_or_path": "other", "own_tokenizer": True}, None, {}, marks=pytest.mark.slow),
        pytest.param("opd", {"name_or_path": "other", "own_tokenizer": True, "prompt": HINTED}, None,
                     {"loss_type": "policy_gradient"}, marks=pytest.mark.slow),
        pytest.param("kd", {"name_or_path": "other", "own_tokenizer": True}, None, {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: "" if value is None else json.dumps(value)[:40],
)  # fmt: skip
def test_teachers_of_a_recipe_train_and_are_resumed(method, teacher, teachers, train, home):
    """Through the command, with the recipe that a run leaves read back; and --check says nothing against them."""
    path = recipe(method, teacher, teachers, save_strategy="steps", **{"save_steps": 1} | train)
    assert run.main([path, "--check"]) in (0, 1)
    assert run.main([path]) == 0
    losses = [log["loss"] for log in history("out") if "loss" in log]
    assert len(losses) == 2
    again = load_recipe("out/recipe.yaml")
    assert [*again.teacher_sections()] == [*load_recipe(path).teacher_sections()]
    words = [path, "train.output_dir=resumed", "train.resume_from_checkpoint=out/checkpoint-1"]
    assert run.main(words) == 0
    assert [log["loss"] for log in history("resumed") if "loss" in log] == losses


def history(folder):
    return json.loads(Path(folder, "trainer_state.json").read_text())["log_history"]


@pytest.mark.slow
def test_a_served_teacher_of_a_recipe(home):
    """Trained and cached; --check and --preprocess-only need no answer about rows."""
    with Serving(tiny_model("qwen3", 1)) as server:
        served = {"url": server.url, "name_or_path": "teacher"}
        assert run.main([recipe("kd", served, **CACHED), "--check"]) in (0, 1)
        assert run.main([recipe("kd", served, **CACHED)]) == 0
        path = recipe("opd", served, **TOP_K, output_dir="other_out")
        assert run.main([path, "--check", "--probe"]) in (0, 1)
        assert run.main([path]) == 0
        assert run.main([path, "--preprocess-only"]) == 0
    assert run.main([recipe("kd", served, **CACHED), "--preprocess-only"]) == 0


def test_check_says_what_a_teacher_is_and_what_it_reads(home, capsys):
    path = recipe("opd", {"self": "start", "prompt": HINTED})
    assert run.main([path, "--check"]) in (0, 1)
    page = " ".join(capsys.readouterr().out.split())
    assert "teacher: the student as training starts, reads" in page
    assert "the teacher reads: " in page


def test_check_says_that_a_server_is_not_there(home, capsys):
    """Or does not go with the recipe: then the run would end at once."""
    served = {"url": "http://127.0.0.1:9", "name_or_path": "teacher"}
    assert run.main([recipe("kd", served, **TOP_K), "--check"]) == 1
    page = " ".join(capsys.readouterr().out.split())
    assert "teacher.url: no server answers at http://127.0.0.1:9" in page
    assert page.endswith("It cannot run now. See the warnings about its servers.")
    with Serving(tiny_model("qwen3", 1)) as server:
        path = recipe("kd", {**served, "url": server.url}, **TOP_K, temperature=0.7)
        assert run.main([path, "--check"]) == 1
        assert "temperature=0.7: a server returns log-probabilities at temperature 1" in capsys.readouterr().out
        assert run.main([path]) == 2


@pytest.mark.parametrize(
    ("method", "teacher", "teachers", "train", "message"),
    [
        ("opd", {"self": "start", "name_or_path": "teacher"}, None, {}, "recipe.yaml:25: teacher.name_or_path cannot"),
        ("opd", {"self": "begin"}, None, {}, "teacher.self must be start, ema or null"),
        ("opd", {"self": "start", "url": "http://x"}, None, {}, "teacher.self cannot be combined with teacher.url"),
        ("opd", {"self": "start", "ema": 0.5}, None, {}, "teacher.ema is only valid with teacher.self: ema"),
        ("opd", {"self": "ema", "ema": 1.5}, None, {}, "teacher.ema=1.5 must be in [0, 1)"),
        ("opd", {"self": "start", "own_tokenizer": True}, None, {}, "cannot be combined with teacher.self"),
        ("opd", {}, {"a": {}}, {}, "teachers.a.name_or_path must not be empty"),
        ("opd", LOCAL, {"a": LOCAL}, {}, "teacher cannot be combined with teachers"),
        ("sft", None, {"a": LOCAL}, {}, "teachers is only valid with method kd or opd, not sft"),
        ("opd", {**LOCAL, "prompt": "{{ prompt"}, None, {}, "teacher.prompt: the Jinja template is not valid"),
        ("opd", {**LOCAL, "prompt": "Think."}, None, {}, "teacher.prompt: 'Think.' uses no column, so all prompts"),
        ("opd", {"self": "start", "prompt": " {{ prompt }}"}, None, {}, "would see the same prompt, so there is no"),
        ("opd", None, {"": LOCAL}, {}, "names in teachers must be non-empty strings, not ''"),
        ("opd", {**LOCAL, "prompt": "{{ solution }}"}, None, {}, "prompt: 'solution' is undefined; the row has prompt"),
        ("opd", {**LOCAL, "prompt": "{{ prompt.__class__ }}"}, None, {}, "row 0 (line 1): teacher prompt:"),
        ("opd", {**LOCAL, "prompt": "{{ prompt / 0 }}"}, None, {}, "row 0 (line 1): teacher prompt:"),
        ("opd", LOCAL, None, {"teacher": {"prompt": "x"}}, "train.teacher.prompt is not supported in a"),
        ("opd", {**LOCAL, "url": "http://127.0.0.1:9"}, None, {}, "a server returns only the most likely tokens. Set"),
        ("opd", {**LOCAL, "url": "http://127.0.0.1:9"}, None, TOP_K, "teacher.url: no server answers"),
        ("opd", {**LOCAL, "url": "localhost:9"}, None, TOP_K, "must be a URL such as http"),
        ("opd", {**LOCAL, "url": "http://x", "quantization": "4bit"}, None, {}, "teacher.url, whose server has loaded"),
        ("opd", None, {"maths": LOCAL}, {}, "column 'teacher': unknown teacher 'code'; valid"),
        ("opd", {"name_or_path": "other"}, None, {}, "student and teacher have different vocabularies"),
        ("opd", {"name_or_path": "other", "own_tokenizer": True}, None, TOP_K, "with the student's by text spans"),
        ("kd", {"name_or_path": "other", "own_tokenizer": True}, None, {"temperature": 2.0}, "temperature=2 cannot be"),
        ("opd", {**LOCAL, "prompt": HINTED}, None, {"rollouts": "replay"}, "the replay buffer keeps no rows"),
        ("kd", {**LOCAL, "prompt": HINTED}, None, {"completion_only_loss": False}, "another text before the answer"),
        ("opd", LOCAL, None, {"sampler": {"prefetch": True}}, "not an option of kind policy, the default. Set s"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(method, teacher, teachers, train, message, home, capsys):
    assert run.main([recipe(method, teacher, teachers, **train)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
