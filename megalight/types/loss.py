"""The loss of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from megalight.errors import ConfigurationError

Totals: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]
"""Metric name -> (sum, count); the metric is their :func:`mean`. ``"loss"`` is always among them."""


@dataclass(frozen=True, eq=False)
class Loss:
    """The loss of one micro-batch, as a sum over its tokens.

    Attributes:
        sum: scalar with gradient: the sum of the token losses. It is divided by the token count of the whole global
            batch, so the result does not depend on the micro-batch size or on data parallelism.
        auxiliary: name -> scalar with gradient, which is added to the objective. A mean (for example a load-balancing
            loss) is averaged over the micro-batches of all data-parallel ranks. A sum, whose count the task's
            ``auxiliary_counts`` returns, is divided by the count of the whole global batch.
        metrics: name -> ``(sum, count)``, detached. They are logged as sums over all ranks, ``sum / count``.

    Raises:
        ConfigurationError: a metric is no pair of tensors, or another value is no tensor.
    """

    sum: Tensor
    auxiliary: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("sum", self.sum), *self.auxiliary.items()):
            if not isinstance(value, Tensor):
                raise ConfigurationError(f"Loss: {name!r} is a {type(value).__name__}; it must be a tensor.")
        for name, pair in self.metrics.items():
            if not isinstance(pair, tuple) or [isinstance(value, Tensor) for value in pair] != [True, True]:
                raise ConfigurationError(
                    f"Loss: the metric {name!r} is {pair!r}; it must be (sum, count), two tensors, whose sums over all "
                    "ranks are divided. For a mean over micro-batches give (value, torch.tensor(1))."
                )

    def detach(self) -> Loss:
        """Return the same values without the autograd graph."""
        # Metrics are detached already.
        return Loss(self.sum.detach(), {name: x.detach() for name, x in self.auxiliary.items()}, self.metrics)


def mean(total: Tensor, count: Tensor) -> Tensor:
    """``total / count`` of detached sums, and 0 where nothing counted. Counts may be any weights: 0.5 divides too."""
    # No branch on the count, for which the host would wait: 0 / 0 is NaN, which is replaced.
    return (total / count).masked_fill(count == 0, 0)


def inverse(count: Tensor) -> Tensor:
    """``1 / count``, and 0 where nothing counted: a factor for sums with gradient, whose gradient is then 0 too."""
    # As a quotient, the backward would divide a gradient of zero by zero, which is NaN.
    return count.reciprocal().masked_fill(count == 0, 0)
