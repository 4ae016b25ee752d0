"""Consecutive layers as one recompute region."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from torch import nn

from megalight.errors import ConfigurationError
from megalight.parallel.recompute.override import Override
from megalight.parallel.recompute.region import Draws, run_region
from megalight.parallel.recompute.selection import Layer


def make_group(layers: list[Layer]) -> None:
    """Make consecutive layers one recompute region."""
    group = Group(Draws([layer for _, layer in layers]))
    for name, layer in layers:
        gathering = getattr(layer, "gathering", None)  # a hook of the data-parallel engine, which may run twice
        allowed = set() if gathering is None else {gathering.id}
        if {*layer._forward_hooks, *layer._forward_pre_hooks} - allowed:
            raise ConfigurationError(
                f"{name} has forward hooks, which recompute of groups of layers would call twice; choose "
                "recompute.num_layers=1."
            )
        group.members.append(Member(name, layer, group, len(group.members)))


@dataclass(eq=False)
class Group:
    """Consecutive layers that all run when the first one is called; the others return their input.

    So the model's own loop over layers stays as it is. The loop must not change anything between two layers, nor pass
    other arguments to another layer; both raise an error.

    Attributes:
        draws: tells whether the layers draw random numbers.
        members: the layers.
        running: the threads in which the members run their own layers now. A forward of one micro-batch may have
            stopped halfway while the group runs again for another one (:mod:`megalight.parallel.turns`).
        expected: the arguments with which the other members must be called now: the first call's result and its other
            arguments.
    """

    draws: Draws
    members: list[Member] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    expected: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def run(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Run all layers."""
        # Threads, because passes of two micro-batches take turns in threads of their own.
        self.running.add(get_ident())
        try:
            hidden = self.members[0].plain(hidden, *args, **kwargs)
            for member in self.members[1:]:
                # By the module, not by its own forward: its hooks gather its parameters.
                hidden = member.module(hidden, *args, **kwargs)
            return hidden
        finally:
            self.running.discard(get_ident())


class Member(Override):
    """One layer of a group."""

    def __init__(self, name: str, module: nn.Module, group: Group, place: int) -> None:
        super().__init__(name, module)
        self.group = group
        self.place = place

    def recomputed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the whole group in the first member; return the input in the others."""
        group = self.group
        if get_ident() in group.running:
            return self.plain(*args, **kwargs)
        if self.place == 0:
            result = run_region(group.run, group.draws(), args, kwargs)
            # The other members check that they get just this output: a model that does something between its layers
            # would otherwise skip it unnoticed.
            group.expected = (result, *args[1:]), kwargs
            return result
        if group.expected is None or not _same(args, kwargs, *group.expected):
            raise ConfigurationError(
                f"{self.name} is recomputed together with the layer before it. So it must get the output of that layer "
                "as its first argument, and the same other arguments; here it does not. Choose recompute.num_layers=1."
            )
        if self.place == len(group.members) - 1:
            # Kept no longer: it would hold the hidden states until the next pass.
            group.expected = None
        return args[0]


def _same(args: tuple[Any, ...], kwargs: dict[str, Any], args_: tuple[Any, ...], kwargs_: dict[str, Any]) -> bool:
    """Whether two calls got identical objects."""
    if len(args) != len(args_) or kwargs.keys() != kwargs_.keys():
        return False
    # Identity is cheaper than equality, and the loop has no reason to make copies.
    return all(map(operator.is_, args, args_)) and all(kwargs[key] is kwargs_[key] for key in kwargs)
