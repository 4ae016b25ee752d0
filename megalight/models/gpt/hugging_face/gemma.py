"""Gemma-2 and Gemma-3 in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megalight.errors import ConfigurationError
from megalight.models.config import DropoutConfig
from megalight.models.gpt.config import GPTConfig, NormConfig
from megalight.models.gpt.hugging_face.common import (
    layer_types,
    refuse_others,
    rotary_from,
    sizes_from,
    sizes_to,
    tied_head,
)
from megalight.models.gpt.hugging_face.llama import LLAMA, WHOLE, WINDOWED, types_to
from megalight.models.gpt.mixer_config import AttentionConfig
from megalight.models.hugging_face.model_types import ModelType
from megalight.models.hugging_face.weights import TensorMapping, WeightMap

NORMS = {
    "layers.N.attention_post_norm": "model.layers.N.post_attention_layernorm",
    "layers.N.mlp_norm": "model.layers.N.pre_feedforward_layernorm",
    "layers.N.mlp_post_norm": "model.layers.N.post_feedforward_layernorm",
}
"""Where their names differ from Llama's, which has the norm before the MLP under the name of one after attention."""
PREFIXES = {r"^(model\.language_model|language_model\.model)\.": "model.", r"^language_model\.lm_head": "lm_head"}
"""Names in models that also read images, of which the language model alone is read."""
VISION = r"(model\.)?(vision_tower|multi_modal_projector)\..*"

PERIOD = {"gemma2": 2, "gemma3_text": 6}
"""Every so many layers, one has no window."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"num_key_value_heads": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
}
"""What a ``config.json`` need not say: the published ones of Gemma-3-4B, 12B and 27B leave sizes out."""
ACTIVATION = "gelu_pytorch_tanh"
BASES = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
"""Rotary bases of Gemma-3 that a ``config.json`` need not say."""


def _places(config: GPTConfig) -> WeightMap:
    return WeightMap(
        {ours: TensorMapping(theirs) for ours, theirs in (LLAMA | NORMS).items()},
        root="model.",
        copies=tied_head(config, "model.embed_tokens"),
        left_out=VISION,
        renamed=PREFIXES,
    )


def _read(values: Mapping[str, Any]) -> GPTConfig:
    """Convert the ``config.json`` of Gemma-2 or Gemma-3, or the language model's part of one.

    Raises:
        ConfigurationError: an option has no counterpart here.
    """
    if values["model_type"] == "gemma3":
        values = {"tie_word_embeddings": values.get("tie_word_embeddings", True), **values["text_config"]}
    kind, layers = values["model_type"], values["num_hidden_layers"]
    values = {**DEFAULTS[kind], **values}
    # They say null for their default.
    said = {option: value for option, value in values.items() if value is not None}
    good = {"attention_bias": False, "use_bidirectional_attention": False, "hidden_activation": ACTIVATION}
    # In their Gemma 3 the option is left without effect.
    refuse_others(said, good | ({"attn_logit_softcapping": None} if kind == "gemma3_text" else {}))
    head_dim = values.get("head_dim") or 256
    scalar, window = values.get("query_pre_attn_scalar", 256), values.get("sliding_window", 4096)
    if not scalar:
        raise ConfigurationError("query_pre_attn_scalar is 0; it must be above 0.")
    full = values.get("sliding_window_pattern") or PERIOD[kind]  # in older files
    kinds = layer_types(values, WHOLE, WINDOWED) or [
        WINDOWED if (layer + 1) % full else WHOLE for layer in range(layers)
    ]
    local = window is not None and WINDOWED in kinds
    # Of each kind of layer in newer files; else a base for each beside a scaling of full attention.
    rotations = values.get("rope_parameters") or {}
    longest = values.get("max_position_embeddings", 8192 if kind == "gemma2" else 131072)
    scaled = _full(rotations) if "full_attention" in rotations else rotations
    position = rotary_from({**values, "max_position_embeddings": longest, "rope_parameters": scaled})
    if kind == "gemma3_text":
        sliding = rotations.get("sliding_attention") or {"rope_theta": values.get("rope_local_base_freq")}
        if "full_attention" not in rotations and "rope_theta" not in {**values, **rotations}:
            position = replace(position, base=BASES["full_attention"])
        if local and rotary_from({"rope_parameters": sliding}).scaling is not None:
            raise ConfigurationError(
                f"rope_parameters.sliding_attention has rope_type {sliding['rope_type']!r}; only 'default' has a "
                "counterpart here."
            )
        position = replace(
            position, local_base=(sliding.get("rope_theta") or BASES["sliding_attention"]) if local else None
        )
    return GPTConfig(
        **sizes_from({"tie_word_embeddings": True, **values, "max_position_embeddings": longest}),
        num_kv_heads=values["num_key_value_heads"],
        head_dim=head_dim,
        activation="geglu_tanh",
        embedding_multiplier=values["hidden_size"] ** 0.5,
        logit_softcap=values.get("final_logit_softcapping"),
        norm=NormConfig(kind="rms", eps=values.get("rms_norm_eps", 1e-6), around_zero=True, after=True),
        position=position,
        attention=AttentionConfig(
            qk_norm=kind == "gemma3_text",
            scale=None if scalar == head_dim else scalar**-0.5,
            softcap=values.get("attn_logit_softcapping"),
            window=window - 1 if local else None,  # theirs counts the token itself
            window_pattern=tuple(kind == WINDOWED for kind in kinds) if local else (True,),
        ),
        dropout=DropoutConfig(attention=values.get("attention_dropout") or 0.0),
    )


def _write(kind: str, config: GPTConfig) -> dict[str, Any]:
    """Return the content of ``config.json`` of this kind."""
    attention = config.attention
    sizes = sizes_to(config)
    if kind == "gemma3_text":
        base = sizes.pop("rope_theta")
        sizes["rope_parameters"] = {
            "full_attention": {"rope_type": "default", **sizes.pop("rope_scaling", {}), "rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": config.position.local_base or base},
        }
    scalar = config.head_dim if attention.scale is None else round(attention.scale**-2)
    # Their models make a mask of this size even where no layer has a window, so it is never null.
    window = {} if attention.window is None else {"sliding_window": attention.window + 1}
    return {
        **window,
        **sizes,
        "head_dim": config.head_dim,
        "hidden_activation": ACTIVATION if config.activation == "geglu_tanh" else config.activation,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": attention.softcap,
        "final_logit_softcapping": config.logit_softcap,
        **types_to(config),
        "attention_bias": attention.qkv_bias,
    }


def _full(rotations: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_theta": BASES["full_attention"], **(rotations["full_attention"] or {})}


MODEL_TYPES = tuple(
    ModelType(kind, architecture, suits, _places, _read, partial(_write, kind), also)
    for kind, architecture, suits, also in (
        (
            "gemma3_text",
            "Gemma3ForCausalLM",
            lambda config: config.norm.after and config.attention.qk_norm,
            ("gemma3",),
        ),
        ("gemma2", "Gemma2ForCausalLM", lambda config: config.norm.after and not config.attention.qk_norm, ()),
    )
)
