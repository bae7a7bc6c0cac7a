"""Writes README.md: the model card of a run, as the hub expects it. A card that somebody wrote stays."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..methods import papers
from ..trainer.method import Method, Paper
from ..trainer.saving import CARD_MARKER
from .page import render
from .run_folder import Run

logger = logging.getLogger(__name__)
NAME, SECOND = "README.md", "README.hf_posttrain.md"  # the second where somebody wrote the first
# What a README.md holds that may be replaced: ours, PEFT's empty template, the Trainer's draft.
REPLACED = (
    CARD_MARKER, "[More Information Needed]",
    "generated automatically according to the information the Trainer had access to",
)  # fmt: skip


def write(run: Run) -> None:
    """Write the card into the run's folder."""
    file = run.folder / NAME
    if file.exists() and not any(text in _read_text(file) for text in REPLACED):
        file = run.folder / SECOND
        logger.info("%s is not ours and stays; the model card is in %s", run.folder / NAME, file)
    text = render(
        "card.md", run=run, front_matter=_front_matter(run), marker=CARD_MARKER,
        # In a cell of a Markdown table, and as inline code: on one line, bars and brackets as they are
        cell=lambda text: re.sub(r"([\\|<>`*_\[\]])", r"\\\1", " ".join(str(text).split())),
        code=lambda text: f"`{' '.join(str(text).split()).replace('`', chr(39))}`",
        papers=list_papers(run.row, run.arguments, run.adapter or bool(run.lora)),
        chat='"chat_template"' in _read_text(run.folder / "tokenizer_config.json"),
    )  # fmt: skip
    file.write_text(text, encoding="utf-8")


def _read_text(file: Path) -> str:
    """Its text, whatever its encoding, in which only ASCII is looked for; "" where there is none."""
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _front_matter(run: Run) -> str:
    """YAML for the hub: library, task, tags, and base model and data sets where they have hub names."""
    from huggingface_hub import ModelCardData

    # The licence is left out: it is that of the base model and the data, which the run does not know.
    tags = ["hf_posttrain", run.method, "lora" if run.adapter or run.lora else None, "generated_from_trainer"]
    paths = [source["path"] for split in run.sources.values() for source in split]
    # A name on the hub may also be a folder of the machine that trained, which run.json knows.
    local = run.record.get("base_model_is_local") or not is_hub_name(run.base_model)
    return ModelCardData(
        base_model=None if local else run.base_model, datasets=list(dict.fromkeys(filter(is_hub_name, paths))) or None,
        library_name="peft" if run.adapter else "transformers", pipeline_tag="text-generation",
        tags=[tag for tag in tags if tag], model_name=run.name,
    ).to_yaml()  # fmt: skip


def is_hub_name(name: str) -> bool:
    """Does it look like owner/name on the hub, and is there no such folder or file here?"""
    fits = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name)
    return bool(fits) and not name.endswith((".jsonl", ".json", ".csv", ".parquet")) and not Path(name).exists()


def list_papers(row: Method | None, arguments: Mapping[str, Any], lora: bool) -> list[Paper]:
    """The papers of a method, of its loss_type, and of LoRA."""
    given = arguments.get("loss_type") or []
    losses = [given] if isinstance(given, str) else given
    found = [row.paper, *map(row.loss_papers.get, losses)] if row else []
    return [paper for paper in dict.fromkeys([*found, papers.LORA if lora else None]) if paper]
