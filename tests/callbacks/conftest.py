"""Weights that runs with adapters begin with."""

from __future__ import annotations

import pytest

from megalight import checkpoint
from megalight.models.gpt import GPT
from megalight.nn.init import initialize
from megalight.parallel.apply import parallelize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.plan import ParallelizePlan
from tests.strategies.training import CONFIGS, SEED


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of initial weights."""
    model = GPT(CONFIGS["gqa"]).double()
    initialize(model, SEED, "model.")
    folder = tmp_path_factory.mktemp("base") / "c"
    specs = parallelize(model, ParallelizePlan(), ParallelMesh(), prefix="model.")
    views = checkpoint.views_of_parameters(model.named_parameters(), specs, ParallelMesh())
    checkpoint.save(folder, views, common={"model": {"family": "gpt", "config": CONFIGS["gqa"].to_dict()}})
    return str(folder)
