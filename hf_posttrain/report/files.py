"""The two functions that a run calls: `follow` before it trains, `write` when there is something to read."""

import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def follow(trainer: Any) -> None:
    """Add to a PostTrainer the callbacks that keep run.json and samples.json in its output_dir. All ranks call it."""
    from .record import Record
    from .samples import Samples

    trainer.add_callback(Record(trainer))
    trainer.add_callback(Samples(trainer))


def write(folder: str | Path) -> None:
    """Make report.html, curves.png and README.md of the run in `folder`, from its files alone; one process calls it.

    A README.md that somebody wrote stays, and the model card goes into README.hf_posttrain.md.
    Raises InputError where the folder holds no run, or a file of it cannot be read.
    """
    from . import card, curves, page
    from .run_folder import read

    run = read(folder)
    curves.write(run)
    page.write(run)
    card.write(run)
    logger.info("report: %s", run.folder / page.NAME)
