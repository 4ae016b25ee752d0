from __future__ import annotations

import pytest
from torch import nn

from megalight.errors import LayoutError
from megalight.models.gpt import GPT
from megalight.models.gpt.plan import gpt_plan
from megalight.parallel.model_plans import PLANS, plan_for
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Column, Replicated, Row, SequenceRegion


class Sub(nn.Linear):
    pass


def test_the_first_rule_that_matches_decides() -> None:
    plan = ParallelizePlan({"a.*": Row(), "a.b": Column(), nn.Linear: Replicated(), "c": (SequenceRegion(), Column())})
    assert plan.styles_of("a.b", nn.Linear(1, 1)) == (Row(),)
    assert plan.styles_of("x", nn.Linear(1, 1)) == (Replicated(),)
    assert plan.styles_of("x", Sub(1, 1)) == ()
    assert plan.styles_of("c", nn.ReLU()) == (SequenceRegion(), Column())


def test_patterns_that_match_nothing() -> None:
    plan = ParallelizePlan({"a.*": Row(), "b": Column(), nn.Linear: Replicated()}, sequence_dim=1)
    assert plan.unmatched(["a.x", "c"]) == ["b"]
    only = plan.of(nn.ModuleDict({"a": nn.ModuleDict({"x": nn.Linear(1, 1)}), "c": nn.Linear(1, 1)}))
    assert list(only.rules) == ["a.*", nn.Linear]
    assert only.sequence_dim == 1


def test_a_plan_for_a_submodule() -> None:
    plan = ParallelizePlan({"a.*": Row(), nn.Linear: Replicated()}).under("model")
    assert list(plan.rules.items()) == [("model.a.*", Row()), (nn.Linear, Replicated())]


def test_joined_plans() -> None:
    joined = ParallelizePlan({"a": Row(), "b": Row()}) | ParallelizePlan({"b": Column(), "c": Column()})
    assert list(joined.rules.items()) == [("b", Column()), ("c", Column()), ("a", Row())]
    with pytest.raises(LayoutError, match="sequence_dim 0 and 1 cannot be joined"):
        _ = ParallelizePlan() | ParallelizePlan(sequence_dim=1)


def test_a_model_finds_the_plan_of_its_type_or_base_type() -> None:
    class Own(GPT):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    assert plan_for(Own()) == gpt_plan(Own())
    assert plan_for(nn.Linear(1, 1)) is None
    assert "megalight.models.gpt.model.GPT" in PLANS
