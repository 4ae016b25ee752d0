"""Multi-head latent attention (MLA) of DeepSeek-V2 (https://arxiv.org/abs/2405.04434)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError, MegalightError
from megalight.nn.canonical import Section
from megalight.nn.linear import Linear
from megalight.nn.norm import RMSNorm
from megalight.nn.state import LayerContext, Slots, StoredHeads, TokenPool
from megalight.ops.batch_invariant import MODE, refuse, with_gradient_of
from megalight.ops.batch_invariant.product import head_product
from megalight.ops.latent_heads import join_keys
from megalight.ops.linear.low_precision import precision_of
from megalight.ops.quantized_weight import readable
from megalight.types import PackedSequences

EXPANDED = 128
"""New tokens of a sequence from which on keys and values are computed anew for all of its tokens.

Scores of latents take about three times the operations of scores of keys, for each query; keys take theirs once.
"""


class SharedHead(nn.Module):
    """A head that all others read: the identity. A plan replaces it where the heads are divided."""

    def forward(self, x: Tensor) -> Tensor:
        """``[T, D] -> [T, D]``."""
        return x


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

    def make_state(self, slots: Slots) -> TokenPool:
        """Make the state: one row ``[c + R]`` per token, the normed latent and the rotated key.

        Raises:
            ConfigurationError: keys and values are to be stored in e4m3.
        """
        if slots.quantized:
            raise ConfigurationError(
                "latent attention stores latents, which have no form in 8 bits; leave kv_cache_dtype at auto."
            )
        return slots.per_token()

    def forward(self, hidden: Tensor, context: LayerContext, state: Any = None, memory: Tensor | None = None) -> Tensor:
        """``[T, h] -> [T, h]``. ``memory`` is unused."""
        q, latent, key = self._latents(hidden, context)
        if MODE.on:
            return self._project(self._invariant(q, latent, key, context.sequences, state))
        if state is not None and (pages := context.sequences.pages) is not None:
            rows = torch.cat([latent, key], -1)
            pool = state.rows(tuple(rows.shape[1:]), rows)
            with torch.no_grad():
                pool[pages.write] = rows
            # the first pass of a sequence has no earlier tokens, and computes keys and values as training does
            if pages.continued:
                return self._project(self._continue(q, pool, context.sequences))
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
        wide = self.kv_up(latent)
        return join_keys(wide.view(len(wide), -1, self.head_dim + self.value_dim), key, self.head_dim)

    def _continue(self, q: Tensor, pool: Tensor, sequences: PackedSequences) -> Tensor:
        """Attend to all stored tokens of the sequences: ``q [T, H, D + R], pool [N, c + R]``."""
        pages = sequences.pages
        assert pages is not None
        # A layer with an adapter computes something else than a product with its weight.
        absorbs = self.kv_up.adapter is None and precision_of(self.kv_up.weight) is None
        if pages.recorded:
            if not absorbs:
                raise MegalightError(
                    "keys and values of a recorded pass cannot be computed, as their number may change."
                )
            return self._absorbed(q, pool, sequences)
        few = 0
        if absorbs:
            lengths = pages.query_lengths
            few = next((place for place, count in enumerate(lengths) if count >= EXPANDED), len(lengths))
        tokens = sum(pages.query_lengths[:few])
        mixed = [self._absorbed(q[:tokens], pool, replace(sequences, pages=pages.leading(few)))] if few else []
        if few < len(pages.query_lengths):
            rows = pool[pages.rows(few, pages.bounds[few:])]
            keys = PackedSequences.of_lengths(pages.bounds[few:], q.device)
            queries = replace(PackedSequences.of_lengths(pages.query_lengths[few:], q.device), keys=keys)
            k, v = self._keys_values(*torch.split(rows, [self.kv_rank, self.rotary_dim], -1))
            mixed.append(self.inner(q[tokens:], k, v, queries))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _invariant(
        self, q: Tensor, latent: Tensor, key: Tensor, sequences: PackedSequences, state: TokenPool | None
    ) -> Tensor:
        """Attend to latents in all passes, in batch-invariant mode; the gradient is that of keys and values."""
        if self.kv_up.adapter is not None or precision_of(self.kv_up.weight) is not None:
            refuse("adapters and 8 bits in the projection of latents to keys and values")
        if state is not None and (pages := sequences.pages) is not None:
            rows = torch.cat([latent, key], -1)
            pool = state.rows(tuple(rows.shape[1:]), rows)
            with torch.no_grad():
                pool[pages.write] = rows
            if pages.continued:
                return self._absorbed(q, pool, sequences)

        def ordinary(q: Tensor, latent: Tensor, key: Tensor, weight: Tensor) -> Tensor:
            k, v = self._keys_values(latent, key)
            out: Tensor = self.inner(q, k, v, sequences)
            return out

        def invariant(q: Tensor, latent: Tensor, key: Tensor, weight: Tensor) -> Tensor:
            return self._absorbed(q, torch.cat([latent, key], -1), sequences, stored=False)

        return with_gradient_of(ordinary, invariant, (q, latent, key, self.kv_up.weight))

    def _absorbed(self, q: Tensor, pool: Tensor, sequences: PackedSequences, stored: bool = True) -> Tensor:
        """Attend to latents: ``q [T, H, D + R], pool [N, c + R] -> [T, H, V]``. Not ``stored``: ``N`` is ``T``."""
        # In the dtype of the queries, because the weight may be kept in a wider one.
        weight = readable(self.kv_up.weight).view(-1, self.head_dim + self.value_dim, self.kv_rank).to(q.dtype)
        for_keys, for_values = torch.split(weight, [self.head_dim, self.value_dim], 1)
        plain, turned = torch.split(q, [self.head_dim, self.rotary_dim], -1)
        # q (W c) = (q W) c: one key head for all query heads, and its first c features are the values
        absorbed = torch.cat([head_product(plain, for_keys.mT), turned], -1)
        k, v = pool[:, None], pool[:, None, : self.kv_rank]
        heads = None
        if stored:
            assert sequences.pages is not None
            heads = StoredHeads(k, v, sequences.pages)
        mixed = self.inner(absorbed, k, v, sequences, heads)
        # The outputs are latents. The part of the weight for values turns them into heads.
        return head_product(mixed, for_values)
