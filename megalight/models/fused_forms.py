"""What a module of ``transformers`` computes, found by trying it.

A form is what our ops can compute in place of a module: an RMS norm with some epsilon, SwiGLU, a decoder layer with
four norms. Names and shapes say which forms a module may have. Then a copy of it with random weights, on the CPU and
without hooks, is called once, and has a form only if the numbers are those of the form. A copy keeps the module's
attributes, so that multipliers and limits count.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megalight.attachments import FUSED_FORM, attach_modules, shadow_of
from megalight.nn.transformers_attention import NAME, LazyMask
from megalight.ops.activation import REFERENCE_KINDS, reference_gated_pair, weighted
from megalight.ops.norm import reference_layer_norm, reference_rms_norm
from megalight.ops.rotary import reference_apply_rotary
from megalight.parallel.structural_plan import FEED_FORWARDS, OUTPUTS

PROBE = "megalight_probe"
"""Name of an attention function that records its arguments."""


class NoForm(Exception):
    """A module has none of the known forms."""


# Copies that are tried


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random numbers on the CPU, without touching torch's own stream."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def shell(
    module: nn.Module,
    modules: Mapping[str, nn.Module] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 3,
    without: Collection[str] = (),
) -> Any:
    """Return a copy of a module in training mode, without hooks, with random parameters and other modules inside.

    ``without``: names of parameters that the caller draws itself, as they are large.

    Raises:
        NoForm: it draws dropout, or its ``forward`` was replaced.
    """
    if "forward" in vars(module) or any(isinstance(each, nn.Dropout) and each.p for each in module.children()):
        raise NoForm
    hooks = {name for name, value in vars(module).items() if name.endswith("_hooks") and isinstance(value, OrderedDict)}
    parameters = {
        name: None
        if each is None or name in without
        else nn.Parameter(0.5 * draw(*each.shape, seed=seed + number, dtype=dtype))
        for number, (name, each) in enumerate(module._parameters.items())
    }
    return shadow_of(
        module,
        {**module._modules, **(modules or {})},
        training=True,
        _buffers={name: _on_cpu(each) for name, each in module._buffers.items()},
        _parameters=parameters,
        **{name: OrderedDict() for name in hooks},
    )


def _on_cpu(buffer: Tensor | None) -> Tensor | None:
    if buffer is None or buffer.device.type != "meta":
        return None if buffer is None else buffer.cpu()
    return torch.linspace(0.1, 1, buffer.numel()).view(buffer.shape).to(buffer.dtype)


def linear(inputs: int, outputs: int, bias: bool, seed: int) -> nn.Linear:
    """Return a linear layer with random weights in float64."""
    found = nn.Linear(1, 1, bias=False, device="meta")
    found.in_features, found.out_features = inputs, outputs
    found.weight = nn.Parameter(draw(outputs, inputs, seed=seed) / inputs**0.5)
    found.bias = nn.Parameter(draw(outputs, seed=seed + 1)) if bias else None  # type: ignore[assignment]
    return found


def _outputs(module: nn.Module) -> int:
    """Return the output features of a layer."""
    known = getattr(module, "out_features", None)
    return known if isinstance(known, int) else int(next(module.parameters()).shape[0])


def _has_bias(module: nn.Module) -> bool:
    return any(name.endswith("bias") for name, _ in module.named_parameters())


def same(found: Any, wanted: Tensor) -> bool:
    """Return whether a tensor is another one, up to rounding of float32."""
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        return False
    return bool(((found.double() - wanted.double()).abs().max() <= 1e-5 * wanted.double().abs().max()).item())


def takes(module: nn.Module) -> tuple[set[str], bool]:
    """Return the names of a module's arguments, and whether it takes any others by name."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - {"self"}
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


@contextmanager
def trying() -> Iterator[None]:
    """Try copies on the CPU, without a graph."""
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        yield


def tried(find: Callable[[Any], Any], module: nn.Module) -> Any:
    """Return the form that ``find`` gives to a module; None: it has none.

    A module may be anything, so that any error of its copy means that it has no form.
    """
    try:
        with trying():
            return find(module)
    except Exception:
        return None


# Norms


@dataclass(frozen=True)
class NormForm:
    """``x / rms(x) * (weight + offset)``, or a layer norm.

    Attributes:
        kind: ``rms`` or ``layer``.
        eps: added to the mean square.
        offset: added to the weight: 1 in Gemma.
    """

    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0

    def reference(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the norm of ``x [..., h]``."""
        weight = weight + self.offset
        if self.kind == "rms":
            return reference_rms_norm(x, weight, self.eps)
        return reference_layer_norm(x, weight, bias, self.eps)


def norm_form(module: nn.Module) -> NormForm | None:
    """Return the form of a norm with one weight of all features."""
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or weight.dim() != 1 or module._modules or module._buffers or len(module._parameters) > 2:
        return None
    # One with a further argument, such as a gate, may compute something else where that is given.
    if len(takes(module)[0]) != 1:
        return None
    tried_one, x = shell(module, dtype=torch.float32), 0.01 * draw(3, len(weight), dtype=torch.float32)
    weight, bias, found = tried_one.weight, tried_one._parameters.get("bias"), tried_one(x)
    for eps in dict.fromkeys(v for v in vars(module).values() if isinstance(v, float)):
        for form in (NormForm("rms", eps), NormForm("rms", eps, 1.0), NormForm("layer", eps)):
            if (bias is None or form.kind == "layer") and same(found, form.reference(x, weight, bias)):
                return form
    return None


# Gated feed-forward layers


@dataclass(frozen=True)
class FeedForwardForm:
    """``down(act(gate) * up)``.

    Attributes:
        ups: names of the layers to gate and up, or of one layer to both, gate first.
        down: name of the layer back.
        kind: name of our activation.
    """

    ups: tuple[str, ...]
    down: str
    kind: str


def feed_forward_form(module: nn.Module) -> FeedForwardForm | None:
    """Return the form of a gated feed-forward layer."""
    for ups, down in FEED_FORWARDS:
        if any(name not in module._modules for name in (*ups, down)):
            continue
        sizes = [_outputs(module._modules[name]) for name in ups]  # type: ignore[arg-type]
        inner = sizes[0] if len(ups) == 2 else sizes[0] // 2
        parts: dict[str, nn.Module] = {
            name: linear(4, size, _has_bias(module._modules[name]), number)  # type: ignore[arg-type]
            for number, (name, size) in enumerate(zip(ups, sizes, strict=True))
        }
        parts[down] = linear(inner, 4, _has_bias(module._modules[down]), 9)  # type: ignore[arg-type]
        x = 2 * draw(2, 3, 4, seed=5)
        try:
            found = shell(module, parts)(x)
        except Exception:
            continue
        gate, up = torch.cat([parts[name](x) for name in ups], -1).chunk(2, -1)
        for kind in REFERENCE_KINDS:
            if same(found, parts[down](reference_gated_pair(gate, up, kind))):
                return FeedForwardForm(ups, down, kind)
    return None


# Experts


@dataclass(frozen=True)
class ExpertsForm:
    """Experts ``down(act(clamp(gate)) * (clamp(up) + offset))`` in stacked weights.

    Attributes:
        kind: name of our activation.
        offset: added to up.
        clamp: limit of gate and up; None: there is none.
    """

    kind: str
    offset: float = 0.0
    clamp: float | None = None


def experts_form(module: Any) -> ExpertsForm | None:
    """Return the form of a stack of experts of ``transformers``, whose weights are ``[E, ...]``."""
    known = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))
    if not known or not module.has_gate:
        return None
    names = {"gate_up_proj", "down_proj", *(("gate_up_proj_bias", "down_proj_bias") if module.has_bias else ())}
    if {*module._parameters} != names:
        return None
    count, few = module.num_experts, 3
    one = shell(module, without=names)
    inner = module._parameters["down_proj"].shape[1 if module.is_transposed else 2]
    shapes = {"gate_up_proj": (2 * inner, 4), "down_proj": (4, inner)}
    for seed, (name, (rows, columns)) in enumerate(shapes.items()):
        shape = (columns, rows) if module.is_transposed else (rows, columns)
        one._parameters[name] = nn.Parameter(draw(count if count < few else few, *shape, seed=seed) * 2)
        if module.has_bias:
            one._parameters[f"{name}_bias"] = nn.Parameter(draw(min(count, few), rows, seed=seed + 7))
    one.num_experts = min(count, few)
    one.config = copy.copy(module.config)
    one.config._experts_implementation = "eager"
    x, probs = 2 * draw(5, 4, seed=11), draw(5, 2, seed=12).softmax(-1)
    chosen = torch.stack([torch.arange(5), torch.arange(5) + 1], 1) % min(count, few)
    found = one(x, chosen, probs)
    floats = {v for v in vars(module).values() if isinstance(v, float) and v > 0}
    wide_x, down = _wide(one, x), _down(one)
    for clamp in (None, *sorted(floats)):
        for offset in (0.0, 1.0):
            for kind in REFERENCE_KINDS:
                outputs = down(weighted(wide_x, kind, True, None, offset, clamp))
                picked = outputs[chosen, torch.arange(5)[:, None]]
                if same(found, (picked * probs.unsqueeze(-1)).sum(1)):
                    return ExpertsForm(kind, offset, clamp)
    return None


def _wide(module: Any, x: Tensor) -> Tensor:
    """Return gate and up ``[E, T, 2 f]`` of all experts."""
    weight = module.gate_up_proj if module.is_transposed else module.gate_up_proj.transpose(1, 2)
    found = x @ weight
    if module.has_bias:
        found = found + module.gate_up_proj_bias.unsqueeze(1)
    return found if module.is_concatenated else torch.cat([found[..., ::2], found[..., 1::2]], -1)


def _down(module: Any) -> Callable[[Tensor], Tensor]:
    weight = module.down_proj if module.is_transposed else module.down_proj.transpose(1, 2)
    return lambda x: x @ weight + module.down_proj_bias.unsqueeze(1) if module.has_bias else x @ weight


# Attention


@dataclass(frozen=True)
class AttentionForm:
    """Projections to heads, norms of queries and keys, rotary embedding, attention and the projection back.

    Attributes:
        layers: names of the projections to queries, keys and values, or of one to all of them in this order.
        output: name of the projection back.
        norms: names of the norms of queries and keys, or none.
        wide_norms: they see all heads together.
        norms_last: they follow the rotary embedding.
        table: how the tables of angles repeat: the second half is the first, pairs are equal, or not at all; None: no
            rotary embedding.
        interleaved: pairs are neighbors.
        dropout: probability to drop a weight in training.
        options: arguments of the attention interface: scale, window, soft cap.
        sink: name of the parameter with sinks, or None.
    """

    layers: tuple[str, ...]
    output: str
    norms: tuple[str, ...]
    wide_norms: bool
    norms_last: bool
    table: Literal["halves", "pairs", "once"] | None
    interleaved: bool
    dropout: float
    options: tuple[tuple[str, Any], ...]
    sink: str | None

    @property
    def window(self) -> int | None:
        """The number of tokens that a query sees, itself included; None: all."""
        return dict(self.options).get("sliding_window")


FUSED = ("qkv_proj", "Wqkv", "query_key_value", "qkv")
"""Names of one layer to queries, keys and values."""


def attention_form(module: Any) -> AttentionForm | None:
    """Return the form of an attention that uses the attention interface of ``transformers``."""
    from transformers import AttentionInterface

    children, size = module._modules, getattr(module, "head_dim", None)
    layers = next(
        (each for each in (("q_proj", "k_proj", "v_proj"), *((n,) for n in FUSED)) if {*each} <= {*children}), None
    )
    output = next((name for name in OUTPUTS if name in children), None)
    if layers is None or output is None or not isinstance(size, int) or not hasattr(module, "config"):
        return None
    parts: dict[str, nn.Module] = {
        name: linear(4, _outputs(children[name]), _has_bias(children[name]), number)
        for number, name in enumerate(layers)
    }
    names = [name for name, child in children.items() if norm_of(child) is not None]
    # Norms with equal weights could not be told from each other.
    parts |= {name: shell(children[name], dtype=torch.float32, seed=50 + n) for n, name in enumerate(names)}
    query, keys = _heads(module, layers, size)
    parts[output] = linear(query * size, 4, _has_bias(children[output]), 7)
    one = shell(module, parts)
    one.config = copy.copy(module.config)
    one.config._attn_implementation_internal = PROBE
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        calls.append((args, kwargs))
        return draw(2, 3, query, size, seed=21), None

    AttentionInterface.register(PROBE, record)
    x, mask = draw(2, 3, 4, seed=20), torch.zeros(2, 1, 3, 3)
    raw = torch.cat([parts[name](x) for name in layers], -1).view(2, 3, -1, size)
    projected = torch.split(raw, [query, keys, keys], 2)
    tables: tuple[Literal["halves", "pairs", "once"], ...] = ("halves", "pairs", "once")
    for table in tables:
        for width in (size, size // 2):
            angles = draw(1, 3, width // 2, seed=22).clamp(-3, 3)
            repeated = {"halves": angles.repeat(1, 1, 2), "pairs": angles.repeat_interleave(2, -1)}
            whole = repeated.get(table, angles)
            calls.clear()
            try:
                found = one(hidden_states=x, position_embeddings=(whole.cos(), whole.sin()), attention_mask=mask)
            except Exception:
                continue
            if len(calls) != 1 or not isinstance(found, tuple) or len(found) != 2:
                return None
            (_, *seen, given), kwargs = calls[0]
            attended = parts[output](draw(2, 3, query, size, seed=21).flatten(2))
            if given is not mask or not same(found[0], attended) or len(seen) != 3:
                return None
            options, sink = _options(one, kwargs)
            for norms, wide_norms, last in _norm_orders(one, names, size):
                for turned, interleaved in ((None, False), (table, False), (table, True)):
                    wanted = _queries(one, projected, norms, wide_norms, last, angles if turned else None, interleaved)
                    if all(same(a, b.transpose(1, 2)) for a, b in zip(seen, wanted, strict=True)):
                        dropout = float(options.pop("dropout", 0.0) or 0.0)
                        return AttentionForm(
                            layers, output, norms, wide_norms, last, turned, interleaved, dropout,
                            tuple(options.items()), sink,
                        )  # fmt: skip
    return None


def _heads(module: Any, layers: Sequence[str], size: int) -> tuple[int, int]:
    """Return the numbers of query and key heads."""
    rows = [_outputs(module._modules[name]) // size for name in layers]
    if len(rows) == 3:
        return rows[0], rows[1]
    groups = module.num_key_value_groups
    return rows[0] * groups // (groups + 2), rows[0] // (groups + 2)


def _norm_orders(one: Any, names: list[str], size: int) -> Iterator[tuple[tuple[str, ...], bool, bool]]:
    """Yield norms of queries and keys, whether they see all heads together, and whether they follow the embedding."""
    yield (), False, False
    for pair in permutations(names, 2):
        small = all(one._modules[name].weight.numel() == size for name in pair)
        yield pair, not small, False
        if small:
            yield pair, False, True


def _queries(
    one: Any,
    projected: Sequence[Tensor],
    norms: tuple[str, ...],
    wide_norms: bool,
    last: bool,
    angles: Tensor | None,
    interleaved: bool,
) -> list[Tensor]:
    """Return queries, keys and values ``[B, S, H, D]`` as a form computes them."""

    def normed(x: Tensor, name: str) -> Tensor:
        module = one._modules[name]
        norm = norm_of(module)
        assert norm is not None
        found = norm.reference(x.flatten(2) if wide_norms else x, module.weight.double(), None)
        return found.view(x.shape)

    out = []
    for number, x in enumerate(projected[:2]):
        if norms and not last:
            x = normed(x, norms[number])
        if angles is not None:
            rows = angles.expand(2, -1, -1).flatten(0, 1)
            x = reference_apply_rotary(x.flatten(0, 1), rows.cos(), rows.sin(), interleaved).view(x.shape)
        if norms and last:
            x = normed(x, norms[number])
        out.append(x)
    return [*out, projected[2]]


def _options(one: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the plain arguments of an attention function, and the parameter that is its sinks.

    Raises:
        NoForm: there are other tensors among them.
    """
    options, sink = dict[str, Any](), None
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            sink = next((each for each, p in one._parameters.items() if p is value), None)
            if name != "s_aux" or sink is None:
                raise NoForm
        elif value is None or isinstance(value, int | float | str):
            options[name] = value
        else:
            raise NoForm
    return options, sink


# Rotary embeddings


def rotary_tables(module: nn.Module) -> set[str | None]:
    """Return how the tables of a rotary embedding repeat: ``halves``, ``pairs`` or ``once``; None: it is not known."""
    if not module._buffers or module._modules or any(p is not None for p in module._parameters.values()):
        return set()
    names, _ = takes(module)
    if "position_ids" not in names:
        return set()
    types = {*(getattr(getattr(module, "config", None), "layer_types", None) or ())} if "layer_type" in names else ()
    found = set[str | None]()
    with trying():
        for kind in types or (None,):
            more = {} if kind is None else {"layer_type": kind}
            one = shell(module)
            try:
                for like in (torch.zeros(1, 5, 8), torch.empty(0)):
                    tables = one(like, position_ids=torch.arange(5).unsqueeze(0), **more)
                    found |= {_repeats(each) for each in tables}
            except Exception:
                found.add(None)
    return found


def _repeats(table: Any) -> str | None:
    if not isinstance(table, Tensor) or table.dim() != 3:
        return None
    if table.shape[-1] % 2:
        return "once"
    first, second = table.chunk(2, -1)
    if torch.equal(first, second):
        return "halves"
    return "pairs" if torch.equal(table[..., ::2], table[..., 1::2]) else "once"


# Decoder layers


@dataclass(frozen=True)
class LayerForm:
    """Attention and a feed-forward layer with a residual stream.

    Attributes:
        attention: name of the attention.
        feed_forward: name of the other one.
        norms: names of the norms before and after the attention, and before and after the other; empty: none.
        parallel: both read the same input.
        scale: factor on what both add to the stream.
        takes_tuple: the feed-forward layer returns a tuple, whose first part counts.
        arguments: names of the arguments that the attention gets.
        any_argument: it gets all others, too.
    """

    attention: str
    feed_forward: str
    norms: tuple[str, str, str, str]
    parallel: bool
    scale: float
    takes_tuple: bool
    arguments: frozenset[str]
    any_argument: bool


class _Sublayer(nn.Module):
    """Stands for an attention or a feed-forward layer, and records how it is called."""

    def __init__(self, number: int, as_tuple: bool) -> None:
        super().__init__()
        self.number, self.as_tuple = number, as_tuple
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        self.calls.append((args, kwargs))
        y = self.of(x)
        return (y, None) if self.as_tuple else y

    def of(self, x: Tensor) -> Tensor:
        """Return a function of ``x`` that no other one is equal to."""
        return (0.7 - 0.4 * self.number) * x.roll(1 + self.number, -1) + 0.1 * x.square()


def layer_form(module: nn.Module) -> LayerForm | None:
    """Return the form of a decoder layer."""
    children = module._modules
    norms = [name for name, child in children.items() if norm_of(child) is not None]
    others = [
        name
        for name, child in children.items()
        if child is not None and name not in norms and any(True for _ in child.parameters())
    ]
    if len(others) != 2 or not 1 <= len(norms) <= 4:
        return None
    width = children[norms[0]].get_parameter("weight").numel()  # type: ignore[union-attr]
    for attention, other in permutations(others):
        if "position_embeddings" not in takes(children[attention])[0] | takes(module)[0]:  # type: ignore[arg-type]
            continue
        for takes_tuple in (False, True):
            stand_ins = _Sublayer(0, True), _Sublayer(1, takes_tuple)
            parts: dict[str, nn.Module] = {
                name: shell(children[name], seed=50 + number)  # type: ignore[arg-type]
                for number, name in enumerate(norms)
            }
            parts |= {attention: stand_ins[0], other: stand_ins[1]}
            try:
                found = _called_layer(module, attention, other, norms, parts, width, takes_tuple)
            except Exception:
                continue
            if found is not None:
                return found
    return None


def _called_layer(
    module: nn.Module,
    attention: str,
    other: str,
    norms: list[str],
    parts: dict[str, Any],
    width: int,
    takes_tuple: bool,
) -> LayerForm | None:
    names, any_other = takes(module)
    x = draw(3, 2, width, seed=30)
    values: dict[str, Any] = {
        "attention_mask": torch.zeros(3, 1, 2, 2),
        "position_ids": torch.arange(2).unsqueeze(0),
        "position_embeddings": (torch.zeros(1, 2, 4), torch.ones(1, 2, 4)),
        "past_key_values": None,
        "use_cache": False,
    }
    if any_other:
        values["megalight_probe"] = object()
    given = {name: value for name, value in values.items() if any_other or name in names}
    one = shell(module, parts)
    found = one(x, **given)
    stand_in = parts[attention]
    if len(stand_in.calls) != 1 or len(parts[other].calls) != 1:
        return None
    args, kwargs = stand_in.calls[0]
    # What a layer adds by itself, or changes, is not known to the attention that we call.
    if len(args) > 1 or any(
        value is not None and value is not given.get(n) for n, value in kwargs.items() if n != "hidden_states"
    ):
        return None
    if len(parts[other].calls[0][0]) != 1 or parts[other].calls[0][1]:
        return None
    for form in _layer_forms(module, attention, other, norms, takes_tuple, kwargs):
        if same(found, layer_reference(form, parts, x)):
            return form
    return None


def _layer_forms(
    module: nn.Module, attention: str, other: str, norms: list[str], takes_tuple: bool, kwargs: dict[str, Any]
) -> Iterator[LayerForm]:
    passed = frozenset(kwargs) - {"hidden_states", "megalight_probe"}
    rest = (takes_tuple, passed, "megalight_probe" in kwargs)
    scales = (1.0, *(v for v in vars(module).values() if isinstance(v, float) and v != 1.0))
    for scale in dict.fromkeys(scales):
        for order in permutations(norms):
            slots: list[tuple[tuple[str, str, str, str], bool]] = []
            if len(order) == 1:
                slots.append(((order[0], "", order[0], ""), True))
            elif len(order) == 2:
                a, b = order
                slots += [((a, "", b, ""), False), (("", a, "", b), False), ((a, "", b, ""), True)]
            elif len(order) == 4:
                slots.append((order, False))
            for places, parallel in slots:
                yield LayerForm(attention, other, places, parallel, scale, *rest)


def layer_reference(form: LayerForm, parts: Mapping[str, Any], x: Tensor) -> Tensor:
    """Return what a form computes with stand-ins, on ``x [B, S, h]``."""

    def normed(y: Tensor, name: str) -> Tensor:
        if not name:
            return y
        norm = norm_of(parts[name])
        assert norm is not None
        return norm.reference(y, parts[name].weight, parts[name]._parameters.get("bias"))

    before, after, second, last = form.norms
    a = form.scale * normed(parts[form.attention].of(normed(x, before)), after)
    stream = x if form.parallel else x + a
    y = stream + form.scale * normed(parts[form.feed_forward].of(normed(stream, second)), last)
    return y + a if form.parallel else y


def norm_of(module: nn.Module | None) -> NormForm | None:
    """Return the form that a norm was given."""
    found = FUSED_FORM.get(module) if module is not None else None
    return found if isinstance(found, NormForm) else None


# Decoders


class _RecordedLayer(nn.Module):
    """Stands for a decoder layer, and records its mask."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        attach_modules(self, real=real)
        self.mask: Any = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["real"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        masks = (each for each in (*args, *kwargs.values()) if isinstance(each, LazyMask))
        self.mask = next(masks, None)
        return hidden_states


def windows_of(decoder: Any) -> list[int | None] | None:
    """Return the window of each layer, itself included, of a decoder all of whose masks are causal.

    None: they have another form, or there is no mask.
    """
    layers = decoder._modules.get("layers")
    if not isinstance(layers, nn.ModuleList) or not hasattr(decoder, "config"):
        return None
    stand_ins = nn.ModuleList(_RecordedLayer(layer) for layer in layers)
    parts = {
        name: nn.Identity() if any(True for _ in child.parameters()) else shell(child)
        for name, child in decoder._modules.items()
        if child is not None and name != "layers"
    }
    one = shell(decoder, {**parts, "layers": stand_ins})
    one.config = copy.copy(decoder.config)
    one.config._attn_implementation_internal = NAME
    one(inputs_embeds=draw(1, 4, decoder.config.hidden_size, dtype=torch.float32), use_cache=False)
    found: list[int | None] = []
    for each in stand_ins:
        mask: Any = each.mask
        visible = None if mask is None else mask.visible
        if visible is None or not visible.pattern.causal or visible.pattern.chunk is not None:
            return None
        window = visible.pattern.window
        found.append(None if window is None else window + 1)
    return found


# Language models


@dataclass(frozen=True)
class CausalLMForm:
    """A decoder, a linear head, and the loss of the next tokens.

    Attributes:
        decoder: name of the decoder.
        head: name of the head.
        scale: factor on logits.
        softcap: logits become ``softcap * tanh(logit / softcap)``; None: they do not.
        output: class of the output.
    """

    decoder: str
    head: str
    scale: float
    softcap: float | None
    output: type


class _Decoder(nn.Module):
    """Stands for a decoder."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        self.calls.append((args, kwargs))
        found = MoeModelOutputWithPast(last_hidden_state=self.hidden)  # type: ignore[arg-type]
        found.cross_attentions = None
        return found


def causal_lm_form(module: Any, mean_loss: Callable[..., Tensor]) -> CausalLMForm | None:
    """Return the form of a model whose loss is that of ``transformers`` for causal language models.

    Args:
        module: the model.
        mean_loss: our loss, of losses, hidden states and labels.
    """
    head, decoder = module.get_output_embeddings(), getattr(module, "base_model_prefix", "")
    name = next((n for n, child in module._modules.items() if child is head), None)
    if head is None or name is None or module._modules.get(decoder) is None:
        return None
    hidden, bias = draw(1, 4, 4, seed=40), getattr(head, "bias", None) is not None
    rows = getattr(head, "vocab_size", None) or _outputs(head)
    small = linear(4, rows, bias, 41)
    one = shell(module, {name: small, decoder: _Decoder(hidden)})
    labels = torch.tensor([[0, 1, -100, 2]])
    ids = labels.clamp(min=0)
    output = one(input_ids=ids, labels=labels, return_dict=True)
    (args, _), *more = one._modules[decoder].calls
    if more or any(each is not ids for each in args):
        return None
    floats = [v for v in vars(module.config).values() if isinstance(v, float) and v > 1]
    raw = small(hidden)
    scale = float((output.logits * raw).sum() / raw.square().sum())
    forms = [(scale, None), *((1.0, v) for v in floats)]
    for factor, softcap in forms:
        logits = raw * factor if softcap is None else softcap * torch.tanh(raw / softcap)
        if not same(output.logits, logits) or (factor != 1.0 and bias):
            continue
        factor = 1.0 if abs(factor - 1) < 1e-6 else factor

        def losses(_: Tensor, following: Tensor, logits: Tensor = logits) -> Tensor:
            flat = logits.flatten(0, 1)
            return nn.functional.cross_entropy(flat, following, ignore_index=-100, reduction="none")

        if same(output.loss, mean_loss(losses, hidden, labels)):
            return CausalLMForm(decoder, name, factor, softcap, type(output))
    return None
