"""Masks and soft caps as functions that cuDNN compiles into its kernels.

A soft cap is a function of the scores, and cuDNN's own masks cannot follow one. So the masks are built here, in the
form in which its library knows them and skips the blocks that they hide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Any, Any], Any]
"""A graph of cuDNN and a tensor in it to the tensor that follows."""


CONSTANTS = ("cap", "inverse", "hidden", "reach")
"""Names of the numbers in these functions. They are tensors of one element on the host, given at every run."""


def constants_of(softcap: float, window: int | None) -> dict[str, Tensor]:
    """Return the values of ``CONSTANTS``."""
    values = (softcap, 1 / softcap, float("-inf"), float(0 if window is None else window + 1))
    return {name: torch.tensor([value]) for name, value in zip(CONSTANTS, values, strict=True)}


def capped(
    cudnn: Any,
    constants: Mapping[str, Any],
    causal: bool,
    window: int | None,
    lengths: tuple[Any, Any] | None,
) -> tuple[Function, Function]:
    """Return ``cap * tanh(score / cap)`` under a mask, and its derivative times a gradient.

    Args:
        cudnn: the package.
        constants: tensors of the graph for ``CONSTANTS``.
        causal: whether a query sees no later key.
        window: number of earlier keys that a query sees besides its own. None: all.
        lengths: tensors of the graph with the number of queries and of keys of each sequence. None: all are full.
    """
    kinds = cudnn.data_type
    cap, inverse, hidden, reach = (constants[name] for name in CONSTANTS)
    kept: dict[str, Any] = {}

    def places(inner: Any, scores: Any, axis: int) -> Any:
        return inner.gen_index(input=scores, axis=axis).set_data_type(kinds.INT32)

    def compared(compare: Any, left: Any, right: Any) -> Any:
        return compare(input=left, comparison=right, compute_data_type=kinds.BOOLEAN).set_data_type(kinds.BOOLEAN)

    def seen(inner: Any, scores: Any, mask: Any) -> Any:
        return inner.binary_select(input0=scores, input1=hidden, mask=mask)

    def forward(inner: Any, scores: Any) -> Any:
        kept["scores"] = inner.mul(a=scores, b=inverse)
        scores = inner.mul(a=inner.tanh(input=kept["scores"]), b=cap)
        if lengths is not None:
            rows, columns = (
                compared(inner.cmp_lt, places(inner, scores, axis), length)
                for axis, length in zip((2, 3), lengths, strict=True)
            )
            both = inner.logical_and(a=rows, b=columns, compute_data_type=kinds.BOOLEAN)
            scores = seen(inner, scores, both.set_data_type(kinds.BOOLEAN))
        if causal:
            scores = seen(inner, scores, compared(inner.cmp_ge, places(inner, scores, 2), places(inner, scores, 3)))
        if window is not None:
            ahead = inner.add(a=places(inner, scores, 3), b=reach, compute_data_type=kinds.FLOAT)
            ahead.set_data_type(kinds.FLOAT)
            scores = seen(inner, scores, compared(inner.cmp_gt, ahead, places(inner, scores, 2)))
        return scores

    def backward(inner: Any, grad: Any) -> Any:
        # The cap cancels: the derivative of cap * tanh(score / cap) is that of tanh.
        return inner.tanh_backward(loss=grad, input=kept["scores"])

    return forward, backward
