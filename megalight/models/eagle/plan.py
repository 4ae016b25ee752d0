"""The parallel plan of a draft model."""

from __future__ import annotations

from megalight.nn import DraftAttention, LMHead, RMSNorm
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Column, DraftAttentionRegion, Row, SequenceRegion, SharedHeadStyle, VocabHeadStyle

RULES = ParallelizePlan(
    {
        # What comes from the base is of all tokens, and the residual stream of this rank's share.
        "*fuse": SequenceRegion(split_input=True),
        "*layer.embed_norm": SequenceRegion(split_input=True),
        "*layer.attention.qkv": Column(),
        "*layer.attention.proj": Row(),
        # Latents are small, so every rank computes them whole, of its share of the tokens.
        "*layer.attention.*_down": SequenceRegion(),
        "*layer.attention.*_up": Column(),
        "*layer.attention.shared_key": SharedHeadStyle(),
        "*layer.mlp.gate_up": Column(),
        "*layer.mlp.down": Row(),
        RMSNorm: SequenceRegion(),
        LMHead: VocabHeadStyle(),
        DraftAttention: DraftAttentionRegion(),
    }
)

eagle_plan = RULES.of
"""Returns the plan of a draft model."""
