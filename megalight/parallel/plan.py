"""How a model splits, as data: rules from module types or name patterns to styles.

A plan says nothing of how many ranks there are. The same plan serves every layout; an axis of size 1 changes nothing.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn


@dataclass(frozen=True)
class Column:
    """A linear layer whose *output* features are split over ``tp``.

    Attributes:
        units: how many indivisible parts the output has (attention heads). When there are fewer than ``tp``, each is
            kept by a group of ``tp / units`` ranks. None: the layer's own sections say, or every feature is a unit.
        gather_output: give every rank the whole output (the splitting is then invisible outside).
    """

    units: int | None = None
    gather_output: bool = False


@dataclass(frozen=True)
class Row:
    """A linear layer whose *input* features are split over ``tp``; outputs are summed, the bias is added once."""


@dataclass(frozen=True)
class Vocab:
    """An embedding split over ``tp`` by vocabulary; rows are padded up so that every rank has equally many."""


@dataclass(frozen=True)
class VocabHead:
    """The output projection split over ``tp`` by vocabulary, together with its cross entropy."""


@dataclass(frozen=True)
class SequenceRegion:
    """A module that works on its rank's share of the tokens when sequence parallelism is on.

    Its weights see a part of the tokens, so their gradients are summed over ``tp``.

    Attributes:
        split_input: the module is fed whole-sequence inputs (position ids, say) and must take its share itself.
    """

    split_input: bool = False


@dataclass(frozen=True)
class HeadRegion:
    """A module that works on this rank's attention heads (QK-norm): its weights' gradients are summed over ``tp``."""


@dataclass(frozen=True)
class Dropout:
    """A dropout; ``split`` where the activations under it are different on each ``tp`` rank even without sequence
    parallelism (attention heads), so that it draws from the per-rank random stream."""

    split: bool = False


@dataclass(frozen=True)
class Attributes:
    """Attributes of a module that count things which ``tp`` divides (head counts in foreign models)."""

    divide: tuple[str, ...]


@dataclass(frozen=True)
class Boundary:
    """Where a foreign model's hidden states enter (``scatter``) or leave (``gather``) the sequence-parallel part.

    Attributes:
        enter: scatter the module's first input over ``tp`` along ``dim``.
        leave: gather its first output.
        dim: the sequence dim of its tensors.
    """

    enter: bool = False
    leave: bool = False
    dim: int = 1


Style: TypeAlias = Column | Row | Vocab | VocabHead | SequenceRegion | HeadRegion | Dropout | Attributes | Boundary


@dataclass(frozen=True)
class Plan:
    """Rules, tried in order; the first whose target matches a module decides.

    Attributes:
        rules: target -> style. A target is a module type, or a glob over the module's name (``"layers.*.mlp.down"``).
        sequence_dim: the dim of hidden states that counts tokens: 0 in ``[T, h]``, 1 in ``[B, S, h]``.
    """

    rules: Mapping[str | type[nn.Module], Style] = field(default_factory=dict)
    sequence_dim: int = 0

    def style_of(self, name: str, module: nn.Module) -> Style | None:
        """The style for a module, or None where no rule matches."""
        for target, style in self.rules.items():
            if isinstance(target, str):
                if fnmatch.fnmatchcase(name, target):
                    return style
            elif type(module) is target:
                return style
        return None

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Patterns that match none of ``names``: misspelt rules, which the applier refuses."""
        names = list(names)
        patterns = [target for target in self.rules if isinstance(target, str)]
        return [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]

    def __or__(self, other: Plan) -> Plan:
        """Both plans' rules, ``other``'s first."""
        return Plan({**other.rules, **{k: v for k, v in self.rules.items() if k not in other.rules}}, self.sequence_dim)
