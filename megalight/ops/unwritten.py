"""Tensors that are cast without being written: the kernel that would make one writes its codes instead.

A product in 8 bits reads codes. If it is the only reader of a tensor, and the scale is known beforehand, the op that
computes the tensor need not write it. The op returns a tensor without values, and a function that computes and casts
them. That function reads the inputs of the op, and writes codes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from megalight.ops.note import Note, annotate

if TYPE_CHECKING:
    from megalight.ops.quantize import Cast, Scheme

Told: TypeAlias = "tuple[Cast, Tensor]"
"""Casts of a tensor and of its transpose, and magnitudes (float32) of which the largest is the tensor's."""
Unwritten: TypeAlias = "Callable[[Scheme | None, Scheme | None, Tensor], Told]"
"""``(scheme, scheme of the transpose, magnitude that scales must cover)`` -> casts, and the magnitudes met."""


def unwritten(shape: tuple[int, ...], like: Tensor, cast: Unwritten) -> Tensor:
    """Return a tensor of this shape, with the dtype and device of ``like``, of which only casts exist."""
    out = without_values(shape, like)
    annotate(out).unwritten = cast
    return out


def without_values(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a tensor of this shape, with the dtype and device of ``like``, without memory for its values.

    It has a single element in memory, NaN, for all of them: what reads it all the same is easily seen.
    """
    nothing = _nothing(like.dtype, like.device)
    # Not a view: autograd treats views that a function returns in a way of its own.
    return nothing.new_empty(0).set_(nothing.untyped_storage(), 0, shape, (0,) * len(shape))


def unwritten_of(x: Tensor) -> Unwritten | None:
    """Return the function that casts ``x``, or None if ``x`` has values."""
    note: Note | None = getattr(x, "megalight_note", None)  # `note_of`, inlined
    return None if note is None else note.unwritten


@lru_cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1,), torch.nan, dtype=dtype, device=device)
