"""Bridge communication: headers (names, shapes, dtypes, gradients) and rows of tensors between two meshes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.errors import LayoutError
from megalight.parallel.messages import Message, start


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a message.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        dim: the batch dim, along which tensors are concatenated and split.
        gradient: whether the sender needs its gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    gradient: bool

    @property
    def rows(self) -> int:
        """Size along the batch dim."""
        return self.shape[self.dim]

    def with_rows(self, rows: int) -> TensorSpec:
        """Return the same spec with another number of rows."""
        return replace(self, shape=(*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :]))

    def __str__(self) -> str:
        return f"{list(self.shape)} {_name(self.dtype)}{' that wants a gradient' * self.gradient}"


Header = dict[str, TensorSpec]
"""Specs by name, in the order in which all ranks send and receive the tensors."""


def encode(header: Header) -> bytes:
    """Encode a header as bytes."""
    table = {name: (spec.shape, _name(spec.dtype), spec.dim, spec.gradient) for name, spec in header.items()}
    return json.dumps(table).encode()


def decode(text: bytes) -> Header:
    """Decode a header written by :func:`encode`."""
    return {
        name: TensorSpec(tuple(shape), getattr(torch, dtype), dim, gradient)
        for name, (shape, dtype, dim, gradient) in json.loads(text).items()
    }


def joined(headers: Mapping[int, Header]) -> Header:
    """Return the header of the concatenated rows of all senders.

    Args:
        headers: global rank of the sender -> its header.

    Raises:
        LayoutError: the headers differ in more than their rows.
    """
    (first, reference), *others = headers.items()
    for rank, header in others:
        # Rows may differ, as replicas read different batches. Nothing else may: it would be
        # joined without an error.
        if _without_rows(header) != _without_rows(reference):
            raise LayoutError(
                f"ranks {first} and {rank} sent messages that cannot be joined: {_shown(reference)}; {_shown(header)}. "
                "Names, dtypes, required gradients and all sizes except the batch dim must be equal. Check that no "
                "replica skipped or repeated a message."
            )
    return {
        name: spec.with_rows(sum(header[name].rows for header in headers.values())) for name, spec in reference.items()
    }


def _without_rows(header: Header) -> Header:
    return {name: spec.with_rows(0) for name, spec in header.items()}


def _shown(header: Header) -> str:
    return ", ".join(f"{name} {spec}" for name, spec in header.items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Rows = Mapping[str, Sequence[int]]
"""Name of a tensor -> number of its rows for each peer."""

Parts = Sequence[tuple[int, Tensor]]
"""Tensors, each with the global rank that it goes to or comes from."""


@dataclass(frozen=True)
class Receiving(Message):
    """Receives in flight, with the rows that are not contiguous in their tensor, and their buffers."""

    strided: Sequence[tuple[Tensor, Tensor]]

    def wait(self) -> list[Tensor]:
        """Wait for all, and copy the buffers to their rows. On a GPU the current stream waits, not the host."""
        super().wait()
        # After all waits: the copies queue behind the receives on the same stream.
        for place, buffer in self.strided:
            place.copy_(buffer)
        return self.tensors


def send_rows(
    tensors: Mapping[str, Tensor], header: Header, rows: Rows, peers: Sequence[int], group: ProcessGroup
) -> Message:
    """Start to send each global rank in ``peers`` its rows."""
    # A split along a dim other than 0 is strided, and messages are contiguous. The copies live as long as the sends.
    return start(dist.isend, [(peer, part.contiguous()) for peer, part in _cut(tensors, header, rows, peers)], group)


def start_receive_rows(
    tensors: Mapping[str, Tensor], header: Header, rows: Rows, peers: Sequence[int], group: ProcessGroup
) -> Receiving:
    """Start to receive the rows of ``tensors`` from each global rank in ``peers``."""
    parts = _cut(tensors, header, rows, peers)
    # Contiguous rows are received in place; others land in a buffer, and `wait` copies them.
    buffers = [part if part.is_contiguous() else part.new_empty(part.shape) for _, part in parts]
    landing = [(peer, buffer) for (peer, _), buffer in zip(parts, buffers, strict=True)]
    strided = [(part, buffer) for (_, part), buffer in zip(parts, buffers, strict=True) if buffer is not part]
    return Receiving(**vars(start(dist.irecv, landing, group)), strided=strided)


def _cut(tensors: Mapping[str, Tensor], header: Header, rows: Rows, peers: Sequence[int]) -> Parts:
    """Return views of the rows of each peer, in the same order on both sides."""
    return [
        (peer, part)
        for name, tensor in tensors.items()
        # Detached: bytes travel, and autograd must not record the views.
        for peer, part in zip(peers, torch.split(tensor.detach(), list(rows[name]), header[name].dim), strict=True)
    ]
