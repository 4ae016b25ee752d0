"""Self-attention over packed sequences: grouped-query attention, its KV cache, and attention of a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.nn.canonical import Section
from megalight.nn.init import Initializer, Normal
from megalight.nn.latent_attention import LatentAttention
from megalight.nn.linear import Linear, gradient_is_elided
from megalight.nn.rotary import RotaryTable
from megalight.nn.state import KeysAndValues, LayerContext, Slots, StoredHeads
from megalight.ops.attention import attention, mutual_attention
from megalight.ops.batch_invariant import MODE, refuse, rowwise
from megalight.ops.common import wide
from megalight.ops.draft_attention import draft_attention
from megalight.ops.fp8_attention import FP8Attention
from megalight.ops.paged_attention import paged_attention
from megalight.ops.row_indexing import take_rows
from megalight.types import AttentionSpan, PackedSequences


class InnerAttention(nn.Module):
    """``softmax(q k^T * scale) v`` within each sequence: the part between the projections. It has no parameters.

    Args:
        causal: a token sees only itself and earlier tokens.
        scale: factor of the scores. None means ``1 / sqrt(D)``.
        window: how many earlier tokens a token sees. None means all.
        chunk: a token sees only tokens of its own chunk of so many. None means all.
        softcap: if set, scores become ``softcap * tanh(scores / softcap)``.
        dropout: probability of dropping an attention weight during training.
        softmax: ``vanilla``; ``off-by-one``: the denominator has one more term, 1; ``learnable``: it has a term for
            each head, the exponential of the ``sink`` in the call.
        backend: backend of the attention op.

    Attributes:
        mutual: whether the tokens of a run in ``sequences.runs`` see each other, also where attention is causal. Such
            attention is built from blocks: it has no chunk, soft cap, dropout or sink.
        paged_backend: backend of attention to stored keys and values (:mod:`megalight.ops.paged_attention`).
        fp8: computes attention in 8 bits where there is no state; None: in the dtype of the queries.
    """

    mutual: bool = False
    paged_backend: str = "auto"
    fp8: FP8Attention | None = None

    def __init__(
        self,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        softmax: str = "vanilla",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.causal = causal
        self.scale = scale
        self.window = window
        self.chunk = chunk
        self.softcap = softcap
        self.dropout = dropout
        self.softmax = softmax
        self.backend = backend

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: PackedSequences,
        stored: StoredHeads | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """``q [T, H, D], k, v [Tk, Hkv, D], sink [H] -> [T, H, D]``.

        With ``stored``, queries see the tokens of their sequence that are stored, among them the new ones; ``k`` and
        ``v`` are not read.

        Raises:
            LayoutError: tokens of a run would see each other, and earlier tokens that are stored.
        """
        sink = sink if self.softmax == "vanilla" else self.sinks(q, sink)
        later = sequences.later if self.mutual else None
        if later is not None:
            refuse("attention in which tokens of an image see later ones")
        if stored is not None:
            if later is not None:
                raise LayoutError("tokens of an image come after stored tokens; give all images in the first pass.")
            return paged_attention(
                q,
                *stored[:3],
                scales=stored.scales,
                rotary_pool=stored.rotary,
                causal=self.causal,
                scale=self.scale,
                window=self.window,
                chunk=self.chunk,
                softcap=self.softcap,
                sink=sink,
                backend=self.paged_backend,
            )
        if self.fp8 is not None and sequences.pages is None:
            refuse("attention in 8 bits")
            return self.fp8(q, k, v, sequences)
        if later is not None:
            return mutual_attention(q, k, v, k, v, sequences, later, scale=self.scale, window=self.window)
        return attention(
            q,
            k,
            v,
            sequences,
            causal=self.causal,
            scale=self.scale,
            window=self.window,
            chunk=self.chunk,
            softcap=self.softcap,
            # The op knows no modes, and dropout is for training only.
            dropout=self.dropout if self.training else 0.0,
            sink=sink,
            backend=self.backend,
        )

    @property
    def span(self) -> AttentionSpan | None:
        """What a token sees, if that is limited; None: all earlier tokens."""
        limited = self.causal and not (self.window is None and self.chunk is None)
        return AttentionSpan(self.window, self.chunk) if limited else None

    def sinks(self, q: Tensor, learned: Tensor | None) -> Tensor | None:
        """Return the sinks ``[H]`` of the heads in ``q [T, H, D]``; None: they have none."""
        # In the dtype of the queries, like learned ones. e^0 = 1
        return q.new_zeros(q.shape[1]) if self.softmax == "off-by-one" else learned

    def extra_repr(self) -> str:
        """Return the options that are set, for printing."""
        options = {"window": self.window, "chunk": self.chunk, "softcap": self.softcap, "dropout": self.dropout or None}
        return ", ".join([f"causal={self.causal}", *(f"{k}={v}" for k, v in options.items() if v is not None)])


class AttentionSink(nn.Module):
    """One number per head, a term of the denominator of the softmax in the form of a score.

    Args:
        num_heads: number of query heads.
        std: standard deviation of the initial values.

    Attributes:
        offset: ``[H]``.
    """

    def __init__(self, num_heads: int, std: float) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.empty(num_heads))
        self.initializers: dict[str, Initializer] = {"offset": Normal(std)}

    def forward(self) -> Tensor:
        """Return ``[H]``."""
        return self.offset


class Temperature(nn.Module):
    """``q * (1 + scale ln(1 + floor((t + 1) / length)))`` for the query at position ``t`` (Llama 4). No parameters.

    Softmax over many more keys than in training is too flat; the factor sharpens it.

    Args:
        length: the factor is 1 at the first ``length - 1`` positions.
        scale: how fast it grows.
    """

    def __init__(self, length: int, scale: float) -> None:
        super().__init__()
        self.length = length
        self.scale = scale

    def forward(self, q: Tensor, positions: Tensor) -> Tensor:
        """``q [T, H, D], positions [T] -> [T, H, D]``."""
        # in float64: a position next to a multiple of the length must fall on the right side
        steps = ((positions.double() + 1) / self.length).floor()
        grown = rowwise(torch.log1p, steps) if MODE.on else steps.log1p()
        factor = (1 + self.scale * grown).to(wide(q.dtype))[:, None, None]
        # a factor rounded to half precision would move all scores of a query in the same direction
        return (q * factor).to(q.dtype)


class Attention(nn.Module):
    """Projection to queries, keys and values, optional norm of queries and keys, rotation, attention, projection back.

    Query head ``i`` reads key-value head ``i // (num_heads / num_kv_heads)``. The computation derives the numbers of
    heads from the output width of ``qkv``, so that the layer also works on a part of its heads.

    Args:
        hidden_size: ``h``.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: features per head, ``D``.
        inner: the attention between the projections, such as :class:`InnerAttention`.
        qkv_bias: whether the projection to queries, keys and values has biases.
        proj_bias: whether the projection back has a bias.
        q_norm: norm over the features of each query head, or None.
        k_norm: norm over the features of each key head, or None.
        norm_whole: the norms are over the features of all heads together.
        gate: multiply the output of the inner attention by the sigmoid of one more projection of the input, feature by
            feature (https://arxiv.org/abs/2505.06708).
        temperature: scales queries by their position, or None.
        sink: whether each head has a learned sink, for an inner attention with the softmax ``learnable``.
        input_size: width of the input. None: ``hidden_size``, which is that of the output.
        rotary: name of the rotary table in the context. None means no rotation.
        division: name of the division in the context that attention stays inside of. None: the sequences.
        std: standard deviation of the initial ``qkv`` weights.
        proj_std: standard deviation of the initial ``proj`` weights.

    Attributes:
        narrows: whether the projection back computes the rows of the context alone; see
            :meth:`megalight.nn.TransformerLayer.narrow`.
    """

    narrows: bool = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        inner: nn.Module,
        *,
        qkv_bias: bool = False,
        proj_bias: bool = False,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        norm_whole: bool = False,
        gate: bool = False,
        temperature: Temperature | None = None,
        sink: bool = False,
        input_size: int | None = None,
        rotary: str | None = None,
        division: str | None = None,
        std: float = 0.02,
        proj_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rotary = rotary
        self.division = division
        queries = Section("q", num_heads * head_dim, num_heads)
        # Heads are the units of a section: a part of the layer holds whole heads.
        keys, values = (Section(name, num_kv_heads * head_dim, num_kv_heads) for name in "kv")
        gates = (Section("gate", num_heads * head_dim, num_heads),) if gate else ()
        # the gate is a section of the same projection: one product, and gathered tokens serve all sections
        self.qkv = Linear(input_size or hidden_size, (queries, keys, values, *gates), bias=qkv_bias, std=std)
        self.temperature = temperature
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.norm_whole = norm_whole
        self.sink = AttentionSink(num_heads, std) if sink else None
        self.inner = inner
        self.proj = Linear(num_heads * head_dim, hidden_size, bias=proj_bias, std=proj_std)

    @property
    def heads(self) -> tuple[int, int]:
        """Numbers of query heads and key-value heads in the output of ``qkv``."""
        # From the output, not from the arguments: the layer may hold only a part of its heads.
        queries, keys, *_ = self.qkv.section_sizes
        return queries // self.head_dim, keys // self.head_dim

    def make_state(self, slots: Slots) -> KeysAndValues:
        """Make the state: keys and values of every token that later ones see."""
        return KeysAndValues.of(slots, self.inner.span if isinstance(self.inner, InnerAttention) else None)

    def forward(self, hidden: Tensor, context: LayerContext, state: Any = None, memory: Tensor | None = None) -> Tensor:
        """``[T, h] -> [T, h]``, or ``[M, h]`` if it narrows. The inner attention gets what is stored.

        ``memory`` is unused: it is for cross attention.
        """
        # As in the layer: attribute access of modules costs a microsecond each.
        modules: dict[str, Any] = self._modules
        table = None if self.rotary is None else context.rotary[self.rotary]
        projection = modules["qkv"]
        qkv, gate = projection(hidden), None
        sequences = context.sequences if self.division is None else context.divisions[self.division]
        # After earlier tokens, one op rotates and stores.
        keeps, pages = isinstance(state, KeysAndValues), sequences.pages
        appended = keeps and state.read_after(pages)
        if len(sizes := projection.section_sizes) == 4:
            # The gate lies after the values, so that the first three sections stay one tensor
            # for the fused rotation.
            qkv, gate = torch.split(qkv, [sum(sizes[:3]), sizes[3]], dim=-1)
        # In batch-invariant mode one kernel rotates in all passes: each rounds sums of products in its own way.
        early = MODE.on or not appended
        q, k, v = self._heads(qkv, sizes, table if early else None)
        if appended:
            q, state = state.append(q, k, v, pages, None if early else table)
        elif keeps:
            # Keys are stored after their rotation, so that earlier tokens need no table.
            state.store(k, v, pages)
            state = None
        if self.temperature is not None:
            # After rotation, and before the product with keys. Keys need no factor: a factor of a query
            # scales all of its scores.
            q = self.temperature(q, context.sequences.positions)
        sink = () if self.sink is None else (self.sink(),)
        mixed: Tensor = modules["inner"](q, k, v, sequences, state, *sink)
        mixed = mixed.flatten(1)
        if self.narrows and (rows := context.rows) is not None:
            mixed, gate = take_rows(mixed, rows), None if gate is None else take_rows(gate, rows)
        # The gate multiplies features before `proj`, while heads are still apart.
        if gate is not None:
            mixed = mixed * (rowwise(torch.sigmoid, gate) if MODE.on else gate.sigmoid())
        projected: Tensor = modules["proj"](mixed)
        return projected

    def _heads(self, qkv: Tensor, sizes: Sequence[int], rotary: RotaryTable | None) -> tuple[Tensor, Tensor, Tensor]:
        """``[T, q|k|v] -> q [T, H, D], k, v [T, Hkv, D]``, normed and rotated."""
        # without norms between them, one op splits and rotates in a single pass over memory
        if rotary is not None and self.q_norm is None and self.k_norm is None:
            # Nothing else reads the projection, unless a gate is a part of it.
            elided = len(sizes) == 3 and gradient_is_elided(self.qkv, qkv)
            heads = sizes[0] // self.head_dim, sizes[1] // self.head_dim
            return rotary.rotate_qkv(qkv, *heads, self.head_dim, elided)
        parts = torch.split(qkv, list(sizes[:3]), dim=-1)
        q, k, v = (part.view(len(part), -1, self.head_dim) for part in parts)
        # Norms come before the rotation, as in the models that have them: a norm's weight differs between the
        # two features that a rotation mixes.
        q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        return (q, k, v) if rotary is None else (rotary.rotate(q), rotary.rotate(k), v)

    def _normed(self, heads: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is None:
            return heads
        # Over all heads together, or over each head alone.
        out: Tensor = norm(heads.flatten(1)).view_as(heads) if self.norm_whole else norm(heads)
        return out


@dataclass(frozen=True, eq=False)
class DraftState:
    """Keys and values of the steps so far; the first ones are of real tokens."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add those of a step, ``[T, Hkv, D]``."""
        self.keys.append(k)
        self.values.append(v)


class DraftAttention(nn.Module):
    """The part of attention between the projections, in place of :class:`~megalight.nn.InnerAttention`.

    In training a guess sees the real tokens up to its place, and the earlier guesses at its place. In generation
    guesses are tokens like others, and attention is causal.

    Args:
        scale: factor of the scores. None means ``1 / sqrt(D)``.
    """

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: PackedSequences,
        state: DraftState | StoredHeads | None = None,
    ) -> Tensor:
        """``q [T, H, D], k, v [T, Hkv, D] -> [T, H, D]``. A :class:`DraftState` gets ``k`` and ``v``."""
        if isinstance(state, DraftState):
            state.append(k, v)
            return draft_attention(q, state.keys, state.values, sequences, scale=self.scale)
        if state is not None:
            return paged_attention(q, *state[:3], scale=self.scale, scales=state.scales, rotary_pool=state.rotary)
        return attention(q, k, v, sequences, scale=self.scale)


class DraftLatentAttention(LatentAttention):
    """Latent attention of a draft model. In training its state is a :class:`DraftState` of keys and values."""

    def forward(self, hidden: Tensor, context: LayerContext, state: Any = None, memory: Tensor | None = None) -> Tensor:
        """``[T, input_size] -> [T, h]``. ``memory`` is unused."""
        if not isinstance(state, DraftState):
            return super().forward(hidden, context, state)
        q, latent, key = self._latents(hidden, context)
        return self._project(self.inner(q, *self._keys_values(latent, key), context.sequences, state))
