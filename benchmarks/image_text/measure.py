"""Measures a row in this process, one of its ranks, after a narrow twin has shown that losses are right."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.image_text import ours, theirs
from benchmarks.image_text.row import Row
from benchmarks.image_text.shapes import Shape, twin
from benchmarks.meter import Meter, device_name, forget
from benchmarks.peers.megalight import Wrong, say, sharding_of, show
from benchmarks.peers.sharded_llama import process_group
from benchmarks.roofline import RATES
from benchmarks.step import Step
from megalight.imports import has
from megalight.optim import AdamConfig
from megalight.parallel.recompute import RecomputeOptions
from megalight.strategies import DataParallelOptions, MegatronStrategy

CHECKED_STEPS = 4
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp8": 3e-2}
"""Precision -> relative difference of a twin's losses from float32 that rounding may cause."""


def data_parallel_of(row: Row) -> DataParallelOptions:
    """Return what the ranks of one of our rows share."""
    return DataParallelOptions(level=row.level, **sharding_of(Step(sharding=row.sharding)))  # type: ignore[arg-type]


def train_ours(
    row: Row,
    shape: Shape,
    steps: int,
    tick: Callable[[Any], None],
    begin: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Train Megalight's model in the layout of a row."""
    again = RecomputeOptions(granularity="selective", modules=row.recompute) if row.recompute else None
    strategy = MegatronStrategy(micro_batch_size=shape.mbs, data_parallel=data_parallel_of(row), recompute=again)
    arguments = shape.rows * row.gpus, strategy, row.arithmetic, row.device, steps, tick, begin
    ours.train(shape, *arguments, row.freeze, row.graph, row.recipe, **options)


def train_theirs(
    row: Row,
    shape: Shape,
    steps: int,
    tick: Callable[[Tensor], None],
    begin: Callable[[], None] = lambda: None,
    lr: float = 1e-4,
    compiled: bool = False,
) -> None:
    """Train the model of `transformers`: on one rank with float32 weights under autocast, on several under FSDP2."""
    model, half = theirs.reference(shape.config, row.device, row.trained), row.arithmetic == "bf16"
    if compiled:
        theirs.compiled(model)
    rank, before = 0, None
    if row.gpus > 1:
        rank, before = dist.get_rank(), theirs.sharded(model, row.level, half)
    elif half:
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
    micros = theirs.inputs_of(shape, row.device, rank, row.gpus)
    begin()
    theirs.train(model, micros, row.device, steps, tick, lr, autocast=half and before is None, before=before)


def check(row: Row) -> dict[str, Any]:
    """Train a narrow twin from equal weights, and return how far its losses are from `transformers` in float32.

    Losses are means over the batches of all ranks; `transformers` in float32 has them all on each rank.

    Raises:
        Wrong: too far.
    """
    small, lr, steps = twin(row.made()), 1e-3, CHECKED_STEPS
    model: Any = theirs.reference(small.config, row.device, row.trained)
    exact, found = list[float](), list[float]()
    everything = [micro for rank in range(row.gpus) for micro in theirs.inputs_of(small, row.device, rank, row.gpus)]
    with folder_of_all(row.gpus, model.save_pretrained) as folder:
        theirs.train(model, everything, row.device, steps, lambda loss: exact.append(float(loss)), lr)
        if row.way == "megalight":
            adam = AdamConfig(lr=lr, weight_decay=0.0)
            tick = lambda strategy: found.append(float(strategy.report.loss))  # noqa: E731
            train_ours(row, small, steps, tick, weights=folder, optimizer=adam)
        else:
            train_theirs(row, small, steps, lambda loss: found.append(mean_of_ranks(loss, row.gpus)), lr=lr)
    worst = max(abs(a - b) / b for a, b in zip(found, exact, strict=True))
    say(f"twin: losses {show(found)}, in float32 {show(exact)}, relative difference {worst:.1e}")
    if not worst < TOLERANCE[row.arithmetic]:
        raise Wrong(f"the twin's losses differ from float32 by {worst:.1e}: {found}, {exact}")
    return {"twin_losses": found, "twin_losses_float32": exact, "twin_difference": worst}


@contextmanager
def folder_of_all(ranks: int, save: Callable[[str], object]) -> Iterator[str]:
    """Save in a folder for the time of the context, and yield that of the first rank: `transformers` saves on it only.

    Other versions save on every rank, so each has a folder of its own.
    """
    with tempfile.TemporaryDirectory() as own:
        save(own)
        first = [own]
        if ranks > 1:
            dist.broadcast_object_list(first)  # after the first rank has saved
        yield first[0]
        if ranks > 1:
            dist.barrier()


def mean_of_ranks(loss: Tensor, ranks: int) -> float:
    """Return the mean of a loss over ranks."""
    if ranks > 1:
        dist.all_reduce(loss)
    return float(loss) / ranks


def measure(row: Row) -> dict[str, Any]:
    """Measure a row on all of its ranks, and return its record. Seconds are those of the slowest rank."""
    if row.way == "transformers" and not has("transformers"):
        return {"row": row.name, "refused": "transformers is not installed"}
    timing = row.timing()
    with process_group(timing) if row.gpus > 1 else nullcontext():
        checks = {} if row.unchecked else check(row)
        forget(timing)
        found = timed(row, timing)
    return {**found, "checks": checks}


def timed(row: Row, timing: Step) -> dict[str, Any]:
    """Train a row's model, and return how long a step took. ``held_gib`` is memory that earlier rows have not freed."""
    shape, meter = row.made(), Meter(timing, profiled=row.breakdown)
    held = torch.cuda.memory_allocated() / 2**30 if row.device == "cuda" else 0.0
    steps = meter.total if row.breakdown else meter.together  # no steps one by one: they are not reported here
    if row.way == "megalight":
        train_ours(row, shape, steps, lambda strategy: meter.tick(), meter.start)
    else:
        train_theirs(row, shape, steps, lambda loss: meter.tick(), meter.start, compiled=row.device == "cuda")
    meter.close()
    every: list[Any] = [meter.seconds()]
    if row.gpus > 1:
        every = [None] * row.gpus
        dist.all_gather_object(every, meter.seconds())
    seconds = max(every, key=statistics.median)
    median, where = statistics.median(seconds), device_name(timing)
    rows, flops = shape.rows * row.gpus, shape.flops(row.passes)
    return {
        "row": row.name,
        "device": where,
        "gpus": row.gpus,
        "layers": shape.config.language.num_layers,
        "tower": "trained" if row.trained else "frozen",
        "sharding": list(row.sharding),
        "rows_of_a_micro_batch": shape.mbs,
        "micro_batches": shape.micro,
        "seconds": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "tflops": flops / median / 1e12,
        "share_of_sustained": flops / median / RATES[where].gemm if where in RATES else None,
        "tokens": shape.seq * rows,
        "image_tokens": shape.image_tokens() * rows,
        "tokens_per_second": shape.seq * rows / median,
        "held_gib": held,
        "peak_gib": [peak for peak, _ in meter.ranks],
        **({"breakdown": [parts for _, parts in meter.ranks]} if row.breakdown else {}),
    }
