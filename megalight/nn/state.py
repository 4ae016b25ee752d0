"""What layers share in a forward pass, and the states that they keep of earlier tokens (KV cache).

A mixer makes its state in ``make_state(slots)``. It keeps one row per token (keys and values), or one entry per
sequence (the last inputs of a convolution, a recurrent state). :class:`Slots` decides where these are stored. In a
forward pass the mixer reads and writes them where ``context.sequences.pages`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalight.nn.aux_losses import AuxLosses, current
from megalight.nn.rotary import RotaryTable
from megalight.ops.common import measuring
from megalight.ops.paged_append import paged_append
from megalight.types import AttentionSpan, PackedSequences, Pages


@dataclass(frozen=True, eq=False)
class LayerContext:
    """Data that every layer can read during the forward pass of one micro-batch. It is made once for all layers.

    It holds no tensor that requires a gradient: recompute passes it on unchanged, a region of several layers checks
    that all get the same object, and layers in a CUDA graph share one copy. Tensors that require a gradient are
    separate arguments: hidden states, and the memory of cross attention.

    Attributes:
        sequences: how the tokens divide into sequences.
        rotary: rotary tables by name. Each mixer names the table it reads; a model with several bases has several.
        divisions: other ways in which the same tokens divide into sequences, by name, such as the windows of a vision
            tower. An attention that names one stays inside of its parts.
        rows: ``[M]`` int64: the tokens whose hidden states are read after the last layer, which returns only these if
            it can (:attr:`~megalight.nn.TransformerLayer.narrows`). None: all tokens.
        aux_losses: receives the losses of single layers. By default, the collector that is active now.
    """

    sequences: PackedSequences
    rotary: Mapping[str, RotaryTable] = field(default_factory=dict)
    divisions: Mapping[str, PackedSequences] = field(default_factory=dict, kw_only=True)
    rows: Tensor | None = field(default=None, kw_only=True)
    aux_losses: AuxLosses = field(default_factory=current)


class TokenPool(Protocol):
    """Rows for the tokens of all sequences, in the blocks of :class:`~megalight.types.Pages`."""

    def rows(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the pool ``[N, *shape]``. The first call allocates it, with the dtype and device of ``like``."""
        ...


class SequencePool(Protocol):
    """One entry for each sequence."""

    def entries(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the pool ``[num_slots, *shape]``. The first call allocates it, with dtype and device of ``like``."""
        ...


class Slots(Protocol):
    """Storage for sequences that later forward passes continue."""

    @property
    def quantized(self) -> bool:
        """Whether keys and values, or latents, are stored in e4m3."""
        ...

    def per_token(self, span: AttentionSpan | None = None) -> TokenPool:
        """Make storage for one row per token, which later tokens within its span read (None: all).

        The first pass decides its shape and dtype.
        """
        ...

    def per_sequence(self) -> SequencePool:
        """Make storage for one entry per sequence."""
        ...


class StoredHeads(NamedTuple):
    """The keys and values of all stored tokens, for :func:`~megalight.ops.paged_attention.paged_attention`.

    Attributes:
        keys: ``[N, Hkv, D]``.
        values: ``[N, Hkv, Dv]``.
        pages: where they lie.
        scales: ``[N, Hkv]`` of keys and of values in e4m3; None: they have the dtype of the layer.
        rotary: ``[N, Hkv, R]``: the rotated features of keys, where ``keys`` are latents in e4m3.
    """

    keys: Tensor
    values: Tensor
    pages: Pages
    scales: tuple[Tensor, Tensor] | None = None
    rotary: Tensor | None = None


@dataclass(frozen=True, eq=False)
class KeysAndValues:
    """The state of attention: keys and values of every token that later ones see.

    Attributes:
        span: what a token sees. None: all earlier ones.
        scales: of keys and values in e4m3, which are always read from there: so a token's values do not depend on how
            its prompt was divided. None: they have the dtype of the layer.
    """

    keys: TokenPool
    values: TokenPool
    span: AttentionSpan | None = None
    scales: tuple[TokenPool, TokenPool] | None = None

    @classmethod
    def of(cls, slots: Slots, span: AttentionSpan | None = None) -> KeysAndValues:
        """Make an empty state, without any token."""
        scales = (slots.per_token(span), slots.per_token(span)) if slots.quantized else None
        return cls(slots.per_token(span), slots.per_token(span), span, scales)

    def read_after(self, pages: Pages | None) -> bool:
        """Return whether tokens attend to what is stored; otherwise they have no earlier ones, and to one another."""
        return pages is not None and (pages.continued or self.scales is not None)

    def _stored(self, k: Tensor, v: Tensor, pages: Pages) -> StoredHeads:
        k_like, v_like, scales = k, v, None
        if self.scales is not None:
            k_like = v_like = k.new_empty(0, dtype=torch.float8_e4m3fn)
            like = k.new_empty(0, dtype=torch.float32)
            k_scale, v_scale = (pool.rows((k.shape[1],), like) for pool in self.scales)
            scales = k_scale, v_scale
        keys, values = self.keys.rows(tuple(k.shape[1:]), k_like), self.values.rows(tuple(v.shape[1:]), v_like)
        return StoredHeads(keys, values, pages, scales)

    def append(
        self, q: Tensor, k: Tensor, v: Tensor, pages: Pages, rotary: RotaryTable | None
    ) -> tuple[Tensor, StoredHeads]:
        """Rotate ``q [T, H, D]`` and ``k [T, Hkv, D]``, store ``k`` and ``v``; return ``q`` and all that is stored."""
        stored = self._stored(k, v, pages.of(self.span))
        given = (q, k, v, stored.keys, stored.values, stored.pages.write)
        if rotary is None:
            return paged_append(*given, scales=stored.scales), stored
        q = paged_append(
            *(*given, rotary.cos, rotary.sin),
            interleaved=rotary.interleaved,
            scales=stored.scales,
            # Nothing that is stored is cast again.
            backend=measuring(rotary.backend, wanted=False),
        )
        return q, stored

    def store(self, k: Tensor, v: Tensor, pages: Pages) -> None:
        """Store ``k [T, Hkv, D]``, which are rotated, and ``v``."""
        with torch.no_grad():
            for pool, rows in ((self.keys, k), (self.values, v)):
                pool.rows(tuple(rows.shape[1:]), rows)[pages.of(self.span).write] = rows
