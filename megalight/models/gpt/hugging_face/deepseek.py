"""DeepSeek-V2, DeepSeek-V3 and Kimi-K2 in ``transformers``: names of tensors and configurations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from megalight.errors import ConfigurationError
from megalight.models.config import DropoutConfig
from megalight.models.gpt.config import GPTConfig, MultiTokenConfig, NormConfig
from megalight.models.gpt.hugging_face.common import (
    refuse_other_sums,
    refuse_others,
    rotary_from,
    router_groups,
    sizes_from,
    sizes_to,
    tied_head,
)
from megalight.models.gpt.hugging_face.llama import LLAMA
from megalight.models.gpt.mixer_config import LatentConfig
from megalight.models.hugging_face.model_types import ModelType
from megalight.models.hugging_face.weights import TensorMapping, WeightMap
from megalight.nn.moe import MoEConfig, RouterConfig, SharedConfig

log = logging.getLogger(__name__)

PLACES = {
    "layers.N.attention.q_down": "model.layers.N.self_attn.q_a_proj",
    "layers.N.attention.q_latent_norm": "model.layers.N.self_attn.q_a_layernorm",
    "layers.N.attention.q_up": "model.layers.N.self_attn.q_b_proj",
    "layers.N.attention.kv_down": "model.layers.N.self_attn.kv_a_proj_with_mqa",
    "layers.N.attention.kv_latent_norm": "model.layers.N.self_attn.kv_a_layernorm",
    "layers.N.attention.kv_up": "model.layers.N.self_attn.kv_b_proj",
    "layers.N.mlp.router": "model.layers.N.mlp.gate",
    "layers.N.mlp.router.expert_bias": "model.layers.N.mlp.gate.e_score_correction_bias",
    "layers.N.mlp.experts.N.gate": "model.layers.N.mlp.experts.N.gate_proj",
    "layers.N.mlp.experts.N.up": "model.layers.N.mlp.experts.N.up_proj",
    "layers.N.mlp.experts.N.down": "model.layers.N.mlp.experts.N.down_proj",
    "layers.N.mlp.shared.gate": "model.layers.N.mlp.shared_experts.gate_proj",
    "layers.N.mlp.shared.up": "model.layers.N.mlp.shared_experts.up_proj",
    "layers.N.mlp.shared.down": "model.layers.N.mlp.shared_experts.down_proj",
}
DEPTHS = ("num_nextn_predict_layers", "num_mtp_layers")


def _places(config: GPTConfig) -> WeightMap:
    # Latent attention has other projections. Only the last one, `proj`, has the same name.
    rest = {ours: theirs for ours, theirs in LLAMA.items() if ".attention." not in ours or ours.endswith("proj")}
    layers = rest | _latent_places(config)
    return WeightMap(
        {ours: TensorMapping(theirs) for ours, theirs in (layers | _depth_places(layers)).items()},
        root="model.",
        copies={**tied_head(config, "model.embed_tokens"), **_depth_copies(config)},
        left_out=_after_layers(config),
        doubles=_depth_doubles(config),
        moved=_moved_depths(config),
    )


def _latent_places(config: GPTConfig) -> dict[str, str]:
    """Return the modules of latent attention and experts, our name -> theirs."""
    # Smaller models have no latent of queries, and one projection in its place.
    if config.latent is not None and config.latent.q_rank is None:
        return PLACES | {"layers.N.attention.q_up": "model.layers.N.self_attn.q_proj"}
    return PLACES


DEPTH = {
    "embed_norm": "enorm",
    "hidden_norm": "hnorm",
    "join": "eh_proj",
    "norm": "shared_head.norm",
}
SHARED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Copies in each of their depths -> the tensor of the model. They have one value."""


def _depth_places(places: Mapping[str, str]) -> dict[str, str]:
    """Return the places of multi-token prediction, from those of all layers.

    Theirs are further layers; here they are spelled ``model.depths.N.0`` (see :func:`_moved_depths`), with the number
    of the depth and that of its only layer.
    """
    depths = {f"mtp.depths.N.{ours}": f"model.depths.N.0.{theirs}" for ours, theirs in DEPTH.items()}
    for ours, theirs in places.items():
        if ours.startswith("layers.N."):
            depths[f"mtp.depths.N.{ours}"] = theirs.replace("layers.N", "depths.N.N", 1)
    return depths


def _moved_depths(config: GPTConfig) -> dict[str, str]:
    """Return the prefix of each depth in files, ``model.layers.61.``, and in tables."""
    # In their files, depths follow the layers under the same name.
    return {f"model.layers.{config.num_layers + k}.": f"model.depths.{k}.0." for k in range(config.num_depths)}


def _depth_copies(config: GPTConfig) -> dict[str, str]:
    """Return the tensors in the depths of their files that are copies of the model's, in the spelling of tables."""
    # A tied head is stored once, under the name of the embedding.
    head = SHARED["embed_tokens.weight"] if config.tie_embeddings else SHARED["shared_head.head.weight"]
    shared = SHARED | {"shared_head.head.weight": head}
    return {f"model.depths.{k}.0.{copy}": whole for k in range(config.num_depths) for copy, whole in shared.items()}


def _depth_doubles(config: GPTConfig) -> dict[str, tuple[str, ...]]:
    """Return the tensors of the model of which their files hold copies in the depths, by the copies' names there."""
    copies: dict[str, tuple[str, ...]] = {}
    for filed, spelled in _moved_depths(config).items():
        for copy, whole in _depth_copies(config).items():
            if copy.startswith(spelled):
                copies[whole] = (*copies.get(whole, ()), filed + copy.removeprefix(spelled))
    return copies


def without_missing_depths(config: GPTConfig, names: Callable[[], Collection[str]]) -> GPTConfig:
    """Return the configuration without multi-token prediction, if a folder does not hold its tensors.

    ``transformers`` keeps their number in ``config.json``, but leaves the tensors out when it saves a model.

    Args:
        config: that of ``config.json``.
        names: returns the names of the folder's tensors.
    """
    # One tensor that every depth has is enough to find them all.
    if config.mtp is None or any(f".{config.num_layers}.eh_proj." in f".{name}" for name in names()):
        return config
    log.info("the folder holds no tensors of multi-token prediction; the model is read without it")
    return replace(config, mtp=None)


def _after_layers(config: GPTConfig) -> str:
    """Return the pattern of tensors of depths that published weights hold and the model does not."""
    # A model may be read with fewer depths than the weights have.
    return rf"model\.layers\.{config.num_layers + config.num_depths}\..*"


def _read_v3(values: Mapping[str, Any]) -> GPTConfig:
    """Convert the ``config.json`` of DeepSeek-V3 or Kimi-K2.

    Raises:
        ConfigurationError: an option has no counterpart here.
    """
    refuse_others(values, {"scoring_func": "sigmoid"})
    refuse_other_sums(values)
    router = RouterConfig(
        # what a file lacks is named by the caller: defaults of theirs are not those of a published model
        top_k=values["num_experts_per_tok"],
        score="sigmoid",
        scale=values["routed_scaling_factor"],
        expert_bias=True,
        **router_groups(values, group_experts=2),
    )
    depths = _depths(values)
    return replace(
        _read(values, router, interleaved=bool(values.get("rope_interleave", True))),
        mtp=MultiTokenConfig(num_layers=depths) if depths else None,
    )


METHODS = ("greedy", "group_limited_greedy")
"""Their names of a choice of experts without groups and with them."""


def _read_v2(values: Mapping[str, Any]) -> GPTConfig:
    """Convert the ``config.json`` of DeepSeek-V2.

    Raises:
        ConfigurationError: an option has no counterpart here.
    """
    refuse_others(values, {"norm_topk_prob": False, "scoring_func": "softmax", "mlp_bias": False})
    method = values.get("topk_method", METHODS[0])
    if method not in METHODS:
        raise ConfigurationError(f"topk_method is {method!r}; known: {', '.join(METHODS)}.")
    router = RouterConfig(
        top_k=values["num_experts_per_tok"],
        pre_softmax=True,
        scale=values["routed_scaling_factor"],
        # A group is as good as its best expert. Without the method, their numbers of groups have no effect.
        **(router_groups(values, group_experts=1) if method == METHODS[1] else {}),
    )
    # Their rotation always pairs neighboring features.
    return _read(values, router, interleaved=True)


def _read(values: Mapping[str, Any], router: RouterConfig, *, interleaved: bool) -> GPTConfig:
    """Convert what both versions say in the same words."""
    good = {"attention_bias": False, "moe_layer_freq": 1, "hidden_act": "silu"}
    refuse_others({"hidden_act": values["hidden_act"], **values}, good)
    layers, dense = values["num_hidden_layers"], values["first_k_dense_replace"]
    width = values["moe_intermediate_size"]
    moe = MoEConfig(
        num_experts=values["n_routed_experts"],
        ffn_hidden_size=width,
        # Their rule is a number of dense layers; ours names each.
        pattern=tuple(layer >= dense for layer in range(layers)),
        router=router,
        # Several shared experts are one that is as much wider: their outputs are added.
        shared=SharedConfig(ffn_hidden_size=width * values["n_shared_experts"]),
    )
    return GPTConfig(
        **sizes_from(values),
        norm=NormConfig(kind="rms", eps=values["rms_norm_eps"]),
        position=replace(rotary_from(values), interleaved=interleaved),
        mixer_pattern=("latent_attention",),
        latent=LatentConfig(
            kv_rank=values["kv_lora_rank"],
            q_rank=values["q_lora_rank"],
            head_dim=values["qk_nope_head_dim"],
            rotary_dim=values["qk_rope_head_dim"],
            value_dim=values["v_head_dim"],
        ),
        moe=moe,
        dropout=DropoutConfig(attention=values.get("attention_dropout", 0.0)),
    )


def _write_v3(config: GPTConfig) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        ConfigurationError: the model has no experts with a shared one.
    """
    values = _write(config, "deepseek_v3")
    return {
        **values,
        "rope_interleave": config.position.interleaved,
        "norm_topk_prob": values["num_experts_per_tok"] > 1,
        DEPTHS[0]: config.num_depths,
    }


def _write_v2(config: GPTConfig) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        ConfigurationError: the model has no experts with a shared one.
    """
    values = _write(config, "deepseek_v2")
    return {**values, "topk_method": METHODS[values["n_group"] > 1], "norm_topk_prob": False, "mlp_bias": False}


def _write(config: GPTConfig, kind: str) -> dict[str, Any]:
    """Return what both versions say in the same words."""
    latent, moe = config.latent, config.moe
    assert latent is not None
    if moe is None or moe.shared is None:
        raise ConfigurationError(f"a model of {kind} has experts, one of them shared; this one has not")
    layers = range(config.num_layers)
    return {
        **sizes_to(config),
        "num_key_value_heads": config.num_heads,
        "hidden_act": "silu" if config.activation == "swiglu" else config.activation,
        "attention_bias": False,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.head_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "n_routed_experts": moe.num_experts,
        # At least one, as a file cannot say a fraction; the difference shows when it is read back.
        "n_shared_experts": max(1, moe.shared.ffn_hidden_size // config.expert_ffn_hidden_size),
        "moe_intermediate_size": config.expert_ffn_hidden_size,
        "num_experts_per_tok": moe.router.top_k,
        "n_group": moe.router.num_groups or 1,
        "topk_group": moe.router.group_top_k or 1,
        "routed_scaling_factor": moe.router.scale,
        # other patterns differ when the values are read back, and are refused by name
        "first_k_dense_replace": sum(not config.has_experts(layer) for layer in layers),
    }


def _depths(values: Mapping[str, Any]) -> int:
    """Return the number of depths. The published name and that of ``transformers`` differ."""
    return next((values[name] for name in DEPTHS if values.get(name) is not None), 0)


def _suits(config: GPTConfig) -> bool:
    return config.latent is not None


MODEL_TYPES = (
    ModelType("deepseek_v3", "DeepseekV3ForCausalLM", _suits, _places, _read_v3, _write_v3, also_read=("kimi_k2",)),
    ModelType("deepseek_v2", "DeepseekV2ForCausalLM", _suits, _places, _read_v2, _write_v2),
)
