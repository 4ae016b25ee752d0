"""Dropout that draws from the correct random stream."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megalight.parallel.random import RandomStreams
from megalight.parallel.tensor.shared import Shared


class ParallelDropout(nn.Module):
    """Dropout of hidden states: one common mask if all ``tp`` ranks hold the same input, else one mask per rank.

    Args:
        p: probability that an element is dropped.
        shared: the state that all tensor-parallel layers share.
        split: the input differs between ranks even without sequence parallelism.
    """

    def __init__(self, p: float, shared: Shared, *, split: bool = False) -> None:
        super().__init__()
        self.p = p
        self.shared = shared
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        """In training, drop elements of ``x`` and scale the others by ``1 / (1 - p)``."""
        if not self.training or not self.p:
            return x
        # Hidden states that all ranks hold must get one mask on all ranks, or the copies would drift apart.
        own = self.split or self.shared.sequence_parallel
        with self.shared.streams.fork("tensor", x.device) if own else nullcontext():
            return F.dropout(x, self.p)

    def extra_repr(self) -> str:
        """Return the probability, for printing."""
        return f"p={self.p}, split={self.split}"


class OwnStream(nn.Module):
    """Runs a module without parameters on this rank's random stream in training (attention with dropout).

    Args:
        module: its first argument is a tensor on the device whose generator it uses.
        shared: the state that all tensor-parallel layers share.
    """

    def __init__(self, module: nn.Module, shared: Shared) -> None:
        super().__init__()
        self.module = module
        self.shared = shared

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module."""
        with self.shared.streams.fork("tensor", x.device) if self.training else nullcontext():
            return self.module(x, *args, **kwargs)


def streams_of(model: nn.Module) -> list[RandomStreams]:
    """Return the random streams that modules of a model use, each once."""
    found = (part for part in model.modules() if isinstance(part, ParallelDropout | OwnStream))
    droppers = [part for part in found if has_dropout(part.module if isinstance(part, OwnStream) else part)]
    return list({id(part.shared.streams): part.shared.streams for part in droppers}.values())


def has_dropout(module: nn.Module) -> bool:
    """Whether a module can drop anything; assumed for a module that does not state its probability."""
    probability = getattr(module, "p", getattr(module, "dropout", 1.0))
    return not isinstance(probability, float) or probability > 0
