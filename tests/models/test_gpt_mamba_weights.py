"""Mamba-2 and Nemotron-H of ``transformers`` in ours, beside what ``test_gpt_weights_matrix`` finds for every kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.gpt.hugging_face import (
    config_from_transformers,
    config_to_transformers,
    from_transformers,
)
from megalight.models.gpt.presets import preset
from megalight.models.hugging_face.export import export
from megalight.models.stored import open_model
from tests.models.beside_transformers import ours_of

transformers = pytest.importorskip("transformers")

MAMBA2: dict[str, Any] = {
    "vocab_size": 53, "hidden_size": 24, "num_heads": 6, "head_dim": 8, "state_size": 5, "n_groups": 2,
    "num_hidden_layers": 3, "chunk_size": 8, "initializer_range": 0.2,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "vocab_size": 53, "hidden_size": 24, "intermediate_size": 40, "hybrid_override_pattern": "ME*-M",
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 7, "max_position_embeddings": 64,
    "mamba_num_heads": 6, "mamba_head_dim": 5, "ssm_state_size": 4, "n_groups": 2, "chunk_size": 32,
    "n_routed_experts": 8, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 10,
    "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    "initializer_range": 0.2, "use_mamba_kernels": False, "time_step_min": 1e-6, "use_cache": False,
}  # fmt: skip
"""One chunk holds a sequence: from the second chunk on, their scan without kernels sums states along a wrong dim.
It also cuts off steps below ``time_step_min``, which their kernels and published models do not. Their cache knows no
MLP."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2", MAMBA2),
    "mamba2_tied": ("Mamba2", {**MAMBA2, "tie_word_embeddings": True, "use_conv_bias": False, "n_groups": 1}),
    "nemotron_h": ("NemotronH", NEMOTRON),
    "nemotron_h_groups": ("NemotronH", {**NEMOTRON, "num_experts_per_tok": 2}),  # more experts score a group than 2 / 2
    "nemotron_h_one": (
        "NemotronH",
        {**NEMOTRON, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "nemotron_h_dense": ("NemotronH", {**NEMOTRON, "hybrid_override_pattern": "M-M*-M"}),
}


def theirs(name: str, **options: Any) -> Any:
    torch.manual_seed(1)
    kind, values = MODELS[name]
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"} if kind == "NemotronH" else {}
    config = getattr(transformers, f"{kind}Config")(**{**values, **options}, **eager)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.ndim == 1:
                tensor.add_(0.2 * torch.randn_like(tensor))
            if key.endswith("e_score_correction_bias"):  # float32, as ours
                tensor.copy_(tensor.float())
    return model


def published(tensors: dict[str, Any]) -> dict[str, Any]:
    """The names of published files: their own writer spells one name of Nemotron-H as no reader of before knew it."""
    return {key.replace("embedding.weight", "embeddings.weight"): tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["mamba2_tied", "nemotron_h"])
def test_folders(name: str, tmp_path: Path) -> None:
    """Parts of fused tensors are read box by box, and ``transformers`` loads what is written."""
    model = theirs(name)
    _, files = ours_of(model, tmp_path / "theirs")
    export(open_model(tmp_path / "theirs"), tmp_path / "out")
    found, files = load_file(tmp_path / "out" / "model.safetensors"), published(files)
    assert found.keys() == files.keys()
    assert all(torch.equal(found[key], files[key]) for key in found)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert type(loaded) is type(model)
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key].double(), tensor.double()), key


def test_names_of_other_layers_are_refused() -> None:
    config = config_from_transformers({**theirs("nemotron_h_dense").config.to_dict()})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mixer\.fc1\.weight has no counterpart"):
        from_transformers({"backbone.layers.0.mixer.fc1.weight": torch.ones(2, 2)}, config)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mamba2", {"use_bias": True}, "use_bias is True; only False"),
        ("mamba2", {"time_step_limit": [0.01, 1.0]}, r"time_step_limit is \[0.01, 1.0\]"),
        ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size is 8"),
        ("nemotron_h", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("nemotron_h_one", {"norm_topk_prob": True}, "norm_topk_prob is True; only False"),
    ],
)
def test_options_without_a_counterpart(name: str, options: dict[str, Any], message: str) -> None:
    kind, values = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**values, **options})
    with pytest.raises(ConfigurationError, match=message):
        config_from_transformers(config.to_dict())


def test_what_no_kind_can_say() -> None:
    config = preset("nemotron_h_8b")
    with pytest.raises(ConfigurationError, match=r"Nearest: position\.kind is rope here and none"):
        config_to_transformers(replace(config, position=replace(config.position, kind="rope")))
    assert config.mamba is not None
    with pytest.raises(ConfigurationError, match=r"mamba\.norm_eps is 0\.01 here and None"):
        config_to_transformers(replace(config, mamba=replace(config.mamba, norm_eps=0.01)))


@pytest.mark.parametrize("name", ["mamba2_130m", "mamba2_2_7b", "nemotron_h_8b", "nemotron3_nano_30b_a3b"])
def test_presets_are_written(name: str) -> None:
    values = config_to_transformers(preset(name))
    assert values["model_type"] == ("mamba2" if name.startswith("mamba2") else "nemotron_h")


def test_the_older_word_for_the_size_of_heads() -> None:
    values = config_to_transformers(preset("nemotron_h_8b"))
    older = {"attention_head_dim": values.pop("head_dim"), **values}
    assert config_from_transformers(older) == preset("nemotron_h_8b")
