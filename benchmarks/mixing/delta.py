"""A mixer of Gated DeltaNet at the sizes of Qwen3-Next, beside ``transformers`` and ``flash-linear-attention``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from benchmarks.mixing import Case, Way, need, random, values
from megalight.models.gpt import DeltaNetConfig
from megalight.nn import LayerContext
from megalight.nn.gated_delta_net import GatedDeltaNet
from megalight.types import PackedSequences


def rule_flops(delta: DeltaNetConfig, tokens: int) -> float:
    """Return the operations of the rule's chunked products, forward."""
    within = 64.0 * (2 * delta.num_key_heads * delta.key_dim + 2 * delta.inner_size + delta.num_heads * delta.key_dim)
    return 2.0 * tokens * (within + 3 * delta.inner_size * delta.key_dim)


def delta_layer(delta: DeltaNetConfig, hidden_size: int, tokens: int, device: str) -> Case:
    """Return the case of one mixer over one sequence. Every way has the weights of ours."""
    sizes = (hidden_size, delta.num_heads, delta.num_key_heads, delta.head_dim, delta.key_dim)
    ours: GatedDeltaNet = values(GatedDeltaNet(*sizes).to("meta"), device)
    exact = copy.deepcopy(ours).double()

    def way(module: GatedDeltaNet, count: int, choices: tuple[tuple[str, str], ...] = ()) -> Way:
        context = LayerContext(PackedSequences.of_lengths([count], device))
        return Way(lambda hidden: module(hidden, context), tuple(module.parameters()), choices)

    weights = sum(p.numel() for p in ours.parameters() if p.dim() == 2)
    work = 2.0 * tokens * weights + rule_flops(delta, tokens)
    return Case(
        "Gated DeltaNet layer",
        (work, 3 * work),
        tokens,
        lambda count: [random(device, count, hidden_size)],
        {"auto": lambda count: way(ours, count)},
        lambda count: way(exact, count),
        {
            "transformers": lambda count: transformers_layer(delta, hidden_size, ours, device),
            # The rule of flash-linear-attention between our own parts.
            "fla": lambda count: way(ours, count, (("delta_rule", "fla"),)),
        },
        checked=300,
        tolerance=4e-2,
    )


def transformers_layer(delta: DeltaNetConfig, hidden_size: int, ours: GatedDeltaNet, device: str) -> Way:
    """Return the same mixer of ``transformers``, which takes the kernels of ``fla`` and ``causal_conv1d`` if there."""
    need("transformers")
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=hidden_size,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_value_heads=delta.num_heads,
        linear_num_key_heads=delta.num_key_heads,
        linear_value_head_dim=delta.head_dim,
        linear_key_head_dim=delta.key_dim,
    )
    theirs: Any = Qwen3NextGatedDeltaNet(config, 0).to(device, torch.bfloat16).train()
    per = delta.num_heads // delta.num_key_heads
    z, v, q, k, a, b = ours.in_proj.weight.split(ours.in_proj.section_sizes)
    conv = ours.conv.weight.split([delta.inner_size, *[delta.num_key_heads * delta.key_dim] * 2])

    def grouped(*parts: tuple[Tensor, int]) -> Tensor:
        """Join the rows of each group of heads."""
        return torch.cat([x.unflatten(0, (delta.num_key_heads, rows)) for x, rows in parts], 1).flatten(0, 1)

    with torch.no_grad():
        wide = per * delta.head_dim
        theirs.in_proj_qkvz.weight.copy_(grouped((q, delta.key_dim), (k, delta.key_dim), (v, wide), (z, wide)))
        theirs.in_proj_ba.weight.copy_(grouped((b, per), (a, per)))
        theirs.conv1d.weight.copy_(torch.cat([conv[1], conv[2], conv[0]])[:, None])
        theirs.A_log.copy_(ours.rule.A_log)
        theirs.dt_bias.copy_(ours.rule.dt_bias)
        theirs.norm.weight.copy_(ours.norm.weight)
        theirs.out_proj.weight.copy_(ours.proj.weight)
    return Way(lambda hidden: theirs(hidden[None])[0], tuple(theirs.parameters()))
