"""A GPT of which some layers have experts."""

from __future__ import annotations

from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.nn.moe import Experts, FixedRouter, MoE
from megalight.parallel.plan import Plan
from megalight.parallel.styles import Expert

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=24,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=20,
    vocab_size=101,
    max_sequence_length=32,
)
NUM_EXPERTS = 4


def build(config: GPTConfig = CONFIG, layers: tuple[int, ...] = (1,)) -> GPT:
    """The one-device model: the layers named have four experts each, the others a feed-forward layer."""
    model = GPT(config)
    for index in layers:
        experts = Experts(NUM_EXPERTS, config.hidden_size, 12, std=0.2, down_std=0.2)
        model.layers[str(index)].mlp = MoE(FixedRouter(NUM_EXPERTS), experts)
    return model


def plan(model: GPT) -> Plan:
    return gpt_plan(model) | Plan({Experts: Expert()})
