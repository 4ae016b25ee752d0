"""Pipelines: Megalight's executor and ``torch.distributed.pipelining`` with the same layers and micro-batches.

    torchrun --nproc-per-node 4 benchmarks/pipelining.py --out result.json
    torchrun --nproc-per-node 2 benchmarks/pipelining.py --layers 4 --hidden 128 --ffn 344 --heads 4 --kv 2 --seq 128

All ranks form one pipeline; there is no other parallelism. The model is a stack of GPT layers without embedding and
head, so that all stages have equal work, in bf16 (float32 on CPU). Its loss is a mean square. All peers sum gradients
in the dtype of the weights. Before a schedule is timed, its gradients on a narrow model are compared with those of one
device. "layers alone" is the work of a rank without a pipeline: the same number of layers and micro-batches, but no
messages and no waiting. The script prints and writes medians of the slowest rank's seconds per step (forward and
backward of all micro-batches, no optimizer), the highest peak of memory, and the ratio of the times of torch's and our
schedule of the same kind.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from dense_step import SUSTAINED_TFLOPS
from torch import Tensor, nn
from torch.distributed import pipelining

from megalight.models.gpt import GPTConfig
from megalight.models.gpt.model import ROTARY, build_layer, build_rotary
from megalight.nn import LayerContext, run_layers
from megalight.nn.init import initialize
from megalight.ops.parameter import collect
from megalight.parallel.mesh import ParallelMesh, end_at_exit
from megalight.parallel.pipeline import schedules
from megalight.parallel.pipeline.executor import Executor
from megalight.parallel.pipeline.layout import PipelineLayout
from megalight.parallel.pipeline.timeline import rank_schedule_of
from megalight.types import Loss, PackedSequences

CUDA = torch.cuda.is_available()
TOLERANCE = 1e-3 if CUDA else 1e-9


@dataclass(frozen=True)
class Shape:
    layers: int = 32
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv: int = 8
    seq: int = 4096
    mbs: int = 1
    micro: int = 16

    @property
    def tokens(self) -> int:
        return self.mbs * self.seq

    @property
    def flops(self) -> float:
        """FLOPs of a step: 6 x parameters of matrix products, and causal attention."""
        head = self.hidden // self.heads
        weights = self.hidden * head * (2 * self.heads + 2 * self.kv) + 3 * self.hidden * self.ffn
        return self.layers * (6.0 * weights + 6.0 * self.heads * head * self.seq) * self.tokens * self.micro


@dataclass(frozen=True)
class Place:
    """This process's rank and device, and the dtype of its computation."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype


class Piece(nn.Module):
    """Some of the layers: ``[T, h] -> [T, h]``."""

    def __init__(self, shape: Shape, indices: Sequence[int], place: Place) -> None:
        super().__init__()
        config = GPTConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_heads=shape.heads,
            num_kv_heads=shape.kv,
            ffn_hidden_size=shape.ffn,
            vocab_size=8,
            max_sequence_length=shape.seq,
        )
        with torch.device(place.device):
            self.layers = nn.ModuleDict({str(index): build_layer(config, index) for index in indices})
            self.rotary = build_rotary(config)
        self.sequences = PackedSequences.of_uniform(shape.mbs, shape.seq, place.device)
        self.to(place.dtype)
        initialize(self, 0, "")
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        rotary = self.rotary(self.sequences.positions, hidden.dtype)
        return run_layers(self.layers, hidden, LayerContext(self.sequences, {ROTARY: rotary}))


@dataclass
class Case:
    """One way of running a step: this rank's modules, and the step, which returns the loss on the rank that has it."""

    pieces: list[Piece]
    step: Callable[[Tensor, Tensor], Tensor | None]

    def zero(self) -> None:
        torch._foreach_zero_([p.grad for piece in self.pieces for p in piece.parameters()])

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for piece in self.pieces for name, p in piece.named_parameters()}


Build: TypeAlias = Callable[[str, int, Shape, Place], Case]
"""Builds a case from the schedule, the number of chunks per rank, the shape and the place."""


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).to(torch.promote_types(output.dtype, torch.float32)).square().sum()


def megalight(schedule: str, vpp: int, shape: Shape, place: Place) -> Case:
    layout = PipelineLayout.even(shape.layers, place.size, vpp)
    mesh = ParallelMesh(place.size, place.rank, pp=place.size)
    pieces = [Piece(shape, stage.layers, place) for stage in layout.of_rank(place.rank)]
    for piece in pieces:
        for parameter in piece.parameters():  # as in the data-parallel engine; needed to delay weight gradients
            collect(parameter, parameter.grad)
    executor = Executor(pieces, layout, mesh, place.device)
    rank_schedule = rank_schedule_of(place.rank, schedules.build(schedule, place.size, vpp, shape.micro))

    def forward_step(model: nn.Module, batch: Any, carry: dict[str, Tensor] | None) -> dict[str, Tensor]:
        return {"hidden": model(batch[0] if carry is None else carry["hidden"])}

    def step(x: Tensor, y: Tensor) -> Tensor | None:
        batches = list(zip(x.chunk(shape.micro), y.chunk(shape.micro), strict=True))
        losses = executor.train(
            rank_schedule,
            batches,
            forward_step,
            lambda carry, batch: Loss(square(carry["hidden"], batch[1])),
            lambda loss: loss.sum / x.numel(),
        )
        return torch.stack([loss.sum for loss in losses]).sum() / x.numel() if losses else None

    return Case(pieces, step)


def torchs(schedule: str, vpp: int, shape: Shape, place: Place) -> Case:
    count = place.size * vpp
    here = [place.rank + chunk * place.size for chunk in range(vpp)]
    if "ZBV" in schedule:
        here = [place.rank, count - 1 - place.rank]
    each = shape.layers // count
    pieces = [Piece(shape, range(index * each, (index + 1) * each), place) for index in here]
    stages = [
        pipelining.PipelineStage(piece, index, count, place.device) for piece, index in zip(pieces, here, strict=True)
    ]
    elements = shape.micro * shape.tokens * shape.hidden
    kind = getattr(pipelining, schedule)
    runner = kind(
        stages[0] if schedule == "Schedule1F1B" else stages,
        shape.micro,
        loss_fn=lambda output, target: square(output, target) / elements,
        scale_grads=False,
    )
    quiet = {"return_outputs": False} if "return_outputs" in inspect.signature(runner.step).parameters else {}

    def step(x: Tensor, y: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        last = {"target": y, "losses": losses} if count - 1 in here else {}
        runner.step(*([x] if 0 in here else []), **last, **quiet)
        return torch.stack(losses).sum().detach() if losses else None

    return Case(pieces, step)


def alone(schedule: str, vpp: int, shape: Shape, place: Place) -> Case:
    """Run the layers of one rank on one micro-batch after another, for any schedule."""
    piece = Piece(shape, range(shape.layers // place.size), place)

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for hidden, target in zip(x.chunk(shape.micro), y.chunk(shape.micro), strict=True):
            loss = square(piece(hidden.detach().requires_grad_()), target) / x.numel()
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return Case([piece], step)


ROWS: dict[str, tuple[Build, str, int, str]] = {
    "layers alone": (alone, "", 1, ""),
    "megalight 1f1b": (megalight, "1f1b", 1, ""),
    "torch 1F1B": (torchs, "Schedule1F1B", 1, "megalight 1f1b"),
    "megalight interleaved": (megalight, "interleaved", 0, ""),
    "torch Interleaved1F1B": (torchs, "ScheduleInterleaved1F1B", 0, "megalight interleaved"),
    "megalight zero_bubble": (megalight, "zero_bubble", 1, ""),
    "megalight zero_bubble, chunks": (megalight, "zero_bubble", 0, ""),
    "torch InterleavedZeroBubble": (torchs, "ScheduleInterleavedZeroBubble", 0, "megalight zero_bubble, chunks"),
    "torch ZBVZeroBubble, 2 chunks": (torchs, "ScheduleZBVZeroBubble", 2, "megalight zero_bubble, chunks"),
}
"""Builder, schedule, chunks per rank (0 means ``--vpp``), and the row to compare with."""


def data(shape: Shape, place: Place) -> tuple[Tensor, Tensor]:
    """Make hidden states and targets of all micro-batches, the same on all ranks."""
    draws = torch.Generator(place.device).manual_seed(1)
    size = shape.micro * shape.tokens, shape.hidden
    x, y = (torch.randn(size, generator=draws, device=place.device, dtype=torch.float32) for _ in range(2))
    return x.to(place.dtype), y.to(place.dtype)


def check(build: Build, schedule: str, vpp: int, shape: Shape, place: Place) -> None:
    """Stop the run if gradients of a narrow model differ from those of one device."""
    narrow = replace(shape, hidden=32, ffn=48, heads=4, kv=2, seq=16)
    exact = replace(place, dtype=torch.float32 if CUDA else torch.float64)
    x, y = data(narrow, exact)
    whole = alone("", 1, narrow, replace(exact, rank=0, size=1))
    case = build(schedule, vpp, narrow, exact)
    wanted, expected = whole.step(x, y), whole.gradients()
    for _ in range(2):  # the second step must be correct too
        case.zero()
        loss = case.step(x, y)
        if loss is not None and not torch.allclose(loss.to(wanted.dtype), wanted, rtol=TOLERANCE):
            raise SystemExit(f"{schedule}: loss {float(loss)}, one device's is {float(wanted)}; not timed")
        for name, gradient in case.gradients().items():
            error = float((gradient - expected[name]).norm() / expected[name].norm())
            if not error <= TOLERANCE:
                raise SystemExit(f"{schedule}: rank {place.rank}, {name} is off by {error:.1e}; not timed")


def times(case: Case, shape: Shape, place: Place, steps: int, warmup: int) -> list[list[float]]:
    """Return wall seconds and processor seconds of the slowest rank, for each step."""
    x, y = data(shape, place)
    found = []
    for step in range(warmup + steps):
        case.zero()
        wait()
        together(place)
        start, busy = time.perf_counter(), time.process_time()
        case.step(x, y)
        wait()
        if step >= warmup:
            found.append([time.perf_counter() - start, time.process_time() - busy])
    slowest = torch.tensor(found, device=place.device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def together(place: Place) -> None:
    dist.barrier(device_ids=[place.device.index] if CUDA else None)


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def peaks(place: Place) -> list[float] | None:
    """Return the peak GiB of each rank since the last call."""
    if not CUDA:
        return None
    mine = torch.tensor([torch.cuda.max_memory_allocated() / 2**30], device=place.device)
    found = [torch.empty_like(mine) for _ in range(place.size)]
    dist.all_gather(found, mine)
    return [float(peak) for peak in found]


def fresh() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Row:
    """The measurements of one way of running a step."""

    def __init__(self, name: str, a: argparse.Namespace, shape: Shape, place: Place) -> None:
        self.name, self.a, self.shape, self.place = name, a, shape, place
        self.build, self.schedule, chunks, self.beside = ROWS[name]
        self.vpp = chunks or a.vpp
        self.fits = shape.layers % (place.size * self.vpp) == 0 and (chunks == 1 or self.vpp > 1)
        self.times: list[list[float]] = []
        self.peaks: list[float] | None = None
        self.refused = ""

    def measure(self) -> None:
        """Measure one round. The first round starts with the check."""
        fresh()
        try:
            if not self.times and self.build is not alone:
                check(self.build, self.schedule, self.vpp, self.shape, self.place)
            case = self.build(self.schedule, self.vpp, self.shape, self.place)
        except ValueError as error:  # it is raised on all ranks
            self.refused = str(error)
            return
        fresh()
        self.times += times(case, self.shape, self.place, self.a.steps, self.a.warmup)
        self.peaks = peaks(self.place)

    def median(self, kind: int = 0) -> float:
        return statistics.median(pair[kind] for pair in self.times)

    def record(self, rows: dict[str, Row]) -> dict[str, Any]:
        if self.refused:
            return {"peer": self.name, "refused": self.refused}
        rate = self.shape.flops / self.place.size / self.median() / 1e12
        ceiling = SUSTAINED_TFLOPS.get(torch.cuda.get_device_name()) if CUDA else None
        found: dict[str, Any] = {
            "peer": self.name,
            "seconds": self.median(),
            "seconds_min": min(pair[0] for pair in self.times),
            "seconds_max": max(pair[0] for pair in self.times),
            "processor_seconds": self.median(1),
            "tflops": rate,
            "share_of_sustained": rate / ceiling if ceiling else None,
            "layers_alone_share": rows["layers alone"].median() / self.median(),
            "peak_gib": max(self.peaks) if self.peaks else None,
            "peak_gib_by_rank": self.peaks,
        }
        if self.beside in rows and rows[self.beside].times:
            found |= {"beside": self.beside, "times_as_long": self.median() / rows[self.beside].median()}
        return found


def described(found: dict[str, Any]) -> str:
    if "refused" in found:
        return f"RESULT {found['peer']}: refused: {found['refused']}"
    parts = [
        f"RESULT {found['peer']:30} {found['seconds']:.4f} s ({found['processor_seconds']:.4f} s of processors)",
        f"{found['tflops']:.3g} TFLOP/s per rank",
        f"layers alone take {found['layers_alone_share']:.0%} of it",
    ]
    if found["peak_gib"] is not None:
        parts.append(f"peak {found['peak_gib']:.1f} GiB")
    if "times_as_long" in found:
        parts.append(f"{found['times_as_long']:.3f} x {found['beside']}")
    return ", ".join(parts)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Shape()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vpp", type=int, default=2, help="chunks per rank where there are several; 1: never")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="all rows so often in turn, for machines that are shared")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--out", help="write the results here, as JSON")
    return parser.parse_args()


def main() -> None:
    a = arguments()
    shape = Shape(**{name: getattr(a, name) for name in vars(Shape())})
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if CUDA else "gloo")
    end_at_exit()
    place = Place(dist.get_rank(), dist.get_world_size(), device, torch.bfloat16 if CUDA else torch.float32)
    names = dict.fromkeys(["layers alone", *a.rows])
    rows = {name: row for name in names if (row := Row(name, a, shape, place)).fits}
    for turn in range(a.rounds):
        for row in rows.values():
            row.measure()
            if place.rank == 0 and turn == a.rounds - 1:
                print(described(row.record(rows)), flush=True)
    if a.out and place.rank == 0:
        words = [word for word in sys.argv[1:] if word not in ("--out", a.out)]
        record = {
            "command": " ".join([f"torchrun --nproc-per-node {place.size} benchmarks/pipelining.py", *words]),
            "device": torch.cuda.get_device_name() if CUDA else platform.machine(),
            "ranks": place.size,
            "versions": {"torch": torch.__version__, "python": platform.python_version(), "cuda": torch.version.cuda},
            "shape": {**vars(shape), "vpp": a.vpp},
            "rows": [row.record(rows) for row in rows.values()],
        }
        Path(a.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
