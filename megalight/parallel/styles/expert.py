"""Stacks of experts that are divided by expert."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from megalight.errors import LayoutError
from megalight.nn.moe import Experts
from megalight.parallel.expert.gather import AllGatherDispatcher
from megalight.parallel.splitter import Splitter
from megalight.parallel.styles.style import Style, register
from megalight.parallel.tensor import split


@register
@dataclass(frozen=True)
class Expert(Style):
    """A stack of experts (``nn.moe.Experts``); each rank along ``ep`` keeps an equal number of experts.

    Every rank must provide its own tokens, so ``tp > 1`` needs sequence parallelism.
    """

    axis: ClassVar[str] = "ep"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module:
        """Return the same module with fewer experts, and a dispatcher that gets their tokens from other ranks."""
        experts: Experts = self.expect(name, module, Experts)
        shared = splitter.shared
        if shared.mesh.tp > 1 and not shared.sequence_parallel:
            raise LayoutError(
                f"{name}: tp={shared.mesh.tp} without sequence parallelism would send the same tokens to the experts "
                f"{shared.mesh.tp} times. Switch sequence_parallel on, or set tp=1."
            )
        if shared.mesh.etp > 1:
            raise LayoutError(f"{name}: etp={shared.mesh.etp}; experts are not split further. Set etp=1.")
        here = copy.copy(experts)
        here._modules = dict(experts._modules)
        here._parameters = {local: splitter.split(name, experts, local, split.stack) for local in experts._parameters}
        here.dispatcher = AllGatherDispatcher(shared, shared.mesh.rank("ep") * len(here.up))
        return here
