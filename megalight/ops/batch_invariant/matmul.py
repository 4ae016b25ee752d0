"""Products of rows with a weight, or of groups of rows with weights of their own, in batch-invariant mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.ops.batch_invariant import MODE, rowwise
from megalight.ops.common import lazy

kernel_product = lazy("megalight.ops.batch_invariant.triton", "product")


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., in] x [out, in] + [out] -> [..., out]``; there is no gradient on a GPU.

    Raises:
        ConfigurationError: autocast is on, or the dtype has no kernel.
    """
    if torch.is_autocast_enabled(x.device.type):
        raise ConfigurationError("batch-invariant mode has no autocast; keep the model in the dtype of its products.")
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor
    if x.device.type == "cpu":
        y = rowwise(lambda row: F.linear(row, weight, bias), rows)
    else:
        y = kernel_product(rows, weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Group ``e``, rows ``offsets[e - 1]`` to ``offsets[e]`` of ``x [R, in]``, times ``weight[e] [out, in]``.

    Rows after the last group get any values.
    """
    y: Tensor
    if x.device.type != "cpu":
        y = kernel_product(x, weight, None, offsets)
        return y
    y = x.new_zeros(len(x), weight.shape[1])
    start = 0
    for own, end in zip(weight, offsets.tolist(), strict=True):
        y[start:end] = product(x[start:end], own)
        start = end
    return y


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """``[T, H, in] x [H, out, in] -> [T, H, out]``: each head has a weight of its own. In any mode."""
    if not MODE.on:
        return torch.einsum("thi,hoi->tho", x, weight)
    if x.device.type == "cpu":
        found: Tensor = rowwise(lambda row: torch.einsum("thi,hoi->tho", row, weight), x)
        return found
    tokens, heads, size = x.shape
    offsets = torch.arange(1, heads + 1, dtype=torch.int32, device=x.device) * tokens
    y: Tensor = kernel_product(x.transpose(0, 1).reshape(-1, size), weight, None, offsets)
    return y.view(heads, tokens, -1).transpose(0, 1)
