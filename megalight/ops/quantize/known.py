"""Largest magnitudes of tensors that the kernels which made them have found, so that casts need not search for them."""

from __future__ import annotations

from torch import Tensor

from megalight.ops.note import Magnitudes, Note, annotate
from megalight.ops.quantize.reference import amax_of


def tell_amax(x: Tensor, parts: Tensor) -> Tensor:
    """Note that the largest magnitude of ``x`` is the largest of ``parts`` (float32), and return ``x``.

    ``parts`` may ignore NaN. Under ``torch.inference_mode`` nothing is noted, because tensors have no version there and
    later writes would not be seen.
    """
    if not x.is_inference():
        annotate(x).magnitudes = Magnitudes(x._version, parts)
    return x


def known_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of ``x``, 0-dim float32: the noted one if it is valid, otherwise computed now.

    A note is valid for this tensor object until the tensor is written: autograd may add gradients in place.
    """
    if (parts := told_amax(x)) is None:
        return amax_of(x)
    # No parts: the kernel had no rows to work on, and max() of nothing raises.
    return parts.amax() if parts.shape[0] else parts.new_zeros(())


def magnitudes_of(x: Tensor) -> Tensor:
    """Return magnitudes, float32, of which the largest is that of ``x``: the noted ones, or those that a pass finds."""
    if (parts := told_amax(x)) is not None:
        return parts
    return amax_of(x)


def told_amax(x: Tensor) -> Tensor | None:
    """Return the ``parts`` noted for ``x``, or None if there are none or ``x`` was written since."""
    note: Note | None = getattr(x, "megalight_note", None)  # `note_of`, inlined
    if note is None or note.magnitudes is None or note.magnitudes.version != x._version:
        return None
    return note.magnitudes.parts


def rows_of(x: Tensor) -> Tensor:
    """Flatten ``x [..., f]`` to ``[T, f]`` and keep its noted magnitudes."""
    if x.dim() == 2:
        return x
    flat = x.reshape(-1, x.shape[-1])
    if (parts := told_amax(x)) is not None:
        tell_amax(flat, parts)
    return flat
