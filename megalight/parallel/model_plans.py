"""The plan of a model: registered by its family, or found for a model of ``transformers``.

Families in ``models/`` register the plan of their type when they are imported. Models of other packages are registered
by name, so that no package is imported for it.

Layers of a model of ``transformers`` split as it declares (``declared_plan``), or by their form (``structural_plan``).
Embedding and output layer, which declarations leave whole or gather, split by vocabulary. Rules of sequence parallelism
are added (``sequence_regions``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from megalight.parallel.context_regions import context_regions
from megalight.parallel.declared_plan import declared_rules, declares
from megalight.parallel.layers import PRETRAINED, is_a
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.sequence_regions import with_sequence_regions
from megalight.parallel.structural_plan import Rules, structural_rules
from megalight.parallel.styles import Attributes, Replicated, StackedExperts, Vocab, VocabHeadStyle
from megalight.parallel.styles.experts import stacked
from megalight.registry import Registry

PLANS: Registry[Callable[[Any], ParallelizePlan]] = Registry("parallel plan")
"""Full name of a model type -> the plan of a model of that type."""


def plan_for(model: nn.Module) -> ParallelizePlan | None:
    """The plan of a model, or the joined plans of the models inside it; None: there is none."""
    if (own := _plan_of(model)) is not None:
        return own
    found = None
    for name, module in _outermost(model, ""):
        if (plan := _plan_of(module)) is None:
            continue
        found = plan.under(name) if found is None else found | plan.under(name)
    return found


def _outermost(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the models with a plan inside of another one, by their names; not what lies inside of these."""
    for name, child in model.named_children():
        if _registered(child) is not None or is_transformers(child):
            yield prefix + name, child
        else:
            yield from _outermost(child, f"{prefix}{name}.")


def _plan_of(model: nn.Module) -> ParallelizePlan | None:
    """The plan registered for the model's type, or found for a model of ``transformers``; None: no plan."""
    if (build := _registered(model)) is not None:
        return build(model)
    return transformers_plan(model) if is_transformers(model) else None


def _registered(model: nn.Module) -> Callable[[Any], ParallelizePlan] | None:
    """The plan registered for the model's type, or the first of its base types that has one."""
    # The nearest type first: a subclass that registers its own plan goes before its base.
    for kind in type(model).__mro__:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in PLANS:
            return PLANS[name]
    return None


def is_transformers(model: nn.Module) -> bool:
    """Return whether a model is one of ``transformers``."""
    return is_a(model, PRETRAINED)


def transformers_plan(model: nn.Module) -> ParallelizePlan | None:
    """Return the plan of a model of ``transformers``; None: nothing of it is known. Hidden states are ``[B, S, h]``.

    Raises:
        LayoutError: a declaration is unknown, or a number of heads cannot be told.
    """
    rules, towers = _layer_rules(model)
    if not rules:
        return None
    return ParallelizePlan(with_sequence_regions(model, {**rules, **_ends(model)}, towers), sequence_dim=1)


def context_plan(model: nn.Module) -> ParallelizePlan:
    """Return the plan by which ranks along ``cp`` divide the tokens between a model's layers, and heads in them.

    Raises:
        LayoutError: nothing of it can be divided. The message is a reason without its subject.
    """
    rules, towers = _layer_rules(model)
    # Encoder and decoder may have embeddings of their own.
    whole = [] if getattr(getattr(model, "config", None), "is_encoder_decoder", False) else towers
    return ParallelizePlan(context_regions(model, rules, whole), sequence_dim=1)


def _layer_rules(model: nn.Module) -> tuple[Rules, list[str]]:
    """Return the rules of attention, feed-forward layers and experts, and the names of towers.

    Raises:
        LayoutError: a declaration is unknown, or a number of heads cannot be told.
    """
    rules = declared_rules(model) if declares(model) else structural_rules(model)
    towers = _towers(model)
    for name in towers:
        if not any(f"{each}.".startswith(f"{name}.") for each in rules):
            found = structural_rules(model.get_submodule(name))
            rules |= {f"{name}.{each}" if each else name: styles for each, styles in found.items()}
    return rules | {name: StackedExperts() for name, module in model.named_modules() if stacked(module)}, towers


def _towers(model: Any) -> list[str]:
    """Return the names of models inside of one, without the embedding of its tokens: towers of images or sounds."""
    embedding = model.get_input_embeddings()
    found: list[str] = []
    for name, part in model.named_modules():
        inside = any(name.startswith(f"{each}.") for each in found)
        if name and not inside and is_transformers(part) and all(each is not embedding for each in part.modules()):
            found.append(name)
    return found


def _ends(model: Any) -> Rules:
    """Split embedding and output layer by vocabulary, if both compute nothing but what their types do."""
    modules = dict(model.named_modules())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weights = [each.weight for each in (embedding, head) if isinstance(getattr(each, "weight", None), nn.Parameter)]
    # With those whose weights are tied to one of them.
    ends = {n: m for n, m in modules.items() if any(m._parameters.get("weight") is weight for weight in weights)}
    # A head that also returns losses says that it stands for a linear layer.
    kinds = {getattr(each, "stands_for", type(each)) for each in ends.values()}
    if type(embedding) is not nn.Embedding or not kinds <= {nn.Embedding, nn.Linear}:
        return {name: Replicated() for name in ends}
    rules: Rules = {}
    for name, module in ends.items():
        rules[name] = Vocab(scatter_output=False) if type(module) is nn.Embedding else VocabHeadStyle(tokens="whole")
        if (bias := module._parameters.get("bias")) is not None:
            holders = [
                n for n, m in modules.items() if m is not module and any(p is bias for p in m._parameters.values())
            ]
            rules |= {each: Attributes(vocabulary=("bias",)) for each in holders}
    return rules
