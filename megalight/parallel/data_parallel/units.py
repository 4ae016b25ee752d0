"""Units: modules whose parameters or gradients are whole only while they compute.

A unit is a module (a layer, usually) with the parameters that it alone holds, or several such modules that share one.
Units never overlap in time: in the forward pass, a unit begins when its module is called. In the backward pass, it
begins when the gradient of its output is there, and ends when another unit begins or the passes end. Autograd runs all
operations of a unit before, because these came later in the forward pass.

Forward::

    gather unit i + 1 (and further ones, if they have memory)  |  compute unit i

Backward::

    gather unit i - 1  |  compute unit i  |  reduce unit i + 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megalight.imports import in_backward
from megalight.parallel.data_parallel.buffers import FlatParameters
from megalight.parallel.data_parallel.residency import Residency
from megalight.parallel.data_parallel.unit_gradients import UnitGradients

HOOKS = "unit_hooks"
"""Attribute of a unit's module with its hooks, so that a later engine can remove them."""


class Units:
    """Makes the contents of units come and go as their modules run.

    Args:
        modules: those of each unit, in the order of the forward pass. The further modules of units with several (an
            embedding, and the head that shares its weight) come after all others.
        buckets: the sharded parameters, frozen ones too; they know their unit by ``layout.kind.unit``.
        turns: number of units whose whole parameters have memory at a time.

    Attributes:
        buckets: the sharded parameters.
        residency: their parameters; None: these are always whole.
        gradients: their gradients; None after training.
        sync: waits for the parameters outside of units, which may be on their way; the engine sets it.
    """

    def __init__(
        self,
        modules: Sequence[Sequence[nn.Module]],
        buckets: Sequence[FlatParameters],
        gradients: UnitGradients,
        device: torch.device,
        turns: int,
    ) -> None:
        # Further modules of a unit (a tied head) run after all first ones.
        later = [(module, unit) for unit, parts in enumerate(modules) for module in parts[1:]]
        self._order = [(parts[0], unit) for unit, parts in enumerate(modules)] + later
        self.buckets = list(buckets)
        self.gradients: UnitGradients | None = gradients
        self.residency: Residency | None = None
        self.sync: Callable[[], None] = _nothing
        if self.buckets:
            own = [[b for b in self.buckets if b.layout.kind.unit == unit] for unit in range(len(modules))]
            self.residency = Residency(own, device, turns)
        for place, (module, _) in enumerate(self._order):
            remove_hooks(module)
            # Hooks know the place in the forward pass, not the unit: a unit
            # with two modules has two neighbours.
            module.__dict__[HOOKS] = [
                module.register_forward_pre_hook(self._before_forward(place)),
                module.register_forward_hook(self._after_forward(place)),
            ]

    def begin_forward(self, place: int) -> None:
        """Make the parameters of a unit available, and start to gather those of the next one.

        Args:
            place: place of its module in the forward pass.
        """
        unit = self._order[place][1]
        if self.gradients is not None:
            self.gradients.close(unless=unit)  # a unit that is recomputed goes on with its backward pass
        if self.residency is None:
            return
        self.residency.hold(unit)
        if in_backward():
            return  # recompute inside a backward pass, which goes the other way
        ahead = self._order[place + 1 :]
        if not torch.is_grad_enabled():  # no backward pass follows, but perhaps the next forward pass
            ahead = ahead + self._order[:place]
        self._prefetch(unit, ahead)

    def begin_backward(self, place: int) -> None:
        """Make parameters and memory for gradients of a unit available, and start to gather the previous unit."""
        unit = self._order[place][1]
        if self.gradients is not None:
            self.gradients.open(unit)
        if self.residency is not None:
            # The parameters are needed again, and another unit has used their buffers since the forward pass.
            self.residency.hold(unit)
            self._prefetch(unit, self._order[:place][::-1])

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Give all parameters memory of their own inside, with their values.

        What every rank writes there equally is kept. If there are wider masters, ``engine.refresh_masters()`` must
        follow inside, or the next step undoes it.
        """
        self.sync()
        if self.residency is None or self.residency.whole:
            yield
            return
        self.residency.gather_all()
        try:
            yield
        finally:
            self.residency.release()

    def expire(self) -> None:
        """Gather parameters again before they are used: values were written to the shards."""
        if self.residency is not None:
            self.residency.expire()

    def end_training(self) -> None:
        """Forget the engine, whose parameters are all here, and its gradients."""
        self.gradients, self.sync = None, _nothing

    def unshard(self) -> None:
        """Give all parameters memory of their own, with their values, for good."""
        for module, _ in self._order:
            remove_hooks(module)
        if self.residency is not None:
            self.residency.write_back()
            self.residency.gather_all()
        self.buckets, self.residency = [], None

    def _prefetch(self, unit: int, ahead: Sequence[tuple[nn.Module, int]]) -> None:
        """Start to gather the units that come after this one, as many as have memory beside it."""
        assert self.residency is not None
        turns = self.residency.turns
        taken = {unit % turns}
        for _, following in ahead[: turns - 1]:
            if following % turns in taken:
                return  # it would take the memory of a unit that is needed before
            taken.add(following % turns)
            self.residency.fetch(following)

    def _before_forward(self, place: int) -> Any:
        def begin(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.begin_forward(place)

        return begin

    def _after_forward(self, place: int) -> Any:
        def begin_backward(gradient: Tensor) -> None:
            self.begin_backward(place)

        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            for tensor in [output] if isinstance(output, Tensor) else tree_leaves(output):
                # A tensor that is passed through is also the output of the unit
                # before. Its gradient begins that one.
                if isinstance(tensor, Tensor) and tensor.requires_grad and not any(tensor is x for x in inputs):
                    tensor.register_hook(begin_backward)  # type: ignore[no-untyped-call]

        return after


def _nothing() -> None:
    """Wait for nothing: without an engine there are only the parameters of units."""


def remove_hooks(module: nn.Module) -> None:
    """Remove the hooks of an earlier engine."""
    hooks: list[RemovableHandle] = module.__dict__.pop(HOOKS, [])
    for hook in hooks:
        hook.remove()
