"""Two pretrained models with their own tokenizers and templates, of 49,152 and 262,144 tokens: `make test-real`.

Random weights of a tiny vocabulary hide what these show: sums over a vocabulary that lose digits, special tokens with
two roles, tied heads, and logits of a realistic scale.
"""

import json
import math

import datasets
import peft
import pytest
import torch
from on_real_models import NAMES, ROWS, found, load, rows_of
from training_for_tests import Gradients
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posttrain import OPDTrainer, run
from hf_posttrain.generation import rollout
from hf_posttrain.losses import divergence
from hf_posttrain.methods import METHODS, config_class, trainer_class
from hf_posttrain.scoring.head import LinearHead, LogitTransform, LogProb, score_tokens

pytestmark = pytest.mark.real
RELATIVE = 2e-5
"""Of float32 sums over a vocabulary to those of float64."""


@pytest.fixture(scope="module", params=NAMES)
def folder(request):
    return found(request.param)


def one_run(method, folder, tmp_path, steps=1, **options):
    """A trainer of some steps at a learning rate of 1e-6, after them, and the gradients of its steps."""
    given = {name: options.pop(name) for name in ("teacher_model", "peft_config") if name in options}
    args = config_class(METHODS[method])(
        output_dir=str(tmp_path), use_cpu=True, max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-6,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, max_grad_norm=0.0,
        lr_scheduler_type="constant", train_sampling_strategy="sequential", activation_checkpointing=False, **options,
    )  # fmt: skip
    keep = Gradients()
    trainer = trainer_class(METHODS[method])(
        load(folder), args, train_dataset=datasets.Dataset.from_list(rows_of(method)),
        processing_class=AutoTokenizer.from_pretrained(folder), callbacks=[keep], **given,
    )  # fmt: skip
    trainer.train()
    return trainer, keep


def losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


# ---- numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_greedy_answers_are_those_of_transformers(folder, dtype):
    """20 prompts of other lengths. In bf16 near ties may fall otherwise: each token is then one of the best."""
    model, tokenizer = load(folder, dtype), AutoTokenizer.from_pretrained(folder)
    text = " ".join(f"{question} {answer}" for question, answer in ROWS)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = [tokenizer.bos_token_id] if folder.name == "gemma3" else []
    prompts = [start + ids[n : n + 2 + 3 * n] for n in range(20)]
    ends = [tokenizer.eos_token_id]
    ours = rollout.generate(model, prompts, 12, ends, tokenizer.pad_token_id or 0)
    for prompt, answer in zip(prompts, ours, strict=True):
        inputs = torch.tensor([prompt])
        expected = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=12, do_sample=False,
                                  eos_token_id=ends, pad_token_id=0)[0, len(prompt) :].tolist()  # fmt: skip
        if dtype == torch.float32:
            assert answer == expected
            continue
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        assert (logits.amax(-1) - chosen).max() <= 0.5  # four steps of bf16 at 16


@torch.no_grad()
def test_entropy_nll_and_divergences_are_those_of_float64(folder):
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(" ".join(ROWS[0]))["input_ids"]])
    hidden, weight, targets = model.model(ids).last_hidden_state[0, :-1], model.lm_head.weight, ids[0, 1:]
    tile = LogProb(targets, stats=True)
    values, stats = score_tokens(LinearHead(weight, None, LogitTransform.from_config(model.config)), hidden, tile)
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1)
    assert relative(values, exact.gather(-1, targets[:, None])[:, 0]) <= RELATIVE
    assert relative(stats["entropy"], -(exact.exp() * exact).sum(-1)) <= RELATIVE
    logits = hidden @ weight.T
    other = logits.flip(0) * 0.7 + logits * 0.3  # another distribution of the same scale
    exact, exact_other = (torch.log_softmax(each.double(), -1) for each in (logits, other))
    for name, function in divergence.DIVERGENCES.items():
        values = function(divergence.log_softmax(logits), divergence.log_softmax(other))
        assert relative(values, function(exact, exact_other)) <= RELATIVE, name


def relative(found, expected):
    """Of the mean, which is what a loss or a metric is; of a token, an error of 1e-5 is all that float32 has."""
    assert (found.double() - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    return abs(found.double().mean() - expected.mean()).item() / abs(expected.mean().item())


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_sft_is_the_plain_computation_in_float64(folder, layout, tmp_path):
    trainer, keep = one_run("sft", folder, tmp_path, layout=layout)
    model, tokenizer = load(folder, torch.float64).train(), AutoTokenizer.from_pretrained(folder)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in trainer.train_dataset:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        logps = torch.log_softmax(model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1], -1)
        total = total - logps.gather(-1, torch.tensor(row["completion_ids"])[:, None]).sum()
        count += len(row["completion_ids"])
    loss = total / count
    loss.backward()
    assert losses(trainer)[0] == pytest.approx(loss.item(), rel=RELATIVE)
    expected = math.sqrt(sum(weight.grad.square().sum().item() for weight in model.parameters()))
    found = math.sqrt(sum(gradient.double().square().sum().item() for gradient in keep.steps[0].values()))
    assert found == pytest.approx(expected, rel=1e-4)
    assert tokenizer.eos_token_id in row["completion_ids"][-1:] or folder.name == "smollm2"


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("method", "start"), [("dpo", math.log(2)), ("kto", 0.5)])
def test_the_policy_begins_at_its_reference(folder, method, start, bf16, lora, tmp_path):
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer, _ = one_run(method, folder, tmp_path, bf16=bf16, **({"peft_config": config} if lora else {}))
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(start, abs=1e-5)
    assert log["rewards/margins"] == pytest.approx(0.0, abs=1e-4)


def test_layouts_train_alike(folder, tmp_path):
    found = [losses(one_run("dpo", folder, tmp_path, steps=3, layout=layout)[0]) for layout in ("shared", "padded")]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("method", ["kd", "opd"])
@pytest.mark.parametrize(("student", "teacher"), [NAMES, NAMES[::-1]])
def test_across_tokenizers_in_both_directions(student, teacher, method, tmp_path):
    options = {"teacher_model": str(found(teacher)), "teacher": {"tokenizer": str(found(teacher))}}
    options |= {"max_completion_length": 8} if method == "opd" else {"kd_coef": 1.0}
    trainer, keep = one_run(method, found(student), tmp_path, **options)
    log = trainer.state.log_history[0]
    assert 0 < log["loss"] < 20
    assert log["align/unaligned"] < 0.2
    assert all(gradient.isfinite().all() for gradient in keep.steps[0].values())


@pytest.fixture(scope="module")
def pruned(folder, tmp_path_factory):
    """A student: the first half of a model's layers, with its tokenizer."""
    model = load(folder)
    half = len(model.model.layers) // 2
    model.model.layers = model.model.layers[:half]
    model.config.num_hidden_layers = half
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:half]
    path = tmp_path_factory.mktemp("pruned") / folder.name
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    return path


def logps_in_float64(path, rows):
    """The log-probabilities [tokens, V] at the answers of rows (prompt ids, answer ids), one row after the other."""
    model = load(path, torch.float64)
    with torch.no_grad():
        return [torch.log_softmax(model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1], -1)
                for prompt, ids in rows]  # fmt: skip


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_kd_of_a_pruned_student_is_the_plain_computation_in_float64(folder, pruned, name, tmp_path):
    trainer, _ = one_run("kd", pruned, tmp_path, teacher_model=str(folder), divergence=name, kd_coef=1.0)
    rows = [(row["prompt_ids"], row["completion_ids"]) for row in trainer.train_dataset]
    sides = zip(*(logps_in_float64(path, rows) for path in (pruned, folder)), strict=True)
    values = torch.cat([divergence.DIVERGENCES[name](student, teacher) for student, teacher in sides])
    assert losses(trainer)[0] == pytest.approx(values.mean().item(), rel=RELATIVE)


def test_opd_of_a_pruned_student_is_the_plain_computation_in_float64(folder, pruned, tmp_path, monkeypatch):
    seen, generate = [], OPDTrainer.generate

    def recorded(trainer, prompts, *arguments, **options):
        answers = generate(trainer, prompts, *arguments, **options)
        seen.extend((list(prompt), answer) for prompt, answer in zip(prompts, answers, strict=True))
        return answers

    monkeypatch.setattr(OPDTrainer, "generate", recorded)
    trainer, _ = one_run("opd", pruned, tmp_path, teacher_model=str(folder), max_completion_length=8)
    assert len(seen) == len(ROWS)
    sides = zip(*(logps_in_float64(path, seen) for path in (pruned, folder)), strict=True)
    values = torch.cat([divergence.reverse_kl(student, teacher) for student, teacher in sides])
    assert losses(trainer)[0] == pytest.approx(values.mean().item(), rel=RELATIVE)


# ---- files and commands


def test_an_adapter_is_saved_merged_and_loaded_from_another_folder(folder, tmp_path, monkeypatch):
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    trainer, _ = one_run("sft", folder, tmp_path / "run", peft_config=config)
    trainer.save_model()
    ids = torch.tensor([trainer.train_dataset[0]["prompt_ids"]])
    with torch.no_grad():
        expected = trainer.model.eval()(ids).logits
    monkeypatch.chdir(tmp_path)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    torch.testing.assert_close(loaded(ids).logits, expected, atol=1e-3, rtol=1e-4)
    assert run.main(["merge", "run", "merged"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(merged(ids).logits, expected, atol=1e-2, rtol=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("Hi")["input_ids"]


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_check_has_nothing_to_warn_of(folder, method, tmp_path, capsys):
    chat = folder.name == "smollm2"
    rows = rows_of(method)
    if chat:
        turns = lambda text, role: [{"role": role, "content": text}]  # noqa: E731
        rows = [{name: turns(text, "user" if name == "prompt" else "assistant") for name, text in row.items()}
                for row in rows]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({
        "method": method, "model": {"name_or_path": str(folder), "lora": {"r": 4}},
        "data": {"train": {"path": str(tmp_path / "rows.jsonl")}}, "train": {"output_dir": str(tmp_path / "out")},
    }), encoding="utf-8")  # fmt: skip
    assert run.main([str(recipe), "--check"]) == 0
    page = capsys.readouterr().out
    assert "It can run." in page
    assert "warning" not in page
