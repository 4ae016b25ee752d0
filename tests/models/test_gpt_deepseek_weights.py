"""DeepSeek-V3 of ``transformers`` in ours: equal logits, losses and gradients, and the way back."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalight.errors import ConfigurationError
from megalight.models.export import export
from megalight.models.gpt.presets import preset
from megalight.models.gpt.state_dict import (
    config_from_transformers,
    config_to_transformers,
    to_transformers,
)
from megalight.models.stored import held_model, open_model
from megalight.nn.canonical import canonical_tensors
from tests.models.beside_transformers import assert_equal, ours_of

transformers = pytest.importorskip("transformers")

YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.8,
    "mscale_all_dim": 1.2,
}
SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "qk_nope_head_dim": 6,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rope_parameters": YARN,
    "num_mtp_layers": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": SIZES,
    "kimi_like": {
        **SIZES,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
}


def theirs(name: str, **options: Any) -> Any:
    torch.manual_seed(1)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = transformers.DeepseekV3Config(**{**MODELS[name], **options}, **eager)
    model = transformers.DeepseekV3ForCausalLM(config).double()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.ndim == 1:
                tensor.add_(0.2 * torch.randn_like(tensor))
            if key.endswith("e_score_correction_bias"):  # float32, as ours
                tensor.copy_(tensor.float())
    return model


@pytest.mark.parametrize("name", MODELS)
def test_equal_logits_losses_and_gradients(name: str, tmp_path: Path) -> None:
    assert_equal(theirs(name), tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    ours, files = ours_of(model, tmp_path)
    back = to_transformers(canonical_tensors(ours), ours.config)
    assert back.keys() == files.keys()
    assert all(torch.equal(back[key].double(), files[key].double()) for key in back)
    values = config_to_transformers(ours.config)
    assert values["model_type"] == "deepseek_v3"
    again = type(model.config)(**copy.deepcopy(values))  # it changes what it is given
    assert config_to_transformers(config_from_transformers(again.to_dict())) == values


def test_folders_hold_the_expert_bias(tmp_path: Path) -> None:
    """It is a buffer, and stays float32 in a folder of bfloat16; tensors of multi-token prediction are left out."""
    model = theirs("deepseek_v3")
    ours, files = ours_of(model, tmp_path / "theirs")
    save_file({**files, "model.layers.3.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "theirs" / "model.safetensors")
    stored = open_model(tmp_path / "theirs")
    assert stored.config == ours.config
    export(stored, tmp_path / "out", dtype=torch.bfloat16)
    export(held_model("gpt", ours.config, ours), tmp_path / "held", dtype=torch.bfloat16)
    found, held = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "held"))
    assert found.keys() == held.keys() == files.keys()
    for key, tensor in found.items():
        wanted = torch.float32 if key.endswith("e_score_correction_bias") else torch.bfloat16
        assert torch.equal(tensor, files[key].to(tensor.dtype)), key
        assert torch.equal(tensor, held[key].to(tensor.dtype)), key
        assert held[key].dtype == wanted, key
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == "DeepseekV3ForCausalLM"


@pytest.mark.parametrize("key", ["num_experts_per_tok", "first_k_dense_replace"])
def test_what_a_configuration_lacks_is_named(key: str) -> None:
    values = theirs("deepseek_v3").config.to_dict()
    del values[key]
    with pytest.raises(ConfigurationError, match=f"lacks '{key}'"):
        config_from_transformers(values)


def test_models_that_are_no_deepseek_are_not_written() -> None:
    config = config_from_transformers(theirs("deepseek_v3").config.to_dict())
    with pytest.raises(ConfigurationError, match="Nearest: a model of deepseek_v3 has experts, one of them shared"):
        config_to_transformers(replace(config, moe=None))
    assert config.moe is not None
    other = replace(config, moe=replace(config.moe, pattern=(True, False, True)))
    with pytest.raises(ConfigurationError, match=r"Nearest: moe\.pattern is \[True, False, True\] here"):
        config_to_transformers(other)


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
KIMI = {
    **DEEPSEEK,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": {**DEEPSEEK["rope_scaling"], "beta_fast": 1.0, "factor": 32.0},
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(("name", "values"), [("deepseek_v3", DEEPSEEK), ("kimi_k2", KIMI)])
def test_presets_are_the_published_configurations(name: str, values: dict[str, Any]) -> None:
    found, expected = config_from_transformers(values), preset(name)
    assert found.moe is not None
    assert expected.moe is not None
    assert replace(found, moe=replace(found.moe, balance=expected.moe.balance)) == expected


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("attention_bias", True, "attention_bias is True; only False"),
        ("norm_topk_prob", False, "norm_topk_prob is False; only True"),
        ("scoring_func", "softmax", "scoring_func is 'softmax'; only 'sigmoid'"),
        ("topk_group", 2, "their groups are scored by 2 experts, ours by num_experts_per_tok / topk_group = 4"),
    ],
)
def test_options_without_counterpart(option: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config_from_transformers({**DEEPSEEK, option: value})
