"""Save a training run beside its steps and in between, load it again, and compare with torch's DCP and Lightning.

    python benchmarks/run_checkpoints.py RESULT.json [--directory DIR] [--ways sync persistent dcp] [--layers 22 ...]

The run is a GPT with AdamW, float32 masters and moments; its defaults have 1.5 billion parameters. All ways save the
same tensors of the same run. `blocked` is the time for which training stood still, the device being idle before: until
the save let it go on, and what the next step took longer. A save beside training goes on during the next steps, whose
median is compared with that of the steps before the save.
`persistent` saves twice: its first save also starts the worker and takes the memory. Loads are from the disk: the
page cache is dropped before. `disk` writes and reads the same bytes without anything else, which is the limit.
Every load is checked: the tensors must have the values that they had when they were saved.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor

from megalight.checkpoint import boxes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.dense_step import PACKAGES
from benchmarks.meter import device_name, synchronize
from benchmarks.peers.megalight import train
from benchmarks.step import Step
from megalight import checkpoint
from megalight.imports import version
from megalight.strategies.checkpoints import CheckpointOptions

SHAPE = "layers=22 hidden=2048 ffn=8192 heads=16 kv=8 mbs=2 micro=2"
WARMUP = 3
ALONE = 8
"""Number of steps without a save, whose median is the time of a step."""
BLOCK = 64 * 2**20


@dataclass
class Row:
    """Figures of one way, in seconds.

    Attributes:
        blocked: how long training stood still, with what the first step after it took longer.
        total: until the checkpoint was complete, to the end of a step.
        during: median of the further steps during the save; None: there were none.
        alone: median of steps without a save, of the same run.
        load: until the tensors had the saved values.
    """

    way: str
    nbytes: int
    blocked: float
    total: float
    alone: float
    during: float | None = None
    load: float | None = None
    steps: list[float] = field(default_factory=list)


@dataclass
class Way:
    """How to save and load.

    Attributes:
        save: begins to save at a path, and returns when training may go on.
        done: whether the save is complete.
        load: puts the saved values back. None: it is not timed.
        restores: whether it really does, which is then checked.
    """

    name: str
    save: Callable[[Path], Any]
    done: Callable[[Path], bool]
    load: Callable[[Path], None] | None
    restores: bool = True


class Probe:
    """Saves in several ways while a run trains, one after another.

    Args:
        ways: given the strategy of the run, the ways.
        directory: where to save.
        patience: seconds after which a save that is not complete is an error.
    """

    def __init__(self, ways: Callable[[Any], list[Way]], directory: Path, patience: float) -> None:
        self.rows: list[Row] = []
        self._make, self._directory, self._patience = ways, directory, patience
        self._ways: Iterator[Way] | None = None
        self._marks: list[float] = []
        self._count = 0
        self._current: tuple[Way, Row, float, float] | None = None
        self.finished = False

    def tick(self, strategy: Any) -> None:
        """Note the end of a step, and begin or end a save."""
        synchronize()
        self._marks.append(time.perf_counter())
        self._count += 1
        if self.finished or self._count <= WARMUP + ALONE:
            return
        if self._ways is None:
            self._ways = iter(self._make(strategy))
        if self._current is not None:
            way, row, begun, digest = self._current
            row.steps.append(self._marks[-1] - self._marks[-2])
            row.total = time.perf_counter() - begun
            if way.done(self._path):
                # What the first step took longer was spent on copies of the save.
                row.blocked += max(0.0, row.steps[0] - row.alone)
                # The last step may have been without the save for its most part.
                row.during = statistics.median(row.steps[1:-1] or row.steps)
                self._end(strategy, way, row, digest)
            elif row.total > self._patience:
                raise RuntimeError(f"{way.name} has not finished after {self._patience} s")
            return
        way = next(self._ways, None)  # type: ignore[assignment]
        if way is None:
            self.finished = True
            strategy.lightning_module.trainer.should_stop = True
            return
        alone = statistics.median([after - before for before, after in pairwise(self._marks)][-ALONE:])
        tensors = tensors_of(strategy)
        digest = digest_of(tensors)
        synchronize()
        begun = time.perf_counter()
        way.save(self._path)
        # Without waiting for the device, on which copies may go on beside the next step.
        blocked = time.perf_counter() - begun
        row = Row(way.name, sum(tensor.nbytes for tensor in tensors.values()), blocked, blocked, alone)
        if way.done(self._path):
            self._end(strategy, way, row, digest)
        else:
            self._current = way, row, begun, digest
            self._marks[-1] = time.perf_counter()

    @property
    def _path(self) -> Path:
        return self._directory / "saved.ckpt"

    def _end(self, strategy: Any, way: Way, row: Row, digest: float) -> None:
        self._marks, self._count, self._current = [], WARMUP, None
        if way.load is not None:
            forget_pages(self._path)
            synchronize()
            begun = time.perf_counter()
            way.load(self._path)
            synchronize()
            row.load = time.perf_counter() - begun
            found = digest_of(tensors_of(strategy))
            if way.restores and found != digest:
                raise RuntimeError(f"{way.name} brought back other values: {found} instead of {digest}")
        shutil.rmtree(self._path) if self._path.is_dir() else self._path.unlink()
        self.rows.append(row)
        print(describe(row), flush=True)


def tensors_of(strategy: Any) -> dict[str, Tensor]:
    """Return weights, masters and moments of the run as plain tensors, views of the run's memory."""
    strategy.engine.sync_parameters()
    return {f"{name}@{box.offset}": box.data for name, view in views_of(strategy).items() for box in view.boxes}


def views_of(strategy: Any) -> dict[str, checkpoint.View]:
    """Return what a checkpoint of the run holds."""
    return checkpoint.SCHEMES["fully_reshardable"](strategy.run.contents(optimizer=True))  # type: ignore[return-value]


def digest_of(tensors: dict[str, Tensor]) -> float:
    """Return a sum over all values, which differs when one tensor is of another step."""
    return float(torch.stack([tensor.double().abs().sum() for tensor in tensors.values()]).sum())


def forget_pages(path: Path) -> None:
    """Drop files from the page cache, so that they are read from the disk."""
    for file in [path] if path.is_file() else sorted(found for found in path.rglob("*") if found.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def ours(name: str) -> Callable[[Any], list[Way]]:
    """Return the ways of the strategy, which saves as it was told when the run began."""

    def ways(strategy: Any) -> list[Way]:
        way = Way(
            f"megalight {name}",
            lambda path: strategy.lightning_module.trainer.save_checkpoint(path),
            lambda path: path.exists(),  # its last act is to rename it to this
            lambda path: checkpoint.open(path).fill(checkpoint.targets_of(views_of(strategy))),
        )
        if name != "persistent":
            return [way]
        return [Way("megalight persistent, first save", way.save, way.done, None), way]

    return ways


def peers(names: list[str]) -> Callable[[Any], list[Way]]:
    """Return the ways of others."""

    def ways(strategy: Any) -> list[Way]:
        pending: list[Any] = []
        lightning, beside = TorchCheckpointIO(), AsyncCheckpointIO(TorchCheckpointIO())

        def save_torch(path: Path) -> None:
            lightning.save_checkpoint(tensors_of(strategy), path)
            forget_pages(path)  # Lightning returns before the bytes are on the disk

        def load_torch(path: Path) -> None:
            own = tensors_of(strategy)
            for key, tensor in torch.load(path, weights_only=True, map_location="cpu").items():
                own[key].copy_(tensor)

        def disk(path: Path) -> None:
            with path.open("wb", buffering=0) as file:
                for tensor in tensors_of(strategy).values():
                    file.write(boxes.as_bytes(tensor.contiguous()).cpu().numpy().data)
                os.fsync(file.fileno())

        def read(path: Path) -> None:
            held = bytearray(BLOCK)
            with path.open("rb", buffering=0) as file:
                while file.readinto(held):
                    pass

        def begin(path: Path) -> None:
            pending.append(dcp.async_save(tensors_of(strategy), checkpoint_id=path))

        def begin_lightning(path: Path) -> None:
            beside.save_checkpoint(tensors_of(strategy), path)
            assert beside._executor is not None
            # It has one thread, so this comes after the save.
            pending.append(beside._executor.submit(forget_pages, path))

        every = {
            "disk": Way("disk", disk, lambda _: True, read, restores=False),
            "dcp": Way(
                "torch DCP",
                lambda path: dcp.save(tensors_of(strategy), checkpoint_id=path),
                lambda _: True,
                lambda path: dcp.load(tensors_of(strategy), checkpoint_id=path),
            ),
            "dcp_async": Way("torch DCP, async_save", begin, lambda _: bool(pending[-1].done()), None),
            "lightning": Way("Lightning (torch.save)", save_torch, lambda _: True, load_torch),
            "lightning_async": Way(
                "Lightning, AsyncCheckpointIO", begin_lightning, lambda _: bool(pending[-1].done()), None
            ),
        }
        return [every[name] for name in names]

    return ways


def describe(row: Row) -> str:
    """Return a row as a line of text."""
    rate = lambda seconds: f"{row.nbytes / seconds / 1e9:5.2f} GB/s"  # noqa: E731
    during = "" if row.during is None else f"  steps {row.during / row.alone - 1:+.1%}"
    load = "" if row.load is None else f"  load {row.load:6.2f} s {rate(row.load)}"
    return f"{row.way:<34} blocked {row.blocked:6.2f} s  total {row.total:6.2f} s {rate(row.total)}{load}{during}"


OURS = ("sync", "persistent", "per_save")
PEERS = ("disk", "dcp", "dcp_async", "lightning", "lightning_async")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--directory", type=Path, help="where to save; default: the system's temporary directory")
    parser.add_argument("--ways", nargs="+", choices=OURS + PEERS, default=[*OURS, *PEERS])
    parser.add_argument("--patience", type=float, default=200, help="seconds within which each save must finish")
    parser.add_argument("--shape", default=SHAPE, help="the step, as 'layers=2 hidden=64 device=cpu ...'")
    options = parser.parse_args()
    step = Step().but(options.shape)
    others = [name for name in options.ways if name in PEERS]
    runs = [(ours(name), name) for name in options.ways if name in OURS] + ([(peers(others), "sync")] if others else [])
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        for ways, kind in runs:
            probe = Probe(ways, Path(name), options.patience)
            train(step, 10**6, probe.tick, checkpoints=CheckpointOptions(async_save=None if kind == "sync" else kind))  # type: ignore[arg-type]
            rows += probe.rows
            report = {
                "command": " ".join(["python", "benchmarks/run_checkpoints.py", *sys.argv[2:]]),
                "device": device_name(step),
                "cores": os.cpu_count(),
                "versions": {"torch": torch.__version__, **{name: v for name in PACKAGES if (v := version(name))}},
                "shape": asdict(step),
                "rows": [asdict(row) for row in rows],
            }
            options.result.parent.mkdir(parents=True, exist_ok=True)
            options.result.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
