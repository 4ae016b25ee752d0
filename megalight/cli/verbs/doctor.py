"""``megalight doctor``: a verdict, versions, devices, what works and what is missing; with ``--all``, tables.

With a layout: the position of each rank, the layers of each pipeline stage, and the bubble.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Iterable
from typing import Any

from megalight import __version__
from megalight.cli.pipeline import add_pipeline_arguments, pipeline_of, print_pipeline
from megalight.errors import LayoutError, nearest
from megalight.imports import EXTRAS, has, version
from megalight.registry import Backend, load_plugins

CORE = ("torch", "lightning", "jsonargparse", "torchmetrics", "numpy", "safetensors", "tokenizers")
GPU_PACKAGES = ("transformer_engine", "flash_attn")
"""Optional packages that are built for the GPUs and the torch of this machine; without a GPU they are of no use."""

AXES = ("dp", "tp", "cp", "pp", "ep", "etp")
"""Axes of ``--layout``: data parallelism, then the others in the order of :class:`ParallelMesh`."""

Backends = dict[str, list[tuple[Backend[Any, Any], str | None]]]
"""Op -> its backends with the reason why each cannot serve, or None."""

MAX_RANKS = 32
"""Ranks that the table of a layout shows."""


def describe() -> str:
    """Return the line for the overview."""
    return "show whether this machine is ready: versions, devices, what works, what is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--all", action="store_true", help="add tables: every version, package, backend and plugin")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device of the backends (default: a GPU if any)")
    parser.add_argument(
        "--layout",
        metavar="tp=2,dp=4|'Et|tt|tL'",
        help="check a parallel layout and show the position of each rank, or what each pipeline stage holds",
    )
    add_pipeline_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the summary, and the tables if asked for; with a layout, only the layout."""
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
    missing = [name for name in CORE if version(name) is None]
    not_ready = f"not ready: missing {', '.join(missing)}. Next: pip install {' '.join(missing)}" if missing else ""
    if "torch" in missing:
        print(not_ready)
        return 2
    # Torch only here: a layout needs none, and is printed at once.
    import torch

    from megalight.ops.choice import backends_of

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    backends = backends_of(device)
    print(f"{'verdict':<10} {not_ready or _verdict(torch)}")
    for name, line in _summary(torch, device, backends):
        print(f"{name:<10} {line}")
    if arguments.all:
        print()
        _print_tables(torch, device, backends)
    return 2 if missing else 0


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


def _summary(torch: Any, device: str, backends: Backends) -> list[tuple[str, str]]:
    """Return the lines of the summary below the verdict: a name and a sentence each."""
    chosen = Counter(
        next((row.name for row, reason in rows if reason is None and row.plugin is None), "none")
        for rows in backends.values()
    )
    by_name = {row.plugin for rows in backends.values() for row, reason in rows if reason is None and row.plugin}
    packages = _optional()
    absent = [name for name, found in packages.items() if not found and (device == "cuda" or name not in GPU_PACKAGES)]
    counts = ", ".join(f"{name} {count}" for name, count in chosen.most_common())
    # Builds of torch without torch.distributed lack these functions.
    talks = [name for name in ("nccl", "gloo") if getattr(torch.distributed, f"is_{name}_available", bool)()]
    fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    return [
        ("versions", f"megalight {__version__}, python {platform.python_version()}, {_core(torch)}"),
        ("devices", _devices(torch)),
        ("precision", f"fp32, bf16; FP8 {'on tensor cores' if fp8 else 'emulated, which is slow'}"),
        ("ranks talk", f"by {' and '.join(talks)}" if talks else "not at all: this torch has no torch.distributed"),
        ("ops", f"{len(backends)} on {device}, by {counts}"),
        ("plugins", ", ".join(sorted(by_name)) or "none of them can serve here, and none is needed"),
        ("optional", ", ".join(f"{name} {found}" for name, found in packages.items() if found) or "none"),
        ("missing", "; ".join(_pip_lines(absent)) or "nothing"),
        ("more", "megalight doctor --all lists every backend, and why it cannot serve"),
    ]


def _verdict(torch: Any) -> str:
    plugins = load_plugins()
    broken = "".join(f" Plugin {name} could not be loaded: {error}." for name, error in plugins.items() if error)
    if not torch.cuda.is_available():
        here = "ready to train on the CPU: enough for the tutorial and for tests."
        # The driver's device file: torch cannot tell a host without GPUs from a build without CUDA.
        if os.path.exists("/dev/nvidiactl"):
            how = "torch cannot use it" if torch.version.cuda else f"torch {torch.__version__} was built without CUDA"
            here += f" There is an NVIDIA GPU, but {how}. Next: install the torch that fits its driver (pytorch.org)."
        return here + broken
    count = torch.cuda.device_count()
    ready = f"ready to train on {count} GPU{'s' * (count > 1)}."
    return ready + ("" if has("triton") else " Slow: most kernels need triton. Next: pip install triton.") + broken


def _core(torch: Any) -> str:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"torch {torch.__version__} ({cuda}), lightning {version('lightning')}"


def _pip_lines(absent: Iterable[str]) -> list[str]:
    """Return one command for all extras that pip can install as they are, and one each for those that it must build."""
    plain = [EXTRAS[name] for name in absent if name not in GPU_PACKAGES]
    built = [f"pip install --no-build-isolation 'megalight[{EXTRAS[name]}]'" for name in absent if name in GPU_PACKAGES]
    return [*([f"pip install 'megalight[{','.join(plain)}]'"] if plain else []), *built]


def _print_tables(torch: Any, device: str, backends: Backends) -> None:
    print_table("versions", ("package", "version"), _versions(torch))
    optional = [(name, found or _pip_lines([name])[0]) for name, found in _optional().items()]
    print_table("optional packages", ("package", "version, or how to install it"), optional)
    own = [
        (op if index == 0 else "", backend.name, reason or f"can serve{', auto some' * (backend.slower is not None)}")
        for op, rows in backends.items()
        for index, (backend, reason) in enumerate(row for row in rows if row[0].plugin is None)
    ]
    print_table(f"backends on {device}, bfloat16; auto takes the first that can serve", ("op", "backend", ""), own)
    _print_plugins(
        device,
        [
            (backend.plugin, backend.name, op, reason or "can serve")
            for op, rows in backends.items()
            for backend, reason in rows
            if backend.plugin is not None
        ],
    )


def _versions(torch: Any) -> list[tuple[str, str]]:
    rows = [("megalight", __version__), ("python", f"{platform.python_version()} on {platform.platform()}")]
    rows += [(name, str(version(name))) for name in CORE]
    return [*rows, ("cuda, as torch was built", str(torch.version.cuda or "none"))]


def _devices(torch: Any) -> str:
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = Counter(f"{each.name} (sm_{each.major}{each.minor}, {each.total_memory / 2**30:.0f} GiB)" for each in found)
    cpu = f"CPU ({os.cpu_count()} cores, {_memory_gib():.0f} GiB)"
    return ", ".join([*(f"{count} x {name}" for name, count in gpus.items()), cpu])


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _optional() -> dict[str, str]:
    """Return the version of each optional package, or an empty string if it is not installed."""
    # Distributions have names of their own: PIL comes with pillow. Packages without metadata have no version.
    names = importlib.metadata.packages_distributions()
    return {
        package: next((str(version(name)) for name in names.get(package, ())), "installed") if has(package) else ""
        for package in EXTRAS
    }


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
