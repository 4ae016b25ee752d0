"""Styles of embeddings and heads: vocabulary parallel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalight.errors import LayoutError
from megalight.nn import Embedding, Linear, LMHead, StateComparison, latent_attention
from megalight.parallel import shard
from megalight.parallel.expert.dispatch import MeshPool
from megalight.parallel.shared_state import Tokens
from megalight.parallel.styles.boundaries import Boundary
from megalight.parallel.styles.style import Splitter, Style, register
from megalight.parallel.tensor import embedding_and_head
from megalight.parallel.tensor.embedding_and_head import ForAllHeads, VocabEmbedding


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
        weight = splitter.split(name, embedding, "weight", shard.vocabulary)
        assert weight is not None
        return VocabEmbedding(
            weight,
            embedding.weight.shape[0],
            splitter.shared,
            scatter_output=self.scatter_output,
            padding_idx=getattr(embedding, "padding_idx", None),
        )


@register
@dataclass(frozen=True)
class VocabHeadStyle(Style):
    """The output projection split over ``tp`` by vocabulary, together with its cross entropy if it has one.

    Attributes:
        tokens: the tokens that the layer receives.
    """

    tokens: Tokens = "share"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module:
        """Return a :class:`~.tensor.head.VocabHead` for an ``LMHead``, a ``VocabLinear`` for a linear layer."""
        replaced = self.splits(splitter.shared.mesh)
        whole = self.expect(name, module, LMHead, nn.Linear, Linear, replaced=replaced)
        is_head = isinstance(whole, LMHead)
        linear, path = (whole.output_layer, f"{name}.output_layer") if is_head else (whole, name)
        self.expect(path, linear, nn.Linear, Linear, replaced=replaced)
        weight, bias = (
            # A bias has one element per row, so it is cut and padded like the rows.
            splitter.split(path, linear, local, shard.vocabulary)
            for local in ("weight", "bias")
        )
        assert weight is not None
        layer = embedding_and_head.VocabLinear(
            weight, bias, linear.weight.shape[0], splitter.shared, tokens=self.tokens
        )
        if not is_head:
            return layer
        # By hand, because the splitter dresses only what replaces a whole module, and this
        # layer lies inside one.
        splitter.dress(layer, linear)
        if replaced:
            splitter.check_held(path, linear, layer)
        else:
            splitter.keep_rest(path, linear)
        # The splitter must not visit the inner layer again, by a rule for linear layers.
        splitter.done.add(id(linear))
        # Logits stay split: the loss must be part of the module that has them.
        return embedding_and_head.VocabHead(whole.norm, layer, whole.softcap, whole.backend)


@register
@dataclass(frozen=True)
class SharedHeadStyle(Style):
    """A head that every rank computes and all heads read (``nn.SharedHead``, the rotated key of latent attention).

    Under sequence parallelism, a rank computes it for its share of the tokens.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module:
        """Return a :class:`ForAllHeads`."""
        self.expect(name, module, latent_attention.SharedHead, replaced=self.splits(splitter.shared.mesh))
        # It has no parameters: only the backward differs, which sums the gradients of all ranks' heads.
        return ForAllHeads(splitter.shared)


@register
@dataclass(frozen=True)
class ComparisonStyle(Style):
    """A comparison (``nn.StateComparison``): each rank compares its share of the tokens, and gets all losses.

    Its first input are the teacher's states of all tokens, its second one this rank's share of the student's.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, and add hooks."""
        found: StateComparison = self.expect(name, module, StateComparison)
        splitter.keep(name, found, partial=splitter.shared.sequence_parallel)
        found.pool = MeshPool(splitter.shared)
        Boundary(enter="split", leave="join").add_to(found, splitter.shared)
