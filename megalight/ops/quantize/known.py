"""Largest magnitudes that whoever made a tensor has found on the way, so that no cast need look for them."""

from __future__ import annotations

from torch import Tensor

from megalight.ops.note import Magnitudes, annotate, note_of
from megalight.ops.quantize.reference import amax_of


def tell_amax(x: Tensor, parts: Tensor) -> Tensor:
    """``x``, of which the largest magnitude is the largest of ``parts`` (float32). Not a number may be left out.

    Under ``torch.inference_mode`` nothing is told: who writes to a tensor is not noted there.
    """
    if not x.is_inference():
        annotate(x).magnitudes = Magnitudes(x._version, parts)
    return x


def known_amax(x: Tensor) -> Tensor:
    """The largest magnitude of ``x``, 0-dim float32: as it was told, or found in a pass of its own.

    What was told counts for this very object, and until somebody writes to it: autograd may add gradients up in place.
    """
    parts = told_amax(x)
    return amax_of(x) if parts is None or not len(parts) else parts.amax()


def told_amax(x: Tensor) -> Tensor | None:
    """What :func:`tell_amax` was told of ``x``, if it still holds."""
    note = note_of(x)
    if note is None or note.magnitudes is None or note.magnitudes.version != x._version:
        return None
    return note.magnitudes.parts


def rows_of(x: Tensor) -> Tensor:
    """``x [..., f] -> [T, f]``, of which is known what was known of ``x``."""
    flat = x.reshape(-1, x.shape[-1])
    if (parts := told_amax(x)) is not None:
        tell_amax(flat, parts)
    return flat
