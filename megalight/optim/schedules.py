"""Learning-rate schedules: what multiplies the learning rate at each optimizer step.

Steps count from 0. Warm-up is linear: step ``s`` of ``warmup`` has the factor ``(s + 1) / warmup``, so that no step is
wasted at zero. After the last step the factor stays at its final value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from megalight.errors import ConfigurationError


class Schedule(ABC):
    """A learning-rate schedule. Your own needs :meth:`factor` alone."""

    @abstractmethod
    def factor(self, step: int) -> float:
        """What multiplies the learning rate in optimizer step ``step``."""

    def for_run(self, max_steps: int) -> Schedule:
        """The schedule of a run of ``max_steps`` optimizer steps (-1: unlimited)."""
        return self

    def build(self, optimizer: Optimizer) -> LambdaLR:
        """A torch scheduler to be stepped once after every optimizer step."""
        # a plain function: LambdaLR would put the fields of an object into checkpoints and take them back from there
        return LambdaLR(optimizer, lambda step: self.factor(step))


@dataclass(frozen=True, kw_only=True)
class WarmedUp(Schedule):
    """Base of the schedules that begin with a linear warm-up.

    Attributes:
        warmup: steps of linear warm-up.
        steps: optimizer steps of the whole run, warm-up included; None: the trainer's ``max_steps``.
    """

    warmup: int = 0
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.warmup < 0 or (self.steps is not None and self.steps <= self.warmup):
            raise ConfigurationError(
                f"schedule of {self.steps} steps with {self.warmup} steps of warm-up; "
                "warm-up must be at least 0 and end before the last step."
            )

    def factor(self, step: int) -> float:
        """What multiplies the learning rate in optimizer step ``step``."""
        return (step + 1) / self.warmup if step < self.warmup else self.after_warmup(step - self.warmup)

    @abstractmethod
    def after_warmup(self, step: int) -> float:
        """The factor, with steps counted from the end of the warm-up."""

    @property
    def remaining(self) -> int:
        """Steps after the warm-up.

        Raises:
            ConfigurationError: the length of the run is not known.
        """
        if self.steps is None:
            raise ConfigurationError(
                f"{type(self).__name__} must know the length of the run: set the trainer's max_steps, or its own steps."
            )
        return self.steps - self.warmup

    def for_run(self, max_steps: int) -> Schedule:
        """The schedule of a run of ``max_steps`` (-1: unlimited), unless it states its own length."""
        return replace(self, steps=max_steps) if self.steps is None and max_steps > 0 else self


def _check_min_ratio(value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigurationError(f"min_ratio={value}; it is a share of the full learning rate, between 0 and 1.")


@dataclass(frozen=True, kw_only=True)
class Constant(WarmedUp):
    """Warm-up, then the full learning rate."""

    def after_warmup(self, step: int) -> float:
        """Always 1."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Cosine(WarmedUp):
    """Half a cosine from 1 down to ``min_ratio`` (Loshchilov and Hutter 2017, without restarts)."""

    min_ratio: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_min_ratio(self.min_ratio)

    def after_warmup(self, step: int) -> float:
        """``min + (1 - min) (1 + cos(pi t)) / 2`` at ``t`` of the way."""
        way = min(1.0, step / self.remaining)
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * way))


@dataclass(frozen=True, kw_only=True)
class Linear(WarmedUp):
    """A straight line from 1 down to ``min_ratio``."""

    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_min_ratio(self.min_ratio)

    def after_warmup(self, step: int) -> float:
        """``1 - (1 - min) t`` at ``t`` of the way."""
        return 1 - (1 - self.min_ratio) * min(1.0, step / self.remaining)


@dataclass(frozen=True, kw_only=True)
class WSD(WarmedUp):
    """Warm-up, stable, decay (Hu et al. 2024): the full learning rate until a short decay at the end.

    Attributes:
        decay: share of all steps that the decay takes.
        shape: of the decay, ``t`` of the way through it: ``linear`` ``1 - t``, ``cosine`` half a cosine, ``sqrt``
            ``1 - sqrt(t)`` (Haegele et al. 2024).
        min_ratio: factor at the end.
    """

    decay: float = 0.2
    shape: Literal["linear", "cosine", "sqrt"] = "sqrt"
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_min_ratio(self.min_ratio)
        if not 0 < self.decay <= 1:
            raise ConfigurationError(f"decay={self.decay}; it is a share of all steps, above 0 and at most 1.")
        if self.shape not in ("linear", "cosine", "sqrt"):
            raise ConfigurationError(f"shape={self.shape!r}; use linear, cosine or sqrt.")

    def after_warmup(self, step: int) -> float:
        """1, then down to ``min_ratio`` by ``shape``."""
        length = min(self.remaining, max(1, round(self.decay * (self.steps or 0))))
        way = min(1.0, max(0.0, (step - (self.remaining - length)) / length))
        shapes = {"linear": 1 - way, "cosine": 0.5 * (1 + math.cos(math.pi * way)), "sqrt": 1 - math.sqrt(way)}
        return self.min_ratio + (1 - self.min_ratio) * shapes[self.shape]


@dataclass(frozen=True, kw_only=True)
class InverseSqrt(WarmedUp):
    """Falls with one over the root of the step (Vaswani et al. 2017); 1 at the end of the warm-up."""

    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_min_ratio(self.min_ratio)

    def after_warmup(self, step: int) -> float:
        """``max(min, sqrt(w / (w + step)))`` with ``w`` steps of warm-up, at least one."""
        scale = max(self.warmup, 1)
        return max(self.min_ratio, math.sqrt(scale / (scale + step)))
