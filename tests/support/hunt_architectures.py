"""What a run does with an architecture, against the model's own forward: each answer alone, in float32."""

import copy
import random
from unittest import mock

import datasets
import torch
from architectures import tiny
from peft import LoraConfig, PeftModel
from plain_for_tests import PLAIN, token_logps
from training_for_tests import one_step, trainer_for
from transformers import AutoModelForCausalLM

from hf_posttrain.errors import InputError
from hf_posttrain.generation import rollout
from hf_posttrain.methods import METHODS
from hf_posttrain.scoring import forward
from hf_posttrain.scoring.attention_selection import choose_attention, row_multiple
from hf_posttrain.scoring.head import LogProb
from hf_posttrain.scoring.layout_selection import choose_layout, supported_layouts, verified_layout
from hf_posttrain.scoring.layouts import Branch, Example, collate

EQUAL = 1e-4  # largest difference of a log-probability, in float32


def ids(draw, low, high):
    """Token ids without the special ones."""
    return [draw.randrange(5, 110) for _ in range(draw.randint(low, high))]


def examples():
    """Prompts with two answers, longer than any window of `architectures`, and short ones."""
    draw = random.Random(1)
    several = [Example(ids(draw, 20, 40), [Branch(ids(draw, 10, 30)), Branch(ids(draw, 5, 30))]) for _ in range(2)]
    return [*several, Example(ids(draw, 1, 3), [Branch(ids(draw, 2, 40))])]


@torch.no_grad()
def scored_alone(model, rows):
    """The log-probabilities of all answers' tokens, one answer after the other."""
    found = []
    for row in rows:
        for branch in row.branches:
            table = token_logps(model, row.prompt, branch.ids)
            found.append(table[torch.arange(len(branch.ids)), branch.ids])
    return torch.cat(found)


@torch.no_grad()
def scored(model, rows, layout):
    """The same as a run has them."""
    batch = collate(rows, layout, row_multiple=row_multiple([model]))
    values = forward.score(model, batch, LogProb(batch.targets)).value
    return torch.cat([values[batch["owner"] == k] for k in range(len(batch["row"]))])


def gap(found, expected):
    """The largest difference, NaN if one of them is."""
    return float((found - expected).abs().max())


def layouts(model, facts):
    """Each layout that the model is said to take, and what `auto` ends with. facts: what else is seen, for a table."""
    rows = examples()
    forward.enable_scoring(model)
    choose_attention(model, torch.device("cpu"))
    alone = scored_alone(model, rows)
    fitting, facts["why"] = supported_layouts([model])
    for layout in fitting:
        trusted = verified_layout([model], layout, False, max_length=1024)
        yield f"layout {layout}{'' if trusted == layout else ', refused'}", gap(scored(model, rows, trusted), alone)
    facts["head"] = "own logits" if getattr(model, forward.USES_OWN_LOGITS, False) else "fused"
    yield f"auto: {choose_layout([model], 'auto')}", 0.0


def gradients(model):
    """Of the summed log-probabilities: each layout that it is trusted with, against each answer alone."""
    rows, found = examples(), {}

    def of(values):
        values.sum().backward()
        whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        return whole

    tables = [(token_logps(model, row.prompt, branch.ids), branch.ids) for row in rows for branch in row.branches]
    expected = of(torch.cat([table[torch.arange(len(ids)), ids] for table, ids in tables]))
    forward.enable_scoring(model)
    choose_attention(model, torch.device("cpu"))
    for layout in supported_layouts([model])[0]:
        trusted = verified_layout([model], layout, False, max_length=1024)
        if trusted not in found:
            batch = collate(rows, trusted, row_multiple=row_multiple([model]))
            grad = of(forward.score(model, batch, LogProb(batch.targets)).value)
            found[trusted] = float((grad - expected).norm() / expected.norm())
            yield f"gradient {trusted}", found[trusted]


def generation(model, facts):
    """Greedy answers to prompts of several lengths, against the argmax of whole forwards."""
    draw = random.Random(2)
    prompts = [ids(draw, 3, 3), ids(draw, 1, 1), ids(draw, 18, 18), ids(draw, 6, 6)]
    forward.enable_scoring(model)
    found = rollout.generate(model, prompts, 6, [299], 0)
    facts["answers"] = model.generation_backend[0]
    wrong = []
    for prompt, answer in zip(prompts, found, strict=True):
        logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        best, chosen = logits.max(-1).values, logits[torch.arange(len(answer)), answer]
        wrong.append((best - chosen).max())
    yield "generation", float(torch.stack(wrong).max())


def other_of(model):
    """A reference or teacher: the model with each weight changed a little."""
    torch.manual_seed(4)
    other = copy.deepcopy(model).requires_grad_(False)
    for weight in other.parameters():
        weight.mul_(1 + 0.02 * torch.randn_like(weight))
    return other


def step(method, model, tmp_path):
    """Loss and gradient of a step of the method's trainer against the textbook's formula with each answer alone; OPD's
    answers are sampled, as in a run."""
    draw, other, asked = random.Random(5), other_of(model), []
    rows = [{"prompt_ids": ids(draw, low, 20), "chosen_ids": ids(draw, 2, 20), "rejected_ids": ids(draw, 2, 20)}
            for low in (1, 1, 16, 16)]  # fmt: skip
    columns = METHODS[method].rows.columns
    given = datasets.Dataset.from_list([{name: row[name] for name in columns if name in row} for row in rows])

    def generate(model, prompts, *args, **kwargs):
        answers = real(model, prompts, *args, **kwargs)
        asked.extend(zip(prompts, answers, strict=True))
        return answers

    real = rollout.generate
    with mock.patch.object(rollout, "generate", generate):
        loss, found = one_step(method, model, given, tmp_path, second=other, disable_dropout=True)
    rows = [{"prompt_ids": prompt} for prompt, _ in asked] or rows
    plain = PLAIN[method](model, rows, reference=other, teacher=other, rollouts=[answer for _, answer in asked])
    plain.backward()
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    yield "loss", abs(loss - float(plain.detach()))
    whole = torch.sqrt(sum((grad.double() ** 2).sum() for grad in expected.values()))
    apart = sum(((found.get(name, 0.0) - grad).double() ** 2).sum() for name, grad in expected.items())
    yield "gradient", float(torch.sqrt(apart) / whole)


def trained(model, tmp_path, lora):
    """An SFT step, then what is saved against what is in memory."""
    draw = random.Random(3)
    rows = [{"prompt_ids": ids(draw, 1, 20), "completion_ids": ids(draw, 2, 20)} for _ in range(4)]
    rows = [row | {"completion_mask": [1] * len(row["completion_ids"])} for row in rows]
    base = copy.deepcopy(model)
    options = {"learning_rate": 1e-2, "disable_dropout": True}
    if lora:
        options["peft_config"] = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    probe = torch.tensor([[7, 8, 9, 10, 11, 12]])
    with torch.no_grad():
        before = base(input_ids=probe, use_cache=False).logits
    trainer = trainer_for("sft", model, rows, tmp_path, **options)
    trainer.train()
    plain = -scored_alone(base, [Example(row["prompt_ids"], [Branch(row["completion_ids"])]) for row in rows]).mean()
    yield "loss of a step", abs(trainer.state.log_history[0]["loss"] - float(plain))
    trainer.save_model(str(tmp_path / "saved"))
    policy = trainer.model.eval()
    if lora:
        loaded = PeftModel.from_pretrained(base, str(tmp_path / "saved"))
    else:
        loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "saved"))
    with torch.no_grad():
        after = [m.eval()(input_ids=probe, use_cache=False).logits for m in (policy, loaded)]
    yield "saved", gap(*after)
    yield "moved", 0.0 if gap(after[0], before) > 1e-3 else float("nan")


def without_dropout(name, tmp_path):
    """All rates of the config at 0.3, and what is left of them in training."""
    from hf_posttrain.methods import config_class
    from hf_posttrain.models.policy import prepare_policy

    config = tiny(name).config.get_text_config()
    rates = {key: 0.3 for key, value in config.to_dict().items()
             if ("drop" in key or "jitter" in key) and isinstance(value, float) and "class" not in key}  # fmt: skip
    model = tiny(name, **rates)
    args = config_class(METHODS["dpo"])(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    model = prepare_policy(model, None, args)
    rows = examples()
    layout = verified_layout([model], choose_layout([model], "auto"), False)
    quiet = scored(model, rows, layout)
    torch.manual_seed(0)
    yield "dropout off", gap(scored(model.train(), rows, layout), quiet)


def examine(name, tmp_path, facts=None):
    """{check: largest difference, or what was raised}. `built` is alone where the architecture does not build. facts:
    a dict for what else is seen."""
    facts = {} if facts is None else facts
    try:
        model = tiny(name)
        with torch.no_grad():
            model(input_ids=torch.tensor([[5, 6, 7, 8, 9] * 5]), use_cache=False)
    except Exception as error:
        return {"built": f"{type(error).__name__}: {error}"[:120]}
    found = {}
    for what, check in {
        "layouts": lambda: layouts(copy.deepcopy(model), facts),
        "gradients": lambda: gradients(copy.deepcopy(model)),
        "dpo": lambda: step("dpo", copy.deepcopy(model), tmp_path / "dpo"),
        "opd": lambda: step("opd", copy.deepcopy(model), tmp_path / "opd"),
        "generation": lambda: generation(copy.deepcopy(model), facts),
        "whole": lambda: trained(copy.deepcopy(model), tmp_path / "whole", lora=False),
        "lora": lambda: trained(copy.deepcopy(model), tmp_path / "lora", lora=True),
        "dropout": lambda: without_dropout(name, tmp_path / "dropout"),
    }.items():
        try:
            found |= {f"{what}: {part}": value for part, value in check()}
        except Exception as error:
            found[what] = error if isinstance(error, InputError) else f"{type(error).__name__}: {error}"[:200]
    return found
