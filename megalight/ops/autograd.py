"""Autograd functions of ops: how they are called, what they save, and the notes that they leave for each other.

A note belongs to a tensor object, an activation or its gradient: recompute recipe, casts, largest magnitudes, elided
output. Views of it, and tensors from saved-tensor hooks, have no note.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd import function

from megalight.ops.quantize.formats import Cast, Scheme

BackwardT = TypeVar("BackwardT", bound=Callable[..., Any])


def once_differentiable(backward: BackwardT) -> BackwardT:
    """``torch.autograd.function.once_differentiable``, applied only if gradients of gradients are wanted.

    Otherwise autograd runs ``backward`` with gradients disabled anyway, and the wrapper's own context costs
    microseconds.
    """
    checked = function.once_differentiable(backward)

    @wraps(backward)
    def called(ctx: Any, *grads: Any) -> Any:
        # Gradients are enabled in a backward pass only under `create_graph=True`.
        return checked(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return called  # type: ignore[return-value]


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` with less overhead, for functions that every layer calls several times.

    torch checks all arguments for leftovers of ``torch.func`` transforms, even if no transform is active.
    """
    if torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    # This skips the Python `Function.apply`, and calls the C++ one behind it.
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


class Casts(NamedTuple):
    """Both casts of a gradient, for the two products of the backward pass.

    Attributes:
        owner: the precision that made them.
        rows: for the input gradient.
        columns: for the weight gradient.
    """

    owner: object
    rows: Any
    columns: Any


class Magnitudes(NamedTuple):
    """The largest magnitudes of a tensor, recorded by the op that made it.

    Attributes:
        version: version of the tensor; the magnitudes hold until it is modified in place.
        parts: float32; the largest of them is the tensor's.
    """

    version: int
    parts: Tensor


@dataclass(slots=True, eq=False)
class Note:
    """Facts about one tensor.

    Attributes:
        recipe: how to compute it again from tensors that are kept anyway.
        casts: casts of a gradient.
        magnitudes: its largest magnitudes.
        elided: casts it without its values, which were never written.
    """

    recipe: RecomputeRecipe | None = None
    casts: Casts | None = None
    magnitudes: Magnitudes | None = None
    elided: ElidedOutput | None = None


def note_of(x: object) -> Note | None:
    """Return the note on a tensor, or None; other objects have none."""
    note: Note | None = getattr(x, "megalight_note", None)
    return note


def annotate(x: Tensor) -> Note:
    """Return the note on a tensor; create one if there is none."""
    # `note_of`, inlined: kernels call this for every output.
    note: Note | None = getattr(x, "megalight_note", None)
    if note is None:
        note = x.megalight_note = Note()  # type: ignore[attr-defined]
    return note


QuantizedCasts: TypeAlias = tuple[Cast, Tensor]
"""Casts of a tensor and of its transpose, and magnitudes (float32) of which the largest is the tensor's."""
ElidedOutput: TypeAlias = Callable[[Scheme | None, Scheme | None, Tensor], QuantizedCasts]
"""``(scheme, scheme of the transpose, magnitude that scales must cover)`` -> casts, and the magnitudes met."""


def elided_output(shape: tuple[int, ...], like: Tensor, cast: ElidedOutput) -> Tensor:
    """Return a tensor of this shape, with the dtype and device of ``like``, of which only casts exist.

    A GEMM in 8 bits reads quantized values. If it is the only reader of a tensor, and the scale is known
    beforehand, the op that computes the tensor need not write it. The op returns a tensor without values, and a
    function that computes and casts them.
    """
    out = without_values(shape, like)
    annotate(out).elided = cast
    return out


def without_values(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a tensor of this shape, with the dtype and device of ``like``, without memory for its values.

    It has a single element in memory, NaN, for all of them: what reads it all the same is easily seen.
    """
    nothing = _nothing(like.dtype, like.device)
    # Not a view: autograd treats views that a function returns in a way of its own.
    return nothing.new_empty(0).set_(nothing.untyped_storage(), 0, shape, (0,) * len(shape))


def elided_output_of(x: Tensor) -> ElidedOutput | None:
    """Return the function that casts ``x``, or None if ``x`` has values."""
    note: Note | None = getattr(x, "megalight_note", None)  # `note_of`, inlined
    return None if note is None else note.elided


@lru_cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1,), torch.nan, dtype=dtype, device=device)


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
