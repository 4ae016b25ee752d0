"""DeepSeek-V3 of ``transformers`` in ours, beside what ``test_gpt_weights_matrix`` finds for every kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.inference import load_model
from megalight.models.gpt import MultiTokenConfig
from megalight.models.gpt.hugging_face import (
    config_from_transformers,
    config_to_transformers,
)
from megalight.models.gpt.model import MultiTokenTarget
from megalight.models.gpt.presets import preset
from megalight.models.hugging_face.export import export
from megalight.models.stored import held_model, open_model
from megalight.types import PackedSequences
from tests.models.beside_transformers import files_of, ours_of
from tests.support.reference_gpt import relative_error

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
    # 3 experts from 3 groups: a group is scored by more experts than are chosen from it
    "three_groups": {**SIZES, "num_experts_per_tok": 3, "topk_group": 3},
    # a score that stands alone is not normalized here
    "one_expert": {**SIZES, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
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


def depth_tensors(layer: Any, index: int) -> dict[str, Tensor]:
    """A depth of multi-token prediction as published files hold it: a further layer."""
    found, root = {}, f"model.layers.{index}."
    for key, tensor in layer.state_dict().items():
        name = root + key.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
        if "experts." in key and "shared" not in key:
            parts = zip(("gate", "up"), tensor.chunk(2, 1), strict=True) if "gate_up" in key else [("down", tensor)]
            for part, stack in parts:
                for number, expert in enumerate(stack):
                    found[f"{root}mlp.experts.{number}.{part}_proj.weight"] = expert.clone()
        else:
            found[name.replace(f"{root}post_norm", f"{root}shared_head.norm")] = tensor.clone()
    return found


@pytest.mark.parametrize("depths", [1, 2])
def test_multi_token_prediction(depths: int, tmp_path: Path) -> None:
    """Logits of each depth equal those of transformers, and folders hold the depths as further layers."""
    from transformers.modeling_layers import MtpModel

    # theirs gives depths the layers of the first indices, which must have experts like the last layer
    main = theirs("deepseek_v3", num_mtp_layers=depths, first_k_dense_replace=0)
    further = MtpModel(main, depths).double().eval()
    with torch.no_grad():
        for parameter in further.layers.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter) + (parameter.ndim == 1))
    files = files_of(main, tmp_path / "theirs")
    for k, layer in enumerate(further.layers):
        files |= depth_tensors(layer, 3 + k)
    for same, whole in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        files |= {f"model.layers.{3 + k}.{same}.weight": files[f"{whole}.weight"].clone() for k in range(depths)}
    save_file(files, tmp_path / "theirs" / "model.safetensors")
    stored = open_model(tmp_path / "theirs")
    assert stored.config.mtp == MultiTokenConfig(num_layers=depths)
    export(stored, tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == files.keys()
    assert all(torch.equal(back[key].double(), files[key].double()) for key in back)

    ours = load_model(tmp_path / "theirs", dtype=torch.float64)
    sequences, tokens = PackedSequences.of_uniform(1, 17), torch.randint(0, 53, (1, 17))
    hidden, places = main.model(tokens).last_hidden_state, torch.arange(17)[None]
    mask = torch.full((17, 17), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    later = []
    for k, layer in enumerate(further.layers, 1):
        ids = tokens.roll(-k, 1)
        embedded = further.embed_tokens(ids)
        hidden = layer(embedded, hidden, further.rotary_emb(embedded, position_ids=places), mask, places, None)
        wanted = torch.log_softmax(further.shared_head(hidden), -1)[0]
        later.append(MultiTokenTarget(ids[0], torch.randint(0, 53, (17,))))
        found = ours(tokens[0], sequences, labels=tokens[0], later=[*later, *later[-1:] * (depths - k)]).depths[k - 1]
        assert relative_error(found, -wanted.gather(1, later[-1].labels[:, None])[:, 0]) < 2e-6


def test_folders_hold_the_expert_bias(tmp_path: Path) -> None:
    """It is a buffer, and stays float32 in a folder of bfloat16; tensors of depths that a model lacks are left out."""
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


def test_folders_may_lack_depths(tmp_path: Path) -> None:
    """Theirs writes their number, but not their tensors."""
    files_of(theirs("deepseek_v3", num_mtp_layers=1), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert open_model(tmp_path).config.mtp is None
    assert load_model(tmp_path).mtp is None


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
    "num_nextn_predict_layers": 1,
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
    "num_nextn_predict_layers": 0,
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
        ("num_experts_per_tok", 1, "norm_topk_prob is True; only False"),
        ("scoring_func", "softmax", "scoring_func is 'softmax'; only 'sigmoid'"),
    ],
)
def test_options_without_counterpart(option: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config_from_transformers({**DEEPSEEK, option: value})
