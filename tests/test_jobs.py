"""The Dockerfile, and the jobs of docs/jobs: what they name exists, and their commands can be parsed or run."""

import re
import runpy
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from hub_for_tests import small
from test_docs import command

from hf_posttrain.recipe.read import load_recipe

REPOSITORY = Path(__file__).parents[1]
JOBS = REPOSITORY / "docs" / "jobs"
UV = JOBS / "sft_uv.py"


def instructions():
    """(instruction, arguments) of the Dockerfile."""
    text = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.partition(" ")
        yield name, rest


def test_the_image_has_the_whole_package_and_a_user_of_its_own():
    found = [*instructions()]
    copied = [word for name, rest in found if name == "COPY" for word in rest.split()[:-1]]
    assert all((REPOSITORY / word).exists() for word in copied)
    setup = ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    shipped = {word.split("/")[0] for files in setup["options.data_files"].values() for word in files.split()}
    assert len(shipped) > 2
    assert {"hf_posttrain", *shipped} <= {*copied}
    names = [name for name, _ in found]
    assert names.index("USER") > max(n for n, name in enumerate(names) if name == "RUN")
    assert dict(found)["USER"] == "1000:1000"
    assert dict(found)["ENTRYPOINT"] == '["hf-posttrain"]'
    installs = [part for name, rest in found if name == "RUN" for part in re.findall(r"pip install [^;&]*", rest)]
    first, *others = installs
    assert first.startswith("pip install \"$(grep '^torch==' constraints.txt)\" ")
    assert len(others) == 3
    assert all("-c constraints.txt" in part for part in others)
    base = next(rest for name, rest in found if name == "ARG")
    assert re.fullmatch(r"BASE=python:\d+\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)


def test_skypilot_starts_the_launcher(hub_home):
    job = yaml.safe_load((JOBS / "skypilot.yaml").read_text(encoding="utf-8"))
    activate, line = job["run"].replace("\\\n", " ").strip().splitlines()
    assert activate in job["setup"]
    for name, value in {**job["envs"], "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}.items():
        line = line.replace(f"${name}", value)
    line = re.sub(r"\$\(\(.*?\)\)", "16", line)
    line = re.sub(r'"\$\(.*?\)"', "10.0.0.1", line)
    assert "$" not in line
    command(line, runs=False)
    command(job["setup"].splitlines()[-1].removeprefix("uv "), runs=False)


def test_kubernetes_starts_torchrun(hub_home):
    service, job = yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text(encoding="utf-8"))
    [container] = job["spec"]["template"]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    recipe = next(word for word in words if word.endswith(".yaml"))
    command(" ".join(words).replace(recipe, recipe.removeprefix("/opt/hf_posttrain/")), runs=False)
    # the address of the rendezvous is the first pod's name in the service
    name = job["metadata"]["name"]
    assert f"--rdzv-endpoint={name}-0.{service['metadata']['name']}:29500" in words
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert f"--nnodes={job['spec']['completions']}" in words
    volumes = {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_file_for_uv_trains(hub_home, monkeypatch):
    text = UV.read_text(encoding="utf-8")
    [block] = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", text, re.M)
    needs = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.M))
    setup = ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    [requirement] = needs["dependencies"]
    assert requirement.partition(" @ ")[0] == setup["metadata"]["name"]
    assert needs["requires-python"] == setup["options"]["python_requires"]
    Path("uv.yaml").write_text(runpy.run_path(str(UV))["RECIPE"])
    recipe = load_recipe("uv.yaml")
    monkeypatch.setattr(sys, "argv", [str(UV), *small(recipe), "train.output_dir=out"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(UV), run_name="__main__")
    assert ended.value.code == 0
    assert Path("out", "adapter_model.safetensors").is_file()
