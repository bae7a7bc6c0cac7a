"""report_to: the loggers of transformers get our metrics, W&B offline too."""

import pytest
from models_for_tests import tiny_model
from training_for_tests import token_rows, trainer_for


def test_tensorboard_gets_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = trainer_for(
        "dpo", tiny_model(), token_rows("dpo"), tmp_path, report_to="tensorboard", max_steps=2,
        eval_rows=token_rows("dpo", 3), eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    trainer.train()
    [folder] = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()["scalars"]
    assert {"train/loss", "train/rewards/margins", "eval/loss", "eval/rewards/accuracies"} <= set(tags)
    logged = [event.value for event in events.Scalars("train/loss")]
    assert logged == pytest.approx([log["loss"] for log in trainer.state.log_history if "loss" in log], rel=1e-6)


def test_wandb_works_offline(tmp_path, monkeypatch):
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    import wandb

    trainer = trainer_for("kto", tiny_model(), token_rows("kto"), tmp_path / "out", report_to="wandb", max_steps=2)
    trainer.train()
    summary = dict(wandb.run.summary)
    wandb.finish()
    assert summary["train/rewards/margins"] == pytest.approx(trainer.state.log_history[1]["rewards/margins"])
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
