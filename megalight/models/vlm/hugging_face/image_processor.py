"""The image processor in a ``transformers`` folder: how its settings become ours, and are written again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import isclose
from typing import Any, Literal

from megalight.checkpoint.foreign.transformers_folder import IMAGE_PROCESSOR, PROCESSOR, TOKENIZER_SETTINGS
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


# Writing


TILED = {
    "llava_next": "LlavaNextImageProcessor",
    "llava_onevision": "LlavaOnevisionImageProcessor",
    "gemma3": "Gemma3ImageProcessor",
    "internvl": "GotOcr2ImageProcessor",
}
"""``model_type`` -> the image processor of models that read squares in one way only."""
SQUARES = {"crop": "CLIPImageProcessor", "stretch": "SiglipImageProcessor", "pad": "LlavaImageProcessor"}
"""How an image becomes a square -> the image processor that does this, for LLaVA."""
PROCESSORS = {
    "llava": "LlavaProcessor",
    "llava_next": "LlavaNextProcessor",
    "llava_onevision": "LlavaOnevisionProcessor",
    "gemma3": "Gemma3Processor",
    "internvl": "InternVLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
}
"""``model_type`` -> the class that joins images and text."""
TOKENS = {
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
}
"""``model_type`` -> tokens that this class asks its tokenizer for, by name."""


def processor_files(
    config: VLMConfig, values: Mapping[str, Any], vocabulary: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Return the content of the files that say how images are prepared, by name.

    Args:
        config: the model.
        values: its ``config.json``.
        vocabulary: of the tokenizer, whose settings name tokens of images where it has them; empty if there is none.
    """
    kind, vision = values["model_type"], config.vision
    name = {"processor_class": PROCESSORS[kind]}
    settings = {
        **name,
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(vision.mean),
        "image_std": list(vision.std),
    }
    own = _of_any_size(config) if vision.dynamic is not None else _of_squares(config, kind, values)
    found = {IMAGE_PROCESSOR: settings | own, PROCESSOR: name | _joined(config, kind, values)}
    tokens = TOKENS.get(kind, {})
    # A token that the tokenizer lacks would become a new one.
    if tokens and all(token in vocabulary for token in tokens.values()):
        found[TOKENIZER_SETTINGS] = {"extra_special_tokens": tokens}
    return found


def _of_any_size(config: VLMConfig) -> dict[str, Any]:
    vision, dynamic = config.vision, config.vision.dynamic
    assert dynamic is not None
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "resample": 3,
        "size": {"shortest_edge": dynamic.min_pixels, "longest_edge": dynamic.max_pixels},
        # As releases name them that have no `size` here.
        "min_pixels": dynamic.min_pixels,
        "max_pixels": dynamic.max_pixels,
        "patch_size": vision.patch_size,
        "merge_size": config.projector.merge,
        "temporal_patch_size": dynamic.frames,
    }


def _of_squares(config: VLMConfig, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    vision = config.vision
    square = {"height": vision.image_size, "width": vision.image_size}
    found: dict[str, Any] = {
        "image_processor_type": TILED.get(kind) or SQUARES[vision.resize],
        "resample": next(number for number, name in FILTERS.items() if name == vision.resample),
        "size": square,
    }
    if kind == "llava_next" or (kind == "llava" and vision.resize != "stretch"):
        found |= {"size": {"shortest_edge": vision.image_size}, "crop_size": square, "do_center_crop": True}
    if kind == "llava" and vision.resize == "pad":
        found["do_pad"] = True
    if vision.anyres is not None:
        found |= {"image_grid_pinpoints": values["image_grid_pinpoints"], "do_pad": True}
    if kind == "internvl":
        found |= {"crop_to_patches": vision.tiles > 1, "min_patches": 1, "max_patches": vision.tiles}
    return found


def _joined(config: VLMConfig, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many tokens of text stand for an image."""
    vision = config.vision
    if kind in ("gemma3", "internvl"):
        return {"image_seq_length": config.image_tokens}
    if vision.dynamic is not None:
        return {}
    strategy = {"vision_feature_select_strategy": values["vision_feature_select_strategy"]}
    if kind == "llava_onevision":
        aspect = {"vision_aspect_ratio": values["vision_aspect_ratio"]}
        return strategy | aspect | {"num_image_tokens": vision.num_patches}
    return strategy | {"patch_size": vision.patch_size, "num_additional_image_tokens": int(vision.class_token)}


# The token of videos, which are not supported


def token_from(values: Mapping[str, Any], key: str, usual: int, vocab_size: int) -> int | None:
    """Return the id of video tokens.

    Args:
        values: their configuration.
        key: the name of the setting.
        usual: what it need not say. Small models have a smaller vocabulary, and no videos.
        vocab_size: that of the language model.
    """
    token = values.get(key, usual)
    return token if token in range(vocab_size) else None


def token_to(config: VLMConfig, key: str) -> dict[str, Any]:
    """Return their setting, if the model has such a token."""
    return {} if config.video_token is None else {key: config.video_token}
