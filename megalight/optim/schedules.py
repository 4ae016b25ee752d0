"""Learning-rate schedules: factors on the learning rate for each optimizer step.

Steps count from 0. Warm-up is linear: step ``s`` of ``warmup`` has the factor ``(s + 1) / warmup``, so no step has
learning rate 0. After the last step the factor keeps its final value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from megalight.errors import ConfigurationError

NOTE = "schedule"
"""Field of a scheduler, also in checkpoints, with the class and the fields of the schedule that it follows."""


class LRSchedule(ABC):
    """A learning-rate schedule. Your own schedule only needs :meth:`factor`."""

    @abstractmethod
    def factor(self, step: int) -> float:
        """Return the factor on the learning rate in optimizer step ``step``."""

    def for_run(self, max_steps: int) -> LRSchedule:
        """Return the schedule for a run of ``max_steps`` optimizer steps (-1: unlimited)."""
        return self

    def build(self, optimizer: Optimizer, of_groups: Sequence[LRSchedule | None] | None = None) -> LambdaLR:
        """Create a torch scheduler, which must be stepped once after every optimizer step.

        Args:
            optimizer: its groups get the schedule.
            of_groups: the schedule of each group, where they differ; None: a constant rate.
        """
        # Plain functions: LambdaLR saves the fields of a callable object in checkpoints and restores them from there.
        groups = [self] * len(optimizer.param_groups) if of_groups is None else of_groups
        scheduler = LambdaLR(optimizer, [_factor(each) for each in groups])
        # Its fields are saved, too. So a run that resumes can say what has changed, or keep it.
        setattr(scheduler, NOTE, {"kind": type(self).__name__, **(asdict(self) if is_dataclass(self) else {})})
        return scheduler


def _factor(schedule: LRSchedule | None) -> Callable[[int], float]:
    return (lambda step: 1.0) if schedule is None else lambda step: schedule.factor(step)


def noted(note: Mapping[str, Any] | None) -> LRSchedule | None:
    """Return the schedule that a scheduler's note tells of; None if it is none of Megalight's."""
    kinds: dict[str, type[LRSchedule]] = {
        kind.__name__: kind for kind in (Constant, CosineDecay, LinearDecay, WSD, InverseSqrtDecay)
    }
    kind = kinds.get((note or {}).get("kind", ""))
    return None if kind is None or note is None else kind(**{name: note[name] for name in note if name != "kind"})


def advance(scheduler: LRScheduler, step: int) -> None:
    """Set a scheduler, and the rates in its optimizer, to optimizer step ``step``, for rates that depend on that alone.

    For state that another library saved, whose schedules are not ours.
    """
    scheduler.last_epoch = step - 1
    # Not its first call, of which torch asks that the optimizer has stepped before.
    scheduler._step_count = max(step, 2)
    scheduler.step()


@dataclass(frozen=True, kw_only=True)
class WarmedUp(LRSchedule):
    """Base class of schedules that begin with a linear warm-up.

    Attributes:
        warmup: steps of linear warm-up.
        steps: optimizer steps of the whole run, with warm-up. None: the trainer's ``max_steps``.
    """

    warmup: int = 0
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.warmup < 0 or (self.steps is not None and self.steps <= self.warmup):
            raise ConfigurationError(
                f"the schedule has {self.steps} steps and warmup is {self.warmup}; warmup must be at least 0 and below "
                "the number of steps."
            )

    def factor(self, step: int) -> float:
        """Return the factor on the learning rate in optimizer step ``step``."""
        return (step + 1) / self.warmup if step < self.warmup else self.after_warmup(step - self.warmup)

    @abstractmethod
    def after_warmup(self, step: int) -> float:
        """Return the factor; steps count from the end of the warm-up."""

    @property
    def remaining(self) -> int:
        """Number of steps after the warm-up.

        Raises:
            ConfigurationError: the length of the run is unknown.
        """
        if self.steps is None:
            raise ConfigurationError(
                f"{type(self).__name__} needs the length of the run; set max_steps of the trainer, or steps of the "
                "schedule."
            )
        return self.steps - self.warmup

    def for_run(self, max_steps: int) -> LRSchedule:
        """Return the schedule for a run of ``max_steps`` (-1: unlimited), unless it has its own ``steps``.

        A run that ends within the warm-up is the beginning of a longer one.
        """
        if self.steps is not None or max_steps < 1:
            return self
        return replace(self, steps=max(max_steps, self.warmup + 1))


@dataclass(frozen=True, kw_only=True)
class Decay(WarmedUp):
    """Base class of schedules that fall after the warm-up.

    Attributes:
        min_ratio: factor that it never falls below.
    """

    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_ratio <= 1:
            raise ConfigurationError(
                f"min_ratio is {self.min_ratio}; it must be between 0 and 1 (a share of the learning rate)."
            )


@dataclass(frozen=True, kw_only=True)
class Constant(WarmedUp):
    """Warm-up, then the full learning rate."""

    def after_warmup(self, step: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class CosineDecay(Decay):
    """Half a cosine from 1 down to ``min_ratio`` (Loshchilov and Hutter 2017, without restarts)."""

    min_ratio: float = 0.1

    def after_warmup(self, step: int) -> float:
        """Return ``min + (1 - min) (1 + cos(pi t)) / 2``, with ``t`` from 0 to 1 over the remaining steps."""
        # Clamped, so that the rate stays at its lowest value after the last step.
        way = min(1.0, step / self.remaining)
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * way))


@dataclass(frozen=True, kw_only=True)
class LinearDecay(Decay):
    """A straight line from 1 down to ``min_ratio``."""

    def after_warmup(self, step: int) -> float:
        """Return ``1 - (1 - min) t``, with ``t`` from 0 to 1 over the remaining steps."""
        return 1 - (1 - self.min_ratio) * min(1.0, step / self.remaining)


@dataclass(frozen=True, kw_only=True)
class WSD(Decay):
    """Warm-up, stable, decay (Hu et al. 2024): the full learning rate until a short decay at the end.

    Attributes:
        decay: length of the decay as a share of all steps.
        shape: shape of the decay, with ``t`` from 0 to 1: ``linear`` is ``1 - t``, ``cosine`` half a cosine, ``sqrt``
            ``1 - sqrt(t)`` (Haegele et al. 2024).
    """

    decay: float = 0.2
    shape: Literal["linear", "cosine", "sqrt"] = "sqrt"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay <= 1:
            raise ConfigurationError(f"decay is {self.decay}; it must be above 0 and at most 1 (a share of all steps).")
        if self.shape not in ("linear", "cosine", "sqrt"):
            raise ConfigurationError(f"shape is {self.shape!r}; use linear, cosine or sqrt.")

    def after_warmup(self, step: int) -> float:
        """Return 1, then fall to ``min_ratio`` with ``shape``."""
        # At least one step of decay, and none of it inside the warm-up.
        length = min(self.remaining, max(1, round(self.decay * (self.steps or 0))))
        way = min(1.0, max(0.0, (step - (self.remaining - length)) / length))
        shapes = {"linear": 1 - way, "cosine": 0.5 * (1 + math.cos(math.pi * way)), "sqrt": 1 - math.sqrt(way)}
        return self.min_ratio + (1 - self.min_ratio) * shapes[self.shape]


@dataclass(frozen=True, kw_only=True)
class InverseSqrtDecay(Decay):
    """Falls with one over the square root of the step (Vaswani et al. 2017). It is 1 at the end of the warm-up."""

    def after_warmup(self, step: int) -> float:
        """Return ``max(min, sqrt(w / (w + step)))`` with ``w`` steps of warm-up, at least one."""
        scale = max(self.warmup, 1)
        return max(self.min_ratio, math.sqrt(scale / (scale + step)))
