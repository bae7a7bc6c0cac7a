"""A run without weights: the method's own trainer with models whose tensors are shapes, and nothing is computed.

The batch is real, so that everything that hangs on its contents works as ever: layouts, masks, owners of tokens. What
it makes with fake weights (`shapes.py`) is fake again. So forward and backward of the real code take seconds for any
model, and `Live` sees each tensor of them (`phases.py`).

    rehearsed    the trainer
    quiet        inside it nobody is told what the run will say anyway
    longest      the rows that make the longest batch
"""

import copy
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from accelerate.state import AcceleratorState
from torch import Tensor

from ..data.packing import lengths_of

STREAM_ROWS = 1000
"""So many rows of a stream are looked at."""


class Alone:
    """In place of Accelerate's accelerator: one process on CPU, whatever engine was asked for."""

    device = torch.device("cpu")
    num_processes, process_index, is_fsdp2, mixed_precision = 1, 0, False, "no"
    state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)

    def __init__(self, args: Any):
        self.low = args.bf16 or args.fp16

    def autocast(self) -> Any:
        """bf16 stands for fp16 as well."""
        return torch.autocast("cpu", torch.bfloat16) if self.low else nullcontext()

    def reduce(self, tensor: Tensor, *_: Any) -> Tensor:
        """The sum over one process."""
        return tensor


class LongestRollouts:
    """In place of what samples OPD's rollouts: each as long as it may be."""

    def __init__(self, args: Any):
        self.args = args

    def synchronise(self) -> None:
        """Nothing to send."""

    def generate(self, prompts: list, seed: Any) -> list[list[int]]:
        """K rollouts of each prompt."""
        return [[0] * self.args.max_completion_length] * (len(prompts) * self.args.num_generations)


def rehearsed(trainer_class: Any, config: Any, **given: Any) -> Any:
    """The trainer on fake models, alone on CPU; it leaves nothing behind and scores nothing beforehand."""
    args = copy.copy(config)
    args.__dict__["_setup_devices"] = torch.device("cpu")  # what `args.device` has found
    args.output_dir, args.report_to, args.push_to_hub = tempfile.mkdtemp(), [], False
    for name, off in (("precompute_ref_log_probs", False), ("precompute_teacher_top_k", None)):
        if hasattr(args, name):
            setattr(args, name, off)
    AcceleratorState._reset_state()  # a second accelerator takes no plugin of an engine otherwise
    stays = {"_move_model_to_device": lambda self, model, device: model}  # torch cannot move a fake parameter
    try:
        trainer = type(trainer_class.__name__, (trainer_class,), stays)(args=args, **given)
    finally:
        shutil.rmtree(args.output_dir, ignore_errors=True)
    _settle(trainer, args)
    return trainer


def _settle(trainer: Any, args: Any) -> None:
    """No engine, no sampling, no look at numbers, and activation checkpointing where `args` ask for it."""
    trainer.accelerator = Alone(args)
    if trainer.second_model is not None:
        trainer.second_model.accelerator, trainer.second_model.prepared = trainer.accelerator, True
    if hasattr(trainer, "rollouts"):
        trainer.rollouts = LongestRollouts(args)
    if getattr(trainer, "reference", None) is not None:
        trainer.reference.checked = True
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    if args.activation_checkpointing:
        options = copy.copy(args.activation_checkpointing_kwargs or {})
        layers = {"every_n_layers": options.pop("every_n_layers")} if "every_n_layers" in options else {}
        options.pop("offload", None)  # what is offloaded counts as if it stayed
        newer = getattr(trainer.model, "activation_checkpointing_enable", None)  # from transformers 5.23
        (newer or trainer.model.gradient_checkpointing_enable)(options or None, **layers)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the log of this package and transformers, and without warnings."""
    ours, theirs = logging.getLogger("hf_posttrain"), transformers.logging.get_verbosity()
    before = ours.level
    ours.setLevel(logging.CRITICAL)
    transformers.logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        ours.setLevel(before)
        transformers.logging.set_verbosity(theirs)


def longest(rows: Any, count: int, columns: Sequence[str] = ()) -> list[dict]:
    """The `count` prepared rows with the most tokens, in `columns` or in all, longest first; of a stream, of its first
    rows."""
    if not isinstance(rows, datasets.Dataset):
        rows = datasets.Dataset.from_list(list(islice(rows, STREAM_ROWS)))
    columns = columns or [name for name in rows.column_names if name.endswith("_ids")]
    lengths = np.sum([lengths_of(rows, name) for name in columns], axis=0)
    return [rows[int(i)] for i in np.argsort(-lengths, kind="stable")[:count]]
