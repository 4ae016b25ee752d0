"""The layer context: what all layers of a forward pass share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from megalight.nn.aux_losses import AuxLosses, current
from megalight.nn.rotary import RotaryTable
from megalight.types import PackedSequences


@dataclass(frozen=True, eq=False)
class LayerContext:
    """Data that every layer can read during the forward pass of one micro-batch. It is made once for all layers.

    It holds no tensor that requires a gradient: recompute passes it on unchanged, a region of several layers checks
    that all get the same object, and layers in a CUDA graph share one copy. Tensors that require a gradient are
    separate arguments: hidden states, and the memory of cross attention.

    Attributes:
        sequences: how the tokens divide into sequences.
        rotary: rotary tables by name. Each mixer names the table it reads; a model with several bases has several.
        divisions: other ways in which the same tokens divide into sequences, by name, such as the windows of a vision
            tower. An attention that names one stays inside of its parts.
        rows: ``[M]`` int64: the tokens whose hidden states are read after the last layer, which returns only these if
            it can (:attr:`~megalight.nn.TransformerLayer.narrows`). None: all tokens.
        aux_losses: receives the losses of single layers. By default, the collector that is active now.
    """

    sequences: PackedSequences
    rotary: Mapping[str, RotaryTable] = field(default_factory=dict)
    divisions: Mapping[str, PackedSequences] = field(default_factory=dict, kw_only=True)
    rows: Tensor | None = field(default=None, kw_only=True)
    aux_losses: AuxLosses = field(default_factory=current)
