"""Masters in pinned host memory, and copies beside the updates."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalight.optim import Adam, shard_optimizer
from megalight.parallel.data_parallel import DataParallelEngine, ParamInfo, clip_coefficient
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from tests.parallel.data_parallel.helpers import assert_close
from tests.support.options import data_parallel

pytestmark = pytest.mark.gpu
WIDTH, LAYERS, STEPS = 2048, 6, 4


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).cuda().bfloat16()


def _engine(model: nn.Module, fraction: float, **options: Any) -> DataParallelEngine:
    infos = [ParamInfo(n, p, ShardSpec.replicated(n, tuple(p.shape)), 0) for n, p in model.named_parameters()]
    given = data_parallel(optimizer_offload_fraction=fraction, bucket_size=WIDTH * WIDTH, **options)
    return DataParallelEngine(infos, ParallelMesh(), given)


def _train(fraction: float, kind: type[torch.optim.Optimizer], **options: Any) -> tuple[Tensor, dict[str, int], int]:
    """The masters after some steps, bytes of the engine, and bytes on the device once the optimizer has its state."""
    gc.collect()  # an earlier engine's memory must not count
    before = torch.cuda.memory_allocated()
    model = _model()
    # Weights move by less than bf16 tells apart: else the gradients of later steps enlarge differences in rounding.
    optimizer = kind(model.parameters(), lr=1e-5)
    engine = _engine(model, fraction, **options)
    shard_optimizer(optimizer, engine)
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
    for _ in range(STEPS):
        engine.zero_grad()
        with engine.micro_batches(1):
            model(x).float().square().mean().backward()
        engine.finish_grad_sync()
        engine.scale_gradients(clip_coefficient(engine.grad_norm(), 1.0))
        optimizer.step()
        engine.publish()
    engine.zero_grad()
    for bucket in engine.host.buckets:
        state = optimizer.state[bucket.shard.master]
        assert bucket.shard.master.is_pinned(), "it stays pinned: ordinary memory is copied with the host's help"
        assert {state[name].device.type for name in ("exp_avg", "exp_avg_sq")} == {"cpu"}
    engine.sync_parameters()
    for bucket in engine.buckets:
        assert torch.equal(bucket.own_params.cpu(), bucket.shard.master.detach().bfloat16().cpu())
    masters = torch.cat([shard.master.detach().cpu() for shard in engine.shards])
    return masters, engine.memory(), torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("kind", [Adam, torch.optim.AdamW])
@pytest.mark.parametrize("gradients", ["float32", "bfloat16"])
def test_the_host_updates_as_the_device_does(kind: type[torch.optim.Optimizer], gradients: str) -> None:
    runs = {fraction: _train(fraction, kind, gradient_dtype=gradients) for fraction in (0.0, 0.5, 1.0)}
    start = torch.cat([b.shard.master.detach().cpu() for b in _engine(_model(), 0.0).buckets])
    moved = runs[0.0][0] - start
    for fraction in (0.5, 1.0):
        assert_close(runs[fraction][0] - start, moved, 5e-3)  # Adam enlarges differences of small gradients
    numel = LAYERS * WIDTH * WIDTH
    assert runs[1.0][1]["masters"] == 0
    assert runs[1.0][1]["host"] >= 4 * numel
    # Masters and two moments, 12 bytes each, are not on the device.
    assert runs[0.0][2] - runs[1.0][2] > 0.95 * 12 * numel
    assert runs[0.0][2] - runs[0.5][2] > 0.45 * 12 * numel


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_copies_run_beside_updates(fraction: float) -> None:
    """While the host updates a bucket, the gradients of later ones come on a stream of their own.

    The host waits for them alone, and for nothing else that the device has to do, clipping included.
    """
    model = _model()
    optimizer = Adam(model.parameters(), lr=1e-2)
    engine = _engine(model, fraction)
    waited: list[int] = []
    arrive = engine.host.arrive

    def noted(bucket: Any) -> None:
        waited.append(len(engine.host._arrived))
        arrive(bucket)

    engine.host.arrive = noted
    shard_optimizer(optimizer, engine)
    engine.zero_grad()
    with engine.micro_batches(1):
        model(torch.ones(8, WIDTH, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
    engine.finish_grad_sync()
    engine.scale_gradients(clip_coefficient(engine.grad_norm(), 1.0))
    torch.cuda.set_sync_debug_mode("error")  # type: ignore[no-untyped-call]
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")  # type: ignore[no-untyped-call]
    engine.publish()
    assert waited == list(range(len(engine.host.buckets), 0, -1)), (
        "all copies had been started, and each was waited for alone"
    )
