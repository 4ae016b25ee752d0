from __future__ import annotations

from typing import Any

import pytest
import torch

from megalight.errors import BackendError
from megalight.ops import norm
from megalight.ops.common import whole_why_not
from megalight.ops.gated_norm import GATED_NORM, gated_norm
from megalight.ops.norm import reference_add_rms_norm, reference_layer_norm, reference_rms_norm
from megalight.registry import Backend
from tests.ops.checks import check_norms, error


@pytest.mark.parametrize("shape", [(63, 64), (5, 3, 500)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torch_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_norms(norm, "cpu", dtype, shape)


def test_the_reference_is_the_formula() -> None:
    x, weight, bias = torch.randn(3, 7, dtype=torch.float64), torch.rand(7).double(), torch.rand(7).double()
    expected = torch.stack([row / ((row**2).sum() / 7 + 1e-3) ** 0.5 * weight for row in x])
    assert error(reference_rms_norm(x, weight, 1e-3), expected) < 1e-14
    expected = torch.stack([(row - row.mean()) / (row.var(correction=0) + 1e-3) ** 0.5 * weight + bias for row in x])
    assert error(reference_layer_norm(x, weight, bias, 1e-3), expected) < 1e-14


def test_references_pass_gradcheck() -> None:
    x, residual = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, w: reference_rms_norm(x, w, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(lambda x, w, b: reference_layer_norm(x, w, b, 1e-5), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda x, r, w: reference_add_rms_norm(x, r, w, 1e-5), (x, residual, weight))


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
    rows = {b.name: why for b, why in norm.RMS_NORM.table(norm.NormSpec("cuda", torch.bfloat16, torch.bfloat16, 20000))}
    assert rows["triton"] == "serves rows of at most 16384 features, not 20000"


def test_a_named_backend_that_cannot_norm_a_divided_row_raises() -> None:
    """Two halves of a row, whose mean squares meet in the middle: only the reference has a place for that."""
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.rand(8).double()
    meet = lambda mean: (mean + x[:, 4:].square().mean(-1, keepdim=True)) / 2  # noqa: E731
    half = x[:, :4], weight[:4], 1e-5
    for backend in ("auto", "auto+amax", "reference"):
        found = norm.rms_norm(*half, backend=backend, average=meet)
        torch.testing.assert_close(found, reference_rms_norm(x, weight, 1e-5)[:, :4])
    for backend in ("torch", "torch+amax", "triton"):
        with pytest.raises(BackendError, match=r"cannot serve.*norms whole rows.*reference: can serve"):
            norm.rms_norm(*half, backend=backend, average=meet)
    assert norm.rms_norm(*half, backend="torch").shape == (3, 4)


def test_a_named_backend_that_cannot_norm_a_divided_group_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    fused: Backend[Any, Any] = Backend(
        "fused", lambda *_, **__: torch.zeros(()), 0, lambda spec: whole_why_not(spec.divided)
    )
    monkeypatch.setitem(GATED_NORM._backends, "fused", fused)
    y, z, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    assert not gated_norm(y, z, weight, 4, 1e-5, backend="fused").dim()
    with pytest.raises(BackendError, match=r"cannot serve.*reference: can serve; fused: norms whole rows"):
        gated_norm(y, z, weight, 4, 1e-5, average=torch.neg, backend="fused")
    halved = gated_norm(y, z, weight, 4, 1e-5, average=lambda mean: 4 * mean)
    torch.testing.assert_close(halved, gated_norm(y, z, weight, 4, 1e-5) / 2, rtol=1e-3, atol=1e-3)
