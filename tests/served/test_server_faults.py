"""Real servers that die, start again, answer late, have another model or lack what is needed: a line, nothing lost."""

import logging
import os
import signal
import threading
import time

import peft
import pytest
from served_for_tests import EXACT, UNTIED, Running, saved, served_model, serving
from training_for_tests import LORA, token_rows, trainer_for
from urllib3 import Retry, Timeout

from hf_posttrain.errors import InputError
from hf_posttrain.generation import completions_client as http
from hf_posttrain.generation.completions_client import ServerError
from hf_posttrain.models.config import TeacherSection

OPTIONS = {
    "learning_rate": 3e-3, "num_generations": 2, "max_length": 64,
    "max_steps": 6, "save_strategy": "steps", "save_steps": 2,
}  # fmt: skip
STARTED = ("--load-format", "dummy", *UNTIED, *EXACT)


def sampler_of(server, prefetch=False):
    """The options of a sampler that asks this server."""
    return {"kind": "vllm_server", "base_url": server.url, "check_steps": 1, "prefetch": prefetch}


def opd(server, folder, prefetch=False, **config):
    given = OPTIONS | {"sampler": sampler_of(server, prefetch)} | config
    second = given.pop("second", served_model(seed=9))
    return trainer_for("opd", served_model(seed=5), token_rows("opd", 24), folder, second=second, **given)


def at_step(trainer, step, act):
    """Do something when a step begins, before its rollouts."""
    prepare = trainer.prepare_window

    def prepared(batches):
        if trainer.state.global_step == step:
            act()
        return prepare(batches)

    trainer.prepare_window = prepared
    return trainer


def losses_of(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.fixture
def impatient(monkeypatch):
    """No server is waited for longer than some seconds."""
    monkeypatch.setattr(http, "RETRIES", Retry(total=2, read=0, backoff_factor=0.1, allowed_methods=None))


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_server_that_dies_ends_the_run_in_a_line_and_it_is_resumed(prefetch, home, tmp_path, impatient):
    """From a checkpoint of the very step, with the losses of a run that nothing befell."""
    saved(served_model(), home / "mortal")
    with serving(home / "mortal", *STARTED) as server:
        whole = opd(server, tmp_path / "whole", prefetch=prefetch)
        whole.train()
        cut = at_step(opd(server, tmp_path / "cut", prefetch=prefetch), 3, lambda: server.stop(signal.SIGKILL))
        said = r"no server answers at .*\. checkpoint-3 is saved\. To resume, run the same command"
        with pytest.raises(ServerError, match=said):
            cut.train()
        assert sorted(path.name for path in (tmp_path / "cut").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    with serving(home / "mortal", *STARTED) as server:
        resumed = opd(server, tmp_path / "cut", prefetch=prefetch)
        resumed.train(resume_from_checkpoint="auto")
    if not prefetch:  # with it, what was under way is lost, and sampled by newer weights
        assert losses_of(resumed) == pytest.approx(losses_of(whole), rel=1e-4)
    assert len(losses_of(resumed)) == 6


def test_a_server_that_starts_again_gets_the_weights_once_more(home, tmp_path, caplog):
    """Nobody needs to look: requests wait until it is there."""
    caplog.set_level(logging.WARNING, "hf_posttrain")
    saved(served_model(), home / "again")
    with serving(home / "again", *STARTED) as server:
        whole = opd(server, tmp_path / "whole", save_strategy="no")
        whole.train()
        trainer, started = opd(server, tmp_path / "again", save_strategy="no"), []
        sample = trainer.sampler._sample

        def killed(*args):  # between the transfer and the rollouts
            if trainer.state.global_step == 3 and not started:
                server.stop(signal.SIGKILL)
                started.append(Running(home / "again", *STARTED, port=server.port, log=home / "again-2.log"))
            return sample(*args)

        trainer.sampler._sample = killed
        try:
            trainer.train()
        finally:
            started[0].stop()
    assert "has restarted. The weights are sent again" in caplog.text
    assert losses_of(trainer) == pytest.approx(losses_of(whole), rel=1e-4)


def test_a_late_answer_is_waited_for_and_none_at_all_is_told(qwen, tmp_path, monkeypatch, impatient):
    group = os.getpgid(qwen.process.pid)

    def asleep(seconds):
        os.killpg(group, signal.SIGSTOP)
        threading.Timer(seconds, os.killpg, (group, signal.SIGCONT)).start()

    at_step(opd(qwen, tmp_path / "late", save_strategy="no", max_steps=2), 1, lambda: asleep(4)).train()
    monkeypatch.setattr(http, "TIMEOUT", Timeout(connect=2, read=2))
    trainer = at_step(opd(qwen, tmp_path / "never"), 3, lambda: asleep(8))
    with pytest.raises(ServerError, match=r"Read timed out.*\. checkpoint-3 is saved"):
        trainer.train()
    time.sleep(8)


def test_another_model_under_the_url_ends_the_run(home, tmp_path, impatient):
    """The server is started again with another one: of another name, or of the same name and other weights."""
    saved(served_model(), home / "first")
    saved(served_model("llama", seed=3), home / "second")
    with serving(home / "first", *STARTED) as server:

        def replace():
            server.stop()
            server.process = Running(home / "second", *STARTED, port=server.port).wait().process

        with pytest.raises(ServerError, match=r"answered 404 .*does not exist|samples from another model|answered 500"):
            at_step(opd(server, tmp_path), 2, replace).train()


def test_a_server_without_development_mode_or_runtime_loras_is_refused(home, tmp_path):
    saved(served_model("llama"), home / "plain")
    bare = {"VLLM_SERVER_DEV_MODE": "0", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}
    with serving(home / "plain", *EXACT, "--enable-lora", **bare) as server:
        with pytest.raises(InputError, match=r"is not in development mode\. Start it with VLLM_SERVER_DEV_MODE=1"):
            opd(server, tmp_path)
        student, options = served_model("llama"), OPTIONS | {"sampler": sampler_of(server)}
        trainer = trainer_for("opd", student, token_rows("opd", 8), tmp_path, second=served_model(seed=9),
                              peft_config=peft.LoraConfig(**LORA), **options)  # fmt: skip
        with pytest.raises(InputError, match=r"answered 404 .*\. Start the server with --enable-lora and VLLM_ALLOW"):
            trainer.train()
    # a teacher needs none of it; with --enable-lora vLLM 0.32 on CPU ends at the first scores
    with serving(home / "plain", *EXACT, **bare) as server:
        section = TeacherSection(url=server.url, name_or_path=str(home / "plain"))
        config = {"loss_type": "policy_gradient", "max_steps": 1}
        trainer_for("opd", served_model(seed=5), token_rows("opd"), tmp_path, second=section, **config).train()
        with pytest.raises(InputError, match=r"max_logprobs|prompt logprobs of 30"):
            trainer_for("opd", served_model(), token_rows("opd"), tmp_path, second=section, teacher={"top_k": 30})


def test_little_memory_for_keys_makes_requests_wait_and_no_more(home, tmp_path, caplog):
    """As many keys as one longest answer has, for 128 of them at once; prompts beyond the longest are told."""
    caplog.set_level(logging.INFO, "hf_posttrain")
    saved(served_model(), home / "narrow")
    narrow = "--max-model-len", "64", "--num-gpu-blocks-override", "4", "--block-size", "32"
    with serving(home / "narrow", *STARTED, *narrow) as server:
        trainer = opd(server, tmp_path, save_strategy="no", max_steps=2, num_generations=32, max_completion_length=24)
        trainer.train()
        differences = [log["sampling/logp_difference"] for log in trainer.state.log_history if "loss" in log]
        assert max(differences) < 1e-4
        with pytest.raises(InputError, match="max_length=65 is more than the vLLM server's --max-model-len 64"):
            opd(server, tmp_path, max_length=65)
        section = TeacherSection(url=server.url, name_or_path=str(home / "narrow"))
        rows = [{"prompt_ids": [1] * 60, "completion_ids": []}]
        with pytest.raises(InputError, match=r"rows have up to 68 tokens, and http.*-len of 64\. Start it with 69, or"):
            trainer_for("opd", served_model(), rows, tmp_path, second=section, loss_type="policy_gradient",
                        max_completion_length=8, max_length=100)  # fmt: skip
