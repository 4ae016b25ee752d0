"""The merge in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Write ``out`` and ``lse``, which may be the tensors of block a or b."""
    merged = torch.logaddexp(lse_a, lse_b)
    # A query that saw no key in either block gives -inf - (-inf) = NaN; its weights are 0.
    weights = ((part - merged).exp().nan_to_num(0).mT[..., None] for part in (lse_a, lse_b))
    # Both terms exist before `out` is written, because `out` may be one of the parts.
    terms = [weight * part.to(weight.dtype) for weight, part in zip(weights, (out_a, out_b), strict=True)]
    out.copy_(terms[0] + terms[1])
    lse.copy_(merged)
