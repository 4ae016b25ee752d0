"""Qwen3-VL in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from megalight.models.config import require
from megalight.models.gpt.hugging_face import config_from_transformers as gpt_from
from megalight.models.gpt.hugging_face import config_to_transformers as gpt_to
from megalight.models.gpt.hugging_face import weight_map as gpt_map
from megalight.models.kinds import Kind
from megalight.models.vision import hugging_face as towers
from megalight.models.vision.config import VisionConfig
from megalight.models.vision.dynamic_config import DynamicConfig
from megalight.models.vlm.config import ProjectorConfig, VLMConfig
from megalight.models.vlm.hugging_face.qwen2_5 import check_width, fused
from megalight.models.weights import Theirs, WeightMap

MODEL_TYPE = "qwen3_vl"
EPS = 1e-6
"""Of all norms of the tower. It is no setting of theirs."""
PIXELS = 256 * 256, 4096 * 4096
"""Fewest and most of an image. Their processor's setting, and none of ``config.json``."""

MERGER = {"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"}
TOWER = {
    "embed.tower.patch": "visual.patch_embed.proj",
    "embed.tower.position": "visual.pos_embed",
    "embed.tower.layers.N.attention_norm": "visual.blocks.N.norm1",
    "embed.tower.layers.N.attention.proj": "visual.blocks.N.attn.proj",
    "embed.tower.layers.N.mlp_norm": "visual.blocks.N.norm2",
    "embed.tower.layers.N.mlp.up": "visual.blocks.N.mlp.linear_fc1",
    "embed.tower.layers.N.mlp.down": "visual.blocks.N.mlp.linear_fc2",
    **{f"embed.projector.{ours}": f"visual.merger.{theirs}" for ours, theirs in MERGER.items()},
    **{f"embed.deep.N.projector.{ours}": f"visual.deepstack_merger_list.N.{theirs}" for ours, theirs in MERGER.items()},
}
"""Our module -> theirs. ``N``: a layer's index, or a number."""
RESPELT = {r"^visual\.": "model.visual.", r"^model\.(?!visual\.|language_model\.)": "model.language_model."}
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
    tower = {ours: Theirs(theirs) for ours, theirs in TOWER.items()} | fused(config.vision)
    every = tower | dict(language.places)
    return WeightMap(
        {ours: replace(place, name=_placed(place.name)) for ours, place in every.items()},
        copies={_placed(copy): _placed(original) for copy, original in language.copies.items()},
        left_out=language.left_out,
        respelt=RESPELT,
    )


def _placed(name: str) -> str:
    if name.startswith("visual."):
        return f"model.{name}"
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def _read(values: Mapping[str, Any]) -> VLMConfig:
    vision = VISION_DEFAULTS | dict(values.get("vision_config") or {})
    text = dict(values["text_config"])
    tied = any(each.get("tie_word_embeddings", False) for each in (text, values))
    language = gpt_from({**text, "model_type": "qwen3", "tie_word_embeddings": tied})
    check_width(vision, language)
    merge, entries = vision["spatial_merge_size"], vision["num_position_embeddings"]
    side = isqrt(entries)
    require(side**2 == entries, f"num_position_embeddings is {entries}; it must be the entries of a square table.")
    return VLMConfig(
        language=language,
        vision=VisionConfig(
            num_layers=vision["depth"],
            hidden_size=vision["hidden_size"],
            num_heads=vision["num_heads"],
            ffn_hidden_size=vision["intermediate_size"],
            image_size=0,
            patch_size=vision["patch_size"],
            channels=vision["in_channels"],
            activation=towers.activation_from("vision_config.hidden_act", vision["hidden_act"]),
            class_token=False,
            patch_bias=True,
            input_norm=False,
            norm_eps=EPS,
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            dynamic=DynamicConfig(
                min_pixels=PIXELS[0], max_pixels=PIXELS[1], frames=vision["temporal_patch_size"], table=side
            ),
        ),
        projector=ProjectorConfig(
            merge=merge, norm="layer", norm_eps=EPS, hidden_size=merge**2 * vision["hidden_size"], activation="gelu"
        ),
        image_token=values.get("image_token_id", 151655),
        deepstack=tuple(vision["deepstack_visual_indexes"]),
    )


def _write(config: VLMConfig) -> dict[str, Any]:
    vision = config.vision
    assert vision.dynamic is not None
    text = gpt_to(config.language, "qwen3")
    text["model_type"] = f"{MODEL_TYPE}_text"
    return {
        "text_config": text,
        "vision_config": {
            "model_type": f"{MODEL_TYPE}_vision",
            "depth": vision.num_layers,
            "hidden_size": vision.hidden_size,
            "hidden_act": towers.activation_to(vision.activation),
            "intermediate_size": vision.ffn_hidden_size,
            "num_heads": vision.num_heads,
            "in_channels": vision.channels,
            "patch_size": vision.patch_size,
            "spatial_merge_size": config.projector.merge,
            "temporal_patch_size": vision.dynamic.frames,
            "out_hidden_size": config.language.hidden_size,
            "num_position_embeddings": vision.dynamic.table**2,
            "deepstack_visual_indexes": list(config.deepstack),
        },
        "image_token_id": config.image_token,
        "tie_word_embeddings": config.language.tie_embeddings,
    }


def _suits(config: VLMConfig) -> bool:
    return config.vision.dynamic is not None and config.vision.dynamic.table > 0


KINDS = (Kind(MODEL_TYPE, "Qwen3VLForConditionalGeneration", _suits, weight_map, _read, _write),)
