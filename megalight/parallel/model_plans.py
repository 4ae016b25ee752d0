"""The plan of a model: registered by its family, or found for a model of ``transformers``.

Families in ``models/`` register the plan of their type when they are imported. Models of other packages are registered
by name, so that no package is imported for it.

Layers of a model of ``transformers`` split as it declares, or by their form (``structural_plan``).
Embedding and output layer, which declarations leave whole or gather, split by vocabulary. Rules of sequence parallelism
are added (``sequence_regions``).

A declaration (``base_model_tp_plan``, ``_tp_plan``) names modules and says ``colwise`` or ``rowwise``. It does not say
how many heads there are, or which counts a module reads. These are found in the modules: attention splits in whole
heads, key heads are held by several ranks where there are fewer than ranks, and counts of heads become those of one
rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from megalight.errors import LayoutError
from megalight.parallel.context_regions import context_regions
from megalight.parallel.layers import is_transformers
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.sequence_regions import with_sequence_regions
from megalight.parallel.structural_plan import (
    COUNTS,
    KEY_COUNTS,
    Rules,
    names_read,
    refused_dropout,
    rms_eps,
    structural_rules,
    why_whole,
)
from megalight.parallel.styles import (
    Attributes,
    Column,
    Dropout,
    HeadRegion,
    Replicated,
    Row,
    SequenceRegion,
    SharedSlice,
    StackedExperts,
    Style,
    Vocab,
    VocabHeadStyle,
    WideNorm,
)
from megalight.parallel.styles.experts import stacked
from megalight.parallel.styles.style import kind_of
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


def why_no_plan(model: nn.Module) -> str:
    """Return what of a model has no plan and, for one of ``transformers`` or around it, why: a clause."""
    inside = [("", model)] if is_transformers(model) else _outermost(model, "")
    for name, module in inside:
        return f"no plan for {name or 'the model'} ({type(module).__name__}), which {why_whole(module)}"
    return f"no plan for {type(model).__name__}"


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
    kinds = {kind_of(each) for each in ends.values()}
    around = {modules[name.rpartition(".")[0]] for name in ends}
    # MobileBERT multiplies by the weight of its head and by another one at once.
    read = any("weight" in names_read(each) for each in around if not is_transformers(each))
    if type(embedding) is not nn.Embedding or not kinds <= {nn.Embedding, nn.Linear} or read:
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


SPLIT_ATTENTION = ("q_proj", "k_proj", "v_proj", "query_key_value", "q_b_proj", "kv_b_proj")
"""Names of projections to heads, in a module that is an attention."""
HEADS = ("q_proj", "k_proj", "v_proj")
KEYS = ("k_proj", "v_proj")
WHOLE = ("colwise_gather_output", "rowwise_split_input")
"""A declaration for layers whose features cannot be divided where they stand: every rank computes them whole."""
EXPERTS = ("moe_tp_experts", "moe_identity_expert", "all_reduce", "packed_colwise", "packed_rowwise")
"""Declarations of stacked experts, which ``styles/experts.py`` splits by their form, and of what lies around them."""

ADAPTER_PARTS = ("base_layer", "lora_A", "lora_B", "lora_dropout")
"""What a plain LoRA layer of ``peft`` has."""


def declares(model: nn.Module) -> bool:
    """Return whether a model is one of ``transformers`` that declares how it splits."""
    return bool(getattr(model, "_tp_plan", None)) and hasattr(model, "config")


def declared_rules(model: nn.Module) -> Rules:
    """Return the rules of attention, feed-forward layers and their norms, from a model's declaration.

    Raises:
        LayoutError: a declaration is unknown, or a number of heads cannot be told.
    """
    config: Any = getattr(model, "config")  # noqa: B009
    refused = refused_dropout(config.get_text_config() if hasattr(config, "get_text_config") else config)
    declared: Mapping[str, str] = getattr(model, "_tp_plan")  # noqa: B009
    patterns = [(re.compile(re.escape(glob).replace(r"\*", r"\d+")), kind) for glob, kind in declared.items()]
    rules: Rules = {}
    modules = dict(model.named_modules())
    kinds = {name: kind for name in modules if (kind := _kind(name, patterns)) is not None}
    for name, module in modules.items():
        if norms := _wide_norms(name, module, kinds):
            rules |= norms
            kinds |= {f"{name}.{each}": "colwise" for each in HEADS} | {f"{name}.o_proj": "rowwise"}
    for name, module in modules.items():
        if (kind := kinds.get(name)) is not None and name not in rules:
            rules |= _rules(name, module, kind, kinds, modules)
        if _is_split_activation(name, module, kinds):
            rules[name] = HeadRegion()
        per_head = {local: 0 for local in module._parameters if _kind(f"{name}.{local}", patterns) == "colwise"}
        if (found := _attention(module, name, kinds, per_head)) is not None:
            rules[name] = (*refused, found)
            # Norms of single heads, which some declarations leave out.
            size = getattr(module, "head_dim", None)
            for local, child in module.named_children():
                weights = [*child.parameters()]
                if f"{name}.{local}" not in rules and weights and all(p.numel() == size for p in weights):
                    rules[f"{name}.{local}"] = HeadRegion()
    return rules


def _wide_norms(name: str, module: nn.Module, kinds: Mapping[str, str]) -> Rules:
    """Return the rules of norms over all heads together, for which an attention declares to be whole; empty: it is not.

    Its projections then split as others do, and mean squares are averaged over ranks.
    """
    wanted = {**dict.fromkeys(HEADS, "colwise_gather_output"), "o_proj": "rowwise_split_input"}
    size = getattr(module, "head_dim", None)
    if any(kinds.get(f"{name}.{each}") != kind for each, kind in wanted.items()) or not isinstance(size, int):
        return {}
    widths = {_rows(module.get_submodule(each)) for each in HEADS}
    rules: Rules = {}
    for local, child in module.named_children():
        if local in wanted or not any(True for _ in child.parameters()):
            continue
        if (eps := rms_eps(child)) is None or (width := child.get_parameter("weight").numel()) not in widths:
            return {}
        rules[f"{name}.{local}"] = WideNorm(width // size, eps)
    return {} if any(p is not None for p in module._parameters.values()) else rules


def _is_split_activation(name: str, module: nn.Module, kinds: Mapping[str, str]) -> bool:
    """Return whether a module is an activation with single numbers as weights, on features of which a rank has a part.

    Each rank's gradient of such a number is then one term of a sum, as that of a norm of heads is.
    """
    outer, _, local = name.rpartition(".")
    numbers = [parameter.numel() == 1 for parameter in module.parameters()]
    return local == "act_fn" and kinds.get(f"{outer}.up_proj") == "colwise" and bool(numbers) and all(numbers)


def _kind(name: str, patterns: list[tuple[re.Pattern[str], str]]) -> str | None:
    return next((kind for pattern, kind in patterns if pattern.fullmatch(name)), None)


def _rules(
    name: str, module: nn.Module, kind: str, kinds: Mapping[str, str], modules: Mapping[str, nn.Module]
) -> Rules:
    outer, _, local = name.rpartition(".")
    if kind == "colwise":
        units = _units(name, module, modules[outer])
        return _linear(name, module, Column(units=units, shared=local in KEYS, tokens="whole"))
    if kind == "rowwise":
        return _linear(name, module, Row())
    if kind == "embedding_rowwise":  # split with the output layer
        return {}
    if kind == "replicated_with_grad_allreduce":
        whole = kinds.get(f"{outer}.q_proj", "colwise") != "colwise"
        return {name: Replicated() if whole else HeadRegion()}
    if kind == "mla_kv_a_proj":
        return {name: SharedSlice(int(modules[outer].qk_rope_head_dim))}  # type: ignore[arg-type]
    if kind in WHOLE or kind in EXPERTS:
        down = f"{outer}.down_proj"
        if local == "gate_up_proj" and kinds.get(down) == "rowwise_split_input":
            both = module, modules[down]
            # Two halves, whose product the second layer reads.
            if all(isinstance(each, nn.Linear) for each in both) and _rows(module) == 2 * _columns(modules[down]):
                half = _columns(modules[down])
                return {name: Column(sizes=(half, half), tokens="whole"), down: Row()}
        return {name: Replicated()}
    raise LayoutError(
        f"{name} ({type(module).__name__}) declares {kind!r} to be its way to split, which is not known; pass plan=... "
        "to the strategy."
    )


def _linear(name: str, module: nn.Module, style: Style) -> Rules:
    """Return the rules of a declared linear layer: the module, or the only one in it (Gemma 4 clips around it)."""
    if "base_layer" in module._modules:  # a layer of peft around one of the model
        return _adapted_rules(name, module, style)
    inside = [local for local, child in module.named_children() if kind_of(child) is nn.Linear]
    return {f"{name}.{inside[0]}" if len(inside) == 1 else name: style}


def _rows(module: nn.Module) -> int:
    """Return the output features of a linear layer."""
    return int(next(module.parameters()).shape[0])


def _columns(module: nn.Module) -> int:
    """Return the input features of a linear layer."""
    return int(next(module.parameters()).shape[1])


def _units(name: str, module: nn.Module, outer: nn.Module) -> int | None:
    """Return the number of heads that the outputs of a projection consist of; None: it is no projection to heads."""
    local = name.rpartition(".")[2]
    head_dim = next((int(d) for a in ("head_dim", "head_size") if (d := getattr(outer, a, None))), None)
    head_dim = int(outer.v_head_dim) if local == "v_proj" and hasattr(outer, "v_head_dim") else head_dim  # type: ignore[arg-type]
    rows = _rows(module)
    if local in ("q_b_proj", "kv_b_proj") or (local == "q_proj" and hasattr(outer, "qk_head_dim")):
        return int(outer.num_heads)  # type: ignore[arg-type]
    if local == "query_key_value":
        return int(outer.config.num_attention_heads)  # type: ignore[union-attr, arg-type]
    if local not in SPLIT_ATTENTION and not (head_dim and hasattr(outer, "q_proj")):
        return None
    if head_dim is None or rows % head_dim:
        heads = _count(outer, COUNTS)
        if heads and rows == heads:  # one number for each head, such as a gate
            return heads
        raise LayoutError(
            f"{name}: {rows} features are no heads of {head_dim} features, so that it is not known how they split over "
            "ranks; pass plan=... to the strategy, or set tp=1."
        )
    return rows // head_dim


def _count(module: nn.Module, names: tuple[str, ...]) -> int | None:
    return next((v for name in names if isinstance(v := vars(module).get(name), int)), None)


def _check_rows(module: nn.Module, name: str, kinds: Mapping[str, str], head_dim: int) -> None:
    """Refuse a declaration by which one layer of an attention has the heads of all ranks, and others those of one.

    Raises:
        LayoutError: names the layer.
    """
    query, key = module.get_submodule("q_proj"), module.get_submodule("k_proj")
    heads = {_rows(each) // head_dim for each in (query, key)}
    for local, child in module.named_children():
        rows = _rows(child) if kinds.get(f"{name}.{local}") == "rowwise" else 0
        if rows in heads and rows != _columns(query):
            raise LayoutError(
                f"{name}.{local} is declared rowwise, so that every rank has its {rows} outputs, one for each head, "
                f"beside attention with its own heads: the declaration of {type(module).__name__} is wrong. Pass "
                "plan=... to the strategy, or set tp=1."
            )


def _attention(module: nn.Module, name: str, kinds: Mapping[str, str], per_head: Mapping[str, int]) -> Style | None:
    """Return how the counts of an attention whose heads are divided change; None: it is none."""
    divided = [local for local in SPLIT_ATTENTION if kinds.get(f"{name}.{local}") == "colwise"]
    if not divided:
        return None
    own = vars(module)
    keys = _count(module, KEY_COUNTS)
    if "k_proj" in divided:
        head_dim = getattr(module, "head_dim", None)
        if head_dim and "q_proj" in divided:
            _check_rows(module, name, kinds, head_dim)
        keys = _rows(module.get_submodule("k_proj")) // head_dim if head_dim else keys
    return Attributes(
        divide=tuple(each for each in COUNTS if isinstance(own.get(each), int)),
        at_least_one=tuple(each for each in KEY_COUNTS if isinstance(own.get(each), int)),
        per_unit={"num_key_value_groups": keys} if keys and isinstance(own.get("num_key_value_groups"), int) else {},
        per_head=per_head,
    )


def _adapted_rules(name: str, module: nn.Module, style: Style) -> Rules:
    """Return the rules of a LoRA layer of ``peft``, which splits with the linear layer that it adapts.

    Beside a layer with split output features, ``A`` is whole and ``B`` split like the weight: the backward sums the
    gradient of the narrow features before it reaches ``A``. Beside one with split input features, ``A`` is split like
    the weight, its narrow outputs are summed over ranks, and ``B`` is whole. Source: https://arxiv.org/abs/2106.09685

    Args:
        name: its name.
        module: a layer of ``peft``.
        style: how the linear layer in it splits.

    Raises:
        LayoutError: the adapter is no plain LoRA, or the layer in it is no plain linear layer.
    """
    base, dropouts = module._modules["base_layer"], module._modules.get("lora_dropout")
    other = next((each for each, _ in module.named_parameters() if each.partition(".")[0] not in ADAPTER_PARTS), None)
    if kind_of(base) is not nn.Linear or other is not None or not isinstance(dropouts, nn.ModuleDict):
        what = f"around a {type(base).__name__}" if kind_of(base) is not nn.Linear else f"with {other or 'no lora_A'}"
        raise LayoutError(
            f"{name} is an adapter of peft {what}, and tensor parallelism splits plain LoRA around nn.Linear. Leave "
            "the layer out of target_modules, use plain LoRA, or set tensor_parallel=1."
        )
    row = isinstance(style, Row)
    rules: Rules = {f"{name}.base_layer": style}
    for key, dropout in dropouts.items():
        rules[f"{name}.lora_A.{key}"] = Row() if row else Replicated()
        rules[f"{name}.lora_B.{key}"] = SequenceRegion() if row else style
        if isinstance(dropout, nn.Dropout):
            # Ranks have features of their own before a row layer, and the same ones before a column layer.
            rules[f"{name}.lora_dropout.{key}"] = Dropout(split=True) if row else Replicated()
    return rules
