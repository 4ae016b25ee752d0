from __future__ import annotations

from typing import Any

import pytest
import torch

from megalight.ops.adam import chunked_adam_step, torch_adam_step, triton
from tests.ops.checks import check_adam, check_narrow_adam, check_quantized_adam

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("step", [triton.adam_step, torch_adam_step], ids=["triton", "native"])
@pytest.mark.parametrize("n", [1, 63, 1000, 1_000_003])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_step_equals_the_reference(
    step: Any, n: int, decoupled: bool, tensors: bool, out_dtype: torch.dtype | None
) -> None:
    check_adam(step, "cuda", n, decoupled=decoupled, tensors=tensors, out_dtype=out_dtype)


def test_triton_takes_half_gradients() -> None:
    check_adam(triton.adam_step, "cuda", 1003, grad_dtype=torch.bfloat16, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("n", [1, 1000, 1_000_003])
def test_quantized_values_are_those_of_a_cast(n: int) -> None:
    from megalight.ops.adam import adam_step

    check_quantized_adam(triton.adam_step, "cuda", n)
    check_quantized_adam(adam_step, "cuda", n)


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("step", [triton.adam_step, chunked_adam_step], ids=["triton", "chunked"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("float32", "float8"), ("bfloat16", "bfloat16"), ("float8", "float8"), ("float8", "bfloat16")],
)
def test_narrow_moments_equal_the_reference(step: Any, first: str, second: str, tensors: bool) -> None:
    check_narrow_adam(step, "cuda", 100_003, first, second, tensors=tensors)


def test_step_can_be_captured() -> None:
    from megalight.ops.adam import adam_step

    tensors = [torch.rand(1003, device="cuda") for _ in range(4)]
    exact = [t.double() for t in tensors]
    lr, step = torch.tensor(0.1, device="cuda"), torch.tensor(1.0, device="cuda")
    options = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    adam_step(*(t.clone() for t in tensors), lr=lr, step=step, **options)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adam_step(*tensors, lr=lr, step=step, **options)
    for count in (1, 2):
        step.fill_(count)
        lr.fill_(0.1 / count)
        graph.replay()
        adam_step(*exact, lr=0.1 / count, step=count, **options, backend="reference")
    torch.testing.assert_close(tensors[0].double(), exact[0], rtol=1e-5, atol=1e-6)
