"""Llama 4 in ``transformers``, its language model: names of tensors and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalight.errors import ConfigurationError
from megalight.models.config import DropoutConfig
from megalight.models.gpt.config import GPTConfig, NormConfig
from megalight.models.gpt.hugging_face.common import (
    layer_types,
    refuse_others,
    rotary_from,
    rotated_layers,
    sizes_from,
    sizes_to,
    tied_head,
)
from megalight.models.gpt.hugging_face.llama import LLAMA
from megalight.models.gpt.mixer_config import AttentionConfig, TemperatureConfig
from megalight.models.hugging_face.model_types import ModelType
from megalight.models.hugging_face.weights import TensorMapping, WeightMap
from megalight.nn.moe import MoEConfig, RouterConfig, SharedConfig

PLACES = {
    "layers.N.mlp.gate": "model.layers.N.feed_forward.gate_proj",
    "layers.N.mlp.up": "model.layers.N.feed_forward.up_proj",
    "layers.N.mlp.down": "model.layers.N.feed_forward.down_proj",
    "layers.N.mlp.router": "model.layers.N.feed_forward.router",
    "layers.N.mlp.shared.gate": "model.layers.N.feed_forward.shared_expert.gate_proj",
    "layers.N.mlp.shared.up": "model.layers.N.feed_forward.shared_expert.up_proj",
    "layers.N.mlp.shared.down": "model.layers.N.feed_forward.shared_expert.down_proj",
}
DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 500000.0}
"""What a ``config.json`` need not say."""
PREFIXES = {r"^language_model\.": ""}
"""Names in models that also read images, of which the language model alone is read."""
VISION = r"(vision_model|multi_modal_projector)\..*"


def _places(config: GPTConfig) -> WeightMap:
    """Return where all tensors are.

    The weights of a layer's experts are stacked as ``[E, in, out]``, with all of the gate before those of ``up``.
    """
    assert config.moe is not None
    width, experts = config.expert_ffn_hidden_size, config.moe.num_experts
    outside = {ours: theirs for ours, theirs in LLAMA.items() if ".mlp." not in ours}
    places = {ours: TensorMapping(theirs) for ours, theirs in (outside | PLACES).items()}
    for name, theirs, rows in (
        ("gate", "gate_up_proj", range(width)),
        ("up", "gate_up_proj", range(width, 2 * width)),
        ("down", "down_proj", None),
    ):
        full = f"model.layers.N.feed_forward.experts.{theirs}"
        places[f"layers.N.mlp.experts.N.{name}.weight"] = TensorMapping(full, rows, transposed=True, stack=experts)
    return WeightMap(
        places,
        root="model.",
        copies=tied_head(config, "model.embed_tokens"),
        left_out=VISION,
        renamed=PREFIXES,
    )


def _read(values: Mapping[str, Any]) -> GPTConfig:
    """Convert the ``config.json`` of Llama 4, or the language model's part of one.

    Raises:
        ConfigurationError: an option has no counterpart here.
    """
    if values["model_type"] == "llama4":
        values = values["text_config"]
    layers = values["num_hidden_layers"]
    refuse_others(values, {"attention_bias": False, "hidden_act": "silu"})
    values = {**DEFAULTS, **values}
    rotated = rotated_layers(values)
    kinds = layer_types(values, _kind(True), _kind(False)) or [_kind(bool(layer)) for layer in rotated]
    chunk = values.get("attention_chunk_size", 8192)
    chunked = chunk is not None and "chunked_attention" in kinds
    step = values.get("interleave_moe_layer_step", 1)
    experts = values.get("moe_layers")
    experts = range(step - 1, layers, step) if experts is None else experts
    width = values["intermediate_size"]
    position = rotary_from({**values, "no_rope_layers": rotated})
    # Only layers that rotate have this norm.
    normed = bool(values.get("use_qk_norm", True)) and any(rotated)
    # Their norm comes after the rotation and takes the factor out again. Ours comes before it.
    if normed and position.scaling is not None and position.scaling.concentration != 1.0:
        raise ConfigurationError(
            "rope_type 'yarn' with use_qk_norm=True: its factor of queries and keys has no counterpart here."
        )
    # Only layers that do not rotate have temperatures.
    tuned = bool(values.get("attn_temperature_tuning", True)) and not all(rotated)
    temperature = TemperatureConfig(length=values.get("floor_scale", 8192), scale=values.get("attn_scale", 0.1))
    return GPTConfig(
        **{**sizes_from(values), "ffn_hidden_size": values["intermediate_size_mlp"]},
        num_kv_heads=values.get("num_key_value_heads") or 0,
        head_dim=values.get("head_dim") or 0,
        norm=NormConfig(kind="rms", eps=values["rms_norm_eps"]),
        position=replace(position, interleaved=position.kind == "rope"),
        attention=AttentionConfig(
            qk_l2_norm=normed,
            chunk=chunk if chunked else None,
            window_pattern=tuple(kind == "chunked_attention" for kind in kinds) if chunked else (True,),
            temperature=temperature if tuned else None,
        ),
        moe=MoEConfig(
            num_experts=values["num_local_experts"],
            ffn_hidden_size=width,
            pattern=tuple(layer in set(experts) for layer in range(layers)),
            weigh_input=True,
            router=RouterConfig(top_k=values["num_experts_per_tok"], score="sigmoid"),
            shared=SharedConfig(ffn_hidden_size=width),
        ),
        dropout=DropoutConfig(attention=values.get("attention_dropout") or 0.0),
    )


def _write(config: GPTConfig) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        ConfigurationError: the model has no experts.
    """
    attention, moe, layers = config.attention, config.moe, range(config.num_layers)
    if moe is None:
        raise ConfigurationError("a model of llama4_text has experts; this one has not")
    values: dict[str, Any] = {
        **sizes_to(config),
        "head_dim": config.head_dim,
        "intermediate_size": config.expert_ffn_hidden_size,
        "intermediate_size_mlp": config.ffn_hidden_size,
        "hidden_act": "silu" if config.activation == "swiglu" else config.activation,
        "no_rope_layers": [int(config.position.rotates(layer)) for layer in layers],
        "attention_chunk_size": attention.chunk,
        "layer_types": [_kind(attention.chunk_of(layer) is not None) for layer in layers],
        "use_qk_norm": attention.qk_l2_norm,
        "attn_temperature_tuning": attention.temperature is not None,
        "attention_bias": attention.qkv_bias,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "moe_layers": [layer for layer in layers if config.has_experts(layer)],
    }
    if attention.temperature is not None:
        values |= {"floor_scale": attention.temperature.length, "attn_scale": attention.temperature.scale}
    return values


def _kind(chunked: bool) -> str:
    return "chunked_attention" if chunked else "full_attention"


MODEL_TYPES = (
    ModelType(
        "llama4_text",
        "Llama4ForCausalLM",
        # Its experts alone weigh their inputs.
        suits=lambda config: config.moe is not None and config.moe.weigh_input,
        places=_places,
        read=_read,
        write=_write,
        also_read=("llama4",),
    ),
)
