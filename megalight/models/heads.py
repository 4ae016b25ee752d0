"""The rule for heads of attention. This file imports no torch, so that commands can check them early."""

from __future__ import annotations

from megalight.errors import ConfigurationError

OR_HEAD_DIM = ", or give head_dim"
"""What else helps where heads may have any size."""


def check_heads(hidden_size: int, num_heads: int, remedy: str = "") -> None:
    """Check that heads share the hidden features evenly.

    Args:
        hidden_size: features of a token.
        num_heads: heads of attention, at least 1.
        remedy: what else a user can do.

    Raises:
        ConfigurationError: they do not.
    """
    if hidden_size % num_heads:
        raise ConfigurationError(
            f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}; change one of them{remedy}."
        )
