"""Full sharding beside its peers, in one call: Megalight with Lightning, `megalight.fully_shard`, FSDP2, megatron-fsdp.

    torchrun --nproc-per-node 2 benchmarks/full_sharding.py RESULT.json
    torchrun --nproc-per-node 4 benchmarks/full_sharding.py RESULT.json --layers 32
    torchrun --nproc-per-node 2 benchmarks/full_sharding.py RESULT.json --shape qwen3-moe --layers 8 \\
        --ways megalight "megalight ep=2"
    torchrun --nproc-per-node 2 benchmarks/full_sharding.py RESULT.json --layers 8 \\
        --ways megalight "megalight sharding=optimizer_offload_fraction:1.0"
    torchrun --nproc-per-node 2 benchmarks/full_sharding.py RESULT.json --small

The shape is that of Llama-3-8B with 16 layers, or of Qwen3-30B-A3B. A step has four micro-batches of one sequence of
4096 tokens. All ways of peers train the same model of `transformers`. Before a way is timed, it trains a narrow twin,
whose losses must be those of float32 on one device (`--unchecked` skips this). The result has medians, peak memory, and
both relative to each other way. `--ways` names other ways: a peer, and what its step has beside the shape. A way that
fails, for want of memory too, is told, and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.dense_step import PACKAGES, measure
from benchmarks.meter import device_name, forget
from benchmarks.peers import PEERS, world_size
from benchmarks.rows import QWEN3_MOE, TINY
from benchmarks.step import Step
from megalight.imports import version

TIMED = "mbs=1 steps=6 warmup=3"
SHAPES = {"llama3": "vocab=128256", "qwen3-moe": QWEN3_MOE}
SMALL_SHAPES = {"llama3": "", "qwen3-moe": "ffn=32 experts=4"}
FULL = "optim_grads_params"
WAYS = ("megalight", "fully-shard", "fsdp2", "megalight level=optim", "mfsdp")
"""A peer, and what its step has beside the shape. Our own first: a call that is cut short has them.

``level=optim`` is our own data parallelism that shards the optimizer only. ``mfsdp`` is the package ``megatron-fsdp``.
"""


def row_of(way: str, step: Step, unchecked: bool) -> dict[str, Any]:
    """Measure one way, or return how it failed. ``held_gib`` is memory that earlier ways have not freed."""
    peer, _, words = way.partition(" ")
    forget(step)
    held = torch.cuda.memory_allocated() / 2**30 if step.device == "cuda" else 0.0
    try:
        return measure(way, peer, step.but(words), checked=not unchecked, breakdown=False) | {"held_gib": held}
    except Exception as error:  # any: the other ways must be timed all the same
        failed = f"{type(error).__name__}: {error}"[:2000]
    forget(step)  # here, where the error no longer holds the frames that hold the tensors
    return {"peer": way, "failed": failed}


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the rate and the memory of each row of full sharding by us, relative to each other row."""
    timed = [row for row in rows if "tflops" in row]
    return {
        f"{ours['peer']} / {theirs['peer']}": {
            "tflops": ours["tflops"] / theirs["tflops"],
            "peak_gib": ours["peak_gib"] / theirs["peak_gib"],
        }
        for ours in timed
        if ours["peer"].split()[0] in ("megalight", "fully-shard") and "level=" not in ours["peer"]
        for theirs in timed
        if theirs is not ours
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Make a table: one line for each row, then one for each ratio."""
    lines = ["| | s/step | TFLOP/s | tokens/s per GPU | peak GiB | twin differs by |", "| --- |" + " ---: |" * 5]
    for row in rows:
        if "tflops" not in row:
            lines.append(f"| {row['peer']} | {row.get('refused') or row.get('failed')} | | | | |")
            continue
        twin = row["checks"].get("twin_difference")
        lines.append(
            f"| {row['peer']} | {row['seconds']:.4f} | {row['tflops']:.1f} | {row['tokens_per_second']:.0f} | "
            f"{row['peak_gib']:.1f} | {'unchecked' if twin is None else f'{twin:.1e}'} |"
        )
    lines += ["", "| | TFLOP/s | peak memory |", "| --- | ---: | ---: |"]
    for pair, ratio in ratios(rows).items():
        lines.append(f"| {pair} | {ratio['tflops']:.3f} | {ratio['peak_gib']:.3f} |")
    return "\n".join(lines)


def main(line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="each as 'megalight ep=2 layers=8 ...'")
    parser.add_argument("--shape", choices=SHAPES, default="llama3")
    parser.add_argument("--layers", type=int, default=16, help="32 are the whole model: for four GPUs")
    parser.add_argument("--but", default="", help="other values of the step, as 'steps=4 seq=8192'")
    parser.add_argument("--limit-gib", type=float, help="memory of a GPU that may be used: as if it had no more")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--unchecked", action="store_true", help="do not train the twins")
    a = parser.parse_args(line)
    words = f"{TINY} {SMALL_SHAPES[a.shape]}" if a.small else f"{SHAPES[a.shape]} {TIMED} layers={a.layers}"
    step = Step().but(f"{words} level={FULL}").but(a.but)
    if wrong := [way for way in a.ways if way.split()[0] not in PEERS]:
        parser.error(f"no peer of {', '.join(PEERS)} in {wrong[0]!r}")
    if step.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if a.limit_gib is not None:
            torch.cuda.set_per_process_memory_fraction(a.limit_gib * 2**30 / torch.cuda.mem_get_info()[1])
    first, rows = os.environ.get("RANK", "0") == "0", list[dict[str, Any]]()
    for way in a.ways:
        rows.append(row_of(way, step, a.unchecked))
        if not first:
            continue
        record = {
            "command": " ".join(["benchmarks/full_sharding.py", *(sys.argv[1:] if line is None else line)]),
            "device": device_name(step),
            "gpus": world_size(),
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda}
            | {name: found for name in PACKAGES if (found := version(name))},
            "shape": asdict(step),
            "rows": rows,
            "ratios": ratios(rows),
        }
        a.result.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")  # a later way may end the call
        print(table(rows[-1:]).splitlines()[2], flush=True)
    if first:
        print(table(rows), flush=True)
    return any("failed" in row for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
