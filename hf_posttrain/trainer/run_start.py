"""Start of the run in a folder, which tells its files from those of an earlier run in the same folder."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any


def run_start(file: Path, record: Mapping[str, Any]) -> float | None:
    """Return the start of a run in seconds since 1970.

    It is None if it is not known, or if the file is older, such as one from an archive.

    Args:
        file: The run.json of the run.
        record: Its content.
    """
    start = datetime.fromisoformat(record["started"]).timestamp() if "started" in record else None
    return None if start is None or file.stat().st_mtime < start else start


def is_earlier(file: Path, start: float | None) -> bool:
    """Return whether a file exists and is older than the start of the run."""
    return start is not None and file.exists() and file.stat().st_mtime < start


def start_in_folder(output_dir: Path) -> float | None:
    """Return the start of the last run in a folder, or None if the folder has no valid run.json."""
    file = output_dir / "run.json"
    try:
        return run_start(file, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
