"""Decoder layers that add up the residual stream in their norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalight.models.fused.part import Part


class Layer(Part):
    """Has the attributes of a decoder layer of ``transformers``."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    @classmethod
    def fits(cls, module: Any) -> bool:
        """Return whether the norms of a layer are those of its family, which get a fused form."""
        norms = (module.input_layernorm, module.post_attention_layernorm)
        return all(type(norm).__module__ == type(module).__module__ for norm in norms)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """``[B, S, h] -> [B, S, h]``; further arguments are those of the attention."""
        normed, residual = self.input_layernorm(streamed(hidden_states), with_sum=True)
        attended = self.self_attn(hidden_states=normed, **kwargs)[0]
        normed, residual = self.post_attention_layernorm(attended, residual=residual, with_sum=True)
        return residual + self.mlp(normed)  # type: ignore[no-any-return]


def streamed(hidden: Tensor) -> Tensor:
    """Return hidden states in the dtype of autocast, if it is on: embeddings are float32 then."""
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden
