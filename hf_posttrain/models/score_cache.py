"""Cache on disk for scores of a frozen model, which are computed once before training.

The key of an entry depends on everything that changes the numbers.
"""

import contextlib
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import peft
import pyarrow as pa
import torch
import xxhash
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..batching.micro_batch import MicroBatch
from ..capabilities import Feature, conflict_message
from ..data.dataset_type import AnyDatasets
from ..data.images import image_versions
from ..engines import sharded
from ..errors import InputError
from ..scoring import forward
from . import adapters

if TYPE_CHECKING:
    from ..trainer.interface import TrainerInterface

logger = logging.getLogger(__name__)
CHUNK_TOKENS = 2**17
"""Number of tokens whose scores are in memory before they are written."""
_ROWS_FILE = "rows.arrow"
_NON_NUMERIC_KEYS = ("_name_or_path", "architectures", "transformers_version", "use_cache")


def add_scores(
    trainer: "TrainerInterface",
    option: Feature,
    scorer: str,
    key: list[Any],
    batch_size: int,
    score: Callable[[MicroBatch], Sequence[dict[str, Any]]],
) -> None:
    """Add columns with scores to the data sets of the trainer, computed now or read from the cache.

    Args:
        trainer: The trainer.
        option: The option of the Config that requests the scores.
        scorer: The model that scores, "reference" or "teacher".
        key: Everything on which the scores depend in addition to the rows, the model first.
        batch_size: As in `score_rows`.
        score: As in `score_rows`. Returns the new columns of each row.

    Raises:
        InputError: For a stream.
    """

    def with_scores(rows: AnyDatasets | None, name: str) -> Any:
        if rows is None:
            return None
        if isinstance(rows, dict):
            return {part: with_scores(part_rows, f"{name} {part}") for part, part_rows in rows.items()}
        if not isinstance(rows, datasets.Dataset):
            raise InputError(conflict_message(option, Feature.STREAM))
        dataset = rows

        def compute() -> Iterator[list[dict[str, Any]]]:
            return score_rows(trainer, dataset, batch_size, score, f"Scores of {name} by the {scorer}")

        # the key of one data set: the model, its rows, and the rest
        dataset_key = [key[0], rows_key(dataset, trainer), *key[1:], layout_key(trainer)]
        columns = load_or_compute(dataset_key, len(dataset), compute, scorer, trainer.accelerator)
        trainer.scored_rows.append(datasets.concatenate_datasets([dataset, columns], axis=1))
        return trainer.scored_rows[-1]

    trainer.train_dataset = with_scores(trainer.train_dataset, "train")
    trainer.eval_dataset = with_scores(trainer.eval_dataset, "eval")


def layout_key(trainer: "TrainerInterface") -> str:
    """Return how the trainer arranges tokens for its models. In half precision, another layout rounds differently."""
    implementations = [model.config.get_text_config()._attn_implementation for model in trainer.scored]
    return f"{trainer.data_collator.layout} {implementations}"


def load_or_compute(
    key: list[Any],
    count: int,
    compute: Callable[[], Iterable[Sequence[dict[str, Any]]]],
    name: str,
    accelerator: Accelerator,
) -> datasets.Dataset:
    """Return the cached rows of a key. If a rank lacks them, all ranks compute them and one per machine writes them.

    Args:
        key: The key.
        count: Number of rows. A folder with fewer is damaged and is computed again.
        compute: Returns the rows in parts, which are written one after the other.
        name: Prefix of the folder.
        accelerator: The accelerator of the trainer.
    """
    # the first rank's key counts: on the others, a sharded model may be empty until it is prepared
    [digest] = broadcast_object_list([hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()[:24]])
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_posttrain" / f"{name}-{digest}"
    cached = _load_complete(folder, count)
    if all(gather_object([cached is not None])):
        logger.info("%s: read from the cache %s", name, folder)
        return cached  # type: ignore[return-value]

    parts = compute()
    if accelerator.is_local_main_process:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # written to a temporary folder and renamed, so that no other run reads a part of it
        with tempfile.TemporaryDirectory(suffix=".partial", dir=folder.parent) as partial:
            _write(parts, Path(partial, "rows"))
            if _load_complete(folder, count) is None:
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):  # another run or machine on the same disk was first
                    Path(partial, "rows").rename(folder)
    else:
        for _ in parts:  # the other ranks take part in the scoring
            pass
    accelerator.wait_for_everyone()
    return datasets.Dataset.from_file(str(folder / _ROWS_FILE))


def _write(parts: Iterable[Sequence[dict[str, Any]]], folder: Path) -> None:
    """Write rows to a new folder, each part when it has been computed."""
    folder.mkdir()
    features = None
    with contextlib.ExitStack() as stack:
        for part in parts:
            rows = datasets.Dataset.from_list(list(part), features=features)
            table = rows.with_format("arrow")[:]
            if features is None:
                features = rows.features
                writer = stack.enter_context(pa.ipc.new_stream(folder / _ROWS_FILE, table.schema))
            writer.write_table(table)


def _load_complete(folder: Path, count: int) -> datasets.Dataset | None:
    """Return the rows in a folder, or None if it does not have all of them.

    Cleanups and full disks leave folders without files, or with a part of a file, which Arrow reads up to its end.
    """
    try:
        rows = datasets.Dataset.from_file(str(folder / _ROWS_FILE))
        return rows if len(rows) == count else None
    except (OSError, ValueError, pa.ArrowException):
        return None


def score_rows(
    trainer: "TrainerInterface",
    rows: datasets.Dataset,
    batch_size: int,
    score: Callable[[MicroBatch], Sequence[Any]],
    title: str,
) -> Iterator[list[Any]]:
    """Yield the scores of the rows in their order, on every rank, in parts of about CHUNK_TOKENS tokens.

    Every rank makes the same number of calls, since the forward of a sharded model requires all of them. A rank without
    further rows scores its last ones again. The longest rows of a part are scored first. If there are several parts,
    the longest rows of all are scored once more before them, so that a lack of memory shows at once.

    Args:
        trainer: The trainer.
        rows: Prepared rows.
        batch_size: Number of rows in a call of `score`.
        score: Takes a batch on the device and returns one picklable value for each row.
        title: Title of the progress bar.
    """
    accelerator = trainer.accelerator
    lengths = [sum(len(v) for v in row.values() if isinstance(v, list)) for row in rows]
    chunks = _chunks(lengths, CHUNK_TOKENS)
    world = accelerator.num_processes
    rank = accelerator.process_index

    def score_batch(chosen: list[int]) -> dict[int, Any]:
        """Return the scores of some rows by their number."""
        batch: Any = trainer._prepare_inputs(trainer.data_collator([rows[i] for i in chosen]))
        return dict(zip(chosen, score(batch), strict=True))

    if len(chunks) > 1:
        score_batch(sorted(range(len(rows)), key=lengths.__getitem__, reverse=True)[:batch_size])
    with tqdm(total=len(rows), desc=title, disable=not accelerator.is_local_main_process) as progress:
        for chunk in chunks:
            order = sorted(chunk, key=lengths.__getitem__, reverse=True)
            batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
            local_scores: dict[int, Any] = {}
            # in each iteration every rank takes one batch, of about equal lengths
            for first in range(0, len(batches), world):
                local_scores |= score_batch(batches[min(first + rank, len(batches) - 1)])
                progress.update(sum(map(len, batches[first : first + world])))
            scores = {number: value for part in gather_object([local_scores]) for number, value in part.items()}
            yield [scores[number] for number in chunk]


def _chunks(lengths: Sequence[int], size: int) -> list[range]:
    """Return consecutive ranges of rows with at most `size` tokens each, or a single longer row."""
    starts = [0]
    tokens = 0
    for number, length in enumerate(lengths):
        tokens += length
        if tokens > size and number > starts[-1]:
            starts.append(number)
            tokens = length
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(lengths)], strict=True)]


def model_key(model: nn.Module, with_adapter: bool = True) -> str:
    """Return a hash of all that affects the numbers of a model.

    This is its class, its config, and the name, dtype and bytes of every weight (of an adapter only if it is active).
    """
    inner = forward.causal_lm(model)
    unwrapped = forward.unwrap_model(model)
    configs: list[Any] = [numeric_config(inner)]
    adapted = isinstance(unwrapped, peft.PeftModel)
    if with_adapter and adapted:
        configs.append(unwrapped.peft_config[unwrapped.active_adapter].to_dict())
        # the active adapters of each layer, and their scaling
        layers = adapters.adapted_layers(unwrapped)
        configs += [[m.active_adapters, m.disable_adapters, getattr(m, "scaling", None)] for m in layers]
    prefix = f"{sharded.original_class(inner).__name__} {json.dumps(configs, sort_keys=True, default=json_default)}"
    weights: dict[str, Any] = unwrapped.state_dict(keep_vars=True)
    if adapted and not with_adapter:
        weights = {name: weight for name, weight in weights.items() if not adapters.is_adapter_weight(unwrapped, name)}
    return weights_key(weights, prefix)


def weights_key(weights: Mapping[str, Any], prefix: str = "", sample: int = 0) -> str:
    """Return a hash of the names, dtypes, shapes and bytes of weights. All ranks call it.

    Args:
        weights: Tensors by name.
        prefix: Text that is hashed first.
        sample: Number of evenly spread values of each weight to hash, or 0 for all. The weights of another model differ
            in some of them.
    """
    digest = xxhash.xxh3_128(prefix.encode())
    for name, tensor in sharded.iter_gathered(weights):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        values = tensor.detach().reshape(-1)
        flat: Any = values[:: -(-len(values) // sample) or 1] if sample else values
        digest.update(flat.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def numeric_config(inner: PreTrainedModel) -> dict[str, Any]:
    """Return the config of a causal LM without keys that do not affect its numbers."""
    return {key: value for key, value in inner.config.to_dict().items() if key not in _NON_NUMERIC_KEYS}


def json_default(value: object) -> Any:
    """Return a value that JSON supports and that is the same in every process, unlike the order of a set."""
    return sorted(value) if isinstance(value, set) else str(value)


def rows_key(rows: datasets.Dataset, trainer: "TrainerInterface | None" = None) -> str:
    """Return a hash of the content of rows, with `trainer` including their images as its processor reads them."""
    digest = xxhash.xxh3_128()
    vision_inputs = trainer.data_collator.vision_inputs if trainer else None
    if vision_inputs and "images" in rows.column_names:
        image_processor = vision_inputs.reader.processor.image_processor
        digest.update(f"{image_processor.to_json_string()} {image_versions(rows['images'])}".encode())
    for table in rows.with_format("arrow").iter(1000):
        bare = table.replace_schema_metadata(None).combine_chunks()
        with pa.ipc.new_stream(sink := pa.BufferOutputStream(), bare.schema) as writer:
            writer.write_table(bare)
        digest.update(memoryview(sink.getvalue()))
    return digest.hexdigest()
