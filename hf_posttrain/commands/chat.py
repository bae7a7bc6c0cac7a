"""The command `hf-posttrain chat MODEL`, a conversation with a model or an adapter in a terminal or through a pipe.

Messages of the command itself are printed in brackets. Heavy imports are deferred, so that --help is quick.
"""

import argparse
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, join_names, name_hint
from ..models.config import ModelSection, section_from_name
from ..recipe.cli import Parser, number_type, print_output

if TYPE_CHECKING:
    from torch import Tensor

_EXAMPLE = 'example: hf-posttrain chat outputs/mine --compare --seed 1 --system "Answer in one sentence."'
_CONTROL = re.compile(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]")  # control characters, which are printed escaped
_HELP = {
    "help": "List the commands",
    "clear": "Forget the conversation, except for the system turn",
    "system": "TEXT: Set the system turn; without TEXT, remove it",
    "undo": "Remove the last line and its answer",
    "retry": "Generate another answer to the last line",
    "temperature": "X: Set the sampling temperature; 0 decodes greedily",
    "compare": "Turn the additional answer without the adapter on or off",
    "save": "FILE: Append the conversation to a file of training rows",
}
"""Command -> its line in the output of /help."""
_NO_TURNS = "the conversation is empty"


def main(argv: Sequence[str] | None = None) -> int:
    """Converse until the input ends, and return the exit code.

    Raises:
        InputError: For invalid arguments, and for a model that cannot be loaded.
    """
    description = "Talk to a model in the terminal. It answers each line; /help lists the commands."
    parser = Parser(prog="hf-posttrain chat", description=description, epilog=_EXAMPLE)
    parser.add_argument("model", metavar="MODEL", help="folder, such as a run's output_dir, or hub name")
    parser.add_argument("--adapter", metavar="FOLDER", type=Path, help="saved adapter to load on top of MODEL")
    parser.add_argument("--system", metavar="TEXT", default="", help="content of the system turn (default: none)")
    parser.add_argument(
        "--temperature", type=number_type(0, float), default=0.7, help="sampling temperature; 0 decodes greedily (0.7)"
    )
    parser.add_argument(
        "--max_new_tokens", type=number_type(1), default=512, help="maximum length of an answer in tokens (512)"
    )
    parser.add_argument(
        "--seed", type=number_type(0), default=secrets.randbits(32), help="seed of the sampling (default: random)"
    )
    parser.add_argument("--compare", action="store_true", help="answer twice, without the adapter and with it")
    parser.add_shared("chat_template", "chat_template_kwargs")
    parser.add_argument(
        "--plain", action="store_true", help="use no chat template; the model continues each line as plain text"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    arguments = parser.parse_args(argv)

    section = section_from_name(arguments.model, arguments.adapter)
    section.chat_template = arguments.chat_template
    section.trust_remote_code = arguments.trust_remote_code
    if arguments.compare and not section.adapter:
        parser.error(f"--compare requires an adapter, and {arguments.model} is a full model. Add --adapter FOLDER")

    try:
        run_conversation(Conversation(section, arguments))
    except BrokenPipeError:  # the reader of the output has exited, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def run_conversation(conversation: "Conversation") -> None:
    """Answer lines until the input ends or a line is /exit. Lines that do not come from a terminal are echoed."""
    if is_terminal := sys.stdin.isatty():
        with suppress(ImportError):  # enables line editing
            import readline  # noqa: F401

    try:
        while (line := read_line().rstrip()).split(" ")[0] != "/exit":
            if not is_terminal:
                print_output(line)
            name, _, argument = line.partition(" ")
            if name in COMMANDS:
                message = COMMANDS[name](conversation, argument.strip())
            elif name.startswith("/"):
                message = f"there is no command {name}{name_hint(name, [*COMMANDS, '/exit'])}"
            else:
                message = line and conversation.respond(line)
            if message:
                print_output(f"({message})")
    except EOFError:
        pass
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise InputError(f"input or output is not valid {error.encoding} text ({error.reason})") from error
    print_output("")


def read_line() -> str:
    """Return the next line. Ctrl-C discards a line that is being typed."""
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            print_output("\n(type /exit or press Ctrl-D to quit)")


class AnswerStreamer:
    """Streamer for `generate` that prints an answer while it is generated, and stores its text.

    Args:
        decode: Function that decodes token ids to text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode = decode
        self.text = ""
        self.printed = 0
        """Number of characters of the text that were printed."""
        self.ids: list[int] | None = None
        """Token ids of the answer, or None before the prompt, which `generate` streams first."""

    def put(self, ids: "Tensor") -> None:
        """Print the text of the next token."""
        self.ids = [] if self.ids is None else [*self.ids, *ids.flatten().tolist()]
        self.text = self.decode(self.ids)
        self.show(self.text.rstrip("\ufffd"))  # a character may consist of several tokens

    def show(self, text: str) -> None:
        """Print the part of the text that was not printed yet."""
        print(_CONTROL.sub(_escape, text[self.printed :]), end="", flush=True)
        self.printed = max(self.printed, len(text))

    def end(self) -> None:
        """Print the rest of an answer that is complete or was interrupted."""
        self.show(f"{self.text}\n")


def _escape(match: re.Match[str]) -> str:
    """Return a control character as an escape sequence."""
    return repr(match[0])[1:-1]


class Conversation:
    """A model and the turns of a conversation with it.

    With --plain the lines are independent: each one is continued as plain text.

    Args:
        section: The model.
        arguments: The parsed command line.
    """

    def __init__(self, section: ModelSection, arguments: argparse.Namespace) -> None:
        from ..models import load
        from .inference import InferenceModel

        section.images |= load.is_vision_only(load.check_model(section))
        self.inference = InferenceModel(section, arguments.chat_template_kwargs)
        self.arguments = arguments
        self.answer_count = 0
        """Number of answers so far, which is part of the seed, so that answers differ."""
        self.turns: list[dict[str, str]] = []
        """Turns of the user and of the assistant, alternating."""
        self.truncated: set[str] = set()
        """Answers that did not end with a terminal token."""

        config = self.inference.model.config.get_text_config()
        self.positions: int = getattr(config, "max_position_embeddings", None) or sys.maxsize
        self.plain = arguments.plain or not self.inference.tokenizer.chat_template
        if self.plain and arguments.system:
            raise InputError("--system requires a chat template, which plain text does not have. Remove --system")
        if arguments.chat_template_kwargs:
            self._check_template_kwargs(arguments.chat_template_kwargs)
        if self.plain and not arguments.plain:
            print_output("(the model has no chat template. It continues each line as plain text, as with --plain)")
        self.system(arguments.system)

    def _check_template_kwargs(self, options: Mapping[str, object]) -> None:
        """Report the options that the chat template does not read. Raise InputError without a template."""
        from ..data.chat import template_options

        if self.plain:
            problem = "--chat_template_kwargs requires a chat template, which plain text does not have"
            raise InputError(f"{problem}. Remove --chat_template_kwargs")
        if unread := sorted(options.keys() - template_options(self.inference.tokenizer)):
            print_output(f"(the chat template does not read {join_names(unread)} of --chat_template_kwargs)")

    def respond(self, text: str) -> str:
        """Add a turn of the user and the answer to it, and return an empty string.

        A turn that cannot be tokenized is not added, and the problem is returned.
        """
        question = {"role": "user", "content": text}
        try:
            ids = self.encode_prompt(question)
        except InputError as error:
            return str(error)
        self.answer_count += 1
        if self.arguments.compare:
            print_output("[without adapter]")
            with self.inference.model.disable_adapter():
                self.generate(ids)
            print_output("[with adapter]")
        self.turns += [question, {"role": "assistant", "content": self.generate(ids)}]
        return ""

    def encode_prompt(self, question: dict[str, str]) -> list[int]:
        """Return the token ids of the conversation up to the question.

        The oldest exchanges are dropped if they leave too little space for the answer.

        Raises:
            InputError: For a question that is too long on its own, and for messages that the template rejects.
        """
        from ..data.chat import ChatTemplate, encode
        from ..data.messages import check_unicode

        check_unicode(question["content"], "the line")
        tokenizer = self.inference.tokenizer
        turns = self.turns
        template = ChatTemplate(tokenizer, None, self.arguments.chat_template_kwargs)

        # max_new_tokens are reserved for the answer, but at most a quarter of the positions
        limit = self.positions - min(self.arguments.max_new_tokens, self.positions // 4)
        while True:
            text = question["content"] if self.plain else template.prompt_text([*self.system_turn, *turns, question])
            [ids] = encode(tokenizer, [text])
            if len(ids) <= limit or self.plain or not turns:
                break
            turns = turns[2:]

        if len(ids) >= self.positions:
            problem = f"the prompt has {len(ids)} tokens, but the model has only {self.positions} positions"
            raise InputError(f"{problem}. Enter a shorter line")
        if dropped := len(self.turns) - len(turns):
            problem = f"the conversation exceeds the model's {self.positions} positions"
            print_output(f"({problem}. The oldest {dropped} turns were dropped)")
        self.turns = turns
        return ids

    def generate(self, ids: list[int]) -> str:
        """Return the model's answer, which is printed while it is generated. Ctrl-C interrupts it.

        Raises:
            InputError: For logits that are NaN or infinite.
        """
        import torch

        from ..generation import hf_generate, rollout

        inference = self.inference
        tokenizer = inference.tokenizer
        image_ids = tuple(inference.vision.reader.token_ids) if inference.vision else ()
        sampler = rollout.TokenSampler(self.arguments.temperature or None, len(tokenizer), image_ids)
        streamer = AnswerStreamer(inference.text)
        prompt = torch.tensor([ids], device=inference.device)
        max_new_tokens = min(self.arguments.max_new_tokens, self.positions - len(ids))
        try:
            with rollout.seeded(inference.device, self.arguments.seed, self.answer_count):
                hf_generate.generate(
                    inference.model,
                    prompt,
                    torch.ones_like(prompt),
                    max_new_tokens,
                    inference.terminal_ids,
                    tokenizer.pad_token_id,
                    sampler,
                    {"streamer": streamer},
                )
        except KeyboardInterrupt:
            streamer.end()
            self.truncated.add(streamer.text)
        except RuntimeError as error:
            if str(error) != hf_generate.NONFINITE_LOGITS:
                raise
            raise InputError(f"{self.arguments.model}: {error}") from error
        else:
            if streamer.ids and streamer.ids[-1] not in inference.terminal_ids:
                print_output(f"(truncated after {max_new_tokens} tokens)")
                self.truncated.add(streamer.text)
        return streamer.text

    # ---- commands: each receives the rest of its line, and returns a message

    def help(self, _: str) -> str:
        """Return the list of commands."""
        lines = [f"/{name:<12} {text}" for name, text in _HELP.items()]
        return "\n ".join([*lines, "/exit         Quit, as Ctrl-D does; Ctrl-C interrupts an answer"])

    def clear(self, _: str) -> str:
        """Forget the conversation, except for the system turn."""
        self.turns.clear()
        return "the conversation was cleared"

    def system(self, text: str) -> str:
        """Set the system turn, or remove it if there is no text."""
        if text and self.plain:
            return "plain text has no system turn. A system turn requires a chat template"
        self.system_turn = [{"role": "system", "content": text}] if text else []
        return "the system turn was set" if self.system_turn else "there is no system turn"

    def undo(self, _: str) -> str:
        """Remove the last line and its answer."""
        if not self.turns:
            return _NO_TURNS
        self.turns = self.turns[:-2]
        return "the last line and its answer were removed"

    def retry(self, _: str) -> str:
        """Generate another answer to the last line."""
        if not self.turns:
            return _NO_TURNS
        question = self.turns[-2]["content"]
        self.turns = self.turns[:-2]
        return self.respond(question)

    def temperature(self, text: str) -> str:
        """Set the sampling temperature."""
        is_number = re.fullmatch(r"\d+\.?\d*|\.\d+", text)
        if is_number:
            self.arguments.temperature = float(text)
        problem = "" if is_number or not text else f"{text} is not a number of at least 0, such as 0.7. "
        return f"{problem}The temperature is {self.arguments.temperature:g}"

    def compare(self, _: str) -> str:
        """Turn the additional answer without the adapter on or off."""
        if not self.inference.section.adapter:
            return "there is no adapter to compare with"
        self.arguments.compare = not self.arguments.compare
        return f"compare: {'on' if self.arguments.compare else 'off'}"

    def save(self, name: str) -> str:
        """Append the conversation to a file of training rows."""
        if not name:
            return "/save requires a file. Enter /save FILE"
        if not self.turns:
            return _NO_TURNS
        rows: list[dict[str, object]] = [{"messages": self.system_turn + self.turns}]
        if self.plain:  # the lines are independent
            texts = [turn["content"] for turn in self.turns]
            pairs = zip(texts[::2], texts[1::2], strict=True)
            rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
        try:
            with Path(name).expanduser().open("a+", encoding="utf-8") as file:
                file.seek(0)
                if (text := file.read()) and not _has_columns(text.partition("\n")[0], rows[0]):
                    return f"{name} does not have the columns {{{', '.join(rows[0])}}}. Choose another file"
                separator = "" if text.endswith("\n") or not text else "\n"
                file.write(separator + "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
        except (OSError, UnicodeDecodeError) as error:
            return f"{name} cannot be written: {getattr(error, 'strerror', None) or error}"

        truncated = sum(turn["content"] in self.truncated for turn in self.turns[1::2])
        note = f". Its answers that did not end ({truncated}) would be trained as if they had" if truncated else ""
        return f"added to {name}{note}"


def _has_columns(line: str, row: Mapping[str, object]) -> bool:
    """Return whether a line of JSON is a row with the same columns."""
    with suppress(ValueError, AttributeError):
        return bool(json.loads(line).keys() == row.keys())
    return False


COMMANDS: dict[str, Callable[[Conversation, str], str]] = {f"/{name}": getattr(Conversation, name) for name in _HELP}
"""Name of each command with its slash -> method of the conversation."""
