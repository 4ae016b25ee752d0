"""``megalight plot RUN``: draw the loss curves of a CSV log."""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path

from megalight.errors import DataError
from megalight.imports import require

Curve = tuple[list[int], list[float]]


def describe() -> str:
    """Return the line for the overview."""
    return "draw the loss curves (or other logged values) of a run as an image"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        type=Path,
        help="log folder of a run, its metrics.csv, or a folder of runs; runs are joined by step, and later ones win",
    )
    parser.add_argument("-o", "--output", type=Path, help="path of the image (default: loss.png in the log folder)")
    parser.add_argument(
        "-m", "--metric", action="append", help="column to draw; repeat for more (default: all with 'loss' in the name)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the image and print its path."""
    files = [file for run in arguments.runs for file in find_logs(run)]
    output = arguments.output or files[-1].parent / "loss.png"
    plot(read_curves(files, arguments.metric), output)
    print(output)
    return 0


def find_logs(path: Path) -> list[Path]:
    """Find the ``metrics.csv`` of a run, or all of them in a folder of runs, oldest first.

    Raises:
        DataError: there is none.
    """
    if path.is_file():
        return [path]
    own = path / "metrics.csv"
    files = [own] if own.is_file() else sorted(path.rglob("metrics.csv"), key=os.path.getmtime)
    if not files:
        raise DataError(f"{path} holds no metrics.csv; give the log folder of a run whose logger is CSVLogger.")
    return files


def read_curves(files: list[Path], names: list[str] | None = None) -> dict[str, Curve]:
    """Return column -> (steps, values). If files have the same step, the later file wins.

    Raises:
        DataError: no file has a requested column, or none has a column with "loss" in its name.
    """
    points: dict[str, dict[int, float]] = {}
    for file in files:
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                for name, value in row.items():
                    if value and row.get("step") and name not in ("step", "epoch"):
                        points.setdefault(name, {})[int(float(row["step"]))] = float(value)
    chosen = names or [name for name in points if "loss" in name]
    missing = [name for name in chosen if name not in points]
    if missing or not chosen:
        what = f"no column {missing[0]!r}" if missing else "no column with 'loss' in its name"
        raise DataError(
            f"{files[-1]} has {what}; it has: {', '.join(sorted(points)) or 'none'}. Choose one with --metric."
        )
    return {name: _sorted(points[name]) for name in chosen}


def _sorted(points: dict[int, float]) -> Curve:
    steps = sorted(points)
    return steps, [points[step] for step in steps]


def plot(curves: dict[str, Curve], output: Path) -> None:
    """Draw the curves over the optimizer steps. The suffix of ``output`` sets the image format."""
    require("matplotlib", "megalight plot").use("Agg")
    pyplot = require("matplotlib.pyplot", "megalight plot")
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, (steps, values) in curves.items():
        axes.plot(steps, values, label=name, marker="o" if len(steps) < 30 else None, markersize=3, linewidth=1.3)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)" if all("loss" in name for name in curves) else "value")
    axes.grid(alpha=0.3)
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)
    pyplot.close(figure)
