"""How a dense block divides into sequences."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megalight.types import PackedSequences


def packed(q: Tensor, k: Tensor) -> PackedSequences:
    """Return the sequences of dense queries ``[B, S, H, D]`` and keys ``[B, Sk, Hkv, D]``."""
    queries = PackedSequences.of_uniform(q.shape[0], q.shape[1], q.device)
    return queries if q.shape[1] == k.shape[1] else replace(queries, keys=packed(k, k))
