"""A ``config.json`` may leave values out. What ``transformers`` takes in their place is taken here, or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megalight.errors import ConfigurationError
from megalight.models.gpt.hugging_face import config_from_transformers, config_to_transformers, settings

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    # a multiple of every number of key heads that theirs take by themselves
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 100.0,
    "attention_dropout": 0.1,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
TURNS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]
FILES: list[dict[str, Any]] = [
    {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
    {"model_type": "mistral", **SIZES, "sliding_window": 6},
    {"model_type": "mixtral", **SIZES, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "qwen2", **SIZES, **WINDOW},
    {"model_type": "qwen2", **SIZES, "sliding_window": 6, "max_window_layers": 2, "layer_types": TURNS},
    {"model_type": "qwen3", **SIZES, **WINDOW, "layer_types": TURNS},
    {"model_type": "qwen3_moe", **SIZES, **WINDOW, **EXPERTS, "mlp_only_layers": [1]},
    {"model_type": "olmoe", **SIZES, **EXPERTS, "norm_topk_prob": True},
    {"model_type": "smollm3", **SIZES, "no_rope_layers": [1, 1, 0, 1, 0]},
    {"model_type": "smollm3", **SIZES, "use_sliding_window": True, "sliding_window": 6, "no_rope_layer_interval": 2},
    {
        "model_type": "gpt_oss",
        **{name: value for name, value in SIZES.items() if name != "head_dim"},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "layer_types": TURNS},
        **{"swiglu_limit": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    },
    {
        "model_type": "gemma2",
        **SIZES,
        **{"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 24},
        **{"sliding_window": 6, "layer_types": TURNS},
    },
    {"model_type": "gemma3_text", **SIZES, "query_pre_attn_scalar": 24, "sliding_window": 6, "layer_types": TURNS},
    {
        "model_type": "llama4_text",
        **SIZES,
        **{"intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1},
        **{"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1], "attention_chunk_size": 5, "floor_scale": 4},
    },
    {
        "model_type": "gpt2",
        **{"vocab_size": 53, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, "layer_norm_epsilon": 1e-4},
        **{"activation_function": "relu", "resid_pdrop": 0.2, "embd_pdrop": 0.3, "attn_pdrop": 0.4},
    },
]


def meaning(values: dict[str, Any]) -> dict[str, Any] | str:
    try:
        return settings(config_from_transformers(values))
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file["model_type"])
def test_what_a_file_leaves_out(file: dict[str, Any]) -> None:
    kind = type(transformers.AutoConfig.for_model(file["model_type"]))
    assert isinstance(meaning(file), dict)
    for left_out in [None, *sorted(file.keys() - {"model_type"})]:
        values = {name: value for name, value in file.items() if name != left_out}
        found = meaning(values)
        if not (isinstance(found, str) and "lacks" in found):
            assert found == meaning(kind.from_dict(values).to_dict()), f"without {left_out}"


def test_a_null_scaling_of_gpt_oss_is_its_default() -> None:
    file = next(file for file in FILES if file["model_type"] == "gpt_oss")
    scaling = config_from_transformers({**file, "rope_scaling": None}).position.scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("yarn", 32.0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def test_a_factor_that_the_norm_of_llama4_takes_out() -> None:
    file = next(file for file in FILES if file["model_type"] == "llama4_text")
    with pytest.raises(ConfigurationError, match="use_qk_norm=True: its factor of queries and keys has no counterpart"):
        config_from_transformers({**file, "rope_scaling": YARN})
    even = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert config_from_transformers({**file, "rope_scaling": even}).position.scaling is not None
    assert config_from_transformers({**file, "rope_scaling": YARN, "use_qk_norm": False}).position.scaling is not None


NEMOTRON = {
    **{"model_type": "nemotron_h", **SIZES, "layers_block_type": ["mamba", "attention"], "layer_norm_epsilon": 1e-5},
    **{"mamba_num_heads": 4, "mamba_head_dim": 4, "ssm_state_size": 6, "n_groups": 2, "conv_kernel": 4},
}


def test_a_tied_head_of_nemotron_h() -> None:
    """Their class never ties it, so it would compute with another head than ours."""
    with pytest.raises(ConfigurationError, match="tie_word_embeddings is True; only False"):
        config_from_transformers(NEMOTRON)
    config = config_from_transformers({**NEMOTRON, "tie_word_embeddings": False})
    with pytest.raises(ConfigurationError, match="tie_word_embeddings is True; only False"):
        config_to_transformers(replace(config, tie_embeddings=True))


def test_unknown_layers_of_nemotron_h() -> None:
    with pytest.raises(ConfigurationError, match="layers_block_type has convolution; known: linear_attention, mamba"):
        config_from_transformers({**NEMOTRON, "tie_word_embeddings": False, "layers_block_type": ["convolution"]})
