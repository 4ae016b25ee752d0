"""Images of any size to patches: each keeps its shape, and nearly its size."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil, floor, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalight.data.multimodal.forms import Cut, Form
from megalight.data.multimodal.images import rgb
from megalight.errors import DataError
from megalight.imports import require

LONGEST = 200
"""Images that are more than so many times as long as wide are refused, as by Qwen2.5-VL."""


LARGEST = 100
"""Images are enlarged by at most so much."""


def nearly(width: float, height: float, count: int) -> tuple[int, int]:
    """Return columns and rows of the largest grid of at most ``count`` cells that an image of this shape fills.

    The image grows until another cell would be too many. Cells that it has begun count as whole.

    Args:
        width, height: of the image, in cells.
        count: of cells.
    """

    def cells(scale: float) -> tuple[int, int]:
        # What is meant as a whole number is one.
        columns, rows = (max(1, ceil(round(side * scale, 9))) for side in (width, height))
        return columns, rows

    # A cell is begun where a side passes a whole number of cells.
    scales = sorted(min(LARGEST, number / side) for side in (width, height) for number in range(1, count + 1))
    fitting = bisect_right(scales, count, key=lambda scale: prod(cells(scale)))
    return cells(scales[fitting - 1] if fitting else 0.0)


@dataclass(frozen=True, kw_only=True)
class DynamicForm:
    """How an image of any size becomes patches (Qwen2.5-VL, https://arxiv.org/abs/2502.13923).

    Rows of patches are in the order in which the tower needs them: window by window, inside of a window square by
    square of ``merge`` x ``merge`` patches. So windows and squares are neighboring rows, and nothing is moved later.

    Attributes:
        patch: height and width of a patch, in pixels.
        merge: side of the squares of patches that are one token.
        min_pixels, max_pixels: images with fewer or more pixels are enlarged or shrunk.
        patches: images are enlarged or shrunk to nearly so many patches, and never more; 0: to these limits.
        window: side of a window, in pixels. 0: there are none.
        channels: 3 (red, green, blue) or 1 (gray).
        axes: whether tokens have positions on several axes.
        resample: ``bicubic`` or ``bilinear``.
        extent: whether positions of patches say the rows and columns of their image, too, for a table of positions.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    patches: int = 0
    window: int = 0
    channels: int = 3
    axes: bool = True
    extent: bool = False
    resample: str = "bicubic"

    mutual = False
    fixed_tokens = None

    @property
    def cut_axes(self) -> tuple[int, ...]:
        """The first dims of positions, before the rows."""
        return (4,) if self.extent else (2,)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height after resizing: multiples of a square of patches, with a fitting number of pixels.

        Raises:
            DataError: it is more than 200 times as long as wide.
        """
        long, short = max(width, height), min(width, height)
        if long > LONGEST * short:
            raise DataError(
                f"an image of {width} x {height} pixels is more than {LONGEST} times as long as wide, and is not read; "
                "cut it into parts."
            )
        unit = self.patch * self.merge
        if self.patches:
            columns, rows = nearly(width / unit, height / unit, self.patches // self.merge**2)
            return columns * unit, rows * unit
        found = [round(side / unit) * unit for side in (width, height)]
        pixels = width * height
        # A side of less than half a square is rounded to 0, and so enlarged here.
        if found[0] * found[1] > self.max_pixels:
            scale = sqrt(pixels / self.max_pixels)
            found = [max(unit, floor(side / scale / unit) * unit) for side in (width, height)]
        elif found[0] * found[1] < self.min_pixels:
            scale = sqrt(self.min_pixels / pixels)
            found = [ceil(side * scale / unit) * unit for side in (width, height)]
        return found[0], found[1]

    def among(self, count: int) -> Form:
        """Return this form: it does not depend on the number of images."""
        return self

    def num_tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image with so many pixels: one for each square of patches."""
        columns, rows = (side // (self.patch * self.merge) for side in self.size(width, height))
        return rows * columns

    def cut(self, image: Any) -> Cut:
        """Return the rows and tokens of a Pillow image."""
        pillow, size = require("PIL.Image", "images"), self.size(*image.size)
        scaled = rgb(image, self.channels).resize(size, getattr(pillow.Resampling, self.resample.upper()))
        return self.divided(np.asarray(scaled).reshape(size[1], size[0], self.channels))

    def divided(self, pixels: NDArray[np.uint8]) -> Cut:
        """Return the rows and tokens of pixels ``[height, width, channels]``, whose sides squares of patches divide."""
        m, p = self.merge, self.patch
        rows, columns = (side // (m * p) for side in pixels.shape[:2])
        # Squares first; inside of a square its patches, row by row; inside of a patch colors, as a convolution's
        # weight has them.
        cut = pixels.reshape(rows, m, p, columns, m, p, self.channels).transpose(0, 3, 1, 4, 6, 2, 5)
        squares = cut.reshape(rows * columns, m * m, -1)
        order, windows = self._windows(rows, columns)
        down, right = np.divmod(order, columns)
        inner = np.divmod(np.arange(m * m), m)
        positions = np.stack(
            [(outer[:, None] * m + own).reshape(-1) for outer, own in zip((down, right), inner, strict=True)]
        )
        if self.extent:
            sides = np.broadcast_to(np.array([[rows * m], [columns * m]]), positions.shape)
            positions = np.concatenate([positions, sides])
        # Token number `t` is the square `t`, which `order` has moved.
        source = np.empty(rows * columns, np.int64)
        source[order] = np.arange(rows * columns)
        return Cut(
            np.ascontiguousarray(squares[order].reshape(rows * columns * m * m, -1)),
            positions,
            source,
            (rows, columns),
            tuple(count * m * m for count in windows),
            rows * columns,
        )

    def _windows(self, rows: int, columns: int) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """Return the squares in the order of windows, which are smaller at the edges, and the squares of each."""
        numbers = np.arange(rows * columns).reshape(rows, columns)
        if not self.window:
            return numbers.reshape(-1), ()
        side = self.window // (self.patch * self.merge)
        parts = [
            numbers[top : top + side, left : left + side].reshape(-1)
            for top in range(0, rows, side)
            for left in range(0, columns, side)
        ]
        return np.concatenate(parts), tuple(map(len, parts))
