"""An embedding split over ``tp`` by vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalight.ops.embedding import embedding
from megalight.parallel.collectives import all_reduce, reduce_scatter
from megalight.parallel.tensor.shared import Shared


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
        shared: Shared,
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
        return all_reduce(hidden, self.shared.group)

    def extra_repr(self) -> str:
        """Return local rows, all rows and width, for printing."""
        return f"{self.weight.shape[0]} of {self.num_embeddings} -> {self.embedding_dim}"
