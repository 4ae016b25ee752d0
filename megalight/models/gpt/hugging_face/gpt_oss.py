"""GPT-OSS in ``transformers``: names of tensors and configurations. Published weights are in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalight.errors import ConfigurationError
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.hugging_face.common import refuse_others
from megalight.models.gpt.hugging_face.llama import WHOLE, WINDOWED, llama_from, llama_map, llama_to, types_to
from megalight.models.hugging_face.model_types import ModelType
from megalight.models.hugging_face.weights import TensorMapping, WeightMap
from megalight.nn.moe import MoEConfig, RouterConfig

LIMIT = 7.0
"""They limit activations at this value, whatever the configuration says."""

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
DEFAULTS = {
    "attention_bias": True,
    "hidden_act": "silu",
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "rope_theta": 150000.0,
    "rope_scaling": YARN,
}
"""What a ``config.json`` need not say. ``hidden_act`` names only the kind: experts compute ``x sigmoid(1.702 x)``."""


def _places(config: GPTConfig) -> WeightMap:
    """Return where all tensors are.

    The weights of a layer's experts are stacked as ``[E, in, out]``, and their biases as ``[E, out]``. Output features
    of gate and up take turns.
    """
    moe = _experts(config)
    # Gate and up are rows of one tensor, in turn: even ones are gates.
    both = 2 * config.expert_ffn_hidden_size
    places = {
        "layers.N.attention.sink.offset": TensorMapping("model.layers.N.self_attn.sinks"),
        "layers.N.mlp.router": TensorMapping("model.layers.N.mlp.router"),
    }
    for name, theirs, rows in (
        ("gate", "gate_up_proj", range(0, both, 2)),
        ("up", "gate_up_proj", range(1, both, 2)),
        ("down", "down_proj", None),
    ):
        for leaf, end in (("weight", ""), ("bias", "_bias")):
            full = f"model.layers.N.mlp.experts.{theirs}{end}"
            places[f"layers.N.mlp.experts.N.{name}.{leaf}"] = TensorMapping(
                full, rows, transposed=True, stack=moe.num_experts
            )
    return llama_map(config, places)


def _with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` with what it need not say."""
    # Every other layer has a window, beginning with the first.
    turns = [WHOLE if layer % 2 else WINDOWED for layer in range(values["num_hidden_layers"])]
    # The file's own values win over the defaults. A null means no window, but not that there is no scaling.
    given = {name: value for name, value in values.items() if name != "rope_scaling" or value}
    return {**DEFAULTS, **given, "layer_types": turns if values.get("layer_types") is None else values["layer_types"]}


def _read(values: Mapping[str, Any]) -> GPTConfig:
    """Convert a ``config.json``: Llama with sinks and experts.

    Raises:
        ConfigurationError: an option has no counterpart here.
    """
    values = _with_defaults(values)
    dense = llama_from(values)
    # Both are fixed in their code, so another value in a file would have no effect there.
    refuse_others(values, {"hidden_act": "silu", "swiglu_limit": LIMIT})
    moe = MoEConfig(
        num_experts=values["num_local_experts"],
        router=RouterConfig(top_k=values["num_experts_per_tok"], bias=True),
        bias=True,
        glu_offset=1.0,
        clamp=LIMIT,
    )
    attention = replace(dense.attention, softmax="learnable")
    return replace(dense, activation="quick_geglu", attention=attention, moe=moe)


def _write(config: GPTConfig) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        ConfigurationError: the model has no experts.
    """
    moe = _experts(config)
    return {
        # Without the key, theirs would scale frequencies.
        "rope_scaling": {"rope_type": "default"},
        **llama_to(config),
        "hidden_act": "silu",
        "swiglu_limit": LIMIT,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "attention_bias": config.attention.proj_bias,
        **types_to(config),
    }


def _experts(config: GPTConfig) -> MoEConfig:
    if config.moe is None:
        raise ConfigurationError("a model of gpt_oss has experts; this one has not")
    return config.moe


MODEL_TYPES = (
    ModelType(
        "gpt_oss",
        "GptOssForCausalLM",
        suits=lambda config: config.attention.softmax == "learnable",
        places=_places,
        read=_read,
        write=_write,
    ),
)
