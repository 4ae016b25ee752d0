"""Context parallelism for a plan of foreign layers: which modules get shares of the tokens, and which all of them.

Between the first and the last layer of a stack, ranks along ``cp`` hold shares of the tokens. Norms, linear layers and
feed-forward layers compute with these. An attention that tensor parallelism could split gathers them, and computes the
heads of its rank. Any other module (a state-space mixer, a convolution, a router with its experts) gets all tokens,
computes the same on every rank, and its output is cut again: right whatever it computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from megalight.errors import LayoutError
from megalight.parallel.context.divided_layers import WHOLE
from megalight.parallel.sequence_regions import MIXES, by_token_arguments, computes_by_token, several_states, styles
from megalight.parallel.structural_plan import Rules, feed_forward, is_linear, names_read
from megalight.parallel.styles import (
    Attributes,
    Column,
    ConvColumn,
    ConvRow,
    DividedStates,
    HeadRegion,
    OwnCounts,
    OwnHeads,
    OwnHeadsColumn,
    OwnHeadsRow,
    Row,
    SharedSlice,
    Style,
    TokenBoundary,
    WideNorm,
)
from megalight.parallel.styles.experts import stacked

PLAIN = (
    "torch.nn.modules.activation",
    "torch.nn.modules.dropout",
    "torch.nn.modules.linear",
    "transformers.activations",
)
"""Where modules without weights are defined that compute each number from that number alone."""
SCORES = {"softmax", "scaled_dot_product_attention", "matmul", "bmm", "baddbmm", "einsum", "fft", "fftn"}
"""Calls by which a module mixes tokens itself."""
MOVES = {"mean", "sum", "max", "cat", "transpose", "permute", "reshape", "view", "flatten", "squeeze", "unsqueeze"}
MOVES |= {"pad", "gather", "scatter", "index_select", "index_add_", "masked_select", "topk", "sort", "T", "mT"}
"""Calls after which numbers may be those of other tokens."""
INTERFACE = {"ALL_ATTENTION_FUNCTIONS"}
"""What an attention reads that uses the interface of ``transformers``."""
OUTPUT = "output.dense"
"""The projection from heads of BERT's attention, in the module around it."""


def context_regions(model: nn.Module, rules: Rules, towers: Sequence[str] = ()) -> Rules:
    """Return rules by which ranks along ``cp`` divide the tokens between the layers of a model.

    Args:
        model: a model of ``transformers``.
        rules: how tensor parallelism splits its layers.
        towers: names of models inside of it that get whole inputs.

    Raises:
        LayoutError: it has no stack of layers, of which a share of the tokens could run; or it draws dropout where all
            ranks compute the same.
    """
    modules = dict(model.named_modules())
    found = _ContextRegions(modules, {name: styles(each) for name, each in rules.items() if isinstance(name, str)})
    outer: list[str] = [*towers]
    for name, stack in modules.items():
        layers = [f"{name}.{index}" for index in range(len(stack))] if isinstance(stack, nn.ModuleList) else []
        layers = [layer for layer in layers if layer in modules]
        if any(name.startswith(f"{each}.") for each in outer):
            continue
        if attention := next((layer for layer in layers if names_read(modules[layer]) & INTERFACE), None):
            raise LayoutError(f"has attention outside of a list of layers ({attention})")
        if not found.is_stack(layers):
            continue
        outer.append(name)
        found.stack = name
        for layer in layers:
            found.layer(layer)
        found.wrap(layers[0], TokenBoundary(name, enter="begin"))
        found.wrap(layers[-1], TokenBoundary(name, leave="join"))
    if alone := next((n for n in modules if found.has(n, Attributes) and not n.startswith(tuple(outer))), None):
        raise LayoutError(f"has attention outside of a list of layers ({alone})")
    if not found.gains:
        raise LayoutError("has no stack of layers of which a share of the tokens, or single heads, could be computed")
    if drawn := found.drawn():
        raise LayoutError(f"draws {drawn}, and ranks along cp would draw different masks there; set it to 0")
    made: Rules = {"": DividedStates()}
    return made | found.made


class _ContextRegions:
    """The rules of a model's modules, which are made layer by layer.

    Args:
        modules: those of the model, by name.
        split: how tensor parallelism splits them.
    """

    def __init__(self, modules: Mapping[str, nn.Module], split: Mapping[str, tuple[Style, ...]]) -> None:
        self.modules, self.split = modules, split
        self.made: dict[str, tuple[Style, ...]] = {}
        self.shares: list[str] = []
        """Modules that get a share of the tokens."""
        self.gains = False
        """Whether a module that computes much divides its tokens or heads."""
        self.stack = ""
        """The list of layers that is visited."""

    def wrap(self, name: str, style: Style) -> None:
        """Add a style around those that a module has."""
        self.made[name] = (style, *self.made.get(name, ()))

    def has(self, name: str, *kinds: type[Style]) -> bool:
        return any(isinstance(style, kinds) for style in self.split.get(name, ()))

    def children(self, name: str) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules in a module, but not one that is in another place too, and has its name there."""
        for local, child in self.modules[name].named_children():
            if f"{name}.{local}" in self.modules:
                yield f"{name}.{local}", child

    def is_stack(self, layers: Sequence[str]) -> bool:
        """Return whether modules of a list are called one after the other: layers, of which some mix tokens."""
        return (
            any(self.computes(layer) for layer in layers)
            and not all(self.by_token(layer, self.modules[layer]) for layer in layers)
            and not any(
                self.has(layer, Attributes) or isinstance(self.modules[layer], nn.ModuleList) for layer in layers
            )
        )

    def computes(self, layer: str) -> bool:
        """Return whether single tokens or heads are enough for a part of a layer."""
        return any(
            self.is_attention(each) or (_has_linear(child) and self.by_token(each, child))
            for each, child in ((f"{layer}.{local}", c) for local, c in self.modules[layer].named_modules() if local)
        )

    def drawn(self) -> str | None:
        """Return a dropout that is not drawn for a share of the tokens alone; None: there is none."""
        for name, module in self.modules.items():
            if name in self.shares:
                continue
            if isinstance(module, nn.Dropout) and module.p:
                return f"dropout of {module.p} in {name}"
            for each, p in vars(module).items():
                if "drop" in each and isinstance(p, float) and p:
                    return f"{each}={p} in {name or type(module).__name__}"
        return None

    def layer(self, name: str) -> None:
        """Give rules to a layer of a stack, or to a module that hands its tokens to others."""
        if several := several_states(self.modules[name]):
            raise LayoutError(f"has a layer ({name}) that {several}, and shares of one alone are taken")
        if names_read(self.modules[name]) & (MIXES | SCORES):
            self.whole(name)
            return
        self.shares.append(name)
        if arguments := by_token_arguments(self.modules[name]):
            self.wrap(name, TokenBoundary(self.stack, arguments=arguments))
        for each, child in self.children(name):
            if self.is_attention(each):
                self.attention(each)
            elif self.by_token(each, child):
                self.gains |= _has_linear(child)
                self.shares += [each, *(f"{each}.{local}" for local, _ in child.named_modules() if local)]
            elif isinstance(child, nn.ModuleList) or isinstance(self.modules[name], nn.ModuleList) or self.opens(each):
                self.layer(each)
            else:
                self.whole(each)

    def is_attention(self, name: str) -> bool:
        """Return whether a module is an attention whose heads can be divided."""
        if not self.has(name, Attributes) or self.row_of(name) is None:
            return False
        return any(self.has(each, Column, ConvColumn) for each, _ in self.children(name))

    def row_of(self, name: str) -> str | None:
        """Return the projection from the heads of an attention."""
        rows = [each for each, _ in self.children(name) if self.has(each, Row, ConvRow)]
        beside = f"{name.rpartition('.')[0]}.{OUTPUT}"
        return rows[0] if rows else beside if self.has(beside, Row, ConvRow) else None

    def by_token(self, name: str, module: nn.Module) -> bool:
        """Return whether a module computes each token's output from that token alone."""
        if not any(True for _ in module.parameters()):
            return type(module).__module__ in PLAIN
        if computes_by_token(module) or is_linear(module):
            return True
        if any(map(stacked, module.children())) and not names_read(module) & MIXES:
            return True  # experts, and a router that chooses some for each token
        if isinstance(feed_forward(name, module), dict) and not names_read(module) & (MIXES | SCORES):
            known = [child for _, child in self.children(name) if any(True for _ in child.parameters())]
            return all(map(self.by_token, [name] * len(known), known))
        # Others that only call what computes by token, and nothing that could move numbers between tokens.
        tables = any(p is not None and p.dim() > 1 for p in module._parameters.values())
        children = [*self.children(name)]
        if tables or names_read(module) & (MIXES | SCORES | MOVES):
            return False
        return all(self.by_token(each, child) for each, child in children)

    def opens(self, name: str) -> bool:
        """Return whether a module only hands its tokens to others, of which an attention is one."""
        children = [*self.children(name)]
        own = any(p is not None for p in self.modules[name]._parameters.values())
        if own or names_read(self.modules[name]) & (MIXES | SCORES):
            return False
        inside = [self.is_attention(each) or self.opens(each) for each, _ in children]
        return any(inside) and all(
            known or self.by_token(each, child) for known, (each, child) in zip(inside, children, strict=True)
        )

    def attention(self, name: str) -> None:
        """Gather the tokens for an attention, let it compute its heads, and cut the sum over all heads."""
        module, row = self.modules[name], self.row_of(name)
        assert row is not None
        self.gains = True
        known = (Column, Row, ConvColumn, ConvRow, HeadRegion, WideNorm)
        inner = [
            f"{name}.{local}"
            for local, child in module.named_modules()
            if local and any(p is not None for p in child._parameters.values())
        ]
        own = any(p is not None for p in module._parameters.values())
        arguments = inspect.signature(module.forward).parameters
        first = (
            not own and all(self.has(each, *known) for each in inner) and not any(each in arguments for each in WHOLE)
        )
        for each in [name, *inner, *(each for each, _ in self.children(name)), row]:
            for style in self.split.get(each, ()):
                if (made := _over_cp(style, first, self.stack)) is not None and made not in self.made.get(each, ()):
                    self.made[each] = (*self.made.get(each, ()), made)
        self.wrap(name, TokenBoundary(self.stack, enter="gather" if first else "join"))

    def whole(self, name: str) -> None:
        """Let every rank compute a module with all tokens, and take its share of the output."""
        self.wrap(name, TokenBoundary(self.stack, enter="join", leave="split"))


def _has_linear(module: nn.Module) -> bool:
    return any(map(is_linear, module.modules()))


def _over_cp(style: Any, first: bool, stack: str) -> Style | None:
    """Return the style that divides over ``cp`` what another one divides over ``tp``; None: nothing is to do.

    Args:
        style: how tensor parallelism splits a module in an attention.
        stack: the list of layers around it.
        first: the tokens are gathered above the attention, and the gradients of all projections are summed there.
    """
    match style:
        case Column() | ConvColumn():
            return OwnHeadsColumn(replace(style, tokens="gathered" if first else "whole"), stack)
        case Row() | ConvRow():
            return OwnHeadsRow(style, stack)
        case Attributes():
            return OwnCounts(style)
        case OwnHeads() | SharedSlice() | WideNorm():
            return replace(style, over="cp")
    return None
