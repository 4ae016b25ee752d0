"""Attention within chunks of a sequence (Llama 4): every chunk is a sequence of its own, so any backend can serve."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from megalight.types import PackedSequences, to_device


def chunked(sequences: PackedSequences, chunk: int) -> tuple[PackedSequences, Tensor | None]:
    """Cut sequences at multiples of ``chunk`` tokens.

    Queries with keys of their own are the last tokens of their sequence. Only keys in their chunks are left.

    Returns:
        the chunks as sequences, and the indices of the keys that are left. None: all of them.
    """
    if sequences.keys is None:
        if sequences.max_length <= chunk:
            return sequences, None
        return _cut(sequences.lengths, chunk, sequences.device), None
    return _with_keys(sequences.lengths, sequences.keys.lengths, chunk, sequences.device)


# Cached, as all layers of a pass ask for the same: lengths are on the host, and chunks would be copied to the device
# in each layer. Made in inference mode, the tensors could not be saved for backward.
@lru_cache(maxsize=64)
def _cut(lengths: tuple[int, ...], chunk: int, device: torch.device) -> PackedSequences:
    cut = [min(chunk, length - start) for length in lengths for start in range(0, length, chunk)]
    with torch.inference_mode(False):
        return PackedSequences.of_lengths(cut, device)


@lru_cache(maxsize=64)
def _with_keys(
    lengths: tuple[int, ...], keys: tuple[int, ...], chunk: int, device: torch.device
) -> tuple[PackedSequences, Tensor | None]:
    queries: list[int] = []
    left: list[int] = []
    starts: list[int] = []
    offset = 0
    for length, seen in zip(lengths, keys, strict=True):
        first = seen - length
        for start in range(first // chunk * chunk, seen, chunk):
            stop = min(start + chunk, seen)
            queries.append(stop - max(start, first))
            left.append(stop - start)
            starts.append(offset + start)
        offset += seen
    with torch.inference_mode(False):
        described = PackedSequences.of_lengths(left, device)
        rows = None
        if sum(left) < offset:
            rows = described.expand(to_device(starts, torch.int64, device)) + described.positions
        return replace(PackedSequences.of_lengths(queries, device), keys=described), rows
