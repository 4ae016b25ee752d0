"""``megalight doctor``: versions, devices, optional packages, and the backends of every op with their reasons.

With a layout: the position of each rank, the layers of each pipeline stage, and the bubble.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterable
from typing import Any

from megalight import __version__
from megalight.cli.pipeline import add_pipeline_arguments, pipeline_of, print_pipeline
from megalight.errors import LayoutError, nearest
from megalight.imports import EXTRAS, version
from megalight.registry import load_plugins

CORE = ("torch", "lightning", "jsonargparse", "torchmetrics", "numpy", "safetensors", "tokenizers")
AXES = ("dp", "tp", "cp", "pp", "ep", "etp")
"""Axes of ``--layout``: data parallelism, then the others in the order of :class:`ParallelMesh`."""

MAX_RANKS = 32
"""Ranks that the table of a layout shows."""


def describe() -> str:
    """Return the line for the overview."""
    return "show versions, devices, optional packages and the backends of every op"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device of the backends (default: a GPU if any)")
    parser.add_argument(
        "--layout",
        metavar="tp=2,dp=4|'Et|tt|tL'",
        help="check a parallel layout and show the position of each rank, or what each pipeline stage holds",
    )
    add_pipeline_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print all tables or, with a layout, only the layout."""
    # Both kinds of layout share one option: stages have capital letters, and no equals sign.
    text = arguments.layout or ""
    degrees = parse_layout(text) if "=" in text or text.islower() else None
    layout = pipeline_of(arguments, degrees)
    if arguments.output is not None and layout is None:
        raise LayoutError("--output draws the stages of a pipeline; add --layers N, or a layout: --layout 'Et|tt|tL'.")
    if degrees:
        _print_layout(degrees)
    if layout:
        print_pipeline(layout, arguments)
    if degrees or layout:
        return 0
    # Torch only here: a layout needs none, and is printed at once.
    import torch

    from megalight.ops.choice import backends_of

    cuda = torch.cuda.is_available()
    device = arguments.device or ("cuda" if cuda else "cpu")
    print_table("versions", ("package", "version"), _versions(torch))
    print_table("devices", ("device", "memory"), _devices(torch))
    print_table("optional packages", ("package", "version, or how to install it"), _optional())
    backends = backends_of(device)
    own = [
        (op if index == 0 else "", backend.name, reason or f"can serve{', auto some' * (backend.slower is not None)}")
        for op, rows in backends.items()
        for index, (backend, reason) in enumerate(row for row in rows if row[0].plugin is None)
    ]
    print_table(f"backends on {device}, bfloat16; auto takes the first that can serve", ("op", "backend", ""), own)
    _print_plugins(
        device,
        [
            (backend.plugin, backend.name, op, reason or f"can serve{', also auto' * (backend.slower is not None)}")
            for op, rows in backends.items()
            for backend, reason in rows
            if backend.plugin is not None
        ],
    )
    return 0


def parse_layout(text: str) -> dict[str, int]:
    """Parse ``"tp=2,dp=4"`` to a degree for each axis.

    Raises:
        LayoutError: an axis is unknown, or a degree is not a positive number.
    """
    degrees = dict.fromkeys(AXES, 1)
    for part in text.replace(" ", "").split(","):
        axis, equals, degree = part.partition("=")
        if axis not in degrees:
            raise LayoutError(
                f"unknown axis {axis!r} in --layout; known: {', '.join(AXES)}.{nearest(axis, AXES)} Write degrees, "
                "--layout tp=2,dp=4, or what each pipeline stage holds, --layout 'Et|tt|tL'."
            )
        if not equals:
            raise LayoutError(f"{axis} has no degree in --layout; write {axis}=2.")
        if not degree.isdigit() or int(degree) < 1:
            raise LayoutError(f"{axis}={degree!r} in --layout; a degree must be an integer of at least 1.")
        degrees[axis] = int(degree)
    return degrees


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False)  # markup would swallow the brackets of pip install 'megalight[te]'
    # A pipe or a file has no width, and the default of 80 columns folds the reasons.
    if not console.is_terminal:
        console.width = 120
    console.print(table)
    console.print()


def _versions(torch: Any) -> list[tuple[str, str]]:
    rows = [("megalight", __version__), ("python", f"{platform.python_version()} on {platform.platform()}")]
    rows += [(name, version(name) or "missing") for name in CORE]
    return [*rows, ("cuda, as torch was built", str(torch.version.cuda or "none"))]


def _devices(torch: Any) -> list[tuple[str, str]]:
    rows = [(f"cpu: {os.cpu_count()} cores", f"{_memory_gib():.0f} GiB")]
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        rows.append(
            (f"cuda:{index}: {found.name} (sm_{found.major}{found.minor})", f"{found.total_memory / 2**30:.0f} GiB")
        )
    return rows


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _optional() -> list[tuple[str, str]]:
    return [
        # Import names have underscores where some distributions have hyphens.
        (package, version(package) or version(package.replace("_", "-")) or f"pip install 'megalight[{extra}]'")
        for package, extra in EXTRAS.items()
    ]


def _print_plugins(device: str, brought: list[tuple[str, str, str, str]]) -> None:
    """Print every plugin: its error if it could not be loaded, otherwise its backends.

    Args:
        device: where the backends were asked.
        brought: ``(plugin, backend, op, answer)`` for every backend of a plugin.
    """
    rows: list[tuple[str, str, str]] = []
    # Plugins that add no backend are listed too: the user sees that they were found.
    for name, error in load_plugins().items():
        found: dict[tuple[str, str], list[str]] = {}  # one line for all ops with one answer
        for plugin, backend, op, answer in brought:
            if plugin == name:
                found.setdefault((backend, answer), []).append(op)
        if error or not found:
            rows.append((name, "", error or "loaded; adds no backend"))
        for (backend, answer), ops in found.items():
            rows.append((backend, ", ".join(ops), answer))
    title = f"plugins on {device}, bfloat16; their backends are used only if you ask for them by name"
    print_table(title, ("backend", "ops", ""), rows or [("none", "", "")])


def _print_layout(degrees: dict[str, int]) -> None:
    from megalight.parallel.mesh import ParallelMesh

    world = degrees["dp"] * degrees["tp"] * degrees["cp"] * degrees["pp"]
    tp, cp, pp, ep, etp = (degrees[axis] for axis in AXES[1:])
    meshes = [ParallelMesh(world, n, tp, cp, pp, ep, etp) for n in range(min(world, MAX_RANKS))]
    # Axes of experts only where they divide anything.
    shown = ["pp", "dp", "cp", "tp", *(("edp", "ep", "etp") if degrees["ep"] * degrees["etp"] > 1 else ())]
    rows = [(str(mesh.global_rank), *(str(mesh.rank(axis)) for axis in shown)) for mesh in meshes]
    if world > MAX_RANKS:
        rows.append(("...", *("" for _ in shown)))
    print_table(meshes[0].describe(), ("rank", *shown), rows)
