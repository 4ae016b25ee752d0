"""DeepSeek-V2 of ``transformers`` in ours, beside what ``test_gpt_weights_matrix`` finds for every kind."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.models.gpt.hugging_face import config_from_transformers, config_to_transformers
from megalight.models.gpt.presets import preset
from tests.models.test_gpt_deepseek_weights import SIZES, YARN

transformers = pytest.importorskip("transformers")

SHARED = {key: value for key, value in SIZES.items() if key != "num_mtp_layers"}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
LITE = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "rope_parameters": PLAIN}
MODELS: dict[str, dict[str, Any]] = {
    # 4 experts from 2 groups: the number of experts by which a group is scored is not their quotient
    "deepseek_v2": {**SHARED, "topk_method": "group_limited_greedy", "topk_group": 2, "routed_scaling_factor": 16.0},
    "deepseek_v2_one_group": {**SHARED, "topk_method": "group_limited_greedy", "topk_group": 1, "n_group": 2},
    "deepseek_v2_lite": {**SHARED, **LITE},
    # numbers of groups without the method that reads them
    "deepseek_v2_greedy": {**SHARED, **LITE, "n_group": 4, "topk_group": 2, "n_shared_experts": 1},
}


def theirs(name: str, **options: Any) -> Any:
    torch.manual_seed(1)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = transformers.DeepseekV2Config(**copy.deepcopy({**MODELS[name], **options}), **eager)
    model = transformers.DeepseekV2ForCausalLM(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    # Releases up to 5.14 leave this factor of the scores out. DeepSeek's own code and later releases have it.
    rotary = MODELS[name]["rope_parameters"]
    magnitude = 0.1 * rotary.get("mscale_all_dim", 0.0) * math.log(rotary.get("factor", 1.0)) + 1
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5 * magnitude**2
    return model


def test_scores_get_the_factor_of_long_contexts() -> None:
    """As in DeepSeek's own code: 1.59 for the published values."""
    published = {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32.0}
    values = theirs("deepseek_v2", rope_parameters=published).config.to_dict()
    scaling = config_from_transformers(values).position.scaling
    assert scaling is not None
    assert scaling.concentration == 1.0
    assert abs(scaling.score_factor - (0.0707 * math.log(40) + 1) ** 2) < 1e-12


LITE_VALUES = {
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}


LARGE_VALUES = {
    **LITE_VALUES,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}


@pytest.mark.parametrize(("name", "values"), [("deepseek_v2", LARGE_VALUES), ("deepseek_v2_lite", LITE_VALUES)])
def test_presets_are_the_published_configurations(name: str, values: dict[str, Any]) -> None:
    found, expected = config_from_transformers(values), preset(name)
    assert found.moe is not None
    assert expected.moe is not None
    assert replace(found, moe=replace(found.moe, balance=expected.moe.balance)) == expected


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("attention_bias", True, "attention_bias is True; only False"),
        ("norm_topk_prob", True, "norm_topk_prob is True; only False"),
        ("scoring_func", "sigmoid", "scoring_func is 'sigmoid'; only 'softmax'"),
        ("topk_method", "noaux_tc", "topk_method is 'noaux_tc'; known: greedy, group_limited_greedy"),
        ("mlp_bias", True, "mlp_bias is True; only False"),
    ],
)
def test_options_without_counterpart(option: str, value: Any, message: str) -> None:
    config_from_transformers(LITE_VALUES)
    with pytest.raises(ConfigurationError, match=message):
        config_from_transformers({**LITE_VALUES, option: value})


def test_what_neither_version_can_say() -> None:
    config = config_from_transformers(LITE_VALUES)
    assert config.moe is not None
    router = replace(config.moe.router, pre_softmax=False)
    with pytest.raises(ConfigurationError, match=r"Nearest: moe\.router\.pre_softmax is False here"):
        config_to_transformers(replace(config, moe=replace(config.moe, router=router)))
