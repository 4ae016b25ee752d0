"""The engine on CUDA: fused weight gradients in one process, NCCL and streams in two."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from megalight.nn.linear import Linear
from megalight.optim import Adam, shard_optimizer
from megalight.parallel.data_parallel import DataParallelEngine, clip_coefficient
from megalight.parallel.mesh import ParallelMesh
from tests.parallel.data_parallel.helpers import accumulate, assert_close, infos, loss
from tests.support.options import data_parallel
from tests.support.workers import meeting

pytestmark = pytest.mark.gpu
WIDTH = 512


class Net(nn.Module):
    """Autograd's gradients (embedding-like table, norm) and fused ones (linears)."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        kind = (lambda: Linear(WIDTH, WIDTH)) if fused else (lambda: nn.Linear(WIDTH, WIDTH, bias=False))
        self.table = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(4))
        generator = torch.Generator().manual_seed(5)
        for layer in self.layers:
            layer.weight.data = torch.randn(WIDTH, WIDTH, generator=generator) * 0.04  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) + self.table
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x * 0.05


def _inputs(step: int, world: int) -> Tensor:
    return torch.randn(world, 2, 64, WIDTH, generator=torch.Generator().manual_seed(step)).cuda().bfloat16()


def _train(rank: int, world: int, fused: bool, **options: object) -> tuple[list[Tensor], list[Tensor]]:
    """Three steps; every rank's inputs in turn where ``world`` ranks are played by one process."""
    model = Net(fused).cuda().bfloat16()
    real = dist.get_world_size() if dist.is_initialized() else 1
    engine = DataParallelEngine(
        infos(model), ParallelMesh(real, rank), data_parallel(bucket_size=WIDTH * WIDTH, **options)
    )  # type: ignore[arg-type]
    if real > 1:
        engine.parameters.attach_gather_hooks(model)
    optimizer = shard_optimizer(Adam(model.parameters(), lr=1e-2), engine)
    norms = []
    for step in range(3):
        inputs = _inputs(step, world)
        accumulate(engine, model, inputs[rank] if real > 1 else inputs.flatten(0, 1))
        norms.append(engine.grad_norm())
        engine.scale_gradients(clip_coefficient(norms[-1], 1.0))
        optimizer.step()
        engine.publish()
    engine.sync_parameters()
    return norms, [p.detach().float() for p in model.parameters()]


def test_fused_gradients_equal_autograds() -> None:
    (norms, params), (expected_norms, expected) = _train(0, 1, True), _train(0, 1, False)
    for a, b in zip(norms, expected_norms, strict=True):
        assert_close(a, b, 1e-2)
    for a, b in zip(params, expected, strict=True):
        assert_close(a, b, 3e-2)


def test_gradients_of_half_parameters_add_up_in_float32() -> None:
    model = Net(True).cuda().bfloat16()
    engine = DataParallelEngine(infos(model), ParallelMesh())
    reference = Net(False).cuda().float()
    reference.load_state_dict(model.state_dict())
    inputs = _inputs(0, 4).flatten(0, 1)
    accumulate(engine, model, inputs)
    for x in inputs:
        loss(reference, x.float()).backward()
    for p, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.main_grad.dtype == torch.float32  # type: ignore[attr-defined]
        assert p.grad is p.main_grad  # type: ignore[attr-defined]
        assert expected.grad is not None
        assert_close(p.main_grad, expected.grad, 2e-2)  # type: ignore[attr-defined]


def _two_ranks(rank: int, place: str) -> None:
    torch.cuda.set_device(rank)
    expected_norms, expected = _train(0, 2, True)
    dist.init_process_group("nccl", init_method=place, rank=rank, world_size=2, device_id=rank)
    try:
        for options in (
            {"level": "no_shard"},
            {"level": "optim"},
            {"level": "optim", "overlap_grad_reduce": False, "overlap_param_gather": False},
            {"level": "optim", "max_ctas": 4, "edge_bucket_size": 1},
            {"level": "optim", "reduce_dtype": "bfloat16"},
            {"level": "optim", "gradient_dtype": "bfloat16", "reduce_scatter_with_fp32_accumulation": True},
        ):
            norms, params = _train(rank, 2, True, **options)
            for a, b in zip(norms, expected_norms, strict=True):
                assert_close(a, b, 1e-2)
            for a, b in zip(params, expected, strict=True):
                assert_close(a, b, 3e-2)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_train_like_one() -> None:
    mp.spawn(_two_ranks, (meeting(),), nprocs=2)  # type: ignore[no-untyped-call]
