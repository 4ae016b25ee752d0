"""The mode of modules during generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set all modules to evaluation mode (no dropout), and restore the mode of each module afterwards."""
    # Module by module, as some may be in evaluation mode while others train.
    # Past `Module.__setattr__`, which looks for parameters: a large model has hundreds of modules, in every step.
    training = [vars(module) for module in model.modules() if module.training]
    for attributes in training:
        attributes["training"] = False
    try:
        yield
    finally:
        for attributes in training:
            attributes["training"] = True
