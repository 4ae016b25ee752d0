"""A mixture of experts as loops over tokens and experts, from its formulas."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.nn import Activation, LayerContext
from megalight.nn.aux_losses import AuxLosses
from megalight.nn.canonical import canonical_tensors
from megalight.nn.init import initialize
from megalight.nn.moe import BalanceConfig, Experts, MoE, Router, RouterConfig
from megalight.types import PackedSequences

WIDTH = 8


def layer(
    num_experts: int = 4,
    activation: str = "swiglu",
    config: RouterConfig | None = None,
    balance: BalanceConfig | None = None,
) -> MoE:
    router = Router(WIDTH, num_experts, config, balance, std=0.5)
    moe = MoE(router, Experts(num_experts, WIDTH, 6, Activation(activation), std=0.5, down_std=0.5)).double()
    initialize(moe, 3)
    return moe


def context(*lengths: int, losses: AuxLosses | None = None) -> LayerContext:
    sequences = PackedSequences.of_lengths(lengths or [1])
    return LayerContext(sequences) if losses is None else LayerContext(sequences, {}, losses)


def looped(moe: MoE, hidden: Tensor, weigh: Callable[[Tensor], dict[int, Tensor]]) -> Tensor:
    """Each token through its experts, one at a time; ``weigh``: logits of a token -> expert -> weight."""
    # views of the parameters, so that these get gradients
    tensors = dict(zip(canonical_tensors(moe), _views(moe), strict=True))
    out = []
    for token in hidden:
        total = torch.zeros(WIDTH, dtype=hidden.dtype)
        for expert, weight in weigh(F.linear(token, moe.router.weight)).items():
            up, down = (tensors[f"experts.{expert}.{kind}.weight"] for kind in ("up", "down"))
            wide = F.linear(token, up)
            if moe.experts.act.gated:
                wide = F.silu(F.linear(token, tensors[f"experts.{expert}.gate.weight"])) * wide
            else:
                wide = F.gelu(wide)
            total = total + F.linear(weight * wide, down)
        out.append(total)
    return torch.stack(out)


def _views(moe: MoE) -> list[Tensor]:
    views = [moe.router.weight]
    for expert in range(len(moe.experts.up)):
        views += moe.experts.up[expert].chunk(2) if moe.experts.act.gated else [moe.experts.up[expert]]
    return [*views, *moe.experts.down.unbind()]
