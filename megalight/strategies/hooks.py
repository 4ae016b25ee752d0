"""Find Lightning's hooks that the user's code defines."""

from __future__ import annotations

from functools import partial

import lightning.pytorch as pl

OURS = ("lightning", "megalight")


def is_ours(function: object) -> bool:
    """Return whether a function, method or callable object is part of Lightning or Megalight."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__module__", "")).partition(".")[0] in OURS


def defines(owner: pl.Callback | pl.LightningModule, hook: str) -> bool:
    """Return whether the user's code defines ``hook``, in the owner's class or on the object itself.

    Lightning's ``LambdaCallback`` sets its hooks on the object.
    """
    return not is_ours(getattr(owner, hook))
