"""Image preprocessing: files are decoded by Pillow, and become squares of patches.

:func:`decode` gives an upright image in 8-bit colors, and :class:`ImageForm` makes patches of it. Videos are
recognized, and not supported.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalight.data.multimodal.template import NEWLINE, ImageFormat, ImagePatches
from megalight.errors import ConfigurationError, DataError
from megalight.imports import require


@dataclass(frozen=True, eq=False)
class Mixtures:
    """Further rows of features: each is a mixture of four.

    Attributes:
        rows: ``[M, 4]`` int64: rows of features of all images.
        shares: ``[M, 4]`` float64: the share of each, which sum to 1.
    """

    rows: Tensor
    shares: Tensor
    counts: tuple[int, ...]

    @classmethod
    def of_cuts(cls, cuts: Sequence[Sequence[ImagePatches]]) -> Mixtures | None:
        """Return those of the images of each sample; None if there are none."""
        rows, shares, first = list[NDArray[np.int64]](), list[NDArray[np.float64]](), 0
        for cut in (cut for own in cuts for cut in own):
            rows.append(cut.mixed_rows + first)
            shares.append(cut.mixed_shares)
            first += cut.features
        counts = tuple(sum(len(cut.mixed_rows) for cut in own) for own in cuts)
        if not any(counts):
            return None
        return cls(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(shares)), counts)

    def of_samples(self, start: int, stop: int, features: int) -> tuple[Mixtures | None, int]:
        """Return those of some samples, and the number before them. ``features``: rows of features before them."""
        first, last = sum(self.counts[:start]), sum(self.counts[:stop])
        if first == last:
            return None, first
        return Mixtures(self.rows[first:last] - features, self.shares[first:last], self.counts[start:stop]), first

    def map(self, change: Callable[[Tensor], Tensor]) -> Mixtures:
        """Return the same with both tensors changed, such as moved."""
        return replace(self, rows=change(self.rows), shares=change(self.shares))


@dataclass(frozen=True, eq=False)
class Images:
    """Patches of images, end to end, in the order of their samples.

    Attributes:
        pixels: ``[P, channels * height * width]``: a row per patch, uint8, or normalized in a floating-point type.
            Rows of class tokens are zeros.
        positions: int64. ``[P]``: the row of each patch in the tower's table of positions. For images of any size
            ``[2, P]``: row and column of each patch; or ``[4, P]``: also the numbers of rows and columns of its image.
        lengths: rows of each image; of an image in tiles, of each tile.
        counts: images of each sample, where each tile is one.
        windows: for each image, the rows of its windows; empty: there are none.
        joined: how many rows after each other are one row of features.
        mixtures: further rows of features, which some tokens stand for; None: there are none.
        highest: the largest position in a table, on the host; None: it is unknown. Copies from the host know it.
    """

    pixels: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...] = ()
    joined: int = 1
    mixtures: Mixtures | None = None
    highest: int | None = None

    def __post_init__(self) -> None:
        """Check that the numbers agree.

        Raises:
            DataError: they do not.
        """
        positions = self.positions.shape[-1]
        if not sum(self.lengths) == len(self.pixels) == positions or sum(self.counts) != len(self.lengths):
            raise DataError(
                f"images have {len(self.pixels)} rows of pixels and {positions} positions, lengths that sum "
                f"to {sum(self.lengths)}, and {len(self.lengths)} images for samples with {sum(self.counts)}; all must "
                "agree."
            )
        if self.windows and tuple(map(sum, self.windows)) != self.lengths:
            raise DataError(
                f"the windows of images have {list(map(sum, self.windows))[:8]} rows, and the images "
                f"{list(self.lengths)[:8]}; each row is in one window."
            )
        if odd := [length for length in self.lengths if length % self.joined]:
            raise DataError(
                f"an image has {odd[0]} rows, of which {self.joined} are joined to one; it must be a multiple."
            )

    @classmethod
    def of_cuts(cls, cuts: Sequence[Sequence[ImagePatches]], form: ImageFormat) -> Images:
        """Lay the rows of images end to end.

        Args:
            cuts: the images of each sample.
        """
        every, axes = [cut for own in cuts for cut in own], form.cut_axes
        pixels = [cut.pixels for cut in every] or [np.zeros((0, form.channels * form.patch**2), np.uint8)]
        positions = [cut.positions for cut in every] or [np.zeros((*axes, 0), np.int64)]
        return cls(
            torch.from_numpy(np.concatenate(pixels)),
            torch.from_numpy(np.concatenate(positions, axis=-1)),
            tuple(length for cut in every for length in cut.lengths),
            tuple(sum(cut.tiles for cut in own) for own in cuts),
            tuple(cut.windows for cut in every) if any(cut.windows for cut in every) else (),
            form.merge**2,
            Mixtures.of_cuts(cuts),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Images:
        """Copy to ``device``."""
        highest = self.highest
        # Where the host may look without a wait.
        if self.positions.is_cpu and self.positions.ndim == 1 and len(self.positions):
            highest = int(self.positions.max())
        return replace(self.map(lambda each: each.to(device, non_blocking=non_blocking)), highest=highest)

    def map(self, change: Callable[[Tensor], Tensor]) -> Images:
        """Return the same with all tensors changed, such as moved."""
        mixtures = None if self.mixtures is None else self.mixtures.map(change)
        return replace(self, pixels=change(self.pixels), positions=change(self.positions), mixtures=mixtures)

    def of_samples(self, start: int, stop: int) -> tuple[Images, int, int]:
        """Return the images of some samples, and the numbers of rows of features and of mixtures before them."""
        bounds = [0, *accumulate(self.counts)]
        first, last = bounds[start], bounds[stop]
        rows = [0, *accumulate(self.lengths)]
        here, before = slice(rows[first], rows[last]), rows[first] // self.joined
        mixtures, mixed = None, 0
        if self.mixtures is not None:
            mixtures, mixed = self.mixtures.of_samples(start, stop, before)
        part = replace(
            self,
            pixels=self.pixels[here],
            positions=self.positions[..., here],
            lengths=self.lengths[first:last],
            counts=self.counts[start:stop],
            windows=self.windows[first:last],
            mixtures=mixtures,
        )
        return part, before, mixed


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

    def among(self, count: int) -> ImageFormat:
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

    def cut(self, image: Any) -> ImagePatches:
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

    def divided(self, pixels: NDArray[np.uint8]) -> ImagePatches:
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
        return ImagePatches(rows, np.tile(positions, tiles), source, grid, features=tiles * features, tiles=tiles)

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


def decode(data: bytes, place: str) -> Any:
    """Return the Pillow image in the bytes of a file: decoded as a whole, in 8-bit colors, upright as the file says.

    Gray images of 16 bits keep their upper 8. Of transparent ones the colors remain, as in ``transformers``.

    Args:
        place: where it is from, for messages.

    Raises:
        DataError: it is no image that Pillow reads, it is damaged, its pixels have no range of their own, or it has
            more pixels than ``PIL.Image.MAX_IMAGE_PIXELS``, whose memory it would take to decode.
    """
    with _opened(data, place) as image:
        image.load()
        turn = TURNS.get(_orientation(image, data))
        found = _in_bytes(image, place)
        return found if turn is None else found.transpose(_pillow().Transpose[turn])


def measure(data: bytes, place: str) -> tuple[int, int]:
    """Return width and height of the image that :func:`decode` gives. It is not decoded.

    Raises:
        DataError: it is no image that Pillow reads, or has too many pixels.
    """
    with _opened(data, place) as image:
        width, height = image.size
        return (height, width) if _orientation(image, data) >= ON_SIDE else (width, height)


@contextmanager
def _opened(data: bytes, place: str) -> Iterator[Any]:
    """Give the Pillow image in the bytes of a file; errors raised inside name the place."""
    pillow = _pillow()
    with warnings.catch_warnings():
        # Pillow warns of damage without a name. It warns of a bomb up to twice the limit, and only then raises.
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        try:
            yield pillow.open(io.BytesIO(data))
        except DataError:
            raise
        except (pillow.DecompressionBombWarning, pillow.DecompressionBombError) as error:
            raise DataError(
                f"{place} is refused: {error} If it is no attack, make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS "
                "in a script that prepares the data and trains."
            ) from error
        except Exception as error:  # decoders raise any type for damaged files
            raise DataError(_unreadable(data, place, error)) from error


def _in_bytes(image: Any, place: str) -> Any:
    """Return a Pillow image in gray or in red, green, blue, of 8 bits each."""
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if sixteen:  # Pillow's own conversion makes all above 255 white
        return _pillow().fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(
            f"{place} has pixels of 32 bits (mode {image.mode!r}), whose range nobody states; write it with 8 bits."
        )
    return image if image.mode in ("L", "RGB") else image.convert("L" if image.mode == "1" else "RGB")


ORIENTATION = 0x0112
"""EXIF's number of it. Telephones store photos as the sensor lies."""

TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""The orientation of an image -> what makes it upright. Pillow's own function fails where other data are damaged."""

ON_SIDE = 5
"""From this orientation on, an image lies on a side."""

MARKS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""What a PNG file has where it says its orientation."""


def _orientation(image: Any, data: bytes) -> int:
    """Return how an open image lies; 1: upright."""
    # Pillow turns TIFF itself. To look, it decodes a whole PNG.
    if image.format == "TIFF" or (image.format == "PNG" and not any(mark in data for mark in MARKS)):
        return 1
    try:
        found = image.getexif().get(ORIENTATION)
        return found if found in TURNS else 1
    except Exception:  # damaged data say nothing; the image may be whole
        return 1


SIGNATURES = ((b"\x89PNG", "PNG"), (b"\xff\xd8\xff", "JPEG"), (b"GIF8", "GIF"))
"""How files of images begin."""


def _unreadable(data: bytes, place: str, error: Exception) -> str:
    if is_video(data):
        return f"{place} is a video, and videos are not read; give an image of it."
    if not data:
        return f"{place} is empty; write the file again, or leave the image out."
    if isinstance(error, _pillow().UnidentifiedImageError):  # its message names an object in memory
        kind = next((kind for start, kind in SIGNATURES if data.startswith(start)), "")
        if kind:
            return f"{place} begins as {kind}, and is damaged: Pillow cannot read it. Write the file again."
        return f"{place} is no image that Pillow can read: it begins with {data[:8]!r}."
    return f"{place} cannot be read as an image ({type(error).__name__}: {error})."


def _pillow() -> ModuleType:
    return require("PIL.Image", "images")


VIDEO_KEYS = ("video", "videos")
"""Keys of rows that hold videos, and types of parts of a message."""


VIDEO_TOKENS = ("<video>", "<|video_pad|>")
"""Tokens of published models that stand for videos."""


def is_video(data: bytes) -> bool:
    """Return whether the bytes of a file begin as those of a video: MP4 and MOV, AVI, Matroska and WebM, MPEG."""
    boxes = data[4:8] in (b"ftyp", b"moov", b"mdat")
    return boxes or data[:4] in (b"\x1aE\xdf\xa3", b"\0\0\1\xba", b"\0\0\1\xb3") or data[8:12] == b"AVI "


def videos_of(record: Any) -> str | None:
    """Return where a row of conversations has a video; None: it has none."""
    if not isinstance(record, Mapping):
        return None
    return next((f"key {key!r}" for key in VIDEO_KEYS if record.get(key)), None) or next(_parts(record), None)


def _parts(record: Mapping[str, Any]) -> Iterator[str]:
    # Messages may be lists of parts, each of a type.
    for messages in record.values():
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, Mapping) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, Mapping) and part.get("type") in VIDEO_KEYS:
                    yield f"a message with a part of type {part['type']!r}"
