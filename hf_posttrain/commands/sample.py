"""`hf-posttrain sample RECIPE`: a recipe's model answers the prompts of its data, into a file of JSON lines.

    {"prompt": text, "completion": text, "prompt_ids": [...], "completion_ids": [...], "logps": [...], "stopped": true}

Texts are as the model reads and writes them, with the template's special tokens, without the one that ends the answer:
rows to train on as they are. `logps` are those of completion_ids at the temperature they were sampled at.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..recipe import build as parts
from ..recipe.cli import Parser, find_recipe, tell
from ..recipe.read import load_recipe
from ..recipe.sections import Recipe

PIECE = 64
"""Prompts that are answered at once: the random numbers of a piece depend on the seed and its place alone."""
_EXAMPLES = """examples:
  hf-posttrain sample mine.yaml --n 4 --out answers.jsonl
  hf-posttrain sample mine.yaml model.name_or_path=outputs/mine --split eval --temperature 0 --out greedy.jsonl
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file; returns the exit code. Raises InputError for arguments and recipes that cannot be used."""
    parser = Parser(
        prog="hf-posttrain sample",
        usage="hf-posttrain sample RECIPE.yaml [section.key=value ...] --out FILE [OPTIONS]",
        description="Let a recipe's model answer the prompts of its data, each of them once.",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("words", metavar="RECIPE.yaml, section.key=value", nargs="*")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="where the lines go: a new file")
    parser.add_argument("--n", type=int, help="answers to each prompt (train.num_generations, or 1)")
    parser.add_argument("--temperature", type=float, help="of sampling; 0: greedy (train.temperature, or 1)")
    parser.add_argument("--max_completion_length", type=int, help="longest answer in tokens (the recipe's, or 256)")
    parser.add_argument("--split", choices=["train", "eval"], default="train", help="of the recipe's data (train)")
    given = parser.parse_intermixed_args(argv)
    for name, least in (("n", 1), ("max_completion_length", 1), ("temperature", 0)):
        if (value := getattr(given, name)) is not None and not least <= value < float("inf"):
            parser.error(f"--{name} must be a number from {least} on, not {value}")
    if given.out.exists():
        parser.error(f"--out: {given.out} is there already: name another file, or delete it")
    path, overrides = find_recipe(parser, given.words)
    recipe = load_recipe(path, overrides)
    unfinished = given.out.with_name(given.out.name + ".part")
    try:
        opened = unfinished.open("w", encoding="utf-8")
    except OSError as error:
        parser.error(f"--out: {given.out} cannot be written ({error.strerror})")
    try:
        with opened as file:
            count = stopped = 0
            for row in sample(recipe, given.split, given.n, given.temperature, given.max_completion_length):
                print(json.dumps(row, ensure_ascii=False), file=file)
                count, stopped = count + 1, stopped + row["stopped"]
        unfinished.rename(given.out)
    finally:
        unfinished.unlink(missing_ok=True)
    tell(f"{count} answers, of which {stopped / count:.0%} ended by themselves, are in {given.out}")
    return 0


def sample(
    recipe: Recipe, split: str, count: int | None, temperature: float | None, longest: int | None
) -> Iterator[dict[str, Any]]:
    """The rows of the file. None: what the recipe says. Raises InputError where the data have no prompts."""
    trainer_class, config = parts.configure(recipe)
    import datasets
    import torch
    from tqdm import tqdm

    from ..data.images import in_json, read_by
    from ..generation import rollout
    from ..models.load import load_model
    from ..models.prepare import find_terminal_ids
    from ..recipe.datasets import prepare_data
    from ..scoring.forward import enable_scoring
    from ..scoring.layouts import Prompt
    from ..scoring.pictures import Pictures

    if config.world_size > 1:
        raise InputError("sample answers in one process, and was started in several: drop the launcher")
    if split not in dict(recipe.data.given()):
        raise InputError(f"--split eval: {recipe.where('data')}: the recipe has no data.eval")
    known = vars(config)
    each: int = count or known.get("num_generations", 1)
    temperature = known.get("temperature", 1.0) if temperature is None else temperature
    most: int = longest or known.get("max_completion_length", config.eval_max_completion_length)
    tokenizer, _ = parts.check_models(recipe)
    rows = prepare_data(recipe, trainer_class, tokenizer, config)[0][split]
    if not isinstance(rows, datasets.Dataset):
        raise InputError(f"{recipe.where('data')}: sample needs data of known length: drop streaming")
    # each once, by its tokens and pictures
    written = {repr((row["prompt_ids"], row.get("images"))): Prompt.of(row) for row in rows if len(row["prompt_ids"])}
    prompts = [*written.values()]
    if all(len(prompt) < 2 for prompt in prompts):
        raise InputError(f"{recipe.where('data')}: the rows of data.{split} have no prompts to answer")
    model = load_model(recipe.model, trainable=False, device=config.device).to(config.device)
    enable_scoring(model)
    reader = read_by(tokenizer)
    see = Pictures.of(model, reader) if reader else None
    ends = find_terminal_ids(model, tokenizer, config.chat_template_kwargs)
    half = torch.float16 if config.fp16 else torch.bfloat16
    low = torch.autocast(config.device.type, half) if config.bf16 or config.fp16 else nullcontext()
    for first in tqdm(range(0, len(prompts), PIECE), "sampling", unit="piece"):
        repeated = [prompt for prompt in prompts[first : first + PIECE] for _ in range(each)]
        with rollout.seeded(config.device, config.seed, first), low:
            given = most, ends, tokenizer.pad_token_id, temperature or None
            answers = rollout.generate(model, repeated, *given, vocabulary=len(tokenizer), see=see)
            logps = log_probabilities(model, repeated, answers, temperature or 1.0, len(tokenizer), see)
        for prompt, answer, own in zip(repeated, answers, logps, strict=True):
            stopped = answer[-1] in ends
            yield {
                "prompt": tokenizer.decode(prompt), "completion": tokenizer.decode(answer[:-1] if stopped else answer),
                "prompt_ids": list(prompt), "completion_ids": answer, "logps": own, "stopped": stopped,
                **({"images": [*map(in_json, prompt.pictures)]} if see else {}),
            }  # fmt: skip


def log_probabilities(
    model: Any, prompts: Sequence, answers: Sequence, temperature: float, vocabulary: int, see: Any = None
) -> list[list[float]]:
    """Of each answer's tokens, behind its prompt, among the first `vocabulary` ids."""
    import torch
    from accelerate.utils import send_to_device

    from ..scoring.forward import score, targets
    from ..scoring.head import LogProb
    from ..scoring.layouts import Branch, Example, collate

    pairs = zip(prompts, answers, strict=True)
    examples = [Example(prompt, [Branch(ids)], pictures=prompt.pictures) for prompt, ids in pairs]
    batch = send_to_device(collate(examples, "padded", pictures=see), model.device)
    with torch.no_grad():
        values = score(model, batch, LogProb(targets(batch), temperature, vocabulary=vocabulary))["value"]
    return [[round(value, 6) for value in values[batch["owner"] == n].tolist()] for n in range(len(answers))]
