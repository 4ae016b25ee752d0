"""Qwen3-Next of ``transformers`` in ours, beside what ``test_gpt_weights_matrix`` finds for every kind."""

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
from megalight.models.gpt.hugging_face import (
    config_from_transformers,
    config_to_transformers,
    weight_map,
)
from megalight.models.hugging_face.export import export
from megalight.models.hugging_face.weights import RowBlocks, TensorMapping
from megalight.models.stored import open_model, save_model
from megalight.nn.canonical import canonical_tensors
from tests.models.beside_transformers import files_of, ours_of

transformers = pytest.importorskip("transformers")
from transformers.models.qwen3_next import modeling_qwen3_next  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 3,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
    "use_cache": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": SIZES,
    "some_dense": {**SIZES, "mlp_only_layers": [1], "norm_topk_prob": False, "tie_word_embeddings": True},
    "dense": {
        **SIZES,
        "num_experts": 0,
        "layer_types": ["full_attention", "linear_attention"] * 2,
        "linear_num_key_heads": 6,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
}


def theirs(name: str, **options: Any) -> Any:
    torch.manual_seed(1)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**{**MODELS[name], **options}, **eager))
    with torch.no_grad():
        for key, parameter in model.double().named_parameters():
            if parameter.ndim == 1 and not key.endswith("A_log"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


class Wide:
    """torch, with float64 in place of float32: they compute the delta rule in float32 for any dtype."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


def exact(patch: pytest.MonkeyPatch) -> None:
    """Let theirs compute in float64."""
    patch.setattr(modeling_qwen3_next, "torch", Wide())
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)


def test_folders_are_streamed(tmp_path: Path) -> None:
    """Through a checkpoint and back; what a model does not have is left out."""
    files = files_of(theirs("qwen3_next").to(torch.bfloat16), tmp_path / "theirs")
    save_file({**files, "mtp.fc.weight": torch.ones(2, 2)}, tmp_path / "theirs" / "model.safetensors")
    save_model(open_model(tmp_path / "theirs"), tmp_path / "ours.ckpt")
    export(open_model(tmp_path / "ours.ckpt"), tmp_path / "out")
    export(open_model(tmp_path / "theirs"), tmp_path / "at-once")
    for name in ("out", "at-once"):
        back = load_file(tmp_path / name / "model.safetensors")
        assert back.keys() == files.keys()
        assert all(torch.equal(back[key], files[key]) for key in back)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert type(loaded).__name__ == "Qwen3NextForCausalLM"


def test_any_box_of_rows_in_blocks_is_read() -> None:
    rows, fused = RowBlocks(start=2, size=3, stride=7, count=3), torch.arange(21.0 * 2).view(21, 2)
    place, read = TensorMapping("x", rows), []

    def fill(offset: Any, data: Tensor) -> None:
        read.append(data.numel())
        data.copy_(fused[tuple(slice(at, at + size) for at, size in zip(offset, data.shape, strict=True))])

    whole = place.part(fused)
    assert whole[:, 0].tolist() == [2 * row for row in (2, 3, 4, 9, 10, 11, 16, 17, 18)]
    assert (len(rows), rows.stop, place.shape((21, 2))) == (9, 19, (9, 2))
    for first in range(9):
        for last in range(first + 1, 10):
            data, read[:] = torch.empty(last - first, 1), []
            place.read(fill, (first, 1), data)
            assert torch.equal(data, whole[first:last, 1:])
            assert sum(read) == data.numel(), "rows of other tensors are not read"


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    ours, _ = ours_of(theirs("qwen3_next"), tmp_path)
    tensors = dict(canonical_tensors(ours))
    del tensors["layers.0.delta.z.weight"]
    with pytest.raises(Exception, match=r"in_proj_qkvz\.weight is made of parts, and layers\.0\.delta\.z\.weight"):
        weight_map(ours.config).write(tensors)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0; it must be at least 1"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types has no linear_attention"),
        (
            {"layer_types": ["chunked_attention", "linear_attention"]},
            "layer_types has chunked_attention; models of qwen3_next have linear_att",
        ),
    ],
)
def test_options_without_counterpart(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config_from_transformers({**theirs("qwen3_next").config.to_dict(), **options})


def test_models_that_are_no_qwen3_next_are_not_written() -> None:
    config = config_from_transformers(json.loads(theirs("qwen3_next").config.to_json_string()))
    assert config.moe is not None
    short = replace(config, mixer_pattern=("gated_delta_net",) * 3 + ("attention",))
    assert config_to_transformers(short) == config_to_transformers(config)
    with pytest.raises(ConfigurationError, match="Nearest: a model of qwen3_next has attention and gated_delta_net as"):
        config_to_transformers(replace(config, moe=replace(config.moe, shared=None)))
    with pytest.raises(ConfigurationError, match=r"Nearest: norm\.around_zero is False here"):
        config_to_transformers(replace(config, norm=replace(config.norm, around_zero=False)))
