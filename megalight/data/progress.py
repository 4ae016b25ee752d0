"""The progress bar of commands that read many files."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn


class _Rate(TextColumn):
    """Megabytes per second."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Any) -> Any:
        self.text_format = f"{(task.speed or 0) / 1e6:.1f} MB/s"
        return super().render(task)


def progress_bar(show: bool) -> Progress:
    """Make the progress bar of the command, on standard error."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        _Rate(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not show,
    )
