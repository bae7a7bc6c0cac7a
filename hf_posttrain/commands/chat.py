"""`hf-posttrain chat MODEL`: talk to a model, or to an adapter on its base, in a terminal or through a pipe.
What the command itself has to say stands in brackets. Heavy imports come late, so that --help is quick.
"""

import argparse
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import InputError, join_names, name_hint
from ..models.config import ModelSection, section_from_name
from ..recipe.cli import Parser, number_type, print_output

_EXAMPLE = 'example: hf-posttrain chat outputs/mine --compare --seed 1 --system "Answer in one sentence."'
_CONTROL = re.compile(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]")  # a terminal would obey it: it is shown written out


def main(argv: Sequence[str] | None = None) -> int:
    """Talk until the input ends; returns the exit code. Raises InputError for arguments and models of no use."""
    described = "Talk to a model in the terminal: it answers each line, and /help lists what else a line may be."
    parser = Parser(prog="hf-posttrain chat", description=described, epilog=_EXAMPLE, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="a folder, such as a run's output_dir, or a hub name")
    parser.add_argument("--adapter", metavar="FOLDER", type=Path, help="a saved adapter, to put on MODEL")
    parser.add_argument("--system", metavar="TEXT", default="", help="the system turn")
    parser.add_argument("--temperature", type=number_type(0, float), default=0.7, help="of sampling; 0: greedy (0.7)")
    parser.add_argument("--max_new_tokens", type=number_type(1), default=512, help="longest answer in tokens (512)")
    parser.add_argument(
        "--seed", type=number_type(0), default=secrets.randbits(32), help="of what is drawn (a new one)"
    )
    parser.add_argument("--compare", action="store_true", help="answer twice: without the adapter and with it")
    parser.add_shared("chat_template", "chat_template_kwargs")
    parser.add_argument("--plain", action="store_true", help="no template: the model continues each line as a text")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    given = parser.parse_args(argv)
    section = section_from_name(given.model, given.adapter)
    section.chat_template = given.chat_template
    section.trust_remote_code = given.trust_remote_code
    if given.compare and not section.adapter:
        parser.error(f"--compare needs an adapter, and {given.model} is a whole model: name one with --adapter")
    try:
        talk(Conversation(section, given))
    except BrokenPipeError:  # whoever reads the answers has stopped, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def talk(conversation: "Conversation") -> None:
    """Answer lines until the input ends, or /exit. A line that does not come from a terminal is shown."""
    if terminal := sys.stdin.isatty():
        with suppress(ImportError):  # lines can be edited with it
            import readline  # noqa: F401
    try:
        while (line := ask().rstrip()).split(" ")[0] != "/exit":
            if not terminal:
                print_output(line)
            name, _, rest = line.partition(" ")
            if name in COMMANDS:
                said = COMMANDS[name](conversation, rest.strip())
            elif name.startswith("/"):
                said = f"there is no {name}{name_hint(name, [*COMMANDS, '/exit'])}"
            else:
                said = line and conversation.say(line)
            if said:
                print_output(f"({said})")
    except EOFError:
        pass
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise InputError(f"what was read or written is no text in {error.encoding} ({error.reason})") from error
    print_output("")


def ask() -> str:
    """The next line. Ctrl-C drops what of it was typed."""
    while True:
        try:
            return input("> ")
        except KeyboardInterrupt:
            print_output("\n(/exit or Ctrl-D ends)")


class AnswerStreamer:
    """What `generate` streams to: it shows an answer while it is made, and keeps its text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self.decode = decode
        self.text = ""
        self.shown = 0
        self.ids: list[int] | None = None  # the prompt comes first

    def put(self, ids: Any) -> None:
        """The next token."""
        self.ids = [] if self.ids is None else [*self.ids, *ids.flatten().tolist()]
        self.text = self.decode(self.ids)
        self.show(self.text.rstrip("\ufffd"))  # a character may have several tokens

    def show(self, text: str) -> None:
        """What of the text is not on the screen yet."""
        print(_CONTROL.sub(lambda found: repr(found[0])[1:-1], text[self.shown :]), end="", flush=True)
        self.shown = max(self.shown, len(text))

    def end(self) -> None:
        """The answer is complete, or was stopped."""
        self.show(f"{self.text}\n")


class Conversation:
    """A model and what was said to it. With --plain each turn is a text by itself, and its answer how that goes on."""

    def __init__(self, section: ModelSection, given: argparse.Namespace):
        from ..models import load
        from .inference import InferenceModel

        section.images |= load.is_vision_only(load.check_model(section))
        self.answerer = InferenceModel(section, given.chat_template_kwargs)
        self.given = given
        self.answers = 0  # so far: each is drawn otherwise
        self.turns: list[dict[str, str]] = []  # a user's and an assistant's, one after the other
        self.cut: set[str] = set()  # answers that did not end
        config = self.answerer.model.config.get_text_config()
        self.positions: int = getattr(config, "max_position_embeddings", None) or sys.maxsize
        self.plain = given.plain or not self.answerer.tokenizer.chat_template
        if self.plain and given.system:
            raise InputError("--system needs a chat template, and a plain text has none: drop --system")
        if given.chat_template_kwargs:
            self._check_switches(given.chat_template_kwargs)
        if self.plain and not given.plain:
            print_output("(the model has no chat template: it continues each line as a plain text, as with --plain)")
        self.system(given.system)

    def _check_switches(self, given: dict[str, Any]) -> None:
        """Say which options of the chat template are not read. Raise InputError without a template."""
        from ..data.chat import template_options

        if self.plain:
            raise InputError("--chat_template_kwargs needs a chat template, and a plain text has none: drop it")
        if unread := sorted(given.keys() - template_options(self.answerer.tokenizer)):
            print_output(f"(the chat template does not read {join_names(unread)} of --chat_template_kwargs)")

    def say(self, text: str) -> str:
        """A turn of the user's and the answer to it. A turn that cannot be read is not kept: returns the problem."""
        try:
            ids = self.read(asked := {"role": "user", "content": text})
        except InputError as error:
            return str(error)
        self.answers += 1
        if self.given.compare:
            print_output("[without adapter]")
            with self.answerer.model.disable_adapter():
                self.answer(ids)
            print_output("[with adapter]")
        self.turns += [asked, {"role": "assistant", "content": self.answer(ids)}]
        return ""

    def read(self, asked: dict[str, str]) -> list[int]:
        """The ids that are answered. The oldest exchanges are dropped that leave too little for the answer. Raises
        InputError for a turn that is too long by itself, and for messages that the template refuses.
        """
        from ..data.chat import ChatTemplate, encode
        from ..data.messages import check_unicode

        check_unicode(asked["content"], "the line")
        tokenizer = self.answerer.tokenizer
        kept = self.turns
        template = ChatTemplate(tokenizer, None, self.given.chat_template_kwargs)
        # a quarter of the positions is for the answer, or what it may take
        most = self.positions - min(self.given.max_new_tokens, self.positions // 4)
        while True:
            text = asked["content"] if self.plain else template.prompt_text([*self.head, *kept, asked])
            [ids] = encode(tokenizer, [text])
            if len(ids) <= most or self.plain or not kept:
                break
            kept = kept[2:]
        if len(ids) >= self.positions:
            raise InputError(f"this has {len(ids)} tokens, and the model {self.positions} positions: say less")
        if dropped := len(self.turns) - len(kept):
            print_output(
                f"(too long for the model's {self.positions} positions: the oldest {dropped} turns are forgotten)"
            )
        self.turns = kept
        return ids

    def answer(self, ids: list[int]) -> str:
        """The model's answer, shown while it is made; Ctrl-C stops it. Raises InputError for logits that are NaN."""
        import torch

        from ..generation import hf_generate, rollout

        own = self.answerer
        tokenizer = self.answerer.tokenizer
        never = tuple(own.see.reader.token_ids) if own.see else ()
        sampler = rollout.TokenSampler(self.given.temperature or None, len(tokenizer), never)
        screen = AnswerStreamer(own.text)
        prompt = torch.tensor([ids], device=own.device)
        longest = min(self.given.max_new_tokens, self.positions - len(ids))
        given = own.model, prompt, torch.ones_like(prompt), longest, own.ends, tokenizer.pad_token_id, sampler
        try:
            with rollout.seeded(own.device, self.given.seed, self.answers):
                hf_generate.generate(*given, {"streamer": screen})
        except KeyboardInterrupt:
            screen.end()
            self.cut.add(screen.text)
        except RuntimeError as error:
            if str(error) != hf_generate.NONFINITE_LOGITS:
                raise
            raise InputError(f"{self.given.model}: {error}") from error
        else:
            if screen.ids and screen.ids[-1] not in own.ends:
                print_output(f"(cut after {longest} tokens)")
                self.cut.add(screen.text)
        return screen.text

    # ---- what a line with a slash does with the rest of it: /help shows the docstrings, what is returned is told

    def help(self, _: str) -> str:
        """This list"""
        lines = [f"{name:<13} {command.__doc__}" for name, command in COMMANDS.items()]
        return "\n ".join([*lines, "/exit         end, as Ctrl-D does; Ctrl-C stops an answer"])

    def clear(self, _: str) -> str:
        """Forget the conversation, but for the system turn"""
        self.turns.clear()
        return "forgotten"

    def system(self, text: str) -> str:
        """TEXT: from now on the system turn; without TEXT there is none"""
        if text and self.plain:
            return "a plain text has no system turn: it needs a chat template"
        self.head = [{"role": "system", "content": text}] if text else []
        return "a new system turn" if self.head else "no system turn"

    def undo(self, _: str) -> str:
        """Take back the last line and its answer"""
        said = self.turns
        self.turns = self.turns[:-2]
        return "taken back" if said else NO_TURNS

    def retry(self, _: str) -> str:
        """Another answer to the last line"""
        said = self.turns
        self.turns = self.turns[:-2]
        return self.say(said[-2]["content"]) if said else NO_TURNS

    def temperature(self, text: str) -> str:
        """X: of sampling, from now on; 0: greedy"""
        if is_number := re.fullmatch(r"\d+\.?\d*|\.\d+", text):
            self.given.temperature = float(text)
        problem = "" if is_number or not text else f"{text} is no number from 0 on, such as 0.7: "
        return f"{problem}the temperature is {self.given.temperature:g}"

    def compare(self, _: str) -> str:
        """On or off: answer without the adapter too"""
        if not self.answerer.section.adapter:
            return "there is no adapter to compare with"
        self.given.compare = not self.given.compare
        return f"compare: {'on' if self.given.compare else 'off'}"

    def save(self, name: str) -> str:
        """FILE: add the conversation to a file of rows to train on"""
        if not name or not self.turns:
            return NO_TURNS if name else "to which file? /save FILE"
        rows: list[dict[str, Any]] = [{"messages": self.head + self.turns}]
        if self.plain:  # each is by itself
            texts = [turn["content"] for turn in self.turns]
            rows = [{"prompt": asked, "completion": said} for asked, said in zip(texts[::2], texts[1::2], strict=True)]
        try:
            with Path(name).expanduser().open("a+", encoding="utf-8") as file:
                file.seek(0)
                if (text := file.read()) and not _has_columns(text.partition("\n")[0], rows[0]):
                    return f"{name} has other rows than {{{', '.join(rows[0])}}}: name another file"
                begun = "" if text.endswith("\n") or not text else "\n"
                file.write(begun + "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
        except (OSError, UnicodeDecodeError) as error:
            return f"{name} cannot be written: {getattr(error, 'strerror', None) or error}"
        cut = sum(turn["content"] in self.cut for turn in self.turns[1::2])
        return f"added to {name}" + (f"; {cut} of its answers did not end, and is trained as if it had" if cut else "")


def _has_columns(line: str, row: dict[str, Any]) -> bool:
    """Is it a row of the same columns?"""
    with suppress(ValueError, AttributeError):
        return bool(json.loads(line).keys() == row.keys())
    return False


NO_TURNS = "nothing was said yet"
_NAMES = ("help", "clear", "system", "undo", "retry", "temperature", "compare", "save")
COMMANDS: dict[str, Callable[[Conversation, str], str]] = {f"/{name}": getattr(Conversation, name) for name in _NAMES}
