"""Pictures to squares of patches, by Pillow."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from megalight.data.multimodal.forms import NEWLINE, Cut, Form
from megalight.errors import ConfigurationError
from megalight.imports import require

Resize = Literal["crop", "pad", "stretch"]


@dataclass(frozen=True, kw_only=True)
class ImageForm:
    """How an image becomes patches of a square of one size.

    Attributes:
        size: height and width, in pixels.
        patch: height and width of a patch.
        channels: 3 (red, green, blue) or 1 (gray).
        class_token: whether a row of zeros comes first, for the tower's class token. With ``merge``, rows are patches
            alone, and the tower's input gets those of class tokens later.
        merge: side of the squares of patches that are one token. Their rows are neighbors.
        tiles: largest number of square tiles of an image, in the grid nearest to its aspect ratio (InternVL,
            https://arxiv.org/abs/2404.16821). Each tile is an image of its own. After several tiles comes the whole
            image. 1: the image is one square, by ``resize``.
        newline: whether the tokens of an image end with one that stands for no patch, but for a learned row.
        axes: whether tokens have positions on several axes.
        mutual: whether the tokens of an image see each other in the language model.
        resize: ``crop``: the shorter side becomes ``size``, and the middle is kept (CLIP, LLaVA-1.5 in
            ``transformers``). ``pad``: borders make a square first. ``stretch``: height and width alone.
        resample: ``bicubic`` or ``bilinear``.
        border: the color of borders: the mean color of images, by the model.

    Raises:
        ConfigurationError: ``resize`` is none of these.
    """

    size: int
    patch: int
    channels: int = 3
    class_token: bool = True
    newline: bool = False
    resize: Resize = "crop"
    axes: bool = False
    mutual: bool = False
    merge: int = 1
    tiles: int = 1
    resample: str = "bicubic"
    border: tuple[int, ...] = (127, 127, 127)

    cut_axes = ()

    def __post_init__(self) -> None:
        if self.resize not in get_args(Resize):
            raise ConfigurationError(f"resize is {self.resize!r}; it must be one of {get_args(Resize)}.")

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.size // self.patch) ** 2

    @property
    def num_rows(self) -> int:
        """Rows of an image: its patches, and its class token."""
        return self.num_patches + self.class_token

    @property
    def square_tokens(self) -> int:
        """Tokens of a square: one for each square of patches, and a newline."""
        return self.num_patches // self.merge**2 + self.newline

    @property
    def fixed_tokens(self) -> int | None:
        """Tokens of an image, if all have as many."""
        return self.square_tokens if self.tiles == 1 else None

    def among(self, count: int) -> Form:
        """Return this form: it does not depend on the number of images."""
        return self

    def num_tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image with so many pixels."""
        columns, rows = self.arrangement(width, height)
        return self.square_tokens * _with_whole(columns * rows)

    def arrangement(self, width: int, height: int) -> tuple[int, int]:
        """Return how many squares lie beside and below each other: nearest to the shape of an image of this size.

        Of equally near ones it is the largest with less than twice the pixels of the image.
        """
        found, nearest = (1, 1), float("inf")
        sides = range(1, self.tiles + 1)
        every = [(columns, rows) for columns in sides for rows in sides if columns * rows <= self.tiles]
        for columns, rows in sorted(every, key=lambda each: each[0] * each[1]):
            distance = abs(width / height - columns / rows)
            enough = width * height > 0.5 * self.size**2 * columns * rows
            if distance < nearest or (distance == nearest and enough):
                found, nearest = (columns, rows), distance
        return found

    def cut(self, image: Any) -> Cut:
        """Return the rows and tokens of a Pillow image."""
        colored = rgb(image, self.channels)
        if self.tiles == 1:
            return self.divided(self.squared(colored))
        columns, rows = self.arrangement(*image.size)
        size, kernel = self.size, self.filter
        large = self.array(colored.resize((columns * size, rows * size), kernel))
        squares = large.reshape(rows, size, columns, size, self.channels).swapaxes(1, 2)
        squares = squares.reshape(-1, size, size, self.channels)
        if len(squares) > 1:
            squares = np.concatenate([squares, self.array(colored.resize((size, size), kernel))[None]])
        return self.divided(squares.reshape(-1, size, self.channels))

    def divided(self, pixels: NDArray[np.uint8]) -> Cut:
        """Return the rows and tokens of pixels ``[tiles * size, size, channels]``: one or several squares."""
        side, tiles = self.size // self.patch, len(pixels) // self.size
        own, positions = np.arange(self.class_token, self.num_rows), np.arange(self.num_rows)
        if self.merge > 1:
            own, positions = np.arange(self.num_patches // self.merge**2), self._order()
        features = len(own) + (self.class_token if self.merge == 1 else 0)
        ends = np.full(int(self.newline), NEWLINE)
        source = np.concatenate([part for tile in range(tiles) for part in (own + tile * features, ends)])
        rows = np.concatenate([self._rows(each) for each in pixels.reshape(tiles, self.size, self.size, -1)])
        grid = (side // self.merge, side // self.merge)
        return Cut(rows, np.tile(positions, tiles), source, grid, features=tiles * features, tiles=tiles)

    def patches(self, image: Any) -> NDArray[np.uint8]:
        """``[rows, channels * patch * patch]`` of a Pillow image in one square."""
        return self._rows(self.squared(rgb(image, self.channels)))

    def squared(self, image: Any) -> NDArray[np.uint8]:
        """``[size, size, channels]`` of a Pillow image with these colors, in one square."""
        return self.array(self._square(image))

    @property
    def filter(self) -> Any:
        """Pillow's filter for resizing."""
        return getattr(_pillow().Resampling, self.resample.upper())

    def array(self, image: Any) -> NDArray[np.uint8]:
        """``[height, width, channels]`` of a Pillow image with these colors."""
        return np.asarray(image).reshape(image.height, image.width, self.channels)

    def _order(self) -> NDArray[np.int64]:
        """Return the number of each patch in rows and columns, square by square, and row by row inside of a square."""
        m, side = self.merge, self.size // self.patch
        numbers = np.arange(side * side).reshape(side // m, m, side // m, m)
        return numbers.swapaxes(1, 2).reshape(-1)

    def _rows(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        side, patch = self.size // self.patch, self.patch
        # Where patches do not divide the image, pixels at the right and at the bottom are left out.
        pixels = pixels[: side * patch, : side * patch]
        # Rows and columns of patches first; inside a patch colors first, as a convolution's weight has them.
        cut = pixels.reshape(side, patch, side, patch, self.channels).transpose(0, 2, 4, 1, 3)
        cut = cut.reshape(self.num_patches, -1)
        if self.merge > 1:
            return np.ascontiguousarray(cut[self._order()])
        rows = np.zeros((self.num_rows, cut.shape[1]), np.uint8)
        rows[self.num_rows - self.num_patches :] = cut
        return rows

    def _square(self, image: Any) -> Any:
        size = self.size, self.size
        width, height = image.size
        if self.resize == "crop":
            short = min(width, height)
            scaled = tuple(max(self.size, int(side * self.size / short)) for side in (width, height))
            left, top = ((side - self.size) // 2 for side in scaled)
            kept = left, top, left + self.size, top + self.size
            if _too_large(*scaled):
                # Of long strips only what is kept is made.
                box = tuple(at * own / whole for at, own, whole in zip(kept, image.size * 2, scaled * 2, strict=True))
                return image.resize(size, self.filter, box)
            return image.resize(scaled, self.filter).crop(kept)
        if self.resize == "pad" and width != height:
            long = max(width, height)
            if _too_large(long, long):
                # The borders are added after the image is small.
                own = image.resize([max(1, round(side * self.size / long)) for side in image.size], self.filter)
                return self._padded(own, self.size)
            return self._padded(image, long).resize(size, self.filter)
        return image.resize(size, self.filter)

    def _padded(self, image: Any, side: int) -> Any:
        """Return a square with the image in the middle."""
        border = self.border if self.channels == 3 else self.border[0]
        square = _pillow().new(image.mode, (side, side), border)
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return square


def _too_large(width: int, height: int) -> bool:
    """Return whether an image would have more pixels than Pillow decodes."""
    most = _pillow().MAX_IMAGE_PIXELS
    return most is not None and width * height > most


def _with_whole(squares: int) -> int:
    """Return the number of squares with the one of the whole image, which follows several."""
    return squares if squares == 1 else squares + 1


def rgb(image: Any, channels: int) -> Any:
    """Return a Pillow image with these colors: 3 (red, green, blue) or 1 (gray)."""
    return image.convert("RGB" if channels == 3 else "L")


def _pillow() -> ModuleType:
    return require("PIL.Image", "images")
