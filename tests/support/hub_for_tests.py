"""The hub, offline: a folder in which the names of hub models and data sets are folders themselves, relative to it.

from_pretrained("Qwen/Qwen3-0.6B") and load_dataset("openai/gsm8k", "main") take a folder of that name where there is
one: a test that makes this the current directory runs recipes, commands and code as they stand.

    make_hub       that folder: models, data sets, what the quickstart leaves, and links to the repository's own folders
    ROWS           hub name of a data set: number -> a row with its columns
    small          overrides that make a run of any recipe one of seconds
"""

import json
from pathlib import Path

from models_for_tests import tiny_model
from tokenizers_for_tests import QWEN3, byte_tokenizer, merging_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from vision_for_tests import pictures, processor_of, seeing

from hf_posttrain.methods import METHODS

REPOSITORY = Path(__file__).parents[2]
MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B")
SEEING = "Qwen/Qwen3-VL-2B-Instruct"
OTHER = "HuggingFaceTB/SmolLM3-3B"
"""A model with a tokenizer of its own."""


def turns(*contents):
    """A conversation that the user begins."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


def seen(role, said, *more):
    """A turn of text, and perhaps of places for pictures, as parts."""
    return {"role": role, "content": [*more, {"type": "text", "text": said}]}


ROWS = {
    "HuggingFaceH4/llava-instruct-mix-vsft": lambda n: {
        "messages": [seen("user", f"What is {n}?", {"type": "image", "text": None}), seen("assistant", f"{n}.")],
        "images": [pictures()[n % 2]],
    },
    "HuggingFaceH4/rlaif-v_formatted": lambda n: {
        "prompt": [seen("user", f"What is {n}?", {"type": "image", "text": None})], "images": [pictures()[n % 2]],
        "chosen": [seen("assistant", f"{n}.")], "rejected": [seen("assistant", "A cat.")],
    },
    "openai/gsm8k": lambda n: {"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"},
    "trl-lib/ultrafeedback_binarized": lambda n: {
        "chosen": turns(f"Say {n}.", f"{n}!"), "rejected": turns(f"Say {n}.", f"Not {n}."), "score_chosen": 8.0,
        "score_rejected": 3.5,
    },
    "trl-lib/kto-mix-14k": lambda n: {
        "prompt": turns(f"Say {n}."), "completion": turns("", f"{n}")[1:], "label": n % 2 == 0
    },
}  # fmt: skip
CONFIGURATION = {"openai/gsm8k": "main"}
"""Of the data sets on the hub that have named ones."""


def make_hub(folder: Path) -> None:
    """Fill `folder`."""
    for seed, name in enumerate(MODELS):
        tiny_model("qwen3", seed).save_pretrained(folder / name)
        byte_tokenizer(QWEN3).save_pretrained(folder / name)
    seeing("qwen3_vl")[0].save_pretrained(folder / SEEING)
    processor_of("qwen3_vl").save_pretrained(folder / SEEING)
    tiny_model("qwen3", 9, vocab_size=500).save_pretrained(folder / OTHER)
    merging_tokenizer().save_pretrained(folder / OTHER)
    for stage in ("teacher", "student", "opd"):
        shape = REPOSITORY / "recipes" / "tiny" / ("teacher" if stage == "teacher" else "student")
        saved = folder / "quickstart" / stage
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape)).save_pretrained(saved)
        AutoTokenizer.from_pretrained(shape).save_pretrained(saved)
    for name, row in ROWS.items():
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            (folder / name / f"{split}.jsonl").write_text("\n".join(json.dumps(row(n)) for n in range(6)))
        files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
        configuration = CONFIGURATION.get(name, "default")
        card = f"---\nconfigs:\n- config_name: {configuration}\n  data_files:\n{files}---\n"
        (folder / name / "README.md").write_text(card)


def at_home(folder: Path, hub: Path) -> None:
    """Links in `folder` to the hub's names, to what the quickstart leaves and to the repository's files."""
    for name in ("Qwen", "HuggingFaceTB", "HuggingFaceH4", "openai", "trl-lib"):
        (folder / name).symlink_to(hub / name)
    for name in ("recipes", "accelerate_configs", "benchmarks", "Makefile", "setup.cfg"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "axolotl.yaml").symlink_to(REPOSITORY / "tests" / "commands" / "foreign" / "axolotl_chat.yaml")
    (folder / "outputs").mkdir()
    (folder / "outputs" / "quickstart").symlink_to(hub / "quickstart")


def even_bytes(prompts, completions, references):
    """A judge: the bytes of an answer that are even, so that a random model's answers differ."""
    return [sum(ord(c) % 2 == 0 for c in text) for text in completions]


def small_rounds() -> list[str]:
    """Overrides for a recipe in rounds: a random model's answers are never right, and do not end."""
    judge = "rounds.judge={by: function, name: 'hub_for_tests:even_bytes'}"
    return [judge, "rounds.max_completion_length=8", "rounds.pair.unfinished=true"]


def small(recipe) -> list[str]:
    """Overrides for one short step on CPU of the recipe, whatever its size."""
    overrides = [
        "train.max_steps=1", "train.use_cpu=true", "train.per_device_train_batch_size=2", "train.logging_steps=1",
        "train.gradient_accumulation_steps=1", "train.save_strategy=no", "train.eval_strategy=no",
        "train.max_length=96", "train.eval_on_start=false",
    ]  # fmt: skip
    overrides += ["train.max_completion_length=8"] if METHODS[recipe.method].rows.sampled else []
    overrides += small_rounds() if recipe.rounds else []
    overrides += ["train.eval_max_completion_length=8"] if recipe.train.get("eval_exact_match") else []
    if str(recipe.train.get("output_dir", "")).startswith("outputs/quickstart"):  # that is the hub
        overrides += ["train.output_dir=outputs/not_the_hub"]
    limits = {"train": 16, "eval": 4}
    parts = {name: getattr(recipe.data, name) for name in limits}
    return overrides + [f"data.{name}.limit={limits[name]}" for name, part in parts.items() if hasattr(part, "limit")]
