"""The output layer, split over ``tp`` by vocabulary, and its cross entropy."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.nn.head import Lesson
from megalight.ops.cross_entropy import linear_cross_entropy
from megalight.ops.divergence import Projection, linear_divergence
from megalight.ops.top_token import top_token
from megalight.parallel.collectives import all_gather, copy, join
from megalight.parallel.tensor.column import column_linear
from megalight.parallel.tensor.shared import Shared, Tokens


class VocabLinear(nn.Module):
    """Projection to this rank's rows of the vocabulary.

    Args:
        weight: ``[rows, h]``: this rank's rows, padding included.
        bias: ``[rows]`` or None.
        vocab_size: number of rows of all ranks, without padding.
        shared: the state that all tensor-parallel layers share.
        tokens: the tokens that the layer receives under sequence parallelism.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        vocab_size: int,
        shared: Shared,
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

    def forward(self, hidden: Tensor) -> Tensor:
        """``[T/tp, h]`` under sequence parallelism, else ``[T, h] ->`` unpadded logits ``[T, V]`` on every rank."""
        # `[T, V/tp]`; the last rank's padding is cut off after the join.
        logits = column_linear(hidden, self.weight, self.bias, self.shared, self.tokens)
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
        self, hidden: Tensor, labels: Tensor, softcap: float | None, lesson: Lesson
    ) -> tuple[Tensor, Tensor | None]:
        """Divergences from a teacher ``[T]`` and losses ``[T]`` or None, equal on every rank.

        The lesson's hidden states are those of all tokens, and its weight has the same rows as this one.
        """
        return linear_divergence(
            Projection(self._whole(hidden), self.weight, self.bias, softcap),
            lesson.teacher,
            labels,
            first_row=self.first_row,
            num_rows=self.vocab_size,
            combine=functools.partial(combine, group=self.shared.group),
            **lesson.options,
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
        self, hidden: Tensor, labels: Tensor | None = None, *, normed: bool = False, lesson: Lesson | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """``[T/tp, h]`` under sequence parallelism, else ``[T, h] ->`` losses ``[T]``; without labels: logits.

        With a lesson beside the labels: see :meth:`learn`. ``normed`` hidden states have passed another norm, and skip
        the one here.
        """
        if lesson is not None and labels is not None:
            return self.learn(hidden, labels, lesson, normed=normed)
        hidden = hidden if normed else self.norm(hidden)
        if labels is not None:
            return self.output_layer.losses(hidden, labels, self.softcap, self.backend)
        logits: Tensor = self.output_layer(hidden)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def learn(
        self, hidden: Tensor, labels: Tensor, lesson: Lesson, *, normed: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return divergences from the teacher ``[T]``, and losses ``[T]`` if the lesson asks for them."""
        hidden = hidden if normed else self.norm(hidden)
        return self.output_layer.learn(hidden, labels, self.softcap, lesson)

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
