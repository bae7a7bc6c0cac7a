"""Images of rows: their places in messages, their files, and the tokens that they become.

A row has images in a column `image` or `images`, or inside messages as parts of a content. Within this package a
content remains a string, in which `MARK` replaces each image. The processor of the model determines the text that
replaces an image of some size (`ImageReader.expansion`), and makes the tensors that the vision encoder reads.
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
"""Replaces an image in a content: a Unicode noncharacter, which texts do not contain."""
IMAGE_COLUMNS = ("image", "images")
PLACEHOLDER = "<image>"
"""Marks the place of an image in contents that are plain text, as in the format of LLaVA and others."""
IMAGES_TYPE = datasets.List({"bytes": datasets.Value("binary"), "path": datasets.Value("string")})
"""The type of the column `images` of prepared rows."""
_DATA_URL_PREFIX = "data:image/"
_TEXT_COLUMNS = ("messages", "prompt", "instruction", "chosen", "rejected", "completion", "output")


# ---- rows


def extract_images(row: dict, form: str, folder: str | None = None) -> tuple[dict, list[dict]]:
    """Separate the images of a row from its text.

    Args:
        row: A raw row.
        form: The format of the row.
        folder: Folder that relative paths start from.

    Returns:
        The row with MARK in its contents in the place of images, and its images in that order, as prepared rows have
        them.

    Raises:
        InputError: If a value is not an image, or if the numbers of places and of images differ.
    """
    row = dict(row)
    column, listed = _column_images(row)
    columns = [name for name in form.split(" + ") if name in _TEXT_COLUMNS]
    if not columns:  # token ids include the tokens of images already
        return row, [to_stored_image(value, folder) for value in listed]

    part_images: dict[str, list] = {}
    for name in columns:
        with error_context(f"column {name!r}"):
            row[name], part_images[name] = _mark_images(row[name])
    if {"prompt", "chosen"} <= {*columns} and isinstance(row["prompt"], str) and _is_conversation(row["chosen"]):
        columns.remove("prompt")  # the conversations repeat it, see `read_format`
    # whole conversations that are compared begin with the same images
    if "chosen" in columns and not {"prompt", "messages", "instruction"} & {*columns}:
        if part_images["chosen"] != part_images["rejected"]:
            raise InputError("columns 'chosen' and 'rejected': their conversations have different images")
        del part_images["rejected"]

    places = [value for name in part_images for value in part_images[name]]
    prompt_column = next(name for name in ("messages", "prompt", "instruction", "chosen") if name in columns)
    placeholders = sum(
        text.count(PLACEHOLDER) for name in (prompt_column, "input") for text in _placeholder_texts(row.get(name))
    )
    if listed and not places:
        _insert_marks(row, prompt_column, column, len(listed), placeholders)
        places = [None] * len(listed)
    elif placeholders:
        reason = "its images are parts of contents already" if places else "the row has no image"
        raise InputError(
            f"the text has {placeholders} {PLACEHOLDER}, and {reason}. Remove it, or add a column 'images'"
        )
    if places.count(None) != len(listed):
        problem = f"there are {places.count(None)} image parts without an image, and {len(listed)} images"
        raise InputError(
            f"column {column!r}: {problem}. Provide one image per part"
            if column
            else f"{problem}. Write an image into each part, or add a column 'images'"
        )

    remaining = iter(listed)
    with error_context(f"column {column!r}" if column else "an image"):
        return row, [to_stored_image(next(remaining) if value is None else value, folder) for value in places]


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
    return any(
        _mark_images(value)[1] for name, value in first.items() if name in _TEXT_COLUMNS and isinstance(value, list)
    )


def _is_conversation(turns: object) -> bool:
    """Return whether a value is a conversation from its beginning, rather than an answer."""
    return isinstance(turns, list) and bool(turns) and role_of(turns[0]) not in ("assistant", None)


def _column_images(row: dict) -> tuple[str, list]:
    """Return the name of the column with images ("" without one), and its images.

    Raises InputError for two columns, and for a null.
    """
    present = [name for name in IMAGE_COLUMNS if row.get(name) is not None]
    if len(present) > 1:
        raise InputError("columns 'image' and 'images': both have images. Put all into one column")
    if not present:
        return "", []
    value = row[present[0]]
    listed = [*value] if isinstance(value, list | tuple) else [value]
    if None in listed:
        raise InputError(f"column {present[0]!r}: an image is null. Remove it")
    return present[0], listed


def _mark_images(value: object) -> tuple[Any, list]:
    """Return the value of a column with MARK as text in the place of image parts, and the images of these parts.

    The image of a part that has none is None.
    """
    part_images: list[Any] = []
    if MARK in text_of(value):
        raise InputError("the text has the character U+FDD0, which is reserved. Remove it")
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list):
        return value, part_images

    def mark_part(part: Any) -> Any:
        if is_image_part(part):
            part_images.append(_image_value(part))
            return {"type": "text", "text": MARK}
        return part

    def mark_turn(message: object) -> Any:
        if not isinstance(message, dict):
            return message
        content = message.get("content", message.get("value"))
        return message | {"content": list(map(mark_part, content))} if isinstance(content, list) else message

    marked = list(map(mark_turn, turns))
    return (marked[0] if isinstance(value, dict) else marked), part_images


def _image_value(part: dict) -> Any:
    """Return the image of a part of a content, by the keys of transformers and of OpenAI, or None without one."""
    value = next((part[key] for key in ("image", "image_url", "url", "path", "base64", "bytes") if part.get(key)), None)
    if isinstance(value, dict) and "url" in value:
        value = value["url"]
    return f"{_DATA_URL_PREFIX};base64,{value}" if part.get("base64") and value == part["base64"] else value


def _insert_marks(row: dict, prompt_column: str, column: str, images: int, placeholders: int) -> None:
    """Insert a MARK for each image of a column into the text of `row`, which is changed in place.

    The marks replace the PLACEHOLDERs of the text. Without any, they precede the text of the first user turn.

    Args:
        row: The row.
        prompt_column: Name of the column with the prompt.
        column: Name of the column with the images.
        images: Number of images.
        placeholders: Number of PLACEHOLDERs in the text.
    """
    if placeholders not in (0, images):
        raise InputError(
            f"column {column!r}: it has {images} images, and the text {placeholders} {PLACEHOLDER}. Provide one image "
            "per placeholder"
        )
    pending = 0 if placeholders else images

    def insert(text: str, role: str | None) -> str:
        nonlocal pending
        before = MARK * pending if role == "user" else ""
        pending = 0 if before else pending
        return before + text.replace(PLACEHOLDER, MARK)

    for name in ("prompt", "chosen", "rejected") if prompt_column == "chosen" else (prompt_column, "input"):
        if row.get(name) is not None:
            pending = 0 if placeholders or name == "input" else images
            row[name] = _map_texts(row[name], insert)
            if pending:
                raise InputError(f"column {name!r}: images require a user turn, and there is none")


def _placeholder_texts(value: object) -> Iterator[str]:
    """Yield the texts of a column that may have a PLACEHOLDER, except for texts of assistants."""
    texts: list[str] = []

    def collect(text: str, _: str | None) -> str:
        texts.append(text)
        return text

    _map_texts(value, collect)
    yield from texts


def _map_texts(value: object, change: Callable[[str, str | None], str]) -> Any:
    """Return the value of a column with `change`(text, role) applied to all texts but an assistant's."""
    if isinstance(value, str):
        return change(value, "user")
    if not isinstance(value, list):
        return value

    def map_turn(message: object) -> Any:
        role = role_of(message)
        if role == "assistant" or not isinstance(message, dict):
            return message
        key = "content" if message.get("content") is not None else "value"
        content = message.get(key)
        if isinstance(content, str):
            return message | {key: change(content, role)}
        are_texts = [isinstance(part, dict) and isinstance(part.get("text"), str) for part in content or ()]
        parts = zip(content or (), are_texts, strict=True)
        changed = [part | {"text": change(part["text"], role)} if is_text else part for part, is_text in parts]
        return message | {key: changed} if isinstance(content, list) else message

    return list(map(map_turn, value))


# ---- image files


def to_stored_image(value: object, folder: str | None = None) -> dict[str, Any]:
    """Return an image as prepared rows have it.

    Args:
        value: A PIL image, bytes, a path, a data URL, or a mapping with `bytes` or `path` as `datasets` has it.
        folder: Folder that relative paths start from; the current folder by default.

    Returns:
        {bytes, path}, of which one is None. Paths are absolute.

    Raises:
        InputError: If `value` is anything else, a URL, or a file that is not an image.
    """
    if isinstance(value, Mapping) and (value.get("bytes") or value.get("path")):
        value = value.get("bytes") or value["path"]
    if isinstance(value, Image.Image):
        value = png_bytes(value)
    if isinstance(value, str) and value.startswith(_DATA_URL_PREFIX):
        try:
            value = base64.b64decode(value.partition(",")[2], validate=True)
        except ValueError:
            raise InputError(f"{short_repr(value)} is not valid base64") from None

    image: dict[str, Any] = {"bytes": None, "path": None}
    if isinstance(value, bytes):
        image["bytes"] = value
    elif isinstance(value, str) and value.partition("://")[0] in ("http", "https", "ftp", "s3", "gs", "hf"):
        raise InputError(f"{short_repr(value)}: images are not downloaded. Download the file, and write its path")
    elif isinstance(value, str) and value:
        path = Path(folder or "", value.removeprefix("file://")).expanduser()
        if not path.is_file():
            start = f"relative paths start at {folder or 'the current folder'}, see image_folder"
            name = value if len(value) < 300 else short_repr(value)  # it may be base64 without its prefix
            raise InputError(f"{name}: no such file" + f" ({start})" * (not Path(value).is_absolute()))
        image["path"] = str(path.absolute())
    else:
        raise InputError(f"expected an image (path, bytes or PIL image), found {short_repr(value)}")
    check_image(image)
    return image


def data_url(value: Any) -> str:
    """Return a PIL image, or the bytes of an image file, as a data URL."""
    content = png_bytes(value) if isinstance(value, Image.Image) else value
    return f"{_DATA_URL_PREFIX};base64,{base64.b64encode(content).decode()}"


def image_to_json(image: Mapping[str, Any]) -> str:
    """Return a stored image as rows of JSON have it: its path, or its bytes as a data URL."""
    return image["path"] or data_url(image["bytes"])


def png_bytes(image: Image.Image) -> bytes:
    """Return a PIL image as the bytes of a PNG file, which is lossless."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _file_of(image: Mapping[str, Any]) -> Any:
    return io.BytesIO(image["bytes"]) if image["bytes"] else image["path"]


def image_size(image: Mapping[str, Any]) -> tuple[int, int]:
    """Return (width, height) of a stored image when upright, without decoding it.

    Raises InputError if it is invalid.
    """
    with _pil_errors(image), Image.open(_file_of(image)) as opened:
        rotated = opened.getexif().get(ExifTags.Base.Orientation, 1) >= 5
        return opened.size[::-1] if rotated else opened.size


def check_image(image: Mapping[str, Any]) -> None:
    """Raise InputError for a stored image that is invalid or truncated, or whose pixels have an unknown range."""
    with _pil_errors(image), Image.open(_file_of(image)) as opened:
        opened.draft("RGB", (1, 1))  # a JPEG is read to its end, and decoded to an eighth of its size
        opened.load()
        if opened.mode == "F" or (opened.mode == "I" and opened.format != "PNG"):
            raise ValueError(f"its pixels are of mode {opened.mode}, whose range is unknown. Save it with 8 bits")


def open_image(image: Mapping[str, Any]) -> Image.Image:
    """Return a stored image, decoded, upright and in RGB. Raises InputError if it is invalid."""
    with _pil_errors(image), Image.open(_file_of(image)) as opened:
        upright = ImageOps.exif_transpose(opened)
        if upright.mode.startswith("I"):  # 16 bits, of which PIL would convert all values above 255 to white
            upright = Image.fromarray((np.asarray(upright) // 256).astype(np.uint8))
        return upright.convert("RGB")


def image_versions(rows: Iterable[Any]) -> list[tuple[int, int]]:
    """Return (size in bytes, modification time) of each image, since the file at a path may change.

    Args:
        rows: The column `images` of prepared rows, packed or not.

    Returns:
        One pair per image. The modification time is in nanoseconds, or 0 for an image whose bytes are in the row.
    """
    pairs = []
    for listed in (item if isinstance(item, list) else [item] for images in rows for item in images or ()):
        for image in listed:
            file = os.stat(image["path"]) if image["path"] else None
            pairs.append((file.st_size, file.st_mtime_ns) if file else (len(image["bytes"]), 0))
    return pairs


@contextmanager
def _pil_errors(image: Mapping[str, Any]) -> Iterator[None]:
    """Raise errors of PIL as InputError with the name of the image."""
    try:
        yield
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        problem = "not an image that PIL can read" if isinstance(error, UnidentifiedImageError) else str(error)
        name = image["path"] or f"{len(image['bytes'])} bytes"
        raise InputError(f"{name}: {problem}") from error


# ---- inputs of the model


class ImageReader:
    """Interface to a processor: the text that replaces an image, and the tensors that the model reads.

    Args:
        processor: The processor.

    Raises:
        InputError: If the processor does not support images.
    """

    def __init__(self, processor: object) -> None:
        self.processor: Any = processor
        self.image_token: str = getattr(processor, "image_token", None) or getattr(processor, "boi_token", None) or ""
        """The text that the chat template writes in the place of an image."""
        if not self.image_token or not hasattr(processor, "image_processor"):
            raise InputError(f"images: {type(processor).__name__} does not support images. Set images: false")

    @property
    def token_ids(self) -> list[int]:
        """Ids of the tokens that are replaced by features of images."""
        return sorted(i for i in self.processor.image_token_ids if i is not None)

    def count_features(self, text: str) -> int:
        """Return the number of feature tokens in a text."""
        return sum(text.count(token) for token in self.processor.tokenizer.convert_ids_to_tokens(self.token_ids))

    def expansion(self, image: Mapping[str, Any]) -> str:
        """Return the text that replaces an image, which depends only on its size.

        Raises InputError for a size that the processor rejects.
        """
        size = image_size(image)
        with _pil_errors(image):
            return _grid_and_text(self, *size)[1]

    def count_feature_tokens(self, ids: Sequence[int]) -> int:
        """Return the number of ids that are replaced by features of images."""
        feature_ids = {*self.token_ids}
        return sum(token in feature_ids for token in ids)

    def feature_counts(self, images: Iterable[Mapping[str, Any]]) -> list[int]:
        """Return the number of features of each image."""
        return [self.count_features(self.expansion(image)) for image in images]

    def complete_images(self, ids: Sequence[int], images: Sequence[Any]) -> Sequence[Any]:
        """Return the images of a text whose tokens are all in `ids`, which may be truncated at the end."""
        return images[: count_complete_images(self.feature_counts(images), self.count_feature_tokens(ids))]

    def expansion_ids(self, image: Mapping[str, Any]) -> list[int]:
        """Return the token ids of an image's expansion."""
        return self.processor.tokenizer(self.expansion(image), add_special_tokens=False)["input_ids"]

    def tensors(self, images: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the arguments of the model's forward for images, in the order in which the ids have them."""
        return self._tensors([*map(open_image, images)])

    @cached_property
    def blank_tensors(self) -> dict[str, Tensor]:
        """`tensors` of a small gray image."""
        return self._tensors([_gray_image(32, 32)])

    def _tensors(self, images: list[Image.Image]) -> dict[str, Tensor]:
        unused = {"rows", "cols", *self.processor.unused_input_names}
        return {name: torch.as_tensor(value) for name, value in self._process(images)[0].items() if name not in unused}

    def patch_grid(self, image: Mapping[str, Any]) -> list[int] | None:
        """Return frames, rows and columns of patches of an image, or None if the model's positions do not use them."""
        return _grid_and_text(self, *image_size(image))[0]

    def _process(self, images: list[Image.Image]) -> tuple[Any, list[str]]:
        options = merged_options(self.processor)
        kwargs = options["images_kwargs"] | {"return_tensors": "pt"}
        return self.processor._process_images(images, **kwargs)


def merged_options(processor: Any) -> dict[str, dict[str, Any]]:
    """Return the options that a processor has for each of its inputs, such as `images_kwargs`."""
    merge = processor._merge_kwargs
    # transformers 5.20 requires the class of the options as an argument
    kinds = (processor.valid_processor_kwargs,) if "ModelProcessorKwargs" in signature(merge).parameters else ()
    merged: dict[str, dict[str, Any]] = merge(*kinds, tokenizer_init_kwargs=processor.tokenizer.init_kwargs)
    return merged


def count_complete_images(counts: Iterable[int], feature_tokens: int) -> int:
    """Return how many images have all of their tokens in a text that is truncated at the end.

    Args:
        counts: Number of features of each image of the text.
        feature_tokens: Number of feature tokens that the truncated text has.
    """
    return sum(end <= feature_tokens for end in accumulate(counts))


def noise_image() -> dict[str, Any]:
    """Return a small image of noise, which is always the same, as prepared rows have it."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    return {"bytes": png_bytes(Image.fromarray(pixels)), "path": None}


def _gray_image(width: int, height: int) -> Image.Image:
    """Return a uniform image. It is not black, since some models treat an image of zeros as padding."""
    return Image.fromarray(np.full((height, width, 3), 127, dtype=np.uint8))


@lru_cache(maxsize=100_000)
def _grid_and_text(reader: ImageReader, width: int, height: int) -> tuple[list[int] | None, str]:
    """Return frames, rows and columns of patches (or None) and the expansion of an image of this size."""
    inputs, texts = reader._process([_gray_image(width, height)])
    grid = inputs.get("image_grid_thw")
    return None if grid is None else [int(n) for n in grid[0]], texts[0]


def get_image_reader(tokenizer: PreTrainedTokenizerBase) -> ImageReader | None:
    """Return the ImageReader that `attach_image_reader` has attached to a tokenizer, or None for a text model."""
    return getattr(tokenizer, "image_reader", None)


def attach_image_reader(processor: object) -> Any:
    """Return the tokenizer of a processor with an ImageReader attached.

    Raises InputError if the processor does not support images, or text.
    """
    tokenizer = getattr(processor, "tokenizer", None)
    reader = ImageReader(processor)
    if tokenizer is None:
        raise InputError(f"{type(processor).__name__} does not support text")
    tokenizer.image_reader = reader
    tokenizer.chat_template = getattr(processor, "chat_template", None) or tokenizer.chat_template
    return tokenizer
