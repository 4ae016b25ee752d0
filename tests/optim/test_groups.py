from __future__ import annotations

import pytest
import torch
from torch import nn

from megalight.errors import ConfigurationError
from megalight.optim import GroupRule, parameter_groups
from megalight.optim.groups import check_rules


def _model() -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "norm": nn.LayerNorm(4), "up": nn.Linear(4, 4)})
    model["head"] = nn.Linear(4, 5, bias=False)
    model["head"].weight = model["embed"].weight
    return model


def _names(model: nn.Module, groups: list[dict]) -> dict[str, list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {group["name"]: [names[id(p)] for p in group["params"]] for group in groups}


def test_norms_and_biases_do_not_decay() -> None:
    model = _model()
    groups = parameter_groups(model.named_parameters(remove_duplicate=False), lr=0.1, weight_decay=0.2)
    assert _names(model, groups) == {
        "decay": ["embed.weight", "up.weight"],
        "no_decay": ["norm.weight", "norm.bias", "up.bias"],
    }
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.1, 0.2), (0.1, 0.0)]
    (everything,) = parameter_groups(model.named_parameters(), lr=0.1, weight_decay=0.2, decay_all=True)
    assert len(everything["params"]) == 5


def test_the_first_matching_rule_decides() -> None:
    model = _model()
    rules = [GroupRule("embed.*", lr_scale=0.5), GroupRule("*.bias", weight_decay=0.3), GroupRule("norm.*", 2.0)]
    groups = parameter_groups(model.named_parameters(), lr=0.1, weight_decay=0.2, rules=rules)
    assert _names(model, groups) == {
        "decay": ["up.weight"],
        "no_decay": [],
        "embed.*/decay": ["embed.weight"],
        "embed.*/no_decay": [],
        "*.bias/decay": ["norm.bias", "up.bias"],
        "norm.*/decay": [],
        "norm.*/no_decay": ["norm.weight"],
    }
    assert [(group["lr"], group["weight_decay"]) for group in groups if group["params"]] == [
        (0.1, 0.2),
        (0.05, 0.2),
        (0.1, 0.3),
        (0.2, 0.0),
    ]
    torch.optim.AdamW(groups)  # any optimizer takes them


def test_frozen_parameters_are_left_out() -> None:
    model = _model()
    model["embed"].requires_grad_(False)
    groups = parameter_groups(model.named_parameters(), lr=0.1, weight_decay=0.2)
    assert _names(model, groups)["decay"] == ["up.weight"]
    with pytest.raises(ConfigurationError, match="no parameter requires gradients"):
        parameter_groups(model.requires_grad_(False).named_parameters(), lr=0.1, weight_decay=0.2)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'up\.wieght' matches none of the 5.*Did you mean 'up\.weight'"):
        parameter_groups(_model().named_parameters(), lr=1, weight_decay=0, rules=[GroupRule("up.wieght")])


def test_a_rule_as_recipes_have_it_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"the optimizer's rule \{'pattern': 'up'\} is a dict; write GroupRule"
    ):
        check_rules(["up"], [{"pattern": "up"}])


def test_every_part_of_a_model_has_the_same_groups() -> None:
    model, rules = _model(), [GroupRule("embed.*", lr_scale=0.5), GroupRule("*.bias", weight_decay=0.3)]
    whole = parameter_groups(model.named_parameters(), lr=0.1, weight_decay=0.2, rules=rules)
    named = list(model.named_parameters())
    for part in (named[:1], named[1:3], []):
        found = parameter_groups(part, lr=0.1, weight_decay=0.2, rules=rules, part=True)
        assert [{**group, "params": []} for group in found] == [{**group, "params": []} for group in whole]
        assert sum(len(group["params"]) for group in found) == len(part)
        torch.optim.AdamW(found)
