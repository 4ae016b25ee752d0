"""Qwen3-VL in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from megalight.models.config import require
from megalight.models.gpt.hugging_face import weight_map as gpt_map
from megalight.models.kinds import Kind
from megalight.models.vision import hugging_face as towers
from megalight.models.vision.config import VisionConfig
from megalight.models.vision.dynamic_config import DynamicConfig
from megalight.models.vlm.config import ProjectorConfig, VLMConfig
from megalight.models.vlm.hugging_face import qwen
from megalight.models.weights import WeightMap

MODEL_TYPE = "qwen3_vl"
PIXELS = 256 * 256, 4096 * 4096
"""Fewest and most of an image. Their processor's setting, and none of ``config.json``."""

MERGER = {"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"}
NAMED = {
    "embed.tower.position": "visual.pos_embed",
    "embed.tower.layers.N.mlp.up": "visual.blocks.N.mlp.linear_fc1",
    "embed.tower.layers.N.mlp.down": "visual.blocks.N.mlp.linear_fc2",
    **{f"embed.projector.{ours}": f"visual.merger.{theirs}" for ours, theirs in MERGER.items()},
    **{f"embed.deep.N.projector.{ours}": f"visual.deepstack_merger_list.N.{theirs}" for ours, theirs in MERGER.items()},
}
"""Our module -> theirs, beside what all towers of Qwen have. ``N``: a layer's index, or a number."""
RENAMED = {r"^visual\.": "model.visual.", r"^model\.(?!visual\.|language_model\.)": "model.language_model."}
"""Names in other releases."""

VISION_DEFAULTS: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
"""What a ``config.json`` need not say."""


def weight_map(config: VLMConfig) -> WeightMap:
    """Return where Qwen3-VL keeps the tensors of a model."""
    language = gpt_map(config.language)
    every = qwen.places(config.vision, NAMED) | dict(language.places)
    return WeightMap(
        {ours: replace(place, name=_placed(place.name)) for ours, place in every.items()},
        copies={_placed(copy): _placed(original) for copy, original in language.copies.items()},
        left_out=language.left_out,
        renamed=RENAMED,
    )


def _placed(name: str) -> str:
    if name.startswith("visual."):
        return f"model.{name}"
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def _read(values: Mapping[str, Any]) -> VLMConfig:
    vision = VISION_DEFAULTS | dict(values.get("vision_config") or {})
    language = qwen.language_from(values, values["text_config"], "qwen3", vision)
    merge, entries = vision["spatial_merge_size"], vision["num_position_embeddings"]
    side = isqrt(entries)
    require(side**2 == entries, f"num_position_embeddings is {entries}; it must be the entries of a square table.")
    return VLMConfig(
        language=language,
        vision=VisionConfig(
            **qwen.sizes_from(vision),
            activation=towers.activation_from("vision_config.hidden_act", vision["hidden_act"]),
            patch_bias=True,
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            dynamic=DynamicConfig(
                min_pixels=PIXELS[0], max_pixels=PIXELS[1], frames=vision["temporal_patch_size"], table=side
            ),
        ),
        projector=ProjectorConfig(
            merge=merge,
            norm="layer",
            norm_eps=qwen.EPS,
            hidden_size=merge**2 * vision["hidden_size"],
            activation="gelu",
        ),
        **qwen.tokens_from(values, language.vocab_size),
        deepstack=tuple(vision["deepstack_visual_indexes"]),
    )


def _write(config: VLMConfig) -> dict[str, Any]:
    vision = config.vision
    assert vision.dynamic is not None
    return qwen.written(
        config,
        MODEL_TYPE,
        "qwen3",
        hidden_act=towers.activation_to(vision.activation),
        num_position_embeddings=vision.dynamic.table**2,
        deepstack_visual_indexes=list(config.deepstack),
    )


def _suits(config: VLMConfig) -> bool:
    return config.vision.dynamic is not None and config.vision.dynamic.table > 0


KINDS = (Kind(MODEL_TYPE, "Qwen3VLForConditionalGeneration", _suits, weight_map, _read, _write),)
