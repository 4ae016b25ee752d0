"""Settings of the image processor in a ``transformers`` folder, which say how its model wants images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isclose
from typing import Any, Literal

from megalight.models.config import require
from megalight.models.vision.config import VisionConfig
from megalight.models.vlm.config import VLMConfig

FILTERS: dict[Any, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}
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
    if dynamic is None:
        vision = _squares(config, found)
    wanted = "bicubic" if dynamic is not None else vision.resample
    kernel = FILTERS.get(found.get("resample", 3), str(found.get("resample"))) if "resample" in found else wanted
    require(
        kernel == wanted,
        f"resample is {found.get('resample')} ({kernel}) in the folder's image processor; images of this model are "
        f"resized with a {wanted} filter.",
    )
    if dynamic is None:
        return replace(config, vision=vision)
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


def _squares(config: VLMConfig, found: Mapping[str, Any]) -> VisionConfig:
    """Return the tower with the way in which images become squares.

    Raises:
        ConfigurationError: squares have another size, or tiles lie in other grids.
    """
    vision = config.vision
    for name in ("size", "crop_size"):
        sizes = found.get(name, {})
        for edge, side in sizes.items() if isinstance(sizes, Mapping) else [("side", sizes)]:
            require(
                side is None or side == vision.image_size,
                f"{name} is {sizes} in the folder's image processor ({edge} {side}), and image_size "
                f"{vision.image_size} in its config.json; copy the folder again.",
            )
    if vision.anyres is not None:
        grids = [[count * vision.image_size for count in grid] for grid in vision.anyres.grids]
        theirs = [list(point) for point in found.get("image_grid_pinpoints", grids)]
        require(
            theirs == grids,
            f"image_grid_pinpoints is {theirs[:3]}... in the folder's image processor, and {grids[:3]}... in its "
            "config.json; copy the folder again.",
        )
    if vision.tiles > 1:
        return replace(vision, tiles=_tiles(vision.tiles, found))
    if vision.anyres is not None or config.mutual or not {"size", "crop_size"} & found.keys():
        return vision
    # LLaVA takes images as its image processor makes them.
    resample = FILTERS.get(found.get("resample", 3), vision.resample)
    if found.get("do_pad", False):
        return replace(vision, resize="pad", resample=resample)
    cropped = found.get("do_center_crop", "crop_size" in found)
    require(
        cropped or not isinstance(found.get("size"), Mapping) or "height" in found["size"],
        f"do_center_crop is false and size {found.get('size')} in the folder's image processor; images are squares "
        "here. Give size a height and a width.",
    )
    return replace(vision, resize="crop" if cropped else "stretch", resample=resample)


def _tiles(tiles: int, found: Mapping[str, Any]) -> int:
    """Return the tiles of an image, at most, of a model that divides images.

    Raises:
        ConfigurationError: an image has more than one tile at least.
    """
    least = found.get("min_patches", 1)
    require(
        least == 1,
        f"min_patches is {least} in the folder's image processor; a small image is one tile here. Set it to 1.",
    )
    # `crop_to_patches` is no word on it: the class that joins images and text always asks for tiles.
    return int(found.get("max_patches", tiles))
