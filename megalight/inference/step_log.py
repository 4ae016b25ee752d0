"""A record of the steps of an engine: how long each took, what ran in it, and whether it was a CUDA graph."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO
from weakref import finalize

from megalight.inference.batch_dimensions import InferenceBatchDimensions


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
        dimensions: its tokens and sequences.
        graph: the dimensions of its graph; None: it was launched kernel by kernel.
        seconds: from the results of the step before (or from its launch, if that came later) to its own results.
        host_seconds: how long the host took to plan and launch it.
        wait_seconds: how long the host then waited for its results.
    """

    dimensions: InferenceBatchDimensions
    graph: InferenceBatchDimensions | None
    seconds: float
    host_seconds: float
    wait_seconds: float


class StepLog:
    """Counts steps, and writes a line of JSON for each.

    Args:
        path: the file, which lines are appended to. None: nothing is written.

    Attributes:
        steps: number of steps.
        graph_uses: how often each graph was used.
        seconds: of all steps.
        host_seconds, wait_seconds: likewise.
        last: the newest step.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            self._file = Path(path).open("a", buffering=1)  # noqa: SIM115 (open while the engine is)
            finalize(self, self._file.close)
        self.steps = 0
        self.graph_uses: Counter[InferenceBatchDimensions] = Counter()
        self.seconds = self.host_seconds = self.wait_seconds = 0.0
        self.last: StepRecord | None = None

    @property
    def graphed(self) -> int:
        """How many of the steps were CUDA graphs."""
        return self.graph_uses.total()

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        self.steps += 1
        self.seconds += record.seconds
        self.host_seconds += record.host_seconds
        self.wait_seconds += record.wait_seconds
        self.last = record
        if record.graph is not None:
            self.graph_uses[record.graph] += 1
        if self._file is not None:
            graph = None if record.graph is None else {**asdict(record.graph), "uses": self.graph_uses[record.graph]}
            line = {"step": self.steps, **asdict(record.dimensions), "graph": graph}
            line |= {name: round(getattr(record, name), 7) for name in ("seconds", "host_seconds", "wait_seconds")}
            self._file.write(json.dumps(line) + "\n")
