"""Qwen2.5-VL in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalight.models.config import require
from megalight.models.gpt.hugging_face import weight_map as gpt_map
from megalight.models.kinds import Kind
from megalight.models.vision.config import VisionConfig
from megalight.models.vision.dynamic_config import DynamicConfig
from megalight.models.vlm.config import ProjectorConfig, VLMConfig
from megalight.models.vlm.hugging_face import qwen
from megalight.models.weights import WeightMap

MODEL_TYPE = "qwen2_5_vl"

NAMED = {
    "embed.tower.layers.N.mlp.gate": "visual.blocks.N.mlp.gate_proj",
    "embed.tower.layers.N.mlp.up": "visual.blocks.N.mlp.up_proj",
    "embed.tower.layers.N.mlp.down": "visual.blocks.N.mlp.down_proj",
    "embed.projector.norm": "visual.merger.ln_q",
    "embed.projector.up": "visual.merger.first",
    "embed.projector.down": "visual.merger.second",
}
"""Our module -> theirs, beside what all towers of Qwen have. ``N``: a layer's index."""

RENAMED = {r"^model\.visual\.": "visual.", r"^model\.language_model\.": "model."}
"""Names in memory and in files of other releases."""

MOVED = {"visual.merger.mlp.0.": "visual.merger.first.", "visual.merger.mlp.2.": "visual.merger.second."}
"""Names in files -> in the table above, where a number is that of a layer."""

VISION_DEFAULTS: dict[str, Any] = {
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


def weight_map(config: VLMConfig) -> WeightMap:
    """Return where Qwen2.5-VL keeps the tensors of a model."""
    language = gpt_map(config.language)
    return WeightMap(
        qwen.places(config.vision, NAMED) | dict(language.places),
        copies=language.copies,
        left_out=language.left_out,
        renamed=RENAMED,
        moved=MOVED,
    )


def _read(values: Mapping[str, Any]) -> VLMConfig:
    vision = VISION_DEFAULTS | dict(values.get("vision_config") or {})
    # Files of older releases have the settings of the language model among those of the whole.
    text = (
        TEXT_DEFAULTS
        | {k: v for k, v in values.items() if k != "vision_config"}
        | dict(values.get("text_config") or {})
    )
    require(vision["hidden_act"] == "silu", f"vision_config.hidden_act is {vision['hidden_act']!r}; only silu is read.")
    vision.setdefault("in_channels", vision.get("in_chans", 3))
    language = qwen.language_from(values, text, "qwen2", vision)
    require(
        language.head_dim * language.num_heads == language.hidden_size,
        f"head_dim is {language.head_dim} with {language.num_heads} heads and hidden_size {language.hidden_size}; "
        f"heads of {MODEL_TYPE} have hidden_size / num_attention_heads features.",
    )
    merge = vision["spatial_merge_size"]
    return VLMConfig(
        language=language,
        vision=VisionConfig(
            **qwen.sizes_from(vision),
            activation="swiglu",
            norm="rms",
            dynamic=DynamicConfig(
                frames=vision["temporal_patch_size"],
                window=vision["window_size"],
                full_layers=tuple(vision["fullatt_block_indexes"]),
            ),
        ),
        projector=ProjectorConfig(
            merge=merge, norm="rms", norm_eps=qwen.EPS, hidden_size=merge**2 * vision["hidden_size"], activation="gelu"
        ),
        **qwen.tokens_from(values, language.vocab_size),
    )


def _write(config: VLMConfig) -> dict[str, Any]:
    dynamic = config.vision.dynamic
    assert dynamic is not None
    return qwen.written(
        config,
        MODEL_TYPE,
        "qwen2",
        hidden_act="silu",
        window_size=dynamic.window,
        fullatt_block_indexes=list(dynamic.full_layers),
    )


def _suits(config: VLMConfig) -> bool:
    return config.vision.dynamic is not None


KINDS = (Kind(MODEL_TYPE, "Qwen2_5_VLForConditionalGeneration", _suits, weight_map, _read, _write),)
