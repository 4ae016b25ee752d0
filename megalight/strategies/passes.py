"""What the passes of a training step give, and who runs them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """What the passes of all micro-batches of a step give, all of it on the device.

    Attributes:
        loss: mean over all tokens of the global batch, 0-dim.
        num_tokens: tokens that counted in it, over all ranks, 0-dim.
        metrics: further global means, 0-dim each.
    """

    loss: Tensor
    num_tokens: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class StepReport:
    """What the last training step did. Device tensors are for asynchronous reading: do not ``.item()`` them in a hurry.

    Attributes:
        loss: mean over all tokens of the global batch, 0-dim.
        num_tokens: tokens that counted in it, over all ranks, 0-dim.
        num_samples: samples of the global batch, on the host.
        metrics: further global means, 0-dim each; auxiliary losses among them.
    """

    loss: Tensor
    num_tokens: Tensor
    num_samples: int
    metrics: dict[str, Tensor]


Passes: TypeAlias = Callable[[Sequence[Any]], Outcome]
"""From micro-batches on the device to reduced gradients: forward, backward and reductions of one training step."""
StepRunner: TypeAlias = Callable[[Hashable, Sequence[Any], Passes], Outcome]
"""Runs the passes of a step in a way of its own: ``(what else they depend on, micro_batches, passes)``."""


def run_passes(key: Hashable, micro_batches: Sequence[Any], passes: Passes) -> Outcome:
    """The usual way: as they are written."""
    return passes(micro_batches)
