"""The scan of Mamba-2 (SSD, https://arxiv.org/abs/2405.21060), within packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import HALF, lazy, serve_all, triton_why_not, wide, without_autocast
from megalight.registry import Backend, BackendRegistry, choose
from megalight.types import PackedSequences, Pages

# The scan in plain torch, chunk by chunk (listing 1 of https://arxiv.org/abs/2405.21060, with packed sequences).


CHUNK = 32
"""Tokens per chunk. Within a chunk all pairs of tokens are computed, between chunks only states are passed on."""


def reference_ssd(
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
    starts = torch.arange(len(x), device=x.device) - positions
    with without_autocast(x):
        return scan(x, dt if bias is None else step_sizes(dt, bias), a, b, c, d, starts)[0]


def step_sizes(dt: Tensor, bias: Tensor) -> Tensor:
    """Return ``softplus(dt + bias)``, ``[T, H]``. Half dtypes become float32: decays over many tokens multiply up."""
    dtype = wide(dt.dtype)
    return F.softplus(dt.to(dtype) + bias.to(dtype))


def scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    starts: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs ``[T, H, P]`` and the state ``[H, P, N]`` after the last token.

    Args:
        x, dt, a, b, c, d: as in :func:`megalight.ops.ssd.ssd`.
        starts: ``[T]``, the index of the first token of each token's sequence; negative if that is an earlier token,
            which ``state`` holds.
        state: ``[H, P, N]``, the state before the first token. None: 0.
    """
    # In float32 at least: decays are products of many factors.
    dtype, (tokens, heads, size), groups = wide(x.dtype), x.shape, b.shape[1]
    chunks = -(-tokens // CHUNK)
    missing = chunks * CHUNK - tokens

    def chunked(rows: Tensor, *shape: int) -> Tensor:
        """``[T, ...] -> [chunks, CHUNK, *shape]``, with zeros at the end: ``dt = 0`` leaves the state as it is."""
        padded = F.pad(rows.to(dtype), (0, 0) * (rows.ndim - 1) + (0, missing))
        return padded.view(chunks, CHUNK, *shape)

    per = heads // groups
    inputs, steps = chunked(x, groups, per, size), chunked(dt, groups, per)
    keys, queries = chunked(b, groups, -1), chunked(c, groups, -1)
    # padding continues the last sequence
    begin = torch.cat([starts, starts[-1:].expand(missing)]).view(chunks, CHUNK)
    first = torch.arange(chunks, device=x.device)[:, None] * CHUNK
    # Logarithm of the decay from the chunk's beginning, the token's own included: a product would underflow.
    total = (steps * a.to(dtype).view(groups, per)).cumsum(1)

    same = (begin[:, :, None] == begin[:, None, :]).tril()[..., None, None]
    # Masked before the exponential: above the diagonal it would overflow.
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(~same, -torch.inf).exp()
    weights = torch.einsum("ctgn,csgn->ctsg", queries, keys)[..., None] * decay * steps[:, None]
    y = torch.einsum("ctsgr,csgrp->ctgrp", weights, inputs)

    # what a chunk adds to the state of its last sequence
    last = (begin == begin[:, -1:])[..., None, None]
    to_end = (total[:, -1:] - total).masked_fill(~last, -torch.inf).exp() * steps
    added = torch.einsum("csgr,csgrp,csgn->cgrpn", to_end, inputs, keys)
    # The state from before goes on only where the chunk's last sequence began before the chunk.
    kept = total[:, -1].exp() * (begin[:, -1:] < first)[..., None]
    current = added.new_zeros(added.shape[1:]) if state is None else state.to(dtype).view(added.shape[1:])
    before = []
    # The only loop over time: all else is a product over whole chunks.
    for chunk in range(chunks):
        before.append(current)
        current = kept[chunk, ..., None, None] * current + added[chunk]

    from_before = total.exp() * (begin < first)[..., None, None]
    y = y + torch.einsum("ctgn,cgrpn->ctgrp", queries, torch.stack(before)) * from_before[..., None]
    y = (y + d.to(dtype).view(groups, per, 1) * inputs).flatten(0, 1)[:tokens]
    return y.reshape(x.shape).to(x.dtype), current.reshape(heads, size, -1)


def reference_continued(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    entries: Tensor,
    pages: Pages,
    bias: Tensor | None = None,
) -> Tensor:
    """See :func:`megalight.ops.ssd.ssd_continued`."""
    count, states = pages.decodes, pages.read(entries)
    outputs, ends = [], []
    with without_autocast(x):
        steps = dt if bias is None else step_sizes(dt, bias)
        if count:
            y, end = _step(x[:count], steps[:count], a, b[:count], c[:count], d, states[:count])
            outputs.append(y)
            ends.append(end)
        # Where the pass is recorded, others have step sizes of 0, which leave the state as it is.
        for (part, step, key, query), state in zip(pages.split(x, steps, b, c), states[count:], strict=True):
            y, end = scan(part, step, a, key, query, d, part.new_full((len(part),), -1, dtype=torch.long), state)
            outputs.append(y)
            ends.append(end[None])
    pages.store(entries, torch.cat(ends))
    return pages.join(outputs) if count < len(states) else outputs[0]


def _step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each sequence: the recurrence itself."""
    dtype, per = wide(x.dtype), x.shape[1] // b.shape[1]
    inputs, steps = x.to(dtype), dt.to(dtype)
    keys, queries = (rows.to(dtype).repeat_interleave(per, 1) for rows in (b, c))
    added = (steps[..., None] * inputs)[..., None] * keys[:, :, None]
    states = (steps * a.to(dtype)).exp()[..., None, None] * states.to(dtype) + added
    y = torch.einsum("thpn,thn->thp", states, queries) + d.to(dtype)[:, None] * inputs
    return y.to(x.dtype), states


class SSDSpec(NamedTuple):
    """A request to the scan.

    Attributes:
        device: device type.
        dtype: dtype of ``x``, ``b`` and ``c``.
        head_dim: ``P``.
        state_size: ``N``.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    state_size: int


SSD: BackendRegistry[SSDSpec, Callable[..., Tensor]] = BackendRegistry("ssd")
CONTINUED: BackendRegistry[SSDSpec, Callable[..., Tensor]] = BackendRegistry("ssd_continued")
REGISTRIES = (SSD, CONTINUED)
EXAMPLE = SSDSpec("cpu", torch.bfloat16, 64, 128)

MAX_HEAD_DIM, MAX_STATE_SIZE = 128, 128
"""Largest state of a head that fits into the registers and the shared memory of the kernels."""


def _triton_why_not(spec: SSDSpec) -> str | None:
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    if spec.head_dim > MAX_HEAD_DIM or spec.state_size > MAX_STATE_SIZE:
        return (
            f"serves heads of at most {MAX_HEAD_DIM} features with states of at most {MAX_STATE_SIZE}, not "
            f"{spec.head_dim} and {spec.state_size}"
        )
    return triton_why_not(spec.device, spec.dtype)


SSD.register(Backend("triton", lazy("megalight.ops.ssd.triton", "ssd"), 20, _triton_why_not))
SSD.register(Backend("reference", reference_ssd, 0, serve_all))
CONTINUED.register(Backend("triton", lazy("megalight.ops.ssd.continued", "ssd_continued"), 20, _triton_why_not))
CONTINUED.register(Backend("reference", reference_continued, 0, serve_all))


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    sequences: PackedSequences,
    *,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``s[t] = exp(dt[t] a) s[t - 1] + dt[t] x[t] b[t]^T`` and ``y[t] = s[t] c[t] + d x[t]``; ``s`` begins at 0.

    Each head has its own state ``s [P, N]``. Every sequence starts from zeros. Half dtypes are summed in float32.

    Args:
        x: ``[T, H, P]``.
        dt: ``[T, H]``, the step sizes, above 0.
        a: ``[H]``, below 0.
        b: ``[T, G, N]``; ``H / G`` neighboring heads share each.
        c: ``[T, G, N]``.
        d: ``[H]``.
        sequences: how the tokens divide into sequences, which are whole.
        bias: ``[H]``. With it, step sizes are ``softplus(dt + bias)``, in float32 for half dtypes.
        backend: a backend's name, or ``auto``.

    Returns:
        ``[T, H, P]`` in the dtype of ``x``.
    """
    spec = SSDSpec(x.device.type, x.dtype, x.shape[-1], b.shape[-1])
    # Positions show where sequences begin, without a copy of offsets to the host.
    return choose(SSD, spec, backend)(x, dt, a, b, c, d, sequences.positions, bias)


def ssd_continued(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    entries: Tensor,
    pages: Pages,
    *,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Continue the sequences of ``pages`` from their states, and store those after their new tokens.

    Args:
        x, dt, a, b, c, d, bias: as in :func:`ssd`.
        entries: ``[num_slots, H, P, N]``, the pool of states; float32 for half dtypes.
        pages: the sequences, and where their states are.
        backend: a backend's name, or ``auto``. With gradients enabled it is ``reference``: kernels that go on from a
            state have none.

    Returns:
        ``[T, H, P]`` in the dtype of ``x``.
    """
    if torch.is_grad_enabled():
        backend = "reference"
    spec = SSDSpec(x.device.type, x.dtype, x.shape[-1], b.shape[-1])
    return choose(CONTINUED, spec, backend)(x, dt, a, b, c, d, entries, pages, bias)
