"""LLaVA-1.5, LLaVA with SigLIP, and LLaVA-OneVision in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megalight.models.config import require
from megalight.models.gpt.hugging_face import config_from_transformers as gpt_from
from megalight.models.gpt.hugging_face import config_to_transformers as gpt_to
from megalight.models.gpt.hugging_face import weight_map as gpt_map
from megalight.models.kinds import Kind
from megalight.models.vision import hugging_face as towers
from megalight.models.vlm.config import ProjectorConfig, VLMConfig
from megalight.models.vlm.hugging_face import videos
from megalight.models.weights import Theirs, WeightMap

PROJECTOR = {
    "embed.projector.up": "multi_modal_projector.linear_1",
    "embed.projector.down": "multi_modal_projector.linear_2",
    "embed.newline.weight": "image_newline",
}
TOWER = "vision_tower."
LANGUAGE = "language_model."
"""What their names of tensors of the tower and of the language model begin with."""

RESPELT = {
    r"^(model\.)?vision_tower\.(vision_model\.)?": "vision_tower.",
    r"^model\.multi_modal_projector\.": "multi_modal_projector.",
    r"^model\.image_newline$": "image_newline",
    r"^model\.language_model\.": "language_model.model.",
    r"^lm_head\.": "language_model.lm_head.",
}
"""Names in memory and in files of other releases."""

TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
}
"""What a ``config.json`` need not say of its language model: the published ones of LLaVA leave out most sizes."""


def weight_map(config: VLMConfig) -> WeightMap:
    """Return where LLaVA keeps the tensors of a model."""
    language = gpt_map(config.language)
    unused = [TOWER + towers.UNUSED_NORM, TOWER + towers.KINDS[towers.kind_of(config.vision)].like_unused_norm]
    tower = {f"embed.tower.{ours}": TOWER + theirs for ours, theirs in towers.PLACES.items()}
    return WeightMap(
        {ours: Theirs(theirs) for ours, theirs in (tower | PROJECTOR).items()}
        | {ours: replace(place, name=LANGUAGE + place.name) for ours, place in language.places.items()},
        copies={LANGUAGE + copy: LANGUAGE + original for copy, original in language.copies.items()},
        left_out=rf"vision_tower\.({towers.UNUSED})",
        respelt=RESPELT,
        # The same shape, and nobody reads it.
        doubles={f"{unused[1]}.{leaf}": [f"{unused[0]}.{leaf}"] for leaf in ("weight", "bias")},
        held=_held(config),
    )


def _held(config: VLMConfig) -> Callable[[str], bool]:
    """Return whether the model has a tensor: layers of their tower behind the features are left out."""

    def held(name: str) -> bool:
        found = re.match(r"embed\.tower\.layers\.(\d+)\.", name)
        return found is None or int(found[1]) < config.vision.num_layers

    return held


def _newline(config: VLMConfig) -> bool:
    return config.newline


def _always(config: VLMConfig) -> bool:
    return True


def _llava(values: Mapping[str, Any]) -> VLMConfig:
    """Convert LLaVA-1.5, and LLaVA with other towers and language models."""
    published = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default", "image_token_index": 32000}
    return _read({**published, **values}, "clip_vision_model", "llama")


def _onevision(values: Mapping[str, Any]) -> VLMConfig:
    """Convert LLaVA-OneVision. Each image is one tile, as it reads several images of a conversation."""
    published = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_token_index": 151646}
    read = _read({**published, **values}, "siglip_vision_model", "qwen2")
    key = "video_token_id" if "video_token_id" in values else "video_token_index"
    return replace(read, newline=True, video_token=videos.token_from(values, key, 151647, read.vocab_size))


def _read(values: Mapping[str, Any], tower_kind: str, text_kind: str) -> VLMConfig:
    vision, text = dict(values.get("vision_config") or {}), dict(values.get("text_config") or {})
    kind, known = vision.get("model_type", tower_kind), ", ".join(towers.KINDS)
    require(kind in towers.KINDS, f"vision_config.model_type is {kind!r}; towers of {known} are read.")
    strategy, readable = values["vision_feature_select_strategy"], towers.KINDS[kind].strategy
    require(
        strategy == readable,
        f"vision_feature_select_strategy is {strategy!r}; from {kind} only {readable!r} is read: all patches, and no "
        "class token.",
    )
    text = {"model_type": text_kind} | TEXT_DEFAULTS.get(text.get("model_type", text_kind), {}) | text
    # Files of some releases say it of the language model, files of others of the whole.
    tied = any(each.get("tie_word_embeddings", False) for each in (text, values))
    return VLMConfig(
        language=gpt_from({**text, "tie_word_embeddings": tied}),
        vision=towers.tower_from(vision, kind, values["vision_feature_layer"]),
        projector=ProjectorConfig(
            activation=towers.activation_from("projector_hidden_act", values.get("projector_hidden_act", "gelu")),
            bias=bool(values.get("multimodal_projector_bias", True)),
        ),
        image_token=values.get("image_token_id", values["image_token_index"]),
    )


def _to_llava(config: VLMConfig) -> dict[str, Any]:
    return {"image_seq_length": config.image_tokens, **_write(config)}


def _write(config: VLMConfig) -> dict[str, Any]:
    return {
        "text_config": gpt_to(config.language),
        "vision_config": towers.tower_to(config.vision),
        # Layers behind the features are not here, so that they are read from the last one.
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": towers.KINDS[towers.kind_of(config.vision)].strategy,
        "projector_hidden_act": towers.activation_to(config.projector.activation),
        "multimodal_projector_bias": config.projector.bias,
        "image_token_index": config.image_token,
        **videos.token_to(config, "video_token_index"),
        "tie_word_embeddings": config.language.tie_embeddings,
    }


KINDS = (
    Kind("llava_onevision", "LlavaOnevisionForConditionalGeneration", _newline, weight_map, _onevision, _write),
    Kind("llava", "LlavaForConditionalGeneration", _always, weight_map, _llava, _to_llava),
)
