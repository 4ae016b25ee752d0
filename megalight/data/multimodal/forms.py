"""What an image becomes: rows of patches for the tower, and the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

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
        rows: rows of features before.
        mixed: mixtures before.
    """
    found: A = source + (source >= 0) * rows - (source <= MIXED) * mixed
    return found


def sources(cuts: Sequence[ImagePatches], first: int = 0, mixed: int = 0) -> NDArray[np.int64]:
    """Return the source of each token of several images.

    Args:
        cuts: the images.
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
