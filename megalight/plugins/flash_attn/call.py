"""What the releases share: the same two functions, one for equally long sequences and one for packed ones."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention import Spec
from megalight.ops.common import HALF
from megalight.plugins.package import Package
from megalight.types import PackedSequences

DENSE, PACKED = "flash_attn_func", "flash_attn_varlen_func"
WIDEST = 256
ARGUMENTS = ("softmax_scale", "causal", "window_size", "softcap", "deterministic")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
"""Releases 3 and 4 have no reliable version numbers: their functions tell what they can do."""


def why_not(package: Package, module: str, spec: Spec, minimum: str | None = None) -> str | None:
    """Why no release can serve, or why this one is not here."""
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    if spec.head_dim != spec.value_dim or spec.head_dim % 8 or spec.head_dim > WIDEST:
        return (
            f"needs equal key and value heads of a multiple of 8 up to {WIDEST}, not {spec.head_dim}, {spec.value_dim}"
        )
    paths = (f"{module}:{DENSE}", f"{module}:{PACKED}")
    if (reason := package.why_not(spec.device, "attention", *paths, minimum=minimum)) is not None:
        return reason
    for path, wanted in zip(paths, (ARGUMENTS, (*ARGUMENTS, *LENGTHS)), strict=True):
        lacking = [name for name in wanted if name not in inspect.signature(package.load(path)).parameters]
        if lacking:
            return f"{path} takes no {', '.join(lacking)} in this release. Next: {package.how}"
    return None


def call(
    package: Package, module: str, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, options: dict[str, Any]
) -> Tensor:
    """Attention by one release; ``options`` are the arguments beside the tensors and the lengths.

    All releases align causal masks and windows bottom-right, and take fewer key heads than query heads.
    """
    keys = sequences.keys or sequences
    options = {"deterministic": torch.are_deterministic_algorithms_enabled(), **options}
    if sequences.uniform is not None and keys.uniform is not None:
        batch = sequences.uniform[0]
        q, k, v = (t.view(batch, -1, *t.shape[1:]) for t in (q, k, v))
        found = package.load(f"{module}:{DENSE}")(q, k, v, **options)
    else:
        found = package.load(f"{module}:{PACKED}")(
            q,
            k,
            v,
            cu_seqlens_q=sequences.cu_seqlens,
            cu_seqlens_k=keys.cu_seqlens,
            max_seqlen_q=sequences.max_length,
            max_seqlen_k=keys.max_length,
            **options,
        )
    out: Tensor = found[0] if isinstance(found, tuple) else found  # some releases return the log-sum-exp too
    return out.reshape(sequences.num_tokens, -1, v.shape[-1])
