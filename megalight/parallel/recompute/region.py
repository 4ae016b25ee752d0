"""Regions that keep their inputs and run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from megalight.ops.linear.inputs import recipe_of
from megalight.parallel.recompute.override import Override


class Region(Override):
    """Keeps the inputs of a module and runs it again."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.draws = Draws([module])

    def recomputed(self, *args: Any, **kwargs: Any) -> Any:
        """The output; only the inputs are kept."""
        return run_region(self.plain, self.draws(), args, kwargs)


def run_region(function: Callable[..., Any], draws: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)``, of which the inputs are kept and the rest is made again."""
    call = _Call(function, args)
    kept = [tensor for part, arg in zip(call.parts, args, strict=True) for tensor in part.kept(arg)]
    return checkpoint(call, *kept, use_reentrant=False, preserve_rng_state=draws, **kwargs)


class _Call:
    """A call that runs with its own arguments first, and later with arguments put together from kept tensors.

    A dict of tensors is kept entry by entry (the function may change it), a tensor with a recipe as its ingredients.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.parts = [_Part(arg) for arg in args]
        # A view has no recipe: inside the region the tensor itself is read, which the second run makes once for all.
        self.args: Sequence[Any] | None = [arg if recipe_of(arg) is None else arg.view_as(arg) for arg in args]

    def __call__(self, *kept: Any, **kwargs: Any) -> Any:
        args, self.args = self.args, None
        if args is None:
            rest = iter(kept)
            args = [part.put_together([next(rest) for _ in range(part.count)]) for part in self.parts]
        return self.function(*args, **kwargs)


class _Part:
    """One argument of a region. Holds no tensor."""

    def __init__(self, arg: Any) -> None:
        recipe = recipe_of(arg)
        self.keys = list(arg) if isinstance(arg, dict) else None
        self.make = None if recipe is None else recipe.read()
        self.needs_grad = recipe is not None and arg.requires_grad
        self.count = len(arg) if self.keys is not None else 1 if recipe is None else len(recipe.ingredients)

    def kept(self, arg: Any) -> tuple[Any, ...]:
        """What of ``arg`` is kept."""
        recipe = recipe_of(arg)
        return tuple(arg.values()) if self.keys is not None else (arg,) if recipe is None else recipe.ingredients

    def put_together(self, kept: list[Any]) -> Any:
        """The argument again."""
        if self.keys is not None:
            return dict(zip(self.keys, kept, strict=True))
        if self.make is not None:
            return self.make(*kept).requires_grad_(self.needs_grad)
        return kept[0]


class Draws:
    """Whether modules draw random numbers, so that generators must be put back for the second run.

    Modules of this package and of torch say so in ``p`` or ``dropout``; of others it is assumed.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        parts = [part for module in modules for part in module.modules()]
        self.always = any(
            isinstance(part, nn.RReLU) or type(part).__module__.partition(".")[0] not in ("megalight", "torch")
            for part in parts
        )
        self.droppers = [part for part in parts if isinstance(_probability(part), float | int)]

    def __call__(self) -> bool:
        """Whether they do now."""
        return self.always or any(_probability(part) for part in self.droppers)


def _probability(module: nn.Module) -> Any:
    return getattr(module, "p", getattr(module, "dropout", None))
