"""Blocks of ring attention by flash-attn 4: its forward pass returns the log-sum-exp, its backward pass takes it.

The package has no public function for the backward pass alone, so both are the functions behind its own autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention_block import Spec
from megalight.ops.common import heads_why_not
from megalight.plugins.flash_attn.release import LENGTHS, WIDEST, lacks_arguments, lengths_of
from megalight.plugins.flash_attn.version_4 import PACKAGE, too_wide
from megalight.types import PackedSequences

MODULE = "flash_attn.cute.interface"
FORWARD, BACKWARD = f"{MODULE}:_flash_attn_fwd", f"{MODULE}:_flash_attn_bwd"
COMMON = ("softmax_scale", "causal", "window_size_left", "window_size_right")
ARGUMENTS = {FORWARD: (*COMMON, *LENGTHS, "return_lse"), BACKWARD: (*COMMON, *LENGTHS, "deterministic")}
"""Arguments that the functions must have: they are private, and may change in any release."""


def why_not(spec: Spec) -> str | None:
    """Return why it cannot serve a block, or None."""
    if (reason := heads_why_not(spec.dtype, spec.head_dim, spec.value_dim, WIDEST)) is not None:
        return reason
    if (reason := PACKAGE.why_not(spec.device, "attention of blocks", FORWARD, BACKWARD)) is not None:
        return reason
    return lacks_arguments(PACKAGE, ARGUMENTS) or too_wide(spec.head_dim)


def _options(
    sequences: PackedSequences | None, causal: bool, scale: float | None, window: int | None
) -> dict[str, Any]:
    options: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
    if window is not None:
        options |= {"window_size_left": window, "window_size_right": 0 if causal else None}
    if sequences is not None:
        options |= lengths_of(sequences)
    return options


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences | None,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a block. It aligns masks bottom-right, as the op does."""
    packed = sequences is not None
    tensors = [t[0] if packed else t for t in (q, k, v)]  # packed tensors are `[T, H, D]` for the package
    out, lse, *_ = PACKAGE.load(FORWARD)(*tensors, return_lse=True, **_options(sequences, causal, scale, window))
    return (out[None], lse[None]) if packed else (out, lse)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: PackedSequences | None,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block, from the merged ``out`` and ``lse``."""
    packed = sequences is not None
    # The package derives `exp(scores - lse)` from what it is given, so merged ones give this block's share.
    tensors = [t[0] if packed else t for t in (q, k, v, out, grad_out, lse)]
    options = _options(sequences, causal, scale, window)
    # Its sums of gradients of queries are atomic unless asked for an order.
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    grads = PACKAGE.load(BACKWARD)(*tensors, **options)[:3]
    grad_q, grad_k, grad_v = (t[None] for t in grads) if packed else grads
    return grad_q, grad_k, grad_v
