"""Taking the place of a module's forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from megalight.errors import ConfigurationError


class Override(ABC):
    """Stands in for the ``forward`` of one module instance, and may be copied with it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        if "forward" in module.__dict__:
            raise ConfigurationError(
                f"{name} ({type(module).__name__}) has a forward that was set on the instance, which recompute would "
                "hide; apply recompute first, or leave this module out."
            )
        self.name = name
        self.module = module
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's forward."""
        if torch.is_grad_enabled() and self.module.training:
            return self.recomputed(*args, **kwargs)
        return self.plain(*args, **kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return type(self.module).forward(self.module, *args, **kwargs)

    @abstractmethod
    def recomputed(self, *args: Any, **kwargs: Any) -> Any:
        """The same, and little of it is kept."""
