"""Shares of a batch for context parallelism, by the batch's own method."""

from __future__ import annotations

import inspect
from typing import Any

from megalight.errors import ConfigurationError


def share_of_batch(module: str, batch: Any, rank: int, size: int, multiple: int, ahead: int = 0) -> Any:
    """Return ``batch.context_share(rank, size, multiple)``.

    Args:
        module: the user's class, for the message.
        batch: a micro-batch.
        rank: which share.
        size: the number of shares.
        multiple: numbers of tokens are padded to a multiple of it.
        ahead: if it is not 0, the share also needs so many later tokens, and the method gets ``ahead``.

    Raises:
        ConfigurationError: the batch has no such method.
        DataError: its sequences are too short to be divided.
    """
    share, more = getattr(batch, "context_share", None), {"ahead": ahead} if ahead else {}
    if share is None or not _takes(share, (rank, size, multiple), more):
        needed = ", ".join(("rank", "size", "multiple", *more))
        raise ConfigurationError(
            f"a batch of type {type(batch).__name__} cannot be cut for context parallelism (cp={size}); give it a "
            f"context_share({needed}) method as megalight.types.TokenBatch has, or define "
            f"{module}.context_share(batch, rank, size)."
        )
    return share(rank, size, multiple, **more)


def _takes(method: Any, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
    try:
        inspect.signature(method).bind(*given, **named)
    except TypeError:
        return False
    return True
