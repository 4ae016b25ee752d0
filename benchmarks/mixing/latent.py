"""Latent attention (MLA) of the size of DeepSeek-V3, beside torch and ``transformers``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.mixing import Case, Missing, Way, backends, need, packages, random, values
from megalight.nn import InnerAttention, LatentAttention, LayerContext, Rotary
from megalight.ops.attention import ATTENTION, attention
from megalight.types import PackedSequences


class Shapes:
    """One layer of DeepSeek-V3, or a tiny one."""

    def __init__(self, small: bool, device: str) -> None:
        self.device, self.tokens = device, 64 if small else 4096
        self.hidden, self.heads, self.q_rank, self.kv_rank = (64, 4, 32, 16) if small else (7168, 128, 1536, 512)
        self.head_dim, self.rotary_dim, self.value_dim = (16, 8, 16) if small else (128, 64, 128)
        self.rotary = Rotary(self.rotary_dim, interleaved=True)
        self.layer: LatentAttention = values(
            LatentAttention(
                self.hidden,
                self.heads,
                self.q_rank,
                self.kv_rank,
                self.head_dim,
                self.rotary_dim,
                self.value_dim,
                InnerAttention(scale=(self.head_dim + self.rotary_dim) ** -0.5),
                rotary="rotary",
            ).to("meta"),
            device,
        )
        # Two products forward, over half of all pairs of tokens; twice as many backward, and scores once more.
        sizes, pairs = (self.head_dim + self.rotary_dim, self.value_dim), self.tokens * (self.tokens + 1) / 2
        self.forward = 2.0 * self.heads * sum(sizes) * pairs
        self.backward = 2.0 * self.heads * (3 * sizes[0] + 2 * sizes[1]) * pairs

    def op(self) -> Case:
        """Return the attention between the projections."""
        size = self.head_dim + self.rotary_dim

        def make(tokens: int, backend: str) -> Way:
            sequences = PackedSequences.of_lengths([tokens], self.device)
            return Way(lambda q, k, v: attention(q, k, v, sequences, backend=backend))

        def dense(kernel: SDPBackend, padded: bool = False) -> Callable[[int], Way]:
            def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                v = F.pad(v, (0, q.shape[-1] - v.shape[-1])) if padded else v
                query, key, value = (t.transpose(0, 1)[None] for t in (q, k, v))
                with sdpa_kernel(kernel):
                    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
                return out[0].transpose(0, 1)[..., : self.value_dim]

            return lambda tokens: Way(fn)

        peers = {
            "torch cudnn": dense(SDPBackend.CUDNN_ATTENTION),
            "torch cudnn, padded": dense(SDPBackend.CUDNN_ATTENTION, padded=True),
            "torch efficient": dense(SDPBackend.EFFICIENT_ATTENTION),
            "torch flash, padded": dense(SDPBackend.FLASH_ATTENTION, padded=True),
        }
        return Case(
            "attention 192 | 128",
            (self.forward, self.forward + self.backward),
            self.tokens,
            lambda tokens: [random(self.device, tokens, self.heads, n) for n in (size, size, self.value_dim)],
            backends(ATTENTION, make, skip=("reference",)),
            lambda tokens: make(tokens, "reference"),
            {**peers, **packages(ATTENTION, make)},
        )

    def ours(self, tokens: int, backend: str = "auto", layer: LatentAttention | None = None) -> Way:
        layer = self.layer if layer is None else layer
        sequences = PackedSequences.of_lengths([tokens], self.device)
        dtype = layer.proj.weight.dtype
        context = LayerContext(sequences, {"rotary": self.rotary(sequences.positions, dtype)})
        choices = () if backend == "auto" else (("attention", backend),)
        return Way(lambda hidden: layer(hidden, context), tuple(layer.parameters()), choices)

    def theirs(self, tokens: int, compiled: bool) -> Way:
        """Return the layer of ``transformers`` with the same weights."""
        need("transformers")
        if compiled and self.device == "cpu":
            raise Missing("compiled for GPUs only: on a CPU it takes minutes")
        from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
            DeepseekV3Attention,
            DeepseekV3RotaryEmbedding,
        )

        config = DeepseekV3Config(
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            q_lora_rank=self.q_rank,
            kv_lora_rank=self.kv_rank,
            qk_nope_head_dim=self.head_dim,
            qk_rope_head_dim=self.rotary_dim,
            v_head_dim=self.value_dim,
            max_position_embeddings=self.tokens,
            rope_interleave=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            attn_implementation="sdpa",
        )
        layer: Any = DeepseekV3Attention(config, 0).to(self.device, torch.bfloat16).train()
        pairs = {
            "q_a_proj": self.layer.q_down,
            "q_a_layernorm": self.layer.q_latent_norm,
            "q_b_proj": self.layer.q_up,
            "kv_a_proj_with_mqa": self.layer.kv_down,
            "kv_a_layernorm": self.layer.kv_latent_norm,
            "kv_b_proj": self.layer.kv_up,
            "o_proj": self.layer.proj,
        }
        with torch.no_grad():
            for name, ours in pairs.items():
                layer.get_submodule(name).weight.copy_(ours.weight)  # type: ignore[union-attr]
        positions = torch.arange(tokens, device=self.device)[None]
        rotary = DeepseekV3RotaryEmbedding(config).to(self.device)
        table = rotary(torch.empty(0, dtype=torch.bfloat16, device=self.device), positions)
        run = torch.compile(layer) if compiled else layer
        return Way(lambda hidden: run(hidden[None], table, None)[0][0], tuple(layer.parameters()))

    def whole(self) -> Case:
        """Return the layer."""
        products = 2.0 * self.tokens * sum(p.numel() for p in self.layer.parameters() if p.ndim == 2)
        exact = copy.deepcopy(self.layer).double()
        names = [name for name in ATTENTION.names if name != "reference"]
        return Case(
            "layer",
            (products + self.forward, 3 * products + self.forward + self.backward),
            self.tokens,
            lambda tokens: [random(self.device, tokens, self.hidden)],
            {name: lambda tokens, name=name: self.ours(tokens, name) for name in ("auto", *names)},
            lambda tokens: self.ours(tokens, layer=exact),
            {
                "transformers": lambda tokens: self.theirs(tokens, False),
                "transformers, compiled": lambda tokens: self.theirs(tokens, True),
            },
            aim=1.0,
            tolerance=4e-2,
        )

    def cases(self) -> Iterator[Case]:
        yield self.op()
        yield self.whole()

    def said(self, times: dict[str, float]) -> list[str]:
        """Return nothing: the rows say all."""
        return []
