"""``megalight doctor``: a verdict, versions, devices, what works and what is missing; with ``--all``, tables.

With a layout: the position of each rank, the layers of each pipeline stage, and the bubble.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import math
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megalight import __version__
from megalight.cli.verbs.plot import write_image
from megalight.errors import LayoutError, MegalightError, nearest
from megalight.imports import EXTRAS, has, require, version
from megalight.parallel.pipeline.layout import PipelineLayout, parse
from megalight.parallel.pipeline.schedules import SCHEDULES, ActionKind, bubble_warning, build, chosen
from megalight.parallel.pipeline.timeline import Costs, Timeline, simulate
from megalight.registry import Backend, load_plugins

CORE = ("torch", "lightning", "jsonargparse", "torchmetrics", "numpy", "safetensors", "tokenizers")
GPU_PACKAGES = ("transformer_engine", "flash_attn")
"""Optional packages that are built for the GPUs and the torch of this machine; without a GPU they are of no use."""

AXES = ("dp", "tp", "cp", "pp", "ep", "etp")
"""Axes of ``--layout``: data parallelism, then the others in the order of :class:`ParallelMesh`."""

VARIABLES = (
    "MEGALIGHT_",
    "CUDA_",
    "NCCL_",
    "TORCH_",
    "PYTORCH_",
    "TRITON_",
    "OMP_",
    "HF_",
    "SLURM_NNODES",
    "WORLD_SIZE",
)
"""What names of environment variables begin with that a report of a bug shows."""

SECRET = re.compile("TOKEN|KEY|SECRET|PASS", re.IGNORECASE)
"""Part of the names of those that it never shows."""

Backends = dict[str, list[tuple[Backend[Any, Any], str | None]]]
"""Op -> its backends with the reason why each cannot serve, or None."""

MAX_RANKS = 32
"""Ranks that the table of a layout shows."""


DESCRIPTION = "show whether this machine is ready: versions, devices, what works, what is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--all", action="store_true", help="add tables: every version, package, backend and plugin")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device of the backends (default: a GPU if any)")
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="show which layouts a model of transformers takes, from its configuration alone; with --layout: that one",
    )
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
    if arguments.model is not None:
        rows = list(rows_of(arguments.model, degrees))
        print_table(f"{rows[0][0]}: {rows[0][2]}", ("layout", "", ""), rows[1:])
        return 0 if degrees is None or rows[1][1] == "yes" else 2
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

    from megalight.ops import backends_of

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    backends = backends_of(device)
    print(f"{'verdict':<10} {not_ready or _verdict(torch)}")
    for name, line in _summary(torch, device, backends):
        print(f"{name:<10} {line}")
    if arguments.all:
        print()
        _print_tables(torch, device, backends)
    return 2 if missing else 0


def bug_report() -> str:
    """Return a page for a report of a bug: versions, devices, plugins, and variables that change what runs."""
    lines = [("megalight", __version__), ("python", f"{platform.python_version()} on {platform.platform()}")]
    lines += [(name, version(name) or "missing") for name in CORE]
    if has("torch"):
        import torch

        nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()  # type: ignore[no-untyped-call]
        built = f"torch is built for {torch.version.cuda}" if torch.version.cuda else "none"
        lines += [("devices", _devices(torch)), ("cuda", built), ("nccl", ".".join(map(str, nccl)) or "none")]
    lines += [(name, found) for name, found in _optional().items() if found]
    lines += [(f"plugin {name}", error or "loaded") for name, error in load_plugins().items()]
    variables = sorted(name for name in os.environ if name.startswith(VARIABLES) and not SECRET.search(name))
    lines += [(f"${name}", os.environ[name]) for name in variables]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {found}" for name, found in lines)


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
        write_image(figure, output, metadata={"Date": None} if output.suffix == ".svg" else None)
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
    if warning := bubble_warning(pp, vpp, count, arguments.group_size):
        print(f"  {warning}")
    if pp <= MAX_DRAWN:
        print(f"\n{chosen(arguments.schedule, vpp)}:\n{drawn.draw(shutil.get_terminal_size((160, 24)).columns)}")
    if arguments.output is not None:
        save(trained, arguments.output)
        print(f"\n{arguments.output}")


Row = tuple[str, str, str]
"""A layout, ``yes`` or ``no``, and a reason or what it gives."""

LAYOUTS: tuple[Mapping[str, Any], ...] = (
    {"tensor_parallel": 2},
    {"tensor_parallel": 4},
    {"tensor_parallel": 8},
    {"tensor_parallel": 2, "sequence_parallel": True},
    {"context_parallel": 2},
    {"pipeline_parallel": 2},
    {"expert_parallel": 2},
)
"""Arguments of ``MegatronStrategy`` that are tried."""


def rows_of(path: str, degrees: Mapping[str, int] | None = None) -> Iterator[Row]:
    """Yield, for each layout, whether the model takes it.

    Args:
        path: a folder of ``transformers``, or a name of the Hugging Face Hub. Only its ``config.json`` is read.
        degrees: the one layout to try, by axis. None: those of :data:`LAYOUTS`.

    Raises:
        ConfigurationError: ``transformers`` has no such model.
        CheckpointError: there is no such folder.
    """
    import torch

    from megalight.checkpoint.foreign.transformers_folder import read_config
    from megalight.hub import local
    from megalight.models.family import family_of_transformers
    from megalight.models.fused import FusedModule, fuse
    from megalight.models.hf_causal_lm import HFConfig, HFModel
    from megalight.nn.transformers_attention import use_attention

    values = dict(read_config(local(path)))
    with torch.device("meta"):
        net = _not_causal(values)
        if causal := net is None:
            config = HFConfig(values)
            net, values = HFModel(config).net, {**config.read.to_dict(), **config.values}
    packs = use_attention(net) > 0
    count = sum(parameter.numel() for parameter in net.parameters())
    yield type(net).__name__, "", f"{values['model_type']}, {count / 1e9:.3g} B parameters"
    wanted = LAYOUTS if degrees is None else (arguments_of(degrees),)
    for options in wanted:
        label = ", ".join(f"{name}={value}" for name, value in options.items())
        # Of a plain module around the model: what `self.net = ...` gets.
        yield label, *_tried(copy.deepcopy(net), options, count)
    if degrees is not None:
        return
    yield "MegatronFSDPStrategy", "yes", "full sharding serves all that call their layers; others are refused"
    on = "runs our attention" if packs else "does not use the attention interface: it keeps its own attention"
    yield "attention", "yes" if packs else "no", on
    layers = fuse(net)
    parts = sum(isinstance(module, FusedModule) for module in net.modules())
    yield "FusedOps", "yes" if parts else "no", f"{parts} modules, {layers} of them whole layers"
    try:
        family = family_of_transformers(values)
        if family.config is HFConfig:
            yield "own module", "no", "HFCausalLM trains it, with the layouts above"
            return
        assert family.weights is not None
        family.weights.config(values)
        yield "own module", "yes", f"{family.module().__name__} has code of ours for it, and every layout"
    except MegalightError as error:
        plain = "train it in a LightningModule around it, with the layouts above"
        yield "own module", "no", str(error) if causal else plain


def _not_causal(values: Mapping[str, Any]) -> Any:
    """Return the model of a configuration that names another class than a causal language model; None: it does not."""
    require("transformers", "models of transformers need it")
    import transformers
    from transformers.models.auto import modeling_auto

    kind = str(values.get("model_type"))
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    named = [*(values.get("architectures") or ())]
    pairs = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    named += [pairs[kind]] if kind in pairs else []
    found = getattr(transformers, str(named[0]), None) if named and causal not in named else None
    if found is None or "quantization_config" in values:
        return None
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in values.items() if k != "model_type"})
    return found._from_config(config)


def arguments_of(degrees: Mapping[str, int]) -> dict[str, int]:
    """Return the arguments of ``MegatronStrategy`` for degrees by axis; those of 1 are left out."""
    names = {
        "tp": "tensor_parallel",
        "cp": "context_parallel",
        "pp": "pipeline_parallel",
        "ep": "expert_parallel",
        "etp": "expert_tensor_parallel",
    }
    return {names[axis]: degree for axis, degree in degrees.items() if axis in names and degree > 1}


def _tried(net: Any, options: Mapping[str, Any], count: int) -> tuple[str, str]:
    """Split a model on meta as the first rank would, and return the verdict with its reason."""
    from megalight.parallel.apply import split
    from megalight.parallel.layout import Layout

    layout = Layout(**options)
    ranks = 1
    for name, degree in options.items():
        ranks *= degree if name != "sequence_parallel" else 1
    try:
        # Stages are decided here, and cut only where there are processes.
        _, _, stages = split(net, layout.mesh(ranks), layout, "")
    except MegalightError as error:
        return "no", str(error)
    if layout.pipeline_parallel > 1:
        return "yes", f"stages {stages}"
    held = sum(parameter.numel() for parameter in net.parameters())
    return "yes", f"rank 0 of {ranks} holds {held / count:.0%} of the parameters"
