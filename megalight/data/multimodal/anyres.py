"""Images of any shape as squares: the whole image, and a grid of tiles without its borders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalight.data.multimodal.forms import MIXED, NEWLINE, Cut, Form
from megalight.data.multimodal.images import ImageForm, rgb
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
    """How an image of any shape becomes squares; see :class:`~megalight.models.vision.anyres_config.AnyResConfig`.

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

    def among(self, count: int) -> Form:
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

    def divided(self, pixels: NDArray[np.uint8]) -> Cut:
        """Return the rows and tokens of pixels ``[height, width, channels]``, of which a smaller whole is made."""
        image = require("PIL.Image", "images").fromarray(pixels if self.channels == 3 else pixels[..., 0])
        return self.cut(image)

    def cut(self, image: Any) -> Cut:
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
