from __future__ import annotations

import pytest
import torch

from megalight.errors import LayoutError
from megalight.nn import InnerAttention
from megalight.parallel.context.all_to_all import RowAttention
from megalight.parallel.context.spec import ContextGroups, put, take
from megalight.parallel.mesh import ParallelMesh

ROWS = torch.tensor([4, 0, 3])


def test_rows_taken_and_put_back() -> None:
    x = torch.arange(10.0).view(5, 2)
    assert torch.equal(take(x, ROWS), x[ROWS])
    whole = put(take(x, ROWS), ROWS, 5)
    assert torch.equal(whole[ROWS], x[ROWS])
    assert not whole[[1, 2]].any()


def test_each_is_the_others_gradient() -> None:
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z: take(z, ROWS), x.requires_grad_())
    assert torch.autograd.gradcheck(lambda z: put(z, ROWS, 5), y.requires_grad_())


def test_ranks_must_divide_the_heads() -> None:
    inner, groups = InnerAttention(causal=False), ContextGroups(ParallelMesh(2, 0, cp=2))
    with pytest.raises(LayoutError, match=r"layers\.0: 3 heads on each rank cannot be divided over cp=2"):
        RowAttention(inner, "layers.0", groups, (3, 3))
