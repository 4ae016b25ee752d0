"""Activation recompute: regions keep their inputs and run again in the backward pass; outputs may be discarded."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalight.attachments import GATHER_HOOK
from megalight.errors import ConfigurationError
from megalight.ops.batch_invariant import MODE, batch_invariant_mode
from megalight.ops.note import RecomputeRecipe, attach_recipe, recipe_of
from megalight.parallel.interleaved_passes import uninterrupted
from megalight.parallel.layers import Override, is_a
from megalight.parallel.recompute.options import Layer


class RecomputeRegion(Override):
    """Keeps the inputs of a module, and runs the module again in the backward pass."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.draws = Draws([module])

    def recomputed(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output, and keep only the inputs."""
        return run_region(self.plain, self.draws(), *_without_caches(args, kwargs))


CACHE = "transformers.cache_utils.Cache"


def _without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave out caches of ``transformers``, which it fills in training, too: a second run would fill them twice."""
    return (
        tuple(None if is_a(arg, CACHE) else arg for arg in args),
        {name: None if is_a(arg, CACHE) else arg for name, arg in kwargs.items()},
    )


def run_region(function: Callable[..., Any], draws: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``function(*args, **kwargs)`` under ``torch.utils.checkpoint``, which keeps the inputs only."""
    call = _RecomputedCall(function, args, draws)
    # Kept tensors are arguments of `checkpoint`, as it saves what it is called with; the
    # real arguments bypass it.
    kept = [tensor for part, arg in zip(call.parts, args, strict=True) for tensor in part.kept(arg)]
    # The non-reentrant form allows keyword arguments, and inputs that need no gradients.
    return checkpoint(call, *kept, use_reentrant=False, preserve_rng_state=draws, **kwargs)


class _RecomputedCall:
    """A call that first runs with its own arguments, and later with arguments rebuilt from kept tensors.

    A dict of tensors is kept entry by entry, because the function may change the dict. A tensor with a recipe is kept
    as the recipe's ingredients.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], draws: bool) -> None:
        self.function = function
        self.draws = draws
        # The backward runs in other threads, and both runs must save the same tensors.
        self.invariant = MODE.on
        self.parts = [_Argument(arg) for arg in args]
        # A view has no recipe. So linear layers inside the region save the tensor itself, which is rebuilt only once.
        self.args: Sequence[Any] | None = [arg if recipe_of(arg) is None else arg.view_as(arg) for arg in args]

    def __call__(self, *kept: Any, **kwargs: Any) -> Any:
        if self.invariant != MODE.on:
            with batch_invariant_mode(self.invariant):
                return self(*kept, **kwargs)
        # The first run has the real arguments. They are dropped, because only the kept tensors may stay in memory.
        args, self.args = self.args, None
        if args is None:
            rest = iter(kept)
            args = [part.put_together([next(rest) for _ in range(part.count)]) for part in self.parts]
            # The second run takes its arguments from what autograd has saved.
            if self.draws:  # torch has set the generators back, which another pass would read, too
                with uninterrupted():
                    return self.function(*args, **kwargs)
        return self.function(*args, **kwargs)


class _Argument:
    """Describes one argument of a region; it holds no tensor."""

    def __init__(self, arg: Any) -> None:
        recipe = recipe_of(arg)
        self.keys = list(arg) if isinstance(arg, dict) else None
        self.make = None if recipe is None else recipe.read()
        self.needs_grad = recipe is not None and arg.requires_grad
        self.count = len(arg) if self.keys is not None else 1 if recipe is None else len(recipe.ingredients)

    def kept(self, arg: Any) -> tuple[Any, ...]:
        """Return the tensors to keep for ``arg``."""
        recipe = recipe_of(arg)
        return tuple(arg.values()) if self.keys is not None else (arg,) if recipe is None else recipe.ingredients

    def put_together(self, kept: list[Any]) -> Any:
        """Rebuild the argument from the kept tensors."""
        if self.keys is not None:
            return dict(zip(self.keys, kept, strict=True))
        if self.make is not None:
            # It is a leaf. It needs a gradient if the first one did: both runs must save the same tensors.
            return self.make(*kept).requires_grad_(self.needs_grad)
        return kept[0]


class Draws:
    """Tells whether modules draw random numbers, so that generators must be reset for the second run.

    Modules of this package and of torch show it by ``p`` or ``dropout``. Other modules are assumed to draw.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        parts = [part for module in modules for part in module.modules()]
        # RReLU draws although it has no probability.
        self.always = any(
            # Code of others may draw anywhere.
            isinstance(part, nn.RReLU) or type(part).__module__.partition(".")[0] not in ("megalight", "torch")
            for part in parts
        )
        self.droppers = [part for part in parts if isinstance(_probability(part), float | int)]

    def __call__(self) -> bool:
        """Whether the modules draw random numbers now."""
        # Read at each call: a scheduler or a user may change the probability.
        return self.always or any(_probability(part) for part in self.droppers)


def _probability(module: nn.Module) -> Any:
    return getattr(module, "p", getattr(module, "dropout", None))


class Discarding(Override):
    """Returns the output together with a recipe for it. The first call shows whether a linear layer reads the recipe.

    Ordinary recompute of a norm would save nothing, because the next layer keeps the norm's output.

    Attributes:
        unread: the first call's recipe was not read; None before that call.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.unread: bool | None = None

    def recomputed(self, x: Tensor, residual: Tensor | None = None, *, pair: bool = False, **kwargs: Any) -> Any:
        """Return the output with its recipe. A norm's second output is kept anyway, so its recipe starts there."""
        # Told in the second call: readers come after this module, so the first call cannot know.
        if self.unread:
            raise ConfigurationError(
                f"recompute of {self.name} ({type(self.module).__name__}) saves nothing: no linear layer of Megalight "
                "reads its output directly, so the output is kept all the same. Leave it out of recompute.modules, or "
                "name a module that contains it."
            )
        pair = pair or residual is not None
        # With a residual, the norm returns the sum too, which the residual stream keeps alive anyway: the recipe starts
        # from it, so that `x` and `residual` may be freed.
        y, kept = self.plain(x, residual, pair=True, **kwargs) if pair else (self.plain(x, **kwargs), x)
        # A linear layer that reads the recipe, in this first pass, sets it back to False.
        if self.unread is None:
            self.unread = True
        y = attach_recipe(y, RecomputeRecipe(_again(self.plain, x.device.type, kwargs), (kept,), self._was_read))
        return (y, kept) if pair else y

    def _was_read(self) -> None:
        self.unread = False


def _again(function: Callable[..., Tensor], device: str, kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Bind ``function`` to the current autocast state."""
    # The backward runs outside autocast, and the output must come out in the same dtype.
    enabled = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device)

    def again(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype, enabled):
            return function(x, **kwargs)

    # Without autocast there is nothing to set, and the context manager would cost every call.
    return again if enabled else lambda x: function(x, **kwargs)


def make_group(layers: list[Layer]) -> None:
    """Make consecutive layers one recompute region."""
    group = Group(Draws([layer for _, layer in layers]))
    for name, layer in layers:
        gathering = GATHER_HOOK.get(layer)  # a hook of the data-parallel engine, which may run twice
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
            stopped halfway while the group runs again for another one (:mod:`megalight.parallel.interleaved_passes`).
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
            result = run_region(group.run, group.draws(), *_without_caches(args, kwargs))
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
