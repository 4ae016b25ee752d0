"""What is checked before processes start, is checked as it will run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megalight.models.gpt.module import GPTModule
from megalight.parallel.mesh import ParallelMesh
from megalight.plugins.precision import MegatronPrecision
from megalight.strategies import MegatronStrategy, preflight
from tests.strategies.training import CONFIGS


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("32-true", torch.float32), ("64-true", torch.float64)]
)
def test_overlap_is_chosen_for_weights_of_the_run(
    monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype
) -> None:
    seen: list[set[torch.dtype]] = []
    monkeypatch.setattr(
        preflight, "check_overlap", lambda model, device: seen.append({p.dtype for p in nn.Module.parameters(model)})
    )
    strategy = MegatronStrategy(
        tensor_parallel=2, precision_plugin=MegatronPrecision(precision), parallel_devices=[torch.device("cpu")] * 2
    )
    preflight._split_on_meta(strategy, GPTModule(CONFIGS["gqa"]), ParallelMesh(2, 0, tp=2))
    assert seen == [{dtype}]
