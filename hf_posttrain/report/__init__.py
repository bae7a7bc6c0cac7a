"""What a run leaves for people to read: report.html, curves.png and a model card, made from its folder alone.

    trainer = DPOTrainer(...)
    report.follow(trainer)
    trainer.train()
    trainer.save_model(), trainer.save_state()
    report.write(trainer.args.output_dir)

matplotlib and jinja2 are imported when something is written.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..trainer.interface import TrainerInterface

__all__ = ["follow", "write"]

logger = logging.getLogger(__name__)


def follow(trainer: "TrainerInterface") -> None:
    """Keep run.json and samples.json for the report: how a run is set up, what it is warned of, its sample answers.

    trainer: a PostTrainer, which gets two callbacks. Called before `train()`, on all ranks.
    """
    from .callbacks import RunRecord, SampleCallback

    trainer.add_callback(RunRecord(trainer))
    trainer.add_callback(SampleCallback(trainer))


def write(folder: str | Path) -> None:
    """Make report.html, curves.png and README.md of the run in `folder`, finished, stopped or running, from its files.

    Called by one process. A README.md that somebody wrote stays, and the model card goes into README.hf_posttrain.md.
    Raises InputError where the folder holds no run, or a file of it cannot be read.
    """
    from . import card, charts, page
    from .run_folder import read_run

    run = read_run(folder)
    charts.write_image(run)
    (run.folder / page.NAME).write_text(page.render("report.html", run=run), encoding="utf-8")
    card.write(run)
    logger.info("report: %s", run.folder / page.NAME)
