"""Auxiliary losses of single layers: a router's balance loss, a penalty on activations.

A layer attaches a loss to the hidden states that pass through it::

    hidden = context.aux_losses.attach("balance", value, hidden)

A training step collects these losses: it runs the forward passes inside :func:`collecting`. Without it, as in
evaluation, hidden states pass unchanged.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.imports import in_backward
from megalight.nn.init import ConstantInit, Initializer, Normal
from megalight.ops.autograd import apply, once_differentiable
from megalight.types import Opaque, PackedSequences

log = logging.getLogger(__name__)


class AuxLosses(Opaque):
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
                this name (``aux_loss_counts``), the objective gets the mean over all of them, whatever their number
                in each micro-batch.

        Raises:
            ConfigurationError: ``value`` is not 0-dim.
        """
        if value.dim():
            raise ConfigurationError(
                f"the auxiliary loss {name!r} has the shape {list(value.shape)}; give it as a scalar."
            )
        return self._collect(name, value, hidden, count) if torch.is_grad_enabled() else hidden

    def _collect(self, name: str, value: Tensor, hidden: Tensor, count: int) -> Tensor:
        if value.requires_grad and not in_backward():
            _warn_lost(name)
        return hidden


class AttachedAuxLosses(AuxLosses):
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


class KeptAuxLosses(AuxLosses):
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


class ZeroAuxLosses(AuxLosses):
    """Passes losses on to ``losses``, multiplied by zero: gradients exist, and are zero."""

    def __init__(self, losses: AuxLosses) -> None:
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


_LOST = AuxLosses()
# not thread-local: autograd runs recomputed layers in its own threads
_collectors: list[AuxLosses] = []

AuxLossesT = TypeVar("AuxLossesT", bound=AuxLosses)


@contextmanager
def collecting(losses: AuxLossesT) -> Iterator[AuxLossesT]:
    """Send the auxiliary losses of all forward passes in this context to ``losses``."""
    _collectors.append(losses)
    try:
        yield losses
    finally:
        _collectors.pop()


def current() -> AuxLosses:
    """Return the collector that is active now."""
    return _collectors[-1] if _collectors else _LOST


@cache
def _warn_lost(name: str) -> None:
    log.warning("the auxiliary loss %r has no effect: call the layers inside megalight.nn.aux_losses.collecting", name)


class Pool:
    """All tokens of a micro-batch are on this device. It can be replaced.

    The loss of a pool is a mean over its tokens. With its tokens on several devices, each device has one term, and the
    loss is the mean of the terms.
    """

    place = 0
    """The number of this device among those with different tokens."""

    @property
    def whole(self) -> bool:
        """Whether all tokens of a micro-batch are on this device."""
        return True

    def bounds(self, sequences: PackedSequences) -> Tensor:
        """``[n + 1]``: the start of each sequence among this device's tokens, and the end of the last."""
        return sequences.cu_seqlens

    def mask(self, sequences: PackedSequences) -> Tensor | None:
        """``[T]`` bool: False for this device's padding. None: it has none."""
        return sequences.token_mask

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of ``value`` over the devices that hold tokens of the micro-batch. It has no gradient."""
        return value.detach()

    def mean_of_replicas(self, value: Tensor) -> Tensor:
        """Return the mean of ``value`` over all devices with different tokens, of all replicas. It has no gradient."""
        return value.detach()


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
        self.initializers: dict[str, Initializer] = {"projection": Normal(std), "bias": ConstantInit(0.0)}
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


class Counting(nn.Module, ABC):
    """A module with counts.

    Attributes:
        counts: ``[n]`` float64, what this device has counted in the step so far. None: nothing is counted.
    """

    counts: Tensor | None = None

    @abstractmethod
    def end_step(self, totals: Tensor | None) -> None:
        """End a step. ``totals [n]``: the counts of the whole step, from all devices; None: nothing was counted."""

    def count(self, values: Tensor) -> None:
        """Add ``values [n]`` to the counts."""
        if self.counts is None or self.counts.device != values.device:
            self.counts = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
        # In place, and in float64: counts of a long step stay exact.
        self.counts.add_(values)


@torch.no_grad()
def end_step(model: nn.Module, total: Callable[[Tensor], Tensor]) -> None:
    """End a training step: give each module the totals of its counts, and start counting from 0.

    Args:
        model: its modules with counts, in order, are the same on every device.
        total: sums counts over all devices.
    """
    modules = [module for module in model.modules() if isinstance(module, Counting)]
    counts = [module.counts for module in modules if module.counts is not None]
    # One collective for all layers together.
    totals = iter(torch.split(total(torch.cat(counts)), [len(own) for own in counts]) if counts else ())
    for module in modules:
        module.end_step(None if module.counts is None else next(totals))
    # In place, because a recorded pass adds to this address.
    for own in counts:
        own.zero_()
