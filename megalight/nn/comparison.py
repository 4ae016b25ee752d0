"""Comparison of a student's hidden states with those of a teacher."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.nn.init import Constant, Initializer, Normal
from megalight.nn.moe.pool import Pool


def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """``1 - cos`` of the angle between two vectors: ``[T, h] -> [T]``."""
    return F.cosine_embedding_loss(student, teacher, student.new_ones(1), reduction="none")


def mse(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean square of the differences of features: ``[T, h] -> [T]``."""
    return (student - teacher).square().mean(-1)


COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": cosine, "mse": mse}
"""Name -> function of hidden states of a student and of its teacher."""


class StateComparison(nn.Module):
    """Losses between hidden states of a student and of its teacher, for each token.

    Args:
        width: features of the student's states.
        teacher_width: features of the teacher's. If it differs, a projection ``width -> teacher_width`` is trained; all
            pairs of states share it.
        std: standard deviation of its initial weight.

    Attributes:
        projection: ``[teacher_width, width]``, or None.
        bias: ``[teacher_width]``, or None.
        pool: finds means over all tokens of a micro-batch.
    """

    projection: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, width: int, teacher_width: int, std: float = 0.02) -> None:
        super().__init__()
        differ = width != teacher_width
        # No linear layer: adapters and quantizers, which choose linear layers, are for the model.
        self.register_parameter("projection", nn.Parameter(torch.empty(teacher_width, width)) if differ else None)
        self.register_parameter("bias", nn.Parameter(torch.empty(teacher_width)) if differ else None)
        self.initializers: dict[str, Initializer] = {"projection": Normal(std), "bias": Constant(0.0)}
        self.pool = Pool()

    def forward(self, teacher: Tensor, student: Tensor, kind: str) -> Tensor:
        """``teacher [T, teacher_width], student [T, width] ->`` losses ``[T]``, float32 or float64.

        Args:
            kind: name of a comparison.
        """
        if self.projection is not None:
            student = F.linear(student, self.projection, self.bias)
        wide = torch.promote_types(student.dtype, torch.float32)
        return COMPARISONS[kind](student.to(wide), teacher.to(wide))
