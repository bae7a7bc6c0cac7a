"""A second, frozen model: how it is held, how it scores, and rows that it scored once and that are kept on disk.

`reference.py` and `teacher.py` are its two uses.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import torch
import xxhash
from torch import Tensor, nn

from . import scoring
from .batch import per_branch, targets
from .tiles import LogProb

logger = logging.getLogger(__name__)


def freeze(model: nn.Module) -> nn.Module:
    """Eval mode, no gradients, and a forward that takes a scorer."""
    model.requires_grad_(False)
    scoring.enable_scoring(model)
    return model.eval()


def branch_logps(model: nn.Module, batch: dict[str, Any], examples: int, branches: int) -> Tensor:
    """Summed log-probabilities of each branch, without gradient: [B, K]."""
    with torch.no_grad(), scoring.eval_mode(model):
        values = scoring.score(model, batch, LogProb(targets(batch)))["value"]
    return per_branch(values, batch["owner"], examples, branches)


# ---- rows computed once


def cached(key: list[Any], compute: Callable[[], datasets.Dataset], what: str) -> datasets.Dataset:
    """The rows under `key`, computed and written at once (beside, then renamed) where they are not there yet."""
    name = hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()[:24]
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_posttrain" / f"{what}-{name}"
    if folder.exists():
        logger.info("%s: taken from the cache %s", what, folder)
        return datasets.load_from_disk(str(folder))
    rows = compute()
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    rows.save_to_disk(str(partial))
    partial.rename(folder)
    return datasets.load_from_disk(str(folder))


def weights_key(model: nn.Module, with_adapter: bool = True) -> str:
    """A hash of every weight's name, dtype and bytes; without those of LoRA adapters where they are switched off."""
    digest = xxhash.xxh3_128()
    for name, tensor in model.state_dict().items():
        if not with_adapter and (".lora_" in name or ".modules_to_save." in name):
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def rows_key(rows: datasets.Dataset) -> str:
    """A hash of the rows' content."""
    digest = xxhash.xxh3_128()
    for table in rows.with_format("arrow").iter(1000):
        bare = table.replace_schema_metadata(None).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, bare.schema) as writer:
            writer.write_table(bare)
        digest.update(memoryview(sink.getvalue()))
    return digest.hexdigest()
