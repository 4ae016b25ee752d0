"""Chat templates of models that read images: where a row has its images, and what stands for one in its text."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megalight.data.chat.template import PROBE, ChatTemplate, Span
from megalight.errors import DataError

AXES = 3
"""Axes of positions of tokens of images: time, height and width."""

NEWLINE = -2
"""In the place of a row's number: a token of an image that stands for a learned row."""

MIXED = -3
"""In the place of a row's number: the first mixture of rows. That with number ``m`` is ``MIXED - m``."""


A = TypeVar("A", bound=Any)


@dataclass(frozen=True, eq=False)
class ImagePatches:
    """An image as rows of patches.

    Attributes:
        pixels: ``[rows, channels * height * width]`` uint8. A row of a class token is zeros.
        positions: ``[rows]`` int64: the row of each patch in the tower's table of positions; or ``[2, rows]``: its row
            and its column in the image; or ``[4, rows]``: and the rows and columns of the image.
        source: ``[tokens]`` int64: for each token of the image, the row of features that it stands for, ``NEWLINE``, or
            ``MIXED`` less the number of a mixture.
        grid: rows and columns of tokens.
        windows: rows of each window, in order; empty: there are none.
        features: rows of features, fewer than ``rows`` where the projector joins some.
        tiles: of so many parts of equal size, one after the other, each is an image of its own for the tower.
        mixed_rows: ``[M, 4]`` int64: the rows of features that each mixture is made of.
        mixed_shares: ``[M, 4]`` float64: the share of each, which sum to 1.
    """

    pixels: NDArray[np.uint8]
    positions: NDArray[np.int64]
    source: NDArray[np.int64]
    grid: tuple[int, int]
    windows: tuple[int, ...] = ()
    features: int = 0
    tiles: int = 1
    mixed_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 4), np.int64))
    mixed_shares: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 4)))

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", self.features or len(self.pixels))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each part."""
        return (len(self.pixels) // self.tiles,) * self.tiles


class ImageFormat(Protocol):
    """How images become rows and tokens."""

    @property
    def patch(self) -> int:
        """Height and width of a patch."""
        ...

    @property
    def channels(self) -> int:
        """Colors of a pixel."""
        ...

    @property
    def axes(self) -> bool:
        """Whether tokens have positions on several axes."""
        ...

    @property
    def mutual(self) -> bool:
        """Whether the tokens of an image see each other in the language model."""
        ...

    @property
    def merge(self) -> int:
        """Side of the squares of patches that are one row of features."""
        ...

    @property
    def cut_axes(self) -> tuple[int, ...]:
        """The first dims of :attr:`ImagePatches.positions`, before the rows."""
        ...

    @property
    def fixed_tokens(self) -> int | None:
        """Tokens of an image, if all have as many."""
        ...

    def among(self, count: int) -> ImageFormat:
        """Return the form of the images of a conversation that has so many."""
        ...

    def num_tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image with so many pixels.

        Raises:
            DataError: it has a shape that is not read.
        """
        ...

    def divided(self, pixels: NDArray[np.uint8]) -> ImagePatches:
        """Return the rows and tokens of pixels ``[height, width, channels]`` that have a fitting size already."""
        ...

    def cut(self, image: Any) -> ImagePatches:
        """Return the rows and tokens of a Pillow image.

        Raises:
            DataError: it has a shape that is not read.
        """
        ...


def shifted(source: A, rows: int, mixed: int) -> A:
    """Return sources, an array or a tensor, with other images before them.

    Args:
        source: for each token, the row of features that it stands for, -1 for text, ``NEWLINE``, or a mixture.
    """
    found: A = source + (source >= 0) * rows - (source <= MIXED) * mixed
    return found


def sources(cuts: Sequence[ImagePatches], first: int = 0, mixed: int = 0) -> NDArray[np.int64]:
    """Return the source of each token of several images.

    Args:
        first: the row of features with which the first one begins.
        mixed: the number of its first mixture.
    """
    found = [np.zeros(0, np.int64)]
    for cut in cuts:
        found.append(shifted(cut.source, first, mixed))
        first += cut.features
        mixed += len(cut.mixed_rows)
    return np.concatenate(found)


def axis_positions(length: int, images: Sequence[tuple[int, tuple[int, int]]]) -> NDArray[np.int64]:
    """Return positions ``[3, length]`` of the tokens of a sequence: time, height and width (https://arxiv.org/abs/2409.12191).

    Text has one position on all axes. A token of an image has the position where the image begins, on height and width
    with its row and its column added. Text after an image goes on behind the largest of its positions.

    Args:
        length: tokens of the sequence. A last image may be cut off.
        images: the first token of each image, in order, and its rows and columns of tokens.
    """
    found = np.empty((AXES, length), np.int64)
    at = next_position = 0
    for start, (rows, columns) in images:
        found[:, at:start] = next_position + np.arange(start - at)
        next_position += start - at
        places = np.stack([np.zeros(rows * columns, np.int64), *np.divmod(np.arange(rows * columns), columns)])
        at = min(length, start + rows * columns)
        found[:, start:at] = next_position + places[:, : at - start]
        next_position += max(rows, columns)
    found[:, at:] = next_position + np.arange(length - at)
    return found


KEYS = ("images", "image")
"""Keys of rows that hold images. A null is as no key: Parquet fills with it what a row does not have."""
TYPES = ("image", "image_url")
"""Types of parts of messages that are images."""
HOLDERS = ("image", "image_url", "url", "path")
"""Keys of such a part that may hold the image."""


def images_of(record: Mapping[str, Any], place: str) -> list[Any]:
    """Return the images of a row: of its key, or of parts of its messages.

    Raises:
        DataError: it has both.
    """
    given = next((record[key] for key in KEYS if record.get(key) is not None), None)
    own = [held for held in map(_held, _parts(record)) if held is not None]
    if given is not None and own:
        raise DataError(f"{place} has images beside its messages and in them; leave one of them out.")
    return own if given is None else given if isinstance(given, list) else [given]


def is_image(part: Any) -> bool:
    """Return whether a part of a message is an image."""
    return isinstance(part, Mapping) and part.get("type") in TYPES


def _held(part: Mapping[str, Any]) -> Any:
    found = next((part[key] for key in HOLDERS if part.get(key) is not None), None)
    return found["url"] if isinstance(found, Mapping) and "url" in found else found


def _parts(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key, value in record.items():
        for message in value if key not in KEYS and isinstance(value, list) else ():
            content = message.get("content") if isinstance(message, Mapping) else None
            yield from filter(is_image, content if isinstance(content, list) else ())


IMAGE_TOKEN = "<image>"
"""What stands for an image in the text of LLaVA's files, and in prompts."""


@dataclass(frozen=True)
class ImageText:
    """How the place of an image is written.

    Attributes:
        mark: what chat templates read and write there.
        whole: what the tokenizer reads there, with the image token once. It replaces ``mark`` after a template has
            run, so that none of it is trimmed.
    """

    mark: str
    whole: str

    def marked(self, text: str) -> str:
        """Return a text with the mark for each ``<image>``."""
        return text.replace(IMAGE_TOKEN, self.mark)

    def framed(self, text: str, spans: Sequence[Span] = ()) -> tuple[str, list[Span]]:
        """Return a text with the whole for each mark, and spans of the same characters in it.

        Marks that are in a whole already stay.
        """
        pattern = re.compile(f"{re.escape(self.whole.strip())}|({re.escape(self.mark)})")
        found = pattern.sub(lambda match: self.whole if match[1] else match[0], text)
        starts = [match.start() for match in pattern.finditer(text) if match[1]]
        growth = len(self.whole) - len(self.mark)

        def moved(place: int) -> int:
            return place + growth * bisect_left(starts, place)

        return found, [(moved(start), moved(end)) for start, end in spans]


PLAIN = ImageText(IMAGE_TOKEN, IMAGE_TOKEN)
"""A model without tokens around that of an image."""

FRAMES = tuple(
    ImageText(mark, whole)
    for mark, whole in (
        ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|image_pad|><|vision_end|>"),
        ("<start_of_image>", "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"),
        ("<IMG_CONTEXT>", "<img><IMG_CONTEXT></img>"),
    )
)
"""Published models put tokens around that of an image: Qwen2.5-VL and Qwen3-VL, Gemma-3, InternVL."""


def image_text_of(image_token: str, vocabulary: Mapping[str, int], given: str | None = None) -> ImageText:
    """Return what replaces ``<image>`` in texts: as the published model with this image token writes it.

    Args:
        image_token: the token that stands for an image.
        vocabulary: of the tokenizer. A frame whose tokens it lacks is not used.
        given: the text to take instead.

    Raises:
        DataError: the text that is given does not hold the image token once.
    """
    if given is None:
        known = (each for each in FRAMES if image_token in each.whole and all(t in vocabulary for t in _tokens(each)))
        return next(known, ImageText(image_token, image_token))
    if given.count(image_token) != 1:
        raise DataError(
            f"image_text is {given!r}; it must hold the image token {image_token!r} once (--image-text, --image-token)."
        )
    return ImageText(given, given)


def _tokens(frame: ImageText) -> list[str]:
    return [f"<{part}" for part in frame.whole.strip().split("<")[1:]]


IMAGE = {"type": "image"}
"""A part of a message, as templates know it."""


@dataclass(frozen=True)
class ImageTemplate(ChatTemplate):
    """A chat template whose messages have images: ``<image>`` in their texts, or parts of the type ``image``.

    Parts are written as the template writes them, such as with a line break behind. If it knows none, the text of an
    image takes their place. A template that reads parts alone gets a part for each ``<image>``, and writes the line
    breaks beside it itself.

    Attributes:
        image: how the place of an image is written.
    """

    image: ImageText = PLAIN

    @cached_property
    def writes_images(self) -> bool:
        """Whether it writes the mark of an image for a part of this type."""
        text = self.probe([IMAGE, {"type": "text", "text": PROBE}])
        return text.count(self.image.mark) == 1 and PROBE in text

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, **options: Any
    ) -> tuple[str, list[Span]]:
        ready = [
            {**each, "content": self._content(each["content"])} if "content" in each else each for each in messages
        ]
        return self.image.framed(*super()._render(ready, tools, **options))

    def _content(self, content: Any) -> Any:
        """Return the content of a message in the form that the template reads."""
        if isinstance(content, str):
            text = self.image.marked(content)
            return self._divided(text) if self.parts_only and self.writes_images else text
        if not isinstance(content, list):
            return content
        if not self.writes_images:
            return "".join(self.image.mark if is_image(part) else self.image.marked(part["text"]) for part in content)
        return [
            IMAGE if is_image(part) else {"type": "text", "text": self.image.marked(part["text"])} for part in content
        ]

    def _divided(self, text: str) -> list[Mapping[str, Any]]:
        """Return the parts of a text with marks."""
        first, *others = text.split(self.image.mark)
        if not others:
            return [{"type": "text", "text": text}]
        *middle, last = (each.lstrip("\n") for each in others)
        pieces = [each.rstrip("\n") for each in (first, *middle)] + [last]
        found = list[Mapping[str, Any]]()
        for number, piece in enumerate(pieces):
            found += [IMAGE] * (number > 0)
            found += [{"type": "text", "text": piece}] * bool(piece)
        return found
