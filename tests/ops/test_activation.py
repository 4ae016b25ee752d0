from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalight.ops import activation as activations
from megalight.ops import activation as op
from megalight.ops.activation import (
    KINDS,
    REFERENCE_KINDS,
    TORCH_KINDS,
    activation,
    gated,
    gated_pair,
    reference_gated,
    torch_activation,
    torch_gated_pair,
)
from tests.ops.checks import check_activations, check_gated_pair, error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torch_equals_the_reference(kind: str, dtype: torch.dtype) -> None:
    check_activations(activations, "cpu", dtype, (63, 65), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_pair_equals_the_packed_form(kind: str, dtype: torch.dtype) -> None:
    check_gated_pair(torch_gated_pair, "cpu", dtype, (63, 65), kind)
    gate, up = torch.randn(2, 3, 5, dtype=torch.float64)
    packed = reference_gated(torch.cat((gate, up), -1), kind)
    assert error(gated_pair(gate, up, kind, backend="reference"), packed) < 1e-14


def test_pairs_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gate is \[2, 4\] torch.float32 and up \[2, 3\].*must be equal"):
        gated_pair(torch.ones(2, 4), torch.ones(2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_reference_passes_gradcheck(kind: str) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reference_gated(x, kind), (x,))


def test_gate_comes_first() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    assert error(gated(x, "silu"), x[:, :4] / (1 + (-x[:, :4]).exp()) * x[:, 4:]) < 1e-14
    assert error(activation(x, "squared_relu"), x.clamp_min(0) ** 2) < 1e-14


def test_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown activation 'swilu'.*Did you mean 'silu'"):
        gated(torch.ones(2, 4), "swilu")


def test_all_backends_know_all_kinds() -> None:
    assert set(TORCH_KINDS) == set(REFERENCE_KINDS) == set(op.KINDS)


@pytest.mark.parametrize("kind", ["silu", "quick_gelu", "gelu_tanh", "squared_relu"])
@pytest.mark.parametrize(("offset", "clamp"), [(0.0, None), (1.0, 0.7)])
@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_gates(kind: str, offset: float, clamp: float | None, weighted: bool) -> None:
    x = (2 * torch.randn(3, 8, dtype=torch.float64)).requires_grad_()
    weights = torch.rand(3, dtype=torch.float64, requires_grad=True) if weighted else None

    def exact(x: Tensor, weights: Tensor | None = None) -> Tensor:
        gate, up = x[:, :4], x[:, 4:]
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        y = torch_activation(gate, kind) * (up + offset)
        return y if weights is None else y * weights[:, None]

    def ours(x: Tensor, weights: Tensor | None = None) -> Tensor:
        return gated(x, kind, weights=weights, offset=offset, clamp=clamp)

    inputs = (x,) if weights is None else (x, weights)
    assert error(ours(*inputs), exact(*inputs)) < 1e-14
    assert torch.autograd.gradcheck(ours, inputs)


def test_weighted_squared_relu() -> None:
    """``w relu(x)^2``, with gradients ``2 w relu(x)`` and ``sum relu(x)^2``."""
    x, weights = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), torch.rand(3, dtype=torch.float64)
    weights.requires_grad_()
    y = activation(x, "squared_relu", weights=weights)
    assert error(y, weights[:, None] * x.clamp(min=0) ** 2) < 1e-14
    y.sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert error(x.grad, 2 * weights[:, None] * x.clamp(min=0)) < 1e-14
    assert error(weights.grad, (x.clamp(min=0) ** 2).sum(1)) < 1e-14


def test_weights_of_half_precision_are_multiplied_in_float32() -> None:
    x, weights = torch.randn(63, 128).bfloat16(), torch.rand(63)
    exact = gated(x.double(), weights=weights.double())
    assert error(gated(x, weights=weights), exact) < 3e-3


def test_impossible_weights_and_clamps() -> None:
    with pytest.raises(ValueError, match=r"one weight per row is needed: \[2\]"):
        gated(torch.ones(2, 4), weights=torch.ones(3))
    with pytest.raises(ValueError, match="clamp=0 must be positive"):
        gated(torch.ones(2, 4), clamp=0)
