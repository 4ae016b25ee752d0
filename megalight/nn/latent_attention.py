"""Multi-head latent attention (MLA) of DeepSeek-V2 (https://arxiv.org/abs/2405.04434)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megalight.errors import MegalightError
from megalight.nn.canonical import Section
from megalight.nn.linear import Linear
from megalight.nn.norm import RMSNorm
from megalight.nn.state import LayerContext, Slots, StoredHeads, TokenPool
from megalight.ops.batch_invariant import MODE, refuse, with_gradient_of
from megalight.ops.batch_invariant.matmul import head_product
from megalight.ops.common import wide
from megalight.ops.latent_heads import join_keys
from megalight.ops.linear.low_precision import precision_of
from megalight.ops.paged_append import append_latents, dequantize_heads
from megalight.ops.quantized_weight import readable
from megalight.types import PackedSequences, Pages

EXPANDED = 128
"""New tokens of a sequence from which on keys and values are computed anew for all of its tokens.

Scores of latents take about three times the operations of scores of keys, for each query; keys take theirs once.
"""


class SharedHead(nn.Module):
    """A head that all others read: the identity. A plan replaces it where the heads are divided."""

    def forward(self, x: Tensor) -> Tensor:
        """``[T, D] -> [T, D]``."""
        return x


@dataclass(frozen=True, eq=False)
class LatentState:
    """The state of latent attention: the normed latent and the rotated key of every token.

    Attributes:
        rows: both, in the dtype of the layer; or the latents alone, in e4m3.
        apart: the rotated keys, and scales of latents in e4m3. These are always read from there, so a token's keys and
            values do not depend on how its prompt was divided.
    """

    rows: TokenPool
    apart: tuple[TokenPool, TokenPool] | None = None

    @classmethod
    def of(cls, slots: Slots) -> LatentState:
        """Make an empty state, without any token."""
        return cls(slots.per_token(), (slots.per_token(), slots.per_token()) if slots.quantized else None)

    def append(self, latent: Tensor, key: Tensor, pages: Pages) -> StoredHeads:
        """Store ``latent [T, c], key [T, R]``; return all that is stored: one key head, whose start is the value."""
        width, size = latent.shape[1], key.shape[1]
        if self.apart is None:
            rows = torch.cat([latent, key], -1)
            pool = self.rows.rows((width + size,), rows)
            with torch.no_grad():
                pool[pages.write] = rows
            return StoredHeads(pool[:, None], pool[:, None, :width], pages)
        latents = self.rows.rows((width,), latent.new_empty(0, dtype=torch.float8_e4m3fn))
        rotary = self.apart[0].rows((size,), key)
        scales = self.apart[1].rows((), latent.new_empty(0, dtype=torch.float32))
        append_latents(latent, key, latents, rotary, scales, pages.write)
        return StoredHeads(latents[:, None], latents[:, None], pages, (scales[:, None],) * 2, rotary[:, None])


def read_latents(stored: StoredHeads, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the latents ``[n, c]`` and rotated keys ``[n, R]`` of rows, in the dtype of the layer."""
    if stored.rotary is None or stored.scales is None:
        rows, width = stored.keys[index, 0], stored.values.shape[-1]
        return rows[:, :width], rows[:, width:]
    key = stored.rotary[index, 0]
    # As bytes: not all devices index floats of 8 bits.
    data = stored.keys.view(torch.uint8)[index, 0].view(stored.keys.dtype)
    return dequantize_heads(data, stored.scales[0][index, 0], wide(key.dtype)).to(key.dtype), key


class LatentAttention(nn.Module):
    """Attention whose keys and values are projections of one low-rank latent per token.

    A query head has ``head_dim`` features without position and ``rotary_dim`` rotated ones. A key head has
    ``head_dim`` features from the latent, and the same rotated features as all other key heads. So a token's state is
    its latent and one rotated head, instead of keys and values of all heads.

    Generation multiplies queries and outputs by the weights of ``kv_up``, and attends to the latents themselves: then
    keys and values of earlier tokens are not computed. Scores and outputs are the same. Long parts of prompts have
    enough queries to compute them.

    Args:
        hidden_size: ``h``.
        num_heads: number of heads, ``H``.
        q_rank: size of the latent of queries; None: queries are projections of the hidden states.
        kv_rank: size of the latent of keys and values, ``c``.
        head_dim: features of a query and key head that are not rotated, ``D``.
        rotary_dim: features that are rotated, ``R``.
        value_dim: features of a value head, ``V``.
        inner: attention between the projections. It must have the scale of ``D + R`` features: in generation, heads
            have ``c + R``.
        input_size: width of the input. None: ``hidden_size``, which is that of the output.
        norm_eps: eps of the norms of the latents.
        rotary: name of the rotary table in the context. None means no rotation.
        std: standard deviation of the initial weights, except for ``proj``.
        proj_std: standard deviation of the initial ``proj`` weights.
        norm_backend: backend of the norms of the latents.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        q_rank: int | None,
        kv_rank: int,
        head_dim: int,
        rotary_dim: int,
        value_dim: int,
        inner: nn.Module,
        *,
        input_size: int | None = None,
        norm_eps: float = 1e-6,
        rotary: str | None = None,
        std: float = 0.02,
        proj_std: float = 0.02,
        norm_backend: str = "auto",
    ) -> None:
        super().__init__()
        self.kv_rank, self.head_dim, self.rotary_dim, self.value_dim = kv_rank, head_dim, rotary_dim, value_dim
        self.rotary = rotary
        width = input_size or hidden_size
        self.q_down: Linear | None = None
        self.q_latent_norm: nn.Module | None = None
        if q_rank is not None:
            self.q_down = Linear(width, q_rank, std=std)
            self.q_latent_norm = RMSNorm(q_rank, norm_eps, backend=norm_backend)
        # The heads are the units: those of `q_up` and `kv_up` divide, and the latents stay whole.
        queries = Section("q_up", num_heads * (head_dim + rotary_dim), num_heads)
        self.q_up = Linear(width if q_rank is None else q_rank, (queries,), std=std)
        self.kv_down = Linear(width, kv_rank + rotary_dim, std=std)
        self.kv_latent_norm = RMSNorm(kv_rank, norm_eps, backend=norm_backend)
        self.kv_up = Linear(kv_rank, (Section("kv_up", num_heads * (head_dim + value_dim), num_heads),), std=std)
        self.shared_key = SharedHead()
        self.inner = inner
        self.proj = Linear(num_heads * value_dim, hidden_size, std=proj_std)

    @property
    def heads(self) -> tuple[int, int]:
        """Numbers of query heads and of key heads in the outputs of the projections: here they are equal."""
        return (self.q_up.section_sizes[0] // (self.head_dim + self.rotary_dim),) * 2

    def make_state(self, slots: Slots) -> LatentState:
        """Make the state of generation."""
        return LatentState.of(slots)

    def forward(self, hidden: Tensor, context: LayerContext, state: Any = None, memory: Tensor | None = None) -> Tensor:
        """``[T, h] -> [T, h]``. ``memory`` is unused."""
        q, latent, key = self._latents(hidden, context)
        if MODE.on:
            return self._project(self._invariant(q, latent, key, context.sequences, state))
        if state is not None and (pages := context.sequences.pages) is not None:
            stored = state.append(latent, key, pages)
            # the first pass of a sequence has no earlier tokens, and computes keys and values as training does
            if pages.continued:
                return self._project(self._continue(q, stored, context.sequences))
            if stored.scales is not None:
                latent, key = read_latents(stored, pages.write)
        k, v = self._keys_values(latent, key)
        return self._project(self.inner(q, k, v, context.sequences))

    def _latents(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[T, H, D + R]``, normed latents ``[T, c]`` and rotated features of keys ``[T, R]``."""
        table = None if self.rotary is None else context.rotary[self.rotary]
        q_latent = hidden
        if self.q_down is not None and self.q_latent_norm is not None:
            q_latent = self.q_latent_norm(self.q_down(hidden))
        queries = self.q_up(q_latent)
        q = queries.view(len(queries), -1, self.head_dim + self.rotary_dim)
        latent, key = torch.split(self.kv_down(hidden), [self.kv_rank, self.rotary_dim], -1)
        # the norm is over the latent alone, and before the projection gathers tokens, where that is cheap
        latent, key = self.kv_latent_norm(latent), self.shared_key(key)
        if table is not None:
            q, key = table.rotate_tail(q), table.rotate(key[:, None])[:, 0]
        return q, latent, key

    def _project(self, mixed: Tensor) -> Tensor:
        projected: Tensor = self.proj(mixed.flatten(1))
        return projected

    def _keys_values(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """``latent [T, c], key [T, R] -> [T, H, D + R], [T, H, V]``. Of the latent, a share of the tokens will do."""
        heads = self.kv_up(latent)
        return join_keys(heads.view(len(heads), -1, self.head_dim + self.value_dim), key, self.head_dim)

    def _continue(self, q: Tensor, stored: StoredHeads, sequences: PackedSequences) -> Tensor:
        """Attend to all stored tokens of the sequences: ``q [T, H, D + R]``."""
        pages = sequences.pages
        assert pages is not None
        # A layer with an adapter computes something else than a product with its weight.
        absorbs = self.kv_up.adapter is None and precision_of(self.kv_up.weight) is None
        if pages.recorded:
            if not absorbs:
                raise MegalightError(
                    "keys and values of a recorded pass cannot be computed, as their number may change."
                )
            return self._absorbed(q, sequences, stored)
        few = 0
        if absorbs:
            lengths = pages.query_lengths
            few = next((place for place, count in enumerate(lengths) if count >= EXPANDED), len(lengths))
        tokens = sum(pages.query_lengths[:few])
        mixed = []
        if few:
            mixed.append(self._absorbed(q[:tokens], sequences, stored._replace(pages=pages.leading(few))))
        if few < len(pages.query_lengths):
            keys = PackedSequences.of_lengths(pages.bounds[few:], q.device)
            queries = replace(PackedSequences.of_lengths(pages.query_lengths[few:], q.device), keys=keys)
            k, v = self._keys_values(*read_latents(stored, pages.rows(few, pages.bounds[few:])))
            mixed.append(self.inner(q[tokens:], k, v, queries))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _invariant(
        self, q: Tensor, latent: Tensor, key: Tensor, sequences: PackedSequences, state: LatentState | None
    ) -> Tensor:
        """Attend to latents in all passes, in batch-invariant mode; the gradient is that of keys and values."""
        if self.kv_up.adapter is not None or precision_of(self.kv_up.weight) is not None:
            refuse("adapters and 8 bits in the projection of latents to keys and values")
        if state is not None and (pages := sequences.pages) is not None:
            stored = state.append(latent, key, pages)
            if pages.continued:
                return self._absorbed(q, sequences, stored)

        def ordinary(q: Tensor, latent: Tensor, key: Tensor, weight: Tensor) -> Tensor:
            k, v = self._keys_values(latent, key)
            out: Tensor = self.inner(q, k, v, sequences)
            return out

        def invariant(q: Tensor, latent: Tensor, key: Tensor, weight: Tensor) -> Tensor:
            return self._absorbed(q, sequences, torch.cat([latent, key], -1))

        return with_gradient_of(ordinary, invariant, (q, latent, key, self.kv_up.weight))

    def _absorbed(self, q: Tensor, sequences: PackedSequences, latents: StoredHeads | Tensor) -> Tensor:
        """Attend to latents: ``q [T, H, D + R] -> [T, H, V]``. ``latents``: those stored, or ``[T, c + R]``."""
        # In the dtype of the queries, because the weight may be kept in a wider one.
        weight = readable(self.kv_up.weight).view(-1, self.head_dim + self.value_dim, self.kv_rank).to(q.dtype)
        for_keys, for_values = torch.split(weight, [self.head_dim, self.value_dim], 1)
        plain, turned = torch.split(q, [self.head_dim, self.rotary_dim], -1)
        # q (W c) = (q W) c: one key head for all query heads, and its first c features are the values
        absorbed = torch.cat([head_product(plain, for_keys.mT), turned], -1)
        if isinstance(latents, StoredHeads):
            mixed = self.inner(absorbed, *latents[:2], sequences, latents)
        else:
            mixed = self.inner(absorbed, latents[:, None], latents[:, None, : self.kv_rank], sequences)
        # The outputs are latents. The part of the weight for values turns them into heads.
        return head_product(mixed, for_values)
