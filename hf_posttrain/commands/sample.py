"""The command `hf-posttrain sample`, which writes a model's answers to prompts to a file of JSON lines.

    {"prompt": text, "completion": text, "prompt_ids": [...], "completion_ids": [...], "logps": [...], "stopped": true,
     "messages": [...], "reference": text}

`prompt` and `completion` are texts as the model reads and writes them, with the special tokens of the template but
without the terminal token: rows that can be trained on as they are. `logps` are the log-probabilities of
`completion_ids` at the sampling temperature, or at temperature 1 of greedy answers. `messages` is a prompt that
consists of messages, and `reference` the right answer. Both are present only if the data contain them. `asked` and
`answered`, the texts without special tokens, are written only if they differ from `prompt` and `completion`. They are
for `hf-posttrain judge`.
"""

import argparse
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from ..capabilities import Feature, conflict_message
from ..errors import InputError, count_noun, error_context
from ..methods import METHODS
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
    from ..trainer.config import PostTrainConfig

logger = logging.getLogger(__name__)
CHUNK_SIZE = 64
"""Number of prompts per chunk of the file. The random numbers depend only on the seed and the index of the chunk."""
_EXAMPLES = """examples:
  hf-posttrain sample outputs/mine --prompts problems.jsonl --n 8 --out answers.jsonl
  hf-posttrain sample mine.yaml --n 4 --out answers.jsonl
  hf-posttrain sample mine.yaml model.name_or_path=outputs/mine --split eval --temperature 0 --out greedy.jsonl
  hf-posttrain sample outputs/mine --prompts problems.jsonl --url http://localhost:8000 --out answers.jsonl

To resume after an interruption, run the same command again.
"""


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
    )
    parser.add_argument("recipe_or_model", metavar="RECIPE.yaml or MODEL, section.key=value", nargs="*")
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
        help="sampling temperature; 0 decodes greedily (default: that of the recipe's rollouts or rounds, or 1)",
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
        parser.error("--split selects recipe data, which --prompts replaces. Remove one of the two")
    if arguments.columns and not arguments.prompts:
        parser.error("--columns is only valid with --prompts. Add --prompts, or remove --columns")
    path, overrides = find_recipe(parser, arguments.recipe_or_model)
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
        count += 1
        stopped += row["stopped"]
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
    from ..scoring.layouts import Prompt

    rows = job.rows
    sampler: Sampler = ServerSampler(job, arguments.url) if arguments.url else ModelSampler(job, arguments.batch_size)
    columns = ("prompt_ids", "images", "completion_ids", "label", "asked")  # columns that are read or written
    prompts_key = _hash([[row.get(name) for name in columns] for row in rows])
    model_key = {"model": job.section.name_or_path, "weights": sampler.weights_key, "ends": sampler.terminal_ids}
    sampling_key = job.options.key() | {"autocast": str(job.autocast_dtype)}
    other_key = {"prompts": prompts_key, "url": arguments.url, "batch_size": arguments.batch_size}
    with ResumableFile(arguments.out, model_key | sampling_key | other_key) as file:
        for start in file.remaining(range(0, len(rows), CHUNK_SIZE), "sample"):
            chunk = [row for row in rows[start : start + CHUNK_SIZE] for _ in range(job.options.num_answers)]
            answers, logps = sampler.sample([Prompt.from_row(row) for row in chunk], start)
            output_rows = zip(chunk, answers, logps, strict=True)
            file.write(_output_row(*values, job.tokenizer, sampler.terminal_ids) for values in output_rows)
        yield from file.finish()


@dataclass(frozen=True)
class SamplingOptions:
    """Options of the sampling.

    Attributes:
        num_answers: Number of answers per prompt.
        temperature: Sampling temperature. 0 decodes greedily.
        max_new_tokens: Maximum length of an answer in tokens.
        seed: Seed of the sampling.
    """

    num_answers: int = 1
    temperature: float = 1.0
    max_new_tokens: int = 256
    seed: int = 42

    def override(self, arguments: argparse.Namespace) -> Self:
        """Return a copy in which options of the command line replace the values of this object.

        Raises:
            InputError: For several greedy answers to a prompt.
        """
        temperature = self.temperature if arguments.temperature is None else arguments.temperature
        num_answers = arguments.n or (self.num_answers if temperature else 1)
        if num_answers > 1 and not temperature:
            problem = "cannot be combined with temperature 0, at which all answers to a prompt are the same"
            raise InputError(f"--n {num_answers} {problem}. Remove --n")
        max_new_tokens = arguments.max_completion_length or self.max_new_tokens
        seed = self.seed if arguments.seed is None else arguments.seed
        return type(self)(num_answers, temperature, max_new_tokens, seed)

    def key(self) -> dict[str, Any]:
        """Return the options by their names in the header of a partial file."""
        return {
            "n": self.num_answers,
            "temperature": self.temperature,
            "seed": self.seed,
            "max_completion_length": self.max_new_tokens,
        }


@dataclass(frozen=True)
class SamplingJob:
    """Prompts, the model that answers them, and the options of the sampling.

    Attributes:
        section: The model.
        tokenizer: Its tokenizer.
        rows: Prepared rows with different prompts.
        options: Options of the sampling.
        template_kwargs: Options of the chat template.
        device: Device of the model. None selects the GPU if there is one.
        autocast_dtype: Dtype of autocast, or None.
    """

    section: ModelSection
    tokenizer: "PreTrainedTokenizerBase"
    rows: Sequence[dict[str, Any]]
    options: SamplingOptions
    template_kwargs: dict[str, Any] | None = None
    device: "torch.device | None" = None
    autocast_dtype: "torch.dtype | None" = None


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
    tokenizer, _ = build.check_models(recipe)
    sources = _prompt_source(arguments) if arguments.prompts else dict(recipe.data.splits())[arguments.split]
    # Supervised rows are read as unpacked prompts, even if training packs them.
    if arguments.prompts or trainer_class.data_method.rows == SUPERVISED:
        location = recipe.where(f"data.{arguments.split}.path")
        with nullcontext() if arguments.prompts else error_context(location):
            rows = read_prompts(sources, tokenizer, data_options(**vars(config)))
    else:
        rows = prepare_data(recipe, trainer_class, tokenizer, config, keep_asked=True)[0][arguments.split]
    where = recipe.where("data")
    if not isinstance(rows, datasets.Dataset):
        raise InputError(f"{where}: streaming is not supported for prompts. Remove streaming")

    return SamplingJob(
        recipe.model,
        tokenizer,
        _select_prompts(rows, arguments.prompts or where, arguments.limit),
        _options_of_recipe(recipe, config).override(arguments),
        config.chat_template_kwargs,
        config.device,
        torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None,
    )


def _options_of_recipe(recipe: Recipe, config: "PostTrainConfig") -> SamplingOptions:
    """Return the sampling options of a recipe with rounds or rollouts, and otherwise the defaults.

    The `temperature` of other methods divides logits in their loss, and is not a sampling temperature.
    """
    options: Any = recipe.rounds or (config if METHODS[recipe.method].rows.sampled else None)
    if options is None:
        return SamplingOptions(max_new_tokens=config.eval_max_completion_length, seed=config.seed)
    return SamplingOptions(options.num_generations, options.temperature, options.max_completion_length, config.seed)


def _job_from_model(section: ModelSection, arguments: argparse.Namespace) -> SamplingJob:
    """Return a job with a model and the prompts of a file."""
    from ..models.load import load_tokenizer
    from .inference import data_options, read_prompts

    tokenizer = load_tokenizer(section)
    template_kwargs = arguments.chat_template_kwargs
    options = data_options(apply_chat_template=arguments.apply_chat_template, chat_template_kwargs=template_kwargs)
    rows = read_prompts(_prompt_source(arguments), tokenizer, options)
    prompts = _select_prompts(rows, arguments.prompts, arguments.limit)
    return SamplingJob(section, tokenizer, prompts, SamplingOptions().override(arguments), template_kwargs)


def _prompt_source(arguments: argparse.Namespace) -> Source:
    """Return the source of the file with prompts."""
    return Source(arguments.prompts, columns=dict(arguments.columns) or None)


def _select_prompts(rows: "datasets.Dataset", where: str, limit: int | None) -> list[dict[str, Any]]:
    """Return the first `limit` rows with different prompts.

    Rows with the same tokens and images have the same prompt. Their first right answer in the data is kept.

    Args:
        rows: Prepared rows.
        where: Location of the data, for messages.
        limit: Number of prompts. None keeps all.

    Raises:
        InputError: For rows without prompts.
    """
    from ..generation.exact_match import correct_answer

    prompt_rows = [row for row in rows if row["prompt_ids"]]
    if missing := len(rows) - len(prompt_rows):
        logger.info("%s: %s without a prompt skipped", where, count_noun(missing, "row"))

    unique: dict[str, dict[str, Any]] = {}
    for row in prompt_rows:
        key = repr((row["prompt_ids"], row.get("images")))
        first_row = unique.setdefault(key, row)
        unique[key] = row if correct_answer(row) and not correct_answer(first_row) else first_row
    if duplicates := len(prompt_rows) - len(unique):
        message = "%s: %s skipped. The reference of a prompt is its first right answer"
        logger.info(message, where, count_noun(duplicates, "duplicate prompt"))

    selected = [*unique.values()][:limit]
    if all(len(row["prompt_ids"]) < 2 for row in selected):
        raise InputError(f"{where}: the rows have no prompts to answer. Use data in a format with prompts")
    return selected


class Sampler(Protocol):
    """Samples answers to prompts."""

    terminal_ids: list[int]
    weights_key: str
    """Hash of the weights, or the name of a server's model."""

    def sample(self, prompts: "list[Prompt]", start: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the token ids of the answers, and their log-probabilities.

        Args:
            prompts: Each prompt as often as it is answered.
            start: Index of the first row among all rows, from which the random numbers are derived.
        """
        ...


class ModelSampler:
    """Sampler with the model in this process.

    Args:
        job: The job.
        batch_size: Number of answers generated at once. None means all answers of a chunk.
    """

    def __init__(self, job: SamplingJob, batch_size: int | None) -> None:
        from ..models.score_cache import weights_key
        from .inference import InferenceModel

        self.options = job.options
        self.autocast_dtype = job.autocast_dtype
        self.batch_size = batch_size
        self.inference = InferenceModel(job.section, job.template_kwargs, job.tokenizer, job.device)
        self.terminal_ids = self.inference.terminal_ids
        self.weights_key = weights_key(self.inference.model.state_dict(), sample=64)

        positions = getattr(self.inference.model.config.get_text_config(), "max_position_embeddings", None)
        length = max(len(row["prompt_ids"]) for row in job.rows) + job.options.max_new_tokens
        if positions and length > positions:
            message = "a prompt with its answer may have %d tokens, but the model has only %d positions. %s"
            logger.warning(message, length, positions, "Lower --max_completion_length")

    def sample(self, prompts: "list[Prompt]", start: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the token ids of the answers, and their log-probabilities."""
        import torch

        options = self.options
        dtype = self.autocast_dtype
        with torch.autocast(self.inference.device.type, dtype) if dtype else nullcontext():
            seed = (options.seed, start)
            answers = self.inference.generate(
                prompts, options.max_new_tokens, options.temperature, seed, self.batch_size
            )
            size = self.batch_size or len(prompts)
            logps: list[list[float]] = []
            for batch_start in range(0, len(prompts), size):
                batch = slice(batch_start, batch_start + size)
                logps += self.inference.logps(prompts[batch], answers[batch], options.temperature or 1.0)
        return answers, logps


class ServerSampler:
    """Sampler with a vLLM server, which gets one request per prompt.

    Args:
        job: The job.
        url: URL of the server.

    Raises:
        InputError: For images, an unreachable server, and a server whose log-probabilities are at another temperature.
    """

    def __init__(self, job: SamplingJob, url: str) -> None:
        from ..generation.completions_client import UNMODIFIED_SAMPLING, Server, as_server_error
        from ..models.load import load_generation_config
        from ..models.policy import terminal_ids_from_config

        if job.section.images:
            raise InputError(conflict_message(Feature.SAMPLE_URL, Feature.IMAGES))
        self.options = job.options
        self.server = Server(url, "--url")
        with as_server_error():
            self.weights_key: str = self.server.model_info()["id"]
            settings = self.server.vllm_config()
        mode = settings["model_config"]["logprobs_mode"] if settings else "unknown"
        if mode != "processed_logprobs" and job.options.temperature not in (1, 0):
            problem = (
                f"logprobs_mode of {url} must be processed_logprobs at a temperature other than 1, and it is {mode}"
            )
            fix = (
                "Start vLLM with --logprobs-mode processed_logprobs and VLLM_SERVER_DEV_MODE=1, or sample at "
                "temperature 1"
            )
            raise InputError(f"--url: {problem}. {fix}")

        generation_config = load_generation_config(job.section)
        self.terminal_ids = terminal_ids_from_config(generation_config, job.tokenizer, job.template_kwargs)
        self.request = {
            "model": self.weights_key,
            "n": job.options.num_answers,
            "temperature": job.options.temperature,
            "max_tokens": job.options.max_new_tokens,
            **UNMODIFIED_SAMPLING,
            "stop_token_ids": self.terminal_ids,
            "ignore_eos": True,
            "logprobs": 0,
        }

    def sample(self, prompts: "list[Prompt]", start: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the token ids of the answers, and their log-probabilities."""
        from ..generation import rollout
        from ..generation.completions_client import as_server_error, run_concurrently

        unique_prompts = prompts[:: self.options.num_answers]
        seeds = [rollout.mix_seed(self.options.seed, start, number) >> 2 for number in range(len(unique_prompts))]

        def complete(number: int) -> list[dict[str, Any]]:
            return self.server.complete(self.request | {"seed": seeds[number]}, unique_prompts[number])

        with as_server_error():
            responses = run_concurrently(complete, range(len(unique_prompts)))
            choices = [choice for response in responses for choice in response]
            answers = [choice["token_ids"] for choice in choices]
            logps = [choice["logprobs"]["token_logprobs"] for choice in choices]
            return answers, logps


def _output_row(
    row: dict[str, Any],
    answer: list[int],
    logps: list[float],
    tokenizer: "PreTrainedTokenizerBase",
    terminal_ids: list[int],
) -> dict[str, Any]:
    """Return a row of the file."""
    from ..data.images import image_to_json
    from ..rounds.judges.question import answer_row

    output = answer_row(row, answer, tokenizer, terminal_ids)
    output |= {
        "prompt_ids": row["prompt_ids"],
        "completion_ids": answer,
        "logps": [round(logp, 6) for logp in logps],
    }
    if row.get("images") is not None:
        output |= {"images": [*map(image_to_json, row["images"])]}
    return output


def _hash(value: object) -> str:
    """Return a hash of the representation of a value."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(repr(value).encode())
