"""Attention with roles for warps, on Hopper, for heads of 128 features.

The other kernels of :mod:`megalight.ops.attention.triton` leave it to the compiler how loads, products and exponentials
overlap.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from megalight.imports import version
from megalight.ops.common import HALF, cuda_why_not, lazy, num_sms
from megalight.types import PackedSequences

VERSIONS = ("3.6",)
"""Versions of Triton whose Gluon the kernels are written for: it is experimental, and changes."""

DEVICES = ("cuda",)
"""Types of devices that may have these kernels. Callers look here first: asking costs the host a call per layer."""

LEAST = 320
"""Keys that a query sees on average below which the smaller blocks of plain Triton serve. On an H200, ours took 0.98
to 1.06 of their time forward and backward from 65 to 256 keys, where launches cost the host more, and 0.82 to 0.95
from 320 to 1024."""

LONGER = 480
"""The same beside cuDNN, whose launches cost less. Kernels were 1.07 to 1.12 times as fast from 128 to 384 keys, 1.08
at 512, and 1.16 at 1024 and 4096."""

UNEVEN = 1.75
"""How many times more work than the mean of undivided programs the fullest SM may have in the backward
pass, beside cuDNN. On an H200, with groups of 4, forward and backward took 0.76 of cuDNN's time for one sequence of
4096 tokens and 4 key heads (1.09 times the mean), 0.92 for 1024 tokens and 8 (1.72), and undivided 1.08 for 2048 and 8
(1.96)."""

KEYS = 128
"""Keys of a program of the backward pass."""

run_forward = lazy("megalight.ops.attention.hopper.forward", "run")
run_backward = lazy("megalight.ops.attention.hopper.backward", "run")
_plan = lazy("megalight.ops.attention.hopper.programs", "plan")


@lru_cache
def _available(device: torch.device) -> bool:
    """Return whether the GPU has Hopper's products, and Triton the Gluon that the kernels are written in."""
    release = (version("triton") or "").split(".")
    if ".".join(release[:2]) not in VERSIONS or cuda_why_not(device.type) is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=64)
def seen(lengths: tuple[int, ...], keys: tuple[int, ...], causal: bool, window: int | None) -> float:
    """Return how many keys a query sees on average."""
    pairs = 0
    for length, count in zip(lengths, keys, strict=True):
        # Queries are the last tokens of their keys' sequence; those before its first key see nothing, if causal.
        rows = min(length, count)
        most = count if window is None else min(count, window + 1)
        rising = min(rows, max(0, most - 1 - (count - rows)))
        pairs += rising * (count - rows + 1) + rising * (rising - 1) // 2 + (rows - rising) * most
        if not causal:
            pairs += rows * (rows - 1) // 2 + (length - rows) * count
    return pairs / max(1, sum(lengths))


def fills(
    sequences: PackedSequences, causal: bool, window: int | None, key_heads: int, group: int, processors: int
) -> bool:
    """Return whether the programs of the backward pass keep all SMs busy.

    There is one for each block and key head, or several where these are few. With a causal mask, the first keys of a
    sequence are seen by all of its queries, and the last by few.

    Args:
        sequences: how tokens divide into sequences.
        causal: whether a query sees no later key.
        window: number of earlier tokens that a query sees besides itself.
        key_heads: number of heads of keys.
        group: heads of queries of a head of keys.
        processors: number of SMs.
    """
    lengths, keys = sequences.lengths, (sequences.keys or sequences).lengths
    found: float = _plan(lengths, keys, causal, window, key_heads, group, processors).fullest
    return found <= UNEVEN


def serves(
    q: Tensor, v: Tensor, sequences: PackedSequences, causal: bool, window: int | None, least: int = LEAST
) -> bool:
    """Return whether these kernels serve the heads, and are the faster ones for the sequences."""
    if not (
        q.device.type in DEVICES and q.shape[-1] == v.shape[-1] == 128 and q.dtype in HALF and _available(q.device)
    ):
        return False
    keys = sequences.keys or sequences
    return seen(sequences.lengths, keys.lengths, causal, window) >= least


def serves_backward(
    q: Tensor, v: Tensor, sequences: PackedSequences, causal: bool, window: int | None, least: int = LEAST
) -> bool:
    """Return whether they also serve the backward pass, which adds gradients of queries in any order."""
    return not torch.are_deterministic_algorithms_enabled() and serves(q, v, sequences, causal, window, least)


def beats_cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    causal: bool,
    window: int | None,
    least: int = LONGER,
) -> bool:
    """Return whether these kernels serve both passes, and are faster than cuDNN's for the lengths and heads.

    Args:
        q: ``[..., H, D]``.
        k: ``[..., Hkv, D]``.
        v: ``[..., Hkv, Dv]``.
        sequences: how tokens divide into sequences.
        causal: whether a query sees no later key.
        window: number of earlier tokens that a query sees besides itself.
        least: keys that a query sees on average from which they are faster.
    """
    # torch's compiler knows cuDNN's operator, and not these kernels.
    if torch.compiler.is_dynamo_compiling():
        return False
    heads, key_heads = q.shape[-2], k.shape[-2]
    return serves_backward(q, v, sequences, causal, window, least) and fills(
        sequences, causal, window, key_heads, heads // key_heads, num_sms(q.device)
    )
