"""Plans: how each family of models splits.

A family is registered under the full name of its model type; :func:`plan_for` finds the plan of a model, or of the
nearest type it derives from, without importing any family.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from megalight.parallel.plan import Plan
from megalight.parallel.plans import bert, gpt, transformers
from megalight.registry import Registry

PLANS: Registry[Callable[[nn.Module], Plan]] = Registry("parallel plan")
"""Full name of a model type -> the plan of a model of that type."""

PLANS.register("megalight.models.bert.model.Bert")(bert.plan)
PLANS.register("megalight.models.gpt.model.GPT")(gpt.plan)
PLANS.register("transformers.models.llama.modeling_llama.LlamaForCausalLM")(transformers.plan)


def plan_for(model: nn.Module) -> Plan | None:
    """The plan registered for the model's type, or the first of its base types that has one; None: no plan."""
    for kind in type(model).__mro__:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in PLANS:
            return PLANS[name](model)
    return None
