"""Discarded outputs: the linear layer that reads one keeps a recipe to compute it again.

Ordinary recompute of a norm would save nothing, because the next layer keeps the norm's output.
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
    """Returns the output together with a recipe for it. The first call shows whether a linear layer reads the recipe.

    Attributes:
        unread: the first call's recipe was not read; None before that call.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.unread: bool | None = None

    def recomputed(self, x: Tensor, residual: Tensor | None = None, *, pair: bool = False, **kwargs: Any) -> Any:
        """Return the output with its recipe. A norm's second output is kept anyway, so its recipe starts there."""
        # Told in the second call: readers come after this module, so the first call cannot know.
        if self.unread:
            raise ConfigurationError(
                f"recompute of {self.name} ({type(self.module).__name__}) saves nothing: no linear layer of Megalight "
                "reads its output directly, so the output is kept all the same. Leave it out of recompute.modules, or "
                "name a module that contains it."
            )
        pair = pair or residual is not None
        # With a residual, the norm returns the sum too, which the residual stream keeps alive anyway: the recipe starts
        # from it, so that `x` and `residual` may be freed.
        y, kept = self.plain(x, residual, pair=True, **kwargs) if pair else (self.plain(x, **kwargs), x)
        # A linear layer that reads the recipe, in this first pass, sets it back to False.
        if self.unread is None:
            self.unread = True
        y = attach_recipe(y, Recipe(_again(self.plain, x.device.type, kwargs), (kept,), self._was_read))
        return (y, kept) if pair else y

    def _was_read(self) -> None:
        self.unread = False


def _again(function: Callable[..., Tensor], device: str, kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Bind ``function`` to the current autocast state."""
    # The backward runs outside autocast, and the output must come out in the same dtype.
    enabled = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device)

    def again(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype, enabled):
            return function(x, **kwargs)

    # Without autocast there is nothing to set, and the context manager would cost every call.
    return again if enabled else lambda x: function(x, **kwargs)
