"""Replacing the forward of a module instance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from megalight.parallel.forwards import check_own_forwards


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
