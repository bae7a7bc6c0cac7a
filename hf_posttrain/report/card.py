"""Model card of a run, README.md in the format of the hub. A card that was written by a user is kept."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..methods import papers
from ..monitoring.symptoms import as_list
from ..trainer.method_spec import Method, Paper
from ..trainer.saving import CARD_MARKER
from .page import render
from .run_folder import Run

logger = logging.getLogger(__name__)
# texts of a README.md that may be replaced: our own, PEFT's empty template and the draft of transformers' Trainer
REPLACEABLE = (
    CARD_MARKER,
    "[More Information Needed]",
    "generated automatically according to the information the Trainer had access to",
)


def write(run: Run) -> None:
    """Write the card to the run's folder."""
    from huggingface_hub import ModelCardData

    file = run.folder / "README.md"
    existing = file.read_text(encoding="utf-8", errors="replace") if file.exists() else CARD_MARKER
    if not any(text in existing for text in REPLACEABLE):
        user_file = file
        file = run.folder / "README.hf_posttrain.md"
        logger.info("%s was written by a user and is kept. The model card is in %s", user_file, file)
    # Base model and data sets are listed if they have hub names. A hub name may also be a folder of the machine that
    # trained, which run.json records. The license depends on model and data, and is not known.
    local = run.record.get("base_model_is_local") or not is_hub_name(run.base_model)
    paths = [source["path"] for split in run.sources.values() for source in split]
    adapter = str(run.lora.get("peft_type") or "lora").lower() if run.adapter or run.lora else None
    front_matter = ModelCardData(
        base_model=None if local else run.base_model,
        datasets=list(dict.fromkeys(filter(is_hub_name, paths))) or None,
        library_name="peft" if run.adapter else "transformers",
        pipeline_tag=pipeline_tag(run),
        model_name=run.name,
        tags=[tag for tag in ("hf_posttrain", run.method, adapter, "generated_from_trainer") if tag],
    ).to_yaml()
    text = render(
        "card.md",
        run=run,
        front_matter=front_matter,
        marker=CARD_MARKER,
        cell=_table_cell,
        python=repr,
        code=_inline_code,
        papers=list_papers(run.method_spec, run.arguments, adapter == "lora"),
    )
    file.write_text(text, encoding="utf-8")


def pipeline_tag(run: Run) -> str:
    """Return the task of a model in the names of the hub."""
    if run.is_reward_model:
        return "text-classification"
    return "image-text-to-text" if run.takes_images else "text-generation"


def _table_cell(text: object) -> str:
    """Return a text for a cell of a Markdown table, on one line with escaped characters."""
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", " ".join(str(text).split()))


def _inline_code(text: object) -> str:
    """Return a text as inline code of Markdown, on one line."""
    line = " ".join(str(text).split()).replace("`", "'")
    return f"`{line}`"


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form owner/name of the hub, and is not a local folder or file."""
    match = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name)
    return bool(match) and not name.endswith((".jsonl", ".json", ".csv", ".parquet")) and not Path(name).exists()


def list_papers(spec: Method | None, arguments: Mapping[str, Any], lora: bool) -> list[Paper]:
    """Return the papers of a method, of its loss_type, and of LoRA."""
    method_papers = [spec.paper] if spec and spec.paper else []
    loss_keys = [spec.loss_papers.get(name) for name in as_list(arguments.get("loss_type"))] if spec else []
    keys = dict.fromkeys([*loss_keys, "hu2021lora" if lora else None])
    return method_papers + [papers()[key] for key in keys if key]
