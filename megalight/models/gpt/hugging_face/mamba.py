"""Mamba-2 and Nemotron-H in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from typing import Any

from megalight.errors import ConfigurationError
from megalight.models.config import DropoutConfig
from megalight.models.gpt.config import GPTConfig, NormConfig
from megalight.models.gpt.hugging_face.common import (
    refuse_other_sums,
    refuse_others,
    router_groups,
    sizes_from,
    stated,
    tied_head,
)
from megalight.models.gpt.mixer_config import AttentionConfig, MambaConfig, PositionConfig
from megalight.models.hugging_face.model_types import ModelType
from megalight.models.hugging_face.weights import TensorMapping, WeightMap
from megalight.nn.moe import MoEConfig, RouterConfig, SharedConfig

LAYER = "backbone.layers.N"
PLACES = {
    "embed.word": "backbone.embeddings",
    "head.norm": "backbone.norm_f",
    "head.output_layer": "lm_head",
    "layers.N.mamba_norm": f"{LAYER}.norm",
    "layers.N.mamba.scan.A_log": f"{LAYER}.mixer.A_log",
    "layers.N.mamba.scan.dt_bias": f"{LAYER}.mixer.dt_bias",
    "layers.N.mamba.scan.D": f"{LAYER}.mixer.D",
    "layers.N.mamba.norm": f"{LAYER}.mixer.norm",
    "layers.N.mamba.proj": f"{LAYER}.mixer.out_proj",
}
SUBLAYERS = {
    "layers.N.attention_norm": f"{LAYER}.norm",
    "layers.N.attention.q": f"{LAYER}.mixer.q_proj",
    "layers.N.attention.k": f"{LAYER}.mixer.k_proj",
    "layers.N.attention.v": f"{LAYER}.mixer.v_proj",
    "layers.N.attention.proj": f"{LAYER}.mixer.o_proj",
    "layers.N.mlp_norm": f"{LAYER}.norm",
    "layers.N.mlp.up": f"{LAYER}.mixer.up_proj",
    "layers.N.mlp.down": f"{LAYER}.mixer.down_proj",
    "layers.N.mlp.router": f"{LAYER}.mixer.gate",
    "layers.N.mlp.router.expert_bias": f"{LAYER}.mixer.gate.e_score_correction_bias",
    "layers.N.mlp.experts.N.up": f"{LAYER}.mixer.experts.N.up_proj",
    "layers.N.mlp.experts.N.down": f"{LAYER}.mixer.experts.N.down_proj",
    "layers.N.mlp.shared.up": f"{LAYER}.mixer.shared_experts.up_proj",
    "layers.N.mlp.shared.down": f"{LAYER}.mixer.shared_experts.down_proj",
}
"""The sublayers of Nemotron-H beside Mamba-2. Norms of all sublayers have one name there."""

NAMES = {"M": ("mamba",), "*": ("attention",), "-": ("mlp",), "E": ("mlp",)}
"""Symbol of a layer -> its submodule here."""

TYPES = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
"""Their names of layers, new and old -> our symbols."""

LONGEST = 1 << 20
"""Longest sequence where they give none: a recurrence has no limit."""


def _places(config: GPTConfig) -> WeightMap:
    mamba = config.mamba
    assert mamba is not None
    inner, shared = mamba.inner_size, mamba.num_groups * mamba.state_size
    sizes = {"z": inner, "x": inner, "B": shared, "C": shared, "dt": mamba.num_heads}
    places = {ours: TensorMapping(theirs) for ours, theirs in (PLACES | SUBLAYERS).items()}
    start = 0
    for name, size in sizes.items():
        places[f"layers.N.mamba.{name}"] = TensorMapping(f"{LAYER}.mixer.in_proj", range(start, start + size))
        if name in ("x", "B", "C"):
            rows = range(start - inner, start - inner + size)  # the gate is not convolved
            places[f"layers.N.mamba.conv_{name}"] = TensorMapping(f"{LAYER}.mixer.conv1d", rows, depthwise=True)
        start += size

    def held(name: str) -> bool:
        layer = re.match(r"layers\.(\d+)\.([a-z]+)", name)
        return layer is None or layer[2] in NAMES[config.layer_pattern[int(layer[1])]]

    return WeightMap(
        places,
        root="backbone.",
        copies=tied_head(config, "backbone.embeddings"),
        left_out=r"(backbone\.)?mtp\..*",
        renamed={r"^model\.": "backbone.", r"embedding\.weight$": "embeddings.weight"},
        held=held,
    )


def _sizes(values: Mapping[str, Any], **named: Any) -> MambaConfig:
    """Return what both kinds say in the same words."""
    limit = values.get("time_step_limit") or (0.0, inf)
    # files spell infinity as an entry {"__float__": "Infinity"}
    numbers = [float(bound["__float__"] if isinstance(bound, Mapping) else bound) for bound in limit]
    if numbers != [0.0, inf]:
        raise ConfigurationError(f"time_step_limit is {list(limit)}; step sizes have no limits here.")
    return MambaConfig(
        num_groups=values["n_groups"],
        conv_kernel=values["conv_kernel"],
        conv_bias=bool(values.get("use_conv_bias", True)),
        step_range=(values.get("time_step_min", 1e-3), values.get("time_step_max", 0.1)),
        step_floor=values.get("time_step_floor", 1e-4),
        **named,
    )


def _mamba2_from(values: Mapping[str, Any]) -> GPTConfig:
    """Convert the ``config.json`` of Mamba-2.

    Raises:
        ConfigurationError: an option has no counterpart here.
    """
    refuse_others(values, {"use_bias": False, "hidden_act": "silu", "rms_norm": True})
    heads, head_dim = values["num_heads"], stated(values, "head_dim")
    return GPTConfig(
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        num_heads=heads,
        head_dim=head_dim,
        vocab_size=values["vocab_size"],
        max_sequence_length=values.get("max_position_embeddings", LONGEST),
        tie_embeddings=bool(values.get("tie_word_embeddings", False)),
        layer_pattern="M" * values["num_hidden_layers"],
        # their norm treats all features together, whatever the number of groups is
        mamba=_sizes(values, num_heads=heads, head_dim=head_dim, state_size=values["state_size"], norm_groups=1),
        norm=NormConfig(eps=values["layer_norm_epsilon"]),
        position=PositionConfig(kind="none"),
    )


def _nemotron_h_from(values: Mapping[str, Any]) -> GPTConfig:
    """Convert the ``config.json`` of Nemotron-H.

    Raises:
        ConfigurationError: an option has no counterpart here.
    """
    good = {"use_bias": False, "mamba_proj_bias": False, "attention_bias": False, "mamba_hidden_act": "silu"}
    good |= {"mlp_hidden_act": "relu2", "moe_latent_size": None, "sliding_window": None}
    # Their class does not tie the head, whatever this says.
    refuse_others(values, {**good, "tie_word_embeddings": False})
    if "attention_head_dim" in values:  # the older word, as in the published files of Nemotron-H-8B and 56B
        values = {"head_dim": values["attention_head_dim"], **values}
    types = values.get("layers_block_type") or values.get("layer_types")
    if unknown := sorted({str(each) for each in types or ()} - TYPES.keys()):
        raise ConfigurationError(f"layers_block_type has {', '.join(unknown)}; known: {', '.join(TYPES)}.")
    if not types and "hybrid_override_pattern" not in values:
        raise KeyError("layers_block_type")
    pattern = "".join(TYPES[kind] for kind in types) if types else values["hybrid_override_pattern"]
    return GPTConfig(
        **sizes_from({**values, "num_hidden_layers": len(pattern)}),
        num_kv_heads=values.get("num_key_value_heads") or 0,
        head_dim=stated(values, "head_dim"),
        activation="squared_relu",
        mlp_bias=bool(values.get("mlp_bias", False)),
        layer_pattern=pattern,
        mamba=_sizes(
            values,
            num_heads=values["mamba_num_heads"],
            head_dim=values["mamba_head_dim"],
            state_size=values["ssm_state_size"],
        ),
        moe=_experts(values) if "E" in pattern else None,
        norm=NormConfig(eps=values["layer_norm_epsilon"]),
        position=PositionConfig(kind="none"),
        attention=AttentionConfig(),
        dropout=DropoutConfig(attention=values.get("attention_dropout", 0.0)),
    )


def _experts(values: Mapping[str, Any]) -> MoEConfig:
    refuse_others(values, {"mlp_bias": False})
    refuse_other_sums(values)
    return MoEConfig(
        num_experts=values["n_routed_experts"],
        ffn_hidden_size=values["moe_intermediate_size"],
        router=RouterConfig(
            top_k=values["num_experts_per_tok"],
            score="sigmoid",
            **router_groups(values, group_experts=2),
            scale=values["routed_scaling_factor"],
            expert_bias=True,
        ),
        shared=SharedConfig(ffn_hidden_size=values["moe_shared_expert_intermediate_size"]),
    )


def _common(config: GPTConfig, mamba: MambaConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_sequence_length,
        "tie_word_embeddings": config.tie_embeddings,
        "layer_norm_epsilon": config.norm.eps,
        "initializer_range": config.init.std,
        "n_groups": mamba.num_groups,
        "conv_kernel": mamba.conv_kernel,
        "use_conv_bias": mamba.conv_bias,
        "time_step_min": mamba.step_range[0],
        "time_step_max": mamba.step_range[1],
        "time_step_floor": mamba.step_floor,
    }


def _mamba2_to(config: GPTConfig) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        ConfigurationError: a layer is not Mamba-2, or the heads do not make up a multiple of the hidden size.
    """
    mamba = config.mamba
    if mamba is None or set(config.layer_pattern) != {"M"} or mamba.inner_size % config.hidden_size:
        raise ConfigurationError(
            "a model of mamba2 has layers M alone, whose heads have a multiple of hidden_size features; this one has "
            f"layer_pattern={config.layer_pattern!r}"
        )
    return {
        **_common(config, mamba),
        "num_hidden_layers": config.num_layers,
        "num_heads": mamba.num_heads,
        "head_dim": mamba.head_dim,
        "state_size": mamba.state_size,
        "expand": mamba.inner_size // config.hidden_size,
    }


def _nemotron_h_to(config: GPTConfig) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        ConfigurationError: the model has no ``layer_pattern`` with Mamba-2, or experts without a shared one.
    """
    mamba, moe = config.mamba, config.moe
    if mamba is None or not config.layer_pattern or (moe is not None and moe.shared is None):
        raise ConfigurationError(
            "a model of nemotron_h has a layer_pattern with Mamba-2, and with its experts a shared one; this one has "
            f"layer_pattern={config.layer_pattern!r}"
        )
    types = {symbol: kind for kind, symbol in reversed(TYPES.items())}
    values = {
        **_common(config, mamba),
        "layers_block_type": [types[symbol] for symbol in config.layer_pattern],
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_hidden_size,
        "mlp_bias": config.mlp_bias,
        "attention_dropout": config.dropout.attention,
        "mlp_hidden_act": "relu2" if config.activation == "squared_relu" else config.activation,
        "mamba_num_heads": mamba.num_heads,
        "mamba_head_dim": mamba.head_dim,
        "ssm_state_size": mamba.state_size,
    }
    if moe is not None and moe.shared is not None:
        values |= {
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": 1,
            "moe_intermediate_size": config.expert_ffn_hidden_size,
            "moe_shared_expert_intermediate_size": moe.shared.ffn_hidden_size,
            "num_experts_per_tok": moe.router.top_k,
            "n_group": moe.router.num_groups or 1,
            "topk_group": moe.router.group_top_k or 1,
            "routed_scaling_factor": moe.router.scale,
            "norm_topk_prob": moe.router.top_k > 1,
        }
    return values


MODEL_TYPES = (
    ModelType(
        "mamba2",
        "Mamba2ForCausalLM",
        suits=lambda config: config.mamba is not None and set(config.layer_pattern) == {"M"},
        places=_places,
        read=_mamba2_from,
        write=_mamba2_to,
    ),
    ModelType(
        "nemotron_h",
        "NemotronHForCausalLM",
        suits=lambda config: config.mamba is not None and bool(config.layer_pattern),
        places=_places,
        read=_nemotron_h_from,
        write=_nemotron_h_to,
    ),
)
