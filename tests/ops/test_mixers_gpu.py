"""Small kernels on a GPU: convolutions, gated norms, heads of latent attention, sums, gradients of embeddings."""

from __future__ import annotations

import pytest
import torch

from megalight.ops import causal_conv, delta_rule, embedding, gated_norm, latent_heads, sum_rows, sum_terms
from tests.ops.checks import (
    Kernels,
    check_causal_conv,
    check_delta_rule,
    check_delta_rule_continued,
    check_embedding_gradient,
    check_gated_norm,
    check_latent_heads,
    check_sum_rows,
    check_sum_terms,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("lengths", [[512], [5, 1, 260, 333], [1, 1, 1030], [126, 300]])
@pytest.mark.parametrize(("channels", "taps"), [(1000, 4), (70, 2), (64, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_causal_conv(lengths: list[int], channels: int, taps: int, dtype: torch.dtype) -> None:
    check_causal_conv(Kernels(causal_conv), "cuda", dtype, lengths, channels, taps)


@pytest.mark.parametrize("lengths", [[20], [512], [5, 1, 260, 333], [127, 1, 200], [1, 1, 64, 64]])
@pytest.mark.parametrize("sizes", [(4, 2, 128, 128), (6, 3, 100, 20), (2, 2, 64, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_delta_rule(lengths: list[int], sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    from megalight.ops.delta_rule import triton

    check_delta_rule(triton, "cuda", dtype, lengths, sizes)
    check_delta_rule_continued(triton, "cuda", dtype, lengths, sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_of_embeddings(dtype: torch.dtype) -> None:
    check_embedding_gradient(Kernels(embedding), "cuda", dtype)


@pytest.mark.parametrize(("count", "size"), [(0, 5), (1, 128), (4616, 4096), (4616, 3072), (999, 1000), (70_001, 24)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sum_rows(dtype: torch.dtype, count: int, size: int) -> None:
    check_sum_rows(Kernels(sum_rows), "cuda", dtype, count, size)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sum_terms(dtype: torch.dtype, ranks: int) -> None:
    check_sum_terms(Kernels(sum_terms), "cuda", dtype, torch.float32, ranks)
    check_sum_terms(Kernels(sum_terms), "cuda", dtype, dtype, ranks)


@pytest.mark.parametrize(("rows", "groups", "group"), [(999, 8, 1024), (4099, 3, 100), (70, 1, 8192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gated_norm(rows: int, groups: int, group: int, dtype: torch.dtype) -> None:
    check_gated_norm(Kernels(gated_norm), "cuda", dtype, rows, groups, group)


@pytest.mark.parametrize("sizes", [(128, 128, 64, 128), (5, 24, 10, 20), (18, 64, 32, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_latent_heads(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_latent_heads(Kernels(latent_heads), "cuda", dtype, *sizes)


def test_triton_is_chosen() -> None:
    half, exact = torch.bfloat16, torch.float64
    assert causal_conv.CAUSAL_CONV.select(causal_conv.CausalConvSpec("cuda", half, half, 4)).name == "triton"
    assert causal_conv.CAUSAL_CONV.select(causal_conv.CausalConvSpec("cuda", half, half, 9)).name == "reference"
    assert causal_conv.CAUSAL_CONV.select(causal_conv.CausalConvSpec("cuda", exact, exact, 4)).name == "reference"
    assert gated_norm.GATED_NORM.select(gated_norm.GatedNormSpec("cuda", half, half, 1024)).name == "triton"
    assert gated_norm.GATED_NORM.select(gated_norm.GatedNormSpec("cuda", half, half, 1024, True)).name == "reference"
    for op in (delta_rule.DELTA_RULE, delta_rule.CONTINUED):
        assert op.select(delta_rule.DeltaRuleSpec("cuda", half, 128, 128)).name == "triton"
        assert op.select(delta_rule.DeltaRuleSpec("cuda", half, 256, 128)).name == "reference"
        assert op.select(delta_rule.DeltaRuleSpec("cuda", torch.float32, 128, 128)).name == "reference"
