"""What depends on the row that an example is laid out in: each example has the numbers that it has alone."""

import copy
import random

import datasets
import peft
import pytest
import torch
import transformers as tf
from models_for_tests import SMALL, tiny_model
from plain_for_tests import token_logps
from training_for_tests import second_model, trainer_for

from hf_posttrain.errors import InputError
from hf_posttrain.generation import rollout
from hf_posttrain.scoring import forward
from hf_posttrain.scoring.layouts import Branch, Example, collate
from hf_posttrain.scoring.neftune import example_lengths
from hf_posttrain.scoring.rotary import rope_switch_length

SWITCH = 32
ROPES = {
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
                 "original_max_position_embeddings": SWITCH},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}  # fmt: skip


def switching(kind):
    """A model whose rotary frequencies change in rows above SWITCH tokens."""
    length = SWITCH if kind == "dynamic" else 4 * SWITCH
    sizes = SMALL | {"max_position_embeddings": length, "rope_parameters": ROPES[kind]}
    if kind == "longrope":
        del sizes["head_dim"]
        config = tf.Phi3Config(**sizes, original_max_position_embeddings=SWITCH, sliding_window=None)
    else:
        config = tf.LlamaConfig(**sizes)
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(15.0 if parameter.dim() > 1 else 1.0)
    return model.eval()


def preferences():
    """Short rows alongside long ones."""
    draw = random.Random(0)
    ids = lambda n: [draw.randrange(250) for _ in range(n)]  # noqa: E731
    return [{"prompt_ids": ids((6, 50, 6, 40)[i]), "chosen_ids": ids(8), "rejected_ids": ids(7)} for i in range(4)]


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("size", [4, 1])
def test_each_row_has_its_own_rotary_frequencies(kind, size, tmp_path):
    model, rows = switching(kind), preferences()
    alone = []
    for row in rows:  # each on a fresh model: dynamic NTK remembers the longest row
        ids, count = row["prompt_ids"] + row["chosen_ids"], len(row["chosen_ids"])
        with torch.no_grad():
            table = copy.deepcopy(model)(input_ids=torch.tensor([ids[:-1]])).logits[0, -count:].log_softmax(-1)
        alone.append(table[torch.arange(count), row["chosen_ids"]].sum())
    trainer = trainer_for(
        "dpo", model, datasets.Dataset.from_list(rows), tmp_path, per_device_train_batch_size=size,
        gradient_accumulation_steps=4 // size,
    )  # fmt: skip
    assert trainer.data_collator.layout == "padded"
    trainer.train()
    assert trainer.state.log_history[0]["logps/chosen"] == pytest.approx(float(sum(alone)) / 4, abs=1e-4)


@pytest.mark.parametrize("kind", ROPES)
def test_rows_that_never_get_so_long_share_prompts(kind, tmp_path):
    rows = datasets.Dataset.from_list(preferences())
    assert rope_switch_length(switching(kind)) == SWITCH
    assert rope_switch_length(tiny_model()) is None
    trainer = trainer_for("dpo", switching(kind), rows, tmp_path, max_length=SWITCH)
    assert trainer.data_collator.layout == "shared"


def test_rollouts_that_would_be_scored_with_other_frequencies_are_refused(tmp_path):
    rows = datasets.Dataset.from_list([{"prompt_ids": [5, 6, 7], "completion_ids": []}])
    second = second_model("opd")
    with pytest.raises(InputError, match="Set max_length=32"):
        trainer_for("opd", switching("longrope"), rows, tmp_path, second=second)
    trainer_for("opd", switching("longrope"), rows, tmp_path, second=second, max_length=SWITCH)


@pytest.mark.parametrize("kind", ROPES)
def test_answers_do_not_depend_on_a_long_prompt_in_the_batch(kind):
    model, draw = switching(kind), random.Random(1)
    forward.enable_scoring(model)
    prompts = [[draw.randrange(250) for _ in range(n)] for n in (5, 50, 8)]
    together = rollout.generate(model, prompts, 6, [299], 0)
    assert together == [rollout.generate(model, [prompt], 6, [299], 0)[0] for prompt in prompts]


# ---- NEFTune


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_neftune_goes_by_the_length_of_the_example(layout, tmp_path, monkeypatch):
    """Noise of 1 in place of a random one shows its scale."""
    lengths = (4, 9, 14)
    rows = [{"prompt_ids": [n] * 2, "completion_ids": [n] * (n - 1), "completion_mask": [1] * (n - 1)} for n in lengths]
    found, model = {}, tiny_model()
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda tensor, *bounds, **_: tensor.fill_(1.0))
    table, embed = model.get_input_embeddings().weight.detach(), {}
    model.model.layers[0].register_forward_pre_hook(lambda _, args: embed.update(noisy=args[0].detach()))
    model.register_forward_pre_hook(lambda _, args, kwargs: embed.update(ids=kwargs["input_ids"]), with_kwargs=True)
    trainer = trainer_for(
        "sft", model, datasets.Dataset.from_list(rows), tmp_path, layout=layout, neftune_noise_alpha=5.0
    )
    trainer.train()
    noise = (embed["noisy"] - table[embed["ids"]])[..., 0]
    for n in lengths:  # a row of n tokens and one more, of which the last is no input
        found[n] = noise[embed["ids"] == n]
        torch.testing.assert_close(found[n], torch.full_like(found[n], 5 / (n * 32) ** 0.5), rtol=1e-3, atol=1e-5)


def test_lengths_of_examples():
    pair = Example([1, 2, 3], [Branch([4, 5]), Branch([6, 7, 8, 9])])
    short = Example([1], [Branch([2, 3])])
    for layout, expected in {"shared": [2] * 2 + [4] * 2 + [6] * 6, "packed": [2] * 2 + [4] * 4 + [6] * 6}.items():
        batch = collate([pair, short], layout)
        assert sorted(example_lengths(batch)[batch["router_weights"] > 0].tolist()) == expected


def test_no_noise_in_evaluation(tmp_path):
    rows = datasets.Dataset.from_list([{"prompt_ids": [5, 6], "completion_ids": [7, 8], "completion_mask": [1, 1]}])
    losses = []
    for alpha in (None, 50.0):
        trainer = trainer_for("sft", tiny_model(), rows, tmp_path, eval_rows=rows, neftune_noise_alpha=alpha)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == losses[1]


# ---- activated LoRA

INVOCATION = [40, 41]


def activated():
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, alora_invocation_tokens=INVOCATION,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(3)
    return peft.get_peft_model(tiny_model("llama"), config).eval()


def test_activated_lora_is_on_in_its_own_example_alone(tmp_path):
    draw = random.Random(0)
    ids = lambda n: [draw.randrange(60, 250) for _ in range(n)]  # noqa: E731
    rows = [
        {"prompt_ids": ids(n) + INVOCATION * (n % 2) + ids(2), "completion_ids": ids(n), "completion_mask": [1] * n}
        for n in (3, 8, 5, 2)
    ]
    model, data = activated(), datasets.Dataset.from_list(rows)
    trainer = trainer_for("sft", model, data, tmp_path)
    assert trainer.data_collator.layout == "padded"
    trainer.train()
    with torch.no_grad():
        tables = [token_logps(model.eval(), row["prompt_ids"], row["completion_ids"]) for row in rows]
    values = [t[torch.arange(len(t)), row["completion_ids"]] for t, row in zip(tables, rows, strict=True)]
    assert trainer.state.log_history[0]["loss"] == pytest.approx(-float(torch.cat(values).mean()), abs=1e-5)
    with pytest.raises(InputError, match="activated LoRA is enabled once per row"):
        trainer_for("sft", activated(), data, tmp_path, layout="packed")
    with pytest.raises(InputError, match="cannot be combined with activation_checkpointing"):
        trainer_for("sft", activated(), data, tmp_path, activation_checkpointing=True)


def test_activated_lora_answers_as_it_scores():
    model = activated()
    forward.enable_scoring(model)
    prompts = [[60, 61, *INVOCATION, 70, 71], [80, 81, 82], [90, *INVOCATION, 91]]
    for prompt, answer in zip(prompts, rollout.generate(model, prompts, 6, [299], 0), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer
