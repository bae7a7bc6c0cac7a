"""A reward beside OPD's teacher: the gradient by hand, its stages, its functions, and what is refused."""

import sys

import datasets
import pytest
import torch
from models_for_tests import tiny_model
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import assert_same_step, fix_rollouts, one_step, token_rows, trainer_for

from hf_posttrain.errors import InputError
from hf_posttrain.generation.graders import exact_match
from hf_posttrain.methods.opd import OPDConfig
from hf_posttrain.rollouts.completion import Completion, Rollout
from hf_posttrain.rollouts.options import RewardOptions
from hf_posttrain.rollouts.reward import Reward, group_advantage
from hf_posttrain.scoring.head import LogProb

CONFIG = {"loss_type": "policy_gradient", "num_generations": 3, "max_completion_length": 6, "learning_rate": 1e-3}


def length(prompts, completions, references):
    """A reward function of the user's."""
    assert len(prompts) == len(completions) == len(references)
    return [len(text) for text in completions]


def too_few(prompts, completions, references):
    return [1.0]


def broken(prompts, completions, references):
    return [float("nan")] * len(completions)


def nothing(prompts, completions, references):
    return [None] * len(completions)


LENGTH = {"function": "test_opd_reward:length", "coef": 0.5}


@pytest.fixture(autouse=True)
def rollouts(monkeypatch):
    fix_rollouts(monkeypatch)


def test_rows_without_an_answer_are_refused_before_training(tmp_path):
    rows = [row | {"completion_ids": []} for row in token_rows("opd", 2)]
    with pytest.raises(InputError, match=r"^train: .*completions of the data\. 2 of 2 rows have no completion"):
        trainer_for("opd", tiny_model(), rows, tmp_path, second=tiny_model(seed=9), **CONFIG,
                    reward={"function": "exact_match"})  # fmt: skip
    with pytest.raises(InputError, match=r"^eval: .*completions of the data\. 2 of 2 rows have no completion"):
        trainer_for("opd", tiny_model(), token_rows("opd", 2), tmp_path, second=tiny_model(seed=9), eval_rows=rows,
                    reward={"function": "exact_match"}, **CONFIG)  # fmt: skip


def by_hand(tmp_path, teacher_share, coef):
    """(loss, gradients) of the first step from the definition, with plain sums."""
    trainer = trainer_for("opd", tiny_model(), token_rows("opd", 4), tmp_path, second=tiny_model(seed=9), **CONFIG)
    data = next(iter(trainer.get_train_dataloader()))
    [batch] = trainer.rollouts.window([data], 0)
    tokens, tokenizer = batch.targets, trainer.tokenizer
    logps = trainer.score(trainer.model, batch, LogProb(tokens)).value
    teacher = trainer.teacher.score(batch, LogProb(tokens)).value
    rewards = [float(len(tokenizer.decode(tokens[batch["owner"] == n], skip_special_tokens=True))) for n in range(12)]
    credit = []
    for n in batch["owner"].tolist():
        group = rewards[n // 3 * 3 : n // 3 * 3 + 3]
        credit.append(coef * (rewards[n] - sum(group) / 3))
    advantage = teacher_share * (teacher - logps.detach()) + torch.tensor(credit)
    loss = -(advantage * logps).mean()
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in trainer.model.named_parameters()}


def test_the_reward_is_added_to_the_advantage(tmp_path):
    found = one_step(
        "opd", tiny_model(), token_rows("opd", 4), tmp_path, second=tiny_model(seed=9), reward=LENGTH, **CONFIG
    )
    expected = by_hand(tmp_path, 1.0, 0.5)
    assert_same_step((expected[0], found[1]), (expected[0], expected[1]), relative=1e-4)
    assert found[0] == pytest.approx(expected[0], rel=1e-4)


def test_rewards_are_logged(tmp_path):
    trainer = trainer_for(
        "opd", tiny_model(), token_rows("opd", 4), tmp_path, second=tiny_model(seed=9), reward=LENGTH, **CONFIG
    )
    trainer.train()
    log = trainer.state.log_history[0]
    assert 1 < log["reward/mean"] <= 6
    assert log["reward/spread"] > 0


def test_exact_match_wants_the_answers_of_the_data():
    assert exact_match(["1+1="] * 2, ["so it is #### 2", "3"], ["#### 2", "2"]) == [1.0, 0.0]
    with pytest.raises(InputError, match="rows with an answer"):
        exact_match(["1+1="], ["2"], [None])


def test_a_groups_advantage_sums_to_nothing():
    found = group_advantage(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]))
    assert found.tolist() == [[0.5, -0.5, -0.5, 0.5], [0.0] * 4]


@pytest.mark.parametrize("function", ["too_few", "broken", "nothing"])
def test_what_a_function_gives_is_checked(function):
    reward = Reward(RewardOptions(function=f"test_opd_reward:{function}"))
    with pytest.raises(InputError, match=function):
        reward.grades(byte_tokenizer(), [{}], [Rollout([1], [Completion([2]), Completion([3])])])


@pytest.mark.parametrize(
    ("reward", "config", "said"),
    [({"coef": 1}, {}, "reward requires reward.function"),
     ("exact_match", {}, "reward must be a mapping with the options function, coef, not 'exact_match'"),
     ({"function": "exact_match", "weight": 1}, {}, "reward.weight is not an option"),
     ({"function": "exact_match", "when": "after"}, {}, "reward.when is not an option"),
     ({"function": "exact_match", "coef": 0}, {}, "coef"),
     ({"function": "exact_match"}, {"loss_type": "reverse_kl"}, "policy_gradient"),
     ({"function": "exact_match"}, {"num_generations": 1}, "num_generations")],
)  # fmt: skip
def test_bad_rewards_are_refused(reward, config, said, tmp_path):
    with pytest.raises(InputError, match=said):
        OPDConfig(output_dir=str(tmp_path), reward=reward, **CONFIG | config)


@pytest.mark.parametrize("name", ["nowhere:f", "math:nothing", "math:pi", "math", ":f"])
def test_a_function_that_is_not_there_is_named(name, tmp_path):
    """By the config, so by --check too."""
    with pytest.raises(InputError, match=r"package\.module:name"):
        OPDConfig(output_dir=str(tmp_path), reward={"function": name}, **CONFIG)


def test_a_function_of_the_current_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [folder for folder in sys.path if folder])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_grader.py").write_text("def grade(prompts, **rest):\n    return [0.5] * len(prompts)\n")
    reward = Reward(RewardOptions(function="my_grader:grade"))
    assert reward.grader(prompts=["q"], completions=["a"], references=[None]) == [0.5]


def test_a_stream_without_answers_is_refused_before_training(tmp_path):
    rows = token_rows("opd", 4).to_list()
    rows[2]["completion_ids"] = []
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    with pytest.raises(InputError, match=r"lmbda below 1 .* completions of the data\. 1 of 4 rows have no completion"):
        trainer_for("opd", tiny_model(), stream, tmp_path, second=tiny_model(seed=9), lmbda=0.5)
