"""Parts of a model that are not trained."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import nn

from megalight.models.config import require


def freeze(model: nn.Module, patterns: Sequence[str], prefix: str = "model.") -> None:
    """Leave the parameters that patterns match without gradients.

    Args:
        model: the whole model.
        patterns: globs over names of parameters.
        prefix: what these names begin with.

    Raises:
        ConfigurationError: a pattern matches no parameter.
    """
    named = {prefix + name: parameter for name, parameter in model.named_parameters()}
    for pattern in patterns:
        found = fnmatch.filter(named, pattern)
        require(bool(found), f"freeze has {pattern!r}, which matches no parameter; they are {', '.join(named)}.")
        for name in found:
            # A tower without trained parameters then keeps nothing for the backward pass.
            named[name].requires_grad_(False)
