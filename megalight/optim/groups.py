"""Parameter groups: no weight decay for norms and biases, learning rates and decay by name pattern."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megalight.errors import ConfigurationError, nearest_pattern


@dataclass(frozen=True)
class GroupRule:
    """An exception for parameters whose names match a pattern.

    Attributes:
        pattern: glob for the full name of a parameter, such as ``"*.embed.*"``.
        lr_scale: factor on the learning rate.
        weight_decay: decay coefficient of all these parameters, one-dimensional ones too. None: as usual.
    """

    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter usually decays: biases, norms and other one-dimensional parameters do not."""
    # A norm's weight and a bias have few elements. Decay would pull them to 0, where they do nothing. Those of stacked
    # experts have two dims.
    return parameter.ndim > 1 and not name.endswith(("bias", "magnitude"))


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    weight_decay: float,
    rules: Sequence[GroupRule] = (),
    decay_all: bool = False,
    part: bool = False,
) -> list[dict[str, Any]]:
    """Build groups for any torch optimizer, each with ``params``, ``lr``, ``weight_decay`` and a ``name`` for logs.

    Args:
        named_parameters: the result of ``module.named_parameters()``. Frozen parameters are left out, tied ones occur
            once.
        lr: learning rate before ``lr_scale``.
        weight_decay: decay coefficient of parameters that decay.
        rules: the first rule whose pattern matches a name counts.
        decay_all: whether norms and biases decay too.
        part: whether these are the parameters of only a part of a model, such as a pipeline stage. Rules may then match
            nothing; call :func:`check_rules` with the whole model.

    Returns:
        the groups. They depend only on the rules, so all pipeline stages have the same groups; some may be empty.

    Raises:
        ConfigurationError: there is no trainable parameter, or a pattern matches none.
    """
    usual = [True] if decay_all else [True, False]
    kinds = [(i, decay) for i, r in enumerate(rules) for decay in (usual if r.weight_decay is None else [True])]
    # All kinds in a fixed order, also without members: pipeline stages hold different parameters, but need equal
    # groups.
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
        # The first match counts, so special rules come before general ones.
        index = next(matches, -1)
        fixed = index >= 0 and rules[index].weight_decay is not None
        members[index, fixed or decay_all or decays(name, parameter)].append(parameter)
    if not part:
        check_rules(names, rules)
    groups = []
    # Empty groups stay: all pipeline stages must have the same groups, by which checkpoints and schedulers count.
    for index, decay in members:
        rule = rules[index] if index >= 0 else GroupRule("")
        factor = weight_decay if rule.weight_decay is None else rule.weight_decay
        groups.append(
            {
                "params": members[index, decay],
                # A scheduler multiplies the rate of each group, so that the scale lasts for the whole run.
                "lr": lr * rule.lr_scale,
                "weight_decay": factor if decay else 0.0,
                "name": "/".join(filter(None, (rule.pattern, "decay" if decay else "no_decay"))),
            }
        )
    return groups


def check_rules(names: Sequence[str], rules: Sequence[GroupRule]) -> None:
    """Check that every rule matches a parameter.

    Args:
        names: names of the trainable parameters of the whole model.
        rules: the rules.

    Raises:
        ConfigurationError: there is no trainable parameter, a pattern matches none, or a rule is none.
    """
    if not names:
        raise ConfigurationError("no parameter requires gradients; unfreeze some, or train without an optimizer.")
    for rule in rules:
        given: object = rule  # in Python nobody turns what a recipe has into a rule
        if not isinstance(given, GroupRule):
            raise ConfigurationError(
                f"the optimizer's rule {given!r} is a {type(given).__name__}; write GroupRule(...)."
            )
        if not any(fnmatch.fnmatchcase(name, rule.pattern) for name in names):
            raise ConfigurationError(
                f"parameter pattern {rule.pattern!r} matches none of the {len(names)} trainable parameters."
                + nearest_pattern(rule.pattern, names)
            )
