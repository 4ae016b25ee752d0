"""Pipeline layouts on the command line: the layers of each stage, the bubble, and a picture of the step."""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalight.cli.image import write
from megalight.errors import LayoutError
from megalight.imports import require
from megalight.parallel.pipeline.layout import PipelineLayout
from megalight.parallel.pipeline.layout_string import parse
from megalight.parallel.pipeline.schedules import SCHEDULES, ActionKind, build, chosen, waste
from megalight.parallel.pipeline.timeline import Costs, Timeline, simulate

# The timeline of a pipeline's step as an image.


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


MAX_DRAWN = 32
"""A picture of more ranks does not fit on a screen."""


def add_pipeline_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    group = parser.add_argument_group("pipeline stages")
    group.add_argument("--layers", type=int, help="layers of the model (default: those in --layout)")
    group.add_argument("--pipeline-parallel", type=int, help="ranks of the pipeline (default: as in --layout)")
    group.add_argument("--virtual-pipeline", type=int, default=1, help="chunks on each rank")
    group.add_argument("--first-layers", type=int, help="layers on the first rank, if it has fewer or more than others")
    group.add_argument("--last-layers", type=int, help="layers on the last rank, if it has fewer or more than others")
    group.add_argument("--count-embedding", action="store_true", help="count the embedding as a layer")
    group.add_argument("--count-loss", action="store_true", help="count the head and the loss as a layer")
    group.add_argument(
        "--head-cost",
        type=float,
        metavar="LAYERS",
        help="time of head and loss in layers; a stage then takes the time of what it holds (default: all are equal)",
    )
    group.add_argument("--schedule", default="auto", help=f"auto, {', '.join(SCHEDULES)}")
    group.add_argument("--micro-batches", type=int, help="micro-batches of a step (default: two per rank)")
    group.add_argument("-o", "--output", type=Path, help="path of an image of the step under every schedule")
    group.add_argument("--group-size", type=int, help="micro-batches in a row through a chunk (default: one per rank)")


def pipeline_of(arguments: argparse.Namespace, degrees: Mapping[str, int] | None) -> PipelineLayout | None:
    """Build the layout that the arguments describe, or return None if they describe none.

    Args:
        arguments: the parsed command line.
        degrees: the degrees of the mesh if ``--layout`` gives them.

    Raises:
        LayoutError: the layout is impossible, or the arguments contradict each other.
    """
    pp, vpp = arguments.pipeline_parallel, arguments.virtual_pipeline
    if degrees and pp not in (None, degrees["pp"]):
        raise LayoutError(f"--pipeline-parallel={pp} contradicts --layout with pp={degrees['pp']}; remove one of them.")
    # Only `ParallelMesh`'s layout names degrees; a string of stages has another form.
    pp = degrees["pp"] if degrees else pp
    uneven = arguments.first_layers is not None or arguments.last_layers is not None
    counted = arguments.count_embedding or arguments.count_loss
    if arguments.layout and not degrees:
        if uneven or counted:
            raise LayoutError(
                "a layout string already says what each stage holds; remove --first-layers, --last-layers, "
                "--count-embedding and --count-loss."
            )
        stages = parse(arguments.layout)
        text = "".join(stages)
        # The number of layers follows from the string, unless it is to be checked.
        layers = text.count("t") if arguments.layers is None else arguments.layers
        # As many ranks as the stages fill, with that many chunks on each.
        pp = max(len(stages) // vpp, 1) if pp is None else pp
        return PipelineLayout.of_string(arguments.layout, layers, pp, vpp, num_mtp=text.count("m"))
    if arguments.layers is None:
        if uneven or counted or vpp > 1 or (pp is not None and not degrees):
            raise LayoutError("the number of layers is missing; add --layers N, or a layout: --layout 'Et|tt|tL'.")
        return None
    if pp is None:
        raise LayoutError(f"--layers={arguments.layers} needs a number of ranks; add --pipeline-parallel N.")
    if uneven and counted:
        raise LayoutError(
            "--first-layers and --last-layers cannot be combined with --count-embedding and --count-loss; use one pair."
        )
    if uneven:
        first, last = arguments.first_layers, arguments.last_layers
        return PipelineLayout.uneven(arguments.layers, pp, vpp, first=first, last=last)
    embedding, loss = arguments.count_embedding, arguments.count_loss
    return PipelineLayout.even(arguments.layers, pp, vpp, count_embedding=embedding, count_loss=loss)


def print_pipeline(layout: PipelineLayout, arguments: argparse.Namespace) -> None:
    """Print what each stage holds, the bubble of every schedule, and a picture of the chosen one; draw an image.

    Raises:
        LayoutError: the schedule cannot run on this layout, or ``--head-cost`` is negative.
    """
    pp, vpp, head = layout.pp, layout.vpp, arguments.head_cost
    if head is not None and not 0 <= head < math.inf:
        raise LayoutError(f"--head-cost is {head}; it must be a number of layers, 0 or more.")
    costs = None if head is None else [Costs().times(weight) for weight in layout.weights(head)]
    # Two per rank: the bubble is then that of a step with some, but not many, micro-batches.
    count = 2 * pp if arguments.micro_batches is None else arguments.micro_batches
    # Before anything is printed, as it may raise.
    drawn = simulate(build(arguments.schedule, pp, vpp, count, arguments.group_size), costs)
    print(f"{layout.num_layers} layers on pp={pp}, vpp={vpp}: {layout}\n{layout.draw()}\n")
    print(f"{count} micro-batches; a backward takes as long as two forwards, half of it for weight gradients")
    trained: dict[str, Timeline] = {}
    for name, schedule in SCHEDULES.items():
        if reason := schedule.why_not(pp, vpp, arguments.group_size):
            print(f"  {name:<12}  {reason}")
        else:
            timeline = simulate(build(name, pp, vpp, count, arguments.group_size), costs)
            live = "" if name == "forward_only" else f", activations of at most {max(timeline.peak)} chunks in memory"
            takes = "" if costs is None else f", as long as {float(timeline.total):.1f} forwards of a layer"
            print(f"  {name:<12}  bubble {timeline.bubble:.1%} of the work{takes}{live}")
            if live:
                trained[name] = timeline
    if warning := waste(pp, vpp, count, arguments.group_size):
        print(f"  {warning}")
    if pp <= MAX_DRAWN:
        print(f"\n{chosen(arguments.schedule, vpp)}:\n{drawn.draw(shutil.get_terminal_size((160, 24)).columns)}")
    if arguments.output is not None:
        save(trained, arguments.output)
        print(f"\n{arguments.output}")
