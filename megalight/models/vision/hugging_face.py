"""Towers of ``transformers``: names of tensors and configurations, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megalight.models.config import require
from megalight.models.vision.config import VisionConfig

PLACES = {
    "patch": "embeddings.patch_embedding",
    "class_token.weight": "embeddings.class_embedding",
    "position": "embeddings.position_embedding",
    "input_norm": "pre_layrnorm",
    "layers.N.attention_norm": "encoder.layers.N.layer_norm1",
    "layers.N.attention.q": "encoder.layers.N.self_attn.q_proj",
    "layers.N.attention.k": "encoder.layers.N.self_attn.k_proj",
    "layers.N.attention.v": "encoder.layers.N.self_attn.v_proj",
    "layers.N.attention.proj": "encoder.layers.N.self_attn.out_proj",
    "layers.N.mlp_norm": "encoder.layers.N.layer_norm2",
    "layers.N.mlp.up": "encoder.layers.N.mlp.fc1",
    "layers.N.mlp.down": "encoder.layers.N.mlp.fc2",
}
"""Our module of the tower -> the module of CLIP and SigLIP, of which SigLIP lacks some. ``N``: a layer's index."""

UNUSED_NORM = "post_layernorm"
"""Their norm after the last layer, whose output language models do not read. Files hold it, so it is written."""

UNUSED = rf"({UNUSED_NORM}|head)\..*|embeddings\.position_ids"
"""Pattern of tensors that are not read. Older files hold the ids, which are counted here."""

ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Their names of activations in towers and projectors -> ours."""


@dataclass(frozen=True)
class TowerKind:
    """A kind of tower.

    Attributes:
        defaults: what a ``config.json`` need not say: published ones leave out many sizes.
        strategy: the ``vision_feature_select_strategy`` with which all patches are read, and nothing else.
        fixed: settings of ours that all of these towers have.
        written: further settings of theirs.
        like_unused_norm: the norm whose values are written for the one that nobody reads.
    """

    defaults: Mapping[str, Any]
    strategy: str
    fixed: Mapping[str, Any]
    like_unused_norm: str
    written: Mapping[str, Any] = field(default_factory=dict)


BASE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "attention_dropout": 0.0,
}
KINDS = {
    "clip_vision_model": TowerKind(
        defaults=BASE | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
        strategy="default",  # without the class token
        fixed={"class_token": True, "patch_bias": False, "input_norm": True},
        like_unused_norm="pre_layrnorm",
    ),
    "siglip_vision_model": TowerKind(
        defaults=BASE | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
        strategy="full",
        fixed={
            "class_token": False,
            "patch_bias": True,
            "input_norm": False,
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
        },
        like_unused_norm="encoder.layers.0.layer_norm1",
        written={"vision_use_head": False},
    ),
}
"""``model_type`` of a tower -> what is known of it."""


def kind_of(config: VisionConfig) -> str:
    """Return the kind that is nearest to a tower: SigLIP has no class token."""
    return "clip_vision_model" if config.class_token else "siglip_vision_model"


def tower_from(values: Mapping[str, Any], kind: str, layer: Any) -> VisionConfig:
    """Convert their configuration of a tower.

    Args:
        values: their ``vision_config``.
        kind: a key of :data:`KINDS`.
        layer: their ``vision_feature_layer``, whose output is read. Layers behind it are left out.

    Raises:
        ConfigurationError: an option is not supported here.
    """
    known = KINDS[kind]
    tower = {**known.defaults, **values}
    layers = tower["num_hidden_layers"]
    require(isinstance(layer, int), f"vision_feature_layer is {layer}; features of a single layer are read.")
    # Theirs counts hidden states, the first of which is the input of the first layer.
    used = layer if layer >= 0 else layers + 1 + layer
    require(1 <= used <= layers, f"vision_feature_layer is {layer}; the tower has {layers} layers.")
    image, patch = side_of("image_size", tower), side_of("patch_size", tower)
    return VisionConfig(
        num_layers=used,
        hidden_size=tower["hidden_size"],
        num_heads=tower["num_attention_heads"],
        ffn_hidden_size=tower["intermediate_size"],
        image_size=image,
        patch_size=patch,
        # Their convolution stops where no whole patch is left.
        margin=image % patch,
        channels=tower["num_channels"],
        activation=activation_from("vision_config.hidden_act", tower["hidden_act"]),
        norm_eps=tower["layer_norm_eps"],
        **known.fixed,
    )


def side_of(key: str, vision: Mapping[str, Any]) -> int:
    """Return the side of images or patches, which their ``vision_config`` says once or twice.

    Raises:
        ConfigurationError: it says two sides, or no integer.
    """
    sides = vision[key] if isinstance(vision[key], list | tuple) else [vision[key]]
    require(
        len(sides) in (1, 2) and len(set(map(repr, sides))) == 1 and type(sides[0]) is int and sides[0] > 0,
        f"vision_config.{key} is {vision[key]}; it must be the side of a square.",
    )
    return int(sides[0])


def tower_to(config: VisionConfig) -> dict[str, Any]:
    """Write the configuration of a tower, whose features are read after its last layer."""
    kind = kind_of(config)
    return {
        "model_type": kind,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_channels": config.channels,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "hidden_act": activation_to(config.activation),
        "layer_norm_eps": config.norm_eps,
        **KINDS[kind].written,
    }


def activation_from(key: str, name: str) -> str:
    """Return our name of an activation.

    Raises:
        ConfigurationError: it has none. The message names ``key``.
    """
    require(name in ACTIVATIONS, f"{key} is {name!r}; it has no counterpart here. Known: {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def activation_to(activation: str) -> str:
    """Return their name of an activation, or ours where they have none, which the reader then refuses."""
    return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == activation), activation)
