"""Output layers that are split by vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalight.nn import Linear, LMHead
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register
from megalight.parallel.tensor import head, split
from megalight.parallel.tensor.shared import Tokens


@register
@dataclass(frozen=True)
class VocabHead(Style):
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
            splitter.split(path, linear, local, lambda parts, shape, mesh: split.vocabulary(parts[0], mesh))
            for local in ("weight", "bias")
        )
        assert weight is not None
        layer = head.VocabLinear(weight, bias, linear.weight.shape[0], splitter.shared, tokens=self.tokens)
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
        return head.VocabHead(whole.norm, layer, whole.softcap, whole.backend)
