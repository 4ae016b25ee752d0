"""Conversion of weights and configurations from ``transformers`` (Llama, Qwen, GPT-2 and others) to ours and back.

Our names are canonical: ``layers.0.attention.q.weight``, not the fused ``qkv``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.models.config import compare
from megalight.models.gpt.config import AttentionConfig, DropoutConfig, GPTConfig, NormConfig, PositionConfig
from megalight.models.gpt.deepseek_weights import (
    after_layers,
    deepseek_from,
    deepseek_to,
    depth_copies,
    depth_doubles,
    depth_places,
    latent_places,
    moved_depths,
)
from megalight.models.gpt.gemma_weights import NORMS, gemma_from, gemma_to
from megalight.models.gpt.gemma_weights import PREFIXES as GEMMA_PREFIXES
from megalight.models.gpt.gemma_weights import VISION as GEMMA_VISION
from megalight.models.gpt.gpt_oss_weights import as_gpt_oss, gpt_oss_to, with_defaults
from megalight.models.gpt.llama4_weights import PREFIXES, VISION, is_llama4, llama4_from, llama4_places, llama4_to
from megalight.models.gpt.mamba_weights import mamba2_from, mamba2_to, mamba_map, nemotron_h_from, nemotron_h_to
from megalight.models.gpt.moe_weights import expert_places, experts_to, with_experts
from megalight.models.gpt.rotary_values import rotary_from, rotary_to
from megalight.models.weights import Theirs, WeightMap

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
    if config.mamba is not None and config.layer_pattern:
        return mamba_map(config)
    if config.latent is not None:
        # Latent attention has other projections. Only the last one, `proj`, has the same name.
        rest = {ours: theirs for ours, theirs in LLAMA.items() if ".attention." not in ours or ours.endswith("proj")}
        layers = rest | latent_places(config)
        return WeightMap(
            {ours: Theirs(theirs) for ours, theirs in (layers | depth_places(layers)).items()},
            root="model.",
            copies={**({"lm_head.weight": "model.embed_tokens.weight"} if tied else {}), **depth_copies(config)},
            left_out=after_layers(config),
            doubles=depth_doubles(config),
            moved=moved_depths(config),
        )
    if config.norm.after:
        return WeightMap(
            {ours: Theirs(theirs) for ours, theirs in (LLAMA | NORMS).items()},
            root="model.",
            copies={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
            left_out=GEMMA_VISION,
            respelt=GEMMA_PREFIXES,
        )
    if is_llama4(config):
        outside = {ours: Theirs(theirs) for ours, theirs in LLAMA.items() if ".mlp." not in ours}
        return WeightMap(
            outside | llama4_places(config),
            root="model.",
            copies={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
            left_out=VISION,
            respelt=PREFIXES,
        )
    if config.position.kind != "learned":
        return WeightMap(
            {ours: Theirs(theirs) for ours, theirs in LLAMA.items()} | expert_places(config),
            root="model.",
            copies={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
            # Older files hold this buffer, which is computed here.
            left_out=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        )
    # GPT-2 is the only one of them with learned positions.
    fused, size = "transformer.h.N.attn.c_attn", config.num_heads * config.head_dim
    # Queries, keys and values lie one after the other, each of all heads.
    rows = {name: range(i * size, (i + 1) * size) for i, name in enumerate("qkv")}
    return WeightMap(
        {ours: Theirs(theirs) for ours, theirs in GPT2.items()}
        | {ours: Theirs(theirs, transposed=True) for ours, theirs in GPT2_TRANSPOSED.items()}
        | {f"layers.N.attention.{name}": Theirs(fused, part, True) for name, part in rows.items()},
        root="transformer.",
        copies={"lm_head.weight": "transformer.wte.weight"} if tied else {},
        # Masks of the triangle, saved by older releases.
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
    try:
        return READERS[kind](values)
    # Any key may lack, so it is caught here instead of being asked for everywhere.
    except KeyError as missing:
        raise ConfigurationError(f"the configuration of the {kind} model lacks {missing}; copy it again.") from None


def config_to_transformers(config: GPTConfig, model_type: str | None = None) -> dict[str, Any]:
    """Return the content of ``config.json`` for this model.

    Each kind of model is written and read back. The first kind that gives ``config`` again is taken.

    Args:
        config: the model.
        model_type: the kind to try first: that of the model that training began with.

    Raises:
        ConfigurationError: no kind can express the configuration. The message names what the nearest one cannot.
    """
    failed: list[tuple[str, list[str]]] = []
    kinds = _kinds(config)
    # The kind that training began with comes first: several can say the same configuration.
    for kind in sorted(kinds, key=lambda kind: kind != model_type):
        try:
            values = {"model_type": kind, "architectures": [ARCHITECTURES[kind]], **WRITERS[kind](config)}
            # Written values are read back: whatever `transformers` cannot say shows as a difference.
            back = _settings(config_from_transformers(values))
        except ConfigurationError as error:
            failed.append((kind, [str(error)]))
            continue
        differences = compare(_settings(config), back, f"transformers' {kind}")
        if not differences:
            return values
        failed.append((kind, differences))
    # The kind with the fewest differences is the one that the user most likely means.
    kind, differences = min(failed, key=lambda each: len(each[1]))
    raise ConfigurationError(f"no model of transformers has this configuration. Nearest: {'; '.join(differences)}.")


def _kinds(config: GPTConfig) -> list[str]:
    """Return the kinds that can be asked: some parts of a model are of few kinds, which have no others."""
    of_parts: dict[tuple[str, ...], bool] = {
        ("mamba2", "nemotron_h"): set(config.layer_pattern) == {"M"},
        ("nemotron_h",): bool(config.layer_pattern),
        ("gemma3_text",): config.norm.after and config.attention.qk_norm,
        ("gemma2",): config.norm.after,
        ("llama4_text",): is_llama4(config),
        ("gpt_oss",): config.attention.softmax == "learnable",
        ("deepseek_v3",): config.latent is not None,
    }
    special = {kind for kinds in of_parts for kind in kinds}
    general = [kind for kind in WRITERS if kind not in special]
    return next((list(kinds) for kinds, has in of_parts.items() if has), general)


def _settings(config: GPTConfig) -> dict[str, Any]:
    """Return plain values with the entries of all layers, because different patterns can mean the same layers."""
    values = config.to_dict()
    if config.moe is not None:
        values["moe"]["pattern"] = [config.has_experts(layer) for layer in range(config.num_layers)]
        # 0 and the width itself mean the same.
        values["moe"]["ffn_hidden_size"] = config.expert_ffn_hidden_size
        del values["moe"]["balance"]  # losses are the user's choice
    if config.mtp is not None:
        del values["mtp"]["loss_scale"]
    values["attention"]["scale"] = config.attention.scale or config.head_dim**-0.5
    values["attention"]["chunk"] = [config.attention.chunk_of(layer) for layer in range(config.num_layers)]
    values["attention"]["window"] = [config.attention.window_of(layer) for layer in range(config.num_layers)]
    values["position"]["pattern"] = [config.position.rotates(layer) for layer in range(config.num_layers)]
    del values["attention"]["window_pattern"]
    del values["attention_ratio"], values["mlp_ratio"]  # they only made the pattern
    return values


def _llama(values: Mapping[str, Any]) -> GPTConfig:
    """Convert Llama, Mistral, Qwen2, Qwen3 and SmolLM3. They differ only in biases, norms, windows and rotation."""
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


def _moe(values: Mapping[str, Any]) -> GPTConfig:
    """Convert Mixtral, Qwen3-MoE and OLMoE."""
    return with_experts(_llama(values), values)


def _gpt_oss(values: Mapping[str, Any]) -> GPTConfig:
    full = with_defaults(values)
    return as_gpt_oss(_llama(full), full)


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
        # Without the option, GPT-2 does not scale scores.
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
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "smollm3": _llama,
    "mixtral": _moe,
    "qwen3_moe": _moe,
    "olmoe": _moe,
    "deepseek_v3": deepseek_from,
    "kimi_k2": deepseek_from,
    "gpt_oss": _gpt_oss,
    "gemma2": gemma_from,
    "gemma3_text": gemma_from,
    "gemma3": gemma_from,
    "llama4_text": llama4_from,
    "llama4": llama4_from,
    "mamba2": mamba2_from,
    "nemotron_h": nemotron_h_from,
    "gpt2": _gpt2,
}


def _to_llama(config: GPTConfig) -> dict[str, Any]:
    """Write what these models have in common."""
    attention = config.attention
    values: dict[str, Any] = {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_hidden_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_sequence_length,
        "hidden_act": _their_name(config.activation, GATED),
        "tie_word_embeddings": config.tie_embeddings,
        "rms_norm_eps": config.norm.eps,
        **rotary_to(config.position),
        "attention_dropout": config.dropout.attention,
        "initializer_range": config.init.std,
    }
    if attention.window is not None:
        # Theirs counts the token itself.
        values["sliding_window"] = attention.window + 1
    return values


def _to_biased_llama(config: GPTConfig) -> dict[str, Any]:
    return {**_to_llama(config), "attention_bias": config.attention.proj_bias, "mlp_bias": config.mlp_bias}


def _to_mistral(config: GPTConfig) -> dict[str, Any]:
    # Null is no window; a missing key would be their default of 4096.
    return {"sliding_window": None, **_to_llama(config)}


def _to_qwen(config: GPTConfig) -> dict[str, Any]:
    windowed = [config.attention.window_of(layer) is not None for layer in range(config.num_layers)]
    return {
        **_to_llama(config),
        "use_sliding_window": any(windowed),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windowed],
    }


def _to_smollm3(config: GPTConfig) -> dict[str, Any]:
    rotated = [int(config.position.rotates(layer)) for layer in range(config.num_layers)]
    biases = {"attention_bias": config.attention.proj_bias, "mlp_bias": config.mlp_bias}
    return {**_to_qwen(config), **biases, "no_rope_layers": rotated}


def _to_qwen3(config: GPTConfig) -> dict[str, Any]:
    return {**_to_qwen(config), "attention_bias": config.attention.proj_bias}


def _to_mixtral(config: GPTConfig) -> dict[str, Any]:
    return {"sliding_window": None, **_to_llama(config), **experts_to("mixtral", config)}


def _to_qwen3_moe(config: GPTConfig) -> dict[str, Any]:
    return {
        **_to_llama(config),
        "use_sliding_window": config.attention.window is not None,
        "attention_bias": config.attention.proj_bias,
        **experts_to("qwen3_moe", config),
    }


def _to_olmoe(config: GPTConfig) -> dict[str, Any]:
    return {**_to_llama(config), "attention_bias": config.attention.proj_bias, **experts_to("olmoe", config)}


def _to_gpt_oss(config: GPTConfig) -> dict[str, Any]:
    return {**_to_llama(config), **gpt_oss_to(config)}


def _to_gpt2(config: GPTConfig) -> dict[str, Any]:
    return {
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_heads,
        "n_inner": config.ffn_hidden_size,
        "vocab_size": config.vocab_size,
        "n_positions": config.max_sequence_length,
        "activation_function": _their_name(config.activation, PLAIN),
        "tie_word_embeddings": config.tie_embeddings,
        "layer_norm_epsilon": config.norm.eps,
        "scale_attn_weights": config.attention.scale is None,
        "resid_pdrop": config.dropout.hidden,
        "attn_pdrop": config.dropout.attention,
        "embd_pdrop": config.dropout.embedding,
        "initializer_range": config.init.std,
    }


WRITERS: dict[str, Callable[[GPTConfig], dict[str, Any]]] = {
    "llama": _to_biased_llama,
    "mistral": _to_mistral,
    "qwen2": _to_qwen,
    "qwen3": _to_qwen3,
    "smollm3": _to_smollm3,
    "mixtral": _to_mixtral,
    "qwen3_moe": _to_qwen3_moe,
    "olmoe": _to_olmoe,
    "deepseek_v3": deepseek_to,
    "gpt_oss": _to_gpt_oss,
    "gemma2": partial(gemma_to, "gemma2"),
    "gemma3_text": partial(gemma_to, "gemma3_text"),
    "llama4_text": llama4_to,
    "mamba2": mamba2_to,
    "nemotron_h": nemotron_h_to,
    "gpt2": _to_gpt2,
}


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def _their_name(activation: str, known: Mapping[str, str]) -> str:
    """Return their name of an activation, or ours where they have none, which the reader then refuses."""
    return next((theirs for theirs, ours in known.items() if ours == activation), activation)


def _activation(name: str, known: Mapping[str, str]) -> str:
    if name not in known:
        raise ConfigurationError(f"activation {name!r} has no counterpart here; known: {', '.join(known)}.")
    return known[name]


def _window(values: Mapping[str, Any]) -> tuple[int | None, tuple[bool, ...]]:
    """Convert the window. Theirs counts the token itself, ours does not."""
    if values["model_type"] in ("mistral", "mixtral"):
        window = values.get("sliding_window", 4096 if values["model_type"] == "mistral" else None)  # their defaults
        return (None if window is None else window - 1), (True,)
    if values["model_type"] == "qwen3_moe":
        return (values["sliding_window"] - 1 if values.get("use_sliding_window") else None), (True,)
    kinds = tuple(kind == "sliding_attention" for kind in values.get("layer_types") or ())
    if not any(kinds):
        return None, (True,)
    return values["sliding_window"] - 1, kinds
