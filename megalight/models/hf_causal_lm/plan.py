"""The plan of a model of ``transformers``: what it declares."""

from __future__ import annotations

from megalight.models.hf_causal_lm.model import HFModel
from megalight.parallel.model_plans import plan_for
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import InterfaceRegion


def hf_plan(model: HFModel) -> ParallelizePlan:
    """Return the plan of the model inside; without one, every rank holds it whole."""
    found = plan_for(model.net)
    declared = ParallelizePlan(sequence_dim=1) if found is None else found.under("net")
    return declared | ParallelizePlan({HFModel: InterfaceRegion()}, sequence_dim=1)
