"""Losses that arise inside of layers: a router's balance, a penalty on activations.

A layer attaches one to hidden states that pass through it::

    hidden = context.side_losses.attach("balance", value, hidden)

Whoever trains collects them, by entering :func:`collecting` around the forward passes. Where nobody does, as in
evaluation, hidden states pass as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.ops.common import apply, once_differentiable
from megalight.types import Opaque

log = logging.getLogger(__name__)


class SideLosses(Opaque):
    """Collects nothing."""

    def attach(self, name: str, value: Tensor, hidden: Tensor) -> Tensor:
        """``hidden`` as it is. While training, ``value`` takes part in the objective and is logged as ``train_{name}``.

        Args:
            name: losses of one name add up, those of several layers too.
            value: 0-dim, with gradient, a mean over the micro-batch; the objective has its mean over all micro-batches.
                Compute it from hidden states as layers get and return them.
            hidden: a tensor on the way to the loss. The gradient of ``value`` begins when that of ``hidden`` arrives.

        Raises:
            ConfigurationError: ``value`` is not 0-dim.
        """
        if value.dim():
            raise ConfigurationError(f"the side loss {name!r} has the shape {list(value.shape)}; give it as a scalar.")
        return self._collect(name, value, hidden) if torch.is_grad_enabled() else hidden

    def _collect(self, name: str, value: Tensor, hidden: Tensor) -> Tensor:
        if value.requires_grad and not runs_again():
            _tell_lost(name)
        return hidden


class AttachedSideLosses(SideLosses):
    """Attaches the gradient of each loss where it arises, so that it also flows on a stage that sees no final loss.

    All that changes from step to step lies in tensors that stay where they are: recorded work may go on using them.

    Attributes:
        totals: the sum of each loss over all forward passes since :meth:`begin`, 0-dim float64.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.totals: dict[str, Tensor] = {}
        self._scale = torch.zeros((), dtype=torch.float64, device=device)

    def begin(self, scale: Tensor) -> None:
        """A step begins, in which every loss counts ``scale`` times."""
        self._scale.copy_(scale)
        for total in self.totals.values():
            total.zero_()

    def _collect(self, name: str, value: Tensor, hidden: Tensor) -> Tensor:
        if not runs_again():
            if name not in self.totals:
                self.totals[name] = torch.zeros_like(self._scale)
            self.totals[name].add_(value.detach())
        attached: Tensor = apply(_Attach, hidden, value, self._scale)
        return attached


class KeptSideLosses(SideLosses):
    """Keeps the losses, with their gradients, for whoever adds them to a loss of his own.

    Attributes:
        values: the sum of each loss.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def _collect(self, name: str, value: Tensor, hidden: Tensor) -> Tensor:
        if not runs_again():
            self.values[name] = self.values[name] + value if name in self.values else value
        return hidden


class ZeroSideLosses(SideLosses):
    """Hands losses on to ``losses``, times zero: the gradients are there, and are zero."""

    def __init__(self, losses: SideLosses) -> None:
        self.losses = losses

    def _collect(self, name: str, value: Tensor, hidden: Tensor) -> Tensor:
        return self.losses._collect(name, value * 0, hidden)


class _Attach(torch.autograd.Function):
    """``hidden``, whose backward gives ``value`` the gradient ``scale``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.dtype = value.dtype
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient, scale.to(ctx.dtype), None


_LOST = SideLosses()
_collectors: list[SideLosses] = []  # not one per thread: backward passes run recomputed layers in threads of their own

SideLossesT = TypeVar("SideLossesT", bound=SideLosses)


@contextmanager
def collecting(losses: SideLossesT) -> Iterator[SideLossesT]:
    """Side losses of the forward passes inside go to ``losses``."""
    _collectors.append(losses)
    try:
        yield losses
    finally:
        _collectors.pop()


def current() -> SideLosses:
    """Where side losses go now."""
    return _collectors[-1] if _collectors else _LOST


def runs_again() -> bool:
    """Whether this forward pass is part of a backward pass: recompute runs it a second time."""
    return torch._C._current_graph_task_id() != -1


@cache
def _tell_lost(name: str) -> None:
    log.warning("nobody collects the side loss %r: call the layers inside megalight.nn.side_losses.collecting", name)
