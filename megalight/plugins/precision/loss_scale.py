"""Dynamic loss scaling (Micikevicius et al. 2018): float16 gradients are kept away from zero and from overflow."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class LossScale:
    """The factor on the loss. It grows after many finite steps, and shrinks after each step that overflowed.

    Attributes:
        scale: the current factor.
        growth_factor: factor on it after ``growth_interval`` finite steps in a row.
        backoff_factor: factor on it after a step with an infinite or NaN gradient.
        growth_interval: see above.
        finite_steps: finite steps since the last change.
    """

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    finite_steps: int = 0

    def update(self, finite: bool) -> None:
        """Note whether all gradients of a step were finite."""
        # Counted before the test, so that the interval counts this step.
        self.finite_steps += 1
        if not finite:
            # Shrink at once, grow slowly: an overflow costs a step, a small scale only some precision.
            self.scale, self.finite_steps = self.scale * self.backoff_factor, 0
        elif self.finite_steps == self.growth_interval:
            self.scale, self.finite_steps = self.scale * self.growth_factor, 0

    def state_dict(self) -> dict[str, float]:
        """Return all values, for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over the values of :meth:`state_dict`."""
        self.__dict__.update(state)
