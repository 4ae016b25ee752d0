"""Rotary embedding of queries and keys by one kernel each, and causal attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalight.models.fused.part import Part
from megalight.ops.attention import attention
from megalight.ops.rotary import apply_rotary
from megalight.types import PackedSequences


class Rotary(Part):
    """Makes the tables of angles in float32, whatever the dtype of hidden states; the kernel rounds only its result."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``[B, S, D]`` of positions ``[B, S]``. ``x`` gives only the device."""
        tables: tuple[Tensor, Tensor] = super().forward(x.new_empty(0, dtype=torch.float32), position_ids)
        return tables


class Attention(Part):
    """Has the attributes of an attention of ``transformers``.

    It calls our attention where the decoder says that it is causal and has no mask, else the implementation in its
    configuration.
    """

    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    attention_dropout: float
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        sequences: PackedSequences | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs ``[B, S, h]`` and, if the implementation has them, weights.

        Args:
            hidden_states: ``[B, S, h]``.
            position_embeddings: cosines and sines ``[B or 1, S, D]``.
            attention_mask: mask for the implementation, or None.
            past_key_values: cache of earlier keys and values, or None.
            sequences: the lengths of the rows, if each token sees all earlier ones of its row. None: see the mask.
            kwargs: further arguments of the implementation.
        """
        batch, length = hidden_states.shape[:2]
        heads = (batch, length, -1, self.head_dim)
        query, key, value = (getattr(self, f"{name}_proj")(hidden_states).view(heads) for name in ("q", "k", "v"))
        # Qwen3 norms each head.
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = (_rows(table, batch) for table in position_embeddings)
        query, key = (apply_rotary(x.flatten(0, 1), cos, sin) for x in (query, key))
        dropout = self.attention_dropout if self.training else 0.0
        if sequences is not None and not dropout:
            packed = attention(query, key, value.flatten(0, 1), sequences, causal=True, scale=self.scaling)
            return self.o_proj(packed.reshape(batch, length, -1)), None
        query, key, value = (x.view(batch, length, -1, self.head_dim).transpose(1, 2) for x in (query, key, value))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        functions = self.beside("ALL_ATTENTION_FUNCTIONS")
        attend = functions.get_interface(self.config._attn_implementation, self.beside("eager_attention_forward"))
        # Each family keeps its window in another place. Llama has none.
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        if window is not None:
            kwargs["sliding_window"] = window
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.reshape(batch, length, -1).contiguous()), weights


def _rows(table: Tensor, batch: int) -> Tensor:
    """Return the first half of a table ``[B or 1, S, D]``, which the second repeats, as rows ``[B S, D/2]``."""
    half = table[..., : table.shape[-1] // 2]
    return half.expand(batch, -1, -1).flatten(0, 1)
