"""Dropout of activations, left out where it drops nothing."""

from __future__ import annotations

from torch import Tensor, nn


def drop(dropout: nn.Module, x: Tensor) -> Tensor:
    """Return ``dropout(x)``, or ``x`` itself if ``dropout`` is torch's own and its probability is 0.

    A layer has two of them, nearly always with 0, and a call that does nothing costs the host as much as a small op.
    The probability is read at each call, so that it may be changed. Subclasses, and modules with hooks, are called.
    """
    if (
        dropout.__class__ is nn.Dropout
        and dropout.p == 0.0
        and not (dropout._forward_hooks or dropout._forward_pre_hooks)
        and not (dropout._backward_hooks or dropout._backward_pre_hooks)
    ):
        return x
    out: Tensor = dropout(x)
    return out
