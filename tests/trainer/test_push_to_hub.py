"""push_to_hub with huggingface_hub's client and a stand-in for the Hub: what a run uploads."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hub_for_tests import small
from hub_server_for_tests import HubServer
from safetensors.torch import load as load_tensors

from hf_posttrain.recipe.read import load_recipe

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("recipe", ["sft_lora", "kd"])
def test_a_run_uploads_its_model_with_a_card(recipe, hub_home):
    overrides = [*small(load_recipe(f"recipes/{recipe}.yaml")), "train.output_dir=out", "train.push_to_hub=true"]
    overrides += ["train.hub_model_id=someone/tuned", "train.hub_private_repo=true"]
    with HubServer() as hub:
        changed = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "hf_posttrain.run", f"recipes/{recipe}.yaml", *overrides],
            env=os.environ | changed, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert hub.created[0] == {"name": "tuned", "organization": "someone", "visibility": "private"}
    files = hub.commits["someone/tuned"]
    weights = "adapter_model.safetensors" if recipe == "sft_lora" else "model.safetensors"
    assert {weights, "README.md", "tokenizer.json", "recipe.yaml"} <= {*files}
    assert load_tensors(files[weights])
    assert not [name for name in files if name.startswith(("checkpoint-", "_"))]
    card = yaml.safe_load(io.StringIO(files["README.md"].decode().split("---")[1]))
    assert {"hf_posttrain", load_recipe(f"recipes/{recipe}.yaml").method} <= {*card["tags"]}
    if recipe == "sft_lora":  # the model of a full run is a folder here, and no name of the Hub
        assert card["base_model"] == load_recipe(f"recipes/{recipe}.yaml").model.name_or_path
    assert card.get("library_name") == ("peft" if recipe == "sft_lora" else "transformers")
    assert b"hf_test" not in b"".join(files.values())  # no secret
    assert Path("out", "README.md").read_bytes() == files["README.md"]
