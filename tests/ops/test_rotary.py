from __future__ import annotations

import math

import pytest
import torch

from megalight.ops import rotary
from megalight.ops.rotary import RotaryScaling, apply_rotary, rotary_table, rotate_qkv
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
    assert torch.autograd.gradcheck(lambda x: rotary.reference_rotate_qkv(x, 2, 1, 6, cos, sin), (qkv,))


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


@pytest.mark.parametrize("round_range", [True, False])
@pytest.mark.parametrize("mscales", [(None, None), (0.7, 1.3)])
def test_yarn_equals_transformers(round_range: bool, mscales: tuple[float | None, float | None]) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": round_range}
    values |= {"original_max_position_embeddings": 4096, "mscale": mscales[0], "mscale_all_dim": mscales[1]}
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, max_position_embeddings=131072, rope_parameters=values)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    scaling = RotaryScaling(
        "yarn", 32.0, original_length=4096, round_range=round_range, mscale=mscales[0], mscale_all_dim=mscales[1]
    )
    assert error(scaling.frequencies(64, 150000.0), frequencies.double()) < 1e-6
    assert scaling.concentration == pytest.approx(factor, rel=1e-12)
    # both tables have the factor
    found = rotary_table(torch.tensor([3.0]).double(), 64, 150000.0, scaling)
    assert error((found[0] ** 2 + found[1] ** 2).sqrt(), torch.full((1, 32), factor, dtype=torch.float64)) < 1e-12


def test_yarn_golden_numbers() -> None:
    """Published models: GPT-OSS, DeepSeek-V3, Kimi-K2."""
    oss = RotaryScaling("yarn", 32.0, original_length=4096, round_range=False)
    assert oss.correction_range(64, 150000.0) == (pytest.approx(8.09278, abs=1e-5), pytest.approx(17.39802, abs=1e-5))
    assert oss.concentration == pytest.approx(1.3465736, abs=1e-7)
    assert oss.score_factor == 1.0
    deepseek = RotaryScaling("yarn", 40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0)
    assert deepseek.correction_range(64, 10000.0) == (10, 23)
    exact = RotaryScaling("yarn", 40.0, original_length=4096, round_range=False).correction_range(64, 10000.0)
    assert exact == (pytest.approx(10.4722, abs=1e-4), pytest.approx(22.5134, abs=1e-4))
    assert deepseek.concentration == 1.0
    assert deepseek.score_factor == pytest.approx(1.873854, abs=1e-6)
    assert deepseek.score_factor / math.sqrt(192) == pytest.approx(0.1352338, abs=1e-7)
    kimi = RotaryScaling("yarn", 32.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0)
    assert kimi.correction_range(64, 50000.0) == (8, 20)
    assert RotaryScaling("yarn", 32.0, original_length=4096, beta_fast=1.0).correction_range(64, 50000.0) == (19, 20)
    assert kimi.score_factor / math.sqrt(192) == pytest.approx(0.1308608, abs=1e-7)


def test_yarn_range_stays_within_its_limits() -> None:
    """The upper limit is one below the number of features, not of pairs; and an empty range becomes a step."""
    assert RotaryScaling("yarn", 4.0, original_length=10**6, beta_fast=2e5).correction_range(8, 10.0) == (0, 7)
    step = RotaryScaling("yarn", 4.0, original_length=2**20, beta_fast=1.0, round_range=False)
    found = step.frequencies(8, 4.0)
    assert found.isfinite().all()
    assert torch.equal(found, 4.0 ** -(torch.arange(4).double() / 4))  # above the range: kept


def test_ntk_scaling_keeps_the_fastest_and_slows_the_slowest() -> None:
    found = RotaryScaling("ntk", 8.0).frequencies(16, 1e4)
    plain = 1e4 ** -(torch.arange(8).double() / 8)
    assert found[0] == 1.0
    assert found[-1].item() == pytest.approx(plain[-1].item() / 8, rel=1e-12)
    assert error(found, (1e4 * 8 ** (16 / 14)) ** -(torch.arange(8).double() / 8)) < 1e-14
    with pytest.raises(ValueError, match="at least 4 rotated features"):
        RotaryScaling("ntk", 8.0).frequencies(2, 1e4)


def test_linear_scaling_is_interpolation() -> None:
    ours = rotary_table(torch.tensor([40.0]).double(), 8, 1e4, RotaryScaling("linear", 4.0))
    assert torch.equal(ours[0], rotary_table(torch.tensor([10.0]).double(), 8, 1e4)[0])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="rotary dim is 7"):
        rotary_table(torch.arange(3), 7, 1e4)
    with pytest.raises(ValueError, match="at least 1"):
        RotaryScaling(factor=0.5)
    with pytest.raises(ValueError, match="must be above 0 and at most the second"):
        RotaryScaling(low_frequency_factor=5.0)
    with pytest.raises(ValueError, match=r"choose linear, ntk, dynamic, llama3, yarn\. Did you mean 'yarn'"):
        RotaryScaling("yarns")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="original_length is 0"):
        RotaryScaling("yarn", original_length=0)
    with pytest.raises(ValueError, match=r"beta_slow is 2.0 and beta_fast is 1.0"):
        RotaryScaling("yarn", beta_fast=1.0, beta_slow=2.0)
    with pytest.raises(ValueError, match="mscale_all_dim is -1"):
        RotaryScaling("yarn", mscale_all_dim=-1.0)
