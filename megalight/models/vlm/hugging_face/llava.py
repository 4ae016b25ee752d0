"""LLaVA-1.5, with SigLIP, LLaVA-NeXT and LLaVA-OneVision in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from megalight.models.config import require
from megalight.models.gpt.hugging_face import config_from_transformers as gpt_from
from megalight.models.gpt.hugging_face import config_to_transformers as gpt_to
from megalight.models.gpt.hugging_face import weight_map as gpt_map
from megalight.models.hugging_face.model_types import ModelType
from megalight.models.hugging_face.weights import TensorMapping, WeightMap
from megalight.models.vision import hugging_face
from megalight.models.vision.config import AnyResConfig, VisionConfig
from megalight.models.vlm.config import ProjectorConfig, VLMConfig
from megalight.models.vlm.hugging_face import image_processor

PROJECTOR = {
    "embed.projector.up": "multi_modal_projector.linear_1",
    "embed.projector.down": "multi_modal_projector.linear_2",
    "embed.newline.weight": "image_newline",
}
TOWER = "vision_tower."
LANGUAGE = "language_model."
"""What their names of tensors of the tower and of the language model begin with."""

RENAMED = {
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


GRIDS = {
    "llava_next": ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)),
    "llava_onevision": tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7)),
}
"""Rows and columns of tiles, which a ``config.json`` need not say."""
MOST = re.compile(r"anyres_max_(\d+)")
"""Their ``vision_aspect_ratio``, with the number of tiles from which features are shrunk."""


def weight_map(config: VLMConfig) -> WeightMap:
    """Return where LLaVA keeps the tensors of a model."""
    language = gpt_map(config.language)
    unused = [
        TOWER + hugging_face.UNUSED_NORM,
        TOWER + hugging_face.KINDS[hugging_face.kind_of(config.vision)].like_unused_norm,
    ]
    tower = {f"embed.tower.{ours}": TOWER + theirs for ours, theirs in hugging_face.PLACES.items()}
    return WeightMap(
        {ours: TensorMapping(theirs) for ours, theirs in (tower | PROJECTOR).items()}
        | {ours: replace(place, name=LANGUAGE + place.name) for ours, place in language.places.items()},
        copies={LANGUAGE + copy: LANGUAGE + original for copy, original in language.copies.items()},
        left_out=rf"vision_tower\.({hugging_face.UNUSED})",
        renamed=RENAMED,
        # The same shape, and nobody reads it.
        doubles={f"{unused[1]}.{leaf}": [f"{unused[0]}.{leaf}"] for leaf in ("weight", "bias")},
        held=_held(config),
        kept=rf"vision_tower\.(encoder\.layers\.\d+|{hugging_face.UNUSED_NORM}|head)\..*",
    )


def _held(config: VLMConfig) -> Callable[[str], bool]:
    """Return whether the model has a tensor: layers of their tower behind the features are left out."""

    def held(name: str) -> bool:
        found = re.match(r"embed\.tower\.layers\.(\d+)\.", name)
        return found is None or int(found[1]) < config.vision.num_layers

    return held


def with_unread(values: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a ``config.json`` with the layers behind the features, and the head, that a folder has and no run reads.

    Args:
        values: their configuration, with the layers that are read alone.
        names: tensors of the tower beside those that are read.
    """
    behind = {found[1] for name in names if (found := re.match(r"vision_tower\.encoder\.layers\.(\d+)\.", name))}
    vision = dict(values["vision_config"])
    vision["num_hidden_layers"] += len(behind)
    if "vision_use_head" in vision:
        vision["vision_use_head"] = any(name.startswith(f"{TOWER}head.") for name in names)
    return values | {"vision_config": vision, "vision_feature_layer": -1 - len(behind)}


def _newline(config: VLMConfig) -> bool:
    return config.newline


def _always(config: VLMConfig) -> bool:
    return True


def _llava(values: Mapping[str, Any]) -> VLMConfig:
    """Convert LLaVA-1.5, and LLaVA with other towers and language models."""
    published = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default", "image_token_index": 32000}
    return _read({**published, **values}, "clip_vision_model", "llama")


def _onevision(values: Mapping[str, Any]) -> VLMConfig:
    """Convert LLaVA-OneVision."""
    published = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_token_index": 151646}
    read = _read({**published, **values}, "siglip_vision_model", "qwen2")
    key = "video_token_id" if "video_token_id" in values else "video_token_index"
    ratio = values.get("vision_aspect_ratio", "anyres_max_9")
    most = MOST.fullmatch(ratio)
    require(most is not None, f"vision_aspect_ratio is {ratio!r}; anyres_max_N is read, such as anyres_max_9.")
    assert most is not None
    tiles = AnyResConfig(grids=_grids(values, "llava_onevision", read.vision), most=int(most[1]), alone=True)
    return replace(
        read,
        vision=replace(read.vision, anyres=tiles, resize="pad"),
        newline=True,
        video_token=image_processor.token_from(values, key, 151647, read.vocab_size),
    )


def _next(values: Mapping[str, Any]) -> VLMConfig:
    """Convert LLaVA-NeXT, which divides each image into tiles."""
    published = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default", "image_token_index": 32000}
    read = _read({**published, **values}, "clip_vision_model", "llama")
    tiles = AnyResConfig(grids=_grids(values, "llava_next", read.vision))
    return replace(read, vision=replace(read.vision, anyres=tiles), newline=True)


def _grids(values: Mapping[str, Any], kind: str, vision: VisionConfig) -> tuple[tuple[int, int], ...]:
    points, size = values.get("image_grid_pinpoints"), vision.image_size
    if points is None:
        return GRIDS[kind]
    pairs = (isinstance(point, list | tuple) and len(point) == 2 for point in points)
    require(all(pairs), f"image_grid_pinpoints is {points}; it must be a list of heights and widths.")
    strange = [point for point in points if any(side % size for side in point)]
    require(
        not strange,
        f"image_grid_pinpoints has {strange[:3]}; sides are multiples of the tower's image_size, {size}.",
    )
    return tuple((height // size, width // size) for height, width in points)


def _read(values: Mapping[str, Any], tower_kind: str, text_kind: str) -> VLMConfig:
    vision, text = dict(values.get("vision_config") or {}), dict(values.get("text_config") or {})
    kind, known = vision.get("model_type", tower_kind), ", ".join(hugging_face.KINDS)
    require(kind in hugging_face.KINDS, f"vision_config.model_type is {kind!r}; towers of {known} are read.")
    strategy, readable = values["vision_feature_select_strategy"], hugging_face.KINDS[kind].strategy
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
        vision=hugging_face.tower_from(vision, kind, values["vision_feature_layer"]),
        projector=ProjectorConfig(
            activation=hugging_face.activation_from("projector_hidden_act", values.get("projector_hidden_act", "gelu")),
            bias=bool(values.get("multimodal_projector_bias", True)),
        ),
        image_token=values.get("image_token_id", values["image_token_index"]),
    )


def _to_next(config: VLMConfig) -> dict[str, Any]:
    return {**_write(config), "image_grid_pinpoints": pinpoints(config.vision)}


def _to_onevision(config: VLMConfig) -> dict[str, Any]:
    anyres = config.vision.anyres
    return _to_next(config) | ({} if anyres is None else {"vision_aspect_ratio": f"anyres_max_{anyres.most}"})


def pinpoints(vision: VisionConfig) -> list[list[int]]:
    """Return heights and widths of grids of tiles, in pixels."""
    grids = () if vision.anyres is None else vision.anyres.grids
    return [[count * vision.image_size for count in grid] for grid in grids]


def _to_llava(config: VLMConfig) -> dict[str, Any]:
    return {"image_seq_length": config.image_tokens, **_write(config)}


def _write(config: VLMConfig) -> dict[str, Any]:
    return {
        "text_config": gpt_to(config.language),
        "vision_config": hugging_face.tower_to(config.vision),
        # Layers behind the features are not here, so that they are read from the last one.
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": hugging_face.KINDS[hugging_face.kind_of(config.vision)].strategy,
        "projector_hidden_act": hugging_face.activation_to(config.projector.activation),
        "multimodal_projector_bias": config.projector.bias,
        "image_token_index": config.image_token,
        **image_processor.token_to(config, "video_token_index"),
        "tie_word_embeddings": config.language.tie_embeddings,
    }


MODEL_TYPES = (
    ModelType(
        "llava_onevision", "LlavaOnevisionForConditionalGeneration", _newline, weight_map, _onevision, _to_onevision
    ),
    ModelType("llava_next", "LlavaNextForConditionalGeneration", _newline, weight_map, _next, _to_next),
    ModelType("llava", "LlavaForConditionalGeneration", _always, weight_map, _llava, _to_llava),
)
