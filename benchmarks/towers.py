"""Where a vision tower runs: colocated with its language model, or on a disjoint rank.

    torchrun --nproc-per-node 2 benchmarks/towers.py RESULT.json
    torchrun --nproc-per-node 2 benchmarks/towers.py RESULT.json --small      # tiny models on the CPU

Both shapes of ``benchmarks/vlm.py``, with a quarter of the language model's layers, and everything trained. All ways
train on the same global batch:

- ``together``: data parallelism; each rank has both towers.
- ``disjoint``: the first rank has the tower and the projector, the others the language model.
- ``together, tp``: tensor and sequence parallelism of both towers.
- ``colocated``: the language model so, and a replica of the tower on each rank.

The first way of a shape is the referee: losses of the others in the same steps must be its own, or they are not timed.
Model FLOPs are those of ``benchmarks/vlm.py``, with the tower trained, over all GPUs: a GPU that waits counts. Seconds
are those of the slowest rank, and memory is told for each rank. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.dense_step import PACKAGES
from benchmarks.image_text import ours, shapes
from benchmarks.image_text.shapes import SHAPES, Shape, twin
from benchmarks.meter import Meter, device_name, forget
from benchmarks.peers import world_size
from benchmarks.peers.megalight import Wrong, say
from benchmarks.step import Step
from megalight.imports import version
from megalight.models.vlm.module import Trained
from megalight.optim import AdamConfig
from megalight.parallel.mesh import end_at_exit
from megalight.strategies import DataParallelOptions, MegatronStrategy, MegatronTowersStrategy

TP = {"tensor_parallel": 2, "sequence_parallel": True}
WAYS: dict[str, tuple[type[MegatronStrategy], dict[str, Any]]] = {
    "together": (MegatronStrategy, {}),
    "disjoint": (MegatronTowersStrategy, {"placement": "disjoint"}),
    "together, tp": (MegatronStrategy, TP),
    "colocated": (MegatronTowersStrategy, {"placement": "colocated", **TP}),
}
ROWS = {"cuda": {"llava-1.5": 32, "qwen2.5-vl": 16}, "cpu": {"llava-1.5": 4, "qwen2.5-vl": 4}}
"""Device -> shape -> rows of the global batch."""
LEARNING_RATE = 1e-5
TOLERANCE = 1e-2
"""Relative difference of losses that another order of sums in bf16 may cause in the steps of a row."""


def shape_of(name: str, device: str) -> Shape:
    """Return a shape with a quarter of its layers and the global batch, or a narrow twin for the CPU."""
    shape = shapes.shape_of(name, 4, trained=True)
    if device == "cpu":
        shape = replace(twin(shape), seq=128)
    return replace(shape, micro=ROWS[device][name] // shape.mbs)


def step_of(device: str) -> Step:
    """Return what the meter asks of a step."""
    return Step(device=device, steps=4, warmup=2) if device == "cuda" else Step(device="cpu", steps=2, warmup=1)


def train(shape: Shape, way: str, device: str, meter: Meter) -> list[Tensor]:
    """Train as many steps as the meter needs, and return their losses."""
    kind, layout = WAYS[way]
    losses: list[Tensor] = []

    def tick(strategy: Any) -> None:
        losses.append(strategy.report.loss)
        meter.tick()

    strategy = kind(micro_batch_size=shape.mbs, data_parallel=DataParallelOptions(level="optim"), **layout)
    precision, adam = "bf16" if device == "cuda" else "fp32", AdamConfig(lr=LEARNING_RATE)
    ours.train(shape, shape.rows, strategy, precision, device, meter.total, tick, meter.start, optimizer=adam)
    meter.close()
    return losses


def measure(name: str, way: str, device: str, referee: list[float] | None) -> dict[str, Any]:
    """Measure a row in all ranks; ``referee`` has the losses of the first way.

    Raises:
        Wrong: the losses are other ones.
    """
    shape, step = shape_of(name, device), step_of(device)
    meter = Meter(step)
    forget(step)
    losses = [float(loss) for loss in train(shape, way, device, meter)]
    worst = max((abs(a - b) / b for a, b in zip(losses, referee or losses, strict=True)), default=math.inf)
    if not worst < TOLERANCE:
        raise Wrong(f"{name}, {way}: losses {losses} differ by {worst:.1e} from {referee}")
    every: list[Any] = [None] * world_size()
    dist.all_gather_object(every, meter.seconds())
    seconds = max(every, key=statistics.median)
    median, tokens, flops = statistics.median(seconds), shape.seq * shape.rows, shape.flops(Trained())
    return {
        "row": f"{name}, {way}",
        "device": device_name(step),
        "ranks": world_size(),
        "layers": shape.config.language.num_layers,
        "seconds": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "tflops_per_gpu": flops / median / world_size() / 1e12,
        "share_of_tower": shape.image_flops(Trained()) / flops,
        "tokens": tokens,
        "tokens_per_second": tokens / median,
        "peak_gib": [peak for peak, _ in meter.ranks],
        "losses": losses,
        "difference_of_losses": worst,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Make a table, with the speed of each row relative to the first one of its shape."""
    lines = ["| | s/step | TFLOP/s per GPU | tokens/s | peak GiB of ranks | x together |", "| --- |" + " ---: |" * 5]
    first = {row["row"].split(",")[0]: row for row in reversed(rows)}
    for row in rows:
        peaks = ", ".join(f"{peak:.1f}" for peak in row["peak_gib"])
        faster = first[row["row"].split(",")[0]]["seconds"] / row["seconds"]
        lines.append(
            f"| {row['row']} | {row['seconds']:.4f} | {row['tflops_per_gpu']:.1f} | {row['tokens_per_second']:.0f} | "
            f"{peaks} | {faster:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    a = parser.parse_args()
    device, rows, referees = "cpu" if a.small else "cuda", list[dict[str, Any]](), dict[str, list[float]]()
    # The same way of all shapes first: the comparison that was asked for comes early.
    for way, name in ((way, name) for way in a.ways for name in a.shapes):
        try:
            row = measure(name, way, device, referees.get(name))
        except Wrong as wrong:  # on all ranks: all know the losses
            say(f"{wrong}")
            continue
        referees.setdefault(name, row["losses"])
        rows.append(row)
        say(table([each for each in rows if each["row"].startswith(name)]).splitlines()[-1])
        record = {
            "command": " ".join(["benchmarks/towers.py", "RESULT.json", *sys.argv[2:]]),
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda}
            | {package: found for package in PACKAGES if (found := version(package))},
            "rows": rows,
        }
        if int(os.environ["RANK"]) == 0:
            a.result.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")  # a later row may end the call
    say(table(rows))
    end_at_exit()


if __name__ == "__main__":
    main()
