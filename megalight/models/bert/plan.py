"""The parallel plan of BERT: how its modules are split."""

from __future__ import annotations

from torch import nn

from megalight.nn import InnerAttention, LayerNorm, LMHead
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import (
    Boundary,
    Column,
    ContextRegion,
    Dropout,
    Replicated,
    Row,
    SequenceRegion,
    Vocab,
    VocabHeadStyle,
)

RULES = ParallelizePlan(
    {
        "*embed.word": Vocab(),
        # Ids of positions and token types are whole, so the module takes its share of them.
        "*embed.position": SequenceRegion(split_input=True),
        "*embed.token_type": SequenceRegion(split_input=True),
        "*.attention.qkv": Column(),
        "*.attention.proj": Row(),
        "*.mlp.up": Column(),
        "*.mlp.down": Row(),
        # the head reads a few tokens (the masked and the first ones), which may be on any rank
        "*head": Boundary(enter="join"),
        "*head.masked.dense": Replicated(),
        "*head.masked.lm.norm": Replicated(),
        "*head.order.pooler.dense": Replicated(),
        "*head.pooler.dense": Replicated(),
        "*head.order.output": Replicated(),
        LMHead: VocabHeadStyle(tokens="whole"),
        LayerNorm: SequenceRegion(),
        nn.Dropout: Dropout(),
        InnerAttention: (ContextRegion(), Dropout(split=True)),
    }
)
"""Rules for all models of the family. A model may lack some of these modules."""

bert_plan = RULES.of
"""Returns the plan of a BERT, of a part of it, or of a module that contains one."""
