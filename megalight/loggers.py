"""Loggers for Lightning, beside its own."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from torch import Tensor

FILE = "metrics.jsonl"


class JSONLogger(CSVLogger):
    """Writes one JSON object per row to ``metrics.jsonl``: only the metrics that the row has, and its ``step``.

    A row is appended and never rewritten, so other programs can follow the file (``tail -f``). A CSV file is rewritten
    whenever a new metric appears. Values that JSON lacks (NaN, infinity) are written as strings.

    Folders, versions, hyperparameters and arguments are those of ``CSVLogger``.
    """

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer."""
        # In the first use, as only rank 0 comes here, and only it makes the folder.
        if self._experiment is None:
            os.makedirs(self.log_dir, exist_ok=True)
            self._experiment = _Writer(self.log_dir)  # type: ignore[assignment]
        return self._experiment


class _Writer:
    """Collects rows, and appends them to the file."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, FILE)
        self._parameters = os.path.join(folder, "hparams.json")
        self._hparams: dict[str, Any] = {}
        self._rows: list[str] = []
        self.metrics = range(0)  # CSVLogger takes its length as the step of rows that have none

    def log_hparams(self, parameters: Mapping[str, Any]) -> None:
        """Write the hyperparameters, values that JSON lacks as text."""
        self._hparams.update(parameters)
        with open(self._parameters, "w") as file:
            json.dump(self._hparams, file, default=str, indent=1)

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Add a row."""
        self.metrics = range(len(self.metrics) + 1)
        # As text now: a row is written later, and tensors would keep their memory until then.
        self._rows.append(json.dumps({"step": step, **{name: _plain(value) for name, value in metrics.items()}}))

    def save(self) -> None:
        """Append the rows that are not in the file yet."""
        # Opened for each save: a moved or rotated file is followed.
        with open(self._path, "a") as file:
            file.writelines(row + "\n" for row in self._rows)
        self._rows = []


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, Tensor) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
