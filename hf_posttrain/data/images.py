"""Pictures of rows: where they stand in messages, reading them, and the tokens that they become.

A row has pictures in a column `image` or `images`, or inside messages as parts of a content. Within this package a
content stays a string, and MARK stands in it where a picture is. The processor of the model says what text a picture of
some size becomes (`PictureReader.expansion`), and gives the tensors that the model's vision tower reads.
"""

import base64
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from inspect import signature
from itertools import accumulate
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import InputError, error_context, short_repr
from .dataset_type import AnyDatasets
from .messages import is_image_part, role_of, text_of

MARK = "\ufdd0"
"""Stands in a content for a picture: a character that no text has."""
IMAGE_COLUMNS = ("image", "images")
PLACEHOLDER = "<image>"
"""What contents that are plain text have in the place of a picture, in the format of LLaVA and others."""
IMAGES_TYPE = datasets.List({"bytes": datasets.Value("binary"), "path": datasets.Value("string")})
"""The type of the column `images` of prepared rows."""
_DATA_URL_PREFIX = "data:image/"
_TEXT_COLUMNS = ("messages", "prompt", "instruction", "chosen", "rejected", "completion", "output")


# ---- rows


def extract_images(row: dict, form: str, folder: str | None = None) -> tuple[dict, list[dict]]:
    """The row with MARK in its contents where pictures are, and its pictures in that order, as prepared rows have them.

    form: the row's format. folder: where relative paths start. Raises InputError for what is no picture, and where
    places and pictures are not equally many.
    """
    row, (column, listed) = dict(row), _column_images(row)
    columns = [name for name in form.split(" + ") if name in _TEXT_COLUMNS]
    if not columns:  # ids hold the tokens of their pictures already
        return row, [to_stored_image(value, folder) for value in listed]
    found: dict[str, list] = {}
    for name in columns:
        with error_context(f"column {name!r}"):
            row[name], found[name] = _mark_images(row[name])
    if {"prompt", "chosen"} <= {*columns} and isinstance(row["prompt"], str) and _is_conversation(row["chosen"]):
        columns.remove("prompt")  # it is there twice: see `read_format`
    # whole conversations that answer each other begin with the same pictures
    if "chosen" in columns and not {"prompt", "messages", "instruction"} & {*columns}:
        if found["chosen"] != found["rejected"]:
            raise InputError("columns 'chosen' and 'rejected': their conversations have other pictures")
        del found["rejected"]
    places = [value for name in found for value in found[name]]
    asked = next(name for name in ("messages", "prompt", "instruction", "chosen") if name in columns)
    held = sum(text.count(PLACEHOLDER) for name in (asked, "input") for text in _placeholder_texts(row.get(name)))
    if listed and not places:
        _insert_marks(row, asked, column, len(listed), held)
        places = [None] * len(listed)
    elif held:
        instead = "its pictures are parts of contents already" if places else "the row has no picture"
        raise InputError(f"the text has {held} {PLACEHOLDER}, and {instead}: take it out, or give a column images")
    if places.count(None) != len(listed):
        problem = f"there are {places.count(None)} places without a picture of their own, and {len(listed)} pictures"
        raise InputError(
            f"column {column!r}: {problem}: give as many as there are places"
            if column
            else f"{problem}: write a picture into each part, or give a column images"
        )
    own = iter(listed)
    with error_context(f"column {column!r}" if column else "a picture"):
        return row, [to_stored_image(next(own) if value is None else value, folder) for value in places]


def hold_images(rows: AnyDatasets | Sequence[Mapping[str, Any]] | None) -> bool:
    """Return whether rows, or any of a dict of data sets, have a column of images or an image in the first row."""
    if isinstance(rows, Mapping):
        return any(hold_images(part) for part in rows.values())
    if isinstance(rows, datasets.IterableDataset):
        first = next(iter(rows), None)
    else:
        first = rows[0] if isinstance(rows, Sequence | datasets.Dataset) and len(rows) else None
    if not isinstance(first, Mapping):
        return False
    if any(first.get(column) is not None for column in IMAGE_COLUMNS):
        return True
    return any(_mark_images(value)[1] for name, value in first.items() if name in _TEXT_COLUMNS and isinstance(value, list))


def _is_conversation(turns: Any) -> bool:
    """Is it a conversation from its beginning, not an answer?"""
    return isinstance(turns, list) and bool(turns) and role_of(turns[0]) not in ("assistant", None)


def _column_images(row: dict) -> tuple[str, list]:
    """The column that pictures are in, if any, and what it has. Raises InputError for two columns, and for a null."""
    given = [name for name in IMAGE_COLUMNS if row.get(name) is not None]
    if len(given) > 1:
        raise InputError("columns 'image' and 'images': they both hold pictures: put all into one")
    if not given:
        return "", []
    value = row[given[0]]
    listed = [*value] if isinstance(value, list | tuple) else [value]
    if None in listed:
        raise InputError(f"column {given[0]!r}: a picture is null: leave it out")
    return given[0], listed


def _mark_images(value: object) -> tuple[Any, list]:
    """A column with MARK as text in place of the parts that are pictures, and their values, None where they have
    none.
    """
    found: list[Any] = []
    if MARK in text_of(value):
        raise InputError("it has the character U+FDD0, which no text has: take it out")
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list):
        return value, found

    def part(item: Any) -> Any:
        if is_image_part(item):
            found.append(_image_value(item))
            return {"type": "text", "text": MARK}
        return item

    def turn(message: object) -> Any:
        if not isinstance(message, dict):
            return message
        content = message.get("content", message.get("value"))
        return message | {"content": list(map(part, content))} if isinstance(content, list) else message

    marked = list(map(turn, turns))
    return (marked[0] if isinstance(value, dict) else marked), found


def _image_value(part: dict) -> Any:
    """The picture of a part of a content, by the keys of transformers and of OpenAI; None where it has none."""
    value = next((part[key] for key in ("image", "image_url", "url", "path", "base64", "bytes") if part.get(key)), None)
    if isinstance(value, dict) and "url" in value:
        value = value["url"]
    return f"{_DATA_URL_PREFIX};base64,{value}" if part.get("base64") and value == part["base64"] else value


def _insert_marks(row: dict, asked: str, column: str, pictures: int, places: int) -> None:
    """Put MARKs for the pictures of a column into the row's text: in place of its PLACEHOLDERs or, where it has none,
    at the beginning of what a user asks first. asked: the column that says that. places: how many PLACEHOLDERs.
    """
    if places not in (0, pictures):
        raise InputError(f"column {column!r}: it has {pictures} pictures, and the text {places} {PLACEHOLDER}")
    left = 0 if places else pictures

    def change(text: str, role: str | None) -> str:
        nonlocal left
        before = MARK * left if role == "user" else ""
        left = 0 if before else left
        return before + text.replace(PLACEHOLDER, MARK)

    for name in ("prompt", "chosen", "rejected") if asked == "chosen" else (asked, "input"):
        if row.get(name) is not None:
            left = 0 if places or name == "input" else pictures
            row[name] = _map_texts(row[name], change)
            if left:
                raise InputError(f"column {name!r}: there is no turn of a user for the pictures to stand in")


def _placeholder_texts(value: object) -> Iterator[str]:
    """The texts of a column that a PLACEHOLDER may stand in: no assistant's."""
    kept: list[str] = []

    def keep(text: str, _: str | None) -> str:
        kept.append(text)
        return text

    _map_texts(value, keep)
    yield from kept


def _map_texts(value: object, change: Callable[[str, str | None], str]) -> Any:
    """A column in which `change`, of a text and whose it is, is done to all texts but those of assistants."""
    if isinstance(value, str):
        return change(value, "user")
    if not isinstance(value, list):
        return value

    def turn(message: object) -> Any:
        role = role_of(message)
        if role == "assistant" or not isinstance(message, dict):
            return message
        key = "content" if message.get("content") is not None else "value"
        content = message.get(key)
        if isinstance(content, str):
            return message | {key: change(content, role)}
        texts = [isinstance(part, dict) and isinstance(part.get("text"), str) for part in content or ()]
        parts = zip(content or (), texts, strict=True)
        changed = [part | {"text": change(part["text"], role)} if is_text else part for part, is_text in parts]
        return message | {key: changed} if isinstance(content, list) else message

    return list(map(turn, value))


# ---- pictures


def to_stored_image(value: object, folder: str | None = None) -> dict[str, Any]:
    """A picture as prepared rows have it: {bytes, path}, one of them None. Paths are absolute then.

    value: a PIL image, bytes, a path, a data URL, or a mapping with bytes or path as `datasets` has it. Raises
    InputError for anything else, for a URL and for a file that is no picture.
    """
    if isinstance(value, Mapping) and (value.get("bytes") or value.get("path")):
        value = value.get("bytes") or value["path"]
    if isinstance(value, Image.Image):
        value = png_bytes(value)
    if isinstance(value, str) and value.startswith(_DATA_URL_PREFIX):
        try:
            value = base64.b64decode(value.partition(",")[2], validate=True)
        except ValueError:
            raise InputError(f"{short_repr(value)} is no base64") from None
    found: dict[str, Any] = {"bytes": None, "path": None}
    if isinstance(value, bytes):
        found["bytes"] = value
    elif isinstance(value, str) and value.partition("://")[0] in ("http", "https", "ftp", "s3", "gs", "hf"):
        raise InputError(f"{short_repr(value)}: nothing is fetched while training: download it, and give its path")
    elif isinstance(value, str) and value:
        path = Path(folder or "", value.removeprefix("file://")).expanduser()
        if not path.is_file():
            start = f"relative paths start at {folder or 'the current folder'}, see image_folder"
            name = value if len(value) < 300 else short_repr(value)  # which may be base64 without its beginning
            raise InputError(f"{name}: no such file" + f" ({start})" * (not Path(value).is_absolute()))
        found["path"] = str(path.absolute())
    else:
        raise InputError(f"expected a picture (path, bytes or PIL image), found {short_repr(value)}")
    check_image(found)
    return found


def data_url(value: Any) -> str:
    """A PIL image, or the bytes of a file, as text."""
    found = png_bytes(value) if isinstance(value, Image.Image) else value
    return f"{_DATA_URL_PREFIX};base64,{base64.b64encode(found).decode()}"


def image_to_json(picture: Mapping[str, Any]) -> str:
    """A stored picture as a row of JSON has it: its path, or its bytes as text."""
    return picture["path"] or data_url(picture["bytes"])


def png_bytes(image: Image.Image) -> bytes:
    """A PIL image as a file, without loss."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _file_of(picture: Mapping[str, Any]) -> Any:
    return io.BytesIO(picture["bytes"]) if picture["bytes"] else picture["path"]


def image_size(picture: Mapping[str, Any]) -> tuple[int, int]:
    """(width, height) as it is looked at, without decoding it. Raises InputError for what is no picture."""
    with _pil_errors(picture), Image.open(_file_of(picture)) as image:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
        return image.size[::-1] if turned else image.size


def check_image(picture: Mapping[str, Any]) -> None:
    """Raises InputError for what is no picture, ends before its end, or has pixels without a known range."""
    with _pil_errors(picture), Image.open(_file_of(picture)) as image:
        image.draft("RGB", (1, 1))  # a JPEG is read to its end, and decoded to an eighth of its size
        image.load()
        if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
            raise ValueError(f"its pixels are of mode {image.mode}, whose range is not known: save it with 8 bits")


def open_image(picture: Mapping[str, Any]) -> Image.Image:
    """A stored picture, decoded, upright and in RGB. Raises InputError for what is no picture."""
    with _pil_errors(picture), Image.open(_file_of(picture)) as image:
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16 bits, of which PIL would take all above 255 for white
            upright = Image.fromarray((np.asarray(upright) // 256).astype(np.uint8))
        return upright.convert("RGB")


def image_versions(rows: Iterable[Any]) -> list[tuple[int, int]]:
    """How many bytes each picture of rows has, packed ones too, and when its file was last changed (0: it is in the
    row): a path says nothing of what is there.
    """
    found = []
    for listed in (one if isinstance(one, list) else [one] for pictures in rows for one in pictures or ()):
        for picture in listed:
            file = os.stat(picture["path"]) if picture["path"] else None
            found.append((file.st_size, file.st_mtime_ns) if file else (len(picture["bytes"]), 0))
    return found


@contextmanager
def _pil_errors(picture: Mapping[str, Any]) -> Iterator[None]:
    """Makes one line of what PIL raises."""
    try:
        yield
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        what = "is no picture that PIL reads" if isinstance(error, UnidentifiedImageError) else str(error)
        name = picture["path"] or f"{len(picture['bytes'])} bytes"
        raise InputError(f"{name}: {what}") from error


# ---- what a model makes of them


class ImageReader:
    """What a processor makes of pictures: the text that stands for one, and the tensors that the model reads."""

    def __init__(self, processor: Any):
        self.processor = processor
        self.image_token: str = getattr(processor, "image_token", None) or getattr(processor, "boi_token", None) or ""
        """What the chat template writes in the place of a picture."""
        if not self.image_token or not hasattr(processor, "image_processor"):
            raise InputError(f"images: {type(processor).__name__} reads no pictures: set images: false")

    @property
    def token_ids(self) -> list[int]:
        """The ids that become features of a picture."""
        return sorted(i for i in self.processor.image_token_ids if i is not None)

    def count_features(self, text: str) -> int:
        """How many of these tokens a text has."""
        return sum(text.count(token) for token in self.processor.tokenizer.convert_ids_to_tokens(self.token_ids))

    def expansion(self, picture: Mapping[str, Any]) -> str:
        """The text that stands for a picture, which depends on its size alone. Raises InputError for a size that the
        processor refuses.
        """
        size = image_size(picture)
        with _pil_errors(picture):
            return _grid_and_text(self, *size)[1]

    def count_feature_tokens(self, ids: Sequence[int]) -> int:
        """How many ids become features of pictures."""
        own = {*self.token_ids}
        return sum(token in own for token in ids)

    def feature_counts(self, pictures: Iterable[Mapping[str, Any]]) -> list[int]:
        """How many features each picture brings."""
        return [self.count_features(self.expansion(picture)) for picture in pictures]

    def complete_images(self, ids: Sequence[int], pictures: Sequence[Any]) -> Sequence[Any]:
        """Those of a text's pictures whose tokens all stand in `ids`, which may be cut at the end."""
        return pictures[: count_complete_images(self.feature_counts(pictures), self.count_feature_tokens(ids))]

    def expansion_ids(self, picture: Mapping[str, Any]) -> list[int]:
        """The tokens that stand for a picture."""
        return self.processor.tokenizer(self.expansion(picture), add_special_tokens=False)["input_ids"]

    def tensors(self, pictures: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """What the model's forward takes besides ids, of pictures in the order in which the ids have them."""
        return self._tensors([*map(open_image, pictures)])

    @cached_property
    def blank_tensors(self) -> dict[str, Tensor]:
        """`tensors` of a small picture of nothing."""
        return self._tensors([_gray_image(32, 32)])

    def _tensors(self, images: list[Image.Image]) -> dict[str, Tensor]:
        unused = {"rows", "cols", *self.processor.unused_input_names}
        return {name: torch.as_tensor(value) for name, value in self._process(images)[0].items() if name not in unused}

    def patch_grid(self, picture: Mapping[str, Any]) -> list[int] | None:
        """Frames, rows and columns of patches of a picture, where the model's positions depend on them."""
        return _grid_and_text(self, *image_size(picture))[0]

    def _process(self, images: list[Image.Image]) -> tuple[Any, list[str]]:
        options = merged_options(self.processor)
        kwargs = options["images_kwargs"] | {"return_tensors": "pt"}
        return self.processor._process_images(images, **kwargs)


def merged_options(processor: Any) -> dict[str, dict[str, Any]]:
    """Return the options that a processor has for each of its inputs, such as `images_kwargs`."""
    merge = processor._merge_kwargs
    # transformers 5.20 must be told the class of the options
    kinds = (processor.valid_processor_kwargs,) if "ModelProcessorKwargs" in signature(merge).parameters else ()
    merged: dict[str, dict[str, Any]] = merge(*kinds, tokenizer_init_kwargs=processor.tokenizer.init_kwargs)
    return merged


def count_complete_images(counts: Iterable[int], places: int) -> int:
    """How many of the pictures of a text, of so many features each, all stand in it where it is cut at the end and has
    `places` left.
    """
    return sum(end <= places for end in accumulate(counts))


def noise_image() -> dict[str, Any]:
    """A small picture of noise, always the same, as prepared rows have them."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    return {"bytes": png_bytes(Image.fromarray(pixels)), "path": None}


def _gray_image(width: int, height: int) -> Image.Image:
    """A picture of nothing; not black: some models take a picture of zeros for padding."""
    return Image.fromarray(np.full((height, width, 3), 127, dtype=np.uint8))


@lru_cache(maxsize=100_000)
def _grid_and_text(reader: ImageReader, width: int, height: int) -> tuple[list[int] | None, str]:
    """Of a picture of this size: frames, rows and columns of patches, or None, and the text that stands for it."""
    found, texts = reader._process([_gray_image(width, height)])
    grid = found.get("image_grid_thw")
    return None if grid is None else [int(n) for n in grid[0]], texts[0]


def get_image_reader(tokenizer: PreTrainedTokenizerBase) -> ImageReader | None:
    """What reads pictures for a tokenizer, if its model does: `attach_image_reader` has put it there."""
    return getattr(tokenizer, "image_reader", None)


def attach_image_reader(processor: Any) -> Any:
    """The tokenizer of a processor, which knows what reads its pictures. Raises InputError where that reads none."""
    tokenizer = getattr(processor, "tokenizer", None)
    reader = ImageReader(processor)
    if tokenizer is None:
        raise InputError(f"{type(processor).__name__} reads no text")
    tokenizer.image_reader = reader
    tokenizer.chat_template = getattr(processor, "chat_template", None) or tokenizer.chat_template
    return tokenizer
