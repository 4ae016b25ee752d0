from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from megalight.optim import Adam, offload_to_cpu, restore_from_cpu, shard_optimizer
from megalight.optim.sharded import _homes
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions
from megalight.parallel.mesh import ParallelMesh
from tests.parallel.data_parallel.helpers import accumulate, batches, build, infos


def _setup(device: str, dtype: torch.dtype) -> tuple[nn.Module, DataParallelEngine, Adam]:
    model = build(dtype).to(device)
    optimizer = Adam(model.parameters(), lr=0.1)
    engine = DataParallelEngine(infos(model), ParallelMesh(), DataParallelOptions(bucket_size=30))
    shard_optimizer(optimizer, engine)
    return model, engine, optimizer


def _step(model: nn.Module, engine: DataParallelEngine, optimizer: Adam, device: str) -> None:
    accumulate(engine, model, batches(0, 1, 1, next(model.parameters()).dtype)[0].to(device))
    optimizer.step()
    engine.publish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_goes_on_as_if_nothing_happened(device: str, dtype: torch.dtype) -> None:
    moved, still = _setup(device, dtype), _setup(device, dtype)
    for round_trip in range(3):
        masters = [shard.master for shard in moved[1].shards]
        offload_to_cpu(moved[2])  # the first time there is no state yet
        offload_to_cpu(moved[2])
        for master in masters:
            assert master.device.type == ("cpu" if dtype == torch.bfloat16 else device)
            assert all(value.device.type == "cpu" for value in moved[2].state.get(master, {}).values())
        assert next(moved[0].parameters()).device.type == device
        restore_from_cpu(moved[2])
        restore_from_cpu(moved[2])
        assert [shard.master for shard in moved[1].shards] == masters
        for master in masters:
            state = moved[2].state.get(master, {})
            assert bool(state) == (round_trip > 0)
            assert all(value.device.type == device for value in (master, *state.values()) if value.ndim)
        for setup in (moved, still):
            _step(*setup, device)
        for a, b in zip(moved[0].parameters(), still[0].parameters(), strict=True):
            assert torch.equal(a, b)


def test_masters_leave_and_parameters_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves, on a machine without a second device: ``to`` is watched."""
    model, engine, optimizer = _setup("cpu", torch.bfloat16)
    _step(model, engine, optimizer, "cpu")
    moved: list[int] = []
    to = torch.Tensor.to

    def watched(self: torch.Tensor, *args: object) -> torch.Tensor:
        moved.append(self.data_ptr())
        return to(self, *args)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch.Tensor, "to", watched)
    offload_to_cpu(optimizer)
    states = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert set(moved) == {t.data_ptr() for t in (*(shard.master for shard in engine.shards), *states)}
    assert all(shard.master.grad is None for shard in engine.shards)


def test_an_optimizer_without_an_engine() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(3)
    optimizer.step()
    offload_to_cpu(optimizer)
    assert parameter.grad is not None
    restore_from_cpu(optimizer)
    optimizer.step()
    assert torch.allclose(parameter, torch.full((3,), 1 - 0.1 - 0.19))


def test_forgotten_with_its_optimizer() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    gc.collect()
    before = len(_homes)
    offload_to_cpu(optimizer)
    assert len(_homes) == before + 1
    del optimizer
    gc.collect()
    assert len(_homes) == before
