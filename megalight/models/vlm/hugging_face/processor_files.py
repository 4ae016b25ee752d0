"""Settings of image processors of ``transformers`` that prepare images as a model of ours reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megalight.checkpoint.foreign.transformers_folder import IMAGE_PROCESSOR, PROCESSOR, TOKENIZER_SETTINGS
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.hugging_face.processor import FILTERS

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
