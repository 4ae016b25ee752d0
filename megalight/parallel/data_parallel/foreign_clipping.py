"""Refuse torch's functions that clip gradients, where each rank has only some of them, and sums are not complete."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from megalight.errors import ConfigurationError

# `clip_grad_norm_` calls the second one, also where a script has imported it by name before.
NAMES = ("clip_grad_norm_", "_clip_grads_with_norm_", "clip_grads_with_norm_", "clip_grad_value_")

_refused: dict[str, WeakValueDictionary[int, nn.Parameter]] = {}
"""Parameters by the reason, which says what to do instead."""


def refuse_clipping(parameters: Iterable[nn.Parameter], reason: str) -> None:
    """Let ``torch.nn.utils.clip_grad_norm_`` and its like raise for these parameters, as long as they live.

    Args:
        reason: what the error says after the name of the function.
    """
    _refused.setdefault(reason, WeakValueDictionary()).update({id(parameter): parameter for parameter in parameters})
    for name in NAMES:
        function = getattr(clip_grad, name, None)
        # Once per process, for all models.
        if function is None or hasattr(function, "refuses"):
            continue
        guarded = _guarded(name, function)
        for owner in (clip_grad, nn.utils):
            if getattr(owner, name, None) is function:
                setattr(owner, name, guarded)


def permit_clipping(parameters: Iterable[nn.Parameter], reason: str) -> None:
    """Take back what :func:`refuse_clipping` did to these parameters. Others stay as they are."""
    refused = _refused.get(reason, WeakValueDictionary())
    for parameter in parameters:
        refused.pop(id(parameter), None)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for reason, refused in _refused.items():
            if any(refused.get(id(parameter)) is parameter for parameter in found):
                raise ConfigurationError(f"torch.nn.utils.{name.removeprefix('_')} {reason}")
        return function(found, *args, **kwargs)

    clip.refuses = True  # type: ignore[attr-defined]
    return clip
