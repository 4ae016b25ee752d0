from __future__ import annotations

import pytest
import torch

from megalight.ops import activation as room
from megalight.ops.activation import KINDS, activation, gated, native, reference
from tests.ops.checks import check_activations, error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torch_equals_the_reference(kind: str, dtype: torch.dtype) -> None:
    check_activations(native, "cpu", dtype, (63, 65), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_passes_gradcheck(kind: str) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reference.gated(x, kind), (x,))


def test_gate_comes_first() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    assert error(gated(x, "silu"), x[:, :4] / (1 + (-x[:, :4]).exp()) * x[:, 4:]) < 1e-14
    assert error(activation(x, "squared_relu"), x.clamp_min(0) ** 2) < 1e-14


def test_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown activation 'swilu'.*Did you mean 'silu'"):
        gated(torch.ones(2, 4), "swilu")


def test_all_backends_know_all_kinds() -> None:
    assert set(native.KINDS) == set(reference.KINDS) == set(room.KINDS)
