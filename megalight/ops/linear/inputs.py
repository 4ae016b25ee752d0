"""What a linear layer keeps of its input for the weight gradient: the input itself, or how to make it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megalight.ops.note import Note, annotate
from megalight.ops.quantize import Quantized


@dataclass(eq=False)
class Recipe:
    """How to make a tensor again from tensors that are kept anyhow.

    Attributes:
        function: gives the tensor; draws no random numbers.
        ingredients: what it is called with.
        on_read: called when somebody keeps the recipe instead of the tensor.
    """

    function: Callable[..., Tensor]
    ingredients: tuple[Tensor, ...]
    on_read: Callable[[], None]

    def read(self) -> Callable[..., Tensor]:
        """What makes the tensor, without a graph, from the ingredients. Does not hold them."""
        self.on_read()
        return torch.no_grad()(self.function)


def attach_recipe(x: Tensor, recipe: Recipe) -> Tensor:
    """``x``, of which a linear layer that takes this very object will keep the recipe."""
    annotate(x).recipe = recipe
    return x


def recipe_of(x: object) -> Recipe | None:
    """The recipe that ``x`` carries."""
    note: Note | None = getattr(x, "megalight_note", None)  # as note_of, for a call less: every linear layer asks
    return None if note is None else note.recipe


def save_input(ctx: Any, x: Tensor, needed: bool) -> None:
    """In the forward of an autograd function: keep ``x``, or its recipe's ingredients, where ``needed``."""
    recipe = recipe_of(x)
    ctx.make_input = None if recipe is None else recipe.read()
    if needed:
        ctx.save_for_backward(*((x,) if recipe is None else recipe.ingredients))


class Saveable(Protocol):
    """An input that is cast: the tensors to save, and what makes the cast input of them again."""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Autograd keeps these."""
        ...

    @property
    def restore(self) -> Callable[..., Any]:
        """Takes them; does not hold them."""
        ...


def save_cast(ctx: Any, x_t: Saveable) -> None:
    """In place of :func:`save_input`: keep an input as the weight gradient of a low precision takes it."""
    ctx.make_input = x_t.restore
    ctx.save_for_backward(*x_t.tensors)


def saved_input(ctx: Any) -> Tensor | Quantized:
    """In the backward: the input that :func:`save_input` or :func:`save_cast` kept."""
    saved = ctx.saved_tensors
    x: Tensor | Quantized = saved[0] if ctx.make_input is None else ctx.make_input(*saved)
    return x
