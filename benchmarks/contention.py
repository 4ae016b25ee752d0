"""How GPUs of one host slow each other down: copy engines, NCCL and products, alone and at the same time.

    torchrun --nproc_per_node 4 benchmarks/contention.py [--output OUT.json]

Copies and collectives have the sizes of tensor parallelism: shares of 16.8 MB (2048 tokens of 4096 features in bf16).
The product is `gate_up` of an 8-billion-parameter model at TP=4 with 8192 tokens. Results are milliseconds of the
slowest rank, medians of three.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalight.parallel.peers import driver, spin
from megalight.parallel.peers.memory import PeerMemory

ROWS, HIDDEN, WIDTH = 2048, 4096, 7168
LEAD = 20_000_000
"""Cycles (about 10 ms) of waiting on the device, so that the host can launch all work before it starts."""


class Bench:
    """One rank's tensors and streams."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.current, self.aside = torch.cuda.current_stream(), torch.cuda.Stream()
        self.share = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16()
        self.whole = torch.randn(self.size * ROWS, HIDDEN, device="cuda").bfloat16()
        self.weight = torch.randn(WIDTH, HIDDEN, device="cuda").bfloat16()
        self.y = torch.empty(4 * ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
        self.x = torch.randn(4 * ROWS, HIDDEN, device="cuda").bfloat16()
        memory = PeerMemory(dist.group.WORLD)  # type: ignore[arg-type]
        self.slot = memory.slot(self.whole.nbytes)
        self.others = memory.others
        self.pairs = [dist.new_group([rank, rank + 1]) for rank in range(0, self.size, 2)]
        self.gradients = torch.randn(40 << 20, device="cuda")
        self.reduced = torch.empty(20 << 20, device="cuda")

    def place(self, rank: int) -> Tensor:
        """Return the place of this rank's share in the slot of ``rank``."""
        return self.slot.view(rank, (ROWS, HIDDEN), torch.bfloat16, self.rank * self.share.numel())

    def push(self, *ranks: int) -> None:
        for rank in ranks:
            driver.copy(self.aside, self.place(rank), self.share)

    def pull(self, *ranks: int) -> None:
        for rank in ranks:
            driver.copy(self.aside, self.whole[:ROWS], self.place(rank))

    def gather(self) -> None:
        with torch.cuda.stream(self.aside):
            dist.all_gather_into_tensor(self.whole, self.share)

    def scatter(self) -> None:
        with torch.cuda.stream(self.aside):
            dist.reduce_scatter_tensor(self.share, self.whole)

    def scatter_gradients(self) -> None:
        with torch.cuda.stream(self.aside):
            dist.reduce_scatter_tensor(self.reduced, self.gradients, group=self.pairs[self.rank // 2])

    def product(self) -> None:
        torch.mm(self.x, self.weight.t(), out=self.y)


def together(bench: Bench, side: Callable[[], Any], sides: int, products: int) -> tuple[float, float]:
    """Return the milliseconds of ``products`` products and of ``sides`` calls of ``side`` that start together."""
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(LEAD)
        bench.aside.wait_stream(bench.current)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        marks[0].record(bench.current)
        marks[2].record(bench.aside)
        for _ in range(sides):
            side()
        marks[3].record(bench.aside)
        for _ in range(products):
            bench.product()
        marks[1].record(bench.current)
        torch.cuda.synchronize()
        times = torch.tensor([marks[0].elapsed_time(marks[1]), marks[2].elapsed_time(marks[3])], device="cuda")
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        found.append(times.tolist())
    work, beside = (statistics.median(times) for times in zip(*found[1:], strict=True))
    return work, beside


def flags(bench: Bench) -> dict[str, dict[str, float]]:
    """Return microseconds on host and device for one call of each function."""
    words = torch.zeros(16, dtype=torch.int32, device="cuda")
    flag = (words.data_ptr(),)

    def handshake(wait: Callable[[], None]) -> Callable[[], None]:
        return lambda: (driver.raise_flags(bench.current, flag), wait())[1]

    calls: dict[str, Callable[[], Any]] = {
        "raise": lambda: driver.raise_flags(bench.current, flag),
        "raise, then wait": handshake(lambda: driver.wait(bench.current, flag)),
        "raise, then spin": handshake(lambda: spin.wait(flag)),
        "copy of 4 KB": lambda: driver.copy(bench.current, bench.share[0], bench.whole[0]),
    }
    found = {}
    for name, call in calls.items():
        call()
        words.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(4 * LEAD)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begun = time.perf_counter()
        for _ in range(300):
            call()
        host = (time.perf_counter() - begun) / 300 * 1e6
        stop.record()
        torch.cuda.synchronize()
        found[name] = {"host_us": host, "device_us": start.elapsed_time(stop) / 300 * 1e3}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    a = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    bench = Bench()
    partner = bench.rank ^ 1
    sides: dict[str, Callable[[], Any]] = {
        "pull from one peer": lambda: bench.pull(partner),
        "push to one peer": lambda: bench.push(partner),
        "pull from all in turn": lambda: bench.pull(*bench.others),
        "push to all in turn": lambda: bench.push(*bench.others),
        "all-gather": bench.gather,
        "reduce-scatter": bench.scatter,
        "reduce-scatter of pairs, 168 MB of float32": bench.scatter_gradients,
    }
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "gpus": bench.size, "torch": torch.__version__}
    result |= {"command": "torchrun benchmarks/contention.py", "product_ms": together(bench, int, 0, 24)[0] / 24}
    result["beside"] = {}
    for name, side in sides.items():
        side()
        _, one = together(bench, side, 20, 0)
        many = int(25 / (one / 20)) + 1  # enough calls to last longer than 24 products
        _, alone = together(bench, side, many, 0)
        work, beside = together(bench, side, many, 24)
        found = {"alone_ms": alone / many, "beside_products_ms": beside / many, "product_ms": work / 24}
        result["beside"][name] = found
        if bench.rank == 0:
            print(name, {key: round(value, 4) for key, value in found.items()}, flush=True)
    result["flags"] = flags(bench)
    if bench.rank == 0:
        print(result["flags"], "product alone", result["product_ms"], flush=True)
        if a.output:
            a.output.write_text(json.dumps(result, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
