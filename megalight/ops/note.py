"""Notes on an activation, or on its gradient: facts beside its values.

A note belongs to a tensor object. Views of it, and tensors from saved-tensor hooks, have no note.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from megalight.ops.linear.inputs import Recipe
    from megalight.ops.unwritten import Unwritten


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
        unwritten: casts it without its values, which were never written.
    """

    recipe: Recipe | None = None
    casts: Casts | None = None
    magnitudes: Magnitudes | None = None
    unwritten: Unwritten | None = None


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
