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


def test_grey_has_one_channel() -> None:
    grey = ImageForm(size=8, patch=4, channels=1, class_token=False).patches(Image.fromarray(gradient(8, 8)))
    assert grey.shape == (4, 16)


@pytest.mark.parametrize("shape", [(30, 12), (12, 30), (7, 5), (100, 1)], ids=str)
@pytest.mark.parametrize("resize", ["crop", "pad", "stretch"])
def test_images_of_any_shape_become_squares(resize: str, shape: tuple[int, int]) -> None:
    form = ImageForm(size=12, patch=4, resize=resize)
    found = form._square(Image.fromarray(gradient(*shape)))
    assert found.size == (12, 12)
    if resize == "pad" and shape == (30, 12):
        assert np.asarray(found)[0].tolist() == [[127, 127, 127]] * 12


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
