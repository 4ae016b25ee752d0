"""Conversion of weights and configurations of vision-language models from ``transformers`` to ours and back."""

from __future__ import annotations

from typing import Any

from megalight.models.gpt.hugging_face import settings as language_settings
from megalight.models.hugging_face.model_types import ModelTypes
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.hugging_face import gemma3, internvl, llava, qwen


def settings(config: VLMConfig) -> dict[str, Any]:
    """Return plain values, equal for configurations that mean the same model."""
    # What a model computes does not depend on the id of videos, which are refused.
    values = config.to_dict() | {"language": language_settings(config.language), "video_token": None}
    if config.vision.dynamic is None and not (config.newline or config.mutual or config.vision.tiles > 1):
        # LLaVA's image processor says how an image becomes a square, and `config.json` does not.
        values["vision"] |= {"resize": None, "resample": None}
    return values


FAMILY = ModelTypes((*gemma3.MODEL_TYPES, *internvl.MODEL_TYPES, *qwen.MODEL_TYPES, *llava.MODEL_TYPES), settings)
weight_map = FAMILY.weight_map
config_from_transformers = FAMILY.read
config_to_transformers = FAMILY.write
READERS = FAMILY.readers
