"""What the image processor of a folder says about images is taken over, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3ImageProcessor, Qwen2VLImageProcessor

from megalight.errors import ConfigurationError
from megalight.models.family import family
from megalight.models.hugging_face.folder import companions
from tests.models import test_vlm_families as families
from tests.models import test_vlm_hugging_face as llava
from tests.models import test_vlm_qwen as qwen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen")
    qwen.theirs(torch.float32, hidden_size=32, num_heads=4).save_pretrained(path)
    return path


def config_of(folder: Path, settings: Any, name: str = "preprocessor_config.json") -> Any:
    for other in ("preprocessor_config.json", "processor_config.json"):
        (folder / other).unlink(missing_ok=True)
    (folder / name).write_text(json.dumps(settings))
    weights = family("vlm").weights
    assert weights is not None
    return weights.config_of(folder)


def test_limits_of_sizes_are_those_of_the_folder(folder: Path) -> None:
    old, new = {"min_pixels": 784, "max_pixels": 78400}, {"size": {"shortest_edge": 784, "longest_edge": 78400}}
    for settings, name in ((old, "preprocessor_config.json"), ({"image_processor": new}, "processor_config.json")):
        dynamic = config_of(folder, settings, name).vision.dynamic
        assert (dynamic.min_pixels, dynamic.max_pixels) == (784, 78400)
        assert name in companions(folder)
    assert config_of(folder, {}).vision.dynamic.max_pixels == 28 * 28 * 1280


def test_what_transformers_writes_is_read(folder: Path) -> None:
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 4096}
    config = config_of(folder, {})
    unit = {"patch_size": config.vision.patch_size, "merge_size": config.projector.merge}
    settings = Qwen2VLImageProcessor(**{**sizes, **unit}).to_dict()
    assert config_of(folder, json.loads(json.dumps(settings, default=str))).vision.dynamic.max_pixels == 4096


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_pan_and_scan": True}, r"do_pan_and_scan is true .*\(pan and scan\) are not made"),
        ({"do_normalize": False}, "do_normalize is false in the folder's image processor"),
        ({"rescale_factor": 1.0}, r"rescale_factor is 1\.0"),
        ({"image_mean": [0.5, 0.5, 0.5]}, r"image_mean is \[0\.5, 0\.5, 0\.5\]"),
        ({"image_std": [1.0]}, r"image_std is \[1\.0\]"),
        ({"resample": 0}, r"resample is 0 .* resized with a bicubic filter"),
        ({"merge_size": 3}, "merge_size is 3 in the folder's image processor and 2 in its config"),
    ],
    ids=str,
)
def test_what_would_give_other_pixels_is_refused(settings: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config_of(folder, settings)


def test_pan_and_scan_is_off_by_default(tmp_path: Path) -> None:
    families.theirs("gemma3", torch.float32).save_pretrained(tmp_path)
    settings = Gemma3ImageProcessor().to_dict()
    assert not settings.get("do_pan_and_scan")
    plain = {name: value for name, value in settings.items() if name.startswith(("do_", "image_", "resample"))}
    assert config_of(tmp_path, json.loads(json.dumps(plain, default=int))).mutual
    with pytest.raises(ConfigurationError, match="do_pan_and_scan is true"):
        config_of(tmp_path, plain | {"do_pan_and_scan": True, "resample": 2})


@pytest.mark.parametrize(
    ("settings", "resize"),
    [
        ({"size": {"shortest_edge": 12}, "crop_size": {"height": 12, "width": 12}, "do_center_crop": True}, "crop"),
        ({"size": {"shortest_edge": 12}, "crop_size": 12}, "crop"),
        ({"size": {"height": 12, "width": 12}, "resample": 2}, "stretch"),
        ({"size": {"shortest_edge": 12}, "crop_size": {"height": 12, "width": 12}, "do_pad": True}, "pad"),
        ({}, "crop"),
    ],
    ids=str,
)
def test_how_llava_makes_squares_is_what_the_folder_says(settings: dict[str, Any], resize: str, tmp_path: Path) -> None:
    llava.theirs().save_pretrained(tmp_path)
    vision = config_of(tmp_path, settings).vision
    assert (vision.resize, vision.resample) == (resize, "bilinear" if "resample" in settings else "bicubic")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            "llava",
            {"crop_size": {"height": 16, "width": 12}},
            r"crop_size is .* \(height 16\), and image_size 12",
        ),
        ("llava", {"size": {"shortest_edge": 12}, "do_center_crop": False}, "do_center_crop is false and size"),
        ("onevision", {"image_grid_pinpoints": [[28, 14]]}, r"image_grid_pinpoints is \[\[28, 14\]\]\.\.\. in the"),
    ],
    ids=str,
)
def test_squares_that_the_model_does_not_read_are_refused(
    kind: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    llava.theirs(kind).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        config_of(tmp_path, settings)


def test_the_tiles_of_internvl_are_those_of_the_folder(tmp_path: Path) -> None:
    families.theirs("internvl", torch.float32).save_pretrained(tmp_path)
    assert config_of(tmp_path, {}).vision.tiles == 12
    # Published folders say so, and the class that joins images and text asks for tiles all the same.
    assert config_of(tmp_path, {"max_patches": 6, "min_patches": 1, "crop_to_patches": False}).vision.tiles == 6
    with pytest.raises(ConfigurationError, match="min_patches is 2 in the folder's image processor"):
        config_of(tmp_path, {"min_patches": 2})
