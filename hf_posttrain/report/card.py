"""Writes README.md: the model card of a run, as the hub expects it. A card that somebody wrote stays."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..methods import papers
from ..monitoring.symptoms import as_names
from ..trainer.method_spec import Method, Paper
from ..trainer.saving import CARD_MARKER
from .page import render
from .run_folder import Run

logger = logging.getLogger(__name__)
# What a README.md holds that may be replaced: ours, PEFT's empty template, the Trainer's draft.
REPLACED = (
    CARD_MARKER,
    "[More Information Needed]",
    "generated automatically according to the information the Trainer had access to",
)


def write(run: Run) -> None:
    """Write the card into the run's folder."""
    from huggingface_hub import ModelCardData

    file = run.folder / "README.md"
    there = file.read_text(encoding="utf-8", errors="replace") if file.exists() else CARD_MARKER
    if not any(text in there for text in REPLACED):
        theirs = file
        file = run.folder / "README.hf_posttrain.md"
        logger.info("%s is not ours and stays; the model card is in %s", theirs, file)
    # For the hub: base model and data sets where they have hub names. A name on the hub may also be a folder of the
    # machine that trained, which run.json knows. The licence is that of model and data, which the run does not know.
    local = run.record.get("base_model_is_local") or not is_hub_name(run.base_model)
    paths = [source["path"] for split in run.sources.values() for source in split]
    adapter = str(run.lora.get("peft_type") or "lora").lower() if run.adapter or run.lora else None
    front_matter = ModelCardData(
        base_model=None if local else run.base_model,
        datasets=list(dict.fromkeys(filter(is_hub_name, paths))) or None,
        library_name="peft" if run.adapter else "transformers",
        pipeline_tag="image-text-to-text" if run.takes_images else "text-generation",
        model_name=run.name,
        tags=[tag for tag in ("hf_posttrain", run.method, adapter, "generated_from_trainer") if tag],
    ).to_yaml()
    text = render(
        "card.md",
        run=run,
        front_matter=front_matter,
        marker=CARD_MARKER,
        # In a cell of a Markdown table, and as inline code: on one line, bars and brackets as they are
        cell=lambda text: re.sub(r"([\\|<>`*_\[\]])", r"\\\1", " ".join(str(text).split())),
        python=repr,
        code=lambda text: f"`{' '.join(str(text).split()).replace('`', chr(39))}`",
        papers=list_papers(run.method_spec, run.arguments, adapter == "lora"),
    )
    file.write_text(text, encoding="utf-8")


def is_hub_name(name: str) -> bool:
    """Does it look like owner/name on the hub, and is there no such folder or file here?"""
    fits = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name)
    return bool(fits) and not name.endswith((".jsonl", ".json", ".csv", ".parquet")) and not Path(name).exists()


def list_papers(row: Method | None, arguments: Mapping[str, Any], lora: bool) -> list[Paper]:
    """The papers of a method, of its loss_type, and of LoRA."""
    own = [row.paper] if row and row.paper else []
    losses = [row.loss_papers.get(name) for name in as_names(arguments.get("loss_type"))] if row else []
    keys = dict.fromkeys([*losses, "hu2021lora" if lora else None])
    return own + [papers()[key] for key in keys if key]
