"""Vocabulary-parallel embedding and output layer, with the cross entropy over a split vocabulary."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.nn.embedding_and_head import DistillationTarget
from megalight.ops.cross_entropy import linear_cross_entropy, top_token
from megalight.ops.divergence import Projection, linear_divergence
from megalight.ops.embedding import embedding
from megalight.parallel.collectives import all_gather, all_reduce, copy, join, reduce_scatter
from megalight.parallel.shared_state import SharedState, Tokens
from megalight.parallel.tensor.linear import column_linear


class VocabEmbedding(nn.Module):
    """One row per id; each rank looks up the ids of its own rows, and the results are summed.

    Args:
        weight: ``[rows, h]``: this rank's rows, padding included.
        num_embeddings: number of rows of the whole table.
        shared: the state that all tensor-parallel layers share.
        scatter_output: under sequence parallelism, return this rank's share of the tokens.
        padding_idx: an id whose row gets no gradient, or None.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        num_embeddings: int,
        shared: SharedState,
        *,
        scatter_output: bool = True,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.num_embeddings = num_embeddings
        self.embedding_dim = weight.shape[1]
        self.shared = shared
        self.scatter_output = scatter_output
        self.padding_idx = padding_idx
        self.first_row = shared.mesh.rank("tp") * weight.shape[0]

    def forward(self, ids: Tensor) -> Tensor:
        """``[T] -> [T/tp, h]`` under sequence parallelism with ``scatter_output``, else ``[T] -> [T, h]``.

        Raises:
            IndexError: an id is outside the vocabulary, as on one device (on GPUs, an assertion on the device).
        """
        local = ids - self.first_row
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        known = (ids >= 0) & (ids < self.num_embeddings)
        # An id outside the vocabulary becomes -1, so that the lookup raises instead of returning zeros.
        rows = torch.where(known, local.masked_fill(elsewhere, 0), -1)
        # Each id is a row on just one rank; all others contribute zeros, so the sum below is exact in any dtype.
        hidden = embedding(rows, self.weight, ~elsewhere)
        # torch's own `padding_idx` would mean a local row here, and negative values count from the end.
        if self.padding_idx is not None:
            hidden = torch.where((ids == self.padding_idx).unsqueeze(-1), hidden.detach(), hidden)
        if self.scatter_output and self.shared.sequence_parallel:
            # One reduce-scatter instead of an all-reduce and a cut: half of the traffic.
            return reduce_scatter(hidden, self.shared.group, self.shared.sequence_dim)
        shared = self.shared
        few = None if shared.group is None else shared.one_shot_for(self, hidden, self.embedding_dim)
        return all_reduce(hidden, shared.group) if few is None else few.all_reduce(hidden)

    def extra_repr(self) -> str:
        """Return local rows, all rows and width, for printing."""
        return f"{self.weight.shape[0]} of {self.num_embeddings} -> {self.embedding_dim}"


class VocabLinear(nn.Module):
    """Projection to this rank's rows of the vocabulary.

    Args:
        weight: ``[rows, h]``: this rank's rows, padding included.
        bias: ``[rows]`` or None.
        vocab_size: number of rows of all ranks, without padding.
        shared: the state that all tensor-parallel layers share.
        tokens: the tokens that the layer receives under sequence parallelism.

    Attributes:
        gather_output: whether every rank returns the logits of all rows. Otherwise it returns its own ``[T, rows]``,
            with padding.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        vocab_size: int,
        shared: SharedState,
        *,
        tokens: Tokens = "share",
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.vocab_size = vocab_size
        self.shared = shared
        self.tokens = tokens
        self.first_row = shared.mesh.rank("tp") * weight.shape[0]
        self.gather_output = True

    def forward(self, hidden: Tensor) -> Tensor:
        """``[T/tp, h]`` under sequence parallelism, else ``[T, h] ->`` unpadded logits ``[T, V]`` on every rank."""
        # `[T, V/tp]`; the last rank's padding is cut off after the join.
        logits = column_linear(hidden, self.weight, self.bias, self.shared, self.tokens)
        if not self.gather_output:
            return logits
        return join(logits, self.shared.group, logits.dim() - 1)[..., : self.vocab_size]

    def losses(self, hidden: Tensor, labels: Tensor, softcap: float | None, backend: str) -> Tensor:
        """Cross entropy ``[T]`` of labels ``[T]``, equal on every rank; no rank ever holds the logits of all rows."""
        return linear_cross_entropy(
            self._whole(hidden),
            self.weight,
            labels,
            bias=self.bias,
            softcap=softcap,
            first_row=self.first_row,
            num_rows=self.vocab_size,
            combine=functools.partial(combine, group=self.shared.group),
            backend=backend,
        )

    def learn(
        self, hidden: Tensor, labels: Tensor, softcap: float | None, target: DistillationTarget
    ) -> tuple[Tensor, Tensor | None]:
        """Divergences from a teacher ``[T]`` and losses ``[T]`` or None, equal on every rank.

        The hidden states of ``target`` are those of all tokens, and its weight has the same rows as this one.
        """
        return linear_divergence(
            Projection(self._whole(hidden), self.weight, self.bias, softcap),
            target.teacher,
            labels,
            first_row=self.first_row,
            num_rows=self.vocab_size,
            combine=functools.partial(combine, group=self.shared.group),
            **target.options,
        )

    def top(self, hidden: Tensor) -> Tensor:
        """Most likely token of each of all tokens ``[T]``, equal on every rank."""
        return top_token(
            self._whole(hidden),
            self.weight,
            self.bias,
            first_row=self.first_row,
            num_rows=self.vocab_size,
            choose=functools.partial(choose, group=self.shared.group),
        )

    def _whole(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all tokens, for an op that computes one term of their gradient."""
        tokens, group = self.shared.tokens(self.tokens), self.shared.group
        # The gather is outside the loss op, which runs chunk by chunk and would otherwise gather once per chunk. Its
        # backward reduce-scatters the hidden gradient, of which each rank has one term.
        if tokens == "share":
            return all_gather(hidden, group, self.shared.sequence_dim)
        return copy(hidden, group) if tokens == "whole" else hidden

    def extra_repr(self) -> str:
        """Return width, local rows and all rows, for printing."""
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]} of {self.vocab_size}, bias={self.bias is not None}"


class VocabHead(nn.Module):
    """Final norm, projection to the vocabulary and cross entropy.

    Args:
        norm: applied before the projection.
        output_layer: ``h -> V``.
        softcap: logits become ``softcap * tanh(logits / softcap)``; None leaves them unchanged.
        backend: backend of the loss op.
    """

    def __init__(self, norm: nn.Module, output_layer: VocabLinear, softcap: float | None, backend: str) -> None:
        super().__init__()
        self.norm = norm
        self.output_layer = output_layer
        self.softcap = softcap
        self.backend = backend

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        *,
        normed: bool = False,
        target: DistillationTarget | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """``[T/tp, h]`` under sequence parallelism, else ``[T, h] ->`` losses ``[T]``; without labels: logits.

        With ``target`` and labels: see :meth:`learn`. ``normed`` hidden states have passed another norm, and skip the
        one here.
        """
        if target is not None and labels is not None:
            return self.learn(hidden, labels, target, normed=normed)
        hidden = hidden if normed else self.norm(hidden)
        if labels is not None:
            return self.output_layer.losses(hidden, labels, self.softcap, self.backend)
        logits: Tensor = self.output_layer(hidden)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def learn(
        self, hidden: Tensor, labels: Tensor, target: DistillationTarget, *, normed: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return divergences from the teacher ``[T]``, and losses ``[T]`` if the target asks for them."""
        hidden = hidden if normed else self.norm(hidden)
        return self.output_layer.learn(hidden, labels, self.softcap, target)

    def top(self, hidden: Tensor, *, normed: bool = False) -> Tensor:
        """Return the most likely token of each of all tokens: ``[T]``, without a gradient."""
        return self.output_layer.top(hidden if normed else self.norm(hidden))


def choose(largest: Tensor, rows: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the row of the largest logit of all ranks; ``largest [T]`` and ``rows [T]`` are those of this rank."""
    if group is None:
        return rows
    best = largest.clone()
    dist.all_reduce(best, dist.ReduceOp.MAX, group)
    # Of equal logits the first row, as on one device.
    rows = rows.masked_fill(largest < best, torch.iinfo(rows.dtype).max)
    dist.all_reduce(rows, dist.ReduceOp.MIN, group)
    return rows


def combine(logsumexp: Tensor, target: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Combine each rank's ``logsumexp`` and target logits (0 if the label lies on another rank), of one shape."""
    if group is None:
        return logsumexp, target
    # Subtract the largest value first, as usual, so that exp does not overflow.
    # A copy, because the all-reduce works in place and the rank's own value is needed after it.
    largest = logsumexp.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    # One message for both: each is `[T]` float32, and latency dominates.
    sums = torch.stack([(logsumexp - largest).exp(), target])
    dist.all_reduce(sums, group=group)
    return largest + sums[0].log(), sums[1]


class ForAllHeads(nn.Module):
    """Brings a head to the ranks whose heads read it. Its gradient is the sum over their heads.

    Args:
        shared: the state that all tensor-parallel layers share.
    """

    def __init__(self, shared: SharedState) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """``[T/tp, D] -> [T, D]`` under sequence parallelism, else ``[T, D] -> [T, D]``."""
        shared = self.shared
        # each rank's heads see all tokens, so a sum over ranks is missing in both cases
        if shared.sequence_parallel:
            return all_gather(x, shared.group, shared.sequence_dim)
        return copy(x, shared.group)
