"""Gated MLPs whose activation and product are one kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megalight.models.fused.part import Part
from megalight.ops.activation import gated_pair

KINDS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
"""Name in a configuration of ``transformers`` -> name of our activation."""


class GatedMLP(Part):
    """Has the attributes of a gated MLP of ``transformers``."""

    config: Any
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    @classmethod
    def fits(cls, module: Any) -> bool:
        """Return whether our ops have the activation."""
        return module.config.hidden_act in KINDS

    def forward(self, x: Tensor) -> Tensor:
        """``[..., h] -> [..., h]``."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        hidden: Tensor = self.down_proj(gated_pair(gate, up, KINDS[self.config.hidden_act]))
        return hidden
