"""What all layers of a forward pass share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megalight.nn.rotary import RotaryTable
from megalight.nn.side_losses import SideLosses, current
from megalight.types import PackedSequences


@dataclass(frozen=True, eq=False)
class LayerContext:
    """What every layer may read in the forward pass of one micro-batch; made once, and the same for all layers.

    It holds no tensor with a gradient: recompute passes it on as it is, a region of several layers checks that all get
    the same object, and recorded layers share one copy of it. What wants a gradient is an argument of its own: hidden
    states, or the memory of cross attention.

    Attributes:
        sequences: how the tokens divide into sequences.
        rotary: rotary tables by name. A mixer says which one it reads; a model with several bases has several.
        side_losses: takes losses that arise in a layer: those of whoever collects them when the context is made.
    """

    sequences: PackedSequences
    rotary: Mapping[str, RotaryTable] = field(default_factory=dict)
    side_losses: SideLosses = field(default_factory=current)
