"""KD and OPD: teachers, vocabularies, caches, rollouts, and that the student really comes closer to the teacher."""

import copy
import gc
import logging
import weakref

import datasets
import pyarrow as pa
import pytest
import torch
from models_for_tests import tiny_model
from recorded_for_tests import as_completion, recorded
from safetensors.torch import load
from tokenizers_for_tests import base_tokenizer, byte_tokenizer
from training_for_tests import Gradients, assert_same_step, fix_rollouts, one_step, token_rows, trainer_for
from transformers import AutoModelForCausalLM, GenerationConfig

import hf_posttrain
from hf_posttrain.errors import InputError
from hf_posttrain.generation import rollout
from hf_posttrain.losses.divergence import DIVERGENCES

OBJECTIVES = ["policy_gradient", *DIVERGENCES]


def over_outcomes(model, ids, ends):
    """ln of the probabilities of all ids but the ends, and of any of them, last: [tokens, V - ends + 1]."""
    logps = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    others = [v for v in range(logps.shape[-1]) if v not in ends]
    return torch.cat([logps[:, others], logps[:, ends].logsumexp(-1, keepdim=True)], -1)


@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_where_student_and_teacher_end_otherwise_their_ends_are_one_outcome(loss_type, tmp_path, monkeypatch):
    """A step of the trainer against the definition, rollout by rollout."""
    fix_rollouts(monkeypatch)
    student, teacher, rows, ends = tiny_model(), tiny_model(seed=9), token_rows("opd", 4), [258, 256]
    teacher.generation_config.eos_token_id = 256
    config = {"second": teacher, "loss_type": loss_type}
    found = one_step("opd", student, rows, tmp_path, **config)
    trainer = trainer_for("opd", copy.deepcopy(student), rows, tmp_path, **config)
    assert trainer.eos.ids.tolist() == ends
    sampled = trainer.sampler.sample([row["prompt_ids"] for row in rows], 1, trainer.args.max_completion_length, (0,))
    answers = [completion.ids for [completion] in sampled]
    assert all(ids[-1] in ends for ids in answers)
    values = []
    for row, ids in zip(rows, answers, strict=True):
        at, whole = slice(len(row["prompt_ids"]) - 1, -1), [*row["prompt_ids"], *ids]
        q, p = (over_outcomes(model, whole, ends)[at] for model in (student, teacher))
        if loss_type == "policy_gradient":
            own = torch.tensor([q.shape[-1] - 1 if i in ends else i for i in ids])[:, None]
            assert max(i for i in ids if i not in ends) < 256  # the columns before the ends are as they were
            q, p = q.gather(-1, own), p.gather(-1, own)
            values.append(-(p - q).detach() * q)
        else:
            alpha = {"alpha": 0.1} if loss_type.startswith("skew") else {}
            values.append(DIVERGENCES[loss_type](q, p.detach(), **alpha))
    loss = torch.cat([value.flatten() for value in values]).mean()
    loss.backward()
    expected = {name: weight.grad for name, weight in student.named_parameters()}
    assert_same_step(found, (loss.item(), expected), relative=1e-4)


def test_a_student_that_was_saved_has_the_same_stop_outcome(tmp_path):
    """Its generation config then names the ends of both models; it may still write none but its own."""
    student, teacher, rows = tiny_model(), tiny_model(seed=9), token_rows("opd", 4)
    teacher.generation_config.eos_token_id = [258, 256]
    first = trainer_for("opd", student, rows, tmp_path / "first", second=teacher)
    first.save_model(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.generation_config.eos_token_id == [258, 256]
    second = trainer_for("opd", again, rows, tmp_path / "second", second=teacher)
    assert first.eos.ids.tolist() == second.eos.ids.tolist() == [258, 256]


def test_merged_eos_in_kd_is_of_the_divergence_alone(tmp_path):
    """A step of the trainer against the definition, row by row; the rows end as the student and as the teacher does."""
    student, teacher, ends = tiny_model(), tiny_model(seed=9), [258, 256]
    teacher.generation_config.eos_token_id = 256
    rows = [row | {"completion_ids": [*row["completion_ids"], ends[n % 2]], "completion_mask": None}
            for n, row in enumerate(token_rows("kd", 4))]  # fmt: skip
    rows = datasets.Dataset.from_list([{k: v for k, v in row.items() if v is not None} for row in rows])
    found = one_step("kd", student, rows, tmp_path, second=teacher, teacher={"merge_eos": True}, kd_coef=0.3)
    values = []
    for row in rows:
        at, whole = slice(len(row["prompt_ids"]) - 1, -1), [*row["prompt_ids"], *row["completion_ids"]]
        q, p = (over_outcomes(model, whole, ends)[at] for model in (student, teacher))
        logits = student(torch.tensor([whole])).logits[0, at]
        ce = torch.nn.functional.cross_entropy(logits, torch.tensor(row["completion_ids"]), reduction="none")
        values.append(0.7 * ce + 0.3 * DIVERGENCES["forward_kl"](q, p.detach()))
    loss = torch.cat(values).mean()
    loss.backward()
    expected = {name: weight.grad for name, weight in student.named_parameters()}
    assert_same_step(found, (loss.item(), expected), relative=1e-4)


@pytest.mark.parametrize("loss_type", OBJECTIVES)
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_opd_with_the_students_own_weights_has_no_loss_and_no_gradient(name, loss_type, tmp_path):
    """Also where the model has dropout (GPT-2), which is off while it samples and must be while it is scored."""
    model = tiny_model(name)
    loss, gradients = one_step(
        "opd", model, token_rows("opd"), tmp_path, second=copy.deepcopy(model), loss_type=loss_type, num_generations=2
    )
    assert loss == pytest.approx(0, abs=1e-6)
    assert max(g.abs().max() for g in gradients.values()) < 1e-5


@pytest.mark.slow
def test_policy_gradient_equals_reverse_kl_in_expectation(tmp_path):
    """One-token rollouts, many of them: the sampled gradient tends to the full-vocabulary one."""
    rows = token_rows("opd", 2)
    config = {
        "second": tiny_model(seed=9),
        "max_completion_length": 1,
        "num_generations": 2000,
        "per_device_train_batch_size": 2,
    }
    _, exact = one_step("opd", tiny_model(), rows, tmp_path, loss_type="reverse_kl", **config)
    config["second"] = tiny_model(seed=9)
    _, sampled = one_step("opd", tiny_model(), rows, tmp_path, loss_type="policy_gradient", **config)
    one, two = (torch.cat([g.flatten() for g in gradients.values()]) for gradients in (exact, sampled))
    assert torch.nn.functional.cosine_similarity(one, two, dim=0) > 0.95
    assert two.norm().item() == pytest.approx(one.norm().item(), rel=0.15)


def test_rollouts_reach_beyond_the_top_50(tmp_path):
    """HF's generate would default to top_k=50; and the model's own generation config asks for top_k=5."""
    model = tiny_model()
    model.generation_config.update(do_sample=True, top_k=5, temperature=0.1, repetition_penalty=1.3)
    trainer = trainer_for("opd", model, token_rows("opd"), tmp_path, second=tiny_model(seed=9))
    prompt = [7, 8, 9]
    answers = rollout.generate(trainer.model, [prompt] * 2000, 1, trainer.terminal_ids, 256, temperature=1.0)
    logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    ranks = logits.argsort(descending=True).argsort()
    drawn = ranks[[ids[0] for ids in answers]]
    expected = logits.softmax(-1)[logits.argsort(descending=True)[50:]].sum().item()
    assert expected > 0.05
    assert (drawn >= 50).float().mean().item() == pytest.approx(expected, abs=0.03)
    assert model.generation_config.top_k == 5  # as it was


def test_altering_generation_config_is_said(tmp_path, caplog):
    model = tiny_model()
    model.generation_config.update(do_sample=True, top_k=5, repetition_penalty=1.3)
    with caplog.at_level(logging.WARNING):
        trainer_for("opd", model, token_rows("opd"), tmp_path, second=tiny_model(seed=9))
    assert "rollouts and answers in evaluation ignore the model's generation config" in caplog.text
    assert "repetition_penalty=1.3" in caplog.text


def test_answers_in_evaluation_ignore_it_too_which_is_said(tmp_path, caplog):
    model = tiny_model()
    model.generation_config.update(repetition_penalty=1.3)
    for asked in (False, True):
        trainer_for("sft", model, token_rows("sft"), tmp_path, eval_exact_match=asked)
        assert ("repetition_penalty=1.3" in caplog.text) is asked


def test_the_ends_that_a_teacher_teaches_are_saved(tmp_path):
    """A base student ends at its eos; its teacher's answers end with a turn end too."""
    student, teacher = tiny_model(), tiny_model(seed=9)
    student.generation_config.eos_token_id, teacher.generation_config.eos_token_id = 256, [256, 258]
    trainer = trainer_for(
        "opd", student, token_rows("opd"), tmp_path, second=teacher, tokenizer=base_tokenizer(None)
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    assert trainer.terminal_ids == [256, 258]
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [256, 258]


def test_rollouts_train_their_end_and_nothing_after_it(tmp_path, monkeypatch):
    """Pad is another id here; a rollout ends with the terminal id, which is a target, and no target follows."""
    fix_rollouts(monkeypatch)
    trainer = trainer_for("opd", tiny_model(), token_rows("opd", 3), tmp_path, second=tiny_model(seed=9))
    batch = next(iter(trainer.get_train_dataloader()))
    [made] = trainer.rollouts.window([batch], 0)
    targets = made["shift_labels"].flatten()[made["scored"]]
    for branch in range(3):
        own = targets[made["owner"] == branch].tolist()
        assert own[-1] in trainer.terminal_ids
        assert not set(own[:-1]) & set(trainer.terminal_ids)


def test_generation_stops_at_any_terminal_id():
    assert rollout.truncate_at_terminal([5, 6, 258, 256, 256], [256, 258]) == [5, 6, 258]
    assert rollout.truncate_at_terminal([5, 6, 7], [258]) == [5, 6, 7]


def test_one_generation_call_serves_the_whole_window(tmp_path, monkeypatch):
    calls = []
    real = rollout.generate
    monkeypatch.setattr(
        rollout, "generate", lambda m, prompts, *a, **k: (calls.append(len(prompts)), real(m, prompts, *a, **k))[1]
    )
    trainer = trainer_for(
        "opd", tiny_model(), token_rows("opd", 16), tmp_path, second=tiny_model(seed=9), max_steps=2,
        gradient_accumulation_steps=2, num_generations=3,
    )  # fmt: skip
    trainer.train()
    assert calls == [24, 24]  # 4 rows x 2 micro-batches x 3 rollouts


def test_generation_batch_size_caps_one_call(monkeypatch):
    model, sizes, real = tiny_model(), [], rollout.decode
    rollout.generate(model, [[1]], 8, [258], 256)  # the proof is behind it
    monkeypatch.setattr(rollout, "decode", lambda m, prompts, *a: (sizes.append(len(prompts)), real(m, prompts, *a))[1])
    rollout.generate(model, [[1, 2], [3], [4, 5, 6]], 4, [258], 256, batch_size=2)
    assert sizes == [2, 1]


@pytest.mark.parametrize(
    ("method", "config"),
    [("kd", {"kd_coef": 1.0}), ("opd", {}),
     pytest.param("opd", {"lmbda": 0.0, "loss_type": "forward_kl"}, marks=pytest.mark.slow),
     pytest.param("opd", {"loss_type": "policy_gradient", "num_generations": 8}, marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_student_comes_closer_to_the_teacher_on_held_out_prompts(method, config, tmp_path):
    held_out = token_rows("opd", 12, seed=77)
    measure = trainer_for(
        "opd", tiny_model(), token_rows("opd"), tmp_path, second=tiny_model(seed=9), eval_rows=held_out
    )
    before = measure.evaluate()["eval_distill/reverse_kl"]
    trainer = trainer_for(
        method, tiny_model(), token_rows(method, 32), tmp_path, second=tiny_model(seed=9), max_steps=60,
        learning_rate=3e-3, per_device_train_batch_size=16, **config,
    )  # fmt: skip
    trainer.train()
    after = trainer_for(
        "opd", trainer.model, token_rows("opd"), tmp_path, second=tiny_model(seed=9), eval_rows=held_out
    )
    assert after.evaluate()["eval_distill/reverse_kl"] < 0.8 * before


# ---- teachers


def test_a_cached_teacher_is_gone_while_training(tmp_path):
    rows = token_rows("kd")
    second = tiny_model(seed=9)
    alive = weakref.ref(second)
    trainer = trainer_for("kd", tiny_model(), rows, tmp_path, second=second, teacher={"top_k": 4, "precompute": True})
    del second
    gc.collect()
    assert alive() is None
    trainer.train()
    with pytest.raises(InputError, match="not scored by the teacher"):
        trainer.evaluate(trainer.prepare(token_rows("kd", seed=3), trainer.tokenizer, trainer.args, "other"))


def test_a_cached_teacher_has_one_temperature(tmp_path):
    options = {"teacher": {"top_k": 4, "precompute": True}, "temperature": 2.0}
    trainer = trainer_for("kd", tiny_model(), token_rows("kd"), tmp_path, second=tiny_model(seed=9), **options)
    trainer.args.temperature = 1.0
    with pytest.raises(InputError, match=r"temperature=1 differs from 2, at which the teacher was scored\. Build"):
        trainer.train()


@pytest.mark.parametrize("k", [3, 300])
def test_a_cached_top_k_teacher(k, tmp_path):
    """k = V equals the teacher online; a small k is close to it and needs no teacher."""
    config = {"divergence": "forward_kl", "temperature": 2.0}
    online = one_step("kd", tiny_model(), token_rows("kd"), tmp_path, second=tiny_model(seed=9), **config)
    cached = one_step(
        "kd",
        tiny_model(),
        token_rows("kd"),
        tmp_path,
        second=tiny_model(seed=9),
        teacher={"top_k": k, "precompute": True},
        **config,
    )
    if k == 300:
        assert_same_step(cached, online)
    else:
        assert 0 < online[0] - cached[0] < 0.4 * online[0]  # the tail in one bucket: a lower bound of the divergence


@pytest.mark.parametrize(
    ("options", "form"), [({"top_k": 5}, list), ({"top_k": 259}, as_completion),
                          ({"top_k": 5, "top_k_remainder": "generalized"}, as_completion)],
)  # fmt: skip
def test_recorded_scores_are_the_teacher(options, form, tmp_path):
    """The same step as with the recorded model in memory."""
    student = tiny_model(vocab_size=259)
    teacher = tiny_model(seed=9, vocab_size=259)
    rows = token_rows("kd")
    recorded_rows = []
    for row in rows:
        entries = recorded(teacher, row["prompt_ids"] + row["completion_ids"], len(row["completion_ids"]), 259)
        recorded_rows.append({**row, "scores": form(entries)})
    found = one_step("kd", student, recorded_rows, tmp_path, teacher=options | {"logprobs_column": "scores"})
    expected = one_step("kd", student, rows, tmp_path, second=teacher, teacher=options)
    assert_same_step(found, expected)


@pytest.mark.parametrize("prompt", [None, "Hint: 4. {{ prompt }}"])
@pytest.mark.parametrize("method", ["kd", "opd"])
def test_cached_hidden_states_are_the_teacher(method, prompt, tmp_path):
    """Exactly, at any temperature, from the cache as well, and after training on the same rollouts."""
    if method == "kd":
        config = {"divergence": "jsd", "temperature": 2.0, "max_steps": 2, "learning_rate": 1e-3}
        rows = token_rows("kd")
    else:
        config = {"rollouts": "frozen", "diagnostics": False, "max_steps": 2, "learning_rate": 1e-3}
        rows = token_rows("opd")
    if prompt:
        tokenizer = byte_tokenizer()
        rows = rows.add_column("teacher_prompt_ids", [tokenizer(f"Hint {n}")["input_ids"] for n in range(len(rows))])
        rows = rows.add_column("teacher", [""] * len(rows))
    runs = []
    for precompute in (False, True, True):
        keep = Gradients()
        trainer = trainer_for(
            method,
            tiny_model(),
            rows,
            tmp_path,
            second=tiny_model(seed=9),
            callbacks=[keep],
            teacher={"precompute": precompute, "prompt": prompt},
            **config,
        )
        trainer.train()
        runs.append((trainer.state.log_history[1]["loss"], keep.steps[1]))
        assert (trainer.teacher is None) == (method == "kd" and precompute)
    assert_same_step(runs[1], runs[0])
    assert_same_step(runs[2], runs[0])
    if method == "kd":
        stored = load(trainer.train_dataset[0]["teacher_hidden"])["hidden"]
        assert stored.shape == (sum(rows[0]["completion_mask"]), trainer.model.config.hidden_size)


def test_cached_hidden_states_are_in_the_dtype_of_the_head(tmp_path):
    teacher = tiny_model(seed=9).bfloat16()
    logits = []
    for precompute in (True, False):
        options = {"teacher": {"precompute": precompute}, "per_device_eval_batch_size": 1}
        trainer = trainer_for("kd", tiny_model(), token_rows("kd"), tmp_path, second=teacher, **options)
        row = trainer.train_dataset[0]
        batch = trainer._prepare_inputs(trainer.data_collator([row]))
        logits.append(trainer.signal(batch, trainer.build_objective().request).logits.logits(slice(None)))
        if precompute:
            assert load(row["teacher_hidden"])["hidden"].dtype == torch.bfloat16
    torch.testing.assert_close(*logits, rtol=0, atol=0)


def test_scores_are_written_in_parts(tmp_path, monkeypatch):
    from hf_posttrain.models import score_cache

    rows = token_rows("kd", 13)
    tables = []
    for size in (2**17, 40):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / str(size))
        monkeypatch.setattr(score_cache, "CHUNK_TOKENS", size)
        options = {"teacher": {"precompute": True}, "per_device_eval_batch_size": 2}
        trainer = trainer_for("kd", tiny_model(), rows, tmp_path, second=tiny_model(seed=9), **options)
        tables.append([load(row["teacher_hidden"])["hidden"] for row in trainer.train_dataset])
        [file] = (tmp_path / str(size)).rglob("rows.arrow")
        with pa.ipc.open_stream(file) as reader:
            parts = [batch.num_rows for batch in reader]
        assert (len(parts) == 1) == (size > 40)
        assert sum(parts) == 13
    torch.testing.assert_close(tables[0], tables[1], rtol=1e-5, atol=1e-6)


def test_the_cache_is_bound_to_token_ids_and_tokenizer(tmp_path, monkeypatch):
    from hf_posttrain.models import score_cache

    def cached(rows, seed=9):
        cached = {"teacher": {"top_k": 4, "precompute": True}}
        return trainer_for("kd", tiny_model(), rows, tmp_path, second=tiny_model(seed=seed), **cached)

    rows = token_rows("kd", seed=21)
    cached(rows)
    scored = []
    real = score_cache.score_rows
    monkeypatch.setattr(score_cache, "score_rows", lambda *args: (scored.append(1), real(*args))[1])
    cached(rows)
    assert not scored
    cached(token_rows("kd", seed=22))
    cached(rows, seed=10)
    assert len(scored) == 2
    monkeypatch.setattr(type(byte_tokenizer()), "get_vocab", lambda self: {"other": 258})
    cached(rows)
    assert len(scored) == 3


@pytest.mark.parametrize("method", ["kd", "opd"])
@pytest.mark.parametrize("sizes", [(300, 320), (320, 300)], ids=["teacher padded", "student padded"])
def test_padded_vocabularies_are_sliced(method, sizes, tmp_path, monkeypatch):
    """The same 300 tokens with padding rows in one model: the numbers of the unpadded pair."""
    fix_rollouts(monkeypatch)
    extra = {"kd_coef": 1.0} if method == "kd" else {}

    def padded(model, size):
        model = copy.deepcopy(model)
        model.resize_token_embeddings(size, mean_resizing=False)
        return model

    student, teacher = tiny_model(), tiny_model(seed=9)
    expected = one_step(method, student, token_rows(method), tmp_path, second=copy.deepcopy(teacher), **extra)
    for cached in [{}] + ([{"teacher": {"top_k": 300, "precompute": True}}] if method == "kd" else []):
        models = padded(student, sizes[0]), padded(teacher, sizes[1])
        loss, _ = one_step(method, models[0], token_rows(method), tmp_path, second=models[1], **extra, **cached)
        assert loss == pytest.approx(expected[0], rel=1e-5)


def test_padding_of_the_vocabulary_is_never_sampled_nor_scored(tmp_path):
    """A student with 40 padding rows whose logits are large: rollouts and the sampled objective leave them out."""
    student, teacher = tiny_model(), tiny_model(seed=9)
    student.resize_token_embeddings(340, mean_resizing=False)
    with torch.no_grad():
        student.get_output_embeddings().weight[300:] = 3 * student.get_output_embeddings().weight[:40]
    trainer = trainer_for("opd", student, token_rows("opd"), tmp_path, second=teacher, loss_type="policy_gradient")
    assert trainer.vocabulary == 300
    [answers] = trainer.sampler.sample([[1, 2, 3]], 300, trainer.args.max_completion_length, (0,))
    assert max(max(answer.ids) for answer in answers) < 300
    free = rollout.generate(trainer.model, [[1, 2, 3]] * 300, 6, trainer.terminal_ids, 256, temperature=1.0)
    assert max(max(ids) for ids in free) >= 300
    trainer.train()
    assert abs(trainer.state.log_history[0]["loss"]) < 100


def test_a_different_tokenizer_is_refused_at_equal_size(tmp_path):
    teacher, tokenizer = tiny_model(seed=9), byte_tokenizer()
    teacher.save_pretrained(tmp_path / "teacher")
    state = tokenizer.backend_tokenizer.to_str()
    changed = state.replace('"a":', '"@@":').replace('"b":', '"a":').replace('"@@":', '"b":')
    assert changed != state
    other = type(tokenizer)(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(changed), eos_token="<|im_end|>"
    )
    other.save_pretrained(tmp_path / "teacher")
    assert len(other) == len(tokenizer)
    for method in ("kd", "opd"):
        with pytest.raises(InputError, match="different vocabularies"):
            trainer_for(method, tiny_model(), token_rows(method), tmp_path, second=str(tmp_path / "teacher"))


def test_a_missing_teacher_and_the_student_itself_are_refused(tmp_path):
    model = tiny_model()
    for method in ("kd", "opd"):
        with pytest.raises(InputError, match="teacher_model is missing"):
            trainer_for(method, model, token_rows(method), tmp_path)
        with pytest.raises(InputError, match="the student itself"):
            trainer_for(method, model, token_rows(method), tmp_path, second=model)


@pytest.mark.parametrize(
    ("method", "config", "message"),
    [
        ("opd", {"lmbda": 0.5, "loss_type": "policy_gradient"}, "biased on tokens that another policy sampled"),
        ("opd", {"loss_type": "kl"}, "is not one of"), ("opd", {"discount": 0.5}, "OPDConfig has no discount"),
        ("opd", {"temperature": 0.0}, "must be positive"), ("kd", {"temperature": 1e-40}, "must be positive"),
        ("opd", {"lmbda": 1.5}, r"must be in \[0, 1\]"), ("kd", {"adam_epsilon": 1e-50}, "must be at least 1e-38"),
        ("opd", {"beta": 0.5}, "beta is only valid with"), ("kd", {"divergence": "kl"}, "is not one of"),
        ("kd", {"beta": 0.5}, "beta is only valid with"), ("kd", {"kd_coef": 2.0}, r"must be in \[0, 1\]"),
        ("kd", {"teacher": {"top_k": 0, "precompute": True}}, "at least 1"),
        ("opd", {"max_length": 6}, "leaves no prompt"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(method, config, message, tmp_path):
    with pytest.raises(InputError, match=message):
        trainer_for(method, tiny_model(), token_rows(method), tmp_path, second=tiny_model(seed=9), **config)


def test_evaluation_is_on_policy_whatever_lmbda_says(tmp_path):
    rows = token_rows("opd")
    prompts = rows.remove_columns("completion_ids")
    trainer = trainer_for("opd", tiny_model(), rows, tmp_path, second=tiny_model(seed=9), eval_rows=prompts, lmbda=0.5)
    assert trainer.evaluate()["eval_generation/length"] > 0


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_the_tokens_that_both_models_score_are_those_of_the_rollouts(layout, tmp_path):
    config = {"num_generations": 3, "gradient_accumulation_steps": 2, "layout": layout}
    trainer = trainer_for("opd", tiny_model(), token_rows("opd"), tmp_path, second=tiny_model(seed=9), **config)
    drawn, scored = [], []
    sample, losses = trainer.sampler.sample, trainer.losses

    def watched(model, batch):
        ids = batch.targets.tolist()
        owned = [[t for t, own in zip(ids, batch["owner"].tolist(), strict=True) if own == n] for n in range(12)]
        scored.extend(owned)
        return losses(model, batch)

    def sampled(*args):
        groups = sample(*args)
        drawn.extend(completion.ids for group in groups for completion in group)
        return groups

    trainer.sampler.sample, trainer.losses = sampled, watched
    trainer.train()
    assert sorted(scored) == sorted(drawn)
    assert len(drawn) == 24


def test_metrics_count_the_students_own_tokens_alone(tmp_path):
    """lmbda below 1: the data's completions train, and no metric of rollouts counts them."""
    own = ("logprob", "distill", "perplexity", "generation")
    config = {"second": tiny_model(seed=9), "per_device_train_batch_size": 1, "max_steps": 8}
    seen, sampled = [], []
    for lmbda in (0.0, 0.5, 1.0):
        trainer = trainer_for("opd", tiny_model(), token_rows("opd"), tmp_path, lmbda=lmbda, **config)
        window = trainer.rollouts.window
        trainer.rollouts.window = lambda *a, window=window: (sampled.append(window(*a)), sampled[-1])[1]
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        seen.append([{k: v for k, v in log.items() if k.startswith(own)} for log in logs])
    data, mixed, rolled = seen
    drawn = [bool(window[0]["sampled"]) for window in sampled[8:16]]
    assert not any(data)
    assert True in drawn
    assert False in drawn
    assert all(rolled)
    assert mixed == [found if one else {} for found, one in zip(rolled, drawn, strict=True)]


def test_completions_of_the_data_that_are_cut_are_counted(tmp_path, caplog):
    """At max_completion_length, which else is of rollouts: the end of such an answer is not trained."""
    config = {"second": tiny_model(seed=9), "lmbda": 0.5, "max_completion_length": 4}
    rows = token_rows("opd")
    cut = sum(len(ids) > 4 for ids in rows["completion_ids"])
    with caplog.at_level(logging.WARNING):
        trainer_for("opd", tiny_model(), rows, tmp_path, **config)
    assert f"{cut} completions of the data are truncated to max_completion_length 4" in caplog.text
    assert cut
    caplog.clear()
    trainer_for("opd", tiny_model(), rows, tmp_path, **config | {"second": tiny_model(seed=9), "lmbda": 1.0})
    assert "are cut" not in caplog.text


def test_lmbda_needs_completions(tmp_path):
    rows = token_rows("opd").remove_columns("completion_ids")
    with pytest.raises(InputError, match="8 of 8 rows have no completion"):
        trainer_for("opd", tiny_model(), rows, tmp_path, second=tiny_model(seed=9), lmbda=0.5)


def test_names_of_the_package_are_lazy():
    assert hf_posttrain.OPDTrainer.method.name == "opd"
    with pytest.raises(AttributeError):
        hf_posttrain.PPOTrainer  # noqa: B018
