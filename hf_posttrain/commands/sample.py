"""The command `hf-posttrain sample`, which writes a model's answers to prompts to a file of JSON lines.

    {"prompt": text, "completion": text, "prompt_ids": [...], "completion_ids": [...], "logps": [...], "stopped": true,
     "messages": [...], "reference": text}

`prompt` and `completion` are texts as the model reads and writes them, with the special tokens of the template but
without the terminal token: rows that can be trained on as they are. `logps` are the log-probabilities of
`completion_ids` at the sampling temperature. `messages` is a prompt that consists of messages, and `reference` the
right answer, both where the data have them. `asked` and `answered` are the texts without special tokens where these
differ, for `hf-posttrain judge`.
"""

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..capabilities import Feature, conflict_message
from ..errors import InputError, error_context
from ..models.config import ModelSection, section_from_name
from ..recipe import build
from ..recipe.cli import Parser, find_recipe, number_type, print_output
from ..recipe.read import load_recipe
from ..recipe.sections import Recipe, Source
from .resumable_jsonl import ResumableFile, check_new_file

if TYPE_CHECKING:
    import datasets
    import torch
    from transformers import PreTrainedTokenizerBase

    from ..scoring.layouts import Prompt

logger = logging.getLogger(__name__)
CHUNK_SIZE = 64
"""Number of prompts per chunk of the file. The random numbers of a chunk depend only on the seed and its position."""
_EXAMPLES = """examples:
  hf-posttrain sample outputs/mine --prompts problems.jsonl --n 8 --out answers.jsonl
  hf-posttrain sample mine.yaml --n 4 --out answers.jsonl
  hf-posttrain sample mine.yaml model.name_or_path=outputs/mine --split eval --temperature 0 --out greedy.jsonl
  hf-posttrain sample outputs/mine --prompts problems.jsonl --url http://localhost:8000 --out answers.jsonl

To resume after an interruption, run the same command again.
"""

if TYPE_CHECKING:
    AnswerFunction = Callable[[list[Prompt], int], tuple[list[list[int]], list[list[float]]]]
    """(prompts, number of the first prompt) -> token ids and log-probabilities of the answers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file, and return the exit code.

    Raises:
        InputError: For invalid arguments and recipes.
    """
    parser = Parser(
        prog="hf-posttrain sample",
        usage="hf-posttrain sample RECIPE.yaml|MODEL [section.key=value ...] --out FILE [OPTIONS]",
        description="Generate answers to the prompts of a file or of a recipe's data. Equal prompts are answered once.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", metavar="RECIPE.yaml or MODEL, section.key=value", nargs="*")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="file to write, which must not exist")
    parser.add_argument(
        "--prompts", metavar="FILE", help="prompts, in any format with prompts (default: the data of the recipe)"
    )
    parser.add_argument(
        "--n", type=number_type(1), help="number of answers per prompt (default: that of the recipe, or 1; greedy: 1)"
    )
    parser.add_argument(
        "--temperature",
        type=number_type(0, float),
        help="sampling temperature; 0 decodes greedily (default: that of the recipe, or 1)",
    )
    parser.add_argument(
        "--max_completion_length",
        type=number_type(1),
        help="maximum length of an answer in tokens (default: that of the recipe, or 256)",
    )
    parser.add_argument(
        "--split", choices=["train", "eval"], default="train", help="split of the recipe's data to answer (train)"
    )
    parser.add_argument("--limit", metavar="N", type=number_type(1), help="answer only the first N prompts")
    parser.add_argument("--seed", type=number_type(0), help="seed of the sampling (default: that of the recipe, or 42)")
    parser.add_argument(
        "--batch_size",
        type=number_type(1),
        help=f"number of answers generated at once (default: the answers to {CHUNK_SIZE} prompts)",
    )
    parser.add_argument("--url", help="vLLM server to sample from, which serves the same model as RECIPE or MODEL")
    parser.add_argument("--adapter", metavar="FOLDER", help="with MODEL: PEFT adapter to load on top of it")
    parser.add_argument("--images", action="store_true", help="with MODEL: load a vision-language model, for images")
    parser.add_argument(
        "--apply_chat_template", action="store_true", help="with MODEL: convert prompts of plain text to a user turn"
    )
    parser.add_shared("columns", "chat_template", "chat_template_kwargs")
    arguments = parser.parse_intermixed_args(argv)

    check_new_file(arguments.out)
    if arguments.split == "eval" and arguments.prompts:
        parser.error("--split cannot be combined with --prompts, which replaces the recipe's data. Remove one of them")
    if arguments.columns and not arguments.prompts:
        parser.error("--columns is only valid with --prompts. Add --prompts, or remove --columns")
    path, overrides = find_recipe(parser, arguments.words)
    if is_recipe(path):
        for name in ("adapter", "images", "apply_chat_template", "chat_template", "chat_template_kwargs"):
            if getattr(arguments, name):
                parser.error(f"--{name} is only valid with MODEL. Set the option in the recipe")
        source: Recipe | ModelSection = load_recipe(path, overrides)
    else:
        if overrides:
            problem = f"{overrides[0]} is only valid with a recipe, and {path} is not a .yaml file"
            parser.error(f"{problem}. Remove it, or give a recipe")
        if arguments.prompts is None:
            parser.error(f"MODEL requires --prompts, and {path} is a model. Add --prompts FILE")
        source = section_from_name(path, arguments.adapter)
        source.images |= arguments.images
        source.chat_template = arguments.chat_template

    count = 0
    stopped = 0
    for row in sample_rows(source, arguments):
        count = count + 1
        stopped = stopped + row["stopped"]
    print_output(f"wrote {arguments.out}; answers: {count}, of which {stopped / count:.0%} ended with a terminal token")
    return 0


def is_recipe(name: str) -> bool:
    """Return whether a name is the file of a recipe, and not a model's folder or hub name."""
    return Path(name).suffix in (".yaml", ".yml") or Path(name).is_file()


def sample_rows(source: Recipe | ModelSection, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Write the file, and yield its rows.

    Args:
        source: The recipe or the model.
        arguments: The parsed command line.

    Raises:
        InputError: For data without prompts.
    """
    job = _job_from_recipe(source, arguments) if isinstance(source, Recipe) else _job_from_model(source, arguments)
    from ..generation.exact_match import correct_answer
    from ..scoring.layouts import Prompt

    # Rows with the same tokens and images are answered once, with the first right answer in the data.
    unique: dict[str, dict[str, Any]] = {}
    for row in job.rows:
        key = repr((row["prompt_ids"], row.get("images")))
        first = unique.setdefault(key, row)
        unique[key] = row if correct_answer(row) and not correct_answer(first) else first
    if duplicates := len(job.rows) - len(unique):
        message = "%s: each prompt is answered once, with its first right answer. Rows with the prompt of another: %d"
        logger.info(message, job.where, duplicates)
    job.rows = rows = [*unique.values()][: arguments.limit]
    if all(len(row["prompt_ids"]) < 2 for row in rows):
        raise InputError(f"{job.where}: the rows have no prompts to answer. Use data in a format with prompts")

    answer = _answer_by_server(job, arguments.url) if arguments.url else _answer_by_model(job, arguments.batch_size)
    columns = ("prompt_ids", "images", "completion_ids", "label", "asked")  # columns that are read or written
    prompts_key = _hash([[row.get(name) for name in columns] for row in rows])
    file_key = job.key() | {"prompts": prompts_key, "url": arguments.url, "batch_size": arguments.batch_size}
    with ResumableFile(arguments.out, file_key) as file:
        for start in file.remaining(range(0, len(rows), CHUNK_SIZE), "sample"):
            chunk = [row for row in rows[start : start + CHUNK_SIZE] for _ in range(job.num_answers)]
            answers, logps = answer([Prompt.from_row(row) for row in chunk], start)
            file.write(job.output_row(*values) for values in zip(chunk, answers, logps, strict=True))
        yield from file.finish()


class SamplingJob:
    """Prompts, the model that answers them, and the options of the sampling.

    Args:
        section: The model.
        tokenizer: Its tokenizer.
        rows: Prepared rows, of which those without a prompt are left out.
        where: Location of the data, for messages.
        template_kwargs: Options of the chat template.
    """

    def __init__(
        self,
        section: ModelSection,
        tokenizer: "PreTrainedTokenizerBase",
        rows: "datasets.Dataset",
        where: str,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.section = section
        self.tokenizer = tokenizer
        self.where = where
        self.template_kwargs = template_kwargs
        self.rows: list[dict[str, Any]] = [row for row in rows if row["prompt_ids"]]
        if left_out := len(rows) - len(self.rows):
            logger.info("%s: rows without a prompt are left out: %d", where, left_out)
        self.num_answers = 1
        """Number of answers per prompt."""
        self.temperature = 1.0
        self.max_new_tokens = 256
        self.seed = 42
        self.autocast_dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        self.terminal_ids: list[int] = []
        self.weights_key = ""
        """Hash of the weights, or the name of a server's model."""

    def configure(self, arguments: argparse.Namespace, options: object, seed: int) -> None:
        """Set the sampling options from the command line, or else from the recipe.

        Args:
            arguments: The parsed command line.
            options: The recipe's Config or section `rounds`, or an empty namespace without a recipe.
            seed: The seed of the recipe, or the default.
        """
        defaults: dict[str, Any] = {
            "num_generations": 1,
            "temperature": 1.0,
            "max_completion_length": self.max_new_tokens,
        }
        defaults |= vars(options)
        self.temperature = defaults["temperature"] if arguments.temperature is None else arguments.temperature
        self.num_answers = arguments.n or (defaults["num_generations"] if self.temperature else 1)
        if self.num_answers > 1 and not self.temperature:
            problem = "cannot be combined with temperature 0, at which all answers to a prompt are the same"
            raise InputError(f"--n {self.num_answers} {problem}. Remove --n")
        self.max_new_tokens = arguments.max_completion_length or defaults["max_completion_length"]
        self.seed = seed if arguments.seed is None else arguments.seed

    def key(self) -> dict[str, Any]:
        """Return everything that the answers depend on, except for prompts and server."""
        options: dict[str, Any] = {"n": self.num_answers, "temperature": self.temperature, "seed": self.seed}
        options |= {"max_completion_length": self.max_new_tokens, "autocast": str(self.autocast_dtype)}
        model = {"model": self.section.name_or_path, "weights": self.weights_key, "ends": self.terminal_ids}
        return model | options

    def output_row(self, row: dict[str, Any], answer: list[int], logps: list[float]) -> dict[str, Any]:
        """Return a row of the file."""
        from ..data.images import image_to_json
        from ..rounds.judges.question import answer_row

        output = answer_row(row, answer, self.tokenizer, self.terminal_ids)
        output |= {
            "prompt_ids": row["prompt_ids"],
            "completion_ids": answer,
            "logps": [round(logp, 6) for logp in logps],
        }
        if row.get("images") is not None:
            output |= {"images": [*map(image_to_json, row["images"])]}
        return output


def _job_from_recipe(recipe: Recipe, arguments: argparse.Namespace) -> SamplingJob:
    """Return a job with the recipe's model, and the prompts of the recipe or of a file."""
    trainer_class, config = build.configure(recipe)
    import datasets
    import torch

    from ..data.row_schema import SUPERVISED
    from ..recipe.datasets import prepare_data
    from .inference import data_options, read_prompts

    if config.world_size > 1:
        raise InputError("sample must run in one process. Start it without a launcher")
    if not arguments.prompts and arguments.split not in dict(recipe.data.splits()):
        raise InputError(f"{recipe.where('data')}: --split eval requires data.eval. Add it to the recipe")
    config.keep_asked = True  # type: ignore[attr-defined]
    tokenizer, _ = build.check_models(recipe)
    sources = _prompt_source(arguments) if arguments.prompts else dict(recipe.data.splits())[arguments.split]
    # supervised rows are answered at their end, whether they are packed or not
    if arguments.prompts or trainer_class.data_method.rows == SUPERVISED:
        place = recipe.where(f"data.{arguments.split}.path")
        with nullcontext() if arguments.prompts else error_context(place):
            rows = read_prompts(sources, tokenizer, data_options(**vars(config)))
    else:
        rows = prepare_data(recipe, trainer_class, tokenizer, config)[0][arguments.split]
    where = recipe.where("data")
    if not isinstance(rows, datasets.Dataset):
        raise InputError(f"{where}: streaming is not supported for prompts. Remove streaming")

    job = SamplingJob(recipe.model, tokenizer, rows, arguments.prompts or where, config.chat_template_kwargs)
    job.max_new_tokens = config.eval_max_completion_length
    job.configure(arguments, recipe.rounds or config, config.seed)
    job.device = config.device
    job.autocast_dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None
    return job


def _prompt_source(arguments: argparse.Namespace) -> Source:
    """Return the source of the file with prompts."""
    return Source(arguments.prompts, columns=dict(arguments.columns) or None)


def _job_from_model(section: ModelSection, arguments: argparse.Namespace) -> SamplingJob:
    """Return a job with a model and the prompts of a file."""
    from ..models.load import load_tokenizer
    from .inference import data_options, read_prompts

    tokenizer = load_tokenizer(section)
    template_kwargs = arguments.chat_template_kwargs
    options = data_options(apply_chat_template=arguments.apply_chat_template, chat_template_kwargs=template_kwargs)
    rows = read_prompts(_prompt_source(arguments), tokenizer, options)
    job = SamplingJob(section, tokenizer, rows, arguments.prompts, template_kwargs)
    job.configure(arguments, argparse.Namespace(), 42)
    return job


def _answer_by_model(job: SamplingJob, batch_size: int | None) -> "AnswerFunction":
    """Return a function that samples from the model in this process."""
    import torch

    from ..models.score_cache import weights_key
    from .inference import InferenceModel

    inference = InferenceModel(job.section, job.template_kwargs, job.tokenizer, job.device)
    job.terminal_ids = inference.terminal_ids
    job.weights_key = weights_key(inference.model.state_dict(), sample=64)
    positions = getattr(inference.model.config.get_text_config(), "max_position_embeddings", None)
    length = max(len(row["prompt_ids"]) for row in job.rows) + job.max_new_tokens
    if positions and length > positions:
        message = "a prompt with its answer may have %d tokens, but the model has only %d positions. %s"
        logger.warning(message, length, positions, "Lower --max_completion_length")

    def answer(prompts: "list[Prompt]", start: int) -> tuple[list[list[int]], list[list[float]]]:
        dtype = job.autocast_dtype
        with torch.autocast(inference.device.type, dtype) if dtype else nullcontext():
            seed = (job.seed, start)
            answers = inference.generate(prompts, job.max_new_tokens, job.temperature, seed, batch_size)
            size = batch_size or len(prompts)
            logps = []
            for first in range(0, len(prompts), size):
                batch = slice(first, first + size)
                logps += inference.logps(prompts[batch], answers[batch], job.temperature or 1.0)
        return answers, logps

    return answer


def _answer_by_server(job: SamplingJob, url: str) -> "AnswerFunction":
    """Return a function that samples from a vLLM server, with one request per prompt."""
    from ..generation import rollout
    from ..generation.completions_client import UNMODIFIED_SAMPLING, Server, as_server_error, run_concurrently
    from ..models.load import load_generation_config
    from ..models.policy import terminal_ids_from_config

    if job.section.images:
        raise InputError(conflict_message(Feature.SAMPLE_URL, Feature.IMAGES))
    server = Server(url, "--url")
    with as_server_error():
        model_name = server.model_info()["id"]
        settings = server.vllm_config()
    mode = settings["model_config"]["logprobs_mode"] if settings else "unknown"
    if mode != "processed_logprobs" and job.temperature not in (1, 0):
        problem = f"logprobs_mode of {url} must be processed_logprobs at a temperature other than 1, and it is {mode}"
        fix = (
            "Start vLLM with --logprobs-mode processed_logprobs and VLLM_SERVER_DEV_MODE=1, or sample at temperature 1"
        )
        raise InputError(f"--url: {problem}. {fix}")

    job.weights_key = model_name
    job.terminal_ids = terminal_ids_from_config(load_generation_config(job.section), job.tokenizer, job.template_kwargs)
    request = {
        "model": model_name,
        "n": job.num_answers,
        "temperature": job.temperature,
        "max_tokens": job.max_new_tokens,
        **UNMODIFIED_SAMPLING,
        "stop_token_ids": job.terminal_ids,
        "ignore_eos": True,
        "logprobs": 0,
    }

    def answer(prompts: "list[Prompt]", start: int) -> tuple[list[list[int]], list[list[float]]]:
        unique_prompts = prompts[:: job.num_answers]
        seeds = [rollout.mix_seed(job.seed, start, number) >> 2 for number in range(len(unique_prompts))]

        def complete(number: int) -> list[dict[str, Any]]:
            return server.complete(request | {"seed": seeds[number]}, unique_prompts[number])

        with as_server_error():
            responses = run_concurrently(complete, range(len(unique_prompts)))
            choices = [choice for response in responses for choice in response]
            answers = [choice["token_ids"] for choice in choices]
            logps = [choice["logprobs"]["token_logprobs"] for choice in choices]
            return answers, logps

    return answer


def _hash(value: object) -> str:
    """Return a hash of the representation of a value."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(repr(value).encode())
