"""Work beside the current CUDA stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from megalight.ops.linear.inputs import recipe_of
from megalight.ops.note import note_of


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def beside(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """Start ``function(x)`` on a stream of its own; the returned function lets the current stream wait for the result.

    Autograd runs the backward of each op on the stream of its forward, so the backward is beside the rest, too. On the
    CPU the work is done at once.
    """
    if not x.is_cuda:
        result = function(x)
        return lambda: result
    # Where x is a leaf (the input of a recomputed region), its gradient is summed on the stream of its first use, and
    # torch warns of gradients that come from another. The view's backward takes them over to the current stream.
    seen = x.view_as(x)
    if (note := note_of(x)) is not None:
        seen.megalight_note = note  # type: ignore[attr-defined]
    side = _stream(x.device)
    # The input is made on the current stream.
    side.wait_stream(torch.cuda.current_stream(x.device))
    # The backward reads these on the side stream, and may be the last to do so: their memory must not be reused before.
    recipe = recipe_of(x)
    for tensor in (x, *(recipe.ingredients if recipe is not None else ())):
        tensor.record_stream(side)
    with torch.cuda.stream(side):
        result = function(seen)

    def finish() -> Tensor:
        current = torch.cuda.current_stream(x.device)
        # The result is read on the current stream, and its memory belongs to the other one.
        current.wait_stream(side)
        result.record_stream(current)
        return result

    return finish
