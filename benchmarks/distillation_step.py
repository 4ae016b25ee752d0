"""What distillation adds to a student's training step and its teacher's forward pass, on one GPU.

    python benchmarks/distillation_step.py RESULT.json [--folder /dev/shm]
    python benchmarks/distillation_step.py RESULT.json --tiny     # tiny models on the CPU

The teacher has the shape of Llama-3-8B and random weights, the student that of Llama-3.2-3B. Three parts are timed in
one process, on the same tokens: steps of the student alone; the teacher's forward pass over the same micro-batches,
with its output layer's loss and without gradients; and steps in which the student learns from the teacher
(`Distillation`). The overhead is the last time over the sum of the first two, less one. The exit code is 0 if it is at
most 10 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.dense_step import PACKAGES
from benchmarks.meter import Meter, between, device_name, forget, mark, peak_gib, random_rows, synchronize
from benchmarks.peers.huggingface import llama
from benchmarks.peers.megalight import train
from benchmarks.step import Step
from megalight.callbacks import Distillation
from megalight.imports import version
from megalight.models.gpt.module import GPTModule
from megalight.types import TokenBatch

AIM = 0.1
"""Largest overhead."""
SHARED = "vocab=128256 seq=4096 mbs=1 micro=4 heads=32 kv=8 steps=6 warmup=3"
TEACHER = Step().but(f"{SHARED} layers=32 hidden=4096 ffn=14336")
STUDENT = Step().but(f"{SHARED} layers=28 hidden=3072 ffn=8192 heads=24")
TINY_SHARED = "vocab=64 seq=32 mbs=1 micro=2 heads=4 kv=2 steps=2 warmup=1 device=cpu precision=fp32"
TINY_TEACHER = Step().but(f"{TINY_SHARED} layers=2 hidden=32 ffn=64")
TINY_STUDENT = Step().but(f"{TINY_SHARED} layers=1 hidden=16 ffn=32")


def make_teacher(step: Step, folder: Path) -> None:
    """Write a teacher as a folder of ``transformers``."""
    dtype = torch.float32 if step.precision == "fp32" else torch.bfloat16
    llama(step, dtype).save_pretrained(folder)


def steps_of(step: Step, *callbacks: Any) -> dict[str, float]:
    """Train, and return seconds per step and peak memory."""
    forget(step)
    meter = Meter(step)
    train(step, meter.total, lambda strategy: meter.tick(), begin=meter.start, callbacks=callbacks)
    meter.close()
    return {"seconds": statistics.median(meter.seconds()), "peak_gib": max(peak for peak, _ in meter.ranks)}


def forward_of(step: Step, folder: Path) -> dict[str, float]:
    """Run the teacher's forward pass with the losses of its output layer, and return seconds per step."""
    forget(step)
    module = GPTModule(weights=str(folder))
    module.configure_model()
    dtype = torch.float32 if step.precision == "fp32" else torch.bfloat16
    model = module.model.to(device=step.device, dtype=dtype).eval()
    times = []
    for number in range(step.warmup + step.steps):
        synchronize()
        before = mark(step)
        for part in range(step.micro):
            ids = random_rows(step, step.mbs, number * step.micro + part).to(step.device)
            counted = torch.ones(step.mbs, step.seq, device=step.device)
            batch = TokenBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), counted)
            with torch.no_grad():
                module.forward_step(model, batch)
        after = mark(step)
        synchronize()
        times.append(between(before, after))
    return {"seconds": statistics.median(times[step.warmup :]), "peak_gib": peak_gib(step)}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--folder", type=Path, help="where the teacher's weights (16 GiB) are written for the time")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    a = parser.parse_args(words)
    teacher, student = (TINY_TEACHER, TINY_STUDENT) if a.tiny else (TEACHER, STUDENT)
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        make_teacher(teacher, Path(folder))
        parts: dict[str, Callable[[], dict[str, float]]] = {
            "student": lambda: steps_of(student),
            "teacher": lambda: forward_of(teacher, Path(folder)),
            "distillation": lambda: steps_of(student, Distillation(folder)),
        }
        rows = {}
        for name, part in parts.items():
            rows[name] = part()
            gc.collect()
            print(f"{name}: {rows[name]['seconds']:.4f} s, {rows[name]['peak_gib']:.1f} GiB", flush=True)
    overhead = rows["distillation"]["seconds"] / (rows["student"]["seconds"] + rows["teacher"]["seconds"]) - 1
    result = {
        "command": "benchmarks/distillation_step.py RESULT.json",
        "device": device_name(student),
        "versions": {"torch": torch.__version__} | {name: found for name in PACKAGES if (found := version(name))},
        "rows": rows,
        "overhead": overhead,
        "aim": AIM,
    }
    a.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"overhead {100 * overhead:.1f} %")
    return 0 if overhead <= AIM else 1


if __name__ == "__main__":
    raise SystemExit(main())
