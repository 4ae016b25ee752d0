"""What is known of an activation, or of a gradient of one, beside its values.

A note belongs to a tensor object: a view of it, or what saved-tensor hooks hand back, has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from megalight.ops.linear.inputs import Recipe


class Casts(NamedTuple):
    """Both casts of a gradient, which two products take.

    Attributes:
        owner: the precision that made them.
        rows: for the input gradient.
        columns: for the weight gradient.
    """

    owner: object
    rows: Any
    columns: Any


class Magnitudes(NamedTuple):
    """The largest magnitudes of a tensor, as its maker found them.

    Attributes:
        version: of the tensor; they hold until somebody writes to it.
        parts: float32, of which the largest counts.
    """

    version: int
    parts: Tensor


@dataclass(slots=True, eq=False)
class Note:
    """What is known of one tensor.

    Attributes:
        recipe: how to make it again from tensors that are kept anyhow.
        casts: of a gradient.
        magnitudes: its largest ones.
    """

    recipe: Recipe | None = None
    casts: Casts | None = None
    magnitudes: Magnitudes | None = None


def note_of(x: object) -> Note | None:
    """The note on a tensor, if there is one; other objects have none."""
    note: Note | None = getattr(x, "megalight_note", None)
    return note


def annotate(x: Tensor) -> Note:
    """The note on a tensor; a new one where there was none."""
    note: Note | None = getattr(x, "megalight_note", None)
    if note is None:
        note = x.megalight_note = Note()  # type: ignore[attr-defined]
    return note
