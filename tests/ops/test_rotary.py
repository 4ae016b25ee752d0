from __future__ import annotations

import math

import pytest
import torch

from megalight.ops import rotary
from megalight.ops.rotary import RotaryScaling, apply_rotary, reference, rotary_table, rotate_qkv
from tests.ops.checks import check_rotary, error


@pytest.mark.parametrize(("head_dim", "dim"), [(8, 8), (10, 6)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_public_calls_equal_the_reference(head_dim: int, dim: int, interleaved: bool, dtype: torch.dtype) -> None:
    check_rotary(rotary, "cpu", dtype, 63, 4, 2, head_dim, dim, interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_complex_product(interleaved: bool) -> None:
    positions = torch.tensor([0.0, 3.0, 100.0], dtype=torch.float64)
    cos, sin = rotary_table(positions, 6, 10000.0)
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    angles = torch.stack([positions * 10000.0 ** (-2 * i / 6) for i in range(3)], 1)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + 3) for i in range(3)]
    expected = x.clone()
    for i, (a, b) in enumerate(pairs):
        turned = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones(3).double(), angles[:, i])[:, None]
        expected[..., a], expected[..., b] = turned.real, turned.imag
    assert error(apply_rotary(x, cos, sin, interleaved), expected) < 1e-14


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64).expand(2, 5, 1, 8)
    tables = [rotary_table(torch.arange(5).double() + shift, 8, 100.0) for shift in (0, 1000)]
    scores = [apply_rotary(q, *t)[3, 0] @ apply_rotary(k, *t)[1, 0] for t in tables]
    assert math.isclose(scores[0], scores[1], rel_tol=1e-10)


def test_reference_passes_gradcheck() -> None:
    cos, sin = rotary_table(torch.arange(3).double(), 4, 10.0)
    qkv = torch.randn(3, 4 * 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reference.rotate_qkv(x, 2, 1, 6, cos, sin), (qkv,))


def test_packed_equals_separate() -> None:
    cos, sin = rotary_table(torch.arange(5), 8, 10.0)
    q, k, v = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    out = rotate_qkv(torch.cat([t.flatten(1) for t in (q, k, v)], 1), 4, 2, 8, cos, sin)
    for actual, expected in zip(out, (apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v), strict=True):
        assert torch.equal(actual, expected)


def test_table_is_exact_far_out_and_float32() -> None:
    cos, _ = rotary_table(torch.tensor([1_000_003]), 64, 500000.0)
    assert cos.dtype == torch.float32
    assert cos[0, 0].item() == pytest.approx(math.cos(1_000_003), abs=1e-7)
    assert rotary_table(torch.tensor([1.0]).double(), 64, 1e4)[0].dtype == torch.float64


def test_llama3_scaling_equals_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, max_position_embeddings=131072, rope_parameters=scaling)
    frequencies = LlamaRotaryEmbedding(config).inv_freq
    sin = rotary_table(torch.tensor([1.0]).double(), 64, 500000.0, RotaryScaling("llama3", 32.0))[1]
    assert error(sin[0].asin()[1:], frequencies[1:]) < 1e-6


def test_linear_scaling_is_interpolation() -> None:
    ours = rotary_table(torch.tensor([40.0]).double(), 8, 1e4, RotaryScaling("linear", 4.0))
    assert torch.equal(ours[0], rotary_table(torch.tensor([10.0]).double(), 8, 1e4)[0])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="rotary dim is 7"):
        rotary_table(torch.arange(3), 7, 1e4)
    with pytest.raises(ValueError, match="at least 1"):
        RotaryScaling(factor=0.5)
    with pytest.raises(ValueError, match="must be above 0 and below"):
        RotaryScaling(low_frequency_factor=4.0)
    with pytest.raises(ValueError, match="choose linear or llama3"):
        RotaryScaling("yarn")  # type: ignore[arg-type]
