"""What a run leaves for people to read: report.html, curves.png and a model card, made from its folder alone.

    follow(trainer)   before train(): keeps in output_dir how the run was set up, its warnings and its sample answers
    write(folder)     after it, and again at any time: the three files, of a finished, stopped or running run

    trainer = DPOTrainer(...)
    report.follow(trainer)
    trainer.train()
    trainer.save_model(), trainer.save_state()
    report.write(trainer.args.output_dir)

run_folder.py reads what a run left, history.py its logs, outcome.py says how it went; page.py (with charts.py and
templates/), curves.py and card.py write the three files; compare.py lays runs side by side; record.py and samples.py
are the callbacks. matplotlib and jinja2 are imported when something is written.
"""

from .files import follow, write

__all__ = ["follow", "write"]
