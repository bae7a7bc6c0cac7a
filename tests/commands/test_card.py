"""hf-posttrain card: dataset cards of rows, and their upload with the Hub's client to a stand-in for the Hub."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from sysconfig import get_path

import pytest
import yaml
from datasets import load_dataset
from hub_server_for_tests import HubServer
from runs_for_tests import RECIPE, leave_run

from hf_posttrain import run
from hf_posttrain.commands import card
from hf_posttrain.errors import InputError

DOCS = Path(__file__).parents[2] / "docs"
ROWS = [
    {"prompt": f"<s>{n // 2}+1=", "completion": "2" * (3_000 if n == 0 else 1), "score": n / 4, "stopped": n != 0,
     "completion_ids": [5, 6], "messages": [{"role": "user", "content": "1+1=" * 501}]}
    for n in range(5)
]  # fmt: skip


def write_rows(file, rows=ROWS):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def front_matter(text):
    return yaml.safe_load(text.split("---")[1])


def test_a_card_describes_the_rows(tmp_path, capsys):
    file = write_rows(tmp_path / "rows" / "answers.jsonl")
    assert run.main(["card", str(file), "--model", "Qwen/Qwen3-0.6B"]) == 0
    text = (tmp_path / "rows" / "README.md").read_text(encoding="utf-8")
    assert "README.md" in capsys.readouterr().out
    assert front_matter(text) == {
        "task_categories": ["text-generation"], "size_categories": ["n<1K"], "tags": ["hf_posttrain", "synthetic"],
        "configs": [{"config_name": "default", "data_files": ["answers.jsonl"]}],
    }  # fmt: skip
    for line in (
        "- Rows: 5", "- Prompts: 3", "- Mean score: 0.5", "- Answers that ended: 80.0%",
        "Rows with answers of [Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B), written by hf_posttrain.",
    ):  # fmt: skip
        assert line in text.splitlines()
    example = json.loads(text.split("```json")[1].split("```")[0])
    assert example == {name: value for name, value in ROWS[0].items() if name != "completion_ids"} | {
        "completion": "2" * 2_000 + "...",
        "messages": [{"role": "user", "content": "1+1=" * 500 + "..."}],
    }
    code = text.split("```python")[1].split("```")[0]
    found = {"load_dataset": load_dataset}
    here = Path.cwd()
    os.chdir(file.parent)
    try:
        exec(code, found)
    finally:
        os.chdir(here)
    assert len(found["rows"]) == 5


def test_a_card_of_a_run_in_rounds_describes_all_rounds(tmp_path):
    rounds = {"count": 2, "num_generations": 4, "temperature": 1.0, "judge": {"by": "exact_match"}}
    folder = leave_run(tmp_path / "in_rounds", recipe=RECIPE | {"rounds": rounds})
    for number in (10, 2):
        write_rows(folder / "_rounds" / f"{number}.jsonl", [row | {"used": 1} for row in ROWS])
    assert card.main([str(folder)]) == 0
    text = (folder / "_rounds" / "README.md").read_text(encoding="utf-8")
    assert front_matter(text)["configs"][0]["data_files"] == ["2.jsonl", "10.jsonl"]
    assert "- Rows: 10" in text.splitlines()
    assert (
        "training in 2 rounds on the model's own answers: 4 answers to each prompt at temperature 1, judged by" in text
    )
    assert "| `used` | 1 if the answer was trained" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"prompt": "a"}\n[1]\n', r"rows\.jsonl: line 2: a row must be an object such as .*, found \[1\]"),
     ("a,b\n", r"rows\.jsonl: line 1 is not valid JSON"), ("", r"rows\.jsonl has no rows"), (None, "does not exist")],
)  # fmt: skip
def test_what_is_no_file_of_rows_is_an_error(content, message, tmp_path):
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=message):
        card.main([str(file)])
    assert not (tmp_path / "README.md").exists()


def test_a_table_is_an_error(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,completion\na,b\n")
    with pytest.raises(InputError, match=r"rows\.csv is a table\. Give a file of JSON lines"):
        card.main([str(tmp_path / "rows.csv")])


def test_a_run_without_rounds_has_no_rows(tmp_path):
    folder = leave_run(tmp_path / "run")
    with pytest.raises(InputError, match="has no rows of rounds in _rounds"):
        card.main([str(folder)])


def test_a_card_is_not_overwritten(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(InputError, match=r"README\.md exists"):
        card.main([str(file)])
    assert (tmp_path / "README.md").read_text() == "mine"


UPLOADS = re.findall(r"^hf (upload .*)$", (DOCS / "reference/recipes.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("line", UPLOADS)
def test_the_commands_of_the_page_upload_rows_and_their_card(line, tmp_path):
    _, name, folder, *_ = words = shlex.split(line)
    file = write_rows(tmp_path / folder / "answers.jsonl")
    assert card.main([str(file)]) == 0
    with HubServer() as hub:
        changed = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}
        client = Path(get_path("scripts"), "hf")
        done = subprocess.run(
            [client, *words], cwd=tmp_path, env=os.environ | changed, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert hub.created[0]["type"] == "dataset"
    files = hub.commits[name]
    assert {name: (file.parent / name).read_bytes() for name in ("answers.jsonl", "README.md")} == files
