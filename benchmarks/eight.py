"""What rows of eight GPUs will reach, predicted from rows that were measured on four, before any of them has run.

    python benchmarks/eight.py            # prints the table of docs/performance/eight-gpus.md
    megalight bench NAME --peers          # measures a row, on eight GPUs

A row keeps the share of the roofline (``benchmarks/roofline.py``: operations and bytes, each at its measured rate) that
a row of the same kind of layout has reached, but for the bubble of its pipeline: ``(pp - 1) / (micro vpp + pp - 1)`` of
the time, which a row with other micro-batches has in another measure. What messages expose is part of that share. Eight
ranks send 7/8 of what they gather, four ranks 3/4, so it grows where nothing hides them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from benchmarks.roofline import RATES, roofline
from benchmarks.rows import ROWS, Row
from benchmarks.step import Step

RESULTS = Path(__file__).with_name("results")
GPU = "NVIDIA H200"
EIGHT = [name for name, row in ROWS.items() if row.like]


class Prediction(NamedTuple):
    """Figures of a row, per GPU.

    Attributes:
        bound: TFLOP/s of the roofline.
        share: the share of its roofline that the other row has reached, without its bubble.
        bubble: the share of the time in which stages wait.
        tflops: predicted TFLOP/s.
        tokens: predicted tokens per second.
        seconds: predicted seconds of a step.
    """

    bound: float
    share: float
    bubble: float
    tflops: float
    tokens: float
    seconds: float


def bubble_of(step: Step) -> float:
    """Return the share of the time in which stages of 1F1B wait."""
    return (step.pp - 1) / (step.micro * step.vpp + step.pp - 1)


def predict(row: Row) -> Prediction:
    """Return what a row is expected to reach."""
    known, step = ROWS[row.like], row.step
    measured = json.loads((RESULTS / f"{row.like}.json").read_text())["rows"][0]["tflops"]
    reached = measured / _bound(known) / (1 - bubble_of(known.step))
    flops = step.tokens_per_gpu * step.flops_per_token
    tflops = _bound(row) * reached * (1 - bubble_of(step))
    seconds = flops / tflops / 1e12
    return Prediction(_bound(row), reached, bubble_of(step), tflops, step.tokens_per_gpu / seconds, seconds)


def _bound(row: Row) -> float:
    return roofline(row.step, RATES[GPU], row.gpus // row.step.model_ranks).tflops


def table() -> str:
    """Return the predictions as a table in Markdown."""
    lines = [
        "| row | roofline, TFLOP/s | share, of row | bubble | predicted TFLOP/s | tokens/s per GPU | step, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in EIGHT:
        found, row = predict(ROWS[name]), ROWS[name]
        lines.append(
            f"| `{name}` | {found.bound:.0f} | {found.share:.2f}, `{row.like}` | {found.bubble:.1%} | "
            f"{found.tflops:.0f} | {found.tokens:,.0f} | {found.seconds:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
