"""The schedule without a pipeline: all chunks of the model are here, each micro-batch runs through them in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megalight.types import Loss

Carry: TypeAlias = dict[str, Tensor]
ForwardStep: TypeAlias = Callable[[nn.Module, Any, Carry | None], Carry]
LossStep: TypeAlias = Callable[[Carry, Any], Loss]


def forward(chunks: Sequence[nn.Module], batch: Any, forward_step: ForwardStep) -> Carry:
    """One micro-batch through every chunk; what the last one returned."""
    carry: Carry | None = None
    for chunk in chunks:
        carry = forward_step(chunk, batch, carry)
        if not isinstance(carry, dict):
            raise TypeError(
                f"forward_step returned {type(carry).__name__}; it must return a dict of tensors "
                "(hidden states for the next chunk, or what loss_step reads)."
            )
    assert carry is not None, "a model has at least one chunk"
    return carry


def forward_backward(
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[Any],
    forward_step: ForwardStep,
    loss_step: LossStep,
    objective: Callable[[Loss], Tensor],
    micro_batch: Callable[[bool], AbstractContextManager[None]],
) -> list[Loss]:
    """Forward and backward of every micro-batch, one after the other.

    Args:
        objective: the scalar to differentiate, from a micro-batch's loss.
        micro_batch: opened around each micro-batch and told whether it is the last (gradients may then be reduced).

    Returns:
        the losses, detached, in order.
    """
    losses = []
    for index, batch in enumerate(micro_batches):
        with micro_batch(index == len(micro_batches) - 1):
            loss = loss_step(forward(chunks, batch, forward_step), batch)
            torch.autograd.backward(objective(loss))
        losses.append(
            Loss(loss.sum.detach(), {name: value.detach() for name, value in loss.auxiliary.items()}, loss.metrics)
        )
    return losses
