from __future__ import annotations

import pytest
import torch

from megalight.ops.activation import KINDS
from tests.ops.checks import check_activations, check_cast_activation, check_gaps, check_gated_pair, check_measured

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(63, 64), (500, 1000), (10, 7, 333), (1000, 14336)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_equals_the_reference(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from megalight.ops.activation import triton

    check_activations(triton, "cuda", dtype, shape, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_equal_the_reference(kind: str, dtype: torch.dtype) -> None:
    from megalight.ops.activation import triton as pair

    check_gated_pair(pair.gated_pair, "cuda", dtype, (1000, 333), kind)


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize("kind", ["silu", "squared_relu"])
def test_amax_on_the_way(kind: str, gates: bool) -> None:
    from megalight.ops.activation import triton

    check_measured(triton, "cuda", torch.bfloat16, kind, gates)


@pytest.mark.parametrize("gates", [True, False])
def test_rows_with_gaps(gates: bool) -> None:
    from megalight.ops.activation import triton

    check_gaps(triton, "cuda", "silu", gates)


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "sigmoid"])
@pytest.mark.parametrize("shape", [(150, 144), (37, 272), (1024, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_values_are_those_of_a_cast(
    kind: str, gates: bool, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    from megalight.ops.activation import quantized as quantized_kernels
    from megalight.ops.activation import triton
    from megalight.ops.quantize import triton as casts

    check_cast_activation(quantized_kernels, triton, casts, "cuda", dtype, shape, kind, gates)
