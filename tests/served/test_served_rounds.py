"""Rounds and `hf-posttrain sample` by a real vLLM server: weights arrive before each round, answers are the model's."""

import json
import logging
import re

import datasets
import pytest
import torch
from served_for_tests import EXACT, saved, served_model, serving
from tokenizers_for_tests import byte_tokenizer

from hf_posttrain import DPOConfig, DPOTrainer, run
from hf_posttrain.rounds.iterative_trainer import in_rounds


def odd_bytes(prompts, completions, references):
    """A judge."""
    return [sum(ord(c) % 2 for c in text) for text in completions]


@pytest.mark.parametrize("size", [{"count": 2}, {"steps": 1}], ids=["rounds", "online"])
def test_each_round_is_sampled_by_the_weights_of_then(size, qwen, tmp_path, caplog):
    caplog.set_level(logging.INFO, "hf_posttrain")
    rows = datasets.Dataset.from_list([{"prompt": f"ask {n}"} for n in range(12)])
    section = {"num_generations": 4, "max_completion_length": 8, "judge": "test_served_rounds:odd_bytes",
               "pair": {"unfinished": True}, "reference": "round",
               "sampler": {"kind": "vllm_server", "base_url": qwen.url, "check_steps": 1}} | size  # fmt: skip
    config = DPOConfig(
        output_dir=str(tmp_path), use_cpu=True, num_train_epochs=1, per_device_train_batch_size=4, learning_rate=3e-3,
        max_length=64, report_to="none", save_strategy="no", logging_steps=1, activation_checkpointing=False,
    )  # fmt: skip
    trainer = in_rounds(DPOTrainer, section)(
        served_model(seed=5), config, train_dataset=rows, processing_class=byte_tokenizer()
    )
    trainer.train()
    gaps = [float(found) for found in re.findall(r"differ by (\S+) at most", caplog.text)]
    assert len(gaps) == (2 if "count" in size else 3)
    assert max(gaps) < 1e-4
    assert trainer.round.rows.num_rows > 0


def test_a_file_sampled_by_a_server_has_the_models_own_logps(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = saved(served_model(seed=3, tie_word_embeddings=False), home / "sampled")
    lines = [json.dumps({"prompt": f"ask {n}", "completion": "1"}) for n in range(5)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    command = ["sample", str(home / "sampled"), "--prompts", "prompts.jsonl", "--n", "3"]
    command += ["--max_completion_length", "8"]
    with serving(home / "sampled", *EXACT) as server:
        for out in ("one.jsonl", "two.jsonl"):
            assert run.main([*command, "--temperature", "0.8", "--url", server.url, "--out", out]) == 0
    rows, again = ([*map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())] for name in ("one", "two"))
    assert rows == again
    assert len(rows) == 15
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            logps = (model(input_ids=ids).logits[0] / 0.8).log_softmax(-1)
        own = logps[len(row["prompt_ids"]) - 1 : -1].gather(1, torch.tensor(row["completion_ids"])[:, None])[:, 0]
        assert row["logps"] == pytest.approx(own.tolist(), abs=1e-3)
        assert row["reference"] == "1"
