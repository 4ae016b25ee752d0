from __future__ import annotations

from typing import Any

import pytest
import torch

from megalight.errors import BackendError, ConfigurationError
from megalight.ops.adam import QuantizedOutput, adam_step, reference_adam_step, torch_adam_step
from megalight.ops.quantize.formats import Scheme
from tests.ops.checks import check_adam, check_quantized_adam, error


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torch_equals_the_reference(decoupled: bool, tensors: bool, dtype: torch.dtype) -> None:
    check_adam(
        torch_adam_step,
        "cpu",
        1003,
        decoupled=decoupled,
        tensors=tensors,
        dtype=dtype,
        grad_dtype=dtype,
        out_dtype=torch.bfloat16,
        **({"lr": 0.5, "step": 7} if tensors else {}),
    )


@pytest.mark.parametrize("decoupled", [True, False])
def test_reference_equals_torch_optim(decoupled: bool) -> None:
    theirs = torch.randn(17, dtype=torch.float64, requires_grad=True)
    ours, exp_avg, exp_avg_sq = theirs.detach().clone(), torch.zeros(17).double(), torch.zeros(17).double()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([theirs], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, foreach=False)
    for step in range(1, 5):
        theirs.grad = torch.randn(17, dtype=torch.float64)
        optimizer.step()
        reference_adam_step(
            ours,
            theirs.grad,
            exp_avg,
            exp_avg_sq,
            lr=0.1,
            beta1=0.8,
            beta2=0.9,
            eps=1e-6,
            weight_decay=0.3,
            step=step,
            decoupled=decoupled,
        )
    assert error(ours, theirs) < 1e-12


def test_quantized_values_are_those_of_a_cast() -> None:
    check_quantized_adam(adam_step, "cpu", 1003)


def test_a_copy_beside_quantized_values_is_refused() -> None:
    state = torch.zeros(4, 8).unbind()
    settings: dict[str, Any] = {"lr": 1.0, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    data = QuantizedOutput(torch.zeros(8, dtype=torch.uint8), Scheme("e4m3"), torch.tensor(1.0), torch.float32)
    with pytest.raises(ConfigurationError, match="to out or to quantized_out"):
        adam_step(*state, **settings, out=torch.zeros(8, dtype=torch.bfloat16), quantized_out=data)


def test_low_precision_gradient_goes_to_the_reference() -> None:
    check_adam(adam_step, "cpu", 100, grad_dtype=torch.bfloat16)


def test_named_backend_that_cannot_serve_raises() -> None:
    p = [torch.zeros(4) for _ in range(4)]
    p[1] = p[1].bfloat16()
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    with pytest.raises(BackendError, match="torch: needs gradients and moments in the dtype of the parameters"):
        adam_step(*p, **options, backend="torch")
