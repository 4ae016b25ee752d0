"""A logger that keeps what it is given."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers import Logger


class Rows(Logger):
    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    name = version = "rows"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def starting(self, prefix: str) -> list[tuple[int | None, dict[str, float]]]:
        """Rows of names that begin so."""
        return [(step, row) for step, row in self.rows if all(name.startswith(prefix) for name in row)]
