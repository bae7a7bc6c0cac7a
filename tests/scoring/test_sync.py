"""A training step waits for the device in no line of ours; only logging reads from it.

On CPU nothing waits, so the operations that would on a GPU are counted, by the line of hf_posttrain that asked for
them. Not counted: `batch.collate`, whose tensors are on CPU. transformers itself waits once in each forward without a
mask (`find_packed_sequence_indices`), in a line of its own.
"""

import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch
from meta_for_tests import READS
from models_for_tests import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from training_for_tests import METHODS, fix_rollouts, second_model, token_rows, trainer_for
from transformers import TrainerCallback

import hf_posttrain
from hf_posttrain.batching.sequence_padding import pad_by_sequence
from hf_posttrain.scoring import head

PACKAGE = str(Path(hf_posttrain.__file__).parent)
TORCH = str(Path(torch.__file__).parent)
WAITS = {*READS, "masked_select", "equal", "_unique2", "bincount"}


class Waits(TorchDispatchMode):
    """Counts operations whose result the host has to see, by file and line of ours."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put_") and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1] if i is not None
        )
        if name in WAITS or masked:
            above = [frame for frame in traceback.extract_stack()[:-1] if not frame.filename.startswith(TORCH)]
            if above[-1].filename.startswith(PACKAGE) and not above[-1].filename.endswith("/layouts.py"):
                self.found[f"{Path(above[-1].filename).name}: {above[-1].line}"] += 1
        return func(*args, **(kwargs or {}))


class Watched(TrainerCallback):
    """Counts from the end of the first step, which checks the model, to the end of the second."""

    def __init__(self):
        self.waits = Waits()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.waits.__enter__()
        if state.global_step == 2:
            self.waits.__exit__(None, None, None)


def test_the_watch_sees_what_waits():
    with Waits() as waits:
        torch.ones(3)[torch.ones(3) > 0]
        torch.ones(1).item()
    assert not waits.found  # none of ours
    with Waits() as waits:
        pad_by_sequence(torch.ones(4), torch.tensor([0, 0, 1, 1]))
    assert waits.found


@pytest.mark.parametrize(
    ("method", "config"),
    [*((method, {}) for method in METHODS), ("opd", {"loss_type": "policy_gradient"}), ("kto", {"loss_type": "bco"}),
     ("dpo", {"precompute_ref_log_probs": True}), ("sft", {"neftune_noise_alpha": 5.0}),
     *(("opd", {"ends": 256} | config) for config in (
         {}, {"loss_type": "policy_gradient"}, {"teacher": {"top_k": 4}},
         {"teacher": {"top_k": 4, "top_k_remainder": "residual"}},
     )), ("kd", {"ends": 256, "teacher": {"merge_eos": True}})],
)  # fmt: skip
def test_a_step_waits_for_the_device_in_no_line_of_ours(method, config, tmp_path, monkeypatch):
    fix_rollouts(monkeypatch)
    monkeypatch.setattr(head, "check_score_weights", lambda: None)  # which on a GPU the guard calls, at logs
    second = second_model(method, seed=9)
    if "ends" in config:  # the teacher's, with the student's one outcome
        config = dict(config)
        second.generation_config.eos_token_id = config.pop("ends")
    watched = Watched()
    trainer = trainer_for(
        method, tiny_model(), token_rows(method, 16), tmp_path, second, callbacks=[watched], max_steps=3,
        gradient_accumulation_steps=2, per_device_train_batch_size=2, logging_steps=3, **config,
    )  # fmt: skip
    if second is not None:
        assert bool(getattr(trainer, "eos", False)) == (second.generation_config.eos_token_id == 256)
    trainer.train()
    assert not watched.waits.found
