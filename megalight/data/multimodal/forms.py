"""What an image becomes: rows of patches for the tower, and the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

AXES = 3
"""Axes of positions of tokens of images: time, height and width."""


@dataclass(frozen=True, eq=False)
class Cut:
    """An image as rows of patches.

    Attributes:
        pixels: ``[rows, channels * height * width]`` uint8. A row of a class token is zeros.
        positions: ``[rows]`` int64: the row of each patch in the tower's table of positions; or ``[2, rows]``: its row
            and its column in the image; or ``[4, rows]``: and the rows and columns of the image.
        source: ``[tokens]`` int64: for each token of the image, the row of features that it stands for, or ``NEWLINE``.
        grid: rows and columns of tokens.
        windows: rows of each window, in order; empty: there are none.
        features: rows of features, fewer than ``rows`` where the projector joins some.
        tiles: of so many parts of equal size, one after the other, each is an image of its own for the tower.
    """

    pixels: NDArray[np.uint8]
    positions: NDArray[np.int64]
    source: NDArray[np.int64]
    grid: tuple[int, int]
    windows: tuple[int, ...] = ()
    features: int = 0
    tiles: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", self.features or len(self.pixels))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each part."""
        return (len(self.pixels) // self.tiles,) * self.tiles


class Form(Protocol):
    """How images become rows and tokens."""

    @property
    def patch(self) -> int:
        """Height and width of a patch."""
        ...

    @property
    def channels(self) -> int:
        """Colours of a pixel."""
        ...

    @property
    def axes(self) -> bool:
        """Whether tokens have positions on several axes."""
        ...

    @property
    def merge(self) -> int:
        """Side of the squares of patches that are one row of features."""
        ...

    @property
    def cut_axes(self) -> tuple[int, ...]:
        """The first dims of :attr:`Cut.positions`, before the rows."""
        ...

    @property
    def fixed_tokens(self) -> int | None:
        """Tokens of an image, if all have as many."""
        ...

    def num_tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image with so many pixels.

        Raises:
            DataError: it has a shape that is not read.
        """
        ...

    def divided(self, pixels: NDArray[np.uint8]) -> Cut:
        """Return the rows and tokens of pixels ``[height, width, channels]`` that have a fitting size already."""
        ...

    def cut(self, image: Any) -> Cut:
        """Return the rows and tokens of a Pillow image.

        Raises:
            DataError: it has a shape that is not read.
        """
        ...


def sources(cuts: Sequence[Cut], first: int = 0) -> NDArray[np.int64]:
    """Return the row of features of each token of several images, of which the first begins with row ``first``."""
    found = [np.zeros(0, np.int64)]
    for cut in cuts:
        found.append(np.where(cut.source >= 0, cut.source + first, cut.source))
        first += cut.features
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
