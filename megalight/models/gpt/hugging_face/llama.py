"""Llama, Mistral, Ministral, Qwen2, Qwen3 and SmolLM3 in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalight.errors import ConfigurationError
from megalight.models.config import DropoutConfig
from megalight.models.gpt.config import GPTConfig, NormConfig
from megalight.models.gpt.hugging_face.common import (
    activation_of,
    activation_to,
    layer_types,
    rotary_from,
    rotated_layers,
    sizes_from,
    sizes_to,
    tied_head,
)
from megalight.models.gpt.mixer_config import AttentionConfig
from megalight.models.hugging_face.model_types import ModelType
from megalight.models.hugging_face.weights import TensorMapping, WeightMap

LLAMA = {
    "embed.word": "model.embed_tokens",
    "layers.N.attention_norm": "model.layers.N.input_layernorm",
    "layers.N.attention.q": "model.layers.N.self_attn.q_proj",
    "layers.N.attention.k": "model.layers.N.self_attn.k_proj",
    "layers.N.attention.v": "model.layers.N.self_attn.v_proj",
    "layers.N.attention.q_norm": "model.layers.N.self_attn.q_norm",
    "layers.N.attention.k_norm": "model.layers.N.self_attn.k_norm",
    "layers.N.attention.proj": "model.layers.N.self_attn.o_proj",
    "layers.N.mlp_norm": "model.layers.N.post_attention_layernorm",
    "layers.N.mlp.gate": "model.layers.N.mlp.gate_proj",
    "layers.N.mlp.up": "model.layers.N.mlp.up_proj",
    "layers.N.mlp.down": "model.layers.N.mlp.down_proj",
    "head.norm": "model.norm",
    "head.output_layer": "lm_head",
}
"""Our module -> the module of Llama and Qwen. ``N`` stands for a layer's index."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "rope_theta": 1_000_000.0},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
    "smollm3": {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
}
"""``model_type`` -> what its ``config.json`` need not say, where Llama's would mean something else without it."""

SWITCHED = ("qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Kinds whose window counts only with ``use_sliding_window``."""
ALIKE = {"llama": False, "olmoe": False, "mixtral": True, "qwen3_moe": True}
"""Kinds whose layers are alike -> whether they may have a window. Their ``layer_types`` has no effect in theirs."""
WINDOWED, WHOLE = "sliding_attention", "full_attention"

GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
"""Their name of an activation -> ours."""


def llama_map(config: GPTConfig, others: Mapping[str, TensorMapping] | None = None) -> WeightMap:
    """Return the table of a model with Llama's names.

    Args:
        config: the model.
        others: places that Llama does not have, or has elsewhere.
    """
    return WeightMap(
        {ours: TensorMapping(theirs) for ours, theirs in LLAMA.items()} | dict(others or {}),
        root="model.",
        copies=tied_head(config, "model.embed_tokens"),
        # Older files hold this buffer, which is computed here.
        left_out=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    )


def llama_from(values: Mapping[str, Any]) -> GPTConfig:
    """Convert a ``config.json`` of these kinds. They differ only in biases, norms, windows and rotation."""
    kind = values["model_type"]
    values = {**DEFAULTS.get(kind, {}), **values}
    if kind == "smollm3":
        values["no_rope_layers"] = rotated_layers(values)
    bias = bool(values.get("attention_bias", False))
    window, pattern = _window(values)
    return GPTConfig(
        **sizes_from(values),
        num_kv_heads=values.get("num_key_value_heads") or 0,
        head_dim=values.get("head_dim") or 0,
        activation=activation_of(values, "hidden_act", GATED),
        mlp_bias=bool(values.get("mlp_bias", False)),
        norm=NormConfig(kind="rms", eps=values["rms_norm_eps"]),
        position=rotary_from(values),
        attention=AttentionConfig(
            # Qwen2 has these biases without an option for them.
            qkv_bias=bias or kind == "qwen2",
            proj_bias=bias,
            qk_norm=kind in ("qwen3", "qwen3_moe", "olmoe"),
            qk_norm_whole=kind == "olmoe",
            window=window,
            window_pattern=pattern,
        ),
        dropout=DropoutConfig(attention=values.get("attention_dropout", 0.0)),
    )


def _window(values: Mapping[str, Any]) -> tuple[int | None, tuple[bool, ...]]:
    """Convert the window, and the layers that have it. Theirs counts the token itself, ours does not."""
    kind, window = values["model_type"], values.get("sliding_window")
    if not ALIKE.get(kind, True) or (kind in SWITCHED and not values.get("use_sliding_window")):
        window = None
    windowed = _windowed(kind, values)
    types = layer_types(values, WHOLE, WINDOWED)
    if types is not None and kind not in ALIKE:
        windowed = tuple(each == WINDOWED for each in types)
    elif types is not None and set(types) != {WHOLE if window is None else WINDOWED}:
        raise ConfigurationError(
            f"layer_types has {', '.join(sorted(set(types)))} and sliding_window is {window}; layers of {kind} are "
            "alike in transformers, which passes the types over. Remove one of both keys."
        )
    return (None, (True,)) if window is None or not any(windowed) else (window - 1, windowed)


def _windowed(kind: str, values: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers have a window, if there is one and nothing says which."""
    # Older files give a number of layers without a window, which come first.
    if kind in ("qwen2", "qwen3"):
        whole = values.get("max_window_layers", 28)
        return tuple(layer >= whole for layer in range(values["num_hidden_layers"]))
    if kind == "smollm3":
        return tuple(not rotated for rotated in values["no_rope_layers"])
    return (True,)


def llama_to(config: GPTConfig) -> dict[str, Any]:
    """Write what these models have in common."""
    attention = config.attention
    act = activation_to(config.activation, GATED)
    values = {**sizes_to(config), "head_dim": config.head_dim, "hidden_act": act}
    if attention.window is not None:
        # Theirs counts the token itself.
        values["sliding_window"] = attention.window + 1
    return values


def _to_biased_llama(config: GPTConfig) -> dict[str, Any]:
    return {**llama_to(config), "attention_bias": config.attention.proj_bias, "mlp_bias": config.mlp_bias}


def _to_mistral(config: GPTConfig) -> dict[str, Any]:
    # Null is no window; a missing key would be their default of 4096.
    return {"sliding_window": None, **llama_to(config)}


def types_to(config: GPTConfig) -> dict[str, Any]:
    """Write which layers have a window."""
    windows = (config.attention.window_of(layer) for layer in range(config.num_layers))
    return {"layer_types": [WHOLE if window is None else WINDOWED for window in windows]}


def _to_ministral(config: GPTConfig) -> dict[str, Any]:
    return {**_to_mistral(config), **types_to(config)}


def _to_qwen(config: GPTConfig) -> dict[str, Any]:
    types = types_to(config)
    return {**llama_to(config), "use_sliding_window": WINDOWED in types["layer_types"], **types}


def _to_smollm3(config: GPTConfig) -> dict[str, Any]:
    rotated = [int(config.position.rotates(layer)) for layer in range(config.num_layers)]
    biases = {"attention_bias": config.attention.proj_bias, "mlp_bias": config.mlp_bias}
    return {**_to_qwen(config), **biases, "no_rope_layers": rotated}


def _to_qwen3(config: GPTConfig) -> dict[str, Any]:
    return {**_to_qwen(config), "attention_bias": config.attention.proj_bias}


def _suits(config: GPTConfig) -> bool:
    return config.moe is None and config.position.kind != "learned"


MODEL_TYPES = tuple(
    ModelType(kind, architecture, _suits, llama_map, llama_from, write)
    for kind, architecture, write in (
        ("llama", "LlamaForCausalLM", _to_biased_llama),
        ("mistral", "MistralForCausalLM", _to_mistral),
        ("ministral", "MinistralForCausalLM", _to_ministral),
        ("qwen2", "Qwen2ForCausalLM", _to_qwen),
        ("qwen3", "Qwen3ForCausalLM", _to_qwen3),
        ("smollm3", "SmolLM3ForCausalLM", _to_smollm3),
    )
)
