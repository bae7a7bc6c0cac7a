"""A teacher on a real vLLM server: KD and OPD as with the same model alongside."""

import pytest
import torch
from served_for_tests import served_model
from training_for_tests import assert_same_step, fix_rollouts, one_step, token_rows, trainer_for

from hf_posttrain.models.config import TeacherSection

V = 300
WAYS = {
    "policy gradient": ("opd", {"loss_type": "policy_gradient"}),
    "all": ("opd", {"teacher": {"top_k": V}}),
    "all, temperature 0.7": ("opd", {"teacher": {"top_k": V}, "temperature": 0.7}),
    "top 20": ("opd", {"teacher": {"top_k": 20}}),
    "residual": ("opd", {"teacher": {"top_k": 20, "top_k_remainder": "residual"}}),
    "kd, all": ("kd", {"teacher": {"top_k": V}}),
    "kd, top 20": ("kd", {"teacher": {"top_k": 20}}),
    "kd, generalized": ("kd", {"teacher": {"top_k": 20, "top_k_remainder": "generalized"}}),
    "kd, from the cache": ("kd", {"teacher": {"top_k": 20, "precompute": True}}),
}


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_the_same_model_alongside(way, teacher, tmp_path, monkeypatch):
    """To 1e-3, in float32, on the same rollouts; the dense loss where all of the vocabulary is asked for."""
    fix_rollouts(monkeypatch)
    method, config = WAYS[way]
    rows, section = token_rows(method, 8), TeacherSection(url=teacher.url, name_or_path=str(teacher.folder))
    student, options = served_model(seed=3), {"per_device_train_batch_size": 8}
    found = one_step(method, student, rows, tmp_path, second=section, **options, **config)
    dense = {name: value for name, value in config.items() if value != V}
    local = one_step(method, student, rows, tmp_path, second=served_model(seed=9, tie_word_embeddings=False),
                     **options, **dense)  # fmt: skip
    assert found[0] == pytest.approx(local[0], rel=1e-3)
    assert_same_step((local[0], found[1]), local, relative=1e-3)
    print(f"{way}: {abs(found[0] - local[0]) / abs(local[0]):.1e} of the loss")


def test_all_ends_are_one_outcome(teacher, tmp_path, monkeypatch):
    """The teacher may end with another token too, of which the server is asked by itself."""
    fix_rollouts(monkeypatch)
    local = served_model(seed=9, tie_word_embeddings=False)
    local.generation_config.eos_token_id = [258, 256]
    local.config.save_pretrained(tmp_path / "ends")
    local.generation_config.save_pretrained(tmp_path / "ends")
    for file in teacher.folder.glob("token*"):
        (tmp_path / "ends" / file.name).write_bytes(file.read_bytes())
    rows, config = token_rows("opd", 6), {"loss_type": "policy_gradient"}
    section = TeacherSection(url=teacher.url, name_or_path=str(tmp_path / "ends"))
    found = one_step("opd", served_model(seed=3), rows, tmp_path, second=section, **config)
    assert_same_step(found, one_step("opd", served_model(seed=3), rows, tmp_path, second=local, **config), 1e-3)


def test_rollouts_by_one_server_and_a_teacher_on_another(qwen, teacher, tmp_path):
    """OPD in which this process has the student alone; one window ahead."""
    section = TeacherSection(url=teacher.url, name_or_path=str(teacher.folder))
    trainer = trainer_for(
        "opd", served_model(seed=5), token_rows("opd", 24), tmp_path, second=section, max_steps=5, learning_rate=3e-3,
        sampler={"kind": "vllm_server", "base_url": qwen.url, "prefetch": True, "check_steps": 1},
        loss_type="policy_gradient", max_length=64,
    )  # fmt: skip
    trainer.train()
    logs = [log for log in trainer.state.log_history if "sampling/kl" in log]
    assert len(logs) == 5
    assert logs[0]["sampling/logp_difference"] < 1e-4 < logs[1]["sampling/logp_difference"]
    assert torch.tensor([log["loss"] for log in logs]).isfinite().all()
