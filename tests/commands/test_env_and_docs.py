"""`hf-posttrain env` and `hf-posttrain docs`."""

import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from hf_posttrain import __version__, run
from hf_posttrain.commands import docs, env
from hf_posttrain.errors import InputError

DOCS = Path(__file__).parents[2] / "docs"


def test_versions_devices_and_settings_are_printed(capsys, monkeypatch):
    hidden = {
        "HF_TOKEN": "hf_secret", "TRACKIO_SERVER_URL": "http://host:7860/?write_token=secret",
        "TRACKIO_OTHER_URL": "http://host:7860/#write_token=secret", "WANDB_API_KEY_FILE": "secret",
        "TRACKIO_WEBHOOK_URL": "https://hooks.example/secret", "HF_ENDPOINT": "https://me:secret@mirror.example",
        "WANDB_X_EXTRA_HTTP_HEADERS": '{"Authorization": "Bearer secret"}', "WANDB_X_OTHER": "Bearer secret",
        "WANDB_HTTP_PROXY": "user:secret", "WANDB_NOTES": "secret", "HF_PASSPHRASE": "secret",
        "HF_MIRROR_WITH_PATH": "https://mirror.example/secret/simple", "HF_ACCESSTOKEN": "secret",
        "WANDB_X_PAIR": "name=secret", "HF_MIRRORS": "a;https://mirror.example/secret",
    }  # fmt: skip
    shown = {
        "HF_MIRROR": "https://mirror.example", "OMP_NUM_THREADS": "3", "HF_HOME": "/data/hub", "WANDB_MODE": "offline",
        "TOKENIZERS_PARALLELISM": "false", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128",
        "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_SOCKET_IFNAME": "^lo,docker0", "TORCH_LOGS": "+dynamo",
        "OMP_PLACES": "{0:4}", "NCCL_IB_HCA": "==mlx5_0:1", "PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1]",
        "TORCH_CUDA_ARCH_LIST": "8.0;9.0", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    }  # fmt: skip
    for name, value in (hidden | shown).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(env, "TESTED", {"torch": version("torch").partition("+")[0], "transformers": "5.1.0"})
    assert run.main(["env"]) == 0
    page = capsys.readouterr().out
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in page.splitlines() if "  " in line)
    assert facts["hf_posttrain"] == __version__
    assert facts["torch"] == version("torch")
    assert facts["transformers"] == f"{version('transformers')} (tested with 5.1.0)"
    assert facts.items() >= shown.items()
    assert {facts[name] for name in hidden} == {"(set)"}
    assert "secret" not in page
    assert facts["trl"] == (version("trl") if find_spec("trl") else "not installed")
    assert any(name.startswith("GPU") for name in facts)


def test_the_help_and_the_page_name_every_command(capsys):
    with pytest.raises(SystemExit):
        run.main(["--help"])
    listed = re.findall(r"^  hf-posttrain ([a-z]+) +", capsys.readouterr().out, re.MULTILINE)
    page = (DOCS / "reference/commands.md").read_text(encoding="utf-8")
    table = re.findall(r"^\|.*\| [a-z]", page.partition("## `recipes`")[0], re.MULTILINE)
    documented = re.findall(r"`([a-z]+)[ `]", " ".join(table))
    assert {*listed} == run.COMMANDS.keys()
    assert {*documented} >= run.COMMANDS.keys()


def test_every_page_is_listed_with_its_title_and_printed(capsys):
    assert run.main(["docs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    pages = sorted(DOCS.rglob("*.md"))
    assert [line.split()[0] for line in lines] == [page.relative_to(DOCS).with_suffix("").as_posix() for page in pages]
    assert [line for line in lines if re.fullmatch(r"reference/kto +KTO.*", line)]
    for page in pages:
        assert docs.main([page.relative_to(DOCS).as_posix()]) == 0
        assert capsys.readouterr().out.rstrip() == page.read_text(encoding="utf-8").rstrip()


def test_a_topic_is_the_name_of_a_page(capsys):
    assert docs.main(["kto"]) == 0
    assert capsys.readouterr().out.rstrip() == (DOCS / "reference/kto.md").read_text(encoding="utf-8").rstrip()
    with pytest.raises(InputError, match=r"have the name 'teachers'\. Use concepts/teachers or reference/teachers$"):
        docs.main(["teachers"])
    with pytest.raises(InputError, match=r"there is no page 'guides/distill'; did you mean 'guides/distil'\?$"):
        docs.main(["guides/distill"])
    with pytest.raises(InputError, match=r"there is no page 'trl'\. Similar pages: guides/from_trl$"):
        docs.main(["trl"])


def test_an_installation_without_pages_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(docs, "package_folders", lambda: [tmp_path])
    with pytest.raises(InputError, match="has no documentation"):
        docs.main([])
