"""Experts in models of ``transformers``: Mixtral, Qwen3-MoE and OLMoE. Names of tensors and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalight.errors import ConfigurationError
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.hugging_face.llama import llama_from, llama_map, llama_to
from megalight.models.hugging_face.model_types import ModelType
from megalight.models.hugging_face.weights import TensorMapping, WeightMap
from megalight.nn.moe import MoEConfig, RouterConfig

MIXTRAL = {
    "layers.N.mlp.router": "model.layers.N.block_sparse_moe.gate",
    "layers.N.mlp.experts.N.gate": "model.layers.N.block_sparse_moe.experts.N.w1",
    "layers.N.mlp.experts.N.up": "model.layers.N.block_sparse_moe.experts.N.w3",
    "layers.N.mlp.experts.N.down": "model.layers.N.block_sparse_moe.experts.N.w2",
}
QWEN = {
    "layers.N.mlp.router": "model.layers.N.mlp.gate",
    "layers.N.mlp.experts.N.gate": "model.layers.N.mlp.experts.N.gate_proj",
    "layers.N.mlp.experts.N.up": "model.layers.N.mlp.experts.N.up_proj",
    "layers.N.mlp.experts.N.down": "model.layers.N.mlp.experts.N.down_proj",
}
"""Names in files. In memory, ``transformers`` stacks the experts of a layer, and its own reader and writer convert."""


def _places(config: GPTConfig) -> WeightMap:
    # Of these kinds, Mixtral alone has no norm of queries and keys.
    table = QWEN if config.attention.qk_norm else MIXTRAL
    return llama_map(config, {ours: TensorMapping(theirs) for ours, theirs in table.items()})


def _read(values: Mapping[str, Any]) -> GPTConfig:
    """Convert Mixtral, Qwen3-MoE and OLMoE: Llama with experts."""
    dense = llama_from(values)
    kind = values["model_type"]
    if values.get("clip_qkv") is not None:
        raise ConfigurationError(f"clip_qkv is {values['clip_qkv']}; it has no counterpart here.")
    # their default, where the probabilities of the chosen experts are not divided by their sum
    normalized = kind == "mixtral" or bool(values.get("norm_topk_prob", False))
    moe = MoEConfig(
        num_experts=values["num_local_experts"] if "num_local_experts" in values else values["num_experts"],
        ffn_hidden_size=values["moe_intermediate_size"] if kind == "qwen3_moe" else 0,
        pattern=_pattern(values),
        router=RouterConfig(top_k=values["num_experts_per_tok"], pre_softmax=not normalized),
    )
    return replace(dense, moe=moe)


def sparse_layers(values: Mapping[str, Any]) -> tuple[int, set[int]]:
    """Return the step from one layer with experts to the next, and the layers that have none all the same.

    Raises:
        ConfigurationError: the step is no positive number.
    """
    step = values.get("decoder_sparse_step", 1)
    if not isinstance(step, int) or step < 1:
        raise ConfigurationError(
            f"config.json has decoder_sparse_step={step!r}; it must be at least 1. Experts in every layer are 1."
        )
    return step, set(values.get("mlp_only_layers") or ())


def _pattern(values: Mapping[str, Any]) -> tuple[bool, ...]:
    if values["model_type"] != "qwen3_moe":
        return (True,)
    step, dense = sparse_layers(values)
    # One pattern repeats, unless some layers are named.
    if not dense:
        return (*[False] * (step - 1), True)
    # Every layer of its own, as named layers repeat nothing.
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(values["num_hidden_layers"]))


def _experts_to(kind: str, config: GPTConfig) -> dict[str, Any]:
    """Return what a ``config.json`` of this kind says about the experts of a model."""
    moe = config.moe
    assert moe is not None
    values: dict[str, Any] = {
        "num_local_experts" if kind == "mixtral" else "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "norm_topk_prob": not moe.router.pre_softmax,
    }
    if kind == "mixtral":
        del values["norm_topk_prob"]
    if kind == "qwen3_moe":
        dense = [layer for layer in range(config.num_layers) if not config.has_experts(layer)]
        width = config.expert_ffn_hidden_size
        values |= {"moe_intermediate_size": width, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    return values


def _to_mixtral(config: GPTConfig) -> dict[str, Any]:
    return {"sliding_window": None, **llama_to(config), **_experts_to("mixtral", config)}


def _to_qwen3_moe(config: GPTConfig) -> dict[str, Any]:
    return {
        **llama_to(config),
        "use_sliding_window": config.attention.window is not None,
        "attention_bias": config.attention.proj_bias,
        **_experts_to("qwen3_moe", config),
    }


def _to_olmoe(config: GPTConfig) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        ConfigurationError: heads are not as wide as hidden states, which their norms of queries and keys are made for.
    """
    if config.num_heads * config.head_dim != config.hidden_size:
        raise ConfigurationError(
            f"a model of olmoe has hidden_size = num_heads * head_dim, and here {config.num_heads} heads of "
            f"{config.head_dim} features stand beside {config.hidden_size}"
        )
    return {**llama_to(config), "attention_bias": config.attention.proj_bias, **_experts_to("olmoe", config)}


MODEL_TYPES = tuple(
    ModelType(kind, architecture, lambda config: config.moe is not None, _places, _read, write)
    for kind, architecture, write in (
        ("mixtral", "MixtralForCausalLM", _to_mixtral),
        ("qwen3_moe", "Qwen3MoeForCausalLM", _to_qwen3_moe),
        ("olmoe", "OlmoeForCausalLM", _to_olmoe),
    )
)
