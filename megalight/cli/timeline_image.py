"""The timeline of a pipeline's step as an image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalight.cli.image import write
from megalight.imports import require
from megalight.parallel.pipeline.schedules import ActionKind
from megalight.parallel.pipeline.timeline import Timeline

LABELS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "gradient of the input",
    ActionKind.WEIGHT_GRADIENT: "gradient of the weights",
}
COLORS = {
    ActionKind.FORWARD: "#4c72b0",
    ActionKind.BACKWARD: "#dd8452",
    ActionKind.INPUT_GRADIENT: "#ccb974",
    ActionKind.WEIGHT_GRADIENT: "#55a868",
}

MOST_LABELS = 600
"""More numbers than this are too small to read."""


def save(timelines: Mapping[str, Timeline], output: Path) -> None:
    """Draw a panel for each timeline, with a line per rank and a box per action, all on one scale of time.

    A box has the number of its micro-batch, and is paler for later chunks. The suffix of ``output`` sets the format.
    """
    matplotlib = require("matplotlib", "megalight doctor --output")
    matplotlib.use("Agg")  # draws into files, on machines without a display
    pyplot = require("matplotlib.pyplot", "megalight doctor --output")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "megalight", "font.family": "DejaVu Sans"}):
        heights = [len(timeline.ranks) for timeline in timelines.values()]
        size = (10, 0.8 + sum(0.6 + 0.32 * height for height in heights))
        figure, grid = pyplot.subplots(
            len(timelines), 1, figsize=size, sharex=True, layout="constrained", squeeze=False, height_ratios=heights
        )
        for axes, (title, timeline) in zip(grid.flat, timelines.items(), strict=True):
            axes.set_title(f"{title}: bubble {timeline.bubble:.0%} of the work", fontsize=10, loc="left")
            _draw(axes, timeline)
        grid.flat[-1].set_xlabel("time (forwards of a chunk)")
        kinds = {part.kind for t in timelines.values() for spans in t.ranks for s in spans for part in s.action.parts}
        patches = [
            pyplot.Rectangle((0, 0), 1, 1, color=COLORS[kind], label=LABELS[kind]) for kind in LABELS if kind in kinds
        ]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
        write(figure, output, metadata={"Date": None} if output.suffix == ".svg" else None)
        pyplot.close(figure)


def _draw(axes: Any, timeline: Timeline) -> None:
    boxes = [
        # Parts that run together share the time, one above the other.
        (rank - 0.45 + 0.9 * place / len(span.action.parts), 0.9 / len(span.action.parts), span, part)
        for rank, spans in enumerate(timeline.ranks)
        for span in spans
        for place, part in enumerate(span.action.parts)
    ]
    bottoms, heights, spans, parts = zip(*boxes, strict=True)
    left = [float(span.start) for span in spans]
    width = [float(span.end - span.start) for span in spans]
    colors = [(COLORS[part.kind], 1 / (1 + 0.7 * part.chunk)) for part in parts]
    axes.bar(left, heights, width, bottoms, align="edge", color=colors, edgecolor="white")
    if len(boxes) <= MOST_LABELS:
        for bottom, height, start, length, part in zip(bottoms, heights, left, width, parts, strict=True):
            middle = (start + length / 2, bottom + height / 2)
            axes.text(*middle, str(part.micro_batch), ha="center", va="center", fontsize=6)
    names = [f"rank {rank}" for rank in range(len(timeline.ranks))]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0)
