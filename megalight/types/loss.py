"""What a micro-batch contributes to the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Loss:
    """What one micro-batch contributes to the loss.

    Attributes:
        sum: scalar, with gradient: the sum of the losses of the micro-batch's tokens. It is divided by the token count
            of the whole global batch, so that nothing depends on micro-batch size or data parallelism.
        auxiliary: scalar losses with gradient that are means already (router balance and the like); each is averaged
            over micro-batches and data-parallel ranks and added to the objective.
        metrics: name -> ``(sum, count)``, detached; reported as global ``sum / count``.
    """

    sum: Tensor
    auxiliary: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def detach(self) -> Loss:
        """The same without the graph."""
        return Loss(self.sum.detach(), {name: x.detach() for name, x in self.auxiliary.items()}, self.metrics)
