"""Pickles, which torch's Distributed Checkpoint uses: the only file that may touch them."""

from __future__ import annotations

import pickle
from typing import Any


def dumps(value: Any) -> bytes:
    """Return a pickle for torch to read."""
    return pickle.dumps(value)
