"""Time reading managed memory whose pages are on the host, with and without prefetching the next part.

    python benchmarks/managed_memory.py RESULT.json

Each part is read by a few sums, in turn. Without prefetching, the first sum waits for every page that it meets. With
it, the pages of the next part travel beside the sums of this one. The memory is smaller than what the device has free.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalight.parallel.host_memory import ManagedMemory, prefetch, why_not

GIB = 2**30
READS = 4
"""Sums of each part."""


def seconds(parts: Tensor, ahead: bool) -> float:
    """Return the time to read all parts, whose pages are on the host."""
    device, beside = parts.device, torch.cuda.Stream()
    for part in parts:
        prefetch(part, torch.device("cpu"))
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    beside.wait_stream(torch.cuda.current_stream())
    arrived = []
    for part in parts if ahead else ():
        prefetch(part, device, beside)
        arrived.append(beside.record_event())
    for number, part in enumerate(parts):
        if ahead:
            torch.cuda.current_stream().wait_event(arrived[number])
        for _ in range(READS):
            part.sum()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--part-gib", type=float, default=0.5)
    a = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    if (reason := why_not(device)) is not None:
        raise SystemExit(f"managed memory {reason}")
    numel = int(a.part_gib * GIB) // 4
    needed, free = a.parts * numel * 4, torch.cuda.mem_get_info()[0]
    if needed > free // 2:
        raise SystemExit(f"{needed / GIB:.1f} GiB are more than half of the {free / GIB:.1f} GiB that are free")
    memory = ManagedMemory(device)
    with memory.allocating():
        managed = torch.ones(a.parts, numel, device=device)
    found = {}
    for name, ahead in (("on demand", False), ("prefetched", True)):
        seconds(managed, ahead)
        found[name] = statistics.median(seconds(managed, ahead) for _ in range(3))
    record = {
        "command": " ".join(["benchmarks/managed_memory.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "gib": needed / GIB,
        "reads": READS,
        "seconds": found,
        "gb_per_s": {name: needed / took / 1e9 for name, took in found.items()},
    }
    a.result.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    rates = "; ".join(f"{name} {took:.4f} s ({needed / took / 1e9:.1f} GB/s)" for name, took in found.items())
    print(f"RESULT managed memory, {needed / GIB:.1f} GiB from the host: {rates}")


if __name__ == "__main__":
    main()
