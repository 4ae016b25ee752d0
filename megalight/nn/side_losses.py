"""Losses of single layers: a router's balance loss, a penalty on activations.

A layer attaches a loss to the hidden states that pass through it::

    hidden = context.side_losses.attach("balance", value, hidden)

A training step collects these losses: it runs the forward passes inside :func:`collecting`. Without it, as in
evaluation, hidden states pass unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.imports import in_backward
from megalight.ops.common import apply, once_differentiable
from megalight.types import Opaque

log = logging.getLogger(__name__)


class SideLosses(Opaque):
    """The interface of collectors. This one collects nothing."""

    keeps = False
    """Whether values are kept."""

    @property
    def counts(self) -> bool:
        """Whether this forward pass counts: in training, the first time, and not for a micro-batch without effect."""
        return self.keeps and torch.is_grad_enabled() and not in_backward()

    def attach(self, name: str, value: Tensor, hidden: Tensor, count: int = 1) -> Tensor:
        """Return ``hidden`` unchanged. In training, ``value`` adds to the objective and is logged as ``train_{name}``.

        Args:
            name: losses with the same name are added, also those of several layers.
            value: a 0-dim mean over the micro-batch, with gradient. The objective gets its mean over all micro-batches.
                Compute it from hidden states as layers get and return them.
            hidden: a tensor on which the loss depends. The backward pass of ``value`` starts when the gradient of
                ``hidden`` arrives.
            count: how many things ``value`` is the mean over, such as sequences. If the step's task counts them under
                this name (``auxiliary_counts``), the objective gets the mean over all of them, whatever their number
                in each micro-batch.

        Raises:
            ConfigurationError: ``value`` is not 0-dim.
        """
        if value.dim():
            raise ConfigurationError(f"the side loss {name!r} has the shape {list(value.shape)}; give it as a scalar.")
        return self._collect(name, value, hidden, count) if torch.is_grad_enabled() else hidden

    def _collect(self, name: str, value: Tensor, hidden: Tensor, count: int) -> Tensor:
        if value.requires_grad and not in_backward():
            _tell_lost(name)
        return hidden


class AttachedSideLosses(SideLosses):
    """Attaches the gradient of each loss in its layer, so it also works on pipeline stages without the final loss.

    Values that change from step to step are in tensors with fixed addresses, so CUDA graphs can use them.

    Attributes:
        totals: the sum of each loss over all forward passes since :meth:`begin`, 0-dim float64.
    """

    keeps = True

    def __init__(self, device: torch.device | str) -> None:
        self.totals: dict[str, Tensor] = {}
        self._scale = torch.zeros((), dtype=torch.float64, device=device)
        self._scales: dict[str, Tensor] = {}

    def begin(self, scale: Tensor, scales: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Begin a step.

        Args:
            scale: multiplies each loss in the objective.
            scales: for losses whose things are counted, by name: multiplies the loss times its count instead.
        """
        # In place, because graphs read these addresses.
        self._scale.copy_(scale)
        for name, factor in scales.items():
            self._scales.setdefault(name, torch.zeros_like(self._scale)).copy_(factor)
        for total in self.totals.values():
            total.zero_()

    def _collect(self, name: str, value: Tensor, hidden: Tensor, count: int) -> Tensor:
        scale = self._scales.get(name)
        if scale is None:
            scale = self._scale
        elif count != 1:
            value = value * count
        # Recompute runs the layer a second time, in the backward pass. Count the value once, but attach the gradient in
        # both passes: only one of them has a backward of its own.
        if not in_backward():
            if name not in self.totals:
                self.totals[name] = torch.zeros_like(self._scale)
            # Detached: a total over a step must not keep the graphs of all its passes.
            self.totals[name].add_(value.detach())
        attached: Tensor = apply(_Attach, hidden, value, scale)
        return attached


class KeptSideLosses(SideLosses):
    """Keeps the losses with their gradients, for code that adds them to its own loss.

    Attributes:
        values: the sum of each loss, by name.
    """

    keeps = True

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def _collect(self, name: str, value: Tensor, hidden: Tensor, count: int) -> Tensor:
        # Recompute runs the layer again, and its value counts once.
        if not in_backward():
            self.values[name] = self.values[name] + value if name in self.values else value
        return hidden


class ZeroSideLosses(SideLosses):
    """Passes losses on to ``losses``, multiplied by zero: gradients exist, and are zero."""

    def __init__(self, losses: SideLosses) -> None:
        self.losses = losses

    def _collect(self, name: str, value: Tensor, hidden: Tensor, count: int) -> Tensor:
        # Times zero, so that the same graph runs backward.
        return self.losses._collect(name, value * 0, hidden, count)


class _Attach(torch.autograd.Function):
    """Returns ``hidden``. Its backward gives ``value`` the gradient ``scale``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.dtype = value.dtype
        # A view: autograd needs a new tensor to which it can attach this function.
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        # The objective is loss + scale * value, so d objective / d value is `scale`, whatever arrives at `hidden`.
        return gradient, scale.to(ctx.dtype), None


_LOST = SideLosses()
# not thread-local: autograd runs recomputed layers in its own threads
_collectors: list[SideLosses] = []

SideLossesT = TypeVar("SideLossesT", bound=SideLosses)


@contextmanager
def collecting(losses: SideLossesT) -> Iterator[SideLossesT]:
    """Send the side losses of all forward passes in this context to ``losses``."""
    _collectors.append(losses)
    try:
        yield losses
    finally:
        _collectors.pop()


def current() -> SideLosses:
    """Return the collector that is active now."""
    return _collectors[-1] if _collectors else _LOST


@cache
def _tell_lost(name: str) -> None:
    log.warning("the side loss %r has no effect: call the layers inside megalight.nn.side_losses.collecting", name)
