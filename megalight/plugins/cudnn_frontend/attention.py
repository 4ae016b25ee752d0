"""Attention by cuDNN's graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.common import apply, lazy, once_differentiable
from megalight.plugins.cudnn_frontend.graphs import Request, backward_graph, forward_graph
from megalight.plugins.cudnn_frontend.layout import layout_of, offsets_of
from megalight.types import PackedSequences


# The package is no part of a compiled graph: torch's compiler goes around it.
@torch.compiler.disable  # type: ignore[untyped-decorator]
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
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of all sequences; equally long ones are a dense batch, others a ragged one."""
    layout = layout_of(sequences)
    q, k, v = (x if _readable(x) else x.contiguous() for x in (q, k, v))
    request = Request(
        layout,
        q.dtype,
        q.shape[1],
        k.shape[1],
        (q.shape[2], v.shape[2]),
        ((q.stride(0), q.stride(1)), (k.stride(0), k.stride(1)), (v.stride(0), v.stride(1))),
        causal,
        window,
        q.shape[-1] ** -0.5 if scale is None else scale,
        softcap,
        # cuDNN 9.19 takes six times as long for packed sequences with sinks as without; those are added afterwards.
        sink is not None and not layout.packed,
        torch.are_deterministic_algorithms_enabled(),
    )
    out: Tensor = apply(_Attention, q, k, v, sink, sequences, request)
    return out


def _readable(x: Tensor) -> bool:
    """Return whether cuDNN can load a view: rows begin at multiples of 16 bytes."""
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step and step % 8 == 0 for step in x.stride()[:-1])


def starts_of(sequences: PackedSequences, request: Request) -> dict[str, Tensor]:
    """Return lengths, and the offsets of all tensors, of sequences that are not equally long."""
    layout = request.layout
    if not layout.packed:
        return {}
    own, (size, value_size) = offsets_of(sequences, layout.batch), request.sizes
    keys = own if sequences.keys is None else offsets_of(sequences.keys, layout.batch)
    return {
        "lengths": own.lengths,
        "key_lengths": keys.lengths,
        "starts_q": own.of(request.strides[0][0]),
        "starts_k": keys.of(request.strides[1][0]),
        "starts_v": keys.of(request.strides[2][0]),
        "starts_out": own.of(request.heads * value_size),
        "starts_lse": own.of(request.heads),
        "starts_grad_q": own.of(request.heads * size),
        "starts_grad_k": keys.of(request.key_heads * size),
        "starts_grad_v": keys.of(request.key_heads * value_size),
    }


_products = lazy("megalight.ops.attention.triton_backward", "run_delta")
"""Sums over features of outputs times their gradients."""
FORWARD = ("lengths", "key_lengths", "starts_q", "starts_k", "starts_v", "starts_out", "starts_lse")
"""The offsets that the forward graph takes; the backward takes all."""


class _Attention(torch.autograd.Function):
    """``q [T, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], sink [H] -> [T, H, Dv]``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, sequences: PackedSequences, request: Request
    ) -> Tensor:
        starts, layout = starts_of(sequences, request), request.layout
        out = q.new_empty(len(q), request.heads, request.sizes[1])
        shape = (len(q), request.heads) if layout.packed else (layout.batch, request.heads, layout.length)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
        tensors |= {name: starts[name] for name in FORWARD if name in starts}
        if sink is not None and request.sink:
            tensors["sink"] = sink.detach().float().contiguous()
        forward_graph(request, q.device).run(tensors, q.device)
        if sink is not None and not request.sink:
            total = torch.logaddexp(lse, sink.detach().float())
            out *= (lse - total).exp()[..., None]
            lse = total
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.sequences, ctx.request = sequences, request
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        sequences, request = ctx.sequences, ctx.request
        grad = grad.contiguous()
        found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "grad": grad}
        tensors |= dict(zip(("grad_q", "grad_k", "grad_v"), found, strict=True)) | starts_of(sequences, request)
        backward_graph(request, q.device).run(tensors, q.device)
        grad_sink = None
        if sink is not None and ctx.needs_input_grad[3]:
            # A sink is a key whose value is 0. cuDNN's own gradient of it is wrong for packed sequences before 9.26.
            rows = lse.t() if request.layout.packed else lse.transpose(0, 1).flatten(1)  # [H, T]
            grad_sink = -((sink.float()[:, None] - rows).exp() * _products(out, grad)).sum(1).to(sink.dtype)
        return (*found, grad_sink, None, None)
