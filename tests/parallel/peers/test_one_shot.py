"""When layers use the one-shot all-reduce: in inference, while all elements of their outputs fit its slots."""

from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.peers.one_shot import OneShotCollectives
from megalight.parallel.shared_state import SharedState

MOST, FEATURES = 1024, 16


def _found(shape: tuple[int, ...], training: bool = False) -> Any:
    shared, way = SharedState(ParallelMesh(2, 0, tp=2)), object.__new__(OneShotCollectives)
    way.most = MOST
    vars(shared)["_one_shot"] = way
    on_gpu: Any = SimpleNamespace(is_cuda=True, shape=shape, numel=lambda: prod(shape), dtype=torch.bfloat16)
    return shared.one_shot_for(nn.Identity().train(training), on_gpu, FEATURES)


@pytest.mark.parametrize(
    ("shape", "taken"),
    [((1, 8), True), ((32, 8), True), ((33, 8), False), ((1, 32, 8), True), ((1, 33, 8), False), ((2, 17, 8), False)],
)
def test_all_dims_of_inputs_count(shape: tuple[int, ...], taken: bool) -> None:
    with torch.no_grad():
        assert (_found(shape) is not None) == taken


def test_training_and_gradients_take_collectives() -> None:
    assert _found((1, 8)) is None
    with torch.no_grad():
        assert _found((1, 8), training=True) is None
