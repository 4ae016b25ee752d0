"""Kernels of batch-invariant mode, run by Triton's interpreter: those of products and log-sum-exps, and rows alone."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.imports import has
from megalight.ops.attention import attention
from megalight.ops.attention.batch_invariant import PagedAttentionOptions, pages_of
from megalight.ops.batch_invariant import MODE, batch_invariant_mode, rowwise, with_gradient_of
from megalight.ops.linear import linear
from megalight.types import PackedSequences
from tests.ops.checks import TOLERANCE, error
from tests.ops.test_paged_attention import OPTIONS, check

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's own
needs_interpreter = pytest.mark.skipif(
    not has("triton") or torch.cuda.is_available(), reason="needs triton, and no GPU (where the kernels run for real)"
)


def kernels(op: str = "batch_invariant") -> Any:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared
    return importlib.import_module(f"megalight.ops.{op}.triton")


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 70, 130])
def test_products(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((rows, 40), (70, 36), (70,)))
    x = x[:, :36]
    found = kernels().product(x, weight, bias)
    assert error(found, x.double() @ weight.double().T + bias.double()) <= TOLERANCE[dtype]


@needs_interpreter
def test_products_of_groups() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(90, 32), torch.randn(3, 20, 32)
    offsets = torch.tensor([70, 70, 85], dtype=torch.int32)
    found = kernels().product(x, weight, None, offsets)
    expected = torch.cat([x[:70] @ weight[0].T, x[70:85] @ weight[2].T])
    assert error(found[:85], expected.double()) <= TOLERANCE[torch.float32]


@needs_interpreter
def test_log_sum_exps() -> None:
    torch.manual_seed(0)
    logits = 9 * torch.randn(3, 5000)
    logits[0, 7] = -torch.inf
    assert error(kernels().log_sum_exp(logits), logits.double().logsumexp(-1)) <= TOLERANCE[torch.float32]


@needs_interpreter
@pytest.mark.parametrize("options", [OPTIONS[1], OPTIONS[3]], ids=str)
def test_attention(options: dict[str, Any]) -> None:
    """To stored keys and to those of a training forward, by the kernel in fixed blocks."""
    module = kernels("paged_attention")

    def run(q: Any, k: Any, v: Any, pages: Any, **given: Any) -> Any:
        return module.paged_attention(q, k, v, pages, PagedAttentionOptions(**given), fixed=True)

    check(run, [1, 1, 3, 9], [9, 4, 3, 12], torch.float32, **options)
    torch.manual_seed(0)
    sequences = PackedSequences.of_lengths([70, 1, 9])
    q, k, v = torch.randn(80, 6, 20), torch.randn(80, 2, 20), torch.randn(80, 2, 12)
    expected = attention(
        q.double(), k.double(), v.double(), sequences, backend="reference", **(options | _wide(options))
    )
    assert error(run(q, k, v, pages_of(sequences), **options), expected) <= TOLERANCE[torch.float32]


def _wide(options: dict[str, Any]) -> dict[str, Any]:
    return {"sink": options["sink"].double()} if "sink" in options else {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_among_others(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(65, 515).to(dtype), torch.randn(130, 515).to(dtype)
    with batch_invariant_mode():
        together = linear(x, weight)
        assert all(torch.equal(linear(x[row : row + 1], weight)[0], together[row]) for row in range(65))


def test_gradients_are_those_of_the_other_function() -> None:
    x, weight = torch.randn(5, requires_grad=True), torch.nn.Parameter(torch.randn(5))

    def ordinary(x: torch.Tensor, weight: torch.Tensor, none: None) -> torch.Tensor:
        assert not MODE.on
        return 3 * x * weight

    with batch_invariant_mode():
        y = with_gradient_of(ordinary, lambda x, weight, none: x + weight, (x * 1, weight, None))
    assert torch.equal(y, x + weight)
    y.sum().backward()
    assert weight.grad is not None
    assert x.grad is not None
    assert torch.equal(weight.grad, 3 * x)
    assert torch.equal(x.grad, 3 * weight)


def test_several_outputs_and_none() -> None:
    x = torch.arange(6.0).view(3, 2)
    first, second = rowwise(lambda row: (row + 1, row.sum(-1)), x)
    assert torch.equal(first, x + 1)
    assert torch.equal(second, x.sum(-1))
    assert rowwise(torch.exp, x[:0]).shape == (0, 2)


def test_autocast_is_refused() -> None:
    with (
        batch_invariant_mode(),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ConfigurationError, match="no autocast"),
    ):
        linear(torch.ones(2, 3), torch.ones(4, 3))
