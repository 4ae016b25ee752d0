"""Pipeline layouts on the command line: which stage holds what, how long ranks wait, and the step as a picture."""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Mapping

from megalight.errors import LayoutError
from megalight.parallel.pipeline.grammar import parse
from megalight.parallel.pipeline.layout import PipelineLayout
from megalight.parallel.pipeline.schedules import SCHEDULES, build, chosen, waste
from megalight.parallel.pipeline.timeline import Costs, simulate

MAX_DRAWN = 32
"""Ranks; a picture of more does not fit a screen."""


def add_pipeline_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    group = parser.add_argument_group("pipeline stages")
    group.add_argument("--layers", type=int, help="layers of the model; default: as many as --layout names")
    group.add_argument("--pipeline-parallel", type=int, help="ranks of the pipeline; default: as --layout says")
    group.add_argument("--virtual-pipeline", type=int, default=1, help="chunks on each rank")
    group.add_argument("--first-layers", type=int, help="layers on the first rank, where they are not as the others'")
    group.add_argument("--last-layers", type=int, help="layers on the last rank")
    group.add_argument("--count-embedding", action="store_true", help="the embedding counts as a layer")
    group.add_argument("--count-loss", action="store_true", help="the head and loss count as a layer")
    group.add_argument(
        "--head-cost",
        type=float,
        metavar="LAYERS",
        help="head and loss take as long as so many layers, and a stage as what it holds; default: stages are equal",
    )
    group.add_argument("--schedule", default="auto", help=f"auto, {', '.join(SCHEDULES)}")
    group.add_argument("--micro-batches", type=int, help="micro-batches of a step; default: two per rank")
    group.add_argument("--group-size", type=int, help="micro-batches through a chunk in one go; default: one per rank")


def pipeline_of(arguments: argparse.Namespace, degrees: Mapping[str, int] | None) -> PipelineLayout | None:
    """The layout that the arguments describe; None where they describe none.

    Args:
        degrees: of the mesh, where ``--layout`` is one.

    Raises:
        LayoutError: they describe no layout that can be, or contradict each other.
    """
    pp, vpp = arguments.pipeline_parallel, arguments.virtual_pipeline
    if degrees and pp not in (None, degrees["pp"]):
        raise LayoutError(f"--pipeline-parallel={pp} contradicts --layout with pp={degrees['pp']}. Leave one out.")
    pp = degrees["pp"] if degrees else pp
    uneven = arguments.first_layers is not None or arguments.last_layers is not None
    counted = arguments.count_embedding or arguments.count_loss
    if arguments.layout and not degrees:
        if uneven or counted:
            raise LayoutError("a layout string says by itself what each stage holds; leave out first, last and count.")
        stages = parse(arguments.layout)
        text = "".join(stages)
        layers = text.count("t") if arguments.layers is None else arguments.layers
        pp = max(len(stages) // vpp, 1) if pp is None else pp
        return PipelineLayout.of_string(arguments.layout, layers, pp, vpp, num_mtp=text.count("m"))
    if arguments.layers is None:
        if uneven or counted or vpp > 1 or (pp is not None and not degrees):
            raise LayoutError("stages of how many layers? Add --layers N, or a --layout 'Et|tt|tL'.")
        return None
    if pp is None:
        raise LayoutError(f"--layers={arguments.layers} on how many stages? Add --pipeline-parallel N.")
    if uneven and counted:
        raise LayoutError("layers of the first and last rank are given, so nothing is counted as a layer; drop one.")
    if uneven:
        first, last = arguments.first_layers, arguments.last_layers
        return PipelineLayout.uneven(arguments.layers, pp, vpp, first=first, last=last)
    embedding, loss = arguments.count_embedding, arguments.count_loss
    return PipelineLayout.even(arguments.layers, pp, vpp, count_embedding=embedding, count_loss=loss)


def print_pipeline(layout: PipelineLayout, arguments: argparse.Namespace) -> None:
    """What each stage holds; then, for a number of micro-batches, every schedule's bubble, and one drawn.

    Raises:
        LayoutError: the schedule cannot run on this layout, or the head would cost less than nothing.
    """
    pp, vpp, head = layout.pp, layout.vpp, arguments.head_cost
    if head is not None and not 0 <= head < math.inf:
        raise LayoutError(f"--head-cost={head}; it is a number of layers, from 0 up.")
    costs = None if head is None else [Costs().times(weight) for weight in layout.weights(head)]
    count = 2 * pp if arguments.micro_batches is None else arguments.micro_batches
    drawn = simulate(build(arguments.schedule, pp, vpp, count, arguments.group_size), costs)
    print(f"{layout.num_layers} layers on pp={pp}, vpp={vpp}: {layout}\n{layout.draw()}\n")
    print(f"{count} micro-batches; a backward takes two forwards, half of it for weight gradients")
    for name, schedule in SCHEDULES.items():
        if reason := schedule.why_not(pp, vpp, arguments.group_size):
            print(f"  {name:<12}  {reason}")
        else:
            timeline = simulate(build(name, pp, vpp, count, arguments.group_size), costs)
            live = "" if name == "forward_only" else f", activations of up to {max(timeline.peak)} chunks live"
            takes = "" if costs is None else f", {float(timeline.total):.1f} forwards of a layer long"
            print(f"  {name:<12}  bubble {timeline.bubble:.1%} of the work{takes}{live}")
    if warning := waste(pp, vpp, count, arguments.group_size):
        print(f"  {warning}")
    if pp <= MAX_DRAWN:
        print(f"\n{chosen(arguments.schedule, vpp)}:\n{drawn.draw(shutil.get_terminal_size((160, 24)).columns)}")
