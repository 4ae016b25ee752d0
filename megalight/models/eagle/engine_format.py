"""The format of drafts that serving engines read: names of tensors, and ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megalight.models.eagle.config import EagleConfig
from megalight.models.gpt.hugging_face.rotary import rotary_to

LLAMA, KIMI = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
"""Architectures in ``config.json``."""

LAYERS = {LLAMA: "midlayer.", KIMI: "layers.0."}
"""What names of the layer's tensors begin with. Engines read both; ModelOpt writes the second for all."""

COMMON = {
    "fuse": "fc",
    "layer.embed_norm": "{layer}input_layernorm",
    "layer.hidden_norm": "{layer}hidden_norm",
    "layer.attention.proj": "{layer}self_attn.o_proj",
    "layer.mlp_norm": "{layer}post_attention_layernorm",
    "layer.mlp.gate": "{layer}mlp.gate_proj",
    "layer.mlp.up": "{layer}mlp.up_proj",
    "layer.mlp.down": "{layer}mlp.down_proj",
    "head.norm": "norm",
    "head.output_layer": "lm_head",
}
HEADS = {f"layer.attention.{name}": f"{{layer}}self_attn.{name}_proj" for name in "qkv"}
LATENT = {
    "layer.attention.q_down": "{layer}self_attn.q_a_proj",
    "layer.attention.q_latent_norm": "{layer}self_attn.q_a_layernorm",
    "layer.attention.q_up": "{layer}self_attn.q_b_proj",
    "layer.attention.kv_down": "{layer}self_attn.kv_a_proj_with_mqa",
    "layer.attention.kv_latent_norm": "{layer}self_attn.kv_a_layernorm",
    "layer.attention.kv_up": "{layer}self_attn.kv_b_proj",
}


def architecture_of(config: EagleConfig) -> str:
    """Return the architecture of a draft."""
    return LLAMA if config.latent is None else KIMI


def names_of(config: EagleConfig) -> dict[str, str]:
    """Return our name of each module -> theirs."""
    if config.latent is None:
        found = COMMON | HEADS
    elif config.latent.q_rank is not None:
        found = COMMON | LATENT
    else:
        # Queries without a latent are one projection, as in DeepSeek-V2-Lite.
        rest = {ours: theirs for ours, theirs in LATENT.items() if ".q_" not in ours}
        found = COMMON | rest | {"layer.attention.q_up": "{layer}self_attn.q_proj"}
    layer = LAYERS[architecture_of(config)]
    return {ours: theirs.format(layer=layer) for ours, theirs in found.items()}


def values_of(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    layers = sorted(set(config.auxiliary_layers))
    return {
        "architectures": [architecture_of(config)],
        "model_type": "llama" if config.latent is None else "kimi_k2",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        **_sizes(config),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        **rotary_to(config.layer.position),
        "max_position_embeddings": config.max_sequence_length,
        "initializer_range": config.std,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        # Counted as in vLLM: hidden states after so many layers.
        "eagle_aux_hidden_state_layer_ids": layers,
        # Counted as in SGLang and ModelOpt: outputs of layers, the first being 0.
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [after - 1 for after in layers],
            "has_lm_head": config.head == "own",
        },
    }


def _sizes(config: EagleConfig) -> Mapping[str, Any]:
    latent = config.latent
    if latent is None:
        return {"head_dim": config.head_dim}
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.head_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        # The layer is dense: a model of this kind has experts from a later layer on.
        "first_k_dense_replace": 1,
    }
