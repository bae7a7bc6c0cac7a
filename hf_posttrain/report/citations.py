"""The papers behind a method and its options, as the model card cites them."""

from collections.abc import Mapping
from typing import Any

from ..methods import METHODS, papers
from ..trainer.method import Paper


def cited(method: str, arguments: Mapping[str, Any], lora: bool) -> list[Paper]:
    """The method's paper, those of its loss_type, and LoRA's."""
    given, row = arguments.get("loss_type") or [], METHODS.get(method)
    losses = [given] if isinstance(given, str) else given
    found = [] if row is None else [row.paper, *map(row.loss_papers.get, losses)]
    return [paper for paper in dict.fromkeys([*found, papers.LORA if lora else None]) if paper]
