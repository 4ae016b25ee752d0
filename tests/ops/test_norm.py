from __future__ import annotations

import pytest
import torch

from megalight.errors import BackendError
from megalight.ops import norm
from megalight.ops.norm import native, reference
from tests.ops.checks import check_norms, error


@pytest.mark.parametrize("shape", [(63, 64), (5, 3, 500)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torch_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_norms(native, "cpu", dtype, shape)


def test_the_reference_is_the_formula() -> None:
    x, weight, bias = torch.randn(3, 7, dtype=torch.float64), torch.rand(7).double(), torch.rand(7).double()
    expected = torch.stack([row / ((row**2).sum() / 7 + 1e-3) ** 0.5 * weight for row in x])
    assert error(reference.rms_norm(x, weight, 1e-3), expected) < 1e-14
    expected = torch.stack([(row - row.mean()) / (row.var(correction=0) + 1e-3) ** 0.5 * weight + bias for row in x])
    assert error(reference.layer_norm(x, weight, bias, 1e-3), expected) < 1e-14


def test_references_pass_gradcheck() -> None:
    x, residual = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, w: reference.rms_norm(x, w, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(lambda x, w, b: reference.layer_norm(x, w, b, 1e-5), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda x, r, w: reference.add_rms_norm(x, r, w, 1e-5), (x, residual, weight))


def test_half_input_may_have_a_float32_weight() -> None:
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64)
    assert norm.rms_norm(x, weight, 1e-5).dtype == torch.bfloat16
    with pytest.raises(BackendError, match="needs a weight in the dtype of the input"):
        norm.rms_norm(x, weight, 1e-5, backend="torch")


def test_sum_equals_two_steps_bit_for_bit() -> None:
    x, residual, weight = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm.rms_norm(x + residual, weight, 1e-5))


def test_sum_refuses_mixed_types() -> None:
    with pytest.raises(ValueError, match="shape and dtype must be equal"):
        norm.add_rms_norm(torch.ones(2, 4), torch.ones(2, 4).bfloat16(), torch.ones(4), 1e-5)


def test_triton_says_what_it_lacks() -> None:
    rows = {b.name: why for b, why in norm.RMS_NORM.table(norm.Spec("cuda", torch.bfloat16, torch.bfloat16, 20000))}
    assert rows["triton"] == "serves rows of at most 16384 features, not 20000"
