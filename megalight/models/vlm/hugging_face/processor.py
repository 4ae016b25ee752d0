"""Settings of the image processor in a ``transformers`` folder, which say how its model wants images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isclose
from typing import Any

from megalight.models.config import require
from megalight.models.vlm.config import VLMConfig

FILTERS = {2: "bilinear", 3: "bicubic"}
"""Their number of a filter -> ours."""


def processed(config: VLMConfig, settings: Mapping[str, Any]) -> VLMConfig:
    """Return the configuration with the limits of sizes that a folder's image processor has.

    Args:
        config: the model, by ``config.json``.
        settings: those of the image processor; a setting that is missing or null is theirs by default.

    Raises:
        ConfigurationError: images would be prepared in another way than here.
    """
    found = {name: value for name, value in settings.items() if value is not None}
    require(
        not found.get("do_pan_and_scan", False),
        "do_pan_and_scan is true in the folder's image processor: crops of long images (pan and scan) are not made. "
        "Set it to false: images are then read whole, as transformers does by default.",
    )
    for name in ("do_resize", "do_rescale", "do_normalize"):
        require(
            found.get(name, True) is True, f"{name} is false in the folder's image processor; images are always so."
        )
    require(
        isclose(found.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-3),
        f"rescale_factor is {found.get('rescale_factor')} in the folder's image processor; pixels are divided by 255.",
    )
    vision, dynamic = config.vision, config.vision.dynamic
    for name, ours in (("image_mean", vision.mean), ("image_std", vision.std)):
        theirs = found.get(name, ours)
        require(
            len(theirs) == len(ours) and all(isclose(a, b, abs_tol=1e-3) for a, b in zip(theirs, ours, strict=True)),
            f"{name} is {list(theirs)} in the folder's image processor, and {list(ours)} in towers of this kind; copy "
            "the folder again.",
        )
    wanted = "bicubic" if dynamic is not None else vision.resample
    kernel = FILTERS.get(found.get("resample", 3), str(found.get("resample"))) if "resample" in found else wanted
    require(
        kernel == wanted,
        f"resample is {found.get('resample')} ({kernel}) in the folder's image processor; images of this model are "
        f"resized with a {wanted} filter.",
    )
    if dynamic is None:
        return config
    for name, ours_size in (
        ("patch_size", vision.patch_size),
        ("merge_size", config.projector.merge),
        ("temporal_patch_size", dynamic.frames),
    ):
        require(
            found.get(name, ours_size) == ours_size,
            f"{name} is {found.get(name)} in the folder's image processor and {ours_size} in its config.json; copy the "
            "folder again.",
        )
    size = found.get("size", {})
    # Older files have the limits themselves, newer ones name them after edges.
    low = found.get("min_pixels", size.get("shortest_edge", dynamic.min_pixels))
    high = found.get("max_pixels", size.get("longest_edge", dynamic.max_pixels))
    return replace(config, vision=replace(vision, dynamic=replace(dynamic, min_pixels=low, max_pixels=high)))
