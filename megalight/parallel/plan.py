"""How a model is split, as data: rules from module types or name patterns to styles.

A plan does not depend on the number of ranks. The same plan works for every layout; an axis of size 1 changes nothing.

Families in ``models/`` register the plan of their type when they are imported. This file has those of models from
other packages, registered by name, so that no package is imported for it.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import nn

from megalight.errors import ConfigurationError, LayoutError
from megalight.parallel.styles import (
    STYLES,
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

Target: TypeAlias = str | type[nn.Module]
"""The modules that a rule is for.

A type (without its subclasses), or a glob over the module's name (``"layers.*.mlp.down"``; ``*`` also matches dots).
"""


@dataclass(frozen=True)
class ParallelizePlan:
    """Rules that are tried in order. The first rule that matches a module decides: one style, or several together.

    Attributes:
        rules: target -> styles. A style may be given by its name in ``STYLES``, with its default options.
        sequence_dim: the dim of hidden states that counts tokens: 0 in ``[T, h]``, 1 in ``[B, S, h]``.
    """

    rules: Mapping[Target, Style | str | tuple[Style | str, ...]] = field(default_factory=dict)
    sequence_dim: int = 0

    def __post_init__(self) -> None:
        """Replace names by styles.

        Raises:
            MegalightError: no style has this name; the message lists the known ones.
        """
        object.__setattr__(self, "rules", {target: _resolved(found) for target, found in self.rules.items()})

    def styles_of(self, name: str, module: nn.Module) -> tuple[Style, ...]:
        """Return the styles for a module; none if no rule matches."""
        for target, found in self.rules.items():
            # The exact type: a subclass may compute something else, and the style would split it wrong without an
            # error.
            matches = self._patterns[target].match(name) if isinstance(target, str) else type(module) is target
            if matches:
                return tuple(style for style in _many(found) if isinstance(style, Style))
        return ()

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that match none of ``names``: misspelled rules, for which ``parallelize`` raises."""
        names = list(names)
        return [glob for glob, pattern in self._patterns.items() if not any(map(pattern.match, names))]

    @functools.cached_property
    def _patterns(self) -> dict[str, re.Pattern[str]]:
        """Expressions of the globs. Compiled once: each meets every module of the model."""
        return {target: re.compile(fnmatch.translate(target)) for target in self.rules if isinstance(target, str)}

    def only(self, names: Iterable[str]) -> ParallelizePlan:
        """Return the plan without patterns that match none of ``names``: a family's plan for one of its members."""
        absent = set(self.unmatched(names))
        return replace(self, rules={target: style for target, style in self.rules.items() if target not in absent})

    def under(self, name: str) -> ParallelizePlan:
        """Return the same plan for a model that is the submodule ``name`` of another."""
        rules = {f"{name}.{target}" if isinstance(target, str) else target: s for target, s in self.rules.items()}
        return replace(self, rules=rules)

    def __or__(self, other: ParallelizePlan) -> ParallelizePlan:
        """Return the rules of both plans, those of ``other`` first.

        Raises:
            LayoutError: the two plans count tokens along different dims.
        """
        if self.sequence_dim != other.sequence_dim:
            raise LayoutError(
                f"plans with sequence_dim {self.sequence_dim} and {other.sequence_dim} cannot be joined; "
                "state the same one in both."
            )
        # `other` first, because the first matching rule decides.
        rest = {target: style for target, style in self.rules.items() if target not in other.rules}
        return ParallelizePlan({**other.rules, **rest}, self.sequence_dim)


def _many(found: Style | str | tuple[Style | str, ...]) -> tuple[Style | str, ...]:
    return found if isinstance(found, tuple) else (found,)


def _resolved(found: Style | str | tuple[Style | str, ...]) -> Style | tuple[Style, ...]:
    styles = tuple(STYLES[style]() if isinstance(style, str) else style for style in _many(found))
    return styles if isinstance(found, tuple) else styles[0]


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
