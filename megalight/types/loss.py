"""The loss of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Loss:
    """The loss of one micro-batch, as a sum over its tokens.

    Attributes:
        sum: scalar with gradient: the sum of the token losses. It is divided by the token count of the whole global
            batch, so the result does not depend on the micro-batch size or on data parallelism.
        auxiliary: name -> scalar with gradient that is already a mean (for example a load-balancing loss). Each is
            averaged over micro-batches and data-parallel ranks and added to the objective.
        metrics: name -> ``(sum, count)``, detached. They are logged as sums over all ranks, ``sum / count``.
    """

    sum: Tensor
    auxiliary: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def detach(self) -> Loss:
        """Return the same values without the autograd graph."""
        return Loss(self.sum.detach(), {name: x.detach() for name, x in self.auxiliary.items()}, self.metrics)
