"""Image preprocessing for any resolution: tiles of one size (AnyRes), or patches in the image's own shape (dynamic)."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from math import ceil, floor, prod, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalight.data.multimodal.images import ImageForm, Resize, rgb
from megalight.data.multimodal.template import MIXED, NEWLINE, ImageFormat, ImagePatches
from megalight.errors import DataError
from megalight.imports import require


class Lines(NamedTuple):
    """Where the tokens of an image are in its grid of features.

    Attributes:
        top, left: rows and columns of features before them, which stand for a border.
        height, width: rows and columns of features without borders.
        shrunk: rows and columns of tokens that are mixtures of these. None: each feature is a token.
    """

    top: int
    left: int
    height: int
    width: int
    shrunk: tuple[int, int] | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return self.shrunk or (self.height, self.width)


@dataclass(frozen=True, kw_only=True)
class AnyResForm:
    """How an image of any shape becomes squares; see :class:`~megalight.models.vision.config.AnyResConfig`.

    Attributes:
        square: how a square becomes patches.
        grids: rows and columns of tiles of each grid.
        most: grids with the features of more tiles than these are shrunk. 0: none is.
        alone: whether images that have others beside them are one square.
    """

    square: ImageForm
    grids: tuple[tuple[int, int], ...]
    most: int = 0
    alone: bool = False

    axes = False
    mutual = False
    cut_axes = ()
    fixed_tokens = None

    @property
    def patch(self) -> int:
        """Height and width of a patch."""
        return self.square.patch

    @property
    def channels(self) -> int:
        """Colors of a pixel."""
        return self.square.channels

    @property
    def merge(self) -> int:
        """Side of the squares of patches that are one row of features."""
        return self.square.merge

    @property
    def side(self) -> int:
        """Rows of features of a tile."""
        return self.square.size // (self.patch * self.merge)

    def among(self, count: int) -> ImageFormat:
        """Return the form of images of a conversation with so many."""
        return self.square if self.alone and count > 1 else self

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of tiles of an image with so many pixels."""

        def lost(grid: tuple[int, int]) -> tuple[int, int]:
            rows, columns = (count * self.square.size for count in grid)
            scale = min(columns / width, rows / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return -kept, rows * columns - kept

        return min(self.grids, key=lost)

    def lines(self, width: int, height: int) -> Lines:
        """Return where the tokens of an image with so many pixels are in its grid of features."""
        tall, wide = (count * self.side for count in self.grid(width, height))
        top = left = 0
        # Rounded at the seventh place, so that a border of a whole number of features is one.
        if width / height > wide / tall:
            top = (tall - int(round(height * (wide / width), 7))) // 2
        else:
            left = (wide - int(round(width * (tall / height), 7))) // 2
        tall, wide = tall - 2 * top, wide - 2 * left
        ratio = sqrt(tall * wide / (self.most * self.side**2)) if self.most else 0.0
        shrunk = (int(tall // ratio), int(wide // ratio)) if ratio > 1.1 else None
        return Lines(top, left, tall, wide, shrunk)

    def num_tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image with so many pixels."""
        rows, columns = self.lines(width, height).shape
        return self.side**2 + rows * (columns + self.square.newline)

    def divided(self, pixels: NDArray[np.uint8]) -> ImagePatches:
        """Return the rows and tokens of pixels ``[height, width, channels]``, of which a smaller whole is made."""
        image = require("PIL.Image", "images").fromarray(pixels if self.channels == 3 else pixels[..., 0])
        return self.cut(image)

    def cut(self, image: Any) -> ImagePatches:
        """Return the rows and tokens of a Pillow image."""
        colored, size = rgb(image, self.channels), self.square.size
        rows, columns = self.grid(*image.size)
        tiles = self.square.array(self._fitted(colored, columns * size, rows * size))
        tiles = tiles.reshape(rows, size, columns, size, self.channels).swapaxes(1, 2)
        whole = replace(self.square, resize="stretch").squared(colored)
        pixels = np.concatenate([whole[None], tiles.reshape(-1, size, size, self.channels)])
        cut = replace(self.square, newline=False).divided(pixels.reshape(-1, size, self.channels))
        places = cut.source.reshape(1 + rows * columns, self.side, self.side)
        own, mixed_rows, mixed_shares = self._tokens(places, (rows, columns), self.lines(*image.size))
        return replace(cut, source=own, mixed_rows=mixed_rows, mixed_shares=mixed_shares)

    def _fitted(self, image: Any, width: int, height: int) -> Any:
        """Return an image scaled to fit, in the middle of a black one of this size."""
        by_width, by_height = width / image.width, height / image.height
        if by_width < by_height:
            size = width, min(ceil(image.height * by_width), height)
        else:
            size = min(ceil(image.width * by_height), width), height
        canvas = require("PIL.Image", "images").new(image.mode, (width, height))
        canvas.paste(image.resize(size, self.square.filter), ((width - size[0]) // 2, (height - size[1]) // 2))
        return canvas

    def _tokens(
        self, places: NDArray[np.int64], grid: tuple[int, int], lines: Lines
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Return the source of each token, and rows and shares of mixtures.

        Args:
            places: ``[squares, side, side]``: the row of features of each place of each square, the whole image first.
            grid: rows and columns of tiles.
            lines: where the tokens are in the grid.
        """
        tall, wide = (count * self.side for count in grid)
        own = places[1:].reshape(*grid, self.side, self.side).swapaxes(1, 2).reshape(tall, wide)
        own = own[lines.top : tall - lines.top, lines.left : wide - lines.left]
        rows, shares = np.zeros((0, 4), np.int64), np.zeros((0, 4))
        if lines.shrunk is not None:
            rows, shares = mixtures(own, lines.shrunk)
            own = MIXED - np.arange(len(rows)).reshape(lines.shrunk)
        if self.square.newline:
            own = np.pad(own, ((0, 0), (0, 1)), constant_values=NEWLINE)
        return np.concatenate([places[0].reshape(-1), own.reshape(-1)]), rows, shares


def mixtures(rows: NDArray[np.int64], shape: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Lay a smaller grid over a grid of features: each of its places is between four of these (bilinear).

    Args:
        rows: ``[height, width]``: rows of features.
        shape: height and width of the smaller grid.

    Returns:
        ``[places, 4]``: rows of features, and their shares, which sum to 1.
    """
    ends, shares = [], []
    for old, new in zip(rows.shape, shape, strict=True):
        # Places are the middles of cells, so both grids have the same edges.
        at = np.maximum((np.arange(new) + 0.5) * (old / new) - 0.5, 0.0)
        low = at.astype(np.int64)
        ends.append(np.stack([low, np.minimum(low + 1, old - 1)]))
        shares.append(np.stack([1 - (at - low), at - low]))
    corners = rows[ends[0][:, None, :, None], ends[1][None, :, None, :]]  # [2, 2, height, width]
    weights = shares[0][:, None, :, None] * shares[1][None, :, None, :]
    return corners.reshape(4, -1).T.copy(), weights.reshape(4, -1).T.copy()


LONGEST = 200
"""Images that are more than so many times as long as wide are refused, as by Qwen2.5-VL."""


LARGEST = 100
"""Images are enlarged by at most so much."""


def largest_grid(width: float, height: float, count: int) -> tuple[int, int]:
    """Return columns and rows of the largest grid of at most ``count`` cells that an image of this shape fills.

    The image grows until another cell would be too many. Cells that it has begun count as whole.

    Args:
        width, height: of the image, in cells.
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
            columns, rows = largest_grid(width / unit, height / unit, self.patches // self.merge**2)
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

    def among(self, count: int) -> ImageFormat:
        """Return this form: it does not depend on the number of images."""
        return self

    def num_tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image with so many pixels: one for each square of patches."""
        columns, rows = (side // (self.patch * self.merge) for side in self.size(width, height))
        return rows * columns

    def cut(self, image: Any) -> ImagePatches:
        """Return the rows and tokens of a Pillow image."""
        pillow, size = require("PIL.Image", "images"), self.size(*image.size)
        scaled = rgb(image, self.channels).resize(size, getattr(pillow.Resampling, self.resample.upper()))
        return self.divided(np.asarray(scaled).reshape(size[1], size[0], self.channels))

    def divided(self, pixels: NDArray[np.uint8]) -> ImagePatches:
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
        return ImagePatches(
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


def form_of(config: Any, resize: Resize | None = None) -> ImageFormat:
    """Return how images become rows and tokens of a model, whose ``VLMConfig`` is given.

    Args:
        resize: how an image becomes a square, for a model that reads squares. None: as the model says.
    """
    vision, axes = config.vision, config.position.axes is not None
    if (dynamic := vision.dynamic) is None:
        square = ImageForm(
            size=vision.image_size,
            patch=vision.patch_size,
            channels=vision.channels,
            class_token=vision.class_token and not config.added_rows,
            merge=config.projector.merge,
            tiles=vision.tiles,
            newline=config.newline,
            resize=resize or vision.resize,
            resample=vision.resample,
            border=tuple(int(255 * mean) for mean in vision.mean),
            axes=axes,
            mutual=config.mutual,
        )
        if (anyres := vision.anyres) is None:
            return square
        return AnyResForm(square=square, grids=anyres.grids, most=anyres.most, alone=anyres.alone)
    return DynamicForm(
        patch=vision.patch_size,
        merge=config.projector.merge,
        min_pixels=dynamic.min_pixels,
        max_pixels=dynamic.max_pixels,
        patches=dynamic.patches,
        resample=vision.resample,
        window=dynamic.window,
        channels=vision.channels,
        axes=axes,
        extent=dynamic.table > 0,
    )
