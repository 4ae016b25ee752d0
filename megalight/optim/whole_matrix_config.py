"""Which parameters an optimizer of whole matrices updates: by name, with rates and a schedule of their own."""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from megalight.errors import ConfigurationError
from megalight.optim.groups import GroupRule, check_rules, parameter_groups
from megalight.optim.schedules import LRSchedule
from megalight.optim.whole_matrices import GATHER_BYTES, WholeMatrixOptimizer

ADAM_NAMES = ("*embed*", "*head*", "*router*", "*norm*", "*bias*", "*conv*", "*magnitude*", "*sink*")
"""Names of parameters that are no hidden matrices, whatever their shape."""


@dataclass(frozen=True, kw_only=True)
class WholeMatrixConfig(ABC):
    """Base class of the configurations of optimizers of whole matrices. A subclass defines :meth:`build`.

    Attributes:
        lr: peak learning rate of matrices.
        weight_decay: decoupled decay coefficient of matrices.
        schedule: schedule of their learning rate; None: that of Adam.
        rules: exceptions by name pattern, for matrices.
        names: patterns of the parameters to update. Empty: all matrices that ``adam_names`` leaves.
        adam_names: patterns of parameters that Adam updates. Empty: embeddings, the head, routers, norms, biases,
            convolutions.
        gather_bytes: the largest number of bytes of a batch of gathered matrices, on each rank; at least one matrix.

    Raises:
        ConfigurationError: a number is out of range.
    """

    lr: float = 3e-4
    weight_decay: float = 0.1
    schedule: LRSchedule | None = None
    rules: tuple[GroupRule, ...] = ()
    names: tuple[str, ...] = ()
    adam_names: tuple[str, ...] = ()
    gather_bytes: int = GATHER_BYTES

    field: ClassVar[str] = "matrices"
    """The field of :class:`~megalight.optim.AdamConfig` that holds it, for messages."""
    optimizer: ClassVar[str] = "the optimizer of matrices"
    """What messages and names of groups call the optimizer."""

    def __post_init__(self) -> None:
        for name, value, good in (
            ("lr", self.lr, self.lr >= 0),
            ("weight_decay", self.weight_decay, self.weight_decay >= 0),
            ("gather_bytes", self.gather_bytes, self.gather_bytes > 0),
        ):
            if not good:
                least = "above 0" if name == "gather_bytes" else "at least 0"
                raise ConfigurationError(f"{name} of {self.optimizer} is {value}; it must be {least}.")

    def takes(self, name: str, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer of matrices updates a parameter.

        Raises:
            ConfigurationError: a pattern of ``names`` matches a vector, or patterns of both kinds match a name.
        """
        named, adam = _match(name, self.names), _match(name, self.adam_names or ADAM_NAMES)
        if named and self.adam_names and adam:
            raise ConfigurationError(
                f"{name} matches {named!r} of {self.field}.names and {adam!r} of {self.field}.adam_names; "
                "only one may match it."
            )
        if named and parameter.ndim < 2:
            raise ConfigurationError(
                f"{name} of shape {list(parameter.shape)} matches {named!r} of {self.field}.names, and is no matrix; "
                "Adam updates vectors. Let no pattern of names match it."
            )
        return bool(named) if self.names else parameter.ndim > 1 and not adam

    def check(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Check that every pattern matches a parameter of the whole model, and that some are updated.

        Raises:
            ConfigurationError: a pattern matches no trainable parameter, or no parameter would be updated.
        """
        patterns = [GroupRule(pattern) for pattern in (*self.names, *self.adam_names)]
        check_rules([name for name, _ in named_parameters], [*self.rules, *patterns])
        if not any(self.takes(*pair) for pair in named_parameters):
            raise ConfigurationError(
                f"{self.optimizer} updates none of the parameters; leave {self.field} out, or correct its patterns."
            )

    def groups(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """Return the parameter groups of the matrices among these parameters."""
        found = parameter_groups(
            [pair for pair in named_parameters if self.takes(*pair)],
            lr=self.lr,
            weight_decay=self.weight_decay,
            rules=self.rules,
            part=True,
        )
        added = {"whole_matrices": True, **self.options()}
        return [{**group, **added, "name": f"{self.optimizer.lower()}/{group['name']}"} for group in found]

    def options(self) -> dict[str, Any]:
        """Return further options of each group."""
        return {}

    @abstractmethod
    def build(self, groups: Iterable[Any], **adam: Any) -> WholeMatrixOptimizer:
        """Create the optimizer over groups of both kinds; ``adam`` are arguments for the rest."""


def _match(name: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)
