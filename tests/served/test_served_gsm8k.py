"""The recipe of a served teacher by the command, on GSM8K's questions: a tied student, two real servers."""

import json
import logging
import re
from pathlib import Path

from served_for_tests import served_model
from tokenizers_for_tests import QWEN3, byte_tokenizer

from hf_posttrain.run import main

RECIPE = Path(__file__).parents[2] / "recipes" / "opd_served.yaml"
STEPS = 20


def test_log_probabilities_agree_at_every_transfer(gsm8k, qwen, teacher, tmp_path, caplog):
    """1e-4 in float32, over 20 steps that move the student far; and of every token that was sampled."""
    caplog.set_level(logging.INFO, "hf_posttrain")
    student = tmp_path / "student"
    served_model(seed=5).save_pretrained(student)
    byte_tokenizer(QWEN3).save_pretrained(student)
    assert json.loads((student / "config.json").read_text())["tie_word_embeddings"]
    lines = (gsm8k / "train.jsonl").read_text(encoding="utf-8").splitlines()
    short = [line for line in lines if len(line) < 400][:200]
    (tmp_path / "rows.jsonl").write_text("\n".join(short), encoding="utf-8")
    columns = {**json.loads(short[0])}
    named = "{prompt: question, completion: answer}" if "question" in columns else "null"
    data = [f"data.{part}.{key}" for part in ("train", "eval")
            for key in (f"path={tmp_path / 'rows.jsonl'}", "name=null", "split=train", f"columns={named}")]  # fmt: skip
    assert main([
        str(RECIPE), *data, f"model.name_or_path={student}", f"teacher.name_or_path={student}",
        f"teacher.url={teacher.url}", f"train.sampler.base_url={qwen.url}", f"train.output_dir={tmp_path / 'out'}",
        "train.use_cpu=true", "train.max_length=480", "train.max_completion_length=32", f"train.max_steps={STEPS}",
        "train.per_device_train_batch_size=4", "train.gradient_accumulation_steps=2", "train.learning_rate=1e-3",
        "train.sampler.check_steps=1", "train.sampler.prefetch=false", "train.eval_strategy=no",
        "train.save_strategy=no",
        "data.eval.limit=4", "train.eval_max_completion_length=8",
    ]) == 0  # fmt: skip
    apart = [float(found) for found in re.findall(r"differ by (\S+) at most", caplog.text)]
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    rollouts = [log["sampling/logp_difference"] for log in history if "sampling/logp_difference" in log]
    assert len(apart) >= STEPS  # the last one is of the evaluation behind the run
    assert len(rollouts) == STEPS
    assert max(apart + rollouts) < 1e-4
    print(f"transfers: at most {max(apart):.1e} apart; tokens of rollouts: {max(rollouts):.1e} on average")
