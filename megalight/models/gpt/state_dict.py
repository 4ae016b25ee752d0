"""Conversion of weights and configurations from ``transformers`` (Llama, Qwen2, Qwen3, GPT-2) to ours and back.

Our names are canonical: ``layers.0.attention.q.weight``, not the fused ``qkv``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.models.gpt.config import AttentionConfig, DropoutConfig, GPTConfig, NormConfig, PositionConfig
from megalight.models.weights import Theirs, WeightMap
from megalight.ops.rotary import RotaryScaling

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

GPT2 = {
    "embed.word": "transformer.wte",
    "embed.position": "transformer.wpe",
    "layers.N.attention_norm": "transformer.h.N.ln_1",
    "layers.N.mlp_norm": "transformer.h.N.ln_2",
    "head.norm": "transformer.ln_f",
    "head.output_layer": "lm_head",
}
GPT2_TRANSPOSED = {
    "layers.N.attention.proj": "transformer.h.N.attn.c_proj",
    "layers.N.mlp.up": "transformer.h.N.mlp.c_fc",
    "layers.N.mlp.down": "transformer.h.N.mlp.c_proj",
}
"""Weights that GPT-2 stores as ``[in, out]``. So is its fused tensor of queries, keys and values."""


def weight_map(config: GPTConfig) -> WeightMap:
    """Return where ``transformers`` keeps the tensors of a model."""
    tied = config.tie_embeddings
    if config.position.kind != "learned":
        return WeightMap(
            {ours: Theirs(theirs) for ours, theirs in LLAMA.items()},
            root="model.",
            copies={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
            left_out=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        )
    size = config.num_heads * config.head_dim
    fused = "transformer.h.N.attn.c_attn"
    return WeightMap(
        {ours: Theirs(theirs) for ours, theirs in GPT2.items()}
        | {ours: Theirs(theirs, transposed=True) for ours, theirs in GPT2_TRANSPOSED.items()}
        | {f"layers.N.attention.{x}": Theirs(fused, (i * size, (i + 1) * size), True) for i, x in enumerate("qkv")},
        root="transformer.",
        copies={"lm_head.weight": "transformer.wte.weight"} if tied else {},
        left_out=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
    )


GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
PLAIN = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def to_transformers(tensors: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Convert canonical tensors to names and shapes of ``transformers``, which does not store a tied head.

    Raises:
        CheckpointError: there is a tensor that such models do not have.
    """
    return weight_map(config).write(tensors)


def from_transformers(tensors: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Convert a ``transformers`` state dict to canonical tensors.

    Raises:
        CheckpointError: there is a tensor that such models do not have.
    """
    return weight_map(config).read(tensors)


def config_from_transformers(values: Mapping[str, Any]) -> GPTConfig:
    """Convert the ``config.json`` of a ``transformers`` model to our configuration.

    Raises:
        ConfigurationError: the model type or an option is not supported here.
    """
    kind = values.get("model_type")
    if kind not in READERS:
        raise ConfigurationError(f"model_type is {kind!r}; weights of {', '.join(READERS)} can be read.")
    return READERS[kind](values)


def _llama(values: Mapping[str, Any]) -> GPTConfig:
    """Convert Llama, Qwen2 and Qwen3. They differ only in biases and norms."""
    bias = bool(values.get("attention_bias", False))
    kind = values["model_type"]
    window, pattern = _window(values)
    return GPTConfig(
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        num_heads=values["num_attention_heads"],
        num_kv_heads=values.get("num_key_value_heads") or 0,
        head_dim=values.get("head_dim") or 0,
        ffn_hidden_size=values["intermediate_size"],
        vocab_size=values["vocab_size"],
        max_sequence_length=values["max_position_embeddings"],
        activation=_activation(values["hidden_act"], GATED),
        mlp_bias=bool(values.get("mlp_bias", False)),
        tie_embeddings=bool(values.get("tie_word_embeddings", False)),
        norm=NormConfig(kind="rms", eps=values["rms_norm_eps"]),
        position=_rotary(values),
        attention=AttentionConfig(
            qkv_bias=bias or kind == "qwen2",
            proj_bias=bias,
            qk_norm=kind == "qwen3",
            window=window,
            window_pattern=pattern,
        ),
        dropout=DropoutConfig(attention=values.get("attention_dropout", 0.0)),
    )


def _gpt2(values: Mapping[str, Any]) -> GPTConfig:
    for option in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if values.get(option):
            raise ConfigurationError(f"{option} is set; it has no counterpart here.")
    return GPTConfig(
        num_layers=values["n_layer"],
        hidden_size=values["n_embd"],
        num_heads=values["n_head"],
        ffn_hidden_size=values.get("n_inner") or 0,
        vocab_size=values["vocab_size"],
        max_sequence_length=values["n_positions"],
        activation=_activation(values["activation_function"], PLAIN),
        mlp_bias=True,
        tie_embeddings=bool(values.get("tie_word_embeddings", True)),
        norm=NormConfig(kind="layer", eps=values["layer_norm_epsilon"]),
        position=PositionConfig(kind="learned"),
        attention=AttentionConfig(
            qkv_bias=True, proj_bias=True, scale=None if values.get("scale_attn_weights", True) else 1.0
        ),
        dropout=DropoutConfig(
            hidden=values.get("resid_pdrop", 0.0),
            attention=values.get("attn_pdrop", 0.0),
            embedding=values.get("embd_pdrop", 0.0),
        ),
    )


READERS: dict[str, Callable[[Mapping[str, Any]], GPTConfig]] = {
    "llama": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gpt2": _gpt2,
}


def _activation(name: str, known: Mapping[str, str]) -> str:
    if name not in known:
        raise ConfigurationError(f"activation {name!r} has no counterpart here; known: {', '.join(known)}.")
    return known[name]


def _window(values: Mapping[str, Any]) -> tuple[int | None, tuple[bool, ...]]:
    """Convert the window. Theirs counts the token itself, ours does not."""
    kinds = tuple(kind == "sliding_attention" for kind in values.get("layer_types") or ())
    if not any(kinds):
        return None, (True,)
    return values["sliding_window"] - 1, kinds


def _rotary(values: Mapping[str, Any]) -> PositionConfig:
    options = values.get("rope_parameters") or values.get("rope_scaling") or {}
    base = options.get("rope_theta") or values.get("rope_theta") or 10000.0
    kind = options.get("rope_type", "default")
    if kind == "default":
        return PositionConfig(base=base)
    if kind == "linear":
        return PositionConfig(base=base, scaling=RotaryScaling(kind="linear", factor=options["factor"]))
    if kind != "llama3":
        raise ConfigurationError(f"rope_type {kind!r} has no counterpart here; known: default, linear, llama3.")
    scaling = RotaryScaling(
        kind="llama3",
        factor=options["factor"],
        low_frequency_factor=options["low_freq_factor"],
        high_frequency_factor=options["high_freq_factor"],
        original_length=options["original_max_position_embeddings"],
    )
    return PositionConfig(base=base, scaling=scaling)
