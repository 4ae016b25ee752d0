from __future__ import annotations

import pytest
import torch

from tests.ops.checks import check_cast_qkv_gradient, check_measured_rotary, check_rotary

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [63, 500, 1000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dim"),
    [(32, 8, 128, 128), (4, 2, 64, 64), (5, 1, 80, 32), (3, 3, 66, 50), (96, 8, 128, 128)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_triton_equals_the_reference(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dim: int, dtype: torch.dtype, interleaved: bool
) -> None:
    from megalight.ops.rotary import triton

    check_rotary(triton, "cuda", dtype, tokens, heads, kv_heads, head_dim, dim, interleaved)


@pytest.mark.parametrize("shape", [(32, 8, 128, 128), (5, 1, 80, 32), (3, 3, 66, 50)])
def test_amax_on_the_way(shape: tuple[int, int, int, int]) -> None:
    from megalight.ops.rotary import triton

    check_measured_rotary(triton, "cuda", torch.bfloat16, shape)


@pytest.mark.parametrize("shape", [(150, 8, 2, 64), (1024, 32, 8, 128), (37, 5, 1, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_values_are_those_of_a_cast(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    from megalight.ops.quantize import triton as casts
    from megalight.ops.rotary import quantized as quantized_kernels
    from megalight.ops.rotary import triton

    check_cast_qkv_gradient(quantized_kernels, triton, casts, "cuda", dtype, shape)


def test_strided_heads() -> None:
    """Heads that are views of a packed projection need no copy."""
    from megalight.ops import rotary as reference
    from megalight.ops.rotary import rotary_table, triton

    cos, sin = rotary_table(torch.arange(63, device="cuda"), 64, 1e4)
    packed = torch.randn(63, 6, 64, device="cuda")
    out = triton.apply_rotary(packed[:, 2:5], cos, sin)
    torch.testing.assert_close(out, reference.reference_apply_rotary(packed[:, 2:5], cos, sin))
