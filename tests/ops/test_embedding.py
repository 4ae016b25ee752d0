from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megalight.errors import BackendError
from megalight.ops import embedding as op
from megalight.ops import use_backends
from megalight.ops.embedding import embedding
from megalight.ops.parameter import collect
from tests.ops import checks

IDS = torch.tensor([[3, 0, 3], [9, 3, 1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_to_the_main_gradient(dtype: torch.dtype) -> None:
    checks.check_embedding_gradient(checks.Kernels(op, "reference"), "cpu", dtype)


@pytest.mark.parametrize("keep", [None, torch.tensor([[True, False, True], [True, False, True]])])
def test_values_and_gradients_are_those_of_torch(keep: torch.Tensor | None) -> None:
    """Two micro-batches; the first one overwrites what is left in the main gradient."""
    weight = torch.randn(11, 5).requires_grad_()
    slope = torch.randn(2, 3, 5)
    exact = F.embedding(IDS, weight) * (1 if keep is None else keep.unsqueeze(-1))
    (expected,) = torch.autograd.grad(exact, weight, slope)
    plain = embedding(IDS, weight, keep)
    assert torch.equal(torch.autograd.grad(plain, weight, slope)[0], expected)
    arrived: list[int] = []
    state = collect(weight, torch.full_like(weight, float("nan")), lambda: arrived.append(1))
    state.untouched = True
    for _ in range(2):
        found = embedding(IDS, weight, keep)
        assert torch.equal(found, exact)
        found.backward(slope)
    assert weight.grad is None
    assert state.main_grad is not None
    assert torch.allclose(state.main_grad, 2 * expected)
    assert arrived == [1, 1]


def test_a_frozen_table_gets_no_gradient() -> None:
    weight = torch.randn(11, 5)
    state = collect(weight, torch.zeros(11, 5))
    assert not embedding(IDS, weight).requires_grad
    assert state.main_grad is not None
    assert not state.main_grad.any()


def test_unknown_ids_raise() -> None:
    weight = torch.randn(11, 5).requires_grad_()
    collect(weight, torch.zeros(11, 5))
    with pytest.raises(IndexError):
        embedding(torch.tensor([11]), weight)


def test_a_backend_that_cannot_serve_says_why() -> None:
    weight = torch.randn(11, 5).requires_grad_()
    collect(weight, torch.zeros(11, 5))
    use_backends(embedding_gradient="triton")
    try:
        with pytest.raises(BackendError, match="triton"):
            embedding(IDS, weight).sum().backward()
    finally:
        use_backends(embedding_gradient="auto")
