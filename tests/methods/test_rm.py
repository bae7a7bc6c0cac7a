"""Reward models: what is scored is what transformers scores, in training, evaluation, commands and judges."""

import json
import math
from pathlib import Path

import datasets
import peft
import pytest
import torch
from models_for_tests import tiny_model
from templates_for_tests import FAMILIES, family_tokenizer
from tokenizers_for_tests import QWEN3, base_tokenizer, byte_tokenizer
from training_for_tests import LORA, as_reward_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_posttrain import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer, in_rounds, run
from hf_posttrain.commands.reward_metrics import reward_metrics
from hf_posttrain.data.chat import ChatTemplate, encode
from hf_posttrain.errors import InputError
from hf_posttrain.models.config import ModelSection, RewardModelSection
from hf_posttrain.models.load import check_model, load_model
from hf_posttrain.rounds.judges import make_judge
from hf_posttrain.rounds.judges.config import JudgeSection
from hf_posttrain.rounds.judges.question import Question
from hf_posttrain.scoring.head import Reward
from hf_posttrain.scoring.weighted_log_prob import WeightedLogProb

TEXTS = [
    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " it is five"},
    {"prompt": "Name a colour:", "chosen": " red", "rejected": " x"},
]
CHATS = [
    {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        **{name: [{"role": "assistant", "content": row[name].strip()}] for name in ("chosen", "rejected")},
    }
    for row in TEXTS
]


def trainer_of(rows, tmp_path, tokenizer=None, model=None, **config):
    """A trainer that only evaluates, with `predictions` of its rewards."""
    options = RewardConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **config)
    return RewardTrainer(
        model or as_reward_model(tiny_model()), options, train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer or byte_tokenizer(),
    )  # fmt: skip


def rewards(trainer):
    """Rewards [rows, 2] of the evaluation rows."""
    return torch.tensor(trainer.predict(trainer.eval_dataset).predictions)


def plain_rewards(folder, rows):
    """Rewards [rows, 2] by transformers alone, each answer in a row of its own."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.num_labels == 1
    found = []
    for row in rows:
        for name in ("chosen", "rejected"):
            if isinstance(row[name], str):
                ids = tokenizer(row["prompt"] + row[name] + tokenizer.eos_token)["input_ids"]
            else:
                ids = tokenizer.apply_chat_template(row["prompt"] + row[name], tokenize=True, return_dict=True)[
                    "input_ids"
                ]
            with torch.no_grad():
                found.append(model(input_ids=torch.tensor([ids])).logits[0, 0])
    return torch.stack(found).view(-1, 2)


@pytest.mark.parametrize("rows", [TEXTS, CHATS], ids=["text", "chat"])
@pytest.mark.parametrize("tokenizer", [byte_tokenizer, base_tokenizer, lambda: byte_tokenizer(QWEN3)])
def test_rewards_are_those_of_transformers_and_of_the_judge(tokenizer, rows, tmp_path):
    """Of the saved model, also where the pad token is the eos, at which transformers reads no score."""
    tokenizer = tokenizer()
    trainer = trainer_of(rows, tmp_path, tokenizer, max_length=None)
    trainer.save_model()
    found = rewards(trainer)
    torch.testing.assert_close(found, plain_rewards(tmp_path, rows), rtol=1e-5, atol=1e-5)
    assert len({*found.flatten().tolist()}) == 4
    with make_judge(JudgeSection(by="model", name=str(tmp_path)), None) as judge:
        questions = [
            Question(row["prompt"], [row[name] if isinstance(row[name], str) else row[name][0]["content"]
                                     for name in ("chosen", "rejected")]) for row in rows
        ]  # fmt: skip
        torch.testing.assert_close(torch.tensor(judge.score(questions)), found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_whole_conversations_as_the_template_writes_them(family, tmp_path):
    """Up to the pad token at their end, so that a classifier reads the same in a padded batch."""
    tokenizer = family_tokenizer(FAMILIES[family])
    prepared = RewardTrainer.prepare(CHATS, tokenizer, RewardConfig(output_dir=str(tmp_path), max_length=None), "train")
    for row, chat in zip(prepared, CHATS, strict=True):
        for name in ("chosen", "rejected"):
            [ids] = encode(tokenizer, [ChatTemplate(tokenizer).render(chat["prompt"] + chat[name])])
            while ids[-1] == tokenizer.pad_token_id:
                ids = ids[:-1]
            assert row["prompt_ids"] + row[f"{name}_ids"] == ids


def test_the_loss_is_that_of_its_formula(tmp_path):
    """With margins, of which a missing one is 0, and with the centering term."""
    rows = [TEXTS[0] | {"margin": 1.5}, TEXTS[1] | {"margin": None}]
    trainer = trainer_of(rows, tmp_path, center_rewards_coefficient=0.1)
    assert trainer.train_dataset["margin"][:] == [1.5, 0.0]
    metrics = trainer.evaluate()
    chosen, rejected = rewards(trainer).double().unbind(1)
    margin = torch.tensor([1.5, 0.0])
    expected = torch.nn.functional.softplus(rejected - chosen + margin) + 0.1 * (chosen + rejected) ** 2
    assert metrics["eval_loss"] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert metrics["eval_rewards/margins"] == pytest.approx((chosen - rejected).mean().item(), rel=1e-4)
    assert metrics["eval_rewards/accuracies"] == (chosen > rejected).double().mean().item()


@pytest.mark.parametrize(
    ("margin", "message"), [("big", "expected a number, found 'big'"), (math.inf, "expected a num")]
)
def test_a_margin_that_is_no_number_is_told(margin, message, tmp_path):
    with pytest.raises(InputError, match=rf"train, row 1: column 'margin': {message}"):
        RewardTrainer.prepare(
            [TEXTS[0] | {"margin": None}, TEXTS[1] | {"margin": margin}], byte_tokenizer(),
            RewardConfig(output_dir=str(tmp_path)), "train",
        )  # fmt: skip


def test_a_language_model_by_name_gets_a_score_layer_of_the_seed(tmp_path, caplog):
    tiny_model().save_pretrained(tmp_path / "lm")
    byte_tokenizer().save_pretrained(tmp_path / "lm")
    caplog.set_level("INFO")
    layers = [
        trainer_of(TEXTS, tmp_path, model=str(tmp_path / "lm"), seed=seed).model.score.weight for seed in (0, 0, 1)
    ]
    assert torch.equal(layers[0], layers[1])
    assert not torch.equal(layers[0], layers[2])
    assert "the score layer is new, since this is a language model" in caplog.text
    assert "LOAD REPORT" not in caplog.text


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_is_saved_with_its_score_layer(merge, tmp_path):
    """And read by PEFT, by a judge, and by `merge`; the run is resumed from a checkpoint of it."""
    as_reward_model(tiny_model()).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    out = tmp_path / "out"
    options = RewardConfig(output_dir=str(out), use_cpu=True, report_to="none", max_steps=4, merge_lora=merge,
                           save_strategy="steps", save_steps=2, learning_rate=1e-2, logging_steps=1)  # fmt: skip

    def built():
        return RewardTrainer(str(tmp_path / "base"), options, train_dataset=TEXTS * 4, eval_dataset=TEXTS,
                             peft_config=peft.LoraConfig(**LORA))  # fmt: skip

    trainer = built()
    trained = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad and "score" in name}
    assert len(trained) == 1
    trainer.train()
    trainer.save_model()
    found = rewards(trainer)
    resumed = built()
    resumed.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    torch.testing.assert_close(rewards(resumed), found)

    folder = out
    if not merge:
        assert json.loads((out / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
        base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
        torch.manual_seed(5)
        torch.nn.init.normal_(base.score.weight)  # the adapter's own is read
        model = peft.PeftModel.from_pretrained(base, out).eval()
        row = trainer.eval_dataset[0]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["prompt_ids"] + row["chosen_ids"]])).logits
        torch.testing.assert_close(logits[0, 0], found[0, 0], rtol=1e-5, atol=1e-5)
        with make_judge(JudgeSection(by="model", name=str(out)), None) as judge:
            scores = judge.score([Question(TEXTS[0]["prompt"], [TEXTS[0]["chosen"]])])
        assert scores[0][0] == pytest.approx(found[0, 0].item(), rel=1e-4)
        folder = tmp_path / "merged"
        assert run.main(["merge", str(out), str(folder)]) == 0
    torch.testing.assert_close(plain_rewards(folder, TEXTS), found, rtol=1e-4, atol=1e-4)


def test_models_without_the_head_of_the_method_are_told(tmp_path):
    with pytest.raises(
        InputError, match=r"has no score layer, which a reward model requires. Load it with AutoModelForSeq"
    ):
        trainer_of(TEXTS, tmp_path, model=tiny_model())
    with pytest.raises(InputError, match=r"is a sequence classifier and cannot generate text. Use a language model"):
        SFTTrainer(as_reward_model(tiny_model()), SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none"),
                   train_dataset=[{"text": "a"}], processing_class=byte_tokenizer())  # fmt: skip
    two = tiny_model().config
    two.num_labels = 2
    model = AutoModelForSequenceClassification.from_config(two)
    with pytest.raises(InputError, match=r"has 2 labels. A reward model must have one label"):
        trainer_of(TEXTS, tmp_path, model=model)
    model.save_pretrained(tmp_path / "two")
    byte_tokenizer().save_pretrained(tmp_path / "two")
    with pytest.raises(InputError, match=r"two has 2 labels. A reward model must have one label"):
        trainer_of(TEXTS, tmp_path, model=str(tmp_path / "two"))
    with pytest.raises(
        InputError, match=r"rounds cannot be combined with a reward model: it has no language modeling head"
    ):
        in_rounds(RewardTrainer, 2)
    with pytest.raises(InputError, match=r"eval_exact_match cannot be combined with a reward model"):
        RewardConfig(output_dir=str(tmp_path), eval_exact_match=True, use_cpu=True)


def test_eval_of_a_reward_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer = trainer_of(TEXTS, tmp_path / "rm")
    trainer.save_model()
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, TEXTS)))
    assert run.main(["eval", "rm", "--data", "pairs.jsonl", "--json"]) == 0
    out = capsys.readouterr().out
    [entry] = json.loads(out[out.index("[\n") :])
    chosen, rejected = rewards(trainer).double().unbind(1)
    expected = reward_metrics(chosen.tolist(), rejected.tolist())
    assert entry["metrics"] == pytest.approx(expected, rel=1e-4)
    Path("texts.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    assert run.main(["eval", "rm", "--data", "texts.jsonl"]) == 2
    assert "a reward model requires pairs (prompt, chosen and rejected), not" in capsys.readouterr().err
    assert run.main(["sample", "rm", "--prompts", "pairs.jsonl", "--out", "out.jsonl"]) == 2
    assert "cannot generate text" in capsys.readouterr().err


def test_reward_metrics_are_those_of_their_definitions():
    found = reward_metrics([2.0, 0.0, 1.0, 30.0], [1.0, 1.0, 1.0, -700.0])
    assert found["pair_accuracy"] == 0.5
    nll = [math.log1p(math.exp(-1)), math.log1p(math.exp(1)), math.log(2), 0.0]
    assert found["pair_nll"] == pytest.approx(sum(nll) / 4)
    assert found["mean_reward"] == pytest.approx((33.0 - 697.0) / 8)
    # confidences 0.731 (right), 0.731 (wrong), 0.5 (a tie, wrong) and 1 (right), in bins 4, 4, 0 and 9
    confidence = 1 / (1 + math.exp(-1))
    gaps = [abs(1 - 2 * confidence), 0.5, 0.0]
    assert found["calibration_error"] == pytest.approx(sum(gaps) / 4)


def test_tile_functions_have_the_gradient_of_autograd():
    torch.manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (5,))
    tile = WeightedLogProb(targets, stats=True)(logits.detach().clone(), slice(0, 5), True, torch.empty(5, 7).double())
    logps = logits.log_softmax(-1)[range(5), targets]
    (logps.detach().exp() * logps).sum().backward()
    torch.testing.assert_close(tile.value, (logps.exp() * logps).detach())
    torch.testing.assert_close(tile.grad, logits.grad)
    torch.testing.assert_close(tile.stats["student"], logps.detach())

    score = torch.randn(5, 1)
    tile = Reward()(score, slice(0, 5), True, torch.empty(5, 1))
    assert torch.equal(tile.value, score[:, 0])
    assert torch.equal(tile.grad, torch.ones(5, 1))


@pytest.mark.parametrize(
    ("head", "task_type", "message"),
    [
        (RewardModelSection, "CAUSAL_LM", r"has task_type CAUSAL_LM, not SEQ_CLS as that of a reward model"),
        (ModelSection, "SEQ_CLS", r"is that of a reward model, which cannot generate text"),
        (RewardModelSection, "SEQ_CLS", None),
    ],
)
def test_the_adapter_of_a_section_has_its_head(head, task_type, message, tmp_path):
    model = as_reward_model(tiny_model()) if task_type == "SEQ_CLS" else tiny_model()
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type=task_type)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    section = head(str(tmp_path / "base"), adapter=str(tmp_path / "adapter"))
    if message is None:
        trained = [name for name, weight in load_model(section).named_parameters() if weight.requires_grad]
        assert len(trained) == 5  # two matrices in each of two layers, and the score layer
        return
    with pytest.raises(InputError, match=message):
        check_model(section)
