"""Attention between runs of packed rows: what cannot be divided."""

from __future__ import annotations

import pytest

from megalight.errors import LayoutError
from megalight.nn import InnerAttention
from megalight.parallel.context.all_to_all import RowAttention
from megalight.parallel.context.spec import ContextGroups
from megalight.parallel.mesh import ParallelMesh


def test_ranks_must_divide_the_heads() -> None:
    inner, groups = InnerAttention(causal=False), ContextGroups(ParallelMesh(2, 0, cp=2))
    with pytest.raises(LayoutError, match=r"layers\.0: 3 heads on each rank cannot be divided over cp=2"):
        RowAttention(inner, "layers.0", groups, (3, 3))
