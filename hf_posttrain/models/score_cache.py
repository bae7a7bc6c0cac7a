"""Rows that a frozen model scored once, before training, kept on disk under a key of all that changes the numbers."""

import contextlib
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import peft
import pyarrow as pa
import torch
import xxhash
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from tqdm.auto import tqdm

from ..batching.micro_batch import MicroBatch
from ..capabilities import Feature, conflict
from ..data.dataset_type import AnyDatasets
from ..data.images import image_versions
from ..engines import sharded
from ..errors import InputError
from ..scoring import forward
from . import adapters

logger = logging.getLogger(__name__)
_NON_NUMERIC_KEYS = ("_name_or_path", "architectures", "transformers_version", "use_cache")


def add_scores(
    trainer: Any,
    option: Feature,
    what: str,
    key: list[Any],
    size: int,
    score: Callable[[MicroBatch], Sequence[dict[str, Any]]],
) -> None:
    """Give the trainer's data sets the columns that `score` finds, or that the cache has under `key` and the rows.

    option: of the Config, which asks for them. what: who scores, "reference" or "teacher". key: all that the scores
    depend on besides the rows, the model first. size, score: as in `score_rows`; score gives a row's new columns.
    Raises InputError for a stream.
    """

    def scored(rows: AnyDatasets | None, name: str) -> Any:
        if rows is None:
            return None
        if isinstance(rows, dict):
            return {each: scored(part, f"{name} {each}") for each, part in rows.items()}
        if not isinstance(rows, datasets.Dataset):
            raise InputError(conflict(option, Feature.STREAM))
        # the key of one data set: the model, its rows, and the rest
        title = f"Scores of {name} by the {what}"
        whole = [key[0], rows_key(rows, trainer), *key[1:], layout_key(trainer)]
        compute = lambda: datasets.Dataset.from_list(score_rows(trainer, rows, size, score, title))  # noqa: E731
        columns = load_or_compute(whole, len(rows), compute, what, trainer.accelerator)
        trainer.scored_rows.append(datasets.concatenate_datasets([rows, columns], axis=1))
        return trainer.scored_rows[-1]

    trainer.train_dataset = scored(trainer.train_dataset, "train")
    trainer.eval_dataset = scored(trainer.eval_dataset, "eval")


def layout_key(trainer: Any) -> str:
    """Return how the trainer arranges tokens for its models: in half precision other arrangements round otherwise."""
    implementations = [model.config.get_text_config()._attn_implementation for model in trainer.scored]
    return f"{trainer.data_collator.layout} {implementations}"


def load_or_compute(
    key: list[Any], count: int, compute: Callable[[], datasets.Dataset], what: str, accelerator: Accelerator
) -> datasets.Dataset:
    """The rows under `key`, computed by all ranks and written by one of each machine where one lacks them.

    count: how many rows there are. A folder with fewer is damaged, and is computed again.
    """
    # the first rank's key counts: on the others a sharded model may be empty until it is prepared
    [name] = broadcast_object_list([hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()[:24]])
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_posttrain" / f"{what}-{name}"
    known = _load_complete(folder, count)
    if all(gather_object([known is not None])):
        logger.info("%s: taken from the cache %s", what, folder)
        return known  # type: ignore[return-value]
    rows = compute()
    # written aside and renamed, so that no other run finds a part of it
    if accelerator.is_local_main_process and _load_complete(folder, count) is None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(suffix=".partial", dir=folder.parent) as partial:
            rows.save_to_disk(f"{partial}/rows")
            with contextlib.suppress(OSError):  # another run or machine on the same disk was first
                Path(partial, "rows").rename(folder)
    accelerator.wait_for_everyone()
    return datasets.load_from_disk(str(folder))


def _load_complete(folder: Path, count: int) -> datasets.Dataset | None:
    """The rows in a folder, if it has them all: tidied up or full disks leave folders without files, or with part of
    one, which Arrow reads up to where it ends.
    """
    try:
        rows = datasets.load_from_disk(str(folder))
        return rows if len(rows) == count else None  # type: ignore[return-value]
    except (OSError, ValueError, pa.ArrowException):
        return None


def score_rows(
    trainer: Any, rows: datasets.Dataset, size: int, score: Callable[[MicroBatch], Sequence[Any]], title: str
) -> list[Any]:
    """What `score` says of each row, in the rows' order, on every rank; longest rows first, `size` at a time.

    score: a batch on the device -> one picklable value a row. Every rank makes the same number of calls, since a
    sharded model's forward needs all of them: one that has run out scores its last rows again.
    """
    accelerator = trainer.accelerator
    lengths = [sum(len(v) for v in row.values() if isinstance(v, list)) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    mine: dict[int, Any] = {}
    world = accelerator.num_processes
    rank = accelerator.process_index
    # in each round the ranks take one part each, of about equal lengths
    for first in tqdm(range(0, len(parts), world), desc=title, disable=not accelerator.is_local_main_process):
        chosen = parts[min(first + rank, len(parts) - 1)]
        batch = trainer._prepare_inputs(trainer.data_collator([rows[i] for i in chosen]))
        mine |= zip(chosen, score(batch), strict=True)
    found = {number: value for part in gather_object([mine]) for number, value in part.items()}
    return [found[number] for number in range(len(rows))]


def model_key(model: nn.Module, with_adapter: bool = True) -> str:
    """A hash of what computes: class, config, every weight's name, dtype and bytes (an adapter's where it is on)."""
    inner = forward.causal_lm(model)
    whole_model = forward.unwrap_model(model)
    configs: list[Any] = [numeric_config(inner)]
    adapted = isinstance(whole_model, peft.PeftModel)
    if with_adapter and adapted:
        configs.append(whole_model.peft_config[whole_model.active_adapter].to_dict())
        # which adapters are on in each layer, and how strongly
        layers = adapters.adapted_layers(whole_model)
        configs += [[m.active_adapters, m.disable_adapters, getattr(m, "scaling", None)] for m in layers]
    described = f"{sharded.original_class(inner).__name__} {json.dumps(configs, sort_keys=True, default=plain)}"
    weights: dict[str, Any] = whole_model.state_dict(keep_vars=True)
    if adapted and not with_adapter:
        weights = {name: weight for name, weight in weights.items() if not adapters.is_adapter_weight(whole_model, name)}
    return weights_key(weights, described)


def weights_key(weights: Mapping[str, Any], described: str = "", sample: int = 0) -> str:
    """A hash of the weights' names, dtypes, shapes and bytes, after `described`. All ranks call it.

    sample: so many values of each weight, evenly spread, instead of all: another model differs in some of them.
    """
    digest = xxhash.xxh3_128(described.encode())
    for name, tensor in sharded.iter_gathered(weights):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        values = tensor.detach().reshape(-1)
        flat: Any = values[:: -(-len(values) // sample) or 1] if sample else values
        digest.update(flat.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def numeric_config(inner: Any) -> dict[str, Any]:
    """The config of a causal LM, but for what changes no number."""
    return {key: value for key, value in inner.config.to_dict().items() if key not in _NON_NUMERIC_KEYS}


def json_default(value: object) -> Any:
    """A value as JSON can have it, the same in every process: the order of a set is not."""
    return sorted(value) if isinstance(value, set) else str(value)


def rows_key(rows: datasets.Dataset, trainer: Any = None) -> str:
    """A hash of the rows' content. trainer: with that of their pictures, as its processor reads them."""
    digest = xxhash.xxh3_128()
    seen = trainer and trainer.data_collator.vision_inputs
    if seen and "images" in rows.column_names:
        digest.update(f"{seen.reader.processor.image_processor.to_json_string()} {image_versions(rows['images'])}".encode())
    for table in rows.with_format("arrow").iter(1000):
        bare = table.replace_schema_metadata(None).combine_chunks()
        with pa.ipc.new_stream(sink := pa.BufferOutputStream(), bare.schema) as writer:
            writer.write_table(bare)
        digest.update(memoryview(sink.getvalue()))
    return digest.hexdigest()
