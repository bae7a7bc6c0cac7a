"""Writes README.md: the model card of a run, as the hub expects it. A card that somebody wrote stays."""

import logging
import re
from pathlib import Path
from typing import Any

from ..trainer.saving import CARD_MARKER as MARKER
from . import drawing, outcome
from .charts import number
from .citations import cited
from .page import rendered
from .run_folder import Run

logger = logging.getLogger(__name__)
NAME, SECOND = "README.md", "README.hf_posttrain.md"
"""Where the card goes, and where if somebody wrote the first."""
REPLACED = (
    MARKER, "[More Information Needed]",
    "generated automatically according to the information the Trainer had access to",
)  # fmt: skip
"""What a README.md holds that may be replaced: ours, PEFT's empty template, the Trainer's draft."""


def _text(file: Path) -> str:
    """Its text, whatever its encoding, in which only ASCII is looked for; "" where there is none."""
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def write(run: Run) -> None:
    """Write the card into the run's folder."""
    from huggingface_hub import ModelCard

    file = run.folder / NAME
    if file.exists() and not any(text in _text(file) for text in REPLACED):
        file = run.folder / SECOND
        logger.info("%s is not ours and stays; the model card is in %s", run.folder / NAME, file)
    body = rendered("card.md", **_content(run))
    card = ModelCard(f"---\n{_front_matter(run).to_yaml()}\n---\n\n{body}", ignore_metadata_errors=True)
    file.write_text(str(card), encoding="utf-8")


def _front_matter(run: Run) -> Any:
    """ModelCardData: library, task, tags, and base model and data sets where they have hub names.

    The licence is left out: it is that of the base model and the data, which the run does not know.
    """
    from huggingface_hub import ModelCardData

    tags = ["hf_posttrain", run.method, "lora" if run.adapter or run.lora else None, "generated_from_trainer"]
    paths = [source["path"] for split in ("train", "eval") for source in run.sources(split)]
    return ModelCardData(
        base_model=run.base_model if on_hub(run.base_model) and not run.record.get("base_model_is_local") else None,
        datasets=list(dict.fromkeys(path for path in paths if on_hub(path))) or None,
        library_name="peft" if run.adapter else "transformers",
        pipeline_tag="text-generation",
        tags=[tag for tag in tags if tag],
        model_name=run.name,
    )


def on_hub(name: str) -> bool:
    """Does it look like owner/name on the hub, and is there no such folder or file here?"""
    fits = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name)
    return bool(fits) and not name.endswith((".jsonl", ".json", ".csv", ".parquet")) and not Path(name).exists()


def _cell(text: Any) -> str:
    """Text for a cell of a Markdown table: on one line, its bars and brackets as they are."""
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", " ".join(str(text).split()))


def _code(text: Any) -> str:
    """Text as inline code, on one line."""
    return f"`{' '.join(str(text).split()).replace('`', chr(39))}`"


def _content(run: Run) -> dict[str, Any]:
    """What templates/card.md is filled with."""
    weights = run.record.get("weights") or {}
    config = run.folder / "tokenizer_config.json"
    return {
        "run": run,
        "marker": MARKER,
        "cell": _cell,
        "code": _code,
        "method": outcome.title(run.method) or run.method or "post-training",
        "papers": cited(run.method, run.arguments, run.adapter or bool(run.lora)),
        "teacher": (run.recipe.get("teacher") or {}).get("name_or_path"),
        "sources": [(split, source) for split in ("train", "eval") for source in run.sources(split)],
        "weights": {name: number(count) for name, count in weights.items()},
        "model_id": run.arguments.get("hub_model_id") or run.arguments.get("output_dir") or run.name,
        "chat": (run.folder / "chat_template.jinja").exists() or '"chat_template"' in _text(config),
        "curves": drawing.NAME if (run.folder / drawing.NAME).exists() else None,
    }
