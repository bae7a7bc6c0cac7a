"""No tensor of [B, T, V] is ever made: every operation of a training step is watched, forward and backward; and a long
run needs no more memory than a short one."""

import resource
from pathlib import Path

import datasets
import pytest
import torch
from models_for_tests import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_for_tests import METHODS, fix_rollouts, names_where, second_model, token_rows, trainer_for
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from hf_posttrain.methods import METHODS as TABLE
from hf_posttrain.scoring import head

V, H, TOKENS, ROWS = 150_000, 32, 2048, 4
"""4 rows of 512 tokens, most of them trained: 2048 x 150,000 logits would be 307 million elements."""


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns, apart from those of the size of the parameters."""

    def __init__(self):
        super().__init__()
        self.elements, self.shape = 0, ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.numel() > self.elements and leaf.shape not in ((V, H), (H, V)):
                self.elements, self.shape = leaf.numel(), tuple(leaf.shape)
        return result


def model(seed=0):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=V, hidden_size=H, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, max_position_embeddings=1024, eos_token_id=258, pad_token_id=256,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def rows(method):
    ids = lambda n, shift: [(shift + 7 * i) % 250 for i in range(n)]  # noqa: E731
    long, short = TOKENS // ROWS - 32, TOKENS // ROWS // 2 - 16
    out = []
    for n in range(ROWS):
        row = {"prompt_ids": ids(32, n)}
        kind = TABLE[method].rows
        if kind.paired:
            row |= {"chosen_ids": ids(short, n + 1), "rejected_ids": ids(short, n + 2)}
        else:
            row |= {"completion_ids": ids(long, n + 1)}
        if kind.masked:
            row["completion_mask"] = [1] * long
        if kind.labeled:
            row["label"] = n % 2 == 0
        out.append(row)
    return datasets.Dataset.from_list(out)


CASES = [
    *(pytest.param(method, {}, marks=[] if method == "kd" else pytest.mark.slow) for method in METHODS),
    pytest.param("kd", {"divergence": "jsd"}, marks=pytest.mark.slow),
    pytest.param("opd", {"loss_type": "policy_gradient"}, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "config"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_no_tensor_of_tokens_by_vocabulary(method, config, tmp_path, monkeypatch):
    fix_rollouts(monkeypatch)
    second = model(1) if TABLE[method].second == "teacher" else None
    if TABLE[method].rows.sampled:
        config = config | {"max_completion_length": TOKENS // ROWS - 32}
    trainer = trainer_for(method, model(), rows(method), tmp_path, second=second, learning_rate=1e-3, **config)
    with Largest() as seen:
        trainer.train()

    assert trainer.state.log_history[0]["loss"] > 0 or TABLE[method].rows.sampled
    tile = head.tile_rows(V, None) * V
    assert seen.elements <= tile, f"{seen.shape} has {seen.elements / 1e6:.0f} million elements"
    assert seen.elements > V or TABLE[method].head == "score", "the head was not seen at work"
    assert 16 * tile <= TOKENS * V  # what full logits would have been


def test_the_teacher_builds_no_graph(tmp_path, monkeypatch):
    fix_rollouts(monkeypatch)
    for method in names_where(lambda method: method.second == "teacher"):
        trainer = trainer_for(method, model(), rows(method), tmp_path, second=model(1))
        batch = next(iter(trainer.get_train_dataloader()))
        if TABLE[method].rows.sampled:
            [batch] = trainer.rollouts.window([batch], 0)
        assert not trainer.teacher.states(batch, trainer.eos).hidden.requires_grad
        assert not any(parameter.requires_grad for parameter in trainer.teacher.model.parameters())


def test_the_watch_sees_full_logits():
    with Largest() as seen:
        model()(input_ids=torch.zeros(1, 300, dtype=torch.long))
    assert seen.elements >= 300 * V


class Resident(TrainerCallback):
    """The process's resident memory after some steps, in bytes."""

    def __init__(self, *steps):
        self.steps, self.seen = steps, []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.steps:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.seen.append(pages * resource.getpagesize())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("method", METHODS)
def test_memory_does_not_grow_over_a_thousand_steps(method, tmp_path):
    """Logs, evaluations and checkpoints included: from step 100 on by 2 % at most (seen: 0.1 %)."""
    watch, second = Resident(100, 1000), second_model(method)
    trainer_for(
        method, tiny_model(), token_rows(method, 64), tmp_path, second=second, eval_rows=token_rows(method, 8),
        callbacks=[watch], max_steps=1000, learning_rate=1e-4, logging_steps=10, eval_strategy="steps", eval_steps=50,
        save_strategy="steps", save_steps=50, save_total_limit=1, train_sampling_strategy="random",
    ).train()  # fmt: skip
    assert watch.seen[1] < 1.02 * watch.seen[0]
