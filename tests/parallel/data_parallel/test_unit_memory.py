"""The memory of full sharding, counted tensor by tensor, against the formula of docs/full-sharding.md."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo
from megalight.parallel.run_engine import owned_alone, units_of
from megalight.parallel.shard import ShardSpec
from tests.parallel.data_parallel.helpers import mesh
from tests.support.workers import run

WIDTH, WORDS, LAYERS, WORLD = 128, 2048, 8, 2
LARGEST = WIDTH * WORDS
"""Elements of the embedding, of the head, and of each layer's two matrices together."""


class Counting(TorchDispatchMode):
    """Counts the memory of all tensors that ops have made and that are still alive.

    Args:
        limit: bytes above which it looks again. Gloo's thread lets go of a finished collective's tensors a moment after
            the wait for it has returned, and the ranks' cores may be busy.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.peak = 0
        self._limit = limit
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        held, patience = self.held(), 100
        while held > self._limit and patience:
            time.sleep(0.01)
            held, patience = self.held(), patience - 1
        self.peak = max(self.peak, held)
        return out

    def held(self) -> int:
        """Bytes that are alive now."""
        self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
        return sum(size for _, size in self._alive.values())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WORDS // 2, bias=False)
        self.down = nn.Linear(WORDS // 2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Embedding(WORDS, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.Linear(WIDTH, WORDS, bias=False))
        if tied:
            self.head[0].weight = self.embed[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def _trained(tied: bool, frozen: bool, limit: int) -> tuple[int, int, int]:
    """Bytes that the engine says it keeps, those of all tensors after two steps, and their peak."""
    model = Model(tied).bfloat16()
    model.layers.requires_grad_(not frozen)
    units = units_of(model)
    numbers = owned_alone(model, units)
    infos = [
        ParamInfo(name, p, ShardSpec.replicated(name, tuple(p.shape)), 0, unit=numbers[id(p)])
        for name, p in model.named_parameters()
    ]
    ids = torch.tensor([1, 5])
    with Counting(limit) as counting:
        engine = DataParallelEngine(infos, mesh(), DataParallelOptions(level="optim_grads_params"), units=units)
        del infos
        counting.peak = 0
        for _ in range(2):
            engine.zero_grad()
            with engine.micro_batches(2):
                for _ in range(2):
                    model(ids).float().sum().backward()
            engine.finish_grad_sync()
            engine.publish()
        engine.sync_parameters()
        return sum(engine.memory().values()), counting.held(), counting.peak


@pytest.mark.parametrize(
    ("tied", "frozen"), [pytest.param(False, False, marks=pytest.mark.full), (True, False), (False, True)]
)
def test_tensors_take_what_the_formula_says(tied: bool, frozen: bool) -> None:
    """Nothing is whole but two units, also where an embedding, a head and frozen layers are sharded.

    At its peak, a pass also has a weight's gradient before it is added to the main gradient, in both dtypes, and shards
    of reductions of two units.
    """
    trained, others = (2 if not tied else 1) * LARGEST, LAYERS * LARGEST
    expected = (2 + 4 + 4) * trained // WORLD + 2 * (2 + 4) * LARGEST
    expected += 2 * others // WORLD + 2 * 2 * LARGEST if frozen else (2 + 4 + 4) * others // WORLD
    limit = expected + (2 + 4 + 2 * 4 // WORLD + 1) * LARGEST
    for said, kept, peak in run(_trained, WORLD, tied, frozen, limit):
        assert said == expected
        assert kept == pytest.approx(expected, rel=1e-3)
        assert expected < peak < limit
