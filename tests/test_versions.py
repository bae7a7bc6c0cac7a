"""The versions that the package says it was tested with, and what it says of newer ones."""

import logging
import re
from pathlib import Path

from models_for_tests import tiny_model
from training_for_tests import token_rows, trainer_for

from hf_posttrain.generation import rollout, sampler_selection
from hf_posttrain.monitoring import versions
from hf_posttrain.trainer import base


def test_the_tested_versions_are_those_of_constraints_txt():
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", Path("constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    assert {name: pins[name] for name in versions.TESTED} == versions.TESTED


def test_a_newer_version_is_told_at_the_start_and_an_older_one_is_not(tmp_path, monkeypatch, caplog):
    trainer = trainer_for("sft", tiny_model(), token_rows("sft"), tmp_path)
    monkeypatch.setattr(versions, "TESTED", {"transformers": "5.1.0", "torch": "99.0", "no-such-package": "1.0"})
    monkeypatch.setattr(base, "newer_than_tested", versions.newer_than_tested.__wrapped__)
    with caplog.at_level(logging.INFO):
        trainer.train()
    [said] = [text for text in caplog.messages if "newer than the tested versions" in text]
    assert re.fullmatch(r"newer than the tested versions: transformers \S+ \(5\.1\.0\)", said)


def test_a_slower_way_to_sample_is_told_with_its_reason(monkeypatch, caplog):
    monkeypatch.setattr(sampler_selection, "cache_argument", lambda kind: "")
    with caplog.at_level(logging.INFO):
        rollout.generate(tiny_model(), [[1, 2, 3]], 3, [], 256)
    assert "which is slower: its forward has no argument with a known name for a cache" in caplog.text
