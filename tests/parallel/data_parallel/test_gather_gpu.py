"""Parameters on their way, by NCCL or copy engines: sums of counts overtake them, and replays wait for each bucket."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.optim import Adam, shard_optimizer
from megalight.parallel.data_parallel import DataParallelEngine, ParamInfo, gather
from megalight.parallel.data_parallel.buffers import FlatParameters
from megalight.parallel.data_parallel.communication import Transport
from megalight.parallel.data_parallel.fp8_parameters import FlatQuantized
from megalight.parallel.data_parallel.gather import Pushes
from megalight.parallel.graphs.fingerprint import Fingerprint
from megalight.parallel.graphs.iteration import IterationGraphs
from megalight.parallel.graphs.recorder import CUDARecorder
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.step import GlobalTotals
from tests.support.nccl import runs_of
from tests.support.options import data_parallel

pytestmark = pytest.mark.gpu
WIDTH, LAYERS, STEPS, NEVER = 1024, 6, 8, 1000
CYCLES = 3_000_000
"""How late each gather is: about 2 ms. A layer takes less."""
REAL, PUSHED = gather.gather_on_current_stream, Pushes.gather


def _engine(model: nn.Module, **options: Any) -> DataParallelEngine:
    infos = [ParamInfo(n, p, ShardSpec.replicated(n, tuple(p.shape)), 0) for n, p in model.named_parameters()]
    engine = DataParallelEngine(infos, ParallelMesh(dist.get_world_size(), dist.get_rank()), data_parallel(**options))
    engine.parameters.attach_gather_hooks(model)
    return engine


def _sum_beside_a_gather() -> float:
    """Milliseconds from the end of a sum of counts to that of gathers that began before it."""
    device = torch.device("cuda", dist.get_rank())
    model = nn.ModuleList(nn.Linear(1 << 14, 1 << 14, bias=False) for _ in range(2)).to(device, torch.bfloat16)
    engine = _engine(model)
    totals = GlobalTotals(ParallelMesh(dist.get_world_size(), dist.get_rank()), device)
    count, found = torch.ones(1, device=device), math.nan
    for _ in range(2):  # the first time communicators are made
        summed, gathered = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        dist.barrier()
        torch.cuda.synchronize()
        engine.publish()
        totals.sum(count)
        summed.record()
        engine.sync_parameters()
        gathered.record()
        torch.cuda.synchronize()
        found = summed.elapsed_time(gathered)
    return found


def _late(whole: Tensor, own: Tensor, group: ProcessGroup) -> None:
    """Gather late, over values that would show in the loss."""
    _spoil(whole, own)
    REAL(whole, own, group)


def _pushed_late(self: Pushes, bucket: FlatParameters | FlatQuantized) -> bool:
    _spoil(bucket.params, bucket.own_params)
    return PUSHED(self, bucket)


def _spoil(whole: Tensor, own: Tensor) -> None:
    kept = own.clone()
    whole.fill_(torch.nan)
    own.copy_(kept)
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]


def _losses(warmup: int, way: Transport = "plain") -> tuple[list[float], int]:
    """Losses of steps, and the number of those that were replayed, while every gather is late."""
    device = torch.device("cuda", dist.get_rank())
    torch.manual_seed(3)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    model = nn.Sequential(*blocks).to(device, torch.bfloat16)
    recorder = CUDARecorder(device)
    recorder.enter()
    engine = _engine(model, bucket_size=WIDTH * WIDTH, gathers=way)
    optimizer = shard_optimizer(Adam(model.parameters(), lr=1e-3), engine)

    hosts = dist.new_group(backend="gloo")

    def agree(values: list[int]) -> list[int]:
        found = torch.tensor(values)  # on the host, which runs ahead of the device
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=hosts)
        return [int(value) for value in found]

    def passes(micro_batches: Any) -> dict[str, Tensor]:
        total = torch.zeros((), device=device)
        with engine.micro_batches(len(micro_batches)):
            for x in micro_batches:
                loss = model(x).float().square().mean()
                loss.backward()
                total += loss.detach()
        engine.finish_grad_sync()
        return {"loss": total}

    graphs = IterationGraphs(
        recorder,
        engine,
        device,
        agree,
        Fingerprint([("", model)]),
        lambda: [],
        warmup_steps=warmup,
        max_graphs=1,
        refuse=pytest.fail,
    )
    draws = torch.Generator().manual_seed(dist.get_rank())
    batches = [
        [torch.randn(256, WIDTH, generator=draws).to(device, torch.bfloat16) for _ in range(2)] for _ in range(STEPS)
    ]
    losses = []
    with patch.object(gather, "gather_on_current_stream", _late), patch.object(Pushes, "gather", _pushed_late):
        for batch in batches:
            # The gathers for the next replay begin on the host while this one has not begun on the device.
            torch.cuda._sleep(10 * CYCLES)  # type: ignore[no-untyped-call]
            engine.zero_grad()
            losses.append(graphs("train", batch, passes)["loss"])
            optimizer.step()
            engine.publish()
    engine.sync_parameters()
    found = [float(loss) for loss in losses]
    graphs.close()
    recorder.leave()
    engine.close()
    return found, graphs.replays


def jobs(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    return [(_sum_beside_a_gather, ()), *((_losses, arguments) for arguments in ((NEVER,), (2,), (2, "symmetric")))]


def test_a_sum_of_counts_does_not_queue_behind_parameters() -> None:
    assert runs_of(jobs, 2).outcome(()) > 0.5


@pytest.mark.parametrize("way", ["plain", "symmetric"])
def test_replays_wait_for_late_parameters(way: str) -> None:
    runs = runs_of(jobs, 2)
    (expected, _), (found, replays) = runs.outcome((NEVER,)), runs.outcome((2,) if way == "plain" else (2, way))
    assert replays == STEPS - 2
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected, rtol=1e-3)
