"""What each style of a plan does to a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from megalight.errors import LayoutError
from megalight.nn import Embedding, InnerAttention, Linear, LMHead
from megalight.nn.names import Part
from megalight.parallel import plan as styles
from megalight.parallel.context.attention import ContextAttention
from megalight.parallel.plan import Boundary
from megalight.parallel.shard import ShardSpec
from megalight.parallel.tensor import split
from megalight.parallel.tensor.column import ColumnLinear
from megalight.parallel.tensor.dropout import OwnStream, ParallelDropout, has_dropout
from megalight.parallel.tensor.embedding import VocabEmbedding
from megalight.parallel.tensor.head import VocabHead, VocabLinear
from megalight.parallel.tensor.row import RowLinear
from megalight.parallel.tensor.sequence import add_boundary
from megalight.parallel.tensor.splitter import Splitter, dress


def style_module(splitter: Splitter, name: str, module: nn.Module, wanted: Sequence[styles.Style]) -> None:
    """Do to one module what its styles say; none replicates it.

    Raises:
        LayoutError: a style does not fit the module, or something does not divide.
    """
    if not wanted:
        splitter.keep(name, module)
    current = module
    for style in wanted:
        replacement = _STYLES[type(style)](splitter, name, current, style)
        if replacement is None or splitter.shared.mesh.size(_AXES.get(type(style), "tp")) == 1:
            continue
        wraps = any(child is current for child in replacement.children())
        if len(wanted) > 1 and not wraps:
            raise LayoutError(f"{name}: the style {type(style).__name__} replaces the module, so it must stand alone.")
        dress(replacement, current)
        current = replacement
    if current is not module:
        splitter.replace(module, current)


def _column(splitter: Splitter, name: str, module: nn.Module, style: styles.Column) -> nn.Module:
    linear = _expect(name, module, style, (nn.Linear, Linear))
    mesh, sections = splitter.shared.mesh, getattr(linear, "sections", None)
    if style.units is not None and sections:
        raise LayoutError(f"{name} has sections that state their units; leave units={style.units} out of its rule.")
    units = [section.units for section in sections] if sections else [style.units or linear.weight.shape[0]]
    for section, count in zip(sections or [None], units, strict=True):
        size = linear.weight.shape[0] if section is None else section.size
        if size % count:
            raise LayoutError(f"{name}: {size} output features cannot consist of {count} equal units.")
    if style.gather_output and any(count % mesh.tp for count in units):
        raise LayoutError(f"{name}: gather_output needs units ({units}) that tp={mesh.tp} divides; lower tp.")

    def rule(parts: Sequence[Part], shape: tuple[int, ...]) -> ShardSpec:
        return split.output_features(parts, units, mesh)

    weight, bias = (splitter.split(name, linear, local, rule) for local in ("weight", "bias"))
    assert weight is not None
    return ColumnLinear(
        weight,
        bias,
        splitter.sizes(linear.weight),
        splitter.shared,
        tokens=style.tokens,
        gather_output=style.gather_output,
        name=name,
    )


def _row(splitter: Splitter, name: str, module: nn.Module, style: styles.Row) -> nn.Module:
    linear = _expect(name, module, style, (nn.Linear, Linear))
    mesh, partial = splitter.shared.mesh, splitter.shared.sequence_parallel
    if getattr(linear, "sections", None):
        raise LayoutError(f"{name} has sections of output features, but its rule Row splits the input; use Column.")
    weight = splitter.split(name, linear, "weight", lambda parts, shape: split.input_features(parts[0], mesh))
    bias = splitter.split(
        name, linear, "bias", lambda parts, shape: split.replicated(parts, shape, mesh, partial=partial)
    )
    assert weight is not None
    return RowLinear(weight, bias, splitter.shared, name)


def _vocab(splitter: Splitter, name: str, module: nn.Module, style: styles.Vocab) -> nn.Module:
    embedding = _expect(name, module, style, (nn.Embedding, Embedding))
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(embedding, option, None):
            raise LayoutError(f"{name}: an embedding with {option} cannot be split by vocabulary; unset it.")
    mesh = splitter.shared.mesh
    weight = splitter.split(name, embedding, "weight", lambda parts, shape: split.vocabulary(parts[0], mesh))
    assert weight is not None
    return VocabEmbedding(
        weight,
        embedding.weight.shape[0],
        splitter.shared,
        scatter_output=style.scatter_output,
        padding_idx=getattr(embedding, "padding_idx", None),
    )


def _vocab_head(splitter: Splitter, name: str, module: nn.Module, style: styles.VocabHead) -> nn.Module:
    head = _expect(name, module, style, (LMHead, nn.Linear, Linear))
    whole = isinstance(head, LMHead)
    linear = head.output_layer if whole else head
    mesh = splitter.shared.mesh

    def rule(parts: Sequence[Part], shape: tuple[int, ...]) -> ShardSpec:
        return split.vocabulary(parts[0], mesh)

    path = f"{name}.output_layer" if whole else name
    weight, bias = (splitter.split(path, linear, local, rule) for local in ("weight", "bias"))
    assert weight is not None
    layer = VocabLinear(weight, bias, linear.weight.shape[0], splitter.shared, tokens=style.tokens)
    if not whole:
        return layer
    dress(layer, linear)
    splitter.done.add(id(linear))
    return VocabHead(head.norm, layer, head.softcap, head.backend)


def _sequence_region(splitter: Splitter, name: str, module: nn.Module, style: styles.SequenceRegion) -> None:
    splitter.keep(name, module, partial=splitter.shared.sequence_parallel)
    if style.split_input and splitter.shared.sequence_parallel:
        add_boundary(module, Boundary(enter="split"), splitter.shared)


def _head_region(splitter: Splitter, name: str, module: nn.Module, style: styles.HeadRegion) -> None:
    splitter.keep(name, module, partial=True)


def _context_region(splitter: Splitter, name: str, module: nn.Module, style: styles.ContextRegion) -> nn.Module | None:
    inner: InnerAttention = _expect(name, module, style, (InnerAttention,))
    shared = splitter.shared
    if shared.mesh.cp == 1:
        return None
    outer = splitter.model.get_submodule(name.rpartition(".")[0])
    heads = getattr(outer, "heads", None)  # its projection has been split by now, so these are the heads of this rank
    return ContextAttention(inner, name, shared.context.kind_of(name), shared.context_groups, heads)


def _replicated(splitter: Splitter, name: str, module: nn.Module, style: styles.Replicated) -> None:
    splitter.keep(name, module)


def _dropout(splitter: Splitter, name: str, module: nn.Module, style: styles.Dropout) -> nn.Module | None:
    if isinstance(module, nn.Dropout):
        return ParallelDropout(module.p, splitter.shared, split=style.split)
    if next(module.parameters(), None) is not None:
        raise LayoutError(
            f"the plan's rule Dropout meets {name}, a {type(module).__name__} with parameters; it is for nn.Dropout "
            "and modules without any."
        )
    return OwnStream(module, splitter.shared) if style.split and has_dropout(module) else None


def _attributes(splitter: Splitter, name: str, module: nn.Module, style: styles.Attributes) -> None:
    splitter.keep(name, module)
    tp = splitter.shared.mesh.tp
    for attribute in style.divide:
        _divide(name, module, attribute, tp)
    for attribute, units in style.per_unit.items():
        _divide(name, module, attribute, split.replicas_of(units, tp, f"{name}.{attribute}"))


def _divide(name: str, module: nn.Module, attribute: str, by: int) -> None:
    value = getattr(module, attribute, None)
    if not isinstance(value, int) or value % by:
        raise LayoutError(f"{name}.{attribute} is {value!r}; it must be an integer that {by} divides. Lower tp.")
    setattr(module, attribute, value // by)


def _boundary(splitter: Splitter, name: str, module: nn.Module, style: styles.Boundary) -> None:
    splitter.keep(name, module)
    if splitter.shared.sequence_parallel:
        add_boundary(module, style, splitter.shared)


def _expect(name: str, module: nn.Module, style: styles.Style, types: tuple[type[nn.Module], ...]) -> Any:
    if not isinstance(module, types):
        known = ", ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in types)
        raise LayoutError(
            f"the plan's rule {type(style).__name__} meets {name}, a {type(module).__name__}; it serves {known}. "
            "Make the rule's pattern narrower."
        )
    return module


_STYLES: dict[type, Callable[[Splitter, str, nn.Module, Any], nn.Module | None]] = {
    styles.Column: _column,
    styles.Row: _row,
    styles.Vocab: _vocab,
    styles.VocabHead: _vocab_head,
    styles.SequenceRegion: _sequence_region,
    styles.HeadRegion: _head_region,
    styles.ContextRegion: _context_region,
    styles.Replicated: _replicated,
    styles.Dropout: _dropout,
    styles.Attributes: _attributes,
    styles.Boundary: _boundary,
}

_AXES: dict[type, str] = {styles.ContextRegion: "cp"}
"""The axis along which a style replaces modules, where it is not ``tp``. With one rank on it they stay."""
