"""Pictures of rows: where they stand in messages, reading them, and the tokens that they become.

A row has pictures in a column `image` or `images`, or inside messages as parts of a content. Within this package a
content stays a string, and MARK stands in it where a picture is. The processor of the model says what text a picture of
some size becomes (`PictureReader.expansion`), and gives the tensors that the model's vision tower reads.
"""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ..errors import InputError, error_context, shown
from .messages import text_of

MARK = "\ufdd0"
"""Stands in a content for a picture: a character that no text has."""
COLUMNS = ("image", "images")
PLACEHOLDER = "<image>"
"""What contents that are plain text have in the place of a picture, in the format of LLaVA and others."""
STORED = datasets.List({"bytes": datasets.Value("binary"), "path": datasets.Value("string")})
"""The type of the column `images` of prepared rows."""
_DATA = "data:image/"


# ---- rows


def take_pictures(row: dict, form: str, folder: str | None = None) -> tuple[dict, list[dict]]:
    """The row with MARK in its contents where pictures are, and its pictures in that order, as prepared rows have them.

    form: the row's format. folder: where relative paths start. Raises InputError for what is no picture, and where
    places and pictures are not equally many.
    """
    listed = [value for name in COLUMNS if row.get(name) is not None for value in _as_list(row[name])]
    columns = [name for name in form.split(" + ") if name in ("messages", "prompt", "instruction", "chosen", "rejected",
                                                              "completion", "output")]  # fmt: skip
    found: dict[str, list] = {}
    row = dict(row)
    for name in columns:
        with error_context(f"column {name!r}"):
            row[name], found[name] = _marked(row[name])
    # whole conversations that answer each other begin with the same pictures
    if "chosen" in columns and not {"prompt", "messages", "instruction"} & {*columns}:
        if found["chosen"] != found["rejected"]:
            raise InputError("columns 'chosen' and 'rejected': their conversations have other pictures")
        del found["rejected"]
    places = [value for name in found for value in found[name]]
    asked = next((name for name in ("messages", "prompt", "instruction", "chosen") if name in columns), "")
    if listed and not places:
        count = _places_in_text(row[asked])
        for name in ("chosen", "rejected") if asked == "chosen" else (asked,):
            row[name] = _placed(row[name], count, len(listed))
        places = [None] * len(listed)
    own = iter(listed)
    values = [next(own, None) if value is None else value for value in places]
    if len(places) != len([value for value in places if value is not None]) + len(listed) or None in values:
        given, empty = len(listed), len([value for value in places if value is None])
        raise InputError(f"there are {empty} places for pictures without one of their own, and {given} in 'images'")
    with error_context("column 'images'" if listed else "a picture"):
        return row, [stored(value, folder) for value in values]


def _as_list(value: Any) -> list:
    return [*value] if isinstance(value, list | tuple) else [value]


def _marked(value: Any) -> tuple[Any, list]:
    """A column with MARK as text in place of the parts that are pictures, and their values, None where they have
    none."""
    found: list[Any] = []
    if MARK in text_of(value):
        raise InputError("it has the character U+FDD0, which no text has: take it out")
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list):
        return value, found

    def part(item: Any) -> Any:
        if isinstance(item, dict) and item.get("type") in ("image", "image_url"):
            found.append(_value_of(item))
            return {"type": "text", "text": MARK}
        return item

    def turn(message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        content = message.get("content", message.get("value"))
        return message | {"content": list(map(part, content))} if isinstance(content, list) else message

    marked = list(map(turn, turns))
    return (marked[0] if isinstance(value, dict) else marked), found


def _value_of(part: dict) -> Any:
    """The picture of a part of a content, by the keys of transformers and of OpenAI; None where it has none."""
    value = next((part[key] for key in ("image", "image_url", "url", "path", "base64", "bytes") if part.get(key)), None)
    if isinstance(value, dict) and "url" in value:
        value = value["url"]
    return f"{_DATA};base64,{value}" if part.get("base64") and value == part["base64"] else value


def _texts_of(value: Any) -> Iterator[tuple[dict | None, str]]:
    """(turn, text) of each text of a column that may have a placeholder: those of turns that are not an assistant's."""
    if isinstance(value, str):
        yield None, value
    for turn in value if isinstance(value, list) else ():
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else "assistant"
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if role not in ("assistant", "gpt") and isinstance(content, str):
            yield turn, content


def _places_in_text(value: Any) -> int:
    return sum(text.count(PLACEHOLDER) for _, text in _texts_of(value))


def _placed(value: Any, count: int, pictures: int) -> Any:
    """A column with MARKs for `pictures` in its text: in place of its `count` placeholders, or, where it has none, at
    the beginning of the first turn of a user."""
    if count not in (0, pictures):
        raise InputError(f"the text has {count} {PLACEHOLDER}, and there are {pictures} pictures")
    if isinstance(value, str):
        return value.replace(PLACEHOLDER, MARK) if count else MARK * pictures + value
    turns, left = [], 0 if count else pictures
    for turn in value if isinstance(value, list) else []:
        texts = [text for owner, text in _texts_of([turn])]
        if texts:
            user = turn.get("role", turn.get("from")) in ("user", "human")
            text = MARK * left * user + texts[0].replace(PLACEHOLDER, MARK if count else PLACEHOLDER)
            left *= not user
            turn = {**turn, ("content" if turn.get("content") is not None else "value"): text}
        elif left and isinstance(turn.get("content"), list) and turn.get("role") == "user":
            turn, left = turn | {"content": [{"type": "text", "text": MARK * left}, *turn["content"]]}, 0
        turns.append(turn)
    if left:
        raise InputError("there is no turn of a user for the pictures to stand in")
    return turns


# ---- pictures


def stored(value: Any, folder: str | None = None) -> dict[str, Any]:
    """A picture as prepared rows have it: {bytes, path}, one of them None. Paths are absolute then.

    value: a PIL image, bytes, a path, a data URL, or a mapping with bytes or path as `datasets` has it. Raises
    InputError for anything else, for a URL and for a file that is no picture.
    """
    if isinstance(value, Mapping) and (value.get("bytes") or value.get("path")):
        value = value.get("bytes") or value["path"]
    if isinstance(value, Image.Image):
        value = stored_bytes(value)
    if isinstance(value, str) and value.startswith(_DATA):
        try:
            value = base64.b64decode(value.partition(",")[2], validate=True)
        except ValueError:
            raise InputError(f"{shown(value)} is no base64") from None
    found: dict[str, Any] = {"bytes": None, "path": None}
    if isinstance(value, bytes):
        found["bytes"] = value
    elif isinstance(value, str) and value.partition("://")[0] in ("http", "https", "ftp", "s3", "gs", "hf"):
        raise InputError(f"{shown(value)}: nothing is fetched while training: download it, and give its path")
    elif isinstance(value, str) and value:
        path = Path(folder or "", value.removeprefix("file://")).expanduser()
        if not path.is_file():
            start = f"relative paths start at {folder or 'the current folder'}, see image_folder"
            raise InputError(f"{value}: no such file" + f" ({start})" * (not Path(value).is_absolute()))
        found["path"] = str(path.absolute())
    else:
        raise InputError(f"expected a picture (path, bytes or PIL image), found {shown(value)}")
    picture_size(found)
    return found


def data_url(value: Any) -> str:
    """A PIL image, or the bytes of a file, as text."""
    found = stored_bytes(value) if isinstance(value, Image.Image) else value
    return f"{_DATA};base64,{base64.b64encode(found).decode()}"


def stored_bytes(image: Image.Image) -> bytes:
    """A PIL image as a file, without loss."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _source(picture: Mapping[str, Any]) -> Any:
    return io.BytesIO(picture["bytes"]) if picture["bytes"] else picture["path"]


def picture_size(picture: Mapping[str, Any]) -> tuple[int, int]:
    """(width, height) without decoding it. Raises InputError for what is no picture."""
    with _told(picture), Image.open(_source(picture)) as image:
        return image.size


def open_picture(picture: Mapping[str, Any]) -> Image.Image:
    """A stored picture, decoded, in RGB. Raises InputError for what is no picture."""
    with _told(picture), Image.open(_source(picture)) as image:
        return image.convert("RGB")


@contextmanager
def _told(picture: Mapping[str, Any]) -> Iterator[None]:
    """Makes one line of what PIL raises."""
    try:
        yield
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        what = "is no picture that PIL reads" if isinstance(error, UnidentifiedImageError) else str(error)
        name = picture["path"] or f"{len(picture['bytes'])} bytes"
        raise InputError(f"{name}: {what}") from error


# ---- what a model makes of them


class PictureReader:
    """What a processor makes of pictures: the text that stands for one, and the tensors that the model reads."""

    def __init__(self, processor: Any):
        self.processor = processor
        self.place: str = getattr(processor, "image_token", None) or getattr(processor, "boi_token", None) or ""
        """What the chat template writes in the place of a picture."""
        if not self.place or not hasattr(processor, "image_processor"):
            raise InputError(f"images: {type(processor).__name__} reads no pictures: set images: false")

    @property
    def token_ids(self) -> list[int]:
        """The ids that become features of a picture."""
        return sorted(i for i in self.processor.image_token_ids if i is not None)

    def features(self, text: str) -> int:
        """How many of these tokens a text has."""
        return sum(text.count(token) for token in self.processor.tokenizer.convert_ids_to_tokens(self.token_ids))

    def expansion(self, picture: Mapping[str, Any]) -> str:
        """The text that stands for a picture, which depends on its size alone."""
        return _of_size(self, *picture_size(picture))[1]

    def ids(self, picture: Mapping[str, Any]) -> list[int]:
        """The tokens that stand for a picture."""
        return self.processor.tokenizer(self.expansion(picture), add_special_tokens=False)["input_ids"]

    def tensors(self, pictures: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """What the model's forward takes besides ids, of pictures in the order in which the ids have them."""
        return self._tensors([*map(open_picture, pictures)])

    @cached_property
    def blank(self) -> dict[str, Tensor]:
        """`tensors` of a small picture of nothing."""
        return self._tensors([_grey(32, 32)])

    def _tensors(self, images: list[Image.Image]) -> dict[str, Tensor]:
        unused = {"rows", "cols", *self.processor.unused_input_names}
        return {name: torch.as_tensor(value) for name, value in self._process(images)[0].items() if name not in unused}

    def grid(self, picture: Mapping[str, Any]) -> list[int] | None:
        """Frames, rows and columns of patches of a picture, where the model's positions depend on them."""
        found = _of_size(self, *picture_size(picture))[0].get("image_grid_thw")
        return None if found is None else [int(n) for n in found[0]]

    def _process(self, images: list[Image.Image]) -> tuple[Any, list[str]]:
        options = self.processor._merge_kwargs(tokenizer_init_kwargs=self.processor.tokenizer.init_kwargs)
        kwargs = options["images_kwargs"] | {"return_tensors": "pt"}
        return self.processor._process_images(images, **kwargs)


def some_picture() -> dict[str, Any]:
    """A small picture of noise, always the same, as prepared rows have them."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    return {"bytes": stored_bytes(Image.fromarray(pixels)), "path": None}


def _grey(width: int, height: int) -> Image.Image:
    """A picture of nothing; not black: some models take a picture of zeros for padding."""
    return Image.fromarray(np.full((height, width, 3), 127, dtype=np.uint8))


@cache
def _of_size(reader: PictureReader, width: int, height: int) -> tuple[dict[str, Any], str]:
    """What the processor says of a picture of this size besides its pixels, and the text that stands for it."""
    found, texts = reader._process([_grey(width, height)])
    return {name: value for name, value in found.items() if name != "pixel_values"}, texts[0]


def read_by(tokenizer: Any) -> PictureReader | None:
    """What reads pictures for a tokenizer, if its model does: `with_pictures` has put it there."""
    return getattr(tokenizer, "picture_reader", None)


def with_pictures(processor: Any) -> Any:
    """The tokenizer of a processor, which knows what reads its pictures. Raises InputError where that reads none."""
    tokenizer, reader = getattr(processor, "tokenizer", None), PictureReader(processor)
    if tokenizer is None:
        raise InputError(f"{type(processor).__name__} reads no text")
    tokenizer.picture_reader = reader
    tokenizer.chat_template = getattr(processor, "chat_template", None) or tokenizer.chat_template
    return tokenizer
