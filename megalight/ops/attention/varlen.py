"""Attention over packed sequences by torch's flash kernel, with windows and bottom-right causal masks.

We call the operator behind ``torch.nn.attention.varlen`` directly: the public function changed its arguments between
torch 2.10 and 2.13 and has no dropout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.types import PackedSequences


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Attention of all sequences in one kernel; causal masks align bottom-right."""
    keys = sequences.keys or sequences
    # the kernel has one size of heads: values of latent attention, which are narrower, get features of 0
    missing = q.shape[-1] - v.shape[-1]
    v = F.pad(v, (0, missing)) if missing else v
    plain = causal and window is None
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        sequences.cu_seqlens,
        keys.cu_seqlens,
        sequences.max_length,
        keys.max_length,
        dropout,
        plain,
        False,
        scale=scale,
        window_size_left=-1 if window is None else window,
        window_size_right=0 if causal else -1,
    )[0]
    return out[..., :-missing] if missing else out
