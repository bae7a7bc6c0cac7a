"""Report of a run: report.html, curves.png and a model card, which are generated from the files in its folder.

    trainer = DPOTrainer(...)
    report.follow(trainer)
    trainer.train()
    trainer.save_model(), trainer.save_state()
    report.write(trainer.args.output_dir)

matplotlib and jinja2 are only imported when a report is written.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..trainer.interface import TrainerInterface

__all__ = ["follow", "write"]

logger = logging.getLogger(__name__)


def follow(trainer: "TrainerInterface") -> None:
    """Write run.json and samples.json during a run: its settings and warnings, and its sample answers.

    Call this before `train()`, on all ranks.

    Args:
        trainer: A PostTrainer, to which two callbacks are added.
    """
    from .callbacks import RunRecord, SampleCallback

    trainer.add_callback(RunRecord(trainer))
    trainer.add_callback(SampleCallback(trainer))


def write(folder: str | Path) -> None:
    """Write report.html, curves.png and README.md of a run that is finished, stopped or running.

    Call this in one process. A README.md that was written by a user is kept, and the model card is written to
    README.hf_posttrain.md instead.

    Args:
        folder: Output folder of the run.

    Raises:
        InputError: If the folder contains no run, or a file that cannot be read.
    """
    from . import card, charts, page
    from .run_folder import read_run

    run = read_run(folder)
    charts.write_image(run.folder / charts.NAME, f"{run.method.upper()}  {run.name}".strip(), {run.name: run.history})
    (run.folder / page.NAME).write_text(page.render("report.html", run=run), encoding="utf-8")
    card.write(run)
    logger.info("report: %s", run.folder / page.NAME)
