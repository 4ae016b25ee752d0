"""Qwen2.5-VL and Qwen3-VL in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from megalight.models.config import require
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.hugging_face import config_from_transformers as gpt_from
from megalight.models.gpt.hugging_face import config_to_transformers as gpt_to
from megalight.models.gpt.hugging_face import weight_map as gpt_map
from megalight.models.hugging_face.model_types import ModelType
from megalight.models.hugging_face.weights import TensorMapping, WeightMap
from megalight.models.vision import hugging_face
from megalight.models.vision.config import DynamicConfig, VisionConfig
from megalight.models.vlm.config import ProjectorConfig, VLMConfig
from megalight.models.vlm.hugging_face import image_processor

# What both have


EPS = 1e-6
"""Of all norms of the towers. It is no setting of theirs."""
IMAGE_TOKEN, VIDEO_TOKEN = 151655, 151656
"""The ids that a ``config.json`` need not say."""

TOWER = {
    "embed.tower.patch": "visual.patch_embed.proj",
    "embed.tower.layers.N.attention_norm": "visual.blocks.N.norm1",
    "embed.tower.layers.N.attention.proj": "visual.blocks.N.attn.proj",
    "embed.tower.layers.N.mlp_norm": "visual.blocks.N.norm2",
}
"""Our module -> theirs. ``N``: a layer's index."""
SIZES = {
    "num_layers": "depth",
    "hidden_size": "hidden_size",
    "num_heads": "num_heads",
    "ffn_hidden_size": "intermediate_size",
    "patch_size": "patch_size",
    "channels": "in_channels",
}
"""Our size of a tower -> theirs."""


def places(config: VisionConfig, named: Mapping[str, str]) -> dict[str, TensorMapping]:
    """Return the places of a tower's tensors.

    Args:
        config: the tower.
        named: names beside those of :data:`TOWER`.
    """
    size = config.hidden_size
    # Queries, keys and values are one tensor.
    fused = {
        f"embed.tower.layers.N.attention.{part}": TensorMapping(
            "visual.blocks.N.attn.qkv", rows=range(number * size, (number + 1) * size)
        )
        for number, part in enumerate("qkv")
    }
    return {ours: TensorMapping(theirs) for ours, theirs in {**TOWER, **named}.items()} | fused


def sizes_from(vision: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``VisionConfig`` from their ``vision_config``: sizes, and what all of these towers have."""
    return {ours: vision[theirs] for ours, theirs in SIZES.items()} | {
        "patch_size": hugging_face.side_of("patch_size", vision),
        "image_size": 0,
        "class_token": False,
        "input_norm": False,
        "norm_eps": EPS,
    }


def tokens_from(values: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the ids of the tokens of images and videos, as arguments of ``VLMConfig``."""
    return {
        "image_token": values.get("image_token_id", IMAGE_TOKEN),
        "video_token": image_processor.token_from(values, "video_token_id", VIDEO_TOKEN, vocab_size),
    }


def language_from(
    values: Mapping[str, Any], text: Mapping[str, Any], kind: str, vision: Mapping[str, Any]
) -> GPTConfig:
    """Return the language model.

    Args:
        values: their configuration.
        text: the part of it about the language model.
        kind: its ``model_type`` without images.
        vision: the part about the tower.

    Raises:
        ConfigurationError: the projector does not end with its width.
    """
    tied = any(each.get("tie_word_embeddings", False) for each in (text, values))
    language = gpt_from({**text, "model_type": kind, "tie_word_embeddings": tied})
    require(
        vision.get("out_hidden_size", language.hidden_size) == language.hidden_size,
        f"vision_config.out_hidden_size is {vision.get('out_hidden_size')} and the language model has hidden_size "
        f"{language.hidden_size}; the projector ends with its width. Copy the configuration again.",
    )
    return language


def written(config: VLMConfig, model_type: str, text_type: str, **vision: Any) -> dict[str, Any]:
    """Return their configuration of a model.

    Args:
        config: the model.
        model_type: that of the whole; those of the parts begin with it.
        text_type: the language model's ``model_type`` without images.
        vision: settings of the tower beside its sizes.
    """
    tower = config.vision
    assert tower.dynamic is not None
    return {
        "text_config": gpt_to(config.language, text_type) | {"model_type": f"{model_type}_text"},
        "vision_config": {
            "model_type": f"{model_type}_vision",
            **{theirs: getattr(tower, ours) for ours, theirs in SIZES.items()},
            "spatial_merge_size": config.projector.merge,
            "temporal_patch_size": tower.dynamic.frames,
            "out_hidden_size": config.language.hidden_size,
            **vision,
        },
        "image_token_id": config.image_token,
        **image_processor.token_to(config, "video_token_id"),
        "tie_word_embeddings": config.language.tie_embeddings,
    }


# Qwen2.5-VL


QWEN2_5_MODEL_TYPE = "qwen2_5_vl"

QWEN2_5_NAMED = {
    "embed.tower.layers.N.mlp.gate": "visual.blocks.N.mlp.gate_proj",
    "embed.tower.layers.N.mlp.up": "visual.blocks.N.mlp.up_proj",
    "embed.tower.layers.N.mlp.down": "visual.blocks.N.mlp.down_proj",
    "embed.projector.norm": "visual.merger.ln_q",
    "embed.projector.up": "visual.merger.first",
    "embed.projector.down": "visual.merger.second",
}
"""Our module -> theirs, beside what all towers of Qwen have. ``N``: a layer's index."""

QWEN2_5_RENAMED = {r"^model\.visual\.": "visual.", r"^model\.language_model\.": "model."}
"""Names in memory and in files of other releases."""

MOVED = {"visual.merger.mlp.0.": "visual.merger.first.", "visual.merger.mlp.2.": "visual.merger.second."}
"""Names in files -> in the table above, where a number is that of a layer."""

QWEN2_5_VISION_DEFAULTS: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
}
"""What a ``config.json`` need not say."""


def _qwen2_5_weights(config: VLMConfig) -> WeightMap:
    """Return where Qwen2.5-VL keeps the tensors of a model."""
    language = gpt_map(config.language)
    return WeightMap(
        places(config.vision, QWEN2_5_NAMED) | dict(language.places),
        copies=language.copies,
        left_out=language.left_out,
        renamed=QWEN2_5_RENAMED,
        moved=MOVED,
    )


def _qwen2_5_read(values: Mapping[str, Any]) -> VLMConfig:
    vision = QWEN2_5_VISION_DEFAULTS | dict(values.get("vision_config") or {})
    # Files of older releases have the settings of the language model among those of the whole.
    text = (
        TEXT_DEFAULTS
        | {k: v for k, v in values.items() if k != "vision_config"}
        | dict(values.get("text_config") or {})
    )
    require(vision["hidden_act"] == "silu", f"vision_config.hidden_act is {vision['hidden_act']!r}; only silu is read.")
    vision.setdefault("in_channels", vision.get("in_chans", 3))
    language = language_from(values, text, "qwen2", vision)
    require(
        language.head_dim * language.num_heads == language.hidden_size,
        f"head_dim is {language.head_dim} with {language.num_heads} heads and hidden_size {language.hidden_size}; "
        f"heads of {QWEN2_5_MODEL_TYPE} have hidden_size / num_attention_heads features.",
    )
    merge = vision["spatial_merge_size"]
    return VLMConfig(
        language=language,
        vision=VisionConfig(
            **sizes_from(vision),
            activation="swiglu",
            norm="rms",
            dynamic=DynamicConfig(
                frames=vision["temporal_patch_size"],
                window=vision["window_size"],
                full_layers=tuple(vision["fullatt_block_indexes"]),
            ),
        ),
        projector=ProjectorConfig(
            merge=merge, norm="rms", norm_eps=EPS, hidden_size=merge**2 * vision["hidden_size"], activation="gelu"
        ),
        **tokens_from(values, language.vocab_size),
    )


def _qwen2_5_write(config: VLMConfig) -> dict[str, Any]:
    dynamic = config.vision.dynamic
    assert dynamic is not None
    return written(
        config,
        QWEN2_5_MODEL_TYPE,
        "qwen2",
        hidden_act="silu",
        window_size=dynamic.window,
        fullatt_block_indexes=list(dynamic.full_layers),
    )


def _qwen2_5_suits(config: VLMConfig) -> bool:
    return config.vision.dynamic is not None


# Qwen3-VL


QWEN3_MODEL_TYPE = "qwen3_vl"
PIXELS = 256 * 256, 4096 * 4096
"""Fewest and most of an image. Their processor's setting, and none of ``config.json``."""

MERGER = {"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"}
QWEN3_NAMED = {
    "embed.tower.position": "visual.pos_embed",
    "embed.tower.layers.N.mlp.up": "visual.blocks.N.mlp.linear_fc1",
    "embed.tower.layers.N.mlp.down": "visual.blocks.N.mlp.linear_fc2",
    **{f"embed.projector.{ours}": f"visual.merger.{theirs}" for ours, theirs in MERGER.items()},
    **{f"embed.deep.N.projector.{ours}": f"visual.deepstack_merger_list.N.{theirs}" for ours, theirs in MERGER.items()},
}
"""Our module -> theirs, beside what all towers of Qwen have. ``N``: a layer's index, or a number."""
QWEN3_RENAMED = {r"^visual\.": "model.visual.", r"^model\.(?!visual\.|language_model\.)": "model.language_model."}
"""Names in other releases."""

QWEN3_VISION_DEFAULTS: dict[str, Any] = {
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


def _qwen3_weights(config: VLMConfig) -> WeightMap:
    """Return where Qwen3-VL keeps the tensors of a model."""
    language = gpt_map(config.language)
    every = places(config.vision, QWEN3_NAMED) | dict(language.places)
    return WeightMap(
        {ours: replace(place, name=_placed(place.name)) for ours, place in every.items()},
        copies={_placed(copy): _placed(original) for copy, original in language.copies.items()},
        left_out=language.left_out,
        renamed=QWEN3_RENAMED,
    )


def _placed(name: str) -> str:
    if name.startswith("visual."):
        return f"model.{name}"
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def _qwen3_read(values: Mapping[str, Any]) -> VLMConfig:
    vision = QWEN3_VISION_DEFAULTS | dict(values.get("vision_config") or {})
    language = language_from(values, values["text_config"], "qwen3", vision)
    merge, entries = vision["spatial_merge_size"], vision["num_position_embeddings"]
    side = isqrt(entries)
    require(side**2 == entries, f"num_position_embeddings is {entries}; it must be the entries of a square table.")
    return VLMConfig(
        language=language,
        vision=VisionConfig(
            **sizes_from(vision),
            activation=hugging_face.activation_from("vision_config.hidden_act", vision["hidden_act"]),
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
            norm_eps=EPS,
            hidden_size=merge**2 * vision["hidden_size"],
            activation="gelu",
        ),
        **tokens_from(values, language.vocab_size),
        deepstack=tuple(vision["deepstack_visual_indexes"]),
    )


def _qwen3_write(config: VLMConfig) -> dict[str, Any]:
    vision = config.vision
    assert vision.dynamic is not None
    return written(
        config,
        QWEN3_MODEL_TYPE,
        "qwen3",
        hidden_act=hugging_face.activation_to(vision.activation),
        num_position_embeddings=vision.dynamic.table**2,
        deepstack_visual_indexes=list(config.deepstack),
    )


def _qwen3_suits(config: VLMConfig) -> bool:
    return config.vision.dynamic is not None and config.vision.dynamic.table > 0


MODEL_TYPES = (
    ModelType(
        QWEN3_MODEL_TYPE, "Qwen3VLForConditionalGeneration", _qwen3_suits, _qwen3_weights, _qwen3_read, _qwen3_write
    ),
    ModelType(
        QWEN2_5_MODEL_TYPE,
        "Qwen2_5_VLForConditionalGeneration",
        _qwen2_5_suits,
        _qwen2_5_weights,
        _qwen2_5_read,
        _qwen2_5_write,
    ),
)
"""Qwen3-VL first: the other one suits all towers for images of any size."""
