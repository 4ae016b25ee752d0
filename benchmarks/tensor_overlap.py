"""Split linear layers, forward and backward, with every way to overlap their communication.

    torchrun --nproc_per_node 4 benchmarks/tensor_overlap.py [--tokens 8192] [--output OUT.json]
    torchrun --nproc_per_node 4 benchmarks/tensor_overlap.py --ways pipelined --ctas 4 8 16 32 --pieces 2 4

The layers are those of an 8-billion-parameter Llama-3, split over all ranks with sequence parallelism, in bf16, with
weight gradients added to float32. The script also times the layer's "products" without messages, and its "messages"
(the collectives of the plain way, one after another) without products. The time of a way minus that of the products is
exposed communication; divided by the time of the messages, it is the fraction that did not overlap. Before timing,
outputs and gradients of every way are compared with the plain way in float32. Times are medians of the slowest rank,
each a mean over several calls in a row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalight.errors import LayoutError
from megalight.ops.linear import linear
from megalight.ops.parameter import collect
from megalight.parallel.collectives import start_all_gather, start_reduce_scatter
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shared_state import SharedState
from megalight.parallel.tensor.linear import ColumnLinear, RowLinear
from megalight.parallel.tensor.overlap.pipelined import best_pieces
from megalight.parallel.tensor.overlap.spec import TensorOptions

CHECKED_TOKENS = 1024
TOLERANCE = 1.5e-2
CALLS = 4
"""Calls in a row for one measurement, so that the host is ahead of the device."""


@dataclass(frozen=True)
class Layer:
    """Input and output features of the whole layer, and which of them are split."""

    name: str
    inner: int
    width: int
    column: bool

    def local(self, tp: int) -> tuple[int, int]:
        """Return the shape of the weight on one rank."""
        return (self.width // tp, self.inner) if self.column else (self.width, self.inner // tp)


class Bench:
    """One layer on this rank, with its input and gradient for ``tokens`` tokens over all ranks."""

    def __init__(
        self, layer: Layer, tokens: int, shared: SharedState, device: torch.device, dtype: torch.dtype
    ) -> None:
        tp, rank = shared.mesh.tp, shared.mesh.rank("tp")
        generator = torch.Generator(device).manual_seed(rank)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        self.layer, self.shared = layer, shared
        self.weight = nn.Parameter(draw(*layer.local(tp)) * layer.inner**-0.5)
        collect(self.weight, torch.zeros(self.weight.shape, device=device))
        rows = tokens // tp
        shape = (rows, layer.inner) if layer.column else (tokens, layer.inner // tp)
        self.x = draw(*shape).requires_grad_()
        self.grad = draw(*((tokens, layer.width // tp) if layer.column else (rows, layer.width)))
        self.whole_x = draw(tokens, self.weight.shape[1]).requires_grad_()
        self.whole_grad = draw(tokens, self.weight.shape[0])
        self.module: nn.Module
        if layer.column:
            self.module = ColumnLinear(self.weight, None, [self.weight.shape[0]], shared, name=layer.name)
        else:
            self.module = RowLinear(self.weight, None, shared, name=layer.name)

    def forward(self) -> Tensor:
        return self.module(self.x)

    def both(self) -> Tensor:
        return torch.autograd.grad(self.module(self.x), self.x, self.grad)[0]

    def products(self) -> Tensor:
        return linear(self.whole_x, self.weight)

    def both_products(self) -> Tensor:
        return torch.autograd.grad(linear(self.whole_x, self.weight), self.whole_x, self.whole_grad)[0]

    def messages(self) -> None:
        group = self.shared.group
        if self.layer.column:
            start_all_gather(self.x.detach(), group).wait()
        else:
            start_reduce_scatter(self.whole_grad, group).wait()

    def both_messages(self) -> None:
        group = self.shared.group
        self.messages()
        if self.layer.column:
            start_all_gather(self.x.detach(), group).wait()
            start_reduce_scatter(self.whole_x.detach(), group).wait()
        else:
            start_all_gather(self.grad, group).wait()

    def results(self) -> dict[str, Tensor]:
        self.weight.main_grad.zero_()
        return {"output": self.forward().detach(), "input": self.both(), "weight": self.weight.main_grad.clone()}


def check(layer: Layer, shared: SharedState, device: torch.device, dtype: torch.dtype) -> None:
    """Stop on all ranks if results on any rank differ from the plain way in float32."""
    tokens = CHECKED_TOKENS if device.type == "cuda" else 8 * shared.mesh.tp
    found = Bench(layer, tokens, shared, device, dtype)
    plain = SharedState(shared.mesh, True, tensor=TensorOptions(overlap="plain"))
    exact = Bench(layer, tokens, plain, device, torch.float32)
    for name in ("x", "grad"):
        getattr(exact, name).data.copy_(getattr(found, name).data)
    exact.weight.data.copy_(found.weight.data)
    wanted = exact.results()
    for name, result in found.results().items():
        error = (result.float() - wanted[name]).norm() / wanted[name].norm()
        worst = error.nan_to_num(float("inf"))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if not worst.item() <= TOLERANCE:
            raise RuntimeError(f"{layer.name}: {name} is off by {worst.item():.2e}; not timed")


def milliseconds(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Return the median of the slowest rank's times."""
    times = []
    for repeat in range(2 + repeats):
        dist.barrier()
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS):
                call()
            stop.record()
            torch.cuda.synchronize()
            taken = start.elapsed_time(stop) / CALLS
        else:
            begun = time.perf_counter()
            for _ in range(CALLS):
                call()
            taken = 1e3 * (time.perf_counter() - begun) / CALLS
        if repeat >= 2:
            times.append(taken)
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def pair(bench: Bench, forward: str, both: str, repeats: int, device: torch.device) -> dict[str, float]:
    with torch.no_grad():
        first = milliseconds(getattr(bench, forward), repeats, device)
    return {"forward_ms": first, "both_ms": milliseconds(getattr(bench, both), repeats, device)}


def ways(a: argparse.Namespace) -> dict[str, TensorOptions]:
    """Return the options of each timed way, by name."""
    found = {}
    for way in a.ways:
        for pieces in a.pieces if way != "plain" else [None]:
            for ctas in a.ctas if way == "pipelined" else [None]:
                for keep in (False, True) if a.keep else (False,):
                    name = (
                        way + (f", {pieces} pieces" if pieces else "") + (f", {ctas} CTAs" if len(a.ctas) > 1 else "")
                    )
                    options = TensorOptions(overlap=way, pieces=pieces, max_ctas=ctas, keep_gathered=keep)
                    found[name + (", kept" if keep else "")] = options
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of one micro-batch, over all ranks")
    parser.add_argument("--ways", nargs="+", default=["plain", "pipelined", "symmetric"])
    parser.add_argument("--pieces", type=int, nargs="+", default=[None], help="instead of those by size")
    parser.add_argument("--ctas", type=int, nargs="+", default=[None], help="SMs for pipelined communication")
    parser.add_argument("--keep", action="store_true", help="also with gathered inputs kept")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script")
    parser.add_argument("--output", type=Path)
    a = parser.parse_args()
    device, dtype = torch.device(a.device), torch.bfloat16
    if a.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if a.device == "cuda" else "gloo", timeout=timedelta(seconds=120))
    size = dist.get_world_size()
    mesh = ParallelMesh(size, dist.get_rank(), tp=size)
    layers = [
        Layer("qkv", a.hidden, 3 * a.hidden // 2, column=True),
        Layer("proj", a.hidden, a.hidden, column=False),
        Layer("gate_up", a.hidden, 2 * a.ffn, column=True),
        Layer("down", a.ffn, a.hidden, column=False),
    ]
    rows: list[dict[str, Any]] = []

    def add(layer: Layer, way: str, **more: Any) -> None:
        rows.append({"layer": layer.name, "tp": size, "tokens": a.tokens, "way": way, **more})
        if mesh.global_rank == 0:
            shown = ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in more.items())
            print(f"{layer.name:8} {way:28} {shown}", flush=True)

    shared = {name: SharedState(mesh, True, tensor=options) for name, options in ways(a).items()}
    base = SharedState(mesh, True, tensor=TensorOptions(overlap="plain"))
    for layer in layers:
        bench = Bench(layer, a.tokens, base, device, dtype)
        alone = pair(bench, "products", "both_products", a.repeats, device)
        moved = pair(bench, "messages", "both_messages", a.repeats, device)
        add(layer, "products", **alone)
        add(layer, "messages", **moved)
        for name, one in shared.items():
            try:
                one.check_overlap(layer.name, bench.weight, device)
                check(layer, one, device, dtype)
            except (LayoutError, RuntimeError) as error:
                add(layer, name, refused=str(error).splitlines()[0][:400])
                continue
            taken = pair(Bench(layer, a.tokens, one, device, dtype), "forward", "both", a.repeats, device)
            exposed = {key.replace("ms", "exposed_ms"): taken[key] - alone[key] for key in taken}
            share = {"share_of_messages_exposed": exposed["both_exposed_ms"] / moved["both_ms"]}
            way = "gather" if layer.column else "scatter"
            local = bench.weight.shape
            pieces = one.tensor.pieces or best_pieces(way, size, a.tokens // size, local[1], local[0], dtype.itemsize)
            cut = {} if one.tensor.overlap == "plain" else {"forward_pieces": pieces}
            add(layer, name, **taken, **exposed, **share, **cut)
    for name in shared:
        timed = [row for row in rows if row["way"] == name and "both_ms" in row]
        if len(timed) == len(layers) and mesh.global_rank == 0:
            total, exposed = (sum(row[key] for row in timed) for key in ("both_ms", "both_exposed_ms"))
            print(f"all      {name:28} both_ms {total:.3f}, exposed {exposed:.3f}", flush=True)
    if mesh.global_rank == 0 and a.output:
        machine = {
            "command": f"torchrun --nproc_per_node {size} benchmarks/tensor_overlap.py",
            "gpu": torch.cuda.get_device_name() if a.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if a.device == "cuda" else None,
        }
        a.output.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
