"""Plans by type of model.

Families in ``models/`` register theirs when they are imported; this room has those of models from other packages,
registered by name, so that no package is imported for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from megalight.parallel.plan import Plan
from megalight.parallel.plans import transformers
from megalight.registry import Registry

PLANS: Registry[Callable[[Any], Plan]] = Registry("parallel plan")
"""Full name of a model type -> the plan of a model of that type."""

PLANS.register("transformers.models.llama.modeling_llama.LlamaForCausalLM")(transformers.plan)


def plan_for(model: nn.Module) -> Plan | None:
    """The plan registered for the model's type, or the first of its base types that has one; None: no plan."""
    # The nearest type first: a subclass that registers its own plan goes before its base.
    for kind in type(model).__mro__:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in PLANS:
            return PLANS[name](model)
    return None
