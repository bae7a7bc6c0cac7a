"""Data sets of a recipe, tokenized once per machine into a cache that all runs share."""

import copy
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
from transformers import PreTrainedTokenizerBase

from ..data.audit import DataAudit, audit_datasets
from ..data.dataset_type import AnyDataset
from ..data.lengths import check_fills_step, token_columns, tokens_per_row
from ..data.prepare import columns_read
from ..data.row_schema import SOURCE_COLUMN
from ..data.sources import load
from ..engines import launch
from ..errors import InputError
from ..generation.exact_match import prompts_with_answers
from .sections import Recipe, Source

if TYPE_CHECKING:
    from ..trainer.base import PostTrainer
    from ..trainer.config import PostTrainConfig


def prepare_data(
    recipe: Recipe,
    trainer_class: "type[PostTrainer]",
    tokenizer: PreTrainedTokenizerBase,
    config: "PostTrainConfig",
    keep_asked: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load and tokenize the data of a recipe.

    Args:
        recipe: The recipe.
        trainer_class: Trainer of its method.
        tokenizer: Tokenizer of the policy.
        config: Config of the method.
        keep_asked: Whether to add the column `asked` with the prompts as the data have them.

    Returns:
        The prepared rows {"train": rows, "eval": rows}, and the same before preparation.

    Raises:
        InputError: For the first invalid file or row.
    """
    if keep_asked:
        config = copy.copy(config)
        config.keep_asked = True
    rows = {}
    raw = {}
    # one process of each machine tokenizes, and the others read its cache
    with launch.main_process_first(config):
        for name, sources in recipe.data.splits():
            with _data_context(recipe, f"data.{name}.path"), _add_line_number(sources):
                reader = partial(columns_read, method=recipe.data_method, config=config)
                raw[name] = load(sources, name, reader, config.log_loss_by == SOURCE_COLUMN)
                rows[name] = trainer_class.prepare(raw[name], tokenizer, config, _name_with_file(name, sources))
                if name == "eval" and config.eval_exact_match:
                    prompts_with_answers(rows[name])
                if name == "train" and recipe.rounds is None:
                    check_fills_step(rows[name], config)
    return rows, raw


def audit_data(
    recipe: Recipe, raw: dict[str, Any], tokenizer: PreTrainedTokenizerBase, config: "PostTrainConfig"
) -> dict[str, DataAudit]:
    """Return the audits {"train": audit, "eval": audit}, which read the cache that `prepare_data` has filled."""
    names = {key.removeprefix("data."): name for key, name in dataset_names(recipe).items()}
    return audit_datasets(raw, recipe.data_method, tokenizer, config, names)


def dataset_names(recipe: Recipe) -> dict[str, str]:
    """Return the name of each data set in messages about its rows, by its key in the recipe."""
    return {f"data.{name}": _name_with_file(name, sources) for name, sources in recipe.data.splits()}


def summarize_rows(rows: AnyDataset) -> str:
    """Return the number of rows and tokens, and the folder of their cache, for the output of --preprocess-only."""
    if not isinstance(rows, datasets.Dataset):
        return "a stream, which is not cached, since it is tokenized while it is read"
    ids = [column for column in token_columns(rows) if column != "mismatch_ids"]
    folders = sorted({str(Path(file["filename"]).parent) for file in rows.cache_files})
    return f"rows: {len(rows)}, tokens: {tokens_per_row(rows, ids).sum()}, cached in {', '.join(folders)}"


@contextmanager
def _data_context(recipe: Recipe, key: str) -> Iterator[None]:
    """Prefix the message of an InputError about data with the location of their path.

    An error about `apply_chat_template` has the location of that option. If it concerns the columns, the location of
    the path is added.
    """
    location = recipe.where(key)
    option_location = recipe.where("train.apply_chat_template")
    try:
        yield
    except InputError as error:
        if ": apply_chat_template requires" not in str(error):
            raise InputError(f"{location}: {error}") from error
        depends_on_data = "and the data has" in str(error) and option_location != location
        suffix = f"; {key} is at {location}" if depends_on_data else ""
        raise InputError(f"{option_location}: {error}{suffix}") from error


@contextmanager
def _add_line_number(sources: Source | list[Source]) -> Iterator[None]:
    """Add the line number to an InputError about a row of a .jsonl file.

    Rows are counted from 0 without empty lines, and lines are counted from 1 as in editors.
    """
    try:
        yield
    except InputError as error:
        path = ""
        if not isinstance(sources, list) and sources.weight == 1 and sources.split in (None, "train"):
            path = sources.path
        match = re.search(r", row (\d+)", str(error))
        if not match or not path.endswith(".jsonl") or not Path(path).is_file():
            raise
        with open(path, "rb") as file:
            lines = (number for number, line in enumerate(file, 1) if line.strip())
            number = next(itertools.islice(lines, int(match[1]), None), None)
        if number is None:  # the file is one JSON array
            raise
        text = str(error)[: match.end()] + f" (line {number})" + str(error)[match.end() :]
        raise InputError(text) from error


def _name_with_file(name: str, sources: Source | list[Source]) -> str:
    """Return the name of a data set in messages: "train (FILE.jsonl)", or "train" if it has several sources."""
    sources = sources if isinstance(sources, list) else [sources]
    return f"{name} ({Path(sources[0].path).name})" if len(sources) == 1 else name
