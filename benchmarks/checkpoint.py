"""Save and load one rank's weights and Adam state in four ways, check the loaded values, and time it.

    python benchmarks/checkpoint.py RESULTS.json [--gib 1] [--directory DIR] [--repeats 3] [--device cpu]

The time of every way includes fsync. Rates are from the fastest repeat, because other processes can only slow it down.
`no checksums` is ours without computing checksums; `summing` is the processor time of checksums. Loads read from the
page cache (the files were just written) into existing tensors, and ours verifies first. `disk` writes the same bytes
with plain `write` and `fsync`, which shows the speed of the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megalight.checkpoint import boxes
from megalight.checkpoint.disk import rank_files

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalight import checkpoint
from megalight.checkpoint.disk import datafile
from megalight.checkpoint.disk.files import blocks, checksum
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec

WIDTH = 1024


@dataclass
class Row:
    way: str
    save_gb_per_s: float
    load_gb_per_s: float | None
    save_seconds: list[float]
    load_seconds: list[float]


@dataclass
class Way:
    """One way to save all tensors at a path, and to load them into tensors with the same names."""

    name: str
    save: Callable[[dict[str, Tensor], Path], None]
    load: Callable[[dict[str, Tensor], Path], None] | None


def state(gib: float, device: str) -> dict[str, Tensor]:
    """Make bf16 weights, fp32 masters and two fp32 moments. Each layer has a `WIDTH` x 4 `WIDTH` matrix and a norm."""
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, Tensor] = {}
    while sum(tensor.nbytes for tensor in tensors.values()) < gib * 2**30:
        layer = len(tensors) // 8
        for name, shape in (("up.weight", (4 * WIDTH, WIDTH)), ("norm.weight", (WIDTH,))):
            for part in ("model", "master", "exp_avg", "exp_avg_sq"):
                dtype = torch.bfloat16 if part == "model" else torch.float32
                tensor = torch.randn(shape, generator=generator, device=device)
                tensors[f"{part}.layers.{layer}.{name}"] = tensor.to(dtype)
    return tensors


def views(tensors: dict[str, Tensor]) -> dict[str, checkpoint.View]:
    specs = {name: ShardSpec.replicated(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return checkpoint.views_of_parameters(tensors.items(), specs, ParallelMesh())


def load_ours(tensors: dict[str, Tensor], path: Path) -> None:
    checkpoint.open(path).fill(checkpoint.targets_of(views(tensors)))


def save_unsummed(tensors: dict[str, Tensor], path: Path) -> None:
    with patch.object(rank_files, "checksum", lambda _: "0" * 16):
        checkpoint.save(path, views(tensors))


def load_unsummed(tensors: dict[str, Tensor], path: Path) -> None:
    with patch.object(datafile.DataFile, "verify", lambda *_: None):
        checkpoint.open(path).fill(checkpoint.targets_of(views(tensors)))


def summing(tensors: dict[str, Tensor]) -> float:
    """Return the processor seconds for the checksums of all tensors, block by block, in host memory."""
    staged = [boxes.as_bytes(tensor.cpu()).numpy().data for tensor in tensors.values()]
    start = time.process_time()
    for data in staged:
        for low, high in blocks(len(data)):
            checksum(data[low:high])
    return time.process_time() - start


def synced(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_torch(tensors: dict[str, Tensor], path: Path) -> None:
    torch.save(tensors, path)
    synced(path)


def load_torch(tensors: dict[str, Tensor], path: Path) -> None:
    for name, tensor in torch.load(path, weights_only=True).items():
        tensors[name].copy_(tensor)


def save_dcp(tensors: dict[str, Tensor], path: Path) -> None:
    dcp.save(tensors, checkpoint_id=path)


def write_plainly(tensors: dict[str, Tensor], path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            file.write(boxes.as_bytes(tensor).cpu().numpy().data)
        os.fsync(file.fileno())


WAYS = [
    Way("megalight", lambda t, path: checkpoint.save(path, views(t)), load_ours),
    Way("megalight, no checksums", save_unsummed, load_unsummed),
    Way("torch.save", save_torch, load_torch),
    Way("torch DCP", save_dcp, lambda tensors, path: dcp.load(tensors, checkpoint_id=path)),
    Way("disk", write_plainly, None),
]


def timed(action: Callable[[], None]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(tensors: dict[str, Tensor], directory: Path, repeats: int) -> list[Row]:
    """Measure all ways in turn, so that load of other processes affects all of them."""
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    saves: dict[str, list[float]] = {way.name: [] for way in WAYS}
    loads: dict[str, list[float]] = {way.name: [] for way in WAYS}
    loaded = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    for _ in range(repeats):
        for way in WAYS:
            path = directory / "checkpoint"
            saves[way.name].append(timed(lambda way=way, path=path: way.save(tensors, path)))
            if way.load is not None:
                for tensor in loaded.values():
                    tensor.zero_()
                loads[way.name].append(timed(lambda way=way, path=path: way.load(loaded, path)))
                wrong = [name for name, tensor in tensors.items() if not torch.equal(tensor, loaded[name])]
                assert not wrong, f"{way.name} brought back other values of {wrong[0]}"
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    rate = lambda seconds: nbytes / min(seconds) / 1e9 if seconds else None  # noqa: E731
    return [Row(w.name, rate(saves[w.name]), rate(loads[w.name]), saves[w.name], loads[w.name]) for w in WAYS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--directory", type=Path, help="where to write; default: the system's temporary directory")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    tensors = state(options.gib, options.device)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        rows = measure(tensors, Path(name), options.repeats)
    print(
        f"{nbytes / 1e9:.2f} GB in {len(tensors)} tensors on {options.device}, one process, best of {options.repeats}"
    )
    for row in rows:
        load = f"{row.load_gb_per_s:6.2f}" if row.load_gb_per_s else "     -"
        print(f"{row.way:<26} save {row.save_gb_per_s:6.2f} GB/s   load {load} GB/s")
    seconds = summing(tensors)
    share = seconds / min(rows[0].save_seconds)
    print(f"{'summing':<26}      {nbytes / seconds / 1e9:6.2f} GB/s   {share:.1%} of our save, beside the writing")
    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    report = {
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "device": device,
        "cores": os.cpu_count(),
        "bytes": nbytes,
        "summing_seconds": seconds,
        "rows": [asdict(row) for row in rows],
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
