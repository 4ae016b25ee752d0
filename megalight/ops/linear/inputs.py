"""The input that a linear layer keeps for its weight gradient: the tensor itself, or a recipe to compute it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megalight.ops.note import Note, annotate


@dataclass(eq=False)
class RecomputeRecipe:
    """How to compute a tensor again from tensors that are kept anyway.

    Attributes:
        function: returns the tensor; it must not draw random numbers.
        ingredients: its arguments.
        on_read: called when a layer keeps the recipe instead of the tensor.
    """

    function: Callable[..., Tensor]
    ingredients: tuple[Tensor, ...]
    on_read: Callable[[], None]

    def read(self) -> Callable[..., Tensor]:
        """Return the function that computes the tensor from the ingredients, without a graph. It does not hold them."""
        self.on_read()
        # `on_read` says to the producer that nothing needs the tensor itself: it may then free it.
        return torch.no_grad()(self.function)


def attach_recipe(x: Tensor, recipe: RecomputeRecipe) -> Tensor:
    """Return ``x`` with a recipe. A linear layer that gets this very object keeps the recipe instead."""
    annotate(x).recipe = recipe
    return x


def recipe_of(x: object) -> RecomputeRecipe | None:
    """Return the recipe of ``x``, or None."""
    note: Note | None = getattr(x, "megalight_note", None)  # inlined note_of: every linear layer calls this
    return None if note is None else note.recipe


def save_input(ctx: Any, x: Tensor, needed: bool) -> None:
    """In the forward of an autograd function: keep ``x``, or its recipe's ingredients, if ``needed``."""
    note: Note | None = getattr(x, "megalight_note", None)
    recipe = None if note is None else note.recipe
    # `save_for_backward` rather than attributes of ctx: autograd then frees the tensors after the backward, and saved-
    # tensor hooks (offload) see them.
    ctx.make_input = None if recipe is None else recipe.read()
    if needed:
        ctx.save_for_backward(*((x,) if recipe is None else recipe.ingredients))


class Saveable(Protocol):
    """An input that is cast: the tensors to save, and a function that restores the cast input from them."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that autograd saves."""
        ...

    @property
    def restore(self) -> Callable[..., Any]:
        """The function that restores the input from these tensors. It does not hold them."""
        ...


def save_cast(ctx: Any, x_t: Saveable) -> None:
    """Save an input in the form that a low-precision weight gradient uses, instead of :func:`save_input`."""
    ctx.make_input = x_t.restore
    ctx.save_for_backward(*x_t.tensors)


def saved_input(ctx: Any) -> Any:
    """In the backward: return the input that :func:`save_input` has kept, or what :func:`save_cast` has."""
    saved = ctx.saved_tensors
    return saved[0] if ctx.make_input is None else ctx.make_input(*saved)
