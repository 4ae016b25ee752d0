"""``megalight plot RUN``: the loss curves of a run's CSV log as an image."""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path

from megalight.errors import DataError
from megalight.imports import require

Curve = tuple[list[int], list[float]]


def describe() -> str:
    """The verb's line in the overview."""
    return "draw a run's loss curves (or other logged values) into an image"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        type=Path,
        help="log folder of a run (or its metrics.csv), or a folder of runs; several are joined by step, the last wins",
    )
    parser.add_argument("-o", "--output", type=Path, help="the image; default: loss.png in the log folder")
    parser.add_argument(
        "-m", "--metric", action="append", help="column to draw; repeat for more (default: all whose name has 'loss')"
    )


def run(arguments: argparse.Namespace) -> int:
    """Draw; prints the image's path."""
    files = [file for run in arguments.runs for file in find_logs(run)]
    output = arguments.output or files[-1].parent / "loss.png"
    plot(read_curves(files, arguments.metric), output)
    print(output)
    return 0


def find_logs(path: Path) -> list[Path]:
    """The ``metrics.csv`` of a run; in a folder of runs, all of them, oldest first (a resumed run has several).

    Raises:
        DataError: there is none.
    """
    if path.is_file():
        return [path]
    own = path / "metrics.csv"
    files = [own] if own.is_file() else sorted(path.rglob("metrics.csv"), key=os.path.getmtime)
    if not files:
        raise DataError(f"{path} holds no metrics.csv. Give the log folder of a run whose logger is CSVLogger.")
    return files


def read_curves(files: list[Path], names: list[str] | None = None) -> dict[str, Curve]:
    """Column -> (steps, values), later files' steps replacing earlier ones'.

    Raises:
        DataError: a named column is in none of the files, or no column is a loss.
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
        what = f"no column {missing[0]!r}" if missing else "no column whose name has 'loss'"
        raise DataError(f"{files[-1]} has {what}. Its columns: {', '.join(sorted(points)) or 'none'}.")
    return {name: _sorted(points[name]) for name in chosen}


def _sorted(points: dict[int, float]) -> Curve:
    steps = sorted(points)
    return steps, [points[step] for step in steps]


def plot(curves: dict[str, Curve], output: Path) -> None:
    """Write the curves over the optimizer steps as an image (its format from the suffix)."""
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
