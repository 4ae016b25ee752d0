"""Run the user's own ``training_step`` on each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.parallel.coupling import contents, is_empty
from megalight.parallel.trace import span
from megalight.plugins.precision import MegatronPrecision
from megalight.strategies.batch_size import weights


class OwnTrainingStep:
    """Forward and backward of a user's step. The step returns a mean over its samples; gradients average all samples.

    Args:
        before_backward: called with each scalar before its backward.
    """

    def __init__(
        self, module: pl.LightningModule, precision: MegatronPrecision, before_backward: Callable[[Tensor], None]
    ) -> None:
        self.module = module
        self.precision = precision
        self.before_backward = before_backward

    def __call__(
        self, micro_batches: Sequence[Any], others: Sequence[Any], scale: float, data_ranks: int
    ) -> tuple[Any, Tensor]:
        """Run all micro-batches. Empty ones have weight 0.

        Args:
            micro_batches: this rank's micro-batches.
            others: further arguments of ``training_step`` from Lightning.
            scale: factor of the objective.
            data_ranks: number of ranks over which gradients are summed.

        Returns:
            the output of the last micro-batch that is not empty, and the mean loss of this rank's samples.

        Raises:
            ConfigurationError: the step returned no differentiable loss.
        """
        output: Any = None
        losses = []
        real = weights([micro_batch for micro_batch in micro_batches if not is_empty(micro_batch)])
        for index, micro_batch in enumerate(micro_batches):
            weight = 0.0 if is_empty(micro_batch) else real[index]  # empty ones come last
            with self.precision.step_context(), span("forward", chunk=0, micro_batch=index):
                made = self.module.training_step(contents(micro_batch), *others)
            output = output if is_empty(micro_batch) else made
            loss = made.get("loss") if isinstance(made, Mapping) else made
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                raise ConfigurationError(
                    f"{type(self.module).__name__}.training_step returned {type(made).__name__} without a "
                    "differentiable loss; return the loss tensor or a dict with the key 'loss'."
                )
            # gradients are summed over micro-batches and data ranks, so these weights turn the sum into a mean
            share = loss * (scale * weight / data_ranks)
            self.before_backward(share)
            with span("backward", chunk=0, micro_batch=index):
                self.module.backward(share)
            losses.append(loss.detach() * weight)
        return output, torch.stack(losses).sum()
