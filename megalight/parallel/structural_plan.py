"""The plan of a model of ``transformers`` that declares none, by the form of its attention and feed-forward layers.

A form is a set of names of linear layers in one module: ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``. A module is
split if its names are those of a form, its shapes agree with each other, and nothing in it is unknown. All others are
computed whole by every rank, which is always right; the log names them. Fused layers of attention hold queries, keys
and values in an order that no shape tells, so these are known by their classes.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from types import CodeType
from typing import Any, TypeAlias

import torch
from torch import nn

from megalight.first_rank import only_first
from megalight.parallel.plan import Target
from megalight.parallel.styles import Attributes, Column, ConvColumn, ConvRow, HeadRegion, OwnHeads, Refused, Row, Style
from megalight.parallel.styles.linear import is_transposed
from megalight.parallel.styles.style import is_named_linear, kind_of

log = logging.getLogger(__name__)
log.addFilter(only_first)

Rules: TypeAlias = dict[Target, Style | str | tuple[Style | str, ...]]

PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("Wq", "Wk", "Wv"),
    ("q_lin", "k_lin", "v_lin"),
    ("project_q", "project_k", "project_v"),
    ("query_proj", "key_proj", "value_proj"),
)
"""Names of the projections to queries, keys and values."""
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "o", "out_lin", "proj", "Wo", "attention_out")
"""Names of the projection from heads. BERT's is ``output.dense``, in the module around."""
FUSED = {
    "modeling_gpt2.GPT2Attention": ("c_attn", 3),
    "modeling_decision_transformer.DecisionTransformerGPT2Attention": ("c_attn", 3),
    "modeling_imagegpt.ImageGPTAttention": ("c_attn", 3),
    "modeling_openai.Attention": ("c_attn", 3),
    "modeling_mpt.MptAttention": ("Wqkv", 3),
    "modeling_bloom.BloomAttention": ("query_key_value", 1),
    "modeling_gpt_neox.GPTNeoXAttention": ("query_key_value", 1),
    "modeling_persimmon.PersimmonAttention": ("query_key_value", 1),
}
"""File and class of an attention -> its fused layer, and 3 sections of all heads, or 1 with all three of each head."""
UNORDERED = ("query_key_value", "qkv_proj", "c_attn", "Wqkv", "qkv", "in_proj_qkv")
"""Names of fused layers of attention, in classes that are not known."""
FEED_FORWARDS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("Wi",), "Wo"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("fc_in",), "fc_out"),
    (("lin1",), "lin2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"),
)
"""Names of the layers to the inner width, and of the layer back."""
HALVES = ("gate_up_proj", "Wi", "fc1", "wi")
"""Layers to the inner width that may hold a gate besides, one half after the other."""
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "dim_head", "dim_per_head", "depth", "head_size")
WIDTHS = ("embed_dim", "hidden_size", "all_head_size", "split_size", "inner_dim", "d_model_size", "n_embd", "dim")
"""Attributes of an attention that may count the features of all of its heads."""
ALL_HEADS = {"alibi": "", "position_bias": "modeling_mpt.MptAttention"}
"""Argument with numbers for all heads -> the only attention where its first dim counts them; empty: wherever it is."""
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "activation_dropout", "act_dropout")
"""Settings of dropout in attention and between feed-forward layers, where ranks hold different heads and features."""


def is_linear(module: nn.Module | None) -> bool:
    """Return whether a module is a linear layer that computes nothing but what its type does."""
    if module is None:
        return False
    return kind_of(module) is nn.Linear or is_transposed(module) or is_named_linear(module)


def features(linear: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer."""
    rows, columns = linear.get_parameter("weight").shape
    return (rows, columns) if is_transposed(linear) else (columns, rows)


def rms_eps(norm: nn.Module) -> float | None:
    """Return what an RMS norm with a weight adds to the mean square; None: the module computes something else.

    It is tried on random numbers.
    """
    eps = next((v for each in ("variance_epsilon", "eps") if isinstance(v := vars(norm).get(each), float)), None)
    weight = norm._parameters.get("weight")
    if eps is None or weight is None or weight.dim() != 1 or len([*norm.parameters()]) > 1 or norm._forward_hooks:
        return None
    shell, draw = copy.copy(norm), torch.Generator().manual_seed(0)
    x, factor = torch.randn(2, 3, len(weight), generator=draw), torch.rand(len(weight), generator=draw)
    shell._parameters = {"weight": nn.Parameter(factor)}
    with torch.no_grad(), torch.device("cpu"):
        found, wanted = shell(x), x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * factor
    same = isinstance(found, torch.Tensor) and found.shape == x.shape and torch.allclose(found, wanted, 1e-4, 1e-5)
    return eps if same else None


def column(linear: nn.Module, *, units: int | None = None, sections: int = 1, shared: bool = False) -> Style:
    """Return the style that splits the output features of a linear layer, in equal sections of ``units``."""
    if is_transposed(linear):
        return ConvColumn(sections, units, tokens="whole")
    if sections == 1:
        return Column(units=units, shared=shared, tokens="whole")
    sizes = (features(linear)[1] // sections,) * sections
    return Column(sizes=sizes, counts=(units,) * sections if units else (), tokens="whole")


def row(linear: nn.Module) -> Style:
    """Return the style that splits the input features of a linear layer."""
    return ConvRow() if is_transposed(linear) else Row()


def refused_dropout(config: Any) -> tuple[Refused, ...]:
    """Return the style that refuses dropout inside of modules whose heads and features ranks divide."""
    for name in DROPOUTS:
        if isinstance(p := getattr(config, name, 0.0), float) and p:
            reason = (
                f"draws {name}={p}, but modules of transformers cannot draw from a stream of their own on each rank, "
                f"and would draw one mask for different heads and features; set {name}=0, or tp=1."
            )
            return (Refused(reason),)
    return ()


def _forms(model: nn.Module) -> Iterator[tuple[str, nn.Module, Rules | str]]:
    """Yield attention and feed-forward layers by name, with their rules, or the reason why these are not known."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        outer = modules.get(name.rpartition(".")[0]) if name else None
        if (found := _attention(name, module, outer) or feed_forward(name, module)) is not None:
            yield name, module, found


def why_whole(model: nn.Module) -> str:
    """Return why no layer of a model is split by its form, as a sentence whose subject is the model."""
    for name, module, found in _forms(model):
        if isinstance(found, str):
            return f"declares none, and {name} ({type(module).__name__}) does not split: {found}"
    return "declares none, and has no attention and no feed-forward layer of a known form"


def structural_rules(model: nn.Module) -> Rules:
    """Return the rules of attention and feed-forward layers of known forms; the log names modules of no known form."""
    rules: Rules = {}
    blocks, whole = 0, []
    refused = refused_dropout(getattr(model, "config", None))
    for name, module, found in _forms(model):
        if isinstance(found, str):
            whole.append(f"{name} ({type(module).__name__}: {found})")
        else:
            blocks += 1
            own = found.pop(name, ())
            if refused or own:
                rules[name] = (*refused, *(own if isinstance(own, tuple) else (own,)))
            rules |= found
    if blocks:
        log.info(
            "%s declares no plan: %d attention and feed-forward layers split by their structure%s",
            type(model).__name__,
            blocks,
            f"; whole on each rank: {', '.join(whole[:3])}{' ...' if whole[3:] else ''}" if whole else "",
        )
    return rules


def _child(module: nn.Module | None, name: str) -> nn.Module | None:
    for part in name.split("."):
        module = None if module is None else module._modules.get(part)
    return module


def feed_forward(name: str, module: nn.Module) -> Rules | str | None:
    """Return the rules of two linear layers with an activation between; a reason why not; None: there are none."""
    for ups, down in FEED_FORWARDS:
        first, last = [_child(module, up) for up in ups], _child(module, down)
        if last is None or any(each is None for each in first):
            continue
        if not all(map(is_linear, (*first, last))):
            return "its layers are of no known type"
        width = features(last)[0]
        sizes = [features(each)[1] for each in first]  # type: ignore[arg-type]
        halves = sizes == [2 * width] and ups[0] in HALVES
        if any(size != width for size in sizes) and not halves:
            return f"{sizes} features do not become {width}"
        # A norm or an activation with weights, of the inner features.
        names = {*(up.partition(".")[0] for up in ups), down.partition(".")[0]}
        inner = [each for each, child in module.named_children() if each not in names and _sees(child, width, sizes)]
        if inner:
            return f"{', '.join(inner)} may see features of all ranks"
        prefix = f"{name}." if name else ""
        rules: Rules = {f"{prefix}{down}": row(last)}
        for up, each in zip(ups, first, strict=True):
            rules[f"{prefix}{up}"] = column(each, sections=2 if halves else 1)  # type: ignore[arg-type]
        return rules
    return None


def _sees(module: nn.Module, width: int, sizes: list[int]) -> bool:
    """Return whether a module has weights for ``width`` features, or for any (single numbers), or makes ``sizes``."""
    shapes = [parameter.shape for parameter in module.parameters()]
    return any(shape[-1:].numel() in (1, width) or shape[0] in sizes for shape in shapes)


def _attention(name: str, module: nn.Module, outer: nn.Module | None) -> Rules | str | None:
    """Return the rules of an attention; a reason why not; None: it is none."""
    if _class_of(module) == "modeling_falcon.FalconAttention":
        return _falcon(name, module)
    kind = FUSED.get(_class_of(module))
    names = next((each for each in PROJECTIONS if all(local in module._modules for local in each)), None)
    if names is None and kind is None:
        fused = next((local for local in UNORDERED if local in module._modules), None)
        return None if fused is None else f"the order of features of {fused} is not known"
    projections = names or (kind[0],)  # type: ignore[index]
    output = next((local for local in OUTPUTS if local in module._modules), None)
    prefix = f"{name}." if name else ""
    out, path = module._modules.get(output or ""), f"{prefix}{output}"
    if output is None:
        out, path = _child(outer, "output.dense"), f"{name.rpartition('.')[0]}.output.dense".lstrip(".")
    if hasattr(outer, "set_attention_type"):
        return "it is replaced while the model runs"
    linears = [module._modules[local] for local in projections]
    if out is None or not all(map(is_linear, (*linears, out))):
        return "its projections are of no known type" if out is not None else "it has no known output projection"
    width = features(out)[0]
    heads, key_heads = _heads(module, width)
    if heads is None or width % heads:
        return "its number of heads is not known"
    size = width // heads
    wide = [features(each)[1] for each in linears]  # type: ignore[arg-type]
    if (names and (wide[0] != width or any(each % size for each in wide))) or (not names and wide != [3 * width]):
        return f"{wide} features are no heads of {size}"
    if (reason := _unknown(module, projections, output, size)) is not None:
        return reason
    rules: Rules = {path: row(out)}
    for local, linear in zip(projections, linears, strict=True):
        assert linear is not None
        if kind is not None and not names:
            rules[f"{prefix}{local}"] = column(linear, units=heads, sections=kind[1])
        else:
            first = local == projections[0]
            rules[f"{prefix}{local}"] = column(linear, units=features(linear)[1] // size, shared=not first)
    for local, child in module.named_children():
        if "norm" in type(child).__name__.lower() and next(child.parameters(), None) is not None:
            rules[f"{prefix}{local}"] = HeadRegion()
        if local == "relative_attention_bias":
            rules[f"{prefix}{local}"] = Attributes(per_head={"weight": 1})
    read = names_read(module)
    own = vars(module)
    keys = key_heads or (features(linears[1])[1] // size if names else heads)  # type: ignore[arg-type]
    divided = [each for each in COUNTS if own.get(each) == heads]
    divided += [each for each in WIDTHS if own.get(each) == width and each in read]
    counts = Attributes(
        divide=tuple(divided),
        at_least_one=tuple(each for each in KEY_COUNTS if isinstance(own.get(each), int)),
        per_unit={each: keys for each in ("num_key_value_groups", "num_kv_groups") if isinstance(own.get(each), int)},
    )
    sliced = tuple(OwnHeads(each, heads) for each in ALL_HEADS if each in inspect.signature(module.forward).parameters)
    if _makes_bias(module):
        sliced = ()
    rules[name] = (*sliced, counts)
    return rules


def _falcon(name: str, module: Any) -> Rules | str:
    """Return the rules of Falcon's attention, whose fused layer has one of three orders; a reason why not."""
    if module.config.alibi:  # in one of two shapes
        return "it is called with an alibi of all heads"
    heads, size = module.num_heads, module.head_dim
    if module.multi_query and not module.new_decoder_architecture:
        # All queries, then the only key and value, which every rank holds.
        fused = Column(sizes=(heads * size, size, size), counts=(heads, 1, 1), tokens="whole")
        counts: tuple[str, ...] = ("num_heads",)
    else:
        # Groups of queries with their key and value.
        fused = Column(units=module.num_kv_heads if module.new_decoder_architecture else heads, tokens="whole")
        counts = ("num_heads", "num_kv_heads")
    return {
        f"{name}.query_key_value": fused,
        f"{name}.dense": Row(),
        name: Attributes(divide=counts),
    }


def _class_of(module: nn.Module) -> str:
    return f"{type(module).__module__.rpartition('.')[2]}.{type(module).__qualname__}"


def _makes_bias(module: nn.Module) -> bool:
    """Return whether an attention of this class makes a bias for its heads itself (T5), in some layers."""
    return hasattr(module, "has_relative_attention_bias")


def _heads(module: nn.Module, width: int) -> tuple[int | None, int | None]:
    """Return the numbers of query heads and, if it is stated, of key heads."""
    own = vars(module)
    heads = next((v for each in COUNTS if isinstance(v := own.get(each), int)), None)
    size = next((v for each in HEAD_SIZES if isinstance(v := own.get(each), int)), None)
    if heads is None and size and not width % size:
        heads = width // size
    if heads is not None and size is not None and heads * size != width:
        return None, None
    return heads, next((v for each in KEY_COUNTS if isinstance(v := own.get(each), int)), None)


def _unknown(module: nn.Module, projections: tuple[str, ...], output: str | None, size: int) -> str | None:
    """Return what in an attention is of no known form."""
    if any(parameter is not None for parameter in module._parameters.values()):
        return "it has weights of its own"
    for local, child in module.named_children():
        parameters = list(child.parameters())
        if local in projections or local in (output, "relative_attention_bias") or not parameters:
            continue
        if "norm" not in type(child).__name__.lower() or any(p.numel() != size for p in parameters):
            return f"{local} is of no known form"
    read = names_read(module)
    for argument, only in ALL_HEADS.items():
        called = argument in inspect.signature(module.forward).parameters and not _makes_bias(module)
        if called and only not in ("", _class_of(module)):
            return f"it is called with a {argument} of all heads"
    own = module.forward.__code__.co_varnames if hasattr(module.forward, "__code__") else ()
    if widths := sorted({*WIDTHS} & {*own}):
        return f"it reads its {widths[0]} off its input"
    if "config" in read and (found := read & {*COUNTS, *KEY_COUNTS} - vars(module).keys()):
        return f"it reads {', '.join(sorted(found))} of its configuration"
    return None


def names_read(module: nn.Module) -> set[str]:
    """Return the names that methods of a module's class use, but the constructor."""
    return {
        name
        for kind in type(module).__mro__
        if kind is not nn.Module and kind is not object
        for name in _names_of(kind)
    }


def _names_of(kind: type) -> Iterator[str]:
    for name, method in vars(kind).items():
        code = getattr(inspect.unwrap(method) if callable(method) else None, "__code__", None)
        if code is not None and name != "__init__":
            yield from _names_in(code)


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code and the functions in it use."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)
