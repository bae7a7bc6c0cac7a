"""A recipe's data section -> the trainer's data sets, tokenised once a machine into a cache for all runs."""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from ..data.audit import DataAudit, audit_datasets
from ..data.dataset_type import AnyDataset
from ..data.lengths import check_fills_step, tokens_per_row
from ..data.prepare import columns_read
from ..data.sources import load
from ..engines import launch
from ..errors import InputError, error_context
from ..generation.exact_match import prompts_with_answers
from ..trainer.base import PostTrainer
from ..trainer.config import PostTrainConfig
from .sections import Recipe


def prepare_data(
    recipe: Recipe, trainer_class: type[PostTrainer], tokenizer: PreTrainedTokenizerBase, config: PostTrainConfig
) -> tuple[dict, dict]:
    """({"train": rows, "eval": rows} as the trainer takes them, the same raw). Raises InputError for the first bad file
    or row.
    """
    rows = {}
    raw = {}
    # one process of each machine tokenises, and the others find its cache
    with launch.main_process_first(config):
        for name, sources in recipe.data.splits():
            with error_context(recipe.where(f"data.{name}.path")), _naming_line(sources):
                raw[name] = load(sources, name, partial(columns_read, method=recipe.data_method, config=config))
                rows[name] = trainer_class.prepare(raw[name], tokenizer, config, _with_file(name, sources))
                if name == "eval" and config.eval_exact_match:
                    prompts_with_answers(rows[name])
                if name == "train" and recipe.rounds is None:
                    check_fills_step(rows[name], config)
    return rows, raw


def audit_data(
    recipe: Recipe, raw: dict[str, Any], tokenizer: PreTrainedTokenizerBase, config: PostTrainConfig
) -> dict[str, DataAudit]:
    """{"train": what was made of its rows, "eval": ...}, from the cache that `prepare_data` has filled."""
    names = {key.removeprefix("data."): name for key, name in dataset_names(recipe).items()}
    return audit_datasets(raw, recipe.data_method, tokenizer, config, names)


def dataset_names(recipe: Recipe) -> dict[str, str]:
    """Return the name of each data set in messages about its rows, by its key in the recipe."""
    return {f"data.{name}": _with_file(name, sources) for name, sources in recipe.data.splits()}


def summarize_rows(rows: AnyDataset) -> str:
    """Rows, tokens and the folder of the cache that has them."""
    if not isinstance(rows, datasets.Dataset):
        return "a stream, which is tokenised as it is read: nothing to cache"
    ids = [column for column in rows.column_names if column.endswith("_ids") and column != "mismatch_ids"]
    folders = sorted({str(Path(file["filename"]).parent) for file in rows.cache_files})
    return f"{len(rows)} rows, {tokens_per_row(rows, ids).sum()} tokens, cached in {', '.join(folders)}"


@contextmanager
def _naming_line(sources: Any) -> Iterator[None]:
    """Rows are counted from 0, after empty lines are left out: say the line of a .jsonl file too, as editors count."""
    try:
        yield
    except InputError as error:
        whole = not isinstance(sources, list) and sources.weight == 1 and sources.split in (None, "train")
        path = sources.path if whole else ""
        found = re.search(r", row (\d+)", str(error))
        if not found or not path.endswith(".jsonl") or not Path(path).is_file():
            raise
        with open(path, "rb") as file:
            lines = (number for number, line in enumerate(file, 1) if line.strip())
            number = next(itertools.islice(lines, int(found[1]), None), None)
        if number is None:  # a file that is one JSON array
            raise
        text = str(error)[: found.end()] + f" (line {number})" + str(error)[found.end() :]
        raise InputError(text) from error


def _with_file(name: str, sources: Any) -> str:
    """ "train (FILE.jsonl)": what messages about rows call a data set that has one source."""
    sources = sources if isinstance(sources, list) else [sources]
    return f"{name} ({Path(sources[0].path).name})" if len(sources) == 1 else name
