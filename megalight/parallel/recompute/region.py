"""Recompute regions: modules that keep their inputs and run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from megalight.ops.linear.inputs import recipe_of
from megalight.parallel.recompute.override import Override
from megalight.parallel.turns import uninterrupted


class Region(Override):
    """Keeps the inputs of a module, and runs the module again in the backward pass."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.draws = Draws([module])

    def recomputed(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output, and keep only the inputs."""
        return run_region(self.plain, self.draws(), args, kwargs)


def run_region(function: Callable[..., Any], draws: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``function(*args, **kwargs)`` under ``torch.utils.checkpoint``, which keeps the inputs only."""
    call = _Call(function, args, draws)
    # Kept tensors are arguments of `checkpoint`, as it saves what it is called with; the
    # real arguments bypass it.
    kept = [tensor for part, arg in zip(call.parts, args, strict=True) for tensor in part.kept(arg)]
    # The non-reentrant form allows keyword arguments, and inputs that need no gradients.
    return checkpoint(call, *kept, use_reentrant=False, preserve_rng_state=draws, **kwargs)


class _Call:
    """A call that first runs with its own arguments, and later with arguments rebuilt from kept tensors.

    A dict of tensors is kept entry by entry, because the function may change the dict. A tensor with a recipe is kept
    as the recipe's ingredients.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], draws: bool) -> None:
        self.function = function
        self.draws = draws
        self.parts = [_Part(arg) for arg in args]
        # A view has no recipe. So linear layers inside the region save the tensor itself, which is rebuilt only once.
        self.args: Sequence[Any] | None = [arg if recipe_of(arg) is None else arg.view_as(arg) for arg in args]

    def __call__(self, *kept: Any, **kwargs: Any) -> Any:
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


class _Part:
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
