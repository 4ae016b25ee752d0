"""Image files to patches, by Pillow."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from megalight.data.multimodal.forms import Cut
from megalight.errors import ConfigurationError, DataError
from megalight.imports import require

NEWLINE = -2
"""In the place of a row's number: a token of an image that stands for a learned row."""

Resize = Literal["crop", "pad", "stretch"]


@dataclass(frozen=True, kw_only=True)
class ImageForm:
    """How an image becomes patches of a square of one size.

    Attributes:
        size: height and width, in pixels.
        patch: height and width of a patch.
        channels: 3 (red, green, blue) or 1 (grey).
        class_token: whether a row of zeros comes first, for the tower's class token.
        newline: whether the tokens of an image end with one that stands for no patch, but for a learned row.
        axes: whether tokens have positions on several axes.
        resize: ``crop``: the shorter side becomes ``size``, and the middle is kept (CLIP, LLaVA-1.5 in
            ``transformers``). ``pad``: grey borders make a square first. ``stretch``: height and width alone.

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

    merge = 1
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
    def fixed_tokens(self) -> int:
        """Tokens of an image: one for each patch, and a newline."""
        return self.num_patches + self.newline

    def num_tokens(self, width: int, height: int) -> int:
        """Return :attr:`fixed_tokens`, whatever the image's size."""
        return self.fixed_tokens

    def cut(self, image: Any) -> Cut:
        """Return the rows and tokens of a Pillow image."""
        return self.divided(self._pixels(image))

    def divided(self, pixels: NDArray[np.uint8]) -> Cut:
        """Return the rows and tokens of pixels ``[size, size, channels]``."""
        rows = np.arange(self.class_token, self.num_rows)
        side = self.size // self.patch
        source = np.pad(rows, (0, int(self.newline)), constant_values=NEWLINE)
        return Cut(self._rows(pixels), np.arange(self.num_rows), source, (side, side))

    def patches(self, image: Any) -> NDArray[np.uint8]:
        """``[rows, channels * patch * patch]`` of a Pillow image."""
        return self._rows(self._pixels(image))

    def _pixels(self, image: Any) -> NDArray[np.uint8]:
        squared = self._square(rgb(image, self.channels))
        return np.asarray(squared).reshape(self.size, self.size, self.channels)

    def _rows(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        side, patch = self.size // self.patch, self.patch
        # Where patches do not divide the image, pixels at the right and at the bottom are left out.
        pixels = pixels[: side * patch, : side * patch]
        # Rows and columns of patches first; inside a patch colours first, as a convolution's weight has them.
        cut = pixels.reshape(side, patch, side, patch, self.channels).transpose(0, 2, 4, 1, 3)
        rows = np.zeros((self.num_rows, self.channels * patch * patch), np.uint8)
        rows[self.num_rows - self.num_patches :] = cut.reshape(self.num_patches, -1)
        return rows

    def _square(self, image: Any) -> Any:
        pillow, size = _pillow(), (self.size, self.size)
        width, height = image.size
        if self.resize == "crop":
            short = min(width, height)
            scaled = tuple(max(self.size, int(side * self.size / short)) for side in (width, height))
            image = image.resize(scaled, pillow.Resampling.BICUBIC)
            left, top = ((side - self.size) // 2 for side in scaled)
            return image.crop((left, top, left + self.size, top + self.size))
        if self.resize == "pad" and width != height:
            long = max(width, height)
            square = pillow.new(image.mode, (long, long), (127,) * self.channels if self.channels == 3 else 127)
            square.paste(image, ((long - width) // 2, (long - height) // 2))
            image = square
        return image.resize(size, pillow.Resampling.BICUBIC)


def rgb(image: Any, channels: int) -> Any:
    """Return a Pillow image with these colours: 3 (red, green, blue) or 1 (grey)."""
    return image.convert("RGB" if channels == 3 else "L")


def decode(data: bytes, place: str) -> Any:
    """Return the Pillow image in the bytes of a file, decoded as a whole.

    Args:
        data: the file.
        place: where it is from, for messages.

    Raises:
        DataError: it is no image that Pillow reads, it is damaged, or it has more pixels than
            ``PIL.Image.MAX_IMAGE_PIXELS``, whose memory it would take to decode.
    """
    pillow = _pillow()
    try:
        with warnings.catch_warnings():
            # Pillow warns of a bomb up to twice the limit, and only then raises.
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            image = pillow.open(io.BytesIO(data))
            image.load()
    except (pillow.DecompressionBombWarning, pillow.DecompressionBombError) as error:
        raise DataError(f"{place} is refused: {error} Raise PIL.Image.MAX_IMAGE_PIXELS if it is no attack.") from error
    # Decoders raise many types for damaged files.
    except (OSError, ValueError, SyntaxError, IndexError, EOFError, MemoryError) as error:
        raise DataError(f"{place} cannot be read as an image ({type(error).__name__}: {error}).") from error
    return image


def measure(data: bytes, place: str) -> tuple[int, int]:
    """Return width and height of the image in the bytes of a file, which is not decoded.

    Raises:
        DataError: it is no image that Pillow reads.
    """
    pillow = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pillow.DecompressionBombWarning)  # `decode` refuses it
            size: tuple[int, int] = pillow.open(io.BytesIO(data)).size
    except (OSError, ValueError, SyntaxError, IndexError, EOFError, pillow.DecompressionBombError) as error:
        raise DataError(f"{place} cannot be read as an image ({type(error).__name__}: {error}).") from error
    return size


def _pillow() -> ModuleType:
    return require("PIL.Image", "images")
