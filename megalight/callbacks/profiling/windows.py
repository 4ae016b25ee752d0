"""Windows of steps on some ranks, for tools that are too expensive to run all the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalight.errors import ConfigurationError


@dataclass(frozen=True)
class StepWindow:
    """A window of the optimizer steps ``start`` to ``stop - 1``, which may repeat every few steps.

    Args:
        start: the first step of the window. Training begins with step 0.
        stop: the first step after the window.
        every: steps from the start of one window to the next. None: there is one window.

    Raises:
        ConfigurationError: the window is empty, or windows overlap.
    """

    start: int
    stop: int
    every: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ConfigurationError(
                f"start_step is {self.start} and stop_step is {self.stop}; start_step must be at least 0 and below "
                "stop_step."
            )
        if self.every is not None and self.every < self.steps:
            raise ConfigurationError(
                f"every_n_steps is {self.every}, but a window has {self.steps} steps; windows must not overlap. Use "
                f"every_n_steps of at least {self.steps}, or null for one window."
            )

    @property
    def steps(self) -> int:
        """Number of steps in one window."""
        return self.stop - self.start

    def begins(self, step: int, ahead: int = 0) -> bool:
        """Return whether a window begins ``ahead`` steps after ``step``.

        If the first window begins at a step below ``ahead``, step 0 counts.
        """
        if self.every is None or step + ahead < self.start + self.every:
            # The first window may begin before so many steps were done.
            return step == max(self.start - ahead, 0)
        return (step + ahead - self.start) % self.every == 0


def check_ranks(ranks: Sequence[int]) -> frozenset[int]:
    """Return the ranks as a set.

    Raises:
        ConfigurationError: there is no rank, or a negative one.
    """
    if not ranks or min(ranks) < 0:
        raise ConfigurationError(f"ranks is {list(ranks)}; give at least one rank, counted from 0.")
    return frozenset(ranks)
