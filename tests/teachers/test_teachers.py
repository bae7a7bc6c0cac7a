"""Teachers of other kinds than a model alongside: served, several, with prompts of their own, the student's past."""

import copy
import logging
import math

import datasets
import peft
import pytest
import torch
from models_for_tests import tiny_model
from plain_for_tests import token_logps
from tokenizers_for_tests import byte_tokenizer, llama2_tokenizer
from training_for_tests import (
    LORA,
    assert_same_step,
    fake_generate,
    fix_rollouts,
    logged,
    one_step,
    token_rows,
    trainer_for,
)
from transformers import AutoModelForCausalLM
from vllm_for_tests import Serving

from hf_posttrain.errors import InputError
from hf_posttrain.generation.completions_client import ServerError
from hf_posttrain.methods import METHODS, config_class, trainer_class
from hf_posttrain.models.config import TeacherSection
from hf_posttrain.models.moving_average import MovingAverage
from hf_posttrain.teachers.local import LocalTeacher
from hf_posttrain.trainer import stateful

V = 300


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(server, TeacherSection) of a teacher, with its tokenizer in a folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    tiny_model(seed=9).config.save_pretrained(folder)
    with Serving(tiny_model(seed=9)) as server:
        yield server, TeacherSection(url=server.url, name_or_path=str(folder))


# ---- served


@pytest.mark.parametrize("config", [
    {"loss_type": "policy_gradient"}, {"teacher": {"top_k": V}}, {"teacher": {"top_k": 8}},
    {"teacher": {"top_k": 8, "top_k_remainder": "residual"}},
    {"teacher": {"top_k": 8, "top_k_remainder": "generalized"}}, {"teacher": {"top_k": V}, "temperature": 0.7},
], ids=lambda config: "-".join(map(str, config.values())))  # fmt: skip
def test_opd_of_a_served_teacher_is_that_of_a_local_one(config, served, tmp_path, monkeypatch):
    """Loss and gradients; with all of the vocabulary they are those of the dense loss too."""
    fix_rollouts(monkeypatch)
    rows = token_rows("opd", 6)
    ways = {"server": served[1], "local": tiny_model(seed=9)}
    steps = {name: one_step("opd", tiny_model(), rows, tmp_path / name, second=second, num_generations=2, **config)
             for name, second in ways.items()}  # fmt: skip
    assert_same_step(steps["server"], steps["local"])
    if config.get("teacher") == {"top_k": V}:
        config = {name: value for name, value in config.items() if name != "teacher"}
        dense = one_step("opd", tiny_model(), rows, tmp_path / "dense", second=tiny_model(seed=9), num_generations=2,
                         **config)  # fmt: skip
        assert_same_step(steps["server"], dense, relative=1e-4)


@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize("k", [V, 5])
def test_kd_of_a_served_teacher_is_that_of_a_local_one(k, precompute, served, tmp_path):
    rows, options = token_rows("kd", 6), {"teacher": {"top_k": k, "precompute": precompute}}
    ways = {"server": served[1], "local": tiny_model(seed=9)}
    steps = {name: one_step("kd", tiny_model(), rows, tmp_path / name, second=second, **options)
             for name, second in ways.items()}  # fmt: skip
    assert_same_step(steps["server"], steps["local"])


def test_scores_by_a_server_come_from_the_cache_the_second_time(served, tmp_path):
    server, section = served
    rows = token_rows("kd", 5, seed=3)
    asked = lambda: sum(path == "/v1/completions" for path, _ in server.log)  # noqa: E731
    trainer_for("kd", tiny_model(), rows, tmp_path, second=section, teacher={"top_k": 4, "precompute": True})
    before = asked()
    trainer_for("kd", tiny_model(), rows, tmp_path, second=section, teacher={"top_k": 4, "precompute": True})
    assert asked() - before == 3  # does it give 4 of each token, has it these tokens, and which model is it?


def test_several_ends_are_one_outcome_to_a_served_teacher_as_well(tmp_path, monkeypatch, tmp_path_factory):
    """Student and teacher end with other tokens, and the teacher's folder says so."""
    fix_rollouts(monkeypatch)
    teacher, rows = tiny_model(seed=9), token_rows("opd", 6)
    teacher.generation_config.eos_token_id = [258, 256]
    folder = tmp_path_factory.mktemp("ends")
    byte_tokenizer().save_pretrained(folder)
    teacher.config.save_pretrained(folder)
    teacher.generation_config.save_pretrained(folder)
    for config in ({"loss_type": "policy_gradient"}, {"teacher": {"top_k": V}}, {"teacher": {"top_k": V - 1}}):
        with Serving(teacher) as server:
            second = TeacherSection(url=server.url, name_or_path=str(folder))
            found = one_step("opd", tiny_model(), rows, tmp_path, second=second, **config)
        local = one_step("opd", tiny_model(), rows, tmp_path, second=teacher, **config)
        if config.get("teacher") == {"top_k": V - 1}:  # both ends were among them, so that one fewer is known
            torch.testing.assert_close(found[0], local[0], rtol=1e-3, atol=0)
        else:
            assert_same_step(found, local)


@pytest.mark.parametrize(
    ("method", "config", "message"),
    [
        ("opd", {}, "a server returns only the most likely tokens. Set teacher: .top_k: 20"),
        ("kd", {}, "a server returns only the most likely tokens"),
        ("opd", {"teacher": {"top_k": 5}, "temperature": 0.7}, "at temperature 1, and top tokens are not sufficient"),
    ],
)
def test_what_a_server_cannot_give_is_refused(method, config, message, served, tmp_path):
    with pytest.raises(InputError, match=message):
        trainer_for(method, tiny_model(), token_rows(method), tmp_path, second=served[1], **config).train()


# ---- prompts of their own


def privileged(method, count=6):
    """Token rows whose teacher reads another prompt."""
    rows = token_rows(method, count).to_list()
    return datasets.Dataset.from_list([row | {"teacher_prompt_ids": [7, n + 1, 9, *row["prompt_ids"], 11]}
                                       for n, row in enumerate(rows)])  # fmt: skip


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_a_teacher_reads_its_own_prompt(layout, tmp_path, monkeypatch):
    """The reverse KL of each rollout token, by each model's own forward behind its own prompt."""
    fix_rollouts(monkeypatch)
    rows, teacher = privileged("opd"), tiny_model(seed=9)
    loss, _ = one_step("opd", tiny_model(), rows, tmp_path, second=teacher, num_generations=2, layout=layout,
                       teacher={"prompt": "{{ prompt }}"}, per_device_train_batch_size=6)  # fmt: skip
    total, count, student = 0.0, 0, tiny_model()
    prompts = [row["prompt_ids"] for row in rows for _ in range(2)]
    answers = fake_generate(None, prompts, 6, [258])
    for row, answer in zip([row for row in rows for _ in range(2)], answers, strict=True):
        q = token_logps(student, row["prompt_ids"], answer)
        p = token_logps(teacher, row["teacher_prompt_ids"], answer)
        total, count = total + (q.exp() * (q - p)).sum().item(), count + len(answer)
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_kd_reads_the_teachers_own_prompt(tmp_path):
    rows, teacher, student = privileged("kd"), tiny_model(seed=9), tiny_model()
    loss, _ = one_step("kd", student, rows, tmp_path, second=teacher, teacher={"prompt": "{{ prompt }}"}, kd_coef=1.0,
                       per_device_train_batch_size=6)  # fmt: skip
    total, count = 0.0, 0
    for row in rows:
        q = token_logps(student, row["prompt_ids"], row["completion_ids"])
        p = token_logps(teacher, row["teacher_prompt_ids"], row["completion_ids"])
        kl = (p.exp() * (p - q)).sum(-1)
        total += (kl * torch.tensor(row["completion_mask"])).sum().item()
        count += sum(row["completion_mask"])
    assert loss == pytest.approx(total / count, rel=1e-5)
    cached, _ = one_step("kd", student, rows, tmp_path, second=teacher, kd_coef=1.0,
                         teacher={"prompt": "{{ prompt }}", "top_k": V, "precompute": True},
                         per_device_train_batch_size=6)  # fmt: skip
    assert cached == pytest.approx(loss, rel=1e-5)


def test_a_template_makes_the_teachers_prompt_of_the_rows_columns(tmp_path):
    """Of text and of messages, in which the last user's turn gives way; a column that is missing is named."""
    tokenizer, template = byte_tokenizer(), "{{ prompt }} (answer: {{ completion }}; {{ hint }})"
    plain = [{"prompt": "1+1=", "completion": "2", "hint": "even"}]
    chat = [{"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}],
             "completion": [{"role": "assistant", "content": "2"}], "hint": "even"}]  # fmt: skip
    for rows, expected in ((plain, "1+1= (answer: {a}; even)"), (chat, (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1= (answer: {a}; even)<|im_end|>\n"
        "<|im_start|>assistant\n"))):  # fmt: skip
        trainer = trainer_for("opd", tiny_model(), rows, tmp_path, second=tiny_model(seed=9), tokenizer=tokenizer,
                              teacher={"prompt": template}, max_length=200)  # fmt: skip
        [row] = trainer.train_dataset
        answer = "2" if rows is plain else str(chat[0]["completion"])
        assert tokenizer.decode(row["teacher_prompt_ids"]) == expected.replace("{a}", answer)
        assert "answer:" not in tokenizer.decode(row["prompt_ids"])
    with pytest.raises(InputError, match=r"row 0: teacher prompt: 'solution' is undefined; the row has prompt"):
        trainer_for("opd", tiny_model(), plain, tmp_path, second=tiny_model(), teacher={"prompt": "{{ solution }}"})


# ---- several


def test_several_teachers_are_one_callback_which_frees_their_memory(tmp_path, monkeypatch, caplog):
    """transformers warns of two callbacks of one class."""
    names, released = ["a", "b"], []
    rows = token_rows("kd", 4).add_column("teacher", names * 2)
    teachers = {"a": tiny_model(seed=3), "b": tiny_model(seed=9)}
    monkeypatch.setattr(LocalTeacher, "release", lambda teacher: released.append(teacher.name))
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").propagate = True
        trainer = trainer_for("kd", tiny_model(), rows, tmp_path, second=teachers, teacher={"names": names})
    assert not [message for message in caplog.messages if "callback" in message]
    assert trainer.teacher in trainer.callback_handler.callbacks
    trainer.train()
    assert released == names


@pytest.mark.parametrize("method", ["opd", "kd"])
def test_each_row_has_the_teacher_that_it_names(method, served, tmp_path, monkeypatch):
    """The loss is the mean over tokens of what each part has alone; a server among them."""
    fix_rollouts(monkeypatch)
    names = ["a", "b", "a", "a", "b", "a"]
    rows = token_rows(method, 6).add_column("teacher", names)
    teachers = {"a": tiny_model(seed=3), "b": tiny_model(seed=9)}
    config = {"per_device_train_batch_size": 6} | ({"kd_coef": 1.0} if method == "kd" else {})
    named = {"teacher": {"names": ["a", "b"]}}
    together, _ = one_step(method, tiny_model(), rows, tmp_path, second=teachers, **config, **named)
    whole = trainer_for(method, tiny_model(), rows, tmp_path, second=teachers, **config, **named)
    whole.train()
    key = {"opd": "distill/reverse_kl", "kd": "distill/divergence"}[method]
    total, count = 0.0, 0
    for name, teacher in teachers.items():
        chosen = rows.select([n for n, each in enumerate(names) if each == name]).remove_columns("teacher")
        trainer = trainer_for(method, tiny_model(), chosen, tmp_path, second=teacher, **config)
        trainer.train()
        log, own = whole.state.log_history[0], trainer.state.log_history[0]
        assert log[f"{key}_{name}"] == pytest.approx(own[key], rel=1e-5)
        column = "completion_mask" if method == "kd" else None
        answers = fake_generate(None, chosen["prompt_ids"], 6, [258])
        tokens = sum(sum(row[column]) for row in chosen) if column else sum(map(len, answers))
        total, count = total + trainer.state.log_history[0]["loss"] * tokens, count + tokens
    assert together == pytest.approx(total / count, rel=1e-5)
    both = teachers | {"b": served[1]}
    options = config | {"teacher": named["teacher"] | {"top_k": V}}
    mixed, _ = one_step(method, tiny_model(), rows, tmp_path, second=both, **options)
    assert mixed == pytest.approx(together, rel=1e-4)


def test_a_row_of_an_unknown_teacher_is_named(tmp_path):
    rows = token_rows("opd", 3).add_column("teacher", ["a", "b", "math"])
    with pytest.raises(InputError, match=r"row 2: column 'teacher': unknown teacher 'math'; valid: a, b"):
        trainer_for("opd", tiny_model(), rows, tmp_path, second={"a": tiny_model(seed=3), "b": tiny_model(seed=9)},
                    teacher={"names": ["a", "b"]})  # fmt: skip


# ---- the student's own past


@pytest.mark.parametrize("adapter", [None, "new", "continued"])
def test_the_student_as_it_began_is_a_teacher_that_does_not_move(adapter, tmp_path):
    """Its first step teaches nothing behind the same prompt, and later ones the way back: as a copy would."""
    config = {"max_steps": 3, "learning_rate": 3e-3, "num_generations": 2, "loss_type": "forward_kl"}
    student, peft_config = tiny_model(), None
    if adapter == "continued":
        torch.manual_seed(0)
        student = peft.get_peft_model(student, peft.LoraConfig(**LORA))
        with torch.no_grad():
            for name, weight in student.named_parameters():
                weight.add_(0.02 * torch.randn_like(weight)) if "lora_B" in name else None
    elif adapter == "new":
        peft_config = peft.LoraConfig(**LORA)
    whole = copy.deepcopy(student)
    if adapter == "continued":
        whole = whole.merge_and_unload()
    rows = privileged("opd", 12)
    found = []
    for second in (TeacherSection(self="start"), whole):
        trainer = trainer_for("opd", copy.deepcopy(student), rows, tmp_path, second=second, peft_config=peft_config,
                              teacher={"prompt": "{{ prompt }}"}, **config)  # fmt: skip
        trainer.train()
        found.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        if second is not whole:
            assert len(trainer.second_models) == (0 if adapter else 1)
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert len(set(found[0])) == 3
    with pytest.raises(InputError, match=r"so there is no training signal\. Set prompt"):
        trainer_for("opd", copy.deepcopy(student), token_rows("opd"), tmp_path, peft_config=peft_config,
                    second=TeacherSection(self="start"))  # fmt: skip


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_moving_average_follows_and_is_resumed(lora, tmp_path):
    """w <- 0.5 w + 0.5 policy after each step; a run that is cut in two goes on with it."""
    peft_config = peft.LoraConfig(**LORA) if lora else None
    config = {"max_steps": 4, "learning_rate": 3e-3, "save_strategy": "steps", "save_steps": 2,
              "teacher": {"prompt": "{{ prompt }}"}, "peft_config": peft_config}  # fmt: skip
    section, rows = TeacherSection(self="ema", ema=0.5), privileged("opd", 16)
    whole = trainer_for("opd", tiny_model(), rows, tmp_path / "whole", second=section, **config)
    average = whole.stateful["teacher_average"]
    assert isinstance(average, MovingAverage)
    name, (mine, policy) = next((n, pair) for n, pair in average.pairs().items() if "lora_A" in n or not lora)
    expected, seen = mine.clone(), []
    step = average.on_step_end

    def watched(*args, **kwargs):
        step(*args, **kwargs)
        seen.append(average.pairs()[name][1].detach().clone())

    average.on_step_end = watched
    whole.train()
    for now in seen:
        expected = 0.5 * expected + 0.5 * now
    torch.testing.assert_close(average.pairs()[name][0].detach(), expected.detach())
    assert not torch.equal(average.pairs()[name][0], average.pairs()[name][1])
    resumed = trainer_for("opd", tiny_model(), rows, tmp_path / "resumed", second=section, **config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert logged(resumed)[-2:] == logged(whole)[-2:]
    saved = tmp_path / "whole" / "checkpoint-4"
    assert stateful.read(saved)["teacher_average"].keys() == average.pairs().keys()
    if not lora:  # what is saved is the policy
        own = AutoModelForCausalLM.from_pretrained(saved).state_dict()
        torch.testing.assert_close(own[name], policy.detach())


def test_an_average_of_low_precision_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"an average of torch\.bfloat16 weights does not move"):
        trainer_for("opd", tiny_model().to(torch.bfloat16), privileged("opd"), tmp_path,
                    second=TeacherSection(self="ema"), teacher={"prompt": "x"})  # fmt: skip
    assert math.isclose(TeacherSection().ema, 0.99)


# ---- what a section says and a Config does not


@pytest.mark.parametrize(
    ("section", "config", "message"),
    [
        ({"self": "start", "prompt": "{{ prompt }}!"}, {}, "would see the same prompt, so there is no training signal"),
        ({"name_or_path": "x", "prompt": "{{ prompt }}!"}, {}, "before the teacher is known. Set prompt in the option"),
        ({"name_or_path": "x", "own_tokenizer": True}, {}, "Set tokenizer in the option teacher of the Config too"),
        ({"self": "start", "prompt": "A {{ prompt }}"}, {"teacher": {"prompt": "B {{ prompt }}"}},
         "teacher_model: prompt is 'A {{ prompt }}', and teacher.prompt of the Config is 'B {{ prompt }}'"),
        ({"self": "emaa"}, {}, "teacher_model.self='emaa' is not one of start, ema"),
        ({"self": "ema", "ema": 7.0}, {"teacher": {"prompt": "x"}}, "teacher_model.ema=7 must be in"),
        ({"self": "start", "name_or_path": "x"}, {"teacher": {"prompt": "x"}}, "teacher_model.self, with which"),
        ({"self": "ema"}, {"teacher": {"prompt": "x", "top_k": 4, "precompute": True}, "rollouts": "frozen"},
         "teacher.precompute cannot be combined with teacher.self: ema"),
    ],
)  # fmt: skip
def test_a_section_that_would_be_ignored_is_refused(section, config, message, tmp_path):
    with pytest.raises(InputError, match=message):
        trainer_for("opd", tiny_model(), privileged("opd"), tmp_path, second=TeacherSection(**section), **config)


def test_offload_is_of_models_in_memory_by_their_names(tmp_path, served):
    def built(second, offload, **config):
        options = config_class(METHODS["kd"])(output_dir=str(tmp_path), use_cpu=True, report_to="none", **config)
        rows = [row | ({"teacher": "a"} if isinstance(second, dict) else {}) for row in token_rows("kd")]
        arguments = {"args": options, "train_dataset": rows, "processing_class": byte_tokenizer()}
        return trainer_class(METHODS["kd"])(tiny_model(), **arguments, teacher_model=second, teacher_offload=offload)

    assert built(TeacherSection(self="start"), True).teacher.offload
    assert not built(TeacherSection(self="start"), False).teacher.offload
    with pytest.raises(InputError, match=r"teacher_offload has the name 'A', and teacher_model has a, b. Use the same"):
        built({"a": tiny_model(seed=8), "b": tiny_model(seed=9)}, {"A": True}, teacher={"names": ["a", "b"]})
    with pytest.raises(InputError, match="teacher_offload is only valid with a teacher in memory"):
        built(served[1], True, teacher={"top_k": 4})


def test_merged_ends_follow_a_temperature_that_is_changed(tmp_path, monkeypatch):
    """As the loss of one end does: a trainer whose temperature is set later computes what one built with it does."""
    fix_rollouts(monkeypatch)

    def built(temperature):
        second = tiny_model(seed=9)
        second.generation_config.eos_token_id = [258, 257]
        return trainer_for("opd", tiny_model(), token_rows("opd"), tmp_path, second=second, temperature=temperature)

    changed, expected = built(1.0), built(2.0)
    rows = next(iter(expected.get_train_dataloader()))
    [batch] = expected.rollouts.window([rows.replace(row_weights=None)], 0)
    changed.args.temperature = 2.0
    found = changed.losses(changed.model, batch).values
    torch.testing.assert_close(found, expected.losses(expected.model, batch).values)


def test_a_template_that_writes_nothing_or_needs_what_a_row_lacks_is_told(tmp_path):
    rows = [{"prompt": "1+1=", "hint": "even"}, {"prompt": "1+2=", "hint": None}]
    for template, message in (
        ("{{ hint }}", r"row 1: teacher prompt: 'hint' is undefined"),
        ("{% if false %}x{% endif %}", "row 0: teacher prompt: the template renders to an empty text"),
    ):
        with pytest.raises(InputError, match=message):
            trainer_for("opd", tiny_model(), rows, tmp_path, second=tiny_model(seed=9), teacher={"prompt": template})


def test_a_served_teacher_with_more_ids_is_as_a_local_one(tmp_path, tmp_path_factory, monkeypatch):
    """Where all are known, probabilities add up over those that the student has."""
    fix_rollouts(monkeypatch)
    folder, teacher = tmp_path_factory.mktemp("larger"), tiny_model(seed=9, vocab_size=320)
    byte_tokenizer().save_pretrained(folder)
    teacher.config.save_pretrained(folder)
    rows = token_rows("opd", 6)
    with Serving(teacher) as server:
        section = TeacherSection(url=server.url, name_or_path=str(folder))
        found = one_step("opd", tiny_model(), rows, tmp_path, second=section, teacher={"top_k": 320})
    local = one_step("opd", tiny_model(), rows, tmp_path, second=teacher)
    assert found[0] == pytest.approx(local[0], rel=1e-4)


def test_a_server_of_another_tokenizer_is_refused(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    section = TeacherSection(name_or_path=str(tmp_path / "tokenizer"))
    for tokenizer in (byte_tokenizer(), llama2_tokenizer()):
        with Serving(tiny_model(seed=9), tokenizer=tokenizer) as server:
            section.url = f"{server.url}/v1"  # as some clients want it
            given = {"second": section, "teacher": {"top_k": 4}}
            if tokenizer.vocab_size == byte_tokenizer().vocab_size:
                trainer_for("opd", tiny_model(), token_rows("opd"), tmp_path, **given)
                continue
            with pytest.raises(InputError, match=r"teacher\.url: .* reads '1 \+ 23 .* Set name_or_path to the model"):
                trainer_for("opd", tiny_model(), token_rows("opd"), tmp_path, **given)


def test_rows_that_are_too_long_for_a_server_are_refused_before_training(served, tmp_path):
    with Serving(tiny_model(seed=9), max_model_len=12) as server:
        section = TeacherSection(url=server.url, name_or_path=served[1].name_or_path)
        with pytest.raises(InputError, match=r"rows have up to 1\d tokens, and .* --max-model-len of 12\. Start"):
            trainer_for("kd", tiny_model(), token_rows("kd"), tmp_path, second=section, teacher={"top_k": 4})


def test_a_prompt_of_the_teachers_own_that_is_too_long_is_told(served, tmp_path):
    """How long those are shows only when they are asked for."""
    with Serving(tiny_model(seed=9), max_model_len=40) as server:
        section = TeacherSection(url=server.url, name_or_path=served[1].name_or_path)
        rows = [{"prompt": "a question", "completion": "yes"}] * 4
        trainer = trainer_for("kd", tiny_model(), rows, tmp_path, second=section,
                              teacher={"top_k": 4, "prompt": "{{ prompt }}, and a solution that is long"})  # fmt: skip
        with pytest.raises(ServerError, match=r"3\d tokens of prompt and 4 of answer are too long for http"):
            trainer.train()


def test_an_answer_of_another_form_is_one_line(served, tmp_path, monkeypatch):
    server, section = served
    monkeypatch.setattr(
        server,
        "scores",
        lambda prompt, **how: {
            "token_ids": [0],
            "prompt_token_ids": prompt,
            "prompt_logprobs": [None, *[{"x": {}}] * 99],
        },
    )
    with pytest.raises(InputError, match=r"returns no prompt_logprobs|the response of a server is not that of vLLM"):
        trainer_for("opd", tiny_model(), token_rows("opd"), tmp_path, second=section, teacher={"top_k": 4})


# ---- a teacher of the user's own


@pytest.mark.parametrize("method", ["kd", "opd"])
def test_a_function_of_the_trainer_gives_a_teacher(method, tmp_path, monkeypatch):
    """Alone, and as one of several."""
    fix_rollouts(monkeypatch)
    rows = token_rows(method, 6)
    build = lambda trainer: LocalTeacher(tiny_model(seed=9), trainer.accelerator, False)  # noqa: E731
    expected = one_step(method, tiny_model(), rows, tmp_path, second=tiny_model(seed=9))
    assert_same_step(one_step(method, tiny_model(), rows, tmp_path, second=build), expected)
    rows = rows.add_column("teacher", ["a", "a", "a", "a", "b", "a"])
    named = {"teacher": {"names": ["a", "b"]}, "per_device_train_batch_size": 2}
    several = {"a": build, "b": tiny_model(seed=9)}
    models = {"a": tiny_model(seed=9), "b": tiny_model(seed=9)}
    expected = one_step(method, tiny_model(), rows, tmp_path, second=models, **named)
    assert_same_step(one_step(method, tiny_model(), rows, tmp_path, second=several, **named), expected)


def test_only_one_of_several_teachers_follows_the_student(tmp_path):
    rows = token_rows("opd", 4).add_column("teacher", ["a", "b", "a", "b"])
    second = {"a": TeacherSection(self="ema"), "b": TeacherSection(self="ema")}
    options = {"names": ["a", "b"], "prompt": {"a": "{{ prompt }}!", "b": "{{ prompt }}?"}}
    rows = rows.add_column("teacher_prompt_ids", [[1, 2]] * 4)
    with pytest.raises(InputError, match="only one of several teachers can have self: ema"):
        trainer_for("opd", tiny_model(), rows, tmp_path, second=second, teacher=options)
