"""Windows of steps on chosen ranks, for tools that are too costly to run all the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalight.errors import ConfigurationError


@dataclass(frozen=True)
class StepWindow:
    """The optimizer steps ``start`` to ``stop - 1`` (the first step of training is 0), and so again every few steps.

    Args:
        every: steps from one window's start to the next one's; None: there is one window.

    Raises:
        ConfigurationError: an empty window, or windows that overlap.
    """

    start: int
    stop: int
    every: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ConfigurationError(
                f"start_step={self.start}, stop_step={self.stop}: the window holds the steps from start_step to "
                "stop_step - 1; start_step must be at least 0 and below stop_step."
            )
        if self.every is not None and self.every < self.steps:
            raise ConfigurationError(
                f"every_n_steps is {self.every}, the window {self.steps} steps long; windows must not overlap: choose "
                f"every_n_steps of at least {self.steps}, or null for one window."
            )

    @property
    def steps(self) -> int:
        """Steps in one window."""
        return self.stop - self.start

    def begins(self, step: int, ahead: int = 0) -> bool:
        """Whether a window begins ``ahead`` steps after ``step`` (for the first window: or fewer, at step 0)."""
        if self.every is None or step + ahead < self.start + self.every:
            return step == max(self.start - ahead, 0)
        return (step + ahead - self.start) % self.every == 0


def check_ranks(ranks: Sequence[int]) -> frozenset[int]:
    """Ranks as a set.

    Raises:
        ConfigurationError: none, or a negative one.
    """
    if not ranks or min(ranks) < 0:
        raise ConfigurationError(f"ranks is {list(ranks)}; name at least one rank, counted from 0.")
    return frozenset(ranks)
