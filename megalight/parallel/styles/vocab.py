"""Embeddings that are split by vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalight.errors import LayoutError
from megalight.nn import Embedding
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register
from megalight.parallel.tensor import split
from megalight.parallel.tensor.embedding import VocabEmbedding


@register
@dataclass(frozen=True)
class Vocab(Style):
    """An embedding split over ``tp`` by vocabulary; rows are padded so that every rank has the same number.

    Attributes:
        scatter_output: under sequence parallelism, return this rank's share of the tokens. Switch it off if the model
            reads the length of the hidden states, and a later :class:`Boundary` splits them.
    """

    scatter_output: bool = True

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module:
        """Return a :class:`VocabEmbedding`."""
        embedding = self.expect(name, module, nn.Embedding, Embedding, replaced=self.splits(splitter.shared.mesh))
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option, None):
                raise LayoutError(f"{name}: an embedding with {option} cannot be split by vocabulary; unset it.")
        # The same rule as for an output layer, so that tied weights are split alike.
        weight = splitter.split(name, embedding, "weight", lambda parts, shape, mesh: split.vocabulary(parts[0], mesh))
        assert weight is not None
        return VocabEmbedding(
            weight,
            embedding.weight.shape[0],
            splitter.shared,
            scatter_output=self.scatter_output,
            padding_idx=getattr(embedding, "padding_idx", None),
        )
