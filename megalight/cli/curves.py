"""Curves from the log files of runs: ``metrics.csv`` and ``metrics.jsonl``. Imports nothing heavy."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalight.errors import DataError, nearest

FILES = ("metrics.csv", "metrics.jsonl")
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


def read_runs(files: Sequence[Path]) -> list[LoggedRun]:
    """Read one run from each log file."""
    return [LoggedRun(name, read([file])) for name, file in zip(_names(files), files, strict=True)]


def joined(files: Sequence[Path]) -> LoggedRun:
    """Read one run that was resumed, from the log of each part. Where parts have the same step, the later one wins."""
    return LoggedRun(_names(files)[-1], read(files))


def read(files: Iterable[Path]) -> dict[str, Curve]:
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


def missing(runs: Sequence[LoggedRun], wanted: Iterable[str]) -> DataError | None:
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
