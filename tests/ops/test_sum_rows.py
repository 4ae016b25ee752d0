from __future__ import annotations

import pytest
import torch

from megalight.errors import BackendError
from megalight.ops.linear import accumulate_bias_gradient
from megalight.ops.parameter import collect
from megalight.ops.sum_rows import sum_rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_are_summed_over_or_added_to_what_is_there(dtype: torch.dtype) -> None:
    rows = torch.arange(12).view(4, 3).to(dtype)
    out = torch.full((3,), torch.nan, dtype=dtype)
    sum_rows(out, rows, add=False)
    assert out.tolist() == [18, 22, 26]
    sum_rows(out, rows[:1], add=True)
    assert out.tolist() == [18, 23, 28]
    sum_rows(out, rows[:0], add=True)
    assert out.tolist() == [18, 23, 28]
    sum_rows(out, rows[:0], add=False)
    assert out.tolist() == [0, 0, 0]


def test_half_rows_are_rounded_once() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    out = torch.zeros(1, dtype=torch.bfloat16)
    sum_rows(out, rows, add=False)
    assert out.item() == 258.0  # 256 + 1 rounds to 256


def test_a_backend_that_cannot_serve_says_why() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    with pytest.raises(BackendError, match=r"triton.*float64"):
        sum_rows(one[0], one, add=False, backend="triton")


def test_gradients_of_a_bias_are_added_up() -> None:
    bias, told = torch.nn.Parameter(torch.zeros(3)), list[int]()
    main = torch.full((3,), torch.nan)
    collect(bias, main, lambda: told.append(1)).untouched = True
    grad_y = torch.arange(12.0).view(2, 2, 3)
    assert accumulate_bias_gradient(grad_y, bias) is None
    assert main.tolist() == [18, 22, 26]
    assert accumulate_bias_gradient(grad_y, bias) is None
    assert main.tolist() == [36, 44, 52]
    assert told == [1, 1]
