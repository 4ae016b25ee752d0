"""Image files to upright pictures in 8-bit colors, by Pillow."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from megalight.data.multimodal.videos import is_video
from megalight.errors import DataError
from megalight.imports import require


def decode(data: bytes, place: str) -> Any:
    """Return the Pillow image in the bytes of a file: decoded as a whole, in 8-bit colors, upright as the file says.

    Gray pictures of 16 bits keep their upper 8. Of transparent ones the colors remain, as in ``transformers``.

    Args:
        data: the file.
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
    except Exception:  # damaged data say nothing; the picture may be whole
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
