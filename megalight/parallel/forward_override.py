"""Overrides of the forward of module instances, which must not hide one that somebody else has set there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megalight.errors import ConfigurationError


def check_own_forwards(modules: Iterable[tuple[str, nn.Module]], hider: str) -> None:
    """Check that named modules run the forward of their class, before any of them gets another one.

    Args:
        modules: names and modules.
        hider: what is about to replace the forwards, for the message.

    Raises:
        ConfigurationError: the forward of a module was set on the instance.
    """
    for name, module in modules:
        if "forward" in module.__dict__:
            raise ConfigurationError(
                f"{name} ({type(module).__name__}) has a forward that was set on the instance, which {hider} would "
                "hide. Define it in the class, or leave this module out."
            )


class Override(ABC):
    """Replaces the ``forward`` of one module instance; it may be copied together with the module."""

    def __init__(self, name: str, module: nn.Module) -> None:
        check_own_forwards([(name, module)], "recompute")
        self.name = name
        self.module = module
        # An object instead of a closure: it can be recognized and removed, and is copied with its module.
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, with recompute in training mode if gradients are enabled."""
        # Without a backward there is nothing to save, and in evaluation nobody expects a second run.
        if torch.is_grad_enabled() and self.module.training:
            return self.recomputed(*args, **kwargs)
        return self.plain(*args, **kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        # From the class: the instance's `forward` is this object. So hooks, which `Module.__call__` runs, run once.
        return type(self.module).forward(self.module, *args, **kwargs)

    @abstractmethod
    def recomputed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, and keep only what is needed to run it again."""
