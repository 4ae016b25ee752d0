"""Heads that all other heads read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megalight.nn import latent_attention
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register
from megalight.parallel.tensor.shared_head import ForAllHeads


@register
@dataclass(frozen=True)
class SharedHead(Style):
    """A head that every rank computes and all heads read (``nn.SharedHead``, the rotated key of latent attention).

    Under sequence parallelism, a rank computes it for its share of the tokens.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module:
        """Return a :class:`ForAllHeads`."""
        self.expect(name, module, latent_attention.SharedHead, replaced=self.splits(splitter.shared.mesh))
        # It has no parameters: only the backward differs, which sums the gradients of all ranks' heads.
        return ForAllHeads(splitter.shared)
