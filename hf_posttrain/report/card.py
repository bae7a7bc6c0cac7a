"""README.md: the model card of a run, as the hub expects it.

    write(run)       into the run's folder; what somebody wrote by hand stays
    front_matter     the YAML part: only names that the hub can look up
    content          what templates/card.md is filled with
"""

import logging
import re
from pathlib import Path
from typing import Any

from . import outcome
from .citations import cited
from .curves import NAME as CURVES
from .history import number
from .run_folder import Run

logger = logging.getLogger(__name__)
NAME, BESIDE = "README.md", "README.hf_posttrain.md"
MARKER = "<!-- written by hf_posttrain; remove this line to keep your own text from being replaced -->"
REPLACED = (
    MARKER, "[More Information Needed]",
    "generated automatically according to the information the Trainer had access to",
)  # fmt: skip
"""What a README.md holds that may be replaced: ours, PEFT's empty template, the Trainer's draft."""


def is_ours(folder: Path) -> bool:
    """Has the folder a model card that `write` made?"""
    file = folder / NAME
    return file.exists() and MARKER in _text(file)


def _text(file: Path) -> str:
    """Its text, whatever its encoding: only ASCII is looked for."""
    return file.read_text(encoding="utf-8", errors="replace")


def write(run: Run) -> Path:
    """Write the card; returns its path."""
    from huggingface_hub import ModelCard

    file = run.folder / NAME
    if file.exists() and not any(text in _text(file) for text in REPLACED):
        file = run.folder / BESIDE
        logger.info("%s is not ours and stays; the model card is in %s", run.folder / NAME, file)
    card = ModelCard(f"---\n{front_matter(run).to_yaml()}\n---\n\n{_body(run)}", ignore_metadata_errors=True)
    file.write_text(str(card), encoding="utf-8")
    return file


def front_matter(run: Run) -> Any:
    """ModelCardData: library, task, tags, and base model and data sets where they have hub names.

    The licence is left out: it is that of the base model and the data, which the run does not know.
    """
    from huggingface_hub import ModelCardData

    tags = ["hf_posttrain", run.method, "lora" if _lora(run) else None, "generated_from_trainer"]
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


def _lora(run: Run) -> bool:
    return run.adapter or bool(run.record.get("lora") or run.recipe.get("model", {}).get("lora"))


def _body(run: Run) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        autoescape=False,  # Markdown, not HTML: see `cell`
    )  # fmt: skip
    environment.filters |= {"cell": cell, "code": code}
    return environment.get_template("card.md").render(marker=MARKER, **content(run))


def cell(text: Any) -> str:
    """Text for a cell of a Markdown table: on one line, its bars and brackets as they are."""
    return re.sub(r"([\\|<>`*_\[\]])", r"\\\1", " ".join(str(text).split()))


def code(text: Any) -> str:
    """Text as inline code, on one line."""
    return f"`{' '.join(str(text).split()).replace('`', chr(39))}`"


def content(run: Run) -> dict[str, Any]:
    """Everything that the card says."""
    weights = run.record.get("weights") or {}
    return {
        "run": run,
        "title": run.name,
        "method": outcome.NAMES.get(run.method, run.method or "post-training"),
        "papers": cited(run.method, run.arguments, _lora(run)),
        "teacher": (run.recipe.get("teacher") or {}).get("name_or_path"),
        "sources": [(split, source) for split in ("train", "eval") for source in run.sources(split)],
        "facts": outcome.facts(run),
        "finals": outcome.finals(run),
        "setup": outcome.setup(run),
        "warnings": outcome.warnings(run),
        "versions": run.record.get("versions", {}),
        "weights": {name: number(count) for name, count in weights.items()},
        "model_id": run.arguments.get("hub_model_id") or run.arguments.get("output_dir") or run.name,
        "chat": _has_chat_template(run.folder),
        "curves": CURVES if (run.folder / CURVES).exists() else None,
    }


def _has_chat_template(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").exists() or (config.exists() and '"chat_template"' in _text(config))
