"""Full sharding beside its peers, in one call: Megalight with Lightning, `megalight.fully_shard`, FSDP2, megatron-fsdp.

    torchrun --nproc-per-node 2 benchmarks/full_sharding.py RESULT.json
    torchrun --nproc-per-node 4 benchmarks/full_sharding.py RESULT.json --layers 32
    torchrun --nproc-per-node 2 benchmarks/full_sharding.py RESULT.json --small

The shape is that of Llama-3-8B with 16 layers: 4096 tokens, four micro-batches of one sequence. All but the first train
the same model of `transformers`. Before a peer is timed, it trains a narrow twin, whose losses must be those of float32
on one device (`--unchecked` skips this). The result has medians, peak memory, and both relative to each peer; the last
row is our own data parallelism that shards the optimizer only. A peer that fails is told, and the next one runs.
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
from benchmarks.peers import world_size
from benchmarks.rows import TINY
from benchmarks.step import Step
from megalight.imports import version

LLAMA3 = "vocab=128256 mbs=1 steps=6 warmup=3 level=optim_grads_params"
OURS, DATA_PARALLEL = "megalight", "megalight, optim"
WAYS = (OURS, "fully-shard", "fsdp2", "mfsdp", DATA_PARALLEL)
"""Our own first: a call that is cut short has them. ``mfsdp`` is the package ``megatron-fsdp``."""


def row_of(way: str, step: Step, unchecked: bool) -> dict[str, Any]:
    """Measure one way, or return how it failed."""
    peer, _, level = way.partition(", ")
    arguments = argparse.Namespace(unchecked=unchecked, profile=None, breakdown=False)
    try:
        return measure(arguments, way, peer, step.but(f"level={level}") if level else step)
    except Exception as error:  # any: the other peers must be timed all the same
        forget(step)
        return {"peer": way, "failed": f"{type(error).__name__}: {error}"[:2000]}


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the rate and the memory of each of our rows, relative to each other row."""
    timed = [row for row in rows if "tflops" in row]
    return {
        f"{ours['peer']} / {theirs['peer']}": {
            "tflops": ours["tflops"] / theirs["tflops"],
            "peak_gib": ours["peak_gib"] / theirs["peak_gib"],
        }
        for ours in timed
        if ours["peer"] in (OURS, "fully-shard")
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


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--layers", type=int, default=16, help="32 are the whole model: for four GPUs")
    parser.add_argument("--but", default="", help="other values of the step, as 'steps=4 seq=8192'")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--unchecked", action="store_true", help="do not train the twins")
    a = parser.parse_args(words)
    step = Step().but(f"{TINY} level=optim_grads_params" if a.small else f"{LLAMA3} layers={a.layers}").but(a.but)
    if step.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    first, rows = os.environ.get("RANK", "0") == "0", list[dict[str, Any]]()
    for way in a.ways:
        rows.append(row_of(way, step, a.unchecked))
        if not first:
            continue
        record = {
            "command": " ".join(["benchmarks/full_sharding.py", *(sys.argv[1:] if words is None else words)]),
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
