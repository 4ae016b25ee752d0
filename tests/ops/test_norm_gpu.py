from __future__ import annotations

import pytest
import torch

from megalight.ops import norm
from tests.ops.checks import check_measured_norms, check_norms, check_norms_main_gradients, check_sums_of_measured

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(63, 64), (500, 3, 128), (1000, 1000), (500, 4096), (63, 14336), (9000, 63)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from megalight.ops.norm import triton

    check_norms(triton, "cuda", dtype, shape)


@pytest.mark.parametrize("shape", [(63, 64), (500, 3, 128), (5000, 4096), (63, 14336)])
def test_amax_on_the_way(shape: tuple[int, ...]) -> None:
    from megalight.ops.norm import triton

    check_measured_norms(triton, "cuda", torch.bfloat16, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_gradients(dtype: torch.dtype) -> None:
    from megalight.ops.norm import triton

    check_norms_main_gradients(triton, "cuda", dtype, (500, 256))


def test_amax_of_sums() -> None:
    from megalight.ops.activation import triton as activations
    from megalight.ops.norm import triton

    check_sums_of_measured(triton, activations, "cuda", torch.bfloat16)


def test_mixed_types() -> None:
    from megalight.ops.norm import triton

    check_norms(triton, "cuda", torch.bfloat16, (500, 4096), weight_dtype=torch.float32)


def test_triton_is_chosen() -> None:
    x, weight = torch.randn(4, 64, device="cuda").bfloat16(), torch.ones(64, device="cuda").bfloat16()
    spec = norm.NormSpec("cuda", x.dtype, weight.dtype, 64)
    for registry in norm.REGISTRIES:
        assert registry.select(spec).name == "triton"
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5, backend="reference"))


def test_no_rows() -> None:
    x = torch.ones(0, 64, device="cuda", requires_grad=True)
    weight = torch.ones(64, device="cuda", requires_grad=True)
    norm.rms_norm(x, weight, 1e-5, backend="triton").sum().backward()
    assert weight.grad is not None
    assert bool((weight.grad == 0).all())
