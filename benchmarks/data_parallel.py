"""The cost of data parallelism: steps of the engine on one rank, and on all ranks with several options.

    torchrun --nproc_per_node 2 benchmarks/data_parallel.py [--blocks 16] [--tokens 8192]

The model is a stack of bf16 MLP blocks (width 4096, inner 14336). Each rank gets ``--tokens`` tokens in one
micro-batch, which makes it hardest to overlap communication. ``full`` is a whole step with clipping and Adam;
``gradients`` ends with the reduction. Before timing, norms are compared with those of the one-rank engine.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.nn.linear import Linear
from megalight.optim import Adam, parameter_groups, shard_optimizer
from megalight.parallel.data_parallel import (
    AdvancedDataParallelOptions,
    DataParallelEngine,
    DataParallelOptions,
    ParamInfo,
    clip_coefficient,
)
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec

WIDTH, INNER = 4096, 14336
OPTIONS = {
    "optim": DataParallelOptions(),
    "optim, no overlap": DataParallelOptions(overlap_grad_reduce=False, overlap_param_gather=False),
    "optim, bf16 on the wire": DataParallelOptions(reduce_dtype="bfloat16"),
    "optim, bf16 gradients": DataParallelOptions(gradient_dtype="bfloat16"),
    "optim, bf16 gradients, fp32 sums": DataParallelOptions(
        gradient_dtype="bfloat16", reduce_scatter_with_fp32_accumulation=True
    ),
    "optim, 8 CTAs": DataParallelOptions(advanced=AdvancedDataParallelOptions(max_ctas=8)),
    "optim, edge buckets of 1 million": DataParallelOptions(
        advanced=AdvancedDataParallelOptions(edge_bucket_size=1_000_000)
    ),
    "no_shard": DataParallelOptions(level="no_shard"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), Linear(WIDTH, INNER), Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Run:
    """A model with its engine and its steps."""

    def __init__(self, blocks: int, x: Tensor, mesh: ParallelMesh, options: DataParallelOptions) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        self.x = x
        self.model = nn.Sequential(*(nn.Sequential(Block()) for _ in range(blocks))).cuda().bfloat16()
        for p in self.model.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.01)
        groups = parameter_groups(self.model.named_parameters(), lr=1e-5, weight_decay=0.1)
        home = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
        infos = [
            ParamInfo(name, p, ShardSpec.replicated(name, tuple(p.shape)), home[id(p)])
            for name, p in self.model.named_parameters()
        ]
        self.engine = DataParallelEngine(infos, mesh, options)
        self.engine.parameters.attach_gather_hooks(self.model)
        self.optimizer = shard_optimizer(Adam(groups), self.engine)

    def gradients(self) -> None:
        self.engine.zero_grad()
        with self.engine.micro_batches(1):
            self.model(self.x).float().square().mean().backward()
        self.engine.finish_grad_sync()

    def full(self) -> None:
        self.gradients()
        self.engine.scale_gradients(clip_coefficient(self.engine.grad_norm(), 1.0))
        self.optimizer.step()
        self.engine.publish()

    def norm(self) -> float:
        self.gradients()
        return self.engine.grad_norm().item()


def milliseconds(step: Callable[[], None], repeats: int = 12, warm_up: int = 4) -> float:
    for _ in range(warm_up):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(arguments.tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    dist.broadcast(x, 0)  # equal inputs: the norm of the sum over ranks is known
    grid = ParallelMesh(world, rank)
    alone = Run(arguments.blocks, x, ParallelMesh(), DataParallelOptions())
    expected = alone.norm()
    rows = [("one rank", alone.norm(), milliseconds(alone.full), milliseconds(alone.gradients))]
    del alone
    for name, options in OPTIONS.items():
        run = Run(arguments.blocks, x, grid, options)
        norm = run.norm()
        if abs(norm - world * expected) > 1e-2 * world * expected:
            raise SystemExit(f"{name}: gradient norm {norm}, expected {world * expected}; not timed")
        rows.append((name, norm / world, milliseconds(run.full), milliseconds(run.gradients)))
        del run
    if rank == 0:
        print(f"{torch.cuda.get_device_name()} x {world}, torch {torch.__version__}, {vars(arguments)}")
        for name, norm, full, gradients in rows:
            print(f"{name:34} full {full:7.1f} ms   gradients {gradients:7.1f} ms   norm / ranks {norm:.5g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
