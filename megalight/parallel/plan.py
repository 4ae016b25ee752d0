"""How a model is split, as data: rules from module types or name patterns to styles.

A plan does not depend on the number of ranks. The same plan works for every layout; an axis of size 1 changes nothing.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from torch import nn

from megalight.errors import LayoutError
from megalight.parallel.styles import STYLES, Style
from megalight.parallel.styles.style import kind_of

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
            matches = self._patterns[target].match(name) if isinstance(target, str) else kind_of(module) is target
            if matches:
                return tuple(style for style in _many(found) if isinstance(style, Style))
        return ()

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that match none of ``names``: misspelled rules, for which ``parallelize`` raises."""
        names = list(names)
        return [glob for glob, pattern in self._patterns.items() if not any(map(pattern.match, names))]

    @property
    def axes(self) -> set[str]:
        """The mesh axes over which its styles split."""
        return {style.axis for found in self.rules.values() for style in _many(found) if isinstance(style, Style)}

    @functools.cached_property
    def _patterns(self) -> dict[str, re.Pattern[str]]:
        """Expressions of the globs. Compiled once: each meets every module of the model."""
        return {target: re.compile(fnmatch.translate(target)) for target in self.rules if isinstance(target, str)}

    def of(self, model: nn.Module) -> ParallelizePlan:
        """Return a family's plan for one of its members, or a part of one: without patterns that match no module."""
        # A pipeline stage, say, lacks modules, and rules for those would be errors.
        absent = set(self.unmatched(name for name, _ in model.named_modules()))
        return replace(self, rules={target: style for target, style in self.rules.items() if target not in absent})

    def under(self, name: str) -> ParallelizePlan:
        """Return the same plan for a model that is the submodule ``name`` of another."""
        rules = {
            (f"{name}.{target}" if target else name) if isinstance(target, str) else target: found
            for target, found in self.rules.items()
        }
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
