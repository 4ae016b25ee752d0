"""The gated delta rule (https://arxiv.org/abs/2412.06464), within packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import HALF, lazy, serve_all, triton_why_not, wide, without_autocast
from megalight.registry import Backend, BackendRegistry, choose
from megalight.types import PackedSequences, Pages

# The gated delta rule in plain torch, chunk by chunk (section 3.3 of https://arxiv.org/abs/2412.06464).


CHUNK = 32
"""Tokens per chunk. Within a chunk all pairs of tokens are computed, between chunks only states are passed on."""


def reference_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, sequences: PackedSequences
) -> Tensor:
    """See :func:`megalight.ops.delta_rule.delta_rule`."""
    # Positions show where sequences begin, without a copy of offsets to the host.
    starts = torch.arange(len(v), device=v.device) - sequences.positions
    with without_autocast(v):
        return scan(q, k, v, decay, beta, starts)[0]


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs ``[T, H, V]`` and the state ``[H, K, V]`` after the last token.

    Each token writes ``u[t] = beta[t] (v[t] - e^decay[t] s[t - 1]^T k[t])`` at its key. In a chunk, what ``u[t]`` needs
    of the earlier ``u`` is a triangular system, which is solved for all tokens at once.

    Args:
        q, k, v, decay, beta: as in :func:`megalight.ops.delta_rule.delta_rule`.
        starts: ``[T]``, the index of the first token of each token's sequence; negative if that is an earlier token,
            which ``state`` holds.
        state: ``[H, K, V]``, the state before the first token. None: 0.
    """
    # In float32 at least: decays are products of many factors.
    dtype, (tokens, heads, size), per = wide(v.dtype), v.shape, v.shape[1] // k.shape[1]
    chunks = -(-tokens // CHUNK)
    missing = chunks * CHUNK - tokens

    def chunked(rows: Tensor) -> Tensor:
        """``[T, H, ...] -> [chunks, H, CHUNK, ...]``, with zeros at the end: ``beta = 0`` leaves the state as it is."""
        padded = F.pad(rows.to(dtype), (0, 0) * (rows.ndim - 1) + (0, missing))
        return padded.view(chunks, CHUNK, *rows.shape[1:]).transpose(1, 2)

    queries, keys = (chunked(rows).repeat_interleave(per, 1) for rows in (q, k))
    values, rates = chunked(v), chunked(beta)[..., None]
    # padding continues the last sequence
    begin = torch.cat([starts, starts[-1:].expand(missing)]).view(chunks, 1, CHUNK)
    first = torch.arange(chunks, device=v.device)[:, None, None] * CHUNK
    # Logarithm of the decay from the chunk's beginning, the token's own included: a product would underflow.
    total = chunked(decay).cumsum(-1)

    same = (begin[..., :, None] == begin[..., None, :]).tril()
    # Masked before the exponential: above the diagonal it would overflow.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~same, -torch.inf).exp()
    # The state from before reaches only tokens whose sequence began before the chunk.
    reached = (total.exp() * (begin < first))[..., None]

    overlap = rates * (keys @ keys.mT) * between
    # A unit triangular system: its diagonal is taken as 1, whatever lies there.
    solved = torch.linalg.solve_triangular(
        overlap, torch.cat([rates * values, rates * reached * keys], -1), upper=False, unitriangular=True
    )
    fresh, erased = solved.split([size, keys.shape[-1]], -1)

    last = begin == begin[..., -1:]
    to_end = (total[..., -1:] - total).masked_fill(~last, -torch.inf).exp()[..., None] * keys
    kept = reached[..., -1:, :]
    current = values.new_zeros(heads, keys.shape[-1], size) if state is None else state.to(dtype)
    before, written = [], []
    # The only loop over time: what is written depends on the state before the chunk.
    for chunk in range(chunks):
        before.append(current)
        written.append(fresh[chunk] - erased[chunk] @ current)
        current = kept[chunk] * current + to_end[chunk].mT @ written[chunk]

    y = (queries @ keys.mT * between) @ torch.stack(written) + (reached * queries) @ torch.stack(before)
    return y.transpose(1, 2).flatten(0, 1)[:tokens].to(v.dtype), current


def reference_continued(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, entries: Tensor, pages: Pages
) -> Tensor:
    """See :func:`megalight.ops.delta_rule.delta_rule_continued`."""
    count, states = pages.decodes, pages.read(entries)
    outputs, ends = [], []
    with without_autocast(v):
        if count:
            y, end = _step(q[:count], k[:count], v[:count], decay[:count], beta[:count], states[:count])
            outputs.append(y)
            ends.append(end)
        # Where the pass is recorded, others have no decay and write nothing, which leaves the state as it is.
        parts = zip(pages.split(q, k, v, decay, beta), states[count:], strict=True)
        for (query, key, value, falls, rates), state in parts:
            y, end = scan(query, key, value, falls, rates, value.new_full((len(value),), -1, dtype=torch.long), state)
            outputs.append(y)
            ends.append(end[None])
    pages.store(entries, torch.cat(ends))
    return pages.join(outputs) if count < len(states) else outputs[0]


def _step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each sequence: the recurrence itself."""
    dtype, per = wide(v.dtype), v.shape[1] // k.shape[1]
    queries, keys = (rows.to(dtype).repeat_interleave(per, 1) for rows in (q, k))
    states = decay.to(dtype).exp()[..., None, None] * states.to(dtype)
    read = torch.einsum("thkv,thk->thv", states, keys)
    written = beta.to(dtype)[..., None] * (v.to(dtype) - read)
    states = states + keys[..., None] * written[:, :, None]
    return torch.einsum("thkv,thk->thv", states, queries).to(v.dtype), states


class DeltaRuleSpec(NamedTuple):
    """A request to the rule.

    Attributes:
        device: device type.
        dtype: dtype of ``q``, ``k`` and ``v``.
        key_dim: ``K``.
        value_dim: ``V``.
    """

    device: str
    dtype: torch.dtype
    key_dim: int
    value_dim: int


DELTA_RULE: BackendRegistry[DeltaRuleSpec, Callable[..., Tensor]] = BackendRegistry("delta_rule")
CONTINUED: BackendRegistry[DeltaRuleSpec, Callable[..., Tensor]] = BackendRegistry("delta_rule_continued")
REGISTRIES = (DELTA_RULE, CONTINUED)
EXAMPLE = DeltaRuleSpec("cpu", torch.bfloat16, 128, 128)

WIDEST = 128
"""Most features of keys and of values whose states fit into the registers of the kernels."""


def _triton_why_not(spec: DeltaRuleSpec) -> str | None:
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    if max(spec.key_dim, spec.value_dim) > WIDEST:
        return f"serves heads of at most {WIDEST} features, not {spec.key_dim} and {spec.value_dim}"
    return triton_why_not(spec.device, spec.dtype)


DELTA_RULE.register(Backend("triton", lazy("megalight.ops.delta_rule.triton", "delta_rule"), 20, _triton_why_not))
CONTINUED.register(
    Backend("triton", lazy("megalight.ops.delta_rule.triton", "delta_rule_continued"), 20, _triton_why_not)
)
CONTINUED.register(Backend("reference", reference_continued, 0, serve_all))
DELTA_RULE.register(Backend("reference", reference_delta_rule, 0, serve_all))


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    sequences: PackedSequences,
    *,
    backend: str = "auto",
) -> Tensor:
    """``s[t] = e^decay[t] s[t - 1] + k[t] (beta[t] (v[t] - e^decay[t] s[t - 1]^T k[t]))^T`` and ``y[t] = s[t]^T q[t]``.

    Each head has its own state ``s [K, V]``, which begins at 0 in every sequence. Half dtypes are summed in float32.

    Args:
        q: ``[T, G, K]``; ``H / G`` neighboring heads share each.
        k: ``[T, G, K]``, of length 1 or less, or the state may grow without bound.
        v: ``[T, H, V]``.
        decay: ``[T, H]``, logarithms of factors, at most 0.
        beta: ``[T, H]``, how far the value of a key moves to ``v``: 0 not at all, 1 all the way.
        sequences: how the tokens divide into sequences, which are whole.
        backend: a backend's name, or ``auto``.

    Returns:
        ``[T, H, V]`` in the dtype of ``v``.
    """
    spec = DeltaRuleSpec(v.device.type, v.dtype, k.shape[-1], v.shape[-1])
    return choose(DELTA_RULE, spec, backend)(q, k, v, decay, beta, sequences)


def delta_rule_continued(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    entries: Tensor,
    pages: Pages,
    *,
    backend: str = "auto",
) -> Tensor:
    """Continue the sequences of ``pages`` from their states, and store those after their new tokens.

    Args:
        q, k, v, decay, beta: as in :func:`delta_rule`.
        entries: ``[num_slots, H, K, V]``, the pool of states; float32 for half dtypes.
        pages: the sequences, and where their states are.
        backend: a backend's name, or ``auto``. With gradients enabled it is ``reference``: kernels that go on from a
            state have none.

    Returns:
        ``[T, H, V]`` in the dtype of ``v``.
    """
    if torch.is_grad_enabled():
        backend = "reference"
    spec = DeltaRuleSpec(v.device.type, v.dtype, k.shape[-1], v.shape[-1])
    return choose(CONTINUED, spec, backend)(q, k, v, decay, beta, entries, pages)
