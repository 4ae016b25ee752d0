"""Parameter groups by rule: no weight decay on norms and biases, learning rates and decay by name pattern."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megalight.errors import ConfigurationError, nearest


@dataclass(frozen=True)
class GroupRule:
    """What is different for the parameters whose names match.

    Attributes:
        pattern: glob over the parameter's full name, such as ``"*.embed.*"``.
        lr_scale: multiplies the learning rate.
        weight_decay: decay coefficient for all of them, one-dimensional ones too; None: the usual.
    """

    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay usually applies: not to biases, norms and other one-dimensional parameters."""
    return parameter.ndim > 1 and name.rpartition(".")[2] != "bias"


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    weight_decay: float,
    rules: Sequence[GroupRule] = (),
    decay_all: bool = False,
    part: bool = False,
) -> list[dict[str, Any]]:
    """Groups for any torch optimizer, each with ``params``, ``lr``, ``weight_decay`` and a ``name`` for logs.

    Args:
        named_parameters: as ``module.named_parameters()`` gives them; frozen ones are left out, tied ones come once.
        lr: learning rate before ``lr_scale``.
        weight_decay: decay coefficient of parameters that decay.
        rules: the first whose pattern matches a name decides.
        decay_all: let norms and biases decay as well.
        part: these are parameters of a part of a model (a pipeline's stage), which may lack what the rules are for;
            :func:`check_rules` looks at the whole.

    Returns:
        groups that depend on the rules alone, some maybe without parameters: all stages of a pipeline have the same.

    Raises:
        ConfigurationError: no trainable parameter, or a pattern that matches none.
    """
    usual = [True] if decay_all else [True, False]
    kinds = [(i, decay) for i, r in enumerate(rules) for decay in (usual if r.weight_decay is None else [True])]
    members: dict[tuple[int, bool], list[nn.Parameter]] = {
        kind: [] for kind in [*((-1, decay) for decay in usual), *kinds]
    }
    seen: set[int] = set()
    names: list[str] = []
    for name, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        names.append(name)
        matches = (index for index, rule in enumerate(rules) if fnmatch.fnmatchcase(name, rule.pattern))
        index = next(matches, -1)
        fixed = index >= 0 and rules[index].weight_decay is not None
        members[index, fixed or decay_all or decays(name, parameter)].append(parameter)
    if not part:
        check_rules(names, rules)
    groups = []
    for index, decay in members:
        rule = rules[index] if index >= 0 else GroupRule("")
        factor = weight_decay if rule.weight_decay is None else rule.weight_decay
        groups.append(
            {
                "params": members[index, decay],
                "lr": lr * rule.lr_scale,
                "weight_decay": factor if decay else 0.0,
                "name": "/".join(filter(None, (rule.pattern, "decay" if decay else "no_decay"))),
            }
        )
    return groups


def check_rules(names: Sequence[str], rules: Sequence[GroupRule]) -> None:
    """Whether every rule is for something.

    Args:
        names: of the trainable parameters of a whole model.

    Raises:
        ConfigurationError: no trainable parameter, or a pattern that matches none.
    """
    if not names:
        raise ConfigurationError("no parameter requires gradients; unfreeze some, or train without an optimizer.")
    for rule in rules:
        if not any(fnmatch.fnmatchcase(name, rule.pattern) for name in names):
            raise ConfigurationError(
                f"parameter pattern {rule.pattern!r} matches none of the {len(names)} trainable parameters."
                + nearest(rule.pattern, names)
            )
