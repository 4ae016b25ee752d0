"""Products with the weight of a vocabulary: logits forward, and the gradients of hidden states and weight backward.

Vocabularies often have an odd number of rows (GPT-2: 50,257). The libraries then take kernels for unaligned matrices,
which are up to eight times slower, although rows of the logits start at aligned addresses. So on a GPU the rows beyond
the last multiple of :data:`ALIGNED` have a small product of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megalight.ops.common import wide
from megalight.ops.linear import weight_gradient
from megalight.ops.parameter import main_grad_of, put, state_of

ALIGNED = 64
"""Rows of the vocabulary that fast kernels take a multiple of: 128 bytes of logits in half precision."""


def blocks(rows: int) -> list[slice]:
    """Divide rows of the vocabulary into an aligned block and the rest. An empty one is left out."""
    even = rows - rows % ALIGNED
    return [slice(start, end) for start, end in ((0, even), (even, rows)) if start < end]


def _blocks_on(device: torch.device, rows: int) -> list[slice]:
    return blocks(rows) if device.type == "cuda" else [slice(0, rows)]


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits ``[T, V]`` of ``hidden [T, h]`` and ``weight [V, h]``.

    On a GPU, rows start at multiples of 128 bytes. Not so on a CPU: bf16 products with AMX read the padding between
    rows, and a NaN there damages the result (torch 2.13).
    """
    size = weight.shape[0]
    aligned = -(-size // ALIGNED) * ALIGNED if hidden.is_cuda else size
    out = torch.empty(hidden.shape[0], aligned, dtype=hidden.dtype, device=hidden.device)[:, :size]
    weight = weight.to(hidden.dtype)
    bias = None if bias is None else bias.to(hidden.dtype)
    for rows in _blocks_on(hidden.device, size):
        if bias is None:
            torch.mm(hidden, weight[rows].T, out=out[:, rows])
        else:
            torch.addmm(bias[rows], hidden, weight[rows].T, out=out[:, rows])
    return out


def propagate(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needed: Sequence[bool],
    slopes: Iterable[tuple[slice, Tensor]],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden states, weight and bias, or add the last two to their main gradients.

    Args:
        needed: which of the three need a gradient.
        slopes: the tokens of each chunk, and the gradient of its logits ``[chunk, V]``, made when it is asked for.
    """
    need_hidden, need_weight, need_bias = needed
    grad_hidden = torch.empty_like(hidden) if need_hidden else None
    grad_weight, main = _gradient_buffer(weight, need_weight)
    grad_bias, main_bias = _gradient_buffer(bias, need_bias)
    for part, logits in slopes:
        rows = _blocks_on(logits.device, logits.shape[1])
        if grad_hidden is not None:
            _times_weight(logits, weight.to(logits.dtype), rows, grad_hidden[part])
        if main is not None:
            spec = weight_gradient.WeightGradientSpec(logits.device.type, logits.dtype, main.dtype)
            # `touch()` is True for the first write of a step only: the first chunk overwrites, later chunks add.
            first = state_of(weight).touch()
            for block in rows:
                weight_gradient.choose(spec)(main[block], logits[:, block], hidden[part], first)
        if bias is not None and main_bias is not None:
            put(main_bias, logits.sum(0, dtype=main_bias.dtype), state_of(bias).touch())
    for parameter, target, own in ((weight, main, grad_weight), (bias, main_bias, grad_bias)):
        if parameter is not None and target is not None and own is None:
            state = state_of(parameter)
            if state.touch():  # no chunk wrote it: there were no tokens
                target.zero_()
            # Once per call, after the last chunk: the data-parallel engine may start to reduce the bucket at once.
            state.mark_grad_ready()
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


def _times_weight(logits: Tensor, weight: Tensor, rows: Sequence[slice], out: Tensor) -> None:
    # The small block comes first: the sum is rounded to half precision between the two.
    for add, block in enumerate(reversed(rows)):
        torch.addmm(out, logits[:, block], weight[block], beta=1 if add else 0, out=out)


def _gradient_buffer(parameter: Tensor | None, needed: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return ``(own, target)``: a new buffer to return (None if there is a main gradient), and the buffer to add to."""
    if parameter is None or not needed:
        return None, None
    main = main_grad_of(parameter)
    if main is not None:
        return None, main
    # Chunks are added up in float32, and rounded to the parameter's dtype once, at the end.
    own = torch.zeros_like(parameter, dtype=wide(parameter.dtype))
    return own, own
