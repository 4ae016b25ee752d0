"""Which keys a query sees, as a table: what attention and block attention in plain torch share."""

from __future__ import annotations

import torch
from torch import Tensor


def mask(length: int, keys: int, causal: bool, window: int | None, device: torch.device | str = "cpu") -> Tensor | None:
    """``[length, keys]``: True where a query sees a key. Queries are the last ``length`` positions of the keys.

    Returns None if every query sees every key.
    """
    if not causal and window is None:
        return None
    # Bottom-right: with keys in a cache, the first query is not at position 0.
    distance = torch.arange(keys - length, keys, device=device)[:, None] - torch.arange(keys, device=device)
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        allowed &= distance >= 0
    if window is not None:
        allowed &= distance <= window
    return allowed
