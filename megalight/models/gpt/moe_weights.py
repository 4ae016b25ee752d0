"""Experts in models of ``transformers``: Mixtral, Qwen3-MoE and OLMoE. Names of tensors and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalight.errors import ConfigurationError
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.gpt_oss_weights import gpt_oss_places
from megalight.models.weights import Theirs
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


def expert_places(config: GPTConfig) -> dict[str, Theirs]:
    """Return the places of the experts of a model, and of sinks, which one kind alone has."""
    if config.moe is None:
        return {}
    if config.attention.softmax == "learnable":
        return gpt_oss_places(config.moe.num_experts, config.expert_ffn_hidden_size)
    # of the other three kinds, Mixtral alone has no norm of queries and keys
    table = QWEN if config.attention.qk_norm else MIXTRAL
    return {ours: Theirs(theirs) for ours, theirs in table.items()}


def with_experts(dense: GPTConfig, values: Mapping[str, Any]) -> GPTConfig:
    """Add the experts of ``values``, a ``config.json``, to the configuration of the rest of the model."""
    kind = values["model_type"]
    if values.get("clip_qkv") is not None:
        raise ConfigurationError(f"clip_qkv is {values['clip_qkv']}; it has no counterpart here.")
    # their default, where the probabilities of the chosen experts are not divided by their sum
    normalised = kind == "mixtral" or bool(values.get("norm_topk_prob", False))
    moe = MoEConfig(
        num_experts=values["num_local_experts"] if "num_local_experts" in values else values["num_experts"],
        ffn_hidden_size=values["moe_intermediate_size"] if kind == "qwen3_moe" else 0,
        pattern=_pattern(values),
        router=RouterConfig(top_k=values["num_experts_per_tok"], pre_softmax=not normalised),
    )
    return replace(dense, moe=moe)


def _pattern(values: Mapping[str, Any]) -> tuple[bool, ...]:
    if values["model_type"] != "qwen3_moe":
        return (True,)
    step, dense = values.get("decoder_sparse_step", 1), set(values.get("mlp_only_layers") or ())
    # One pattern repeats, unless some layers are named.
    if not dense:
        return (*[False] * (step - 1), True)
    # Every layer of its own, as named layers repeat nothing.
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(values["num_hidden_layers"]))


def experts_to(kind: str, config: GPTConfig) -> dict[str, Any]:
    """Return what a ``config.json`` of this kind says about the experts of a model."""
    moe = config.moe
    if moe is None:
        return {}
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
