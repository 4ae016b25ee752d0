"""A GPT of which some layers have experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalight.models.gpt import GPT, GPTConfig
from megalight.nn.moe import MoEConfig

MOE = MoEConfig(num_experts=4, ffn_hidden_size=12, pattern=(False, True))
CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=24,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=20,
    vocab_size=101,
    max_sequence_length=32,
    moe=MOE,
)


def build(config: GPTConfig = CONFIG, **moe: Any) -> GPT:
    """The one-device model."""
    return GPT(replace(config, moe=replace(MOE, **moe)))
