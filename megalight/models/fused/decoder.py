"""The decoder: training steps whose mask needs no look at the positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalight.models.fused.part import Part
from megalight.types import PackedSequences


class Decoder(Part):
    """Has the attributes of a decoder of ``transformers``.

    That looks for packed documents in the positions, for which the host waits in every step, or fills a cache that
    training never reads. Where the caller gives no positions, there are none to look for.
    """

    config: Any
    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    rotary_emb: nn.Module

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the output of ``transformers``: hidden states ``[B, S, h]`` after the last norm."""
        given = (attention_mask, position_ids, past_key_values)
        if not self.training or any(each is not None for each in given) or not self._is_plain(kwargs):
            return super().forward(
                input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **kwargs,
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, and not both.")
        hidden: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        batch, length = hidden.shape[:2]
        if self._windows_shorter_than(length):
            return super().forward(inputs_embeds=hidden, use_cache=False, **kwargs)
        positions = torch.arange(length, device=hidden.device).unsqueeze(0)
        tables = self.rotary_emb(hidden, position_ids=positions)
        sequences = PackedSequences.of_uniform(batch, length, hidden.device)
        for layer in self.layers[: self.config.num_hidden_layers]:
            # Without a mask, torch's attention is causal too: a layer that is not fused needs no other arguments.
            hidden = layer(hidden, attention_mask=None, position_embeddings=tables, sequences=sequences, **kwargs)
        return self.beside("BaseModelOutputWithPast")(last_hidden_state=self.norm(hidden))

    def _is_plain(self, kwargs: dict[str, Any]) -> bool:
        """Return whether the caller wants hidden states after the last norm and nothing else."""
        wanted = ("output_hidden_states", "output_attentions")
        recorded = any(kwargs.get(name) or getattr(self.config, name, False) for name in wanted)
        causal = getattr(self.config, "is_causal", True)
        return self.config._attn_implementation == "sdpa" and causal and not recorded and "is_causal" not in kwargs

    def _windows_shorter_than(self, length: int) -> bool:
        windows = (getattr(layer.self_attn, "sliding_window", None) for layer in self.layers)
        config = getattr(self.config, "sliding_window", None) if self.config.model_type == "mistral" else None
        return any(window is not None and window < length for window in (config, *windows))
