"""Conversion of weights and configurations of vision-language models from ``transformers`` to ours and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megalight.errors import ConfigurationError
from megalight.models.config import compare, require
from megalight.models.gpt.hugging_face import config_from_transformers as gpt_from
from megalight.models.gpt.hugging_face import config_to_transformers as gpt_to
from megalight.models.gpt.hugging_face import weight_map as gpt_map
from megalight.models.vision.config import VisionConfig
from megalight.models.vlm.config import ProjectorConfig, VLMConfig
from megalight.models.weights import Theirs, WeightMap

CLIP = {
    "embed.tower.patch": "vision_tower.embeddings.patch_embedding",
    "embed.tower.class_token.weight": "vision_tower.embeddings.class_embedding",
    "embed.tower.position": "vision_tower.embeddings.position_embedding",
    "embed.tower.input_norm": "vision_tower.pre_layrnorm",
    "embed.tower.layers.N.attention_norm": "vision_tower.encoder.layers.N.layer_norm1",
    "embed.tower.layers.N.attention.q": "vision_tower.encoder.layers.N.self_attn.q_proj",
    "embed.tower.layers.N.attention.k": "vision_tower.encoder.layers.N.self_attn.k_proj",
    "embed.tower.layers.N.attention.v": "vision_tower.encoder.layers.N.self_attn.v_proj",
    "embed.tower.layers.N.attention.proj": "vision_tower.encoder.layers.N.self_attn.out_proj",
    "embed.tower.layers.N.mlp_norm": "vision_tower.encoder.layers.N.layer_norm2",
    "embed.tower.layers.N.mlp.up": "vision_tower.encoder.layers.N.mlp.fc1",
    "embed.tower.layers.N.mlp.down": "vision_tower.encoder.layers.N.mlp.fc2",
}
"""Our module of the tower -> the module of CLIP in LLaVA. ``N`` stands for a layer's index."""

PROJECTOR = {
    "embed.projector.up": "multi_modal_projector.linear_1",
    "embed.projector.down": "multi_modal_projector.linear_2",
}
LANGUAGE = "language_model."
"""What their names of tensors of the language model begin with."""

RESPELT = {
    r"^(model\.)?vision_tower\.(vision_model\.)?": "vision_tower.",
    r"^model\.multi_modal_projector\.": "multi_modal_projector.",
    r"^model\.language_model\.": "language_model.model.",
    r"^lm_head\.": "language_model.lm_head.",
}
"""Names in memory and in files of other releases."""

UNUSED_NORM = "vision_tower.post_layernorm"
"""Their norm after the last layer, whose output LLaVA does not read. Files hold it, so it is written with values."""

ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Their names of activations in towers and projectors -> ours."""

CLIP_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "attention_dropout": 0.0,
}
LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
"""What a ``config.json`` need not say: the published ones of LLaVA leave out most sizes."""


def weight_map(config: VLMConfig) -> WeightMap:
    """Return where ``transformers`` keeps the tensors of a model."""
    language = gpt_map(config.language)
    return WeightMap(
        {ours: Theirs(theirs) for ours, theirs in (CLIP | PROJECTOR).items()}
        | {ours: replace(place, name=LANGUAGE + place.name) for ours, place in language.places.items()},
        copies={LANGUAGE + copy: LANGUAGE + original for copy, original in language.copies.items()},
        # Older files hold the ids, which are counted here.
        left_out=r"vision_tower\.(post_layernorm\..*|embeddings\.position_ids)",
        respelt=RESPELT,
        # The same shape, and nobody reads it.
        doubles={f"vision_tower.pre_layrnorm.{leaf}": [f"{UNUSED_NORM}.{leaf}"] for leaf in ("weight", "bias")},
        held=_held(config),
    )


def _held(config: VLMConfig) -> Callable[[str], bool]:
    """Return whether the model has a tensor: layers of their tower behind the features are left out."""

    def held(name: str) -> bool:
        found = re.match(r"embed\.tower\.layers\.(\d+)\.", name)
        return found is None or int(found[1]) < config.vision.num_layers

    return held


def config_from_transformers(values: Mapping[str, Any]) -> VLMConfig:
    """Convert the ``config.json`` of a ``transformers`` model to our configuration.

    Raises:
        ConfigurationError: the model type or an option is not supported here.
    """
    kind = values.get("model_type")
    require(kind in READERS, f"model_type is {kind!r}; weights of {', '.join(READERS)} can be read.")
    try:
        return READERS[str(kind)](values)
    except KeyError as missing:
        raise ConfigurationError(f"the configuration of the {kind} model lacks {missing}; copy it again.") from None


def config_to_transformers(config: VLMConfig, model_type: str | None = None) -> dict[str, Any]:
    """Return the content of ``config.json`` for this model.

    Args:
        config: the model.
        model_type: the kind to write; there is one.

    Raises:
        ConfigurationError: no kind can express the configuration. The message names what it cannot.
    """
    values = _to_llava(config)
    # Written values are read back: whatever `transformers` cannot say shows as a difference.
    differences = compare(config.to_dict(), config_from_transformers(values).to_dict(), "transformers' llava")
    require(not differences, f"no model of transformers has this configuration. Nearest: {'; '.join(differences)}.")
    return values


def _llava(values: Mapping[str, Any]) -> VLMConfig:
    """Convert LLaVA-1.5."""
    vision, text = dict(values.get("vision_config") or {}), dict(values.get("text_config") or {})
    kind, layer = vision.get("model_type", "clip_vision_model"), values.get("vision_feature_layer", -2)
    require(kind == "clip_vision_model", f"vision_config.model_type is {kind!r}; only 'clip_vision_model' is read.")
    strategy = values.get("vision_feature_select_strategy", "default")
    require(
        strategy == "default",
        f"vision_feature_select_strategy is {strategy!r}; only 'default', without the class token, is read.",
    )
    tower = CLIP_DEFAULTS | vision
    layers = tower["num_hidden_layers"]
    require(isinstance(layer, int), f"vision_feature_layer is {layer}; features of a single layer are read.")
    # Theirs counts hidden states, the first of which is the input of the first layer.
    used = layer if layer >= 0 else layers + 1 + layer
    require(1 <= used <= layers, f"vision_feature_layer is {layer}; the tower has {layers} layers.")
    if text.get("model_type", "llama") == "llama":
        text = {"model_type": "llama"} | LLAMA_DEFAULTS | text
    return VLMConfig(
        language=gpt_from({**text, "tie_word_embeddings": text.get("tie_word_embeddings", False)}),
        vision=VisionConfig(
            num_layers=used,
            hidden_size=tower["hidden_size"],
            num_heads=tower["num_attention_heads"],
            ffn_hidden_size=tower["intermediate_size"],
            image_size=tower["image_size"],
            patch_size=tower["patch_size"],
            channels=tower["num_channels"],
            activation=_activation("vision_config.hidden_act", tower["hidden_act"]),
            norm_eps=tower["layer_norm_eps"],
        ),
        projector=ProjectorConfig(
            activation=_activation("projector_hidden_act", values.get("projector_hidden_act", "gelu")),
            bias=bool(values.get("multimodal_projector_bias", True)),
        ),
        image_token=values.get("image_token_index", values.get("image_token_id", 32000)),
    )


def _to_llava(config: VLMConfig) -> dict[str, Any]:
    vision = config.vision
    text = gpt_to(config.language)
    return {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": text,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.ffn_hidden_size,
            "num_hidden_layers": vision.num_layers,
            "num_attention_heads": vision.num_heads,
            "num_channels": vision.channels,
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "hidden_act": _their_name(vision.activation),
            "layer_norm_eps": vision.norm_eps,
        },
        # Layers behind the features are not here, so that they are read from the last one.
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": _their_name(config.projector.activation),
        "multimodal_projector_bias": config.projector.bias,
        "image_token_index": config.image_token,
        "image_seq_length": vision.num_patches,
        "tie_word_embeddings": config.language.tie_embeddings,
    }


READERS: dict[str, Callable[[Mapping[str, Any]], VLMConfig]] = {"llava": _llava}


def _activation(key: str, name: str) -> str:
    require(name in ACTIVATIONS, f"{key} is {name!r}; it has no counterpart here. Known: {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def _their_name(activation: str) -> str:
    """Return their name of an activation, or ours where they have none, which the reader then refuses."""
    return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == activation), activation)
