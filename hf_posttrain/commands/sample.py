"""`hf-posttrain sample`: a model answers prompts, into a file of JSON lines.

    {"prompt": text, "completion": text, "prompt_ids": [...], "completion_ids": [...], "logps": [...], "stopped": true,
     "messages": [...], "reference": text}

`prompt` and `completion` are texts as the model reads and writes them, with the template's special tokens, without the
one that ends the answer: rows to train on as they are. `logps` are those of completion_ids at the temperature they were
sampled at. `messages` is a prompt that was messages, `reference` the right answer, both where the data have them;
`asked` and `answered` are the texts without special tokens where those are others: for `hf-posttrain judge`.
"""

import argparse
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..capabilities import Feature, conflict
from ..errors import InputError, error_context
from ..models.config import ModelSection, section_from_name
from ..recipe import build as parts
from ..recipe.cli import Parser, find_recipe, number_type, print_output
from ..recipe.read import load_recipe
from ..recipe.sections import Recipe, Source
from .resumable_jsonl import ResumableFile, check_new_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
CHUNK_SIZE = 64
"""Prompts that are answered at once: the random numbers of a piece depend on the seed and its place alone."""
_EXAMPLES = """examples:
  hf-posttrain sample outputs/mine --prompts problems.jsonl --n 8 --out answers.jsonl
  hf-posttrain sample mine.yaml --n 4 --out answers.jsonl
  hf-posttrain sample mine.yaml model.name_or_path=outputs/mine --split eval --temperature 0 --out greedy.jsonl
  hf-posttrain sample outputs/mine --prompts problems.jsonl --url http://localhost:8000 --out answers.jsonl

A command that was killed goes on where it stopped when it is given again.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file; returns the exit code. Raises InputError for arguments and recipes that cannot be used."""
    parser = Parser(
        prog="hf-posttrain sample",
        usage="hf-posttrain sample RECIPE.yaml|MODEL [section.key=value ...] --out FILE [OPTIONS]",
        description="Let a model answer prompts: those of a file, or of a recipe's data, each of them once.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", metavar="RECIPE.yaml or MODEL, section.key=value", nargs="*")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="where the lines go: a new file")
    parser.add_argument("--prompts", metavar="FILE", help="what is answered, in any format with prompts (the recipe's)")
    parser.add_argument("--n", type=number_type(1), help="answers to each prompt (the recipe's, or 1; 1 if greedy)")
    parser.add_argument("--temperature", type=number_type(0, float), help="of sampling; 0: greedy (the recipe's, or 1)")
    parser.add_argument("--max_completion_length", type=number_type(1), help="longest answer (the recipe's, or 256)")
    parser.add_argument("--split", choices=["train", "eval"], default="train", help="of the recipe's data (train)")
    parser.add_argument("--limit", type=number_type(1), help="answer the first so many prompts")
    parser.add_argument("--seed", type=number_type(0), help="of what is drawn (the recipe's, or 42)")
    parser.add_argument("--batch_size", type=number_type(1), help=f"answers at once (those to {CHUNK_SIZE} prompts)")
    parser.add_argument("--url", help="a vLLM server that samples, with the same model as RECIPE or MODEL")
    parser.add_argument("--adapter", metavar="FOLDER", help="with MODEL: a PEFT adapter on top of it")
    parser.add_argument("--images", action="store_true", help="with MODEL: it sees, and rows have pictures")
    parser.add_argument("--apply_chat_template", action="store_true", help="with MODEL: texts become turns of a user")
    parser.add_shared("columns", "chat_template", "chat_template_kwargs")
    given = parser.parse_intermixed_args(argv)
    check_new_file(given.out)
    if given.split == "eval" and given.prompts:
        parser.error("--split is of a recipe's own data, in place of which --prompts was given: drop either")
    if given.columns and not given.prompts:
        parser.error("--columns are those of --prompts: add that, or drop --columns")
    path, overrides = find_recipe(parser, given.words)
    if is_recipe(path):
        for name in ("adapter", "images", "apply_chat_template", "chat_template", "chat_template_kwargs"):
            if getattr(given, name):
                parser.error(f"--{name} is an option of a MODEL: a recipe has it in its sections")
        source: Any = load_recipe(path, overrides)
    else:
        if overrides:
            parser.error(f"{overrides[0]} is an option of a recipe, and {path} is no .yaml file")
        if given.prompts is None:
            parser.error(f"{path} is a model: --prompts names the file with what it shall answer")
        source = section_from_name(path, given.adapter)
        source.images |= given.images
        source.chat_template = given.chat_template
    count = stopped = 0
    for row in sample_rows(source, given):
        count = count + 1
        stopped = stopped + row["stopped"]
    print_output(f"{count} answers, of which {stopped / count:.0%} ended by themselves, are in {given.out}")
    return 0


def is_recipe(name: str) -> bool:
    """Is it a recipe's file, and not a model's folder or hub name?"""
    return Path(name).suffix in (".yaml", ".yml") or Path(name).is_file()


def sample_rows(source: Recipe | ModelSection, given: Any) -> Iterator[dict[str, Any]]:
    """Write the file, then give its rows. given: the options of the command. Raises InputError where the data have no
    prompts.
    """
    asked = _of_recipe(source, given) if isinstance(source, Recipe) else _of_model(source, given)
    from ..generation.exact_match import right_answer
    from ..scoring.layouts import Prompt

    # each once, by its tokens and pictures, with the first right answer that the data have
    first_of: dict[str, dict[str, Any]] = {}
    for row in asked.rows:
        known = first_of.setdefault(same := repr((row["prompt_ids"], row.get("images"))), row)
        first_of[same] = row if right_answer(row) and not right_answer(known) else known
    if repeats := len(asked.rows) - len(first_of):
        said = "%s: %d rows repeat the prompt of another: each prompt is answered once, with the first right answer"
        logger.info(said, asked.where, repeats)
    asked.rows = rows = [*first_of.values()][: given.limit]
    if all(len(row["prompt_ids"]) < 2 for row in rows):
        raise InputError(f"{asked.where}: its rows have no prompts to answer")
    answer = _by_server(asked, given.url) if given.url else _by_model(asked, given.batch_size)
    told = ("prompt_ids", "images", "completion_ids", "label", "asked")  # what is answered, and what rows say of it
    read = _hash([[row.get(name) for name in told] for row in rows])
    key = asked.key() | {"prompts": read, "url": given.url, "batch_size": given.batch_size}
    with ResumableFile(given.out, key) as file:
        for first in file.left(range(0, len(rows), CHUNK_SIZE), "sample"):
            some = rows[first : first + CHUNK_SIZE]
            prompts = [Prompt.of(row) for row in some for _ in range(asked.count)]
            found = answer(prompts, first)
            repeated = [row for row in some for _ in range(asked.count)]
            file.write(asked.written(*each) for each in zip(repeated, *found, strict=True))
        yield from file.finish()


class SamplingJob:
    """What is answered, by which model, and how."""

    def __init__(
        self, section: ModelSection, tokenizer: "PreTrainedTokenizerBase", rows: Any, where: str, switches: Any = None
    ):
        self.section = section
        self.tokenizer = tokenizer
        self.where = where
        self.switches = switches
        self.rows: list[dict[str, Any]] = [row for row in rows if row["prompt_ids"]]
        if lacking := len(rows) - len(self.rows):
            logger.info("%s: %d rows have no prompt: they are left out", where, lacking)
        self.count = 1
        self.temperature = 1.0
        self.longest = 256
        self.seed = 42
        self.low: Any = None  # dtype of autocast
        self.device: Any = None
        self.ends: list[int] = []
        self.weights = ""

    def set(self, given: Any, options: Any, seed: int) -> None:
        """What the command says, or else `options` of a recipe."""
        known = {"num_generations": 1, "temperature": 1.0, "max_completion_length": self.longest} | vars(options)
        self.temperature = known["temperature"] if given.temperature is None else given.temperature
        self.count = given.n or (known["num_generations"] if self.temperature else 1)
        if self.count > 1 and not self.temperature:
            raise InputError(f"--n {self.count} at temperature 0 gives the same answer each time: drop --n")
        self.longest = given.max_completion_length or known["max_completion_length"]
        self.seed = seed if given.seed is None else given.seed

    def key(self) -> dict[str, Any]:
        """All that answers depend on, besides prompts and a server."""
        options: dict[str, Any] = {"n": self.count, "temperature": self.temperature, "seed": self.seed}
        options |= {"max_completion_length": self.longest, "autocast": str(self.low)}
        return {"model": self.section.name_or_path, "weights": self.weights, "ends": self.ends, **options}

    def written(self, row: dict[str, Any], answer: list[int], logps: list[float]) -> dict[str, Any]:
        """A row of the file."""
        from ..data.images import in_json
        from ..rounds.judges.question import answer_row

        made = answer_row(row, answer, self.tokenizer, self.ends)
        made |= {"prompt_ids": row["prompt_ids"], "completion_ids": answer, "logps": [round(logp, 6) for logp in logps]}
        return made | ({"images": [*map(in_json, row["images"])]} if row.get("images") is not None else {})


def _of_recipe(recipe: Recipe, given: Any) -> SamplingJob:
    """The recipe's model, and its prompts or those of a file."""
    trainer_class, config = parts.configure(recipe)
    import datasets
    import torch

    from ..data.row_schema import SUPERVISED
    from ..recipe.datasets import prepare_data
    from .inference import data_options, read_prompts

    if config.world_size > 1:
        raise InputError("sample answers in one process, and was started in several: drop the launcher")
    if not given.prompts and given.split not in dict(recipe.data.splits()):
        raise InputError(f"--split eval: {recipe.where('data')}: the recipe has no data.eval")
    config.keep_asked = True
    tokenizer, _ = parts.check_models(recipe)
    sources = _prompts(given) if given.prompts else dict(recipe.data.splits())[given.split]
    if given.prompts or trainer_class.reads.rows == SUPERVISED:  # which are answered at their end, packed or not
        with nullcontext() if given.prompts else error_context(recipe.where(f"data.{given.split}.path")):
            rows = read_prompts(sources, tokenizer, data_options(**vars(config)))
    else:
        rows = prepare_data(recipe, trainer_class, tokenizer, config)[0][given.split]
    if not isinstance(rows, datasets.Dataset):
        raise InputError(f"{recipe.where('data')}: sample needs data of known length: drop streaming")
    asked = SamplingJob(
        recipe.model, tokenizer, rows, given.prompts or recipe.where("data"), config.chat_template_kwargs
    )
    asked.longest = config.eval_max_completion_length
    asked.set(given, recipe.rounds or config, config.seed)
    asked.device = config.device
    asked.low = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None
    return asked


def _prompts(given: Any) -> Source:
    """The file with the prompts."""
    return Source(given.prompts, columns=dict(given.columns) or None)


def _of_model(section: ModelSection, given: Any) -> SamplingJob:
    """A model by name, and the prompts of a file."""
    from ..models.load import load_tokenizer
    from .inference import data_options, read_prompts

    tokenizer = load_tokenizer(section)
    switches = given.chat_template_kwargs
    options = data_options(apply_chat_template=given.apply_chat_template, chat_template_kwargs=switches)
    rows = read_prompts(_prompts(given), tokenizer, options)
    asked = SamplingJob(section, tokenizer, rows, given.prompts, switches)
    asked.set(given, argparse.Namespace(), 42)
    return asked


def _by_model(asked: SamplingJob, batch_size: int | None) -> Any:
    """What answers prompts and says how likely each token was, here."""
    import torch

    from ..models.score_cache import weights_key
    from .inference import InferenceModel

    model = InferenceModel(asked.section, asked.switches, asked.tokenizer, asked.device)
    asked.ends = model.ends
    asked.weights = weights_key(model.model.state_dict(), sample=64)
    positions = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
    if positions and (longest := max(len(row["prompt_ids"]) for row in asked.rows) + asked.longest) > positions:
        said = "prompts and answers may have %d tokens, and the model has %d positions: lower --max_completion_length"
        logger.warning(said, longest, positions)

    def answer(prompts: list[Any], first: int) -> tuple[list[list[int]], list[list[float]]]:
        with torch.autocast(model.device.type, asked.low) if asked.low else nullcontext():
            seed = asked.seed, first
            found = model.generate(prompts, asked.longest, asked.temperature, seed, batch_size)
            size = batch_size or len(prompts)
            logps = []
            for start in range(0, len(prompts), size):
                part = slice(start, start + size)
                logps += model.logps(prompts[part], found[part], asked.temperature or 1.0)
        return found, logps

    return answer


def _by_server(asked: SamplingJob, url: str) -> Any:
    """The same by a vLLM server, with a request for each prompt."""
    from ..generation import rollout
    from ..generation.completions_client import PLAIN, Server, as_server_error, at_once
    from ..models.load import load_generation_config
    from ..models.policy import terminal_ids_from_config

    if asked.section.images:
        raise InputError(conflict(Feature.SAMPLE_URL, Feature.IMAGES))
    server = Server(url, "--url")
    with as_server_error():
        served = server.card()["id"]
        told = server.settings()
    mode = told["model_config"]["logprobs_mode"] if told else "unknown"
    if mode != "processed_logprobs" and asked.temperature not in (1, 0):
        how = "start it with --logprobs-mode processed_logprobs and VLLM_SERVER_DEV_MODE=1, or sample at temperature 1"
        raise InputError(f"--url: logps of {url} are of another temperature, maybe ({mode}): {how}")
    asked.weights = served
    asked.ends = terminal_ids_from_config(load_generation_config(asked.section), asked.tokenizer, asked.switches)
    shared = {
        "model": served,
        "n": asked.count,
        "temperature": asked.temperature,
        "max_tokens": asked.longest,
        **PLAIN,
        "stop_token_ids": asked.ends,
        "ignore_eos": True,
        "logprobs": 0,
    }

    def answer(prompts: list[Any], first: int) -> tuple[list[list[int]], list[list[float]]]:
        each = prompts[:: asked.count]
        seeds = [rollout.mix_seed(asked.seed, first, number) >> 2 for number in range(len(each))]
        with as_server_error():
            found = at_once(lambda n: server.complete(shared | {"seed": seeds[n]}, each[n]), range(len(each)))
            choices = [choice for choices in found for choice in choices]
            return [one["token_ids"] for one in choices], [one["logprobs"]["token_logprobs"] for one in choices]

    return answer


def _hash(value: object) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(repr(value).encode())
