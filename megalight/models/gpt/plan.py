"""The parallel plan of GPT: how its modules are split."""

from __future__ import annotations

from torch import nn

from megalight.nn import InnerAttention, LayerNorm, LMHead, RMSNorm, ShortConv
from megalight.nn.moe import Experts, Jitter, Router
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import (
    Channels,
    Column,
    ContextRegion,
    Dropout,
    Expert,
    HeadExchange,
    HeadRegion,
    NormGroups,
    Routing,
    Row,
    SequenceRegion,
    SharedHeadStyle,
    Vocab,
    VocabHeadStyle,
    WholeSequences,
)

RULES = ParallelizePlan(
    {
        "*embed.word": Vocab(),
        "*embed.position": SequenceRegion(split_input=True),
        "*.attention.qkv": Column(),
        # Norms over single heads act on whole heads, of which each rank has some.
        "*.attention.[qk]_norm": HeadRegion(),
        "*.attention.sink": Channels(),
        # A row takes what a column has split: its sum over ranks ends the region.
        "*.attention.proj": Row(),
        # latents are small, so every rank computes them whole, of its share of the tokens
        "*.attention.*_down": SequenceRegion(),
        "*.attention.*_up": Column(),
        "*.attention.shared_key": SharedHeadStyle(),
        # twice as wide as the hidden states, and whole on every rank, which computes it for its share of the tokens
        "mtp.depths.*.join": SequenceRegion(),
        "*.conv.gates": Column(),
        "*.conv.filter": Channels(),
        "*.conv.proj": Row(),
        # A convolution mixes neighboring tokens, so a share of a sequence is not enough.
        ShortConv: WholeSequences(),
        "*.mamba.in_proj": Column(),
        "*.mamba.conv": Channels(),
        "*.mamba.scan": Channels(),
        "*.mamba.norm": NormGroups(),
        "*.mamba.proj": Row(),
        "*.mamba.tokens": HeadExchange(),
        "*.delta.in_proj": Column(),
        "*.delta.conv": Channels(),
        "*.delta.rule": Channels(),
        # One weight for all heads.
        "*.delta.norm": HeadRegion(),
        "*.delta.proj": Row(),
        "*.delta.tokens": HeadExchange(),
        "*.mlp.gate_up": Column(),
        "*.mlp.up": Column(),
        "*.mlp.down": Row(),
        "*.mlp.shared.gate_up": Column(),
        "*.mlp.shared.up": Column(),
        "*.mlp.shared.down": Row(),
        # One number per token, which every rank computes of its share.
        "*.mlp.shared_gate": SequenceRegion(),
        Router: Routing(),
        Jitter: Dropout(split=True),
        Experts: Expert(),
        # Under sequence parallelism each rank norms its share, so a norm's weight gets one term
        # of its gradient per rank.
        RMSNorm: SequenceRegion(),
        LayerNorm: SequenceRegion(),
        LMHead: VocabHeadStyle(),
        nn.Dropout: Dropout(),
        # Dropout of attention weights draws for the rank's own heads, and so from a stream of its own.
        InnerAttention: (ContextRegion(), Dropout(split=True)),
    }
)
"""Rules for all models of the family. A model may lack some of these modules."""

gpt_plan = RULES.of
"""Returns the plan of a GPT, of a part of it, or of a module that contains one."""
