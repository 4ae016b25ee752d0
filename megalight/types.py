"""The few types that every floor shares: packed sequences, token batches, losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from megalight.errors import DataError


@lru_cache(maxsize=64)
def _uniform_tensors(batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # cached: what validation makes first, training must be able to save for backward
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
        return offsets, torch.arange(length, device=device).repeat(batch)


def _to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host integers as a device tensor, without making the host wait for the device."""
    tensor = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """How ``T`` tokens, laid end to end, divide into sequences.

    Everything a host needs to plan work (lengths, the longest, uniformity) is a Python integer, so that no code waits
    for the device to learn a shape.

    Attributes:
        lengths: tokens of each sequence, on the host.
        cu_seqlens: ``[n + 1]`` int32, on the device: where each sequence starts, and ``T`` last.
        positions: ``[T]`` int64, on the device: each token's place in its own sequence, for rotary and learned
            embeddings.
        uniform: ``(batch, length)`` when all sequences are equally long: tensors may then be viewed as
            ``[batch, length, ...]`` at no cost, and dense attention kernels serve. None otherwise.
        num_padding: tokens at the end that :meth:`pad_to` added.
        keys: the description of keys and values where it differs from the queries' (caches, cross attention);
            None means the same. ``keys.lengths[i]`` belongs to query sequence ``i``, and queries are its *last*
            tokens (bottom-right causal alignment).
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    positions: Tensor
    uniform: tuple[int, int] | None = None
    num_padding: int = 0
    keys: PackedSequences | None = None

    @classmethod
    def of_uniform(cls, batch: int, length: int, device: torch.device | str = "cpu") -> PackedSequences:
        """``batch`` sequences of ``length`` tokens each. The device tensors are cached and shared: do not write."""
        offsets, positions = _uniform_tensors(batch, length, torch.device(device))
        return cls((length,) * batch, offsets, positions, (batch, length))

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedSequences:
        """Sequences of the given lengths. Equal lengths give the uniform form.

        Raises:
            DataError: a length below 1, or no sequence at all.
        """
        if not lengths or min(lengths) < 1:
            raise DataError(
                f"sequence lengths are {list(lengths)[:8]}; each must be at least 1, and one must be given."
            )
        if len(set(lengths)) == 1:
            return cls.of_uniform(len(lengths), lengths[0], device)
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        cu_seqlens = _to_device(offsets, torch.int32, torch.device(device))
        sizes = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
        starts = torch.repeat_interleave(cu_seqlens[:-1].long(), sizes, output_size=offsets[-1])
        positions = torch.arange(offsets[-1], device=device) - starts
        return cls(tuple(lengths), cu_seqlens, positions)

    @property
    def num_tokens(self) -> int:
        """``T``, padding included."""
        return sum(self.lengths)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @property
    def device(self) -> torch.device:
        """Where ``cu_seqlens`` and ``positions`` live."""
        return self.cu_seqlens.device

    def pad_to(self, multiple: int) -> PackedSequences:
        """The same sequences with ``T`` brought to a multiple by a dummy last sequence (none when it is one already).

        Keys that differ get a dummy sequence of the same length.
        """
        missing = -self.num_tokens % multiple
        return self._with_dummy(missing) if missing else self

    def _with_dummy(self, length: int) -> PackedSequences:
        lengths = (*self.lengths, length)
        return PackedSequences(
            lengths,
            cu_seqlens=torch.cat([self.cu_seqlens, self.cu_seqlens[-1:] + length]),
            positions=torch.cat([self.positions, torch.arange(length, device=self.device)]),
            uniform=(len(lengths), length) if set(lengths) == {length} else None,
            num_padding=self.num_padding + length,
            keys=self.keys._with_dummy(length) if self.keys is not None else None,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedSequences:
        """A copy on ``device``."""
        return replace(
            self,
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
            positions=self.positions.to(device, non_blocking=non_blocking),
            keys=self.keys.to(device, non_blocking) if self.keys is not None else None,
        )

    def pin_memory(self) -> PackedSequences:
        """A copy in page-locked host memory."""
        return replace(
            self,
            cu_seqlens=self.cu_seqlens.pin_memory(),
            positions=self.positions.pin_memory(),
            keys=self.keys.pin_memory() if self.keys is not None else None,
        )


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Rows of tokens with their labels: what language-model datasets yield and language-model steps consume.

    Attributes:
        tokens: ``[B, S]`` int64 inputs.
        labels: ``[B, S]`` int64: the token that follows each input.
        loss_mask: ``[B, S]`` float32: 1 where the label counts in the loss.
        document_lengths: for each row, the lengths of the documents it holds (they sum to ``S``): attention then does
            not cross documents and positions restart. None: a row is one sequence.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    document_lengths: tuple[tuple[int, ...], ...] | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def sequences(self) -> PackedSequences:
        """The packed form of the rows, on the tokens' device.

        Raises:
            DataError: the documents of a row do not fill it exactly.
        """
        batch, length = self.tokens.shape
        if self.document_lengths is None:
            return PackedSequences.of_uniform(batch, length, self.tokens.device)
        if [sum(row) for row in self.document_lengths] != [length] * batch:
            raise DataError(
                f"rows hold documents of {[sum(row) for row in self.document_lengths][:8]} tokens in all; there are "
                f"{batch} rows of {length}. Give each row's document lengths so that they sum to its length."
            )
        return PackedSequences.of_lengths([n for row in self.document_lengths for n in row], self.tokens.device)

    def split(self, size: int) -> list[TokenBatch]:
        """Micro-batches of ``size`` rows (the last may be smaller): views, no copy."""
        rows = [slice(start, min(start + size, len(self))) for start in range(0, len(self), size)]
        documents = self.document_lengths
        return [
            TokenBatch(
                self.tokens[row], self.labels[row], self.loss_mask[row], None if documents is None else documents[row]
            )
            for row in rows
        ]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenBatch:
        """A copy on ``device``. From page-locked memory the host never waits for it."""
        non_blocking = non_blocking or self.tokens.is_pinned()
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            loss_mask=self.loss_mask.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> TokenBatch:
        """A copy in page-locked host memory."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            labels=self.labels.pin_memory(),
            loss_mask=self.loss_mask.pin_memory(),
        )


@dataclass(frozen=True, eq=False)
class Loss:
    """What one micro-batch contributes to the loss.

    Attributes:
        sum: scalar, with gradient: the sum of the losses of the micro-batch's tokens. It is divided by the token count
            of the whole global batch, so that nothing depends on micro-batch size or data parallelism.
        auxiliary: scalar losses with gradient that are means already (router balance and the like); each is averaged
            over micro-batches and data-parallel ranks and added to the objective.
        metrics: name -> ``(sum, count)``, detached; reported as global ``sum / count``.
    """

    sum: Tensor
    auxiliary: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
