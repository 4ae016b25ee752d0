"""Megatron's names of modules inside a layer."""

from __future__ import annotations

from collections.abc import Iterable

ALIASES = {
    "attn_norm": "attention_norm",
    "attn_proj": "attention.proj",
    "core_attn": "attention.inner",
    "expert_fc1": "mlp.experts",  # one module holds both products of all experts
    "layernorm": "*_norm",
    "moe": "mlp",
    "moe_act": "mlp.experts.act",
    "qkv_linear": "attention.qkv",
    "shared_experts": "mlp.shared",
}
"""Megatron's names of modules -> ours."""


def translated(names: Iterable[str]) -> tuple[str, ...]:
    """Return our name of each module that Megatron names, and other names as they are."""
    return tuple(ALIASES.get(name, name) for name in names)
