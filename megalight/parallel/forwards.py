"""Replacing the forward of module instances, which must not hide one that somebody else has set there."""

from __future__ import annotations

from collections.abc import Iterable

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
