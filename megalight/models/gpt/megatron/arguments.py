"""The configuration of a model from the arguments of Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.gpt.config import GPTConfig, MultiTokenConfig, NormConfig, spread
from megalight.models.gpt.mixer_config import AttentionConfig, MambaConfig, PositionConfig
from megalight.nn.moe import MoEConfig, RouterConfig, SharedConfig
from megalight.ops.rotary import RotaryScaling

COMMON = "common.pt"
"""The file that holds the arguments."""

MIXER_EPS = 1e-5
"""Eps of the norm behind Mamba's scan, which ``megatron/core/ssm/mamba_mixer.py`` does not take from an argument."""

REFUSED = {
    "multi_latent_attention": "multi-latent attention",
    "mtp_hsm": "depths of multi-token prediction that mix hidden states",
    "mtp_use_repeated_layer": "depths of multi-token prediction that share a layer",
    "apply_layernorm_1p": "norms with weights around zero",
    "apply_residual_connection_post_layernorm": "residual connections behind the norm",
    "rotary_seq_len_interpolation_factor": "interpolated rotary positions",
    "heterogeneous_layers_config_path": "layers of several kinds",
    "qk_l2_norm": "L2 norms of queries and keys",
    "moe_apply_probs_on_input": "experts with weighted inputs",
    "glu_linear_offset": "gates with an offset",
    "activation_func_clamp_value": "activations with a limit",
    "attention_output_gate": "attention with a gate behind it",
    "experimental_attention_variant": "other kinds of attention",
    "fp8_param_gather": "weights in 8 bits",
}
"""Arguments that change the model in ways that are not imported."""


def config_of(arguments: Mapping[str, Any]) -> GPTConfig:
    """Return the configuration of the model that Megatron-LM's arguments describe.

    Raises:
        ConfigurationError: the model has parts that are not imported.
        CheckpointError: an argument is missing.
    """
    get = arguments.get
    for name, what in REFUSED.items():
        if get(name):
            raise ConfigurationError(f"{name} is {get(name)!r}: {what} cannot be imported from Megatron-core.")
    balance = get("moe_router_load_balancing_type")  # a word, or a list of words
    if "sinkhorn" in (balance if isinstance(balance, list) else [balance]):
        raise ConfigurationError("routing by Sinkhorn's algorithm cannot be imported from Megatron-core.")
    kind = {"learned_absolute": "learned", "rope": "rope", "none": "none"}.get(str(get("position_embedding_type")))
    if kind is None:
        raise ConfigurationError(
            f"position_embedding_type is {get('position_embedding_type')!r}; it has no counterpart."
        )
    bias = bool(get("add_bias_linear"))
    try:
        pattern, depths = _patterns(arguments)
        symbols = pattern + "".join(depths)
        heads = arguments["num_attention_heads"]
        return GPTConfig(
            num_layers=arguments["num_layers"],
            hidden_size=arguments["hidden_size"],
            num_heads=heads,
            num_kv_heads=arguments["num_query_groups"] if get("group_query_attention") else heads,
            head_dim=get("kv_channels") or 0,
            ffn_hidden_size=arguments["ffn_hidden_size"],
            # without a tokenizer's own size, rows of padding look like others, and are kept
            vocab_size=get("vocab_size") or arguments["padded_vocab_size"],
            max_sequence_length=get("max_position_embeddings") or arguments["seq_length"],
            activation=_activation(arguments),
            mlp_bias=bias,
            tie_embeddings=not get("untie_embeddings_and_output_weights"),
            norm=NormConfig(
                kind="rms" if get("normalization") == "RMSNorm" else "layer",
                eps=_norm_eps(arguments),
            ),
            position=_position(arguments, kind),
            # Biases of all layers are those of attention, too, where there is any.
            attention=_attention(arguments, bias) if not pattern or "*" in symbols else AttentionConfig(),
            layer_pattern=pattern,
            mamba=_mamba(arguments) if "M" in symbols else None,
            moe=_experts(arguments) if get("num_experts") and (not pattern or "E" in symbols) else None,
            mtp=_depths(arguments, depths),
        )
    except KeyError as missing:
        raise CheckpointError(f"the arguments in {COMMON} lack {missing}; is it a GPT of Megatron-LM?") from None


def _position(arguments: Mapping[str, Any], kind: str) -> PositionConfig:
    """Return positions. The arguments state a rotation also where there is none."""
    if kind != "rope":
        return PositionConfig(kind=kind)  # type: ignore[arg-type]
    get = arguments.get
    return PositionConfig(
        base=float(get("rotary_base") or 10000.0),
        fraction=get("rotary_percent") or 1.0,
        interleaved=bool(get("rotary_interleaved")),
        scaling=RotaryScaling(factor=get("rope_scaling_factor") or 8.0) if get("use_rope_scaling") else None,
        pattern=_rotating(get("no_rope_freq")),
    )


def _attention(arguments: Mapping[str, Any], bias: bool) -> AttentionConfig:
    return AttentionConfig(
        qkv_bias=bias or bool(arguments.get("add_qkv_bias")),
        proj_bias=bias,
        qk_norm=bool(arguments.get("qk_layernorm")),
        softmax=arguments.get("softmax_type") or "vanilla",
        **_windows(arguments),
    )


def _rotating(freq: int | Sequence[int] | None) -> tuple[bool, ...]:
    """Return which layers rotate: ``4`` leaves out every fourth, and in a list 1 stands for a layer that does not."""
    if isinstance(freq, int):
        return (True,) * (freq - 1) + (False,) if freq else (True,)
    return tuple(not left_out for left_out in freq or (0,))


def _windows(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window and which layers have it, in the words of :class:`AttentionConfig`."""
    size, freq = arguments.get("window_size"), arguments.get("window_attn_skip_freq")
    if not size or tuple(size) == (-1, -1):
        return {}
    left, right = size
    if right != 0 or left < 0:
        raise ConfigurationError(
            f"window_size is {tuple(size)}; windows that end at the token itself can be imported: (earlier tokens, 0)."
        )
    pattern = (True,) if freq is None else freq if isinstance(freq, int) else tuple(map(bool, freq))
    # All but each single one are none.
    nowhere = pattern == 1 if isinstance(pattern, int) else not any(pattern)
    return {} if nowhere else {"window": left, "window_pattern": pattern}


def _patterns(arguments: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the layers of a hybrid model, a symbol each, and those of each depth; both empty for other models."""
    get = arguments.get
    # Bars divide the layers over stages of a pipeline.
    stated = str(get("hybrid_override_pattern") or get("hybrid_layer_pattern") or "").replace("|", "")
    if not stated and not get("is_hybrid_model"):
        return "", []
    ratios = get("hybrid_attention_ratio") or 0.0, get("hybrid_mlp_ratio") or 0.0
    # In newer releases, the layers of each depth stand behind a slash; before, in an argument of their own.
    pattern, *depths = stated.split("/")
    apart = [get("mtp_hybrid_override_pattern") or ""] * (get("mtp_num_layers") or 0)
    depths = [depth for depth in depths if depth] or apart
    if len(set(depths)) > 1 or "" in depths:
        raise ConfigurationError(
            f"mtp_num_layers is {get('mtp_num_layers')!r} and the pattern of layers {stated!r}: each depth of "
            "multi-token prediction must state the same layers, behind a slash or in mtp_hybrid_override_pattern."
        )
    return pattern or spread(arguments["num_layers"], *ratios), depths


def _mamba(arguments: Mapping[str, Any]) -> MambaConfig:
    get = arguments.get
    head_dim = get("mamba_head_dim") or 64
    return MambaConfig(
        # Without a number, heads have twice as many features as the hidden states.
        num_heads=get("mamba_num_heads") or 2 * arguments["hidden_size"] // head_dim,
        head_dim=head_dim,
        state_size=get("mamba_state_dim") or 128,
        num_groups=get("mamba_num_groups") or 8,
        norm_eps=None if _norm_eps(arguments) == MIXER_EPS else MIXER_EPS,
    )


def _norm_eps(arguments: Mapping[str, Any]) -> float:
    return float(arguments.get("norm_epsilon") or arguments.get("layernorm_epsilon") or 1e-5)


def _depths(arguments: Mapping[str, Any], patterns: Sequence[str]) -> MultiTokenConfig | None:
    if not (depths := len(patterns) or arguments.get("mtp_num_layers")):
        return None
    scale = arguments.get("mtp_loss_scaling_factor") or 0.1
    return MultiTokenConfig(num_layers=depths, loss_scale=scale, pattern=patterns[0] if patterns else "")


def _activation(arguments: Mapping[str, Any]) -> str:
    if arguments.get("swiglu"):
        return "swiglu"
    if arguments.get("quick_geglu"):
        return "quick_geglu"
    if arguments.get("squared_relu"):
        return "squared_relu"
    # the fused kernel of bias and GELU, which is on by default, has the approximation by tanh
    fused = arguments.get("bias_gelu_fusion", True) and arguments.get("add_bias_linear")
    return "gelu_tanh" if fused or arguments.get("openai_gelu") else "gelu"


def _experts(arguments: Mapping[str, Any]) -> MoEConfig:
    get = arguments.get
    frequency = get("moe_layer_freq") or 1
    if isinstance(frequency, int):
        frequency = [layer % frequency == 0 for layer in range(frequency)]
    shared = get("moe_shared_expert_intermediate_size")
    return MoEConfig(
        num_experts=arguments["num_experts"],
        ffn_hidden_size=get("moe_ffn_hidden_size") or 0,
        pattern=tuple(bool(entry) for entry in frequency),
        bias=bool(get("add_bias_linear")),
        router=RouterConfig(
            top_k=get("moe_router_topk") or 2,
            score=get("moe_router_score_function") or "softmax",
            pre_softmax=bool(get("moe_router_pre_softmax")),
            num_groups=get("moe_router_num_groups"),
            group_top_k=get("moe_router_group_topk"),
            scale=get("moe_router_topk_scaling_factor") or 1.0,
            expert_bias=bool(get("moe_router_enable_expert_bias")),
        ),
        shared=SharedConfig(ffn_hidden_size=shared, gate=bool(get("moe_shared_expert_gate"))) if shared else None,
    )
