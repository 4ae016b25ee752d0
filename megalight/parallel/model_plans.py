"""The plan of a model: registered by its family, or translated from what a model of ``transformers`` declares.

Families in ``models/`` register the plan of their type when they are imported. Models of other packages are registered
by name, so that no package is imported for it.

A declaration of ``transformers`` (``base_model_tp_plan``, ``_tp_plan``) names modules and says ``colwise`` or
``rowwise``. It does not say how many heads there are, or which counts a module reads. These are found in the modules:
attention splits in whole heads, key heads are held by several ranks where there are fewer than ranks, and counts of
heads become those of one rank. Embedding and output layer, which declarations leave whole or gather, split by
vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from megalight.errors import ConfigurationError, LayoutError
from megalight.parallel.plan import ParallelizePlan, Target
from megalight.parallel.styles import (
    Attributes,
    Boundary,
    Column,
    HeadRegion,
    Replicated,
    Row,
    SequenceRegion,
    SharedSlice,
    Style,
    Vocab,
    VocabHeadStyle,
)
from megalight.registry import Registry

PLANS: Registry[Callable[[Any], ParallelizePlan]] = Registry("parallel plan")
"""Full name of a model type -> the plan of a model of that type."""


def plan_for(model: nn.Module) -> ParallelizePlan | None:
    """The plan of a model, or the joined plans of the models inside it; None: there is none."""
    if (own := _plan_of(model)) is not None:
        return own
    found = None
    for name, module in _outermost(model, ""):
        plan = _plan_of(module)
        assert plan is not None
        found = plan.under(name) if found is None else found | plan.under(name)
    return found


def _outermost(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the models with a plan inside of another one, by their names; not what lies inside of these."""
    for name, child in model.named_children():
        if _registered(child) is not None or declares(child):
            yield prefix + name, child
        else:
            yield from _outermost(child, f"{prefix}{name}.")


def _plan_of(model: nn.Module) -> ParallelizePlan | None:
    """The plan registered for the model's type, or the one that it declares; None: no plan."""
    if (build := _registered(model)) is not None:
        return build(model)
    return declared_plan(model) if declares(model) else None


def _registered(model: nn.Module) -> Callable[[Any], ParallelizePlan] | None:
    """The plan registered for the model's type, or the first of its base types that has one."""
    # The nearest type first: a subclass that registers its own plan goes before its base.
    for kind in type(model).__mro__:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in PLANS:
            return PLANS[name]
    return None


def llama(config: Any) -> ParallelizePlan:
    """The plan of a ``LlamaForCausalLM`` of this ``LlamaConfig``.

    The model reads the sequence length off its hidden states, so the embedding hands out whole ones; sequence
    parallelism covers the decoder layers. Attention and MLP gather their tokens once, and their last projections
    scatter them again.

    Raises:
        ConfigurationError: attention dropout, which would draw one mask for different heads.
    """
    if config.attention_dropout:
        raise ConfigurationError(
            f"attention_dropout is {config.attention_dropout}, but the attention of transformers' Llama cannot draw "
            "from a stream of its own on each rank; set attention_dropout=0."
        )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    first, last = "model.layers.0", f"model.layers.{config.num_hidden_layers - 1}"
    ends: dict[str | type[nn.Module], Style | tuple[Style, ...]] = {
        first: Boundary(enter="split"),
        last: Boundary(leave="join"),
    }
    # With a single layer both rules are for the same module, and a dict has room for one.
    if first == last:
        ends = {first: Boundary(enter="split", leave="join")}
    return ParallelizePlan(
        {
            **ends,
            "model.embed_tokens": Vocab(scatter_output=False),
            "model.layers.*.self_attn": (
                # Tokens are gathered here once for all three projections, which then do not gather again.
                Boundary(enter="gather"),
                Attributes(per_unit={"num_key_value_groups": kv_heads}),
            ),
            "model.layers.*.self_attn.q_proj": Column(units=heads, tokens="gathered"),
            "model.layers.*.self_attn.[kv]_proj": Column(units=kv_heads, shared=True, tokens="gathered"),
            "model.layers.*.self_attn.o_proj": Row(),
            "model.layers.*.mlp": Boundary(enter="gather"),
            "model.layers.*.mlp.gate_proj": Column(tokens="gathered"),
            "model.layers.*.mlp.up_proj": Column(tokens="gathered"),
            "model.layers.*.mlp.down_proj": Row(),
            "model.layers.*layernorm": SequenceRegion(),
            # After the last boundary, which has joined the tokens: all ranks compute the same
            # here, and in the head.
            "model.norm": Replicated(),
            "lm_head": VocabHeadStyle(tokens="whole"),
        },
        sequence_dim=1,
    )


def plan(model: nn.Module) -> ParallelizePlan:
    """The plan of a ``transformers`` model, from its own configuration."""
    return llama(model.config)


PLANS.register("transformers.models.llama.modeling_llama.LlamaForCausalLM")(plan)

# What models of ``transformers`` declare.

SPLIT_ATTENTION = ("q_proj", "k_proj", "v_proj", "query_key_value", "q_b_proj", "kv_b_proj")
"""Names of projections to heads, in a module that is an attention."""
KEYS = ("k_proj", "v_proj")
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
WHOLE = ("colwise_gather_output", "rowwise_split_input")
"""A declaration for layers whose features cannot be divided where they stand: every rank computes them whole."""
EXPERTS = ("moe_tp_experts", "moe_identity_expert", "all_reduce", "packed_colwise", "packed_rowwise")
"""Declarations of stacked experts, which every rank holds whole."""


def declares(model: nn.Module) -> bool:
    """Return whether a model is one of ``transformers`` that declares how it splits."""
    return bool(getattr(model, "_tp_plan", None)) and hasattr(model, "config")


def declared_plan(model: nn.Module) -> ParallelizePlan:
    """Return the plan of a model of ``transformers``, from its declaration. Hidden states are ``[B, S, h]``.

    Raises:
        LayoutError: a declaration is unknown, or a number of heads cannot be told.
        ConfigurationError: dropout in attention, which would draw one mask for different heads.
    """
    config: Any = getattr(model, "config")  # noqa: B009
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "attention_dropout", 0.0):
        raise ConfigurationError(
            f"attention_dropout is {text.attention_dropout}, but attention of transformers cannot draw from a stream "
            "of its own on each rank; set attention_dropout=0."
        )
    declared: Mapping[str, str] = getattr(model, "_tp_plan")  # noqa: B009
    patterns = [(re.compile(re.escape(glob).replace(r"\*", r"\d+")), kind) for glob, kind in declared.items()]
    rules: dict[Target, Style | str | tuple[Style | str, ...]] = {}
    modules = dict(model.named_modules())
    kinds = {name: kind for name in modules if (kind := _kind(name, patterns)) is not None}
    for name, module in modules.items():
        if (kind := kinds.get(name)) is not None and name not in rules:
            rules |= _rules(name, module, kind, kinds, modules)
        if _is_split_activation(name, module, kinds):
            rules[name] = HeadRegion()
        per_head = tuple(local for local in module._parameters if _kind(f"{name}.{local}", patterns) == "colwise")
        if (found := _attention(module, name, kinds, per_head)) is not None:
            rules[name] = found
    return ParallelizePlan({**rules, **_ends(model, modules)}, sequence_dim=1)


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
) -> dict[Target, Style | str | tuple[Style | str, ...]]:
    outer, _, local = name.rpartition(".")
    if kind == "colwise":
        units = _units(name, module, modules[outer])
        return {name: Column(units=units, shared=local in KEYS, tokens="whole")}
    if kind == "rowwise":
        return {name: Row()}
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


def _rows(module: nn.Module) -> int:
    """Return the output features of a linear layer."""
    return int(module.get_parameter("weight").shape[0])


def _columns(module: nn.Module) -> int:
    """Return the input features of a linear layer."""
    return int(module.get_parameter("weight").shape[1])


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


def _attention(module: nn.Module, name: str, kinds: Mapping[str, str], per_head: tuple[str, ...]) -> Style | None:
    """Return how the counts of an attention whose heads are divided change; None: it is none."""
    divided = [local for local in SPLIT_ATTENTION if kinds.get(f"{name}.{local}") == "colwise"]
    if not divided:
        return None
    own = vars(module)
    keys = _count(module, KEY_COUNTS)
    if "k_proj" in divided:
        head_dim = getattr(module, "head_dim", None)
        keys = _rows(module.get_submodule("k_proj")) // head_dim if head_dim else keys
    return Attributes(
        divide=tuple(each for each in COUNTS if isinstance(own.get(each), int)),
        at_least_one=tuple(each for each in KEY_COUNTS if isinstance(own.get(each), int)),
        per_unit={"num_key_value_groups": keys} if keys and isinstance(own.get("num_key_value_groups"), int) else {},
    )


def _ends(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[Target, Style | str | tuple[Style | str, ...]]:
    """Split embedding and output layer by vocabulary, if both compute nothing but what their types do."""
    names = {id(module): name for name, module in modules.items()}
    get = (getattr(model, "get_input_embeddings", None), getattr(model, "get_output_embeddings", None))
    embedding, head = (None if each is None else each() for each in get)
    if type(embedding) is not nn.Embedding or id(embedding) not in names:
        return {} if head is None else {names[id(head)]: Replicated()}
    if head is not None and type(head) is not nn.Linear:
        return {names[id(head)]: Replicated()}
    ends: dict[Target, Style | str | tuple[Style | str, ...]] = {names[id(embedding)]: Vocab(scatter_output=False)}
    if head is not None:
        ends[names[id(head)]] = VocabHeadStyle(tokens="whole")
    return ends
