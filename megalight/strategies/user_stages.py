"""The steps of a plain LightningModule on the stages of a pipeline: what it writes for the whole model runs on each.

The model inside of it is one of ``transformers`` (:mod:`megalight.parallel.pipeline.declared_stages`). On stages before
the last, a step ends inside of its call of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from megalight.parallel.pipeline.carry import Carry
from megalight.types import Loss


@dataclass
class WeightedBatch:
    """A micro-batch, and its share of the samples of this rank's batch."""

    batch: Any
    weight: float


class UserStages:
    """The training task of a plain module: its ``training_step`` is a mean over the samples of a micro-batch.

    Args:
        problem: describes an output that cannot be trained on; returns an exception.

    Attributes:
        method: the step that runs.
        others: its arguments behind the batch.
        output: what an evaluation step returned. None on stages before the last.
    """

    def __init__(self, module: pl.LightningModule, device: torch.device, problem: Callable[[Any], Exception]) -> None:
        self.module = module
        self.device = device
        self.problem = problem
        self.method = "training_step"
        self.others: Sequence[Any] = ()
        self.output: Any = None

    def begin(self, method: str, others: Sequence[Any]) -> None:
        """Begin a step."""
        self.method, self.others, self.output = method, others, None

    def forward_step(self, model: nn.Module, batch: WeightedBatch, carry: Carry | None = None) -> Carry:
        """Run the user's step, which calls the model; on the last stage, return its loss."""
        made = getattr(self.module, self.method)(batch.batch, *self.others)
        if self.method != "training_step":
            self.output = made
            return {}
        loss = made.get("loss") if isinstance(made, Mapping) else made
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise self.problem(made)
        return {"loss": loss}

    def loss_step(self, carry: Carry, batch: WeightedBatch) -> Loss:
        """Return the loss, which is a mean, times the micro-batch's weight."""
        return Loss(carry["loss"] * batch.weight)

    def loss_tokens(self, batch: WeightedBatch) -> Tensor:
        """Return the weight. The weights of one rank add up to 1, so that the whole is the mean over ranks."""
        return torch.tensor(batch.weight, dtype=torch.float64, device=self.device)
