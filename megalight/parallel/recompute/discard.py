"""Outputs that are not kept: the linear layer that reads one keeps how to make it again.

Running a norm again in the usual way saves nothing, while the next layer keeps what it gave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.ops.linear.inputs import Recipe, attach_recipe
from megalight.parallel.recompute.override import Override


class Discarding(Override):
    """Hands out its output with the recipe to make it again. The first call shows whether anybody reads the recipe.

    Attributes:
        unread: the first call's recipe was not read; None before that call.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.unread: bool | None = None

    def recomputed(self, x: Tensor, residual: Tensor | None = None, *, pair: bool = False, **kwargs: Any) -> Any:
        """The output, with its recipe. A norm's pair has what is kept anyhow as its second: the recipe begins there."""
        if self.unread:
            raise ConfigurationError(
                f"recompute of {self.name} ({type(self.module).__name__}) saves nothing: no linear layer of Megalight "
                "reads its output directly, so the output is kept all the same. Leave it out of recompute.modules, or "
                "name a module that contains it."
            )
        pair = pair or residual is not None
        y, kept = self.plain(x, residual, pair=True, **kwargs) if pair else (self.plain(x, **kwargs), x)
        if self.unread is None:
            self.unread = True
        y = attach_recipe(y, Recipe(_again(self.plain, x.device.type, kwargs), (kept,), self._was_read))
        return (y, kept) if pair else y

    def _was_read(self) -> None:
        self.unread = False


def _again(function: Callable[..., Tensor], device: str, kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """``function`` under the autocast that holds now."""
    enabled = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device)

    def again(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype, enabled):
            return function(x, **kwargs)

    return again if enabled else lambda x: function(x, **kwargs)
