"""InternVL in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from megalight.models.config import require
from megalight.models.gpt.hugging_face import config_from_transformers as gpt_from
from megalight.models.gpt.hugging_face import config_to_transformers as gpt_to
from megalight.models.gpt.hugging_face import weight_map as gpt_map
from megalight.models.gpt.hugging_face.common import refuse_others
from megalight.models.hugging_face.model_types import ModelType
from megalight.models.hugging_face.weights import TensorMapping, WeightMap
from megalight.models.vision import hugging_face
from megalight.models.vision.config import VisionConfig
from megalight.models.vlm.config import ProjectorConfig, VLMConfig

MODEL_TYPE = "internvl"
TILES = 12
"""Of an image, at most. Their processor's setting, and none of ``config.json``."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EPS = 1e-5
"""Of the projector's norm. It is no setting of theirs."""

LAYER = {
    "attention_norm": "layernorm_before",
    "attention.q": "attention.q_proj",
    "attention.k": "attention.k_proj",
    "attention.v": "attention.v_proj",
    "attention.q_norm": "attention.q_norm",
    "attention.k_norm": "attention.k_norm",
    "attention.proj": "attention.projection_layer",
    "attention_post_norm.weight": "lambda_1",
    "mlp_norm": "layernorm_after",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
    "mlp_post_norm.weight": "lambda_2",
}
PLACES = {
    "embed.tower.patch": "vision_tower.embeddings.patch_embeddings.projection",
    "embed.tower.output_norm": "vision_tower.layernorm",
    **{f"embed.tower.layers.N.{ours}": f"vision_tower.encoder.layer.N.{theirs}" for ours, theirs in LAYER.items()},
    "embed.projector.norm": "multi_modal_projector.layer_norm",
    "embed.projector.up": "multi_modal_projector.linear_1",
    "embed.projector.down": "multi_modal_projector.linear_2",
}
"""Our module, or a single tensor -> theirs. ``N``: a layer's index."""

RENAMED = {
    r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
    r"^model\.language_model\.": "language_model.model.",
    r"^lm_head\.": "language_model.lm_head.",
}
"""Names in memory and in files of other releases."""
LANGUAGE = "language_model."

VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "attention_bias": False,
    "use_qk_norm": False,
    "intermediate_size": 4096,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "image_size": (448, 448),
    "patch_size": (14, 14),
    "num_channels": 3,
    "layer_scale_init_value": 0.1,
    "use_mean_pooling": True,
}
"""What a ``config.json`` need not say."""
NORMS: dict[str, Literal["layer", "rms"]] = {"layer_norm": "layer", "rms_norm": "rms"}


def weight_map(config: VLMConfig) -> WeightMap:
    """Return where InternVL keeps the tensors of a model."""
    language = gpt_map(config.language)
    return WeightMap(
        {ours: TensorMapping(theirs) for ours, theirs in PLACES.items()}
        | {
            "embed.tower.class_token.weight": TensorMapping("vision_tower.embeddings.cls_token", leading=2),
            "embed.tower.position.weight": TensorMapping("vision_tower.embeddings.position_embeddings", leading=1),
        }
        | {ours: replace(place, name=LANGUAGE + place.name) for ours, place in language.places.items()},
        copies={LANGUAGE + copy: LANGUAGE + original for copy, original in language.copies.items()},
        left_out=r"vision_tower\.embeddings\.mask_token",
        renamed=RENAMED,
    )


def _read(values: Mapping[str, Any]) -> VLMConfig:
    vision = VISION_DEFAULTS | dict(values.get("vision_config") or {})
    refuse_others(vision, {"use_absolute_position_embeddings": True})
    refuse_others(values, {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"})
    ratio = values.get("downsample_ratio", 0.5)
    merge = round(1 / ratio) if ratio else 0
    require(merge * ratio == 1, f"downsample_ratio is {ratio}; squares of patches have whole sides, such as 0.5 for 2.")
    norm = vision["norm_type"]
    require(norm in NORMS, f"vision_config.norm_type is {norm!r}; {', '.join(NORMS)} are read.")
    text = {"model_type": "qwen2"} | dict(values["text_config"])
    tied = any(each.get("tie_word_embeddings", False) for each in (text, values))
    return VLMConfig(
        language=gpt_from({**text, "tie_word_embeddings": tied}),
        vision=VisionConfig(
            num_layers=vision["num_hidden_layers"],
            hidden_size=vision["hidden_size"],
            num_heads=vision["num_attention_heads"],
            ffn_hidden_size=vision["intermediate_size"],
            image_size=hugging_face.side_of("image_size", vision),
            patch_size=hugging_face.side_of("patch_size", vision),
            channels=vision["num_channels"],
            tiles=TILES,
            resize="stretch",
            activation=hugging_face.activation_from("vision_config.hidden_act", vision["hidden_act"]),
            patch_bias=True,
            input_norm=False,
            output_norm=not vision["use_mean_pooling"],
            qkv_bias=vision["attention_bias"],
            qk_norm=vision["use_qk_norm"],
            layer_scale=vision["layer_scale_init_value"],
            norm=NORMS[norm],
            norm_eps=vision["layer_norm_eps"],
            mean=MEAN,
            std=STD,
        ),
        projector=ProjectorConfig(
            merge=merge,
            norm="layer",
            norm_joined=True,
            norm_eps=EPS,
            activation=hugging_face.activation_from("projector_hidden_act", values.get("projector_hidden_act", "gelu")),
        ),
        image_token=values.get("image_token_id", values.get("image_token_index", 151667)),  # as older files have it
    )


def _write(config: VLMConfig) -> dict[str, Any]:
    vision = config.vision
    return {
        "text_config": gpt_to(config.language),
        "vision_config": {
            "model_type": f"{MODEL_TYPE}_vision",
            "hidden_size": vision.hidden_size,
            "num_hidden_layers": vision.num_layers,
            "num_attention_heads": vision.num_heads,
            "attention_bias": vision.qkv_bias,
            "use_qk_norm": vision.qk_norm,
            "intermediate_size": vision.ffn_hidden_size,
            "hidden_act": hugging_face.activation_to(vision.activation),
            "norm_type": next(theirs for theirs, ours in NORMS.items() if ours == vision.norm),
            "layer_norm_eps": vision.norm_eps,
            "image_size": [vision.image_size] * 2,
            "patch_size": [vision.patch_size] * 2,
            "num_channels": vision.channels,
            "layer_scale_init_value": vision.layer_scale,
            "use_mean_pooling": not vision.output_norm,
        },
        "image_token_id": config.image_token,
        "image_seq_length": config.image_tokens,
        "downsample_ratio": 1 / config.projector.merge,
        "projector_hidden_act": hugging_face.activation_to(config.projector.activation),
        "tie_word_embeddings": config.language.tie_embeddings,
    }


def _suits(config: VLMConfig) -> bool:
    return config.vision.layer_scale is not None


MODEL_TYPES = (ModelType(MODEL_TYPE, "InternVLForConditionalGeneration", _suits, weight_map, _read, _write),)
