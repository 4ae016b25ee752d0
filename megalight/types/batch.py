"""Token batches: tokens with labels, a loss and its totals, and what a frozen model stored for them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from megalight.errors import ConfigurationError, DataError
from megalight.types.packed_sequences import PackedSequences, check_length


class Opaque:
    """A base class for arguments that are compared by identity, whatever they hold.

    Two calls have the same form only if both get the same object. Its tensors keep their addresses, and recorded work
    reads and writes them there.
    """


Totals: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]
"""Metric name -> (sum, count); the metric is their :func:`mean`. ``"loss"`` is always among them."""


@dataclass(frozen=True, eq=False)
class Loss:
    """The loss of one micro-batch, as a sum over its tokens.

    Attributes:
        sum: scalar with gradient: the sum of the token losses. It is divided by the token count of the whole global
            batch, so the result does not depend on the micro-batch size or on data parallelism.
        aux_losses: name -> scalar with gradient, which is added to the objective. A mean (for example a load-balancing
            loss) is averaged over the micro-batches of all data-parallel ranks. A sum, whose count the task's
            ``aux_loss_counts`` returns, is divided by the count of the whole global batch.
        metrics: name -> ``(sum, count)``, detached. They are logged as sums over all ranks, ``sum / count``.

    Raises:
        ConfigurationError: a metric is no pair of tensors, or another value is no tensor.
    """

    sum: Tensor
    aux_losses: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("sum", self.sum), *self.aux_losses.items()):
            if not isinstance(value, Tensor):
                raise ConfigurationError(f"Loss: {name!r} is a {type(value).__name__}; it must be a tensor.")
        for name, pair in self.metrics.items():
            if not isinstance(pair, tuple) or [isinstance(value, Tensor) for value in pair] != [True, True]:
                raise ConfigurationError(
                    f"Loss: the metric {name!r} is {pair!r}; it must be (sum, count), two tensors, whose sums over all "
                    "ranks are divided. For a mean over micro-batches give (value, torch.tensor(1))."
                )

    def detach(self) -> Loss:
        """Return the same values without the autograd graph."""
        # Metrics are detached already.
        return Loss(self.sum.detach(), {name: x.detach() for name, x in self.aux_losses.items()}, self.metrics)


def mean(total: Tensor, count: Tensor) -> Tensor:
    """``total / count`` of detached sums, and 0 where nothing counted. Counts may be any weights: 0.5 divides too."""
    # No branch on the count, for which the host would wait: 0 / 0 is NaN, which is replaced.
    return (total / count).masked_fill(count == 0, 0)


def inverse(count: Tensor) -> Tensor:
    """``1 / count``, and 0 where nothing counted: a factor for sums with gradient, whose gradient is then 0 too."""
    # As a quotient, the backward would divide a gradient of zero by zero, which is NaN.
    return count.reciprocal().masked_fill(count == 0, 0)


@dataclass(frozen=True, eq=False)
class TopTokens:
    """For each token, the ``K`` most likely next ones of a teacher, and one bucket for all others.

    Attributes:
        ids: ``[..., K]`` int32, different ones for each token.
        log_probs: ``[..., K]``: their log-probabilities.
        log_rest: ``[...]``: the logarithm of what all others have together; ``-inf`` if there are none.
    """

    ids: Tensor
    log_probs: Tensor
    log_rest: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> TopTokens:
        """Return the same after a change of every tensor."""
        return TopTokens(change(self.ids), change(self.log_probs), change(self.log_rest))

    @classmethod
    def stack(cls, rows: Sequence[TopTokens]) -> TopTokens:
        """Return those of several samples, along a new first dim."""
        return cls(*(torch.stack([getattr(row, name) for row in rows]) for name in ("ids", "log_probs", "log_rest")))


@dataclass(frozen=True, eq=False)
class BaseStates:
    """What a draft reads of its base.

    Attributes:
        hidden: ``[..., h]``: the last hidden states, normed.
        auxiliary: ``[..., n h]``: those after some of the layers, side by side.
    """

    hidden: Tensor
    auxiliary: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> BaseStates:
        """Return the same after a change of every tensor."""
        return BaseStates(change(self.hidden), change(self.auxiliary))

    @classmethod
    def stack(cls, rows: Sequence[BaseStates]) -> BaseStates:
        """Return those of several samples, along a new first dim."""
        return cls(torch.stack([row.hidden for row in rows]), torch.stack([row.auxiliary for row in rows]))


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Rows of tokens with their labels: what data sets of language models yield and their training steps take.

    Attributes:
        tokens: ``[B, S]`` int64 inputs.
        labels: ``[B, S]`` int64: the token that follows each input.
        loss_mask: ``[B, S]`` float32: 1 where the label counts in the loss, 0 elsewhere.
        document_lengths: for each row, the lengths of its documents, which sum to ``S``. Attention then stays inside
            documents, and positions restart at each. None: a row is one sequence.
        share: set by :meth:`context_share`: how the tokens of this context-parallel share divide into sequences.
            None: the batch holds whole sequences.
        later: set by :meth:`context_share`: the shares of :meth:`shifted` by 1, 2 and so on.
        axis_positions: ``[B, A, S]`` int64: the position of each token on several axes, such as time, height and width
            (:meth:`PackedSequences.with_axes`). None: tokens have one position. A share keeps them in ``share``.
        places: set by :meth:`context_share`: ``[T]``, the place of each token of the share among the tokens of the
            whole batch, packed. That of padding is 0.
        cached_outputs: ``[B, S]``: what a teacher predicts after each token, or what a base makes of it, from a store.
            None: there is no store.
        rows: ``[M]`` int64: which of all tokens, packed, count in the loss, so that a model can skip others
            behind its last mixer; see :meth:`with_rows`. None: unknown, or all or none do. A share has none.
        row_counts: how many each sample has, on the host; empty if unknown.
        columns: name -> ``[B, S]``: what else is known of each label, such as its reward. A share has 0 for padding.

    Who lets more tokens count, by another loss mask, leaves out ``rows`` and ``row_counts``.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    document_lengths: tuple[tuple[int, ...], ...] | None = None
    share: PackedSequences | None = None
    later: tuple[TokenBatch, ...] = ()
    axis_positions: Tensor | None = field(default=None, kw_only=True)
    places: Tensor | None = field(default=None, kw_only=True)
    cached_outputs: TopTokens | BaseStates | None = field(default=None, kw_only=True)
    rows: Tensor | None = field(default=None, kw_only=True)
    row_counts: tuple[int, ...] = field(default=(), kw_only=True)
    columns: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def sequences(self) -> PackedSequences:
        """How the tokens, packed, divide into sequences; on the device of the tokens.

        Raises:
            DataError: the document lengths of a row do not sum to its length.
        """
        # A share knows its sequences; rows and documents no longer say anything about them.
        if self.share is not None:
            return self.share
        batch, length = self.tokens.shape
        if self.axis_positions is not None:
            rows = replace(self, axis_positions=None).sequences
            return rows.with_axes(self.axis_positions.transpose(0, 1).flatten(1))
        if self.document_lengths is None:
            return PackedSequences.of_uniform(batch, length, self.tokens.device)
        # Checked when it is used: a wrong sum would shift all documents behind it.
        if [sum(row) for row in self.document_lengths] != [length] * batch:
            raise DataError(
                f"the document lengths of the rows sum to {[sum(row) for row in self.document_lengths][:8]}, but the "
                f"batch has {batch} rows of {length} tokens. The document lengths of each row must sum to its length."
            )
        return PackedSequences.of_lengths([n for row in self.document_lengths for n in row], self.tokens.device)

    def with_rows(self) -> Self:
        """Return the batch with ``rows`` and ``row_counts`` from the loss mask. On a GPU, this makes the host wait."""
        counted = self.loss_mask != 0
        rows = counted.flatten().nonzero().flatten()
        if len(rows) in (0, counted.numel()):
            return replace(self, rows=None, row_counts=())
        return replace(self, rows=rows, row_counts=tuple(counted.sum(1).tolist()))

    def split(self, size: int) -> list[TokenBatch]:
        """Split into micro-batches of ``size`` rows; the last may have fewer. The tensors are views, not copies.

        Raises:
            DataError: this batch is a context-parallel share.
        """
        if self.share is not None:
            raise DataError(
                "a context-parallel share cannot be split into micro-batches; split the whole batch first, then take "
                "the share of each micro-batch."
            )
        parts = [slice(start, min(start + size, len(self))) for start in range(0, len(self), size)]
        documents, axes = self.document_lengths, self.axis_positions
        return [
            self._with_rows_of(
                part,
                TokenBatch(
                    self.tokens[part],
                    self.labels[part],
                    self.loss_mask[part],
                    None if documents is None else documents[part],
                    axis_positions=None if axes is None else axes[part],
                    cached_outputs=None
                    if self.cached_outputs is None
                    else self.cached_outputs.each(operator.itemgetter(part)),
                    columns=self._each_column(operator.itemgetter(part)),
                ),
            )
            for part in parts
        ]

    def _with_rows_of(self, part: slice, batch: TokenBatch) -> TokenBatch:
        """Return a batch of some samples of this one, with their rows."""
        counts = self.row_counts[part]
        if self.rows is None or sum(counts) in (0, batch.tokens.numel()):
            return batch
        first = sum(self.row_counts[: part.start])
        rows = self.rows[first : first + sum(counts)] - part.start * self.tokens.shape[1]
        return replace(batch, rows=rows, row_counts=counts)

    def shifted(self, by: int) -> TokenBatch:
        """Return the tokens, labels and loss mask ``by`` places later in the same sequence (multi-token prediction).

        Behind the end of a sequence, all three are 0, so nothing counts in the loss there.

        Raises:
            DataError: this is a context-parallel share that was cut without tokens so much later.
        """
        if self.share is not None:
            if by > len(self.later):
                raise DataError(
                    f"a context-parallel share has tokens up to {len(self.later)} places later, not {by}: they lie in "
                    "other shares. Cut it with context_share(..., ahead=...)."
                )
            return self.later[by - 1]
        sequences = self.sequences
        # by sequence and not by row: the next document of a row must not show in this one
        behind = (sequences.positions + by >= sequences.expand(sequences.sizes)).view(self.tokens.shape)

        def shift(rows: Tensor) -> Tensor:
            return rows.reshape(-1).roll(-by).view(rows.shape).masked_fill(behind, 0)

        return replace(
            self,
            tokens=shift(self.tokens),
            labels=shift(self.labels),
            loss_mask=shift(self.loss_mask),
            cached_outputs=None,
            rows=None,
            row_counts=(),
            columns={},
        )

    def context_share(self, rank: int, size: int, multiple: int = 1, ahead: int = 0) -> TokenBatch:
        """Take the part of every sequence that one context-parallel rank holds (:meth:`PackedSequences.zigzag`).

        Padding carries no loss. Rows of one sequence each stay rows, ``[B, S / size]``. Rows of several documents
        become one row.

        Args:
            multiple: the number of tokens of the share is a multiple of this.
            ahead: how many places later :meth:`shifted` must reach.

        Raises:
            DataError: rows have fewer tokens than ``2 * size`` chunks. Short documents inside a row are padded instead.
        """
        if size == 1:
            return self
        check_length(self.tokens.shape[1], size)
        share, index = self.sequences.zigzag(rank, size, multiple)
        # Documents are packed into one row: after the cut they no longer align with rows.
        shape = (1, share.num_tokens) if self.document_lengths is not None or share.uniform is None else share.uniform
        padding, places = index < 0, index.clamp(min=0)

        # Index 0 stands for padding, and the mask below overwrites what it took.
        def take(rows: Tensor) -> Tensor:
            return rows.reshape(-1)[places].masked_fill(padding, 0).view(shape)

        # Whole rows of padding have no loss, so their cached outputs may be those of any token.
        cached_outputs = None
        if self.cached_outputs is not None:
            cached_outputs = self.cached_outputs.each(
                lambda rows: rows.flatten(0, 1)[places].view(*shape, *rows.shape[2:])
            )

        def cut(batch: TokenBatch) -> TokenBatch:
            return TokenBatch(take(batch.tokens), take(batch.labels), take(batch.loss_mask), share=share)

        # shifted before the cut: a share's next token may be the first of another share
        later = tuple(cut(self.shifted(by)) for by in range(1, ahead + 1))
        return replace(
            cut(self), later=later, places=places, cached_outputs=cached_outputs, columns=self._each_column(take)
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenBatch:
        """Copy to ``device``. Copies from page-locked memory never make the host wait."""
        # From pinned memory a copy is asynchronous, and the batch is not written again.
        non_blocking, axes = non_blocking or self.tokens.is_pinned(), self.axis_positions
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            loss_mask=self.loss_mask.to(device, non_blocking=non_blocking),
            share=None if self.share is None else self.share.to(device, non_blocking),
            later=tuple(batch.to(device, non_blocking) for batch in self.later),
            places=None if self.places is None else self.places.to(device, non_blocking=non_blocking),
            axis_positions=None if axes is None else axes.to(device, non_blocking=non_blocking),
            cached_outputs=None
            if self.cached_outputs is None
            else self.cached_outputs.each(lambda rows: rows.to(device, non_blocking=non_blocking)),
            rows=None if self.rows is None else self.rows.to(device, non_blocking=non_blocking),
            columns=self._each_column(lambda column: column.to(device, non_blocking=non_blocking)),
        )

    def pin_memory(self) -> TokenBatch:
        """Copy to page-locked host memory."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            labels=self.labels.pin_memory(),
            loss_mask=self.loss_mask.pin_memory(),
            share=None if self.share is None else self.share.pin_memory(),
            later=tuple(batch.pin_memory() for batch in self.later),
            places=None if self.places is None else self.places.pin_memory(),
            axis_positions=None if self.axis_positions is None else self.axis_positions.pin_memory(),
            cached_outputs=None if self.cached_outputs is None else self.cached_outputs.each(Tensor.pin_memory),
            rows=None if self.rows is None else self.rows.pin_memory(),
            columns=self._each_column(Tensor.pin_memory),
        )

    def _each_column(self, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {name: change(column) for name, column in self.columns.items()}


@dataclass(frozen=True, eq=False)
class WithResults:
    """What ``forward_step`` and ``loss_step`` get in place of a micro-batch in a run with frozen models.

    Attributes:
        results: name of a frozen model -> what its last chunk returned for this micro-batch.
    """

    batch: Any
    results: Mapping[str, Mapping[str, Tensor]]


def opened(batch: Any) -> tuple[Any, Mapping[str, Mapping[str, Tensor]]]:
    """Return a micro-batch without results, and the results; none if no frozen model ran."""
    return (batch.batch, batch.results) if isinstance(batch, WithResults) else (batch, {})


@dataclass  # not frozen: Lightning moves batches to the device by copying dataclasses field by field
class Empty:
    """A batch, or a micro-batch, that runs like ``batch`` and contributes nothing."""

    batch: Any


def is_empty(batch: Any) -> bool:
    """Whether a micro-batch contributes nothing."""
    return isinstance(batch, Empty)


def contents(batch: Any) -> Any:
    """Return the batch to run for a micro-batch."""
    return batch.batch if isinstance(batch, Empty) else batch


def emptied(batch: Any) -> Empty:
    """Return the same batch, marked to contribute nothing."""
    return Empty(contents(batch))


def nothing(loss: Loss) -> Loss:
    """Return the loss of an empty micro-batch: zero, with a gradient of zero through the same graph.

    If the loss is not finite, its gradient is not zero. But then that of the real micro-batch is not finite either.
    """
    aux_losses = {name: value * 0 for name, value in loss.aux_losses.items()}
    metrics = {name: (torch.zeros_like(a), torch.zeros_like(b)) for name, (a, b) in loss.metrics.items()}
    # Times zero, and not a new zero: the graph stays, so the backward takes part in its collectives.
    return Loss(loss.sum * 0, aux_losses, metrics)
