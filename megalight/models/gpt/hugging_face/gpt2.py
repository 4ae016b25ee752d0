"""GPT-2 in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalight.errors import ConfigurationError
from megalight.models.config import DropoutConfig
from megalight.models.gpt.config import GPTConfig, NormConfig
from megalight.models.gpt.hugging_face.common import activation_of, activation_to, tied_head
from megalight.models.gpt.mixer_config import AttentionConfig, PositionConfig
from megalight.models.hugging_face.model_types import ModelType
from megalight.models.hugging_face.weights import TensorMapping, WeightMap

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

PLAIN = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
"""Their name of an activation -> ours."""


def _places(config: GPTConfig) -> WeightMap:
    fused, size = "transformer.h.N.attn.c_attn", config.num_heads * config.head_dim
    # Queries, keys and values lie one after the other, each of all heads.
    rows = {name: range(i * size, (i + 1) * size) for i, name in enumerate("qkv")}
    return WeightMap(
        {ours: TensorMapping(theirs) for ours, theirs in GPT2.items()}
        | {ours: TensorMapping(theirs, transposed=True) for ours, theirs in GPT2_TRANSPOSED.items()}
        | {f"layers.N.attention.{name}": TensorMapping(fused, part, True) for name, part in rows.items()},
        root="transformer.",
        copies=tied_head(config, "transformer.wte"),
        # Masks of the triangle, saved by older releases.
        left_out=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
    )


def _read(values: Mapping[str, Any]) -> GPTConfig:
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
        activation=activation_of(values, "activation_function", PLAIN),
        mlp_bias=True,
        tie_embeddings=bool(values.get("tie_word_embeddings", True)),
        norm=NormConfig(kind="layer", eps=values["layer_norm_epsilon"]),
        position=PositionConfig(kind="learned"),
        # Without the option, GPT-2 does not scale scores.
        attention=AttentionConfig(
            qkv_bias=True, proj_bias=True, scale=None if values.get("scale_attn_weights", True) else 1.0
        ),
        dropout=DropoutConfig(
            hidden=values.get("resid_pdrop", 0.1),
            attention=values.get("attn_pdrop", 0.1),
            embedding=values.get("embd_pdrop", 0.1),
        ),
    )


def _write(config: GPTConfig) -> dict[str, Any]:
    return {
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_heads,
        "n_inner": config.ffn_hidden_size,
        "vocab_size": config.vocab_size,
        "n_positions": config.max_sequence_length,
        "activation_function": activation_to(config.activation, PLAIN),
        "tie_word_embeddings": config.tie_embeddings,
        "layer_norm_epsilon": config.norm.eps,
        "scale_attn_weights": config.attention.scale is None,
        "resid_pdrop": config.dropout.hidden,
        "attn_pdrop": config.dropout.attention,
        "embd_pdrop": config.dropout.embedding,
        "initializer_range": config.init.std,
    }


MODEL_TYPES = (
    ModelType(
        "gpt2",
        "GPT2LMHeadModel",
        # It is the only one of them with learned positions.
        suits=lambda config: config.position.kind == "learned",
        places=_places,
        read=_read,
        write=_write,
    ),
)
