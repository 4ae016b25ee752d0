from __future__ import annotations

import pytest
import torch

from megalight.ops.linear import WGRAD, WeightGradientSpec, linear
from megalight.registry import choose
from tests.ops.checks import check_weight_gradient, error
from tests.ops.test_linear import with_main_grad

pytestmark = pytest.mark.gpu

SHAPES = [(63, 64, 128), (500, 300, 1000), (1000, 4096, 320), (8192, 512, 256)]


@pytest.mark.parametrize(("tokens", "out", "width"), SHAPES)
@pytest.mark.parametrize("backend", ["addmm_fp32", "triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_products_are_added_in_float32(
    backend: str, dtype: torch.dtype, tokens: int, out: int, width: int
) -> None:
    spec = WeightGradientSpec("cuda", dtype, torch.float32)
    table = {candidate.name: (candidate.fn, reason) for candidate, reason in WGRAD.table(spec)}
    fn, reason = table[backend]
    if reason is not None:
        pytest.skip(reason)
    check_weight_gradient(fn, "cuda", dtype, torch.float32, tokens, out, width)


def test_a_kernel_without_temporary_serves_training() -> None:
    spec = WeightGradientSpec("cuda", torch.bfloat16, torch.float32)
    assert WGRAD.select(spec).name in ("addmm_fp32", "triton")
    main_grad = torch.zeros(4096, 4096, device="cuda")
    grad_y, x = (torch.randn(512, 4096, device="cuda").bfloat16() for _ in range(2))
    accumulate = choose(WGRAD, spec)
    accumulate(main_grad, grad_y, x, False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    accumulate(main_grad, grad_y, x, False)
    assert torch.cuda.max_memory_allocated() - before < main_grad.nbytes // 2


def test_linear_on_the_gpu() -> None:
    weight = with_main_grad(torch.randn(300, 200, device="cuda").bfloat16(), torch.float32)
    bias = with_main_grad(torch.randn(300, device="cuda").bfloat16(), torch.float32)
    x = torch.randn(500, 200, device="cuda").bfloat16().requires_grad_()
    gradient = torch.randn(500, 300, device="cuda").bfloat16()
    linear(x, weight, bias).backward(gradient)
    assert error(weight.main_grad, gradient.double().T @ x.double()) < 2e-5
    assert error(bias.main_grad, gradient.double().sum(0)) < 2e-5
    assert x.grad is not None
    assert error(x.grad, gradient.double() @ weight.double()) < 8e-3
