"""Gemma-3 with its tower in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from megalight.models.config import require
from megalight.models.gpt.hugging_face import config_from_transformers as gpt_from
from megalight.models.gpt.hugging_face import config_to_transformers as gpt_to
from megalight.models.gpt.hugging_face import weight_map as gpt_map
from megalight.models.hugging_face.model_types import ModelType
from megalight.models.hugging_face.weights import TensorMapping, WeightMap
from megalight.models.vision import hugging_face
from megalight.models.vlm.config import ProjectorConfig, VLMConfig

MODEL_TYPE = "gemma3"
TOWER_TYPE = "siglip_vision_model"
TOWER, LANGUAGE = "vision_tower.", "language_model."
"""What their names of tensors of the tower and of the language model begin with."""

RENAMED = {
    r"^(model\.)?vision_tower\.(vision_model\.)?": "vision_tower.",
    r"^model\.multi_modal_projector\.": "multi_modal_projector.",
    r"^model\.language_model\.": "language_model.model.",
    r"^lm_head\.": "language_model.lm_head.",
}
"""Names in memory and in files of other releases."""


def weight_map(config: VLMConfig) -> WeightMap:
    """Return where Gemma-3 keeps the tensors of a model."""
    language = gpt_map(config.language)
    tower = {f"embed.tower.{ours}": TensorMapping(TOWER + theirs) for ours, theirs in hugging_face.PLACES.items()}
    tower["embed.tower.output_norm"] = TensorMapping(TOWER + hugging_face.UNUSED_NORM)  # which this model reads
    return WeightMap(
        tower
        | {
            "embed.projector.norm": TensorMapping("multi_modal_projector.mm_soft_emb_norm"),
            "embed.projector.proj.weight": TensorMapping(
                "multi_modal_projector.mm_input_projection_weight", transposed=True
            ),
        }
        | {ours: replace(place, name=LANGUAGE + place.name) for ours, place in language.places.items()},
        copies={LANGUAGE + copy: LANGUAGE + original for copy, original in language.copies.items()},
        left_out=r"vision_tower\.(head\..*|embeddings\.position_ids)",
        renamed=RENAMED,
    )


def _read(values: Mapping[str, Any]) -> VLMConfig:
    vision = dict(values.get("vision_config") or {})
    kind = vision.get("model_type", TOWER_TYPE)
    require(kind == TOWER_TYPE, f"vision_config.model_type is {kind!r}; towers of {MODEL_TYPE} are {TOWER_TYPE!r}.")
    tower = hugging_face.tower_from(vision, kind, -1)
    tower = replace(tower, output_norm=True, resize="stretch", resample="bilinear")
    side, tokens = tower.image_size // tower.patch_size, values.get("mm_tokens_per_image", 256)
    merge = side // max(1, isqrt(tokens))
    require(
        merge >= 1 and (side // merge) ** 2 == tokens and side % merge == 0,
        f"mm_tokens_per_image is {tokens}, and an image has {side} x {side} patches; tokens are means of squares of "
        "patches that divide it.",
    )
    text = {"model_type": "gemma3_text"} | dict(values["text_config"])
    tied = values.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
    return VLMConfig(
        language=gpt_from({**text, "tie_word_embeddings": tied}),
        vision=tower,
        projector=ProjectorConfig(
            merge=merge,
            pool=True,
            norm="rms",
            norm_joined=True,
            norm_around_zero=True,
            norm_eps=tower.norm_eps,
            layers=1,
            bias=False,
        ),
        image_token=values.get("image_token_id", values.get("image_token_index", 262144)),
        mutual=True,
    )


def _write(config: VLMConfig) -> dict[str, Any]:
    return {
        "text_config": gpt_to(config.language, "gemma3_text"),
        "vision_config": hugging_face.tower_to(config.vision),
        "mm_tokens_per_image": config.image_tokens,
        "image_token_index": config.image_token,
        "tie_word_embeddings": config.language.tie_embeddings,
    }


def _suits(config: VLMConfig) -> bool:
    return config.mutual


MODEL_TYPES = (ModelType(MODEL_TYPE, "Gemma3ForConditionalGeneration", _suits, weight_map, _read, _write),)
