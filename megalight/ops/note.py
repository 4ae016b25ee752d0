"""Annotations of an activation, or of its gradient: recompute recipe, casts, largest magnitudes, elided output.

A note belongs to a tensor object. Views of it, and tensors from saved-tensor hooks, have no note.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megalight.ops.linear.inputs import RecomputeRecipe
    from megalight.ops.quantize import Cast, Scheme


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


# Elided outputs: the kernel that would write a tensor writes its quantized values instead.
#
# A GEMM in 8 bits reads quantized values. If it is the only reader of a tensor, and the scale is known beforehand, the
# op that computes the tensor need not write it. The op returns a tensor without values, and a function that computes
# and casts them.


QuantizedCasts: TypeAlias = "tuple[Cast, Tensor]"
"""Casts of a tensor and of its transpose, and magnitudes (float32) of which the largest is the tensor's."""
ElidedOutput: TypeAlias = "Callable[[Scheme | None, Scheme | None, Tensor], QuantizedCasts]"
"""``(scheme, scheme of the transpose, magnitude that scales must cover)`` -> casts, and the magnitudes met."""


def elided_output(shape: tuple[int, ...], like: Tensor, cast: ElidedOutput) -> Tensor:
    """Return a tensor of this shape, with the dtype and device of ``like``, of which only casts exist."""
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
