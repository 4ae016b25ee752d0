"""Qwen3-Next in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalight.errors import ConfigurationError
from megalight.models.config import DropoutConfig
from megalight.models.gpt.config import GPTConfig, NormConfig
from megalight.models.gpt.hugging_face.common import layer_types, refuse_others, rotary_from, sizes_from, stated
from megalight.models.gpt.hugging_face.llama import llama_map, llama_to
from megalight.models.gpt.hugging_face.moe import sparse_layers
from megalight.models.gpt.mixer_config import AttentionConfig, DeltaNetConfig
from megalight.models.hugging_face.model_types import ModelType
from megalight.models.hugging_face.weights import RowBlocks, TensorMapping, WeightMap
from megalight.nn.moe import MoEConfig, RouterConfig, SharedConfig

LAYER = "model.layers.N"
DELTA = f"{LAYER}.linear_attn"
PLACES = {
    "layers.N.delta_norm": f"{LAYER}.input_layernorm",
    "layers.N.delta.rule.A_log": f"{DELTA}.A_log",
    "layers.N.delta.rule.dt_bias": f"{DELTA}.dt_bias",
    "layers.N.delta.norm": f"{DELTA}.norm",
    "layers.N.delta.proj": f"{DELTA}.out_proj",
    "layers.N.mlp.router": f"{LAYER}.mlp.gate",
    "layers.N.mlp.experts.N.gate": f"{LAYER}.mlp.experts.N.gate_proj",
    "layers.N.mlp.experts.N.up": f"{LAYER}.mlp.experts.N.up_proj",
    "layers.N.mlp.experts.N.down": f"{LAYER}.mlp.experts.N.down_proj",
    "layers.N.mlp.shared.gate": f"{LAYER}.mlp.shared_expert.gate_proj",
    "layers.N.mlp.shared.up": f"{LAYER}.mlp.shared_expert.up_proj",
    "layers.N.mlp.shared.down": f"{LAYER}.mlp.shared_expert.down_proj",
    "layers.N.mlp.shared_gate": f"{LAYER}.mlp.shared_expert_gate",
}
"""Where their names differ from Llama's. Norms before both kinds of mixers have one name there."""

TYPES = {"linear_attention": "gated_delta_net", "full_attention": "attention"}
"""Their names of mixers -> ours."""
SUBMODULES = {"gated_delta_net": "delta", "attention": "attention"}


def _blocks(**sizes: int) -> dict[str, tuple[int, int]]:
    """Return where each part begins in a block, and its size, from sizes in their order."""
    starts = [sum(list(sizes.values())[:place]) for place in range(len(sizes))]
    return {name: (start, size) for (name, size), start in zip(sizes.items(), starts, strict=True)}


def _places(config: GPTConfig) -> WeightMap:
    delta = config.delta
    assert delta is not None
    groups, shared = delta.num_key_heads, delta.num_heads // delta.num_key_heads
    values, keys = shared * delta.head_dim, delta.key_dim
    # A block for each key head, with all value heads that share it; in attention, one for each query head.
    fused = (
        (f"{DELTA}.in_proj_qkvz", "delta", groups, _blocks(q=keys, k=keys, v=values, z=values)),
        (f"{DELTA}.in_proj_ba", "delta", groups, _blocks(b=shared, a=shared)),
        (f"{LAYER}.self_attn.q_proj", "attention", config.num_heads, _blocks(q=config.head_dim, gate=config.head_dim)),
    )
    places = {ours: TensorMapping(theirs) for ours, theirs in PLACES.items()}
    for theirs, module, count, parts in fused:
        stride = sum(size for _, size in parts.values())
        for name, (start, size) in parts.items():
            places[f"layers.N.{module}.{name}"] = TensorMapping(theirs, RowBlocks(start, size, stride, count))
    # The channels of the convolution are in no blocks: those of all heads follow each other.
    for name, (start, size) in _blocks(q=groups * keys, k=groups * keys, v=delta.inner_size).items():
        rows = range(start, start + size)
        places[f"layers.N.delta.conv_{name}"] = TensorMapping(f"{DELTA}.conv1d", rows, depthwise=True)

    def held(name: str) -> bool:
        norm = re.match(r"layers\.(\d+)\.(attention|delta)_norm\.", name)
        return norm is None or norm[2] == SUBMODULES[config.mixer_of(int(norm[1])) or ""]

    # They leave out what published files hold for multi-token prediction, too.
    return replace(llama_map(config, places), left_out=r"(model\.)?mtp\..*", held=held)


def _read(values: Mapping[str, Any]) -> GPTConfig:
    """Convert the ``config.json`` of Qwen3-Next.

    Raises:
        ConfigurationError: an option has no counterpart here.
    """
    refuse_others(values, {"hidden_act": "silu"})
    layers = values["num_hidden_layers"]
    every = values.get("full_attention_interval") or 4
    types = layer_types(values, *TYPES) or [
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)
    ]
    if "linear_attention" not in types:
        raise ConfigurationError("layer_types has no linear_attention; a model of qwen3_next has such layers.")
    bias = bool(values.get("attention_bias", False))
    rotations = values.get("rope_parameters") or {}
    fraction = rotations.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 0.25
    return GPTConfig(
        **sizes_from(values),
        num_kv_heads=stated(values, "num_key_value_heads"),
        head_dim=stated(values, "head_dim"),
        norm=NormConfig(kind="rms", eps=values["rms_norm_eps"], around_zero=True),
        position=replace(rotary_from(values), fraction=fraction),
        attention=AttentionConfig(qkv_bias=bias, proj_bias=bias, qk_norm=True, output_gate=True)
        if "full_attention" in types
        else AttentionConfig(),
        mixer_pattern=tuple(TYPES[kind] for kind in types),
        delta=DeltaNetConfig(
            num_heads=values["linear_num_value_heads"],
            num_key_heads=values["linear_num_key_heads"],
            head_dim=values["linear_value_head_dim"],
            key_dim=values["linear_key_head_dim"],
            conv_kernel=values["linear_conv_kernel_dim"],
        ),
        moe=_experts(values),
        dropout=DropoutConfig(attention=values.get("attention_dropout", 0.0)),
    )


def _experts(values: Mapping[str, Any]) -> MoEConfig | None:
    step, dense = sparse_layers(values)
    pattern = tuple(i not in dense and (i + 1) % step == 0 for i in range(values["num_hidden_layers"]))
    if not values["num_experts"] or not any(pattern):
        return None
    return MoEConfig(
        num_experts=values["num_experts"],
        ffn_hidden_size=values["moe_intermediate_size"],
        pattern=pattern,
        router=RouterConfig(top_k=values["num_experts_per_tok"], pre_softmax=not values.get("norm_topk_prob", True)),
        shared=SharedConfig(ffn_hidden_size=values["shared_expert_intermediate_size"], gate=True),
    )


def _write(config: GPTConfig) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        ConfigurationError: the model has other mixers, or experts without a gated shared one.
    """
    delta, moe, layers = config.delta, config.moe, range(config.num_layers)
    assert delta is not None
    names = {ours: theirs for theirs, ours in TYPES.items()}
    mixers = [config.mixer_of(layer) for layer in layers]
    if set(mixers) - names.keys() or (moe is not None and (moe.shared is None or not moe.shared.gate)):
        raise ConfigurationError(
            "a model of qwen3_next has attention and gated_delta_net as mixers, and with its experts a shared one with "
            "a gate; this one has not"
        )
    values = {
        **llama_to(config),
        "partial_rotary_factor": config.position.fraction,
        "attention_bias": config.attention.proj_bias,
        "layer_types": [names[mixer] for mixer in mixers if mixer],
        "linear_num_value_heads": delta.num_heads,
        "linear_num_key_heads": delta.num_key_heads,
        "linear_value_head_dim": delta.head_dim,
        "linear_key_head_dim": delta.key_dim,
        "linear_conv_kernel_dim": delta.conv_kernel,
        "num_experts": 0,
    }
    if moe is None or moe.shared is None:
        return values
    return values | {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.top_k,
        "norm_topk_prob": not moe.router.pre_softmax,
        "moe_intermediate_size": config.expert_ffn_hidden_size,
        "shared_expert_intermediate_size": moe.shared.ffn_hidden_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in layers if not config.has_experts(layer)],
    }


MODEL_TYPES = (
    ModelType(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        suits=lambda config: config.delta is not None and not config.layer_pattern,
        places=_places,
        read=_read,
        write=_write,
    ),
)
