"""The part of a student that compares its hidden states with those of its teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from megalight.errors import ConfigurationError
from megalight.nn import StateComparison
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import ComparisonStyle as Style
from megalight.parallel.transform import ModelTransform, register


@register
@dataclass(frozen=True)
class HiddenStateComparison(ModelTransform):
    """Adds a :class:`~megalight.nn.StateComparison` beside the head, as ``distillation``. It serves training alone.

    Args:
        width: width of the student's hidden states.
        teacher_width: width of the teacher's.
        std: standard deviation of the initial projection, if the widths differ.
    """

    name: ClassVar[str] = "comparison"
    given_by: ClassVar[str] = "pairs and balance of Distillation"
    training_only: ClassVar[str | None] = "distillation."

    width: int
    teacher_width: int
    std: float = 0.02

    def change(self, model: nn.Module) -> None:
        """Add the module.

        Raises:
            ConfigurationError: the model has one, for a teacher of another width.
        """
        if getattr(model, "distillation", None) is not None:
            raise ConfigurationError(
                "the model compares its hidden states with another teacher's already. Use one teacher, or a new module."
            )
        with torch.device(next(model.parameters()).device):
            model.distillation = StateComparison(self.width, self.teacher_width, self.std)

    def plan(self, model: nn.Module, plan: ParallelizePlan) -> ParallelizePlan:
        """Return the plan with the rule for the module."""
        return plan | ParallelizePlan({StateComparison: Style()}, plan.sequence_dim)
