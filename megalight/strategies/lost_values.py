"""Tells of initial values that a module writes while its model has no memory: they are lost, as it is drawn later."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

log = logging.getLogger(__name__)

DRAWS = ("reset_parameters", "init_weights")
"""Parts of the names of methods that run again when the model is drawn."""

KEEPS_VALUES = ("requires_grad_", "share_memory_")
"""Methods whose names end as those that write."""


class _Writes(TorchFunctionMode):
    """Keeps, for each parameter that is written, whether the last write is made again when the model is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.again: dict[nn.Parameter, bool] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        written = args[0] if args else kwargs.get("tensor")  # functions of torch.nn.init name it
        writes = name.endswith("_") and not name.endswith("__") and name not in KEEPS_VALUES
        if writes and isinstance(written, nn.Parameter) and written.is_meta:
            self.again[written] = _in_draw()
        return func(*args, **kwargs)


def _in_draw() -> bool:
    """Return whether a method that runs again when the model is drawn has made this call."""
    frame = inspect.currentframe()
    while frame is not None:
        if any(part in frame.f_code.co_name for part in DRAWS):
            return True
        frame = frame.f_back
    return False


@contextmanager
def told(module: pl.LightningModule, tells: bool) -> Iterator[None]:
    """Build the model of ``module`` on the meta device inside; say which values it wrote in vain, if ``tells``."""
    with torch.device("meta"), _Writes() as writes:
        yield
    lost = [
        f"{path}.{name}"
        for path, owner in module.named_modules()
        # Others are drawn by a module around them, or refused.
        if hasattr(owner, "reset_parameters") or hasattr(owner, "initializers")
        for name, parameter in owner.named_parameters(recurse=False)
        if not writes.again.get(parameter, True)
    ]
    if lost and tells:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        log.warning(
            "%s wrote initial values to %s%s while its model had no memory. They are lost: it is divided first, and "
            "drawn by the modules' own reset_parameters. Write them there, in a subclass of the module that has them.",
            type(module).__name__,
            lost[0],
            more,
        )
