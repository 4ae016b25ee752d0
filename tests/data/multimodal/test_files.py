"""From the bytes of a file to an upright picture in 8-bit colors."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from megalight.data.multimodal.images import decode, measure
from megalight.errors import DataError
from tests.data.multimodal.test_images import gradient

Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")
PngInfo = pytest.importorskip("PIL.PngImagePlugin").PngInfo


def saved(picture: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "MPO"])
@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_photos_are_upright(kind: str, orientation: int | None) -> None:
    """As ``transformers`` and ``datasets`` read them. The size is the same without decoding."""
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(gradient(24, 16)).save(file, kind, exif=exif)
    found = decode(file.getvalue(), "photo")
    expected = ImageOps.exif_transpose(Image.open(file))
    assert found.size == expected.size == measure(file.getvalue(), "photo")
    assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_damaged_exif_data_say_nothing() -> None:
    file = io.BytesIO()
    Image.fromarray(gradient(24, 16)).save(file, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\xff")
    assert decode(file.getvalue(), "photo").size == measure(file.getvalue(), "photo") == (24, 16)


@pytest.mark.parametrize("packed", [False, True])
def test_png_files_may_say_it_in_xmp(packed: bool) -> None:
    note = PngInfo()
    note.add_itxt("XML:com.adobe.xmp", '<rdf:Description tiff:Orientation="6"/>', zip=packed)
    data = saved(Image.fromarray(gradient(24, 16)), "PNG", pnginfo=note)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert measure(data, "photo") == expected.size == (16, 24)
    assert np.array_equal(np.asarray(decode(data, "photo")), np.asarray(expected))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_gray_of_16_bits_keeps_the_upper_8(kind: str) -> None:
    """Pillow's conversion to 8 bits makes all but the darkest pixels white."""
    wide = np.arange(0, 65536, 128, dtype=np.uint16).reshape(16, 32)
    found = decode(saved(Image.fromarray(wide), kind), "scan")
    assert np.array_equal(np.asarray(found.convert("RGB"))[..., 1], wide // 256)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_of_32_bits_are_refused(dtype: Any) -> None:
    data = saved(Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8).astype(dtype)), "TIFF")
    with pytest.raises(DataError, match="depth has pixels of 32 bits"):
        decode(data, "depth")


@pytest.mark.parametrize("read", [decode, measure])
def test_whatever_a_decoder_raises_names_the_file(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder of AVIF raises another type than those of other kinds."""

    def fail(file: Any) -> Any:
        raise RuntimeError("Missing or empty image item")

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(DataError, match=r"photo cannot be read as an image \(RuntimeError: Missing or empty"):
        read(b"\0\0\0\x1c", "photo")
