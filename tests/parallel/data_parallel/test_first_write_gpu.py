"""First writes on CUDA: by every way to multiply into a main gradient, on top of what is not a number."""

from __future__ import annotations

import pytest
import torch

from megalight.ops.linear import WGRAD, WeightGradientSpec
from megalight.parallel.mesh import ParallelMesh
from tests.parallel.data_parallel.test_first_write import run_branches

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("backend", ["auto", "addmm_fp32", "triton", "reference"])
def test_every_kind_of_gradient(backend: str, late: bool) -> None:
    reasons = {row.name: why for row, why in WGRAD.table(WeightGradientSpec("cuda", torch.bfloat16, torch.float32))}
    if reasons.get(backend) is not None:
        pytest.skip(str(reasons[backend]))
    run_branches(ParallelMesh(), "optim", torch.bfloat16, late, "cuda", backend)
