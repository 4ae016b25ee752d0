"""Qwen2.5-VL in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalight.models.config import require
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.hugging_face import config_from_transformers as gpt_from
from megalight.models.gpt.hugging_face import config_to_transformers as gpt_to
from megalight.models.gpt.hugging_face import weight_map as gpt_map
from megalight.models.kinds import Kind
from megalight.models.vision.config import VisionConfig
from megalight.models.vision.dynamic_config import DynamicConfig
from megalight.models.vlm.config import ProjectorConfig, VLMConfig
from megalight.models.weights import Theirs, WeightMap

MODEL_TYPE = "qwen2_5_vl"
EPS = 1e-6
"""Of all norms of the tower. It is no setting of theirs."""

TOWER = {
    "embed.tower.patch": "visual.patch_embed.proj",
    "embed.tower.layers.N.attention_norm": "visual.blocks.N.norm1",
    "embed.tower.layers.N.attention.proj": "visual.blocks.N.attn.proj",
    "embed.tower.layers.N.mlp_norm": "visual.blocks.N.norm2",
    "embed.tower.layers.N.mlp.gate": "visual.blocks.N.mlp.gate_proj",
    "embed.tower.layers.N.mlp.up": "visual.blocks.N.mlp.up_proj",
    "embed.tower.layers.N.mlp.down": "visual.blocks.N.mlp.down_proj",
    "embed.projector.norm": "visual.merger.ln_q",
    "embed.projector.up": "visual.merger.first",
    "embed.projector.down": "visual.merger.second",
}
"""Our module -> theirs. ``N``: a layer's index."""

RESPELT = {r"^model\.visual\.": "visual.", r"^model\.language_model\.": "model."}
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


def fused(config: VisionConfig) -> dict[str, Theirs]:
    """Return the places of queries, keys and values, which are one tensor in towers of Qwen."""
    size = config.hidden_size
    return {
        f"embed.tower.layers.N.attention.{part}": Theirs(
            "visual.blocks.N.attn.qkv", rows=range(number * size, (number + 1) * size)
        )
        for number, part in enumerate("qkv")
    }


def weight_map(config: VLMConfig) -> WeightMap:
    """Return where Qwen2.5-VL keeps the tensors of a model."""
    language = gpt_map(config.language)
    tower = {ours: Theirs(theirs) for ours, theirs in TOWER.items()} | fused(config.vision)
    return WeightMap(
        tower | dict(language.places),
        copies=language.copies,
        left_out=language.left_out,
        respelt=RESPELT,
        moved=MOVED,
    )


def check_width(vision: Mapping[str, Any], language: GPTConfig) -> None:
    """Check that the projector ends with the width of the language model.

    Raises:
        ConfigurationError: it does not.
    """
    require(
        vision.get("out_hidden_size", language.hidden_size) == language.hidden_size,
        f"vision_config.out_hidden_size is {vision.get('out_hidden_size')} and the language model has hidden_size "
        f"{language.hidden_size}; the projector ends with its width. Copy the configuration again.",
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
    channels = vision.get("in_channels", vision.get("in_chans", 3))
    tied = any(each.get("tie_word_embeddings", False) for each in (text, values))
    language = gpt_from({**text, "model_type": "qwen2", "tie_word_embeddings": tied})
    require(
        language.head_dim * language.num_heads == language.hidden_size,
        f"head_dim is {language.head_dim} with {language.num_heads} heads and hidden_size {language.hidden_size}; "
        f"heads of {MODEL_TYPE} have hidden_size / num_attention_heads features.",
    )
    check_width(vision, language)
    merge = vision["spatial_merge_size"]
    return VLMConfig(
        language=language,
        vision=VisionConfig(
            num_layers=vision["depth"],
            hidden_size=vision["hidden_size"],
            num_heads=vision["num_heads"],
            ffn_hidden_size=vision["intermediate_size"],
            image_size=0,
            patch_size=vision["patch_size"],
            channels=channels,
            activation="swiglu",
            class_token=False,
            input_norm=False,
            norm="rms",
            norm_eps=EPS,
            dynamic=DynamicConfig(
                frames=vision["temporal_patch_size"],
                window=vision["window_size"],
                full_layers=tuple(vision["fullatt_block_indexes"]),
            ),
        ),
        projector=ProjectorConfig(
            merge=merge, norm="rms", norm_eps=EPS, hidden_size=merge**2 * vision["hidden_size"], activation="gelu"
        ),
        image_token=values.get("image_token_id", 151655),
    )


def _write(config: VLMConfig) -> dict[str, Any]:
    vision = config.vision
    assert vision.dynamic is not None
    text = gpt_to(config.language, "qwen2")
    text["model_type"] = f"{MODEL_TYPE}_text"
    return {
        "text_config": text,
        "vision_config": {
            "model_type": f"{MODEL_TYPE}_vision",
            "depth": vision.num_layers,
            "hidden_size": vision.hidden_size,
            "hidden_act": "silu",
            "intermediate_size": vision.ffn_hidden_size,
            "num_heads": vision.num_heads,
            "in_channels": vision.channels,
            "patch_size": vision.patch_size,
            "spatial_merge_size": config.projector.merge,
            "temporal_patch_size": vision.dynamic.frames,
            "window_size": vision.dynamic.window,
            "out_hidden_size": config.language.hidden_size,
            "fullatt_block_indexes": list(vision.dynamic.full_layers),
        },
        "image_token_id": config.image_token,
        "tie_word_embeddings": config.language.tie_embeddings,
    }


def _suits(config: VLMConfig) -> bool:
    return config.vision.dynamic is not None


KINDS = (Kind(MODEL_TYPE, "Qwen2_5_VLForConditionalGeneration", _suits, weight_map, _read, _write),)
