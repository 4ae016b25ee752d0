"""Models with experts of ``transformers`` in ours, beside what ``test_gpt_weights_matrix`` finds for every kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.models.gpt.hugging_face import (
    config_from_transformers,
    config_to_transformers,
)
from megalight.models.gpt.presets import preset
from megalight.nn.aux_losses import KeptAuxLosses, collecting
from megalight.nn.moe import BalanceConfig
from megalight.types import PackedSequences
from tests.models.beside_transformers import ours_of
from tests.models.test_gpt_hugging_face import SIZES
from tests.support.reference_gpt import relative_error

transformers = pytest.importorskip("transformers")

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
EXPERTS = {**SIZES, "num_experts": 5, "num_experts_per_tok": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 8, "moe_intermediate_size": 12, "norm_topk_prob": True}),
    "qwen3_moe_some": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 8, "moe_intermediate_size": 12, "norm_topk_prob": False, "mlp_only_layers": [0]},
    ),
    "olmoe": ("Olmoe", {**EXPERTS, "pad_token_id": None, "eos_token_id": 2}),
}


def theirs(name: str, **options: Any) -> Any:
    family, sizes = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**sizes, **options}, **EAGER)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
def test_equal_balance_loss(name: str, tmp_path: Path) -> None:
    """Theirs is ``top_k`` times ours, and over the tokens of all layers at once: compare one layer."""
    model = theirs(name, num_hidden_layers=1)
    ours, _ = ours_of(model, tmp_path)
    tokens = torch.randint(0, 53, (2, 15))
    expected = model(tokens, labels=tokens, output_router_logits=True).aux_loss
    ours.layers["0"].mlp.router.balance = BalanceConfig(aux_loss=1.0)
    with collecting(KeptAuxLosses()) as kept:
        ours(tokens.flatten(), PackedSequences.of_uniform(2, 15))
    assert ours.config.moe is not None
    found = kept.values["router_aux_loss"] * ours.config.moe.router.top_k
    assert relative_error(found, expected.to(found.dtype)) < 2e-6


def test_presets_are_the_published_configurations() -> None:
    def same(name: str, values: dict[str, Any]) -> None:
        found, expected = config_from_transformers(values).to_dict(), preset(name).to_dict()
        assert expected["moe"].pop("balance") != found["moe"].pop("balance")
        assert found == expected

    common = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}
    mixtral = {**common, "model_type": "mixtral", "num_key_value_heads": 8, "rope_theta": 1e6, "vocab_size": 32000}
    mixtral |= {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    same("mixtral_8x7b", {**mixtral, **sizes, "max_position_embeddings": 32768})
    sizes = {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48}
    same("mixtral_8x22b", {**mixtral, **sizes, "max_position_embeddings": 65536})
    qwen = {**common, "model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936}
    qwen |= {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
    qwen |= {"mlp_only_layers": [], "head_dim": 128, "num_key_value_heads": 4, "max_position_embeddings": 40960}
    qwen |= {"use_sliding_window": False, "sliding_window": None, "attention_bias": False}
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
    same("qwen3_30b_a3b", {**qwen, **sizes, "moe_intermediate_size": 768})
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64}
    same("qwen3_235b_a22b", {**qwen, **sizes, "moe_intermediate_size": 1536})
    olmoe = {**common, "model_type": "olmoe", "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False}
    olmoe |= {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16}
    olmoe |= {"num_key_value_heads": 16, "vocab_size": 50304, "max_position_embeddings": 4096, "rope_theta": 10000.0}
    same("olmoe_1b_7b", {**olmoe, "clip_qkv": None, "attention_bias": False})


def test_options_without_counterpart() -> None:
    values = {**theirs("olmoe").config.to_dict(), "clip_qkv": 8.0}
    with pytest.raises(ConfigurationError, match=r"clip_qkv is 8.0; it has no counterpart"):
        config_from_transformers(values)
    config = config_from_transformers({**values, "clip_qkv": None})
    with pytest.raises(ConfigurationError, match="6 heads of 5 features stand beside 24"):
        config_to_transformers(replace(config, head_dim=5), "olmoe")
