"""How a model splits, as data: rules from module types or name patterns to styles.

A plan says nothing of how many ranks there are. The same plan serves every layout; an axis of size 1 changes nothing.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from torch import nn

from megalight.errors import LayoutError

Tokens: TypeAlias = Literal["share", "gathered", "whole"]
"""Which tokens a split layer is fed under sequence parallelism: this rank's ``share``, which the layer gathers; all,
``gathered`` by a :class:`Boundary` above it, which sums the gradient as well; or the ``whole`` sequence that every rank
holds anyhow. Without sequence parallelism everything is whole."""


@dataclass(frozen=True)
class Column:
    """A linear layer whose *output* features are split over ``tp``.

    Attributes:
        units: how many indivisible parts the output has (attention heads). When there are fewer than ``tp``, each is
            kept by a group of ``tp / units`` ranks. None: the layer's own sections say, or every feature is a unit.
        gather_output: give every rank the whole output (the splitting is then invisible outside).
        tokens: which tokens it is fed.
    """

    units: int | None = None
    gather_output: bool = False
    tokens: Tokens = "share"


@dataclass(frozen=True)
class Row:
    """A linear layer whose *input* features are split over ``tp``; outputs are summed, the bias is added once.

    Under sequence parallelism each rank gets the sum of its share of the tokens.
    """


@dataclass(frozen=True)
class Vocab:
    """An embedding split over ``tp`` by vocabulary; rows are padded up so that every rank has equally many.

    Attributes:
        scatter_output: under sequence parallelism, give each rank its share of the tokens. Off where the model looks
            at the length of the hidden states, and a :class:`Boundary` splits them further on.
    """

    scatter_output: bool = True


@dataclass(frozen=True)
class VocabHead:
    """The output projection split over ``tp`` by vocabulary, together with its cross entropy where it has one.

    Attributes:
        tokens: which tokens it is fed.
    """

    tokens: Tokens = "share"


@dataclass(frozen=True)
class SequenceRegion:
    """A module that works on its rank's share of the tokens when sequence parallelism is on.

    Its weights see a part of the tokens, so their gradients are summed over ``tp``.

    Attributes:
        split_input: the module is fed whole-sequence inputs (position ids, say) and takes its share of the first one.
    """

    split_input: bool = False


@dataclass(frozen=True)
class HeadRegion:
    """A module that works on this rank's attention heads (QK-norm): its weights' gradients are summed over ``tp``."""


@dataclass(frozen=True)
class ContextRegion:
    """Attention proper (``nn.InnerAttention``), which under context parallelism looks at all shares of a sequence.

    Which of the kinds does it (ring, all-gather, ...) is a matter of the layout, not of the plan.
    """


@dataclass(frozen=True)
class Replicated:
    """A module that computes the same on every rank: its weights are held whole and their gradients are complete.

    Without sequence parallelism this is what no rule means. With it, a module with parameters must have a rule: whether
    it sees a share of the tokens or all of them cannot be guessed.
    """


@dataclass(frozen=True)
class Dropout:
    """Dropout that draws from the rank's own random stream where its input differs between ``tp`` ranks.

    Attributes:
        split: it does so even without sequence parallelism (attention weights of this rank's heads).
    """

    split: bool = False


@dataclass(frozen=True)
class Attributes:
    """Attributes of a module that count things (head counts in foreign models), as they are for one rank.

    Attributes:
        divide: names of counts that ``tp`` divides.
        per_unit: name of a ratio -> number of units; where there are fewer units than ``tp``, the ratio is divided by
            how many ranks share one (query heads per KV head, for so many KV heads).
    """

    divide: tuple[str, ...] = ()
    per_unit: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Boundary:
    """Where a foreign model's hidden states change between whole and split under sequence parallelism.

    Attributes:
        enter: what happens to the module's first input. ``split``: take this rank's share. ``gather``: make it whole
            for the split layers inside (:class:`Column` with ``tokens="gathered"``). ``join``: make it whole for a
            module that computes the same with it on every rank.
        leave: what happens to its first output. ``join``: make it whole for all that follows.
    """

    enter: Literal["split", "gather", "join"] | None = None
    leave: Literal["join"] | None = None


Style: TypeAlias = (
    Column
    | Row
    | Vocab
    | VocabHead
    | SequenceRegion
    | HeadRegion
    | ContextRegion
    | Replicated
    | Dropout
    | Attributes
    | Boundary
)


@dataclass(frozen=True)
class Plan:
    """Rules, tried in order; the first whose target matches a module decides: one style, or several that add up.

    Attributes:
        rules: target -> style. A target is a module type (itself, not its subclasses), or a glob over the module's name
            (``"layers.*.mlp.down"``; ``*`` also matches dots).
        sequence_dim: the dim of hidden states that counts tokens: 0 in ``[T, h]``, 1 in ``[B, S, h]``.
    """

    rules: Mapping[str | type[nn.Module], Style | tuple[Style, ...]] = field(default_factory=dict)
    sequence_dim: int = 0

    def styles_of(self, name: str, module: nn.Module) -> tuple[Style, ...]:
        """The styles for a module; none where no rule matches."""
        for target, style in self.rules.items():
            matches = fnmatch.fnmatchcase(name, target) if isinstance(target, str) else type(module) is target
            if matches:
                return style if isinstance(style, tuple) else (style,)
        return ()

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Patterns that match none of ``names``: misspelt rules, which the applier refuses."""
        names = list(names)
        patterns = [target for target in self.rules if isinstance(target, str)]
        return [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]

    def only(self, names: Iterable[str]) -> Plan:
        """Without the patterns that match none of ``names``: a family's plan, for one member of the family."""
        absent = set(self.unmatched(names))
        return replace(self, rules={target: style for target, style in self.rules.items() if target not in absent})

    def under(self, name: str) -> Plan:
        """The same plan for a model that is the submodule ``name`` of another."""
        rules = {f"{name}.{target}" if isinstance(target, str) else target: s for target, s in self.rules.items()}
        return replace(self, rules=rules)

    def __or__(self, other: Plan) -> Plan:
        """Both plans' rules, ``other``'s first.

        Raises:
            LayoutError: the two count tokens along different dims.
        """
        if self.sequence_dim != other.sequence_dim:
            raise LayoutError(
                f"plans with sequence_dim {self.sequence_dim} and {other.sequence_dim} cannot be joined; "
                "state the same one in both."
            )
        rest = {target: style for target, style in self.rules.items() if target not in other.rules}
        return Plan({**other.rules, **rest}, self.sequence_dim)
