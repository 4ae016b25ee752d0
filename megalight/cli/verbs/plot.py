"""``megalight plot RUN ...``: draw what runs logged, one curve per run, and compare them."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalight.errors import ConfigurationError, DataError, nearest
from megalight.imports import require

PANELS: dict[str, tuple[str, ...]] = {
    "loss (nats per token)": ("train_loss", "val_loss", "test_loss"),
    "learning rate": ("lr",),
    "gradient norm": ("grad_norm",),
    "tokens/s": ("tokens_per_s",),
    "memory (GiB)": ("memory_gib",),
}
"""Title -> metrics that are drawn in one panel, if a run has them. Without --metric these panels are drawn."""

EXPERTS = re.compile(r"experts_([^/]+)/(.+)")
"""Metrics of :class:`~megalight.callbacks.ExpertLoads`: a layer, and what was measured there."""

BY_LAYER = {
    "max_load": "busiest expert (choices / mean)",
    "min_load": "least busy expert (choices / mean)",
    "drop_rate": "dropped choices (share)",
}
"""Metric of a layer with experts -> title of the panel that has a line for each layer."""

MOST_LABELS = 16
"""A legend with more lines hides the curves."""

LINES = ("-", "--", ":", "-.")


DESCRIPTION = "draw loss, learning rate, gradient norm, speed and memory of runs, and compare them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        type=Path,
        help="log folder of a run, its metrics.csv or metrics.jsonl, or a folder of runs; each run is a curve",
    )
    parser.add_argument("-o", "--output", type=Path, help="path of the image (default: curves.png in the last run)")
    parser.add_argument("-m", "--metric", action="append", help="metric to draw; repeat for more (default: see above)")
    parser.add_argument(
        "--join",
        action=argparse.BooleanOptionalAction,
        help="all logs are one run that was resumed, or each is a run of its own (default: as the run.yaml beside each "
        "log says); of parts with the same step, the later one wins",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the image, print a comparison of several runs, and print the image's path."""
    files = list(dict.fromkeys(file for run in arguments.runs for file in find_logs(run)))
    parts = {True: [files], False: [[file] for file in files], None: parts_of_runs(files)}[arguments.join]
    runs = read_runs(parts)
    output = arguments.output or files[-1].parent / "curves.png"
    draw(runs, panels(runs, arguments.metric), output)
    if len(runs) > 1:
        print("\n".join(comparison(runs)))
    print(output)
    return 0


def panels(runs: Sequence[LoggedRun], wanted: Sequence[str] | None = None) -> dict[str, tuple[str, ...]]:
    """Return title -> metrics of each panel: one per wanted metric, or :data:`PANELS` as far as they were logged.

    Raises:
        DataError: a wanted metric was not logged, or none of the usual ones.
    """
    if wanted:
        if error := missing_metric(runs, wanted):
            raise error
        return {name: (name,) for name in wanted}
    known = {name for run in runs for name in run.curves}
    usual = {name for names in PANELS.values() for name in names}
    # Losses under names of their own, such as those of experts and of later tokens, get panels of their own.
    losses = sorted(name for name in known if "loss" in name and name not in usual and not EXPERTS.fullmatch(name))
    found = {title: tuple(name for name in names if name in known) for title, names in PANELS.items()}
    found = {title: names for title, names in found.items() if names} | {name: (name,) for name in losses}
    # A map of experts shows one run; several would look the same in it.
    found |= _of_experts(known, maps=len(runs) == 1)
    if not found and (error := missing_metric(runs, ["train_loss"])):
        raise error
    return found


def _of_experts(known: Iterable[str], maps: bool) -> dict[str, tuple[str, ...]]:
    """Return the panels of layers with experts: one per metric with all layers, and one per layer with its experts.

    Args:
        maps: with the panels of single layers.
    """

    def place(name: str) -> list[tuple[int, str]]:
        """Sort layer 10 behind layer 9."""
        return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]

    found: dict[str, tuple[str, ...]] = {}
    for name in sorted(known, key=place):
        if match := EXPERTS.fullmatch(name):
            layer, metric = match.groups()
            # Loads of single experts are a map, and all other metrics a line for each layer.
            if not metric.startswith("load_"):
                title = BY_LAYER.get(metric, f"{metric}, by layer")
            elif maps:
                title = f"layer {layer}: choices of each expert / mean"
            else:
                continue
            found[title] = (*found.get(title, ()), name)
    return found


def draw(runs: Sequence[LoggedRun], chosen: dict[str, tuple[str, ...]], output: Path) -> None:
    """Draw a panel for each title over the optimizer steps. The suffix of ``output`` sets the image format."""
    # Agg draws into files, on machines without a display.
    require("matplotlib", "megalight plot").use("Agg")
    pyplot = require("matplotlib.pyplot", "megalight plot")
    columns = 1 if len(chosen) == 1 else 2
    rows = -(-len(chosen) // columns)
    size = (7 * columns, 3.6 * rows)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes, (title, names) in zip(grid.flat, chosen.items(), strict=False):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("optimizer step")
        # One expert alone, asked for by --metric, is a line for each run. A map shows the first run only.
        if len(names) > 1 and all("/load_" in name for name in names):
            figure.colorbar(_map(axes, runs[0], names), ax=axes)
            continue
        if curves(axes, runs, names) <= MOST_LABELS:
            axes.legend(fontsize=8)
        axes.set_xlim(*_range(runs))
        axes.grid(alpha=0.3)
    # The last place of an odd number of panels.
    for axes in grid.flat[len(chosen) :]:
        axes.set_visible(False)
    write_image(figure, output)
    pyplot.close(figure)


def _range(runs: Sequence[LoggedRun]) -> tuple[float, float]:
    """Return the steps of all panels, which then stand over one another, with a margin."""
    steps = [step for run in runs if run.trained for points, _ in run.curves.values() for step in points] or [0]
    margin = max(0.04 * (max(steps) - min(steps)), 0.5)
    return min(steps) - margin, max(steps) + margin


def curves(axes: Any, runs: Sequence[LoggedRun], names: Sequence[str]) -> int:
    """Draw metrics of runs; return the number of lines."""
    lines = list(_lines(runs, names))
    for label, style, trained, (steps, values) in lines:
        if trained:
            # Few points are seen better with marks, and many without.
            marker = "o" if len(steps) < 30 else None
            axes.plot(steps, values, label=label, marker=marker, markersize=3, linewidth=1.3, **style)
        else:  # a result, without a place among the steps
            axes.axhline(values[-1], label=label, linewidth=1, alpha=0.6, **style)
    return len(lines)


def _map(axes: Any, run: LoggedRun, names: Sequence[str]) -> Any:
    """Draw experts over steps, in colors from idle (0) to twice the mean; return what a color bar needs."""
    steps = run.curves[names[0]][0]
    values = [run.curves[name][1] for name in names]
    axes.set_ylabel("expert")
    return axes.pcolormesh(steps, range(len(names)), values, shading="nearest", cmap="viridis", vmin=0, vmax=2)


def _lines(runs: Sequence[LoggedRun], names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any], bool, Curve]]:
    """Yield label, style, whether the run trained, and points of the lines of a panel.

    Each run has a color, and each metric a kind of line.
    """
    for place, run in enumerate(runs):
        for kind, name in enumerate(names):
            if name in run.curves:
                parts = [run.name] if len(runs) > 1 or len(names) == 1 else []
                label = " ".join([*parts, *([name] if len(names) > 1 else [])])
                # With one run, colors distinguish its metrics; with several, the runs.
                color = f"C{place if len(runs) > 1 else kind}"
                style = {"color": color, "linestyle": LINES[kind % len(LINES)]}
                yield label, style, run.trained, run.curves[name]


def comparison(runs: Sequence[LoggedRun]) -> list[str]:
    """Return a table of the runs: their losses, lowest validation loss, mean speed.

    Losses are those of the last step that all runs have, as a longer run would win otherwise. Without such a step, each
    run has its own last loss. Runs of ``validate`` and ``test`` have results, and no steps.
    """
    steps = [set(run.curves.get("train_loss", ([], []))[0]) for run in runs if run.trained]
    shared = set.intersection(*steps) if steps else set()
    step = max(shared, default=0)
    titles = ["run", "steps", f"train_loss at {step}" if shared else "last train_loss", "lowest val_loss"]
    table = [[*titles, "tokens/s", "GiB"]]
    for run in runs:
        curves = {name: dict(zip(*curve, strict=True)) for name, curve in run.curves.items()}
        last = max((max(points) for points in curves.values()), default=-1)
        losses = curves.get("train_loss", {})
        speeds = list(curves.get("tokens_per_s", {}).values())
        table.append(
            [
                run.name,
                str(last + 1) if run.trained else "-",
                _number(losses.get(step if shared else max(losses, default=0)), ".4f"),
                _number(min(curves.get("val_loss", {}).values(), default=None), ".4f"),
                _number(sum(speeds) / len(speeds) if speeds else None, ",.0f"),
                _number(max(curves.get("memory_gib", {}).values(), default=None), ".2f"),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


FILES = ("metrics.csv", "metrics.jsonl")
RECORD = "run.yaml"
Curve = tuple[list[int], list[float]]


@dataclass(frozen=True)
class LoggedRun:
    """What a run logged.

    Attributes:
        name: shortest end of its path that no other run has.
        curves: metric -> steps and values.
    """

    name: str
    curves: Mapping[str, Curve]

    @property
    def trained(self) -> bool:
        """Whether it is a run of ``fit``: those of ``validate`` and ``test`` log results alone, and all at step 0."""
        return any(not name.startswith(("val_", "test_")) for name in self.curves)


def find_logs(path: Path) -> list[Path]:
    """Find the log file of a run, or those of all runs in a folder, oldest first.

    Raises:
        DataError: there is none.
    """
    if path.is_file():
        return [path]
    # One file per folder: runs may write the same metrics in both forms.
    own = [path / name for name in FILES if (path / name).is_file()][:1]
    # Oldest first: in a resumed run the later part wins.
    folders = sorted({file.parent for name in FILES for file in path.rglob(name)}, key=os.path.getmtime)
    files = own or [next(folder / name for name in FILES if (folder / name).is_file()) for folder in folders]
    if not files:
        raise DataError(f"{path} holds no {' or '.join(FILES)}; give the log folder of a run, or a folder of runs.")
    return files


def parts_of_runs(files: Sequence[Path]) -> list[list[Path]]:
    """Return the logs of each run: its own, and those with which it was resumed.

    Beside a log, ``run.yaml`` names the checkpoint from which the run was resumed. It continues the run in whose folder
    that lies, or else the one before it in the same folder of runs.
    """
    runs: list[list[Path]] = []
    for file in files:
        resumed = _resumed_from(file.parent)
        if resumed is not None and (earlier := _continued(runs, file, resumed)) is not None:
            earlier.append(file)
        else:
            runs.append([file])
    return runs


def _resumed_from(folder: Path) -> Path | None:
    """Return the checkpoint from which the run with this log folder was resumed."""
    import yaml  # --help does not wait for it

    try:
        record = yaml.safe_load((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None  # it has none, or it is another program's
    found = record.get("resumed_from") if isinstance(record, dict) else None
    return Path(found) if isinstance(found, str) else None


def _continued(runs: Sequence[list[Path]], file: Path, resumed: Path) -> list[Path] | None:
    for run in runs:
        if any(resumed.absolute().is_relative_to(part.parent.absolute()) for part in run):
            return run
    beside = [run for run in runs if any(part.parent.parent == file.parent.parent for part in run)]
    return beside[-1] if beside else None


def read_runs(parts: Sequence[Sequence[Path]]) -> list[LoggedRun]:
    """Read runs from the logs of the parts of each. Where parts have the same step, the later one wins."""
    names = _names([run[-1] for run in parts])
    return [LoggedRun(name, read_curves(run)) for name, run in zip(names, parts, strict=True)]


def read_curves(files: Iterable[Path]) -> dict[str, Curve]:
    """Return metric -> (steps, values) of one run, from its log files."""
    points: dict[str, dict[int, float]] = {}
    for file in files:
        for row in _rows(file):
            # Rows without a step cannot be drawn. Loggers write some for hyperparameters.
            step = row.pop("step", None)
            for name, value in row.items():
                if value not in (None, "") and step not in (None, "") and name != "epoch":
                    # Steps may be written as floats, and a step that comes twice keeps its later value.
                    points.setdefault(name, {})[int(float(step))] = float(value)
    return {name: (sorted(found), [found[step] for step in sorted(found)]) for name, found in points.items()}


def missing_metric(runs: Sequence[LoggedRun], wanted: Iterable[str]) -> DataError | None:
    """Make the error for a wanted metric that no run has; None if there is no such metric."""
    known = sorted({name for run in runs for name in run.curves})
    absent = next((name for name in wanted if name not in known), None)
    if absent is None:
        return None
    return DataError(
        f"no run has logged {absent!r}.{nearest(absent, known)} There are: {', '.join(known) or 'none'}. Choose with "
        "--metric."
    )


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(newline="") as lines:
        if file.suffix == ".csv":
            yield from csv.DictReader(lines)
            return
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{file}, line {number} is not JSON ({error}). Give the log folder of a run, or its metrics.csv "
                    "or metrics.jsonl."
                ) from error


def _names(files: Sequence[Path]) -> list[str]:
    """Name each file by its folder, with as many parts of the path as distinguish the folders."""
    folders = [file.parent.absolute() for file in files]
    names = [folder.name for folder in folders]
    for depth in range(1, max((len(folder.parts) for folder in folders), default=1) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


def write_image(figure: Any, output: Path, **options: Any) -> None:
    """Write ``figure``, and make the folder of the file. The suffix of ``output`` sets the format.

    Args:
        options: arguments of matplotlib's ``savefig``.

    Raises:
        ConfigurationError: the suffix names no format, or the file cannot be written.
    """
    kind, known = output.suffix[1:].lower(), sorted(figure.canvas.get_supported_filetypes())
    if kind not in known:
        raise ConfigurationError(
            f"{output} ends with {output.suffix!r}, which names no format of images.{nearest(kind, known)} Choose "
            f"{', '.join(known)}."
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=130, **options)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise ConfigurationError(
            f"{output} cannot be written ({error.strerror}{where}); choose another --output."
        ) from error
