"""The scan in chunks of tokens: kernels for decays, for the states between chunks, for outputs, and for gradients.

A token reads the state before its chunk if its sequence began before the chunk, and adds to the state after it if its
sequence is that of the chunk's last token. Nothing else crosses a chunk's border.

The states between chunks are summed in float32, in registers, and written in the dtype of the inputs: they are rounded
to it before every product anyway. A program computes the outputs, or all gradients, of a chunk for the heads of a
group, one after another: they share keys and queries, and so the product of the two.

No product of two exponentials of unlike sign is formed: every exponent is a difference that is at most 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.ops.autograd import apply, once_differentiable
from megalight.ops.common import last_contiguous, num_sms
from megalight.ops.jit import cdiv, next_power
from megalight.ops.row_indexing import empty_gradient, place_of
from megalight.ops.ssd.triton_kernels import decays, grad_decays, grad_inputs, grad_shared, outputs, pass_states

CHUNK = 64
"""Tokens per chunk. Longer chunks mean fewer states in memory, and more products within a chunk."""
PART = 64
"""Columns of a state that a program passes from chunk to chunk."""
TALL = 64
"""Rows of such a part at least: the tensor cores of sm_90 take no fewer."""
HEADS = 16
"""Heads whose decays a program computes."""
LAUNCHES = {
    pass_states: ({"num_warps": 4, "num_stages": 3, "maxnreg": 128}, {"num_warps": 4, "num_stages": 4}),
    outputs: ({"num_warps": 4, "num_stages": 3}, {"num_warps": 4, "num_stages": 3}),
    grad_inputs: ({"num_warps": 4, "num_stages": 3}, {"num_warps": 8, "num_stages": 2}),
    grad_shared: ({"num_warps": 8, "num_stages": 3}, {"num_warps": 8, "num_stages": 2}),
}
"""How the kernels are launched for heads of at most ``TALL`` features, and for larger ones. Small states fit into 128
registers: four programs share an SM, and all of a large model's run at once."""
WAVES = 4
"""Programs per SM at least, where there are heads enough."""


class Chunks:
    """What the kernels of a call share: sizes, and the decays of the tokens of chunks.

    Attributes:
        steps: ``[H, rows]``, the step sizes in float32; 0 after the last token.
        totals: the binary logarithm of the decay from a chunk's beginning to a token, the token's own included.
        reach: the factor with which a token reads the state before its chunk.
        to_end: the factor with which it adds to the state after it, but for its step size.
        kept: ``[H, chunks]``, the factor of the state before a chunk in the state after it.
    """

    def __init__(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, positions: Tensor, bias: Tensor | None) -> None:
        self.tokens, self.heads, self.size = x.shape
        self.groups, self.width = b.shape[1:]
        self.per = self.heads // self.groups
        self.count = cdiv(self.tokens, CHUNK)
        self.rows = self.count * CHUNK
        self.steps, self.totals, self.reach, self.to_end = torch.empty(
            4, self.heads, self.rows, dtype=torch.float32, device=x.device
        )
        self.kept = self.steps.new_empty(self.heads, self.count)
        self.positions = positions
        decays[(self.count, cdiv(self.heads, HEADS))](
            *(dt, bias, a, positions, self.steps, self.totals, self.reach, self.to_end, self.kept),
            *(self.tokens, self.rows, self.count, self.heads, *dt.stride()),
            BIAS=bias is not None, CHUNK=CHUNK, HEADS=HEADS, num_warps=4,
        )  # fmt: skip
        self.blocks = {
            "CHUNK": CHUNK,
            "SIZE": max(16, next_power(self.size)),
            "WIDTH": max(16, next_power(self.width)),
        }

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Heads, heads per group, features of a head, and width of a state."""
        return self.heads, self.per, self.size, self.width

    def launch(self, kernel: Any) -> dict[str, int]:
        """Return how a kernel of ``LAUNCHES`` is launched."""
        return LAUNCHES[kernel][self.size > TALL]

    def span(self, device: torch.device) -> int:
        """Return how many heads of a group a program takes: all, or fewer where that makes too few programs."""
        wanted = WAVES * num_sms(device)
        parts = (p for p in range(1, self.per + 1) if self.per % p == 0)
        return self.per // next((p for p in parts if self.count * self.groups * p >= wanted), self.per)

    def states(
        self, x: Tensor, keys: Tensor, queries: Tensor, grad_y: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return ``[chunks, H, P, N]``, the states before the chunks, and the gradients of those after them.

        ``grad_y [T, H, P]`` is contiguous. Without it there are no gradients.
        """
        shape = (self.count, self.heads, self.size, self.width)
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        grad = None if grad_y is None else torch.empty_like(out)
        part, size = min(PART, self.blocks["WIDTH"]), max(TALL, self.blocks["SIZE"])
        pass_states[(cdiv(self.width, part), self.heads, 1 if grad is None else 2)](
            *(x, keys, grad_y, queries, self.to_end, self.reach, self.steps, self.kept, out, grad),
            *(self.tokens, self.rows, self.count, *self.sizes),
            *(*x.stride()[:2], *keys.stride()[:2], *queries.stride()[:2]),
            BOTH=grad is not None, CHUNK=CHUNK, SIZE=size, PART=part, **self.launch(pass_states),
        )  # fmt: skip
        return out, grad

    def outputs(self, x: Tensor, keys: Tensor, queries: Tensor, d: Tensor, states: Tensor) -> Tensor:
        """Return ``y [T, H, P]`` from the states before the chunks."""
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        span = self.span(x.device)
        outputs[(self.count, self.heads // span)](
            *(x, keys, queries, d, self.positions, self.steps, self.totals, self.reach, states, y),
            *(self.tokens, self.rows, *self.sizes, *x.stride()[:2], *keys.stride()[:2], *queries.stride()[:2], span),
            **self.blocks,
            **self.launch(outputs),
        )
        return y


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        positions: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.place = place_of(dt)
        x, b, c = (last_contiguous(rows) for rows in (x, b, c))
        chunks = Chunks(x, dt, a, b, positions, bias)
        y = chunks.outputs(x, b, c, d, chunks.states(x, b, c)[0])
        # States are computed again in backward: they are as large as the inputs.
        ctx.save_for_backward(x, dt, a, b, c, d, positions, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, d, positions, bias = ctx.saved_tensors
        grad_y = grad_y.contiguous()
        chunks = Chunks(x, dt, a, b, positions, bias)
        tokens, heads, size = x.shape
        span = chunks.span(x.device)
        parts = chunks.per // span
        # side by side, as the inputs are in a model: their gradients need no copy to be joined
        shared = chunks.groups * chunks.width
        joint = torch.empty(tokens, heads * size + 2 * shared, dtype=x.dtype, device=x.device)
        grad_x, grad_b, grad_c = torch.split(joint, [heads * size, shared, shared], 1)
        shares: tuple[Tensor, ...] = (grad_b, grad_c)
        if parts > 1:
            shares = torch.empty(2, parts, tokens, shared, dtype=torch.float32, device=x.device).unbind()
        before, grad_states = chunks.states(x, b, c, grad_y)
        grad_pairs = x.new_empty(chunks.count, heads // span, CHUNK, CHUNK)
        arriving, leaving, through, read, skip = torch.empty(
            5, *chunks.steps.shape, dtype=torch.float32, device=x.device
        )
        passing = torch.empty_like(chunks.kept)
        # shares of chunks, of `a`, of `d` and of the bias
        of_heads = torch.empty(2 if bias is None else 3, chunks.count, heads, dtype=torch.float32, device=x.device)
        grad_dt = empty_gradient(dt, ctx.place)
        grid, strides = (chunks.count, heads // span), (*x.stride()[:2], *b.stride()[:2], *c.stride()[:2])
        grad_inputs[grid](
            *(x, b, c, grad_y, d, positions, chunks.steps, chunks.totals, chunks.to_end, grad_states),
            *(grad_x, grad_pairs, arriving, leaving, through, skip),
            *(tokens, chunks.rows, *chunks.sizes, *strides, joint.stride(0), span),
            **chunks.blocks,
            **chunks.launch(grad_inputs),
        )
        grad_shared[grid](
            *(x, b, c, grad_y, chunks.steps, chunks.reach, chunks.to_end, chunks.kept, before, grad_states),
            *(grad_pairs, *shares, read, passing), *(tokens, chunks.rows, chunks.count, *chunks.sizes, *strides),
            *(shares[0].stride(-2), tokens * shared, span),
            **chunks.blocks, **chunks.launch(grad_shared),
        )  # fmt: skip
        grad_decays[(chunks.count, cdiv(heads, HEADS))](
            *(dt, bias, a, chunks.steps, arriving, leaving, through, read, passing, skip),
            *(grad_dt, *of_heads[:2], of_heads[-1]),
            *(tokens, chunks.rows, chunks.count, heads, *dt.stride(), grad_dt.stride(0)),
            BIAS=bias is not None, CHUNK=CHUNK, HEADS=HEADS, num_warps=4,
        )  # fmt: skip
        if parts > 1:
            for grad, share in zip((grad_b, grad_c), shares, strict=True):
                grad.copy_(share.sum(0))
        grad_a, grad_d, *grad_bias = of_heads.sum(1)
        return (
            grad_x.view(x.shape),
            grad_dt,
            grad_a.to(a.dtype),
            grad_b.view(b.shape),
            grad_c.view(c.shape),
            grad_d.to(d.dtype),
            None,
            None if bias is None else grad_bias[0].to(bias.dtype),
        )


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    positions: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """See :func:`megalight.ops.ssd.ssd`."""
    out: Tensor = apply(_Scan, x, dt, a, b, c, d, positions, bias)
    return out
