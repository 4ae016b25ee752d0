"""From an image to patches."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from megalight.data.multimodal.images import ImageForm
from megalight.errors import ConfigurationError

Image = pytest.importorskip("PIL.Image")


def gradient(width: int, height: int) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) % 7 * 36], -1).astype(np.uint8)


def test_patches_are_those_that_a_convolution_reads() -> None:
    form = ImageForm(size=12, patch=4)
    found = form.patches(Image.fromarray(gradient(12, 12)))
    pixels = torch.from_numpy(gradient(12, 12)).permute(2, 0, 1)[None].float()
    expected = torch.nn.functional.unfold(pixels, 4, stride=4)[0].T
    assert (form.num_patches, form.num_rows) == (9, 10)
    assert not found[0].any()
    assert torch.equal(torch.from_numpy(found[1:]).float(), expected)
    assert np.array_equal(
        ImageForm(size=12, patch=4, class_token=False).patches(Image.fromarray(gradient(12, 12))), found[1:]
    )


def test_pixels_that_no_patch_covers_are_left_out() -> None:
    picture = gradient(14, 14)
    found = ImageForm(size=14, patch=4, class_token=False).patches(Image.fromarray(picture))
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None].float()
    assert torch.equal(torch.from_numpy(found).float(), torch.nn.functional.unfold(pixels, 4, stride=4)[0].T)


def test_gray_has_one_channel() -> None:
    gray = ImageForm(size=8, patch=4, channels=1, class_token=False).patches(Image.fromarray(gradient(8, 8)))
    assert gray.shape == (4, 16)


@pytest.mark.parametrize("shape", [(30, 12), (12, 30), (7, 5), (100, 1)], ids=str)
@pytest.mark.parametrize("resize", ["crop", "pad", "stretch"])
def test_images_of_any_shape_become_squares(resize: str, shape: tuple[int, int]) -> None:
    form = ImageForm(size=12, patch=4, resize=resize)
    found = form._square(Image.fromarray(gradient(*shape)))
    assert found.size == (12, 12)
    if resize == "pad" and shape == (30, 12):
        assert np.asarray(found)[0].tolist() == [[127, 127, 127]] * 12


@pytest.mark.parametrize("shape", [(300, 40), (40, 300), (97, 31)], ids=str)
@pytest.mark.parametrize("resize", ["crop", "pad"])
def test_strips_become_the_same_squares_in_parts(
    resize: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = np.mgrid[: shape[1], : shape[0]]
    smooth = 127 + 100 * np.stack([np.sin(rows / 9), np.cos(columns / 11), np.sin((rows + columns) / 13)], -1)
    picture = Image.fromarray(smooth.astype(np.uint8))
    form = ImageForm(size=24, patch=4, resize=resize)
    expected = np.asarray(form._square(picture)).astype(int)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    found = np.asarray(form._square(picture)).astype(int)
    # Borders of `pad` are blurred with the image in the one, and are whole pixels in the other.
    inside = np.abs(found - expected).max(-1) <= 2
    assert inside.all() if resize == "crop" else inside.mean() > 0.7


@pytest.mark.parametrize("shape", [(1_000_000, 1), (1, 1_000_000)], ids=str)
@pytest.mark.parametrize("resize", ["crop", "pad", "stretch"])
def test_a_strip_of_a_few_bytes_takes_no_memory(resize: str, shape: tuple[int, int]) -> None:
    square = ImageForm(size=336, patch=14, resize=resize)._square(Image.new("RGB", shape, (200, 0, 0)))
    assert square.size == (336, 336)
    assert (np.asarray(square)[167, 167] == (200, 0, 0)).all()


def test_crops_are_those_of_clip() -> None:
    """The image processor of ``transformers`` with the same sizes."""
    transformers = pytest.importorskip("transformers")
    processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 12}, crop_size=12, do_normalize=False, do_rescale=False
    )
    picture = Image.fromarray(gradient(31, 18))
    expected = processor(picture, return_tensors="np")["pixel_values"][0]
    found = np.asarray(ImageForm(size=12, patch=4)._square(picture)).transpose(2, 0, 1)
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("resize is 'squash'; it must be one of")):
        ImageForm(size=8, patch=4, resize="squash")


@pytest.mark.parametrize("shape", [(12, 12), (50, 20), (20, 50), (200, 30), (13, 11), (33, 31)], ids=str)
def test_tiles_are_those_of_internvl(shape: tuple[int, int]) -> None:
    """The image processor of ``transformers`` with the same sizes."""
    transformers = pytest.importorskip("transformers")
    processor = transformers.GotOcr2ImageProcessorPil(
        size={"height": 12, "width": 12}, crop_to_patches=True, max_patches=6, do_rescale=False, do_normalize=False
    )
    expected = processor(Image.fromarray(gradient(*shape)), return_tensors="np")["pixel_values"]
    form = ImageForm(size=12, patch=3, merge=2, tiles=6, class_token=True)
    cut = form.cut(Image.fromarray(gradient(*shape)))
    assert cut.tiles == len(expected)
    assert cut.lengths == (16,) * cut.tiles
    assert form.num_tokens(*shape) == len(cut.source) == cut.features == 4 * cut.tiles
    assert cut.source.tolist() == list(range(cut.features))
    # Squares of patches are neighbors, and positions say where each patch is.
    rows = torch.nn.functional.unfold(torch.from_numpy(expected).float(), 3, stride=3).mT.flatten(0, 1)
    places = torch.from_numpy(cut.positions) + 16 * torch.arange(cut.tiles).repeat_interleave(16)
    assert torch.equal(torch.from_numpy(cut.pixels).float(), rows[places])
    assert cut.positions[:8].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_squares_are_those_of_gemma3() -> None:
    transformers = pytest.importorskip("transformers")
    processor = transformers.Gemma3ImageProcessorPil(
        size={"height": 12, "width": 12}, do_rescale=False, do_normalize=False
    )
    expected = processor(Image.fromarray(gradient(31, 17)), return_tensors="np")["pixel_values"][0]
    form = ImageForm(size=12, patch=3, merge=2, class_token=False, resize="stretch", resample="bilinear")
    cut = form.cut(Image.fromarray(gradient(31, 17)))
    assert (len(cut.source), form.fixed_tokens, form.num_tokens(31, 17)) == (4, 4, 4)
    rows = torch.nn.functional.unfold(torch.from_numpy(np.array(expected)).float()[None], 3, stride=3)[0].T
    assert torch.equal(torch.from_numpy(cut.pixels).float(), rows[torch.from_numpy(cut.positions)])
