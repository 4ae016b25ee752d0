"""Plans by type of model.

Families in ``models/`` register theirs when they are imported; this subpackage has those of models from other packages,
registered by name, so that no package is imported for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from megalight.errors import ConfigurationError
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import (
    Attributes,
    Boundary,
    Column,
    Replicated,
    Row,
    SequenceRegion,
    Style,
    Vocab,
    VocabHeadStyle,
)
from megalight.registry import Registry

# How models of the ``transformers`` package split. Hidden states are ``[B, S, h]``.


def llama(config: Any) -> ParallelizePlan:
    """The plan of a ``LlamaForCausalLM`` of this ``LlamaConfig``.

    The model reads the sequence length off its hidden states, so the embedding hands out whole ones; sequence
    parallelism covers the decoder layers. Attention and MLP gather their tokens once, and their last projections
    scatter them again.

    Raises:
        ConfigurationError: attention dropout, which would draw one mask for different heads.
    """
    if config.attention_dropout:
        raise ConfigurationError(
            f"attention_dropout is {config.attention_dropout}, but the attention of transformers' Llama cannot draw "
            "from a stream of its own on each rank; set attention_dropout=0."
        )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    first, last = "model.layers.0", f"model.layers.{config.num_hidden_layers - 1}"
    ends: dict[str | type[nn.Module], Style | tuple[Style, ...]] = {
        first: Boundary(enter="split"),
        last: Boundary(leave="join"),
    }
    # With a single layer both rules are for the same module, and a dict has room for one.
    if first == last:
        ends = {first: Boundary(enter="split", leave="join")}
    return ParallelizePlan(
        {
            **ends,
            "model.embed_tokens": Vocab(scatter_output=False),
            "model.layers.*.self_attn": (
                # Tokens are gathered here once for all three projections, which then do not gather again.
                Boundary(enter="gather"),
                Attributes(per_unit={"num_key_value_groups": kv_heads}),
            ),
            "model.layers.*.self_attn.q_proj": Column(units=heads, tokens="gathered"),
            "model.layers.*.self_attn.[kv]_proj": Column(units=kv_heads, shared=True, tokens="gathered"),
            "model.layers.*.self_attn.o_proj": Row(),
            "model.layers.*.mlp": Boundary(enter="gather"),
            "model.layers.*.mlp.gate_proj": Column(tokens="gathered"),
            "model.layers.*.mlp.up_proj": Column(tokens="gathered"),
            "model.layers.*.mlp.down_proj": Row(),
            "model.layers.*layernorm": SequenceRegion(),
            # After the last boundary, which has joined the tokens: all ranks compute the same
            # here, and in the head.
            "model.norm": Replicated(),
            "lm_head": VocabHeadStyle(tokens="whole"),
        },
        sequence_dim=1,
    )


def plan(model: nn.Module) -> ParallelizePlan:
    """The plan of a ``transformers`` model, from its own configuration."""
    return llama(model.config)


PLANS: Registry[Callable[[Any], ParallelizePlan]] = Registry("parallel plan")
"""Full name of a model type -> the plan of a model of that type."""

PLANS.register("transformers.models.llama.modeling_llama.LlamaForCausalLM")(plan)


def plan_for(model: nn.Module) -> ParallelizePlan | None:
    """The plan registered for the model's type, or the first of its base types that has one; None: no plan."""
    # The nearest type first: a subclass that registers its own plan goes before its base.
    for kind in type(model).__mro__:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in PLANS:
            return PLANS[name](model)
    return None
