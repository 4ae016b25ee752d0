"""Parts of a model that are not trained."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from torch import nn

from megalight.errors import ConfigurationError, nearest_pattern


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
        if not found:
            # Layers are alike, and some models have thousands of names.
            kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in named)
            raise ConfigurationError(
                f"freeze has {pattern!r}, which matches no parameter.{nearest_pattern(pattern, named)} They are "
                f"{', '.join(kinds)}."
            )
        for name in found:
            # A tower without trained parameters then keeps nothing for the backward pass.
            named[name].requires_grad_(False)
