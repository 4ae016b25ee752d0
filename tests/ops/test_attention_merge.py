from __future__ import annotations

import pytest
import torch

from megalight.errors import LayoutError
from megalight.ops import attention_merge
from megalight.ops.attention_merge import merge
from tests.ops.checks import check_merge, error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_reference_is_the_formula(dtype: torch.dtype) -> None:
    check_merge(attention_merge.reference_merge, "cpu", dtype, dtype, (2, 5, 3, 8))


def test_new_tensors_have_the_type_of_sums() -> None:
    out, lse = torch.randn(2, 3, 2, 4).bfloat16(), torch.randn(2, 2, 3)
    merged, logs = merge(out.transpose(1, 2).contiguous().transpose(1, 2), lse, out, lse)
    assert (merged.dtype, logs.dtype) == (torch.float32, torch.float32)
    assert merged.is_contiguous()
    assert error(merged, out) < 1e-6


def test_queries_that_saw_no_key() -> None:
    """Nothing and something is something; nothing and nothing is nothing, and no NaN."""
    out = torch.randn(1, 3, 2, 4)
    lse = torch.randn(1, 2, 3)
    lse[:, :, 1] = -torch.inf
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for merged, logs in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        torch.testing.assert_close(merged[:, ::2], out[:, ::2])
        assert not merged[:, 1].any()
        assert torch.equal(logs, lse)


def test_large_logs_do_not_overflow() -> None:
    out, other = torch.randn(2, 1, 3, 2, 4, dtype=torch.float64)
    lse = torch.full((1, 2, 3), 1e4, dtype=torch.float64)
    merged, logs = merge(out, lse, other, lse)
    assert error(merged, (out + other) / 2) < 1e-12
    assert error(logs, lse + torch.tensor(2.0).double().log()) < 1e-12


def test_shapes_must_agree() -> None:
    out, lse = torch.randn(1, 3, 2, 4), torch.randn(1, 2, 3)
    with pytest.raises(LayoutError, match="with equal B, S, H, D"):
        merge(out, lse, out[:, :2], lse[:, :, :2])
    with pytest.raises(LayoutError, match="cannot be merged"):
        merge(out, lse.mT, out, lse.mT)


def test_views_with_other_last_dims_are_refused() -> None:
    out, lse = torch.randn(1, 3, 2, 4), torch.randn(1, 2, 3)
    with pytest.raises(LayoutError, match=r"last of each must be 1. Call `contiguous\(\)` first"):
        merge(out, lse.mT.contiguous().mT, out, lse)
