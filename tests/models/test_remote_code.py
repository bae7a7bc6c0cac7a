"""Code that comes with a model runs only where `trust_remote_code` is set, whatever is typed on the terminal."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from models_for_tests import tiny_model
from tokenizers_for_tests import byte_tokenizer
from training_for_tests import quick

import hf_posttrain

PACKAGE = Path(hf_posttrain.__file__).parent


def loaders():
    """(file: line, call) of every call that chooses a class by the files of a model."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                chooses = "Auto" in owner or owner.startswith(("_auto_class(", "without_video_processor("))
                if node.func.attr in ("from_pretrained", "from_config") and chooses:
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node


def test_every_loader_says_whether_code_may_run():
    """Without the argument transformers asks on the terminal, and runs the code if the answer is yes."""
    found = dict(loaders())
    assert len(found) >= 8
    silent = [
        place for place, call in found.items()
        if not {"trust_remote_code", None} & {keyword.arg for keyword in call.keywords}  # None: **options
    ]  # fmt: skip
    assert not silent


def hostile(folder, mark):
    """A model's folder whose tokenizer and config come with code, which leaves a mark when it runs."""
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    leaves_mark = f"open({str(mark)!r}, 'a').write('x')\n"
    code = f"{leaves_mark}from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"
    (folder / "tokenization_own.py").write_text(code)
    code = f"{leaves_mark}from transformers import Qwen3Config\nclass OwnConfig(Qwen3Config): model_type = 'own'\n"
    (folder / "configuration_own.py").write_text(code)
    tokenizer = {"AutoTokenizer": [None, "tokenization_own.Own"]}
    changes = {
        "tokenizer_config.json": {"auto_map": tokenizer, "tokenizer_class": "Own"},
        "config.json": {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}},
    }
    for name, values in changes.items():
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | values))
    return str(folder)


CASES = {
    "model": lambda clean, bad: {"method": "sft", "model": {"name_or_path": bad}},
    "teacher": lambda clean, bad: {"method": "kd", "model": {"name_or_path": clean}, "teacher": {"name_or_path": bad}},
    "teacher's own tokenizer": lambda clean, bad: {
        "method": "kd", "model": {"name_or_path": clean}, "teacher": {"name_or_path": bad, "own_tokenizer": True},
    },
    "judge": lambda clean, bad: {
        "method": "dpo", "model": {"name_or_path": clean},
        "rounds": {"count": 1, "judge": {"by": "model", "name": bad}},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", quick(among=CASES))
def test_no_answer_on_the_terminal_runs_code_of_a_folder(case, tmp_path):
    mark, clean = tmp_path / "ran", tmp_path / "clean"
    tiny_model().save_pretrained(clean)
    byte_tokenizer().save_pretrained(clean)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b", "answer": "b"}\n' * 4)
    train = {"output_dir": str(tmp_path / "out"), "max_steps": 1, "per_device_train_batch_size": 2}
    recipe = CASES[case](str(clean), hostile(tmp_path / "bad", mark))
    recipe |= {"data": {"train": {"path": str(tmp_path / "rows.jsonl")}}, "train": train}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-m", "hf_posttrain.run", str(tmp_path / "recipe.yaml"), "--check"]
    done = subprocess.run(command, input="y\n" * 9, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "inspect the repository content at" in done.stderr  # it was refused for its code, and for nothing else
    assert "Do you wish to run" not in done.stdout + done.stderr
    assert not mark.exists()
