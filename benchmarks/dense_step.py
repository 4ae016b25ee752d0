"""Time one dense GPT training step on one or more GPUs: Megalight with Lightning, and peers in the same call.

    python benchmarks/dense_step.py --peers megalight hf-compile --out result.json
    torchrun --nproc-per-node 4 benchmarks/dense_step.py --tp 2 --pp 2 --vocab 128256 --layers 32

Every peer (a file of benchmarks/peers/) trains the same shape with AdamW, clipping at norm 1 and float32 gradients or
masters, on random tokens. Model FLOPs per token are 6 x matmul parameters (with the head, without the input embedding)
+ causal attention. Before timing, the script compares Megalight's losses with float32 (`--unchecked` skips the first
part of this check). It prints and writes seconds per optimizer step (the median of steps in a row, and the median of
steps that each start with an idle device), TFLOP/s, tokens/s, peak memory per GPU and the roofline. `megalight bench`
uses it to run the rows of a table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.meter import Meter, device_name, forget
from benchmarks.peers import PEERS, load, world_size
from benchmarks.roofline import RATES, roofline
from benchmarks.step import Step
from megalight.imports import version

SUSTAINED_TFLOPS = {device: rates.gemm / 1e12 for device, rates in RATES.items()}
"""Measured sustained bf16 matmul rate, the realistic limit of a training step."""

PACKAGES = (
    "lightning",
    "triton",
    "transformers",
    "peft",
    "transformer_engine",
    "megatron-core",
    "megatron-fsdp",
    "apex",
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=["megalight"], choices=PEERS)
    Step.add_arguments(parser)
    parser.add_argument("--also", nargs="+", default=[], help="further rows, each as 'pp=4 vpp=2 schedule=auto ...'")
    parser.add_argument("--profile", help="write a table of the time per kernel of one step here")
    parser.add_argument("--breakdown", action="store_true", help="also profile a step, and say where its time goes")
    parser.add_argument("--unchecked", action="store_true", help="do not train a narrow twin in float32 beforehand")
    parser.add_argument("--out", help="write the results here, as JSON")
    return parser.parse_args()


def variants(a: argparse.Namespace) -> Iterator[tuple[str, str, Step]]:
    """Yield every requested row: its name, its peer, and its step."""
    step = Step.of(a)
    for peer in a.peers:
        yield peer, peer, step
    for text in a.also:
        yield f"megalight {text}", "megalight", step.but(text)


def measure(
    name: str, peer: str, step: Step, *, checked: bool, breakdown: bool, profile: str | None = None
) -> dict[str, Any]:
    """Measure one row. If the peer cannot run the step, return the reason.

    Args:
        checked: whether to train a narrow twin in float32 beforehand.
        breakdown: whether to profile a step, too.
        profile: file for a table of the kernels of that step.
    """
    runner = load(peer)
    reason = runner.why_not(step)
    if reason:
        return {"peer": name, "refused": reason}
    forget(step)
    checks = runner.check(step) if checked else {}
    forget(step)
    first = int(os.environ.get("RANK", "0")) == 0
    breakdown = breakdown or bool(profile)
    meter = Meter(step, breakdown, profile if first else None)
    checks.update(runner.run(step, meter) or {})
    meter.close()
    seconds = meter.seconds()
    median = statistics.median(seconds)
    device = device_name(step)
    rate = step.flops_per_token * step.tokens_per_gpu / median / 1e12
    row: dict[str, Any] = {
        "peer": name,
        "seconds": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "seconds_alone": statistics.median(meter.alone()),
        "tflops": rate,
        "share_of_sustained": rate / SUSTAINED_TFLOPS[device] if device in SUSTAINED_TFLOPS else None,
        "tokens_per_second": step.tokens_per_gpu / median,
        "peak_gib": max(peak for peak, _ in meter.ranks),
        "checks": checks,
    }
    if device in RATES:
        least = roofline(step, RATES[device], world_size() // step.model_ranks)
        row["roofline"] = least.record()
        row["share_of_roofline"] = rate / least.tflops
    if len(meter.ranks) > 1:
        row["peak_gib_by_rank"] = [peak for peak, _ in meter.ranks]
    if breakdown:
        row["breakdown_by_rank"] = [found for _, found in meter.ranks]
    return row


def record_of(step: Step, command: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return measured rows with the settings that they were measured with."""
    return {
        "command": command,
        "device": device_name(step),
        "gpus": world_size(),
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{name: found for name in PACKAGES if (found := version(name))},
        },
        "shape": asdict(step),
        "rows": rows,
    }


def write(a: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write the rows so far."""
    if not a.out:
        return
    words = [word for word in sys.argv[1:] if word not in ("--out", a.out, "--profile", a.profile)]
    record = record_of(Step.of(a), " ".join(["benchmarks/dense_step.py", *words]), rows)
    Path(a.out).write_text(json.dumps(record, indent=1) + "\n")


def say(row: dict[str, Any]) -> None:
    if "refused" in row:
        print(f"REFUSED {row['peer']}: {row['refused']}", flush=True)
        return
    print(
        f"RESULT {row['peer']}: {row['seconds']:.4f} s/step ({row['seconds_alone']:.4f} alone), "
        f"{row['tflops']:.1f} TFLOP/s, "
        f"{row['tokens_per_second']:.0f} tokens/s, peak {row['peak_gib']:.1f} GiB",
        flush=True,
    )


def main() -> None:
    a = arguments()
    if a.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rows = []
    for name, peer, step in variants(a):
        rows.append(measure(name, peer, step, checked=not a.unchecked, breakdown=a.breakdown, profile=a.profile))
        if int(os.environ.get("RANK", "0")) == 0:
            say(rows[-1])
            write(a, rows)


if __name__ == "__main__":
    main()
