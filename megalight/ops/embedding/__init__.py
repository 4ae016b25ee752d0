"""Rows of a table by their ids, with the gradient added to the rows of the table's main gradient, if it has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import apply, lazy, once_differentiable, serve_all, triton_why_not
from megalight.ops.embedding import reference
from megalight.ops.parameter import main_grad_of, state_of
from megalight.registry import Backend, BackendRegistry, remembered


class Spec(NamedTuple):
    """A request to a gradient: device type, dtype of the gradient of the rows, dtype of the main gradient."""

    device: str
    dtype: torch.dtype
    main_dtype: torch.dtype


AddRows: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], None]
"""``(main_grad [rows, h], ids [T], grad [T, h], write)``. Ids that are not below ``rows`` name no row."""
EMBEDDING_GRADIENT: BackendRegistry[Spec, AddRows] = BackendRegistry("embedding_gradient")
REGISTRIES = (EMBEDDING_GRADIENT,)
EXAMPLE = Spec("cpu", torch.bfloat16, torch.float32)


def _triton_why_not(spec: Spec) -> str | None:
    return triton_why_not(spec.device, spec.dtype, spec.main_dtype)


EMBEDDING_GRADIENT.register(Backend("triton", lazy("megalight.ops.embedding.triton", "add_rows"), 10, _triton_why_not))
EMBEDDING_GRADIENT.register(Backend("reference", reference.add_rows, 0, serve_all))


@remembered
def _choose(spec: Spec, backend: str) -> AddRows:
    return EMBEDDING_GRADIENT.select(spec, backend).fn


def embedding(ids: Tensor, weight: Tensor, keep: Tensor | None = None) -> Tensor:
    """Look up ``weight[ids]``: ids ``[...]`` and a table ``[rows, h]`` give ``[..., h]``.

    If the table has a main gradient (:mod:`megalight.ops.parameter`), the gradient is added there row by row, and
    autograd gets None. It costs what the tokens cost, and not what the table does: autograd makes a gradient of the
    whole table for each micro-batch.

    Args:
        keep: bool ``[...]``: elsewhere the result is zero, and no row gets a gradient. None: everywhere.
    """
    if main_grad_of(weight) is None or not weight.requires_grad:
        found = F.embedding(ids, weight)
        return found if keep is None else found.masked_fill(~keep.unsqueeze(-1), 0)
    out: Tensor = apply(_Embedding, ids, weight, keep)
    return out


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, keep: Tensor | None) -> Tensor:
        # Kept by reference: a saved-tensor hook would return a tensor without its state.
        ctx.weight = weight
        ctx.save_for_backward(ids, keep)
        found = F.embedding(ids, weight)
        return found if keep is None else found.masked_fill_(~keep.unsqueeze(-1), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ids, keep = ctx.saved_tensors
        state = state_of(ctx.weight)
        main_grad = state.main_grad
        assert main_grad is not None
        if keep is not None:
            # No row has this number.
            ids = torch.where(keep, ids, len(main_grad))
        run = _choose(Spec(grad.device.type, grad.dtype, main_grad.dtype), "auto")
        run(main_grad, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]), state.touch())
        state.mark_grad_ready()
        return None, None, None
