"""Sequence parallelism for a plan of foreign layers: where hidden states ``[B, S, h]`` are whole, and where shares.

Between the first and the last layer of a stack, ranks hold shares of the tokens. Attention and feed-forward layers
gather them, and their last projections scatter the sum. Norms, dropout and linear layers compute with shares, so that
gradients of their weights are summed over ranks. A module that is none of these (a convolution, a router with its
experts) gets all tokens, computes the same on every rank, and its output is cut again: right whatever it computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from megalight.parallel.context.divided_layers import BY_TOKEN, WHOLE
from megalight.parallel.structural_plan import Rules, names_read
from megalight.parallel.styles import (
    Attributes,
    Boundary,
    Column,
    ConvColumn,
    ConvRow,
    Dropout,
    HeadRegion,
    Refused,
    Replicated,
    Row,
    SequenceRegion,
    Style,
    WideNorm,
)

MIXES = {"roll", "flip", "cumsum", "conv1d"}
"""Calls by which a layer mixes tokens outside of the modules in it."""
SELECTS = {"masked_scatter"}
"""Calls by which a layer takes some tokens, whose number is another on each rank."""
STATES = {"hidden_states", "original_hidden_states"}
"""Arguments of layers that are hidden states."""
RESHAPES = {"reshape", "view", "flatten"}
"""Calls after which a linear layer of the layer itself may not see ``[B, S, h]``, whose dim 1 it would gather."""


def with_sequence_regions(model: nn.Module, rules: Rules, towers: Sequence[str] = ()) -> Rules:
    """Return the rules with those that sequence parallelism needs; without it, they change nothing.

    Args:
        model: a model of ``transformers``.
        rules: how its layers split.
        towers: names of models inside of it that get whole inputs: patches of images are no multiple of ranks.
    """
    modules = dict(model.named_modules())
    embedding: Any = getattr(model, "get_input_embeddings")()  # noqa: B009
    weight = getattr(embedding, "weight", None)
    width = None if weight is None else weight.shape[-1]
    found = _SequenceRegions(
        modules, width, {name: styles(each) for name, each in rules.items() if isinstance(name, str)}
    )
    stacks = [(name, each) for name, each in modules.items() if isinstance(each, nn.ModuleList)]
    outer: list[str] = [*towers]
    for tower in towers:
        found.keep_tokens(tower)
    for name, stack in stacks:
        layers = [f"{name}.{index}" for index in range(len(stack)) if f"{name}.{index}" in modules]
        inside = any(name.startswith(f"{each}.") for each in outer)
        if inside or not any(found.divided(layer) for layer in layers):
            continue
        outer.append(name)
        if parts := [layer for layer in layers if found.is_part(layer)]:
            # The model adds residuals between them itself.
            reason = "is no layer of a list, but a part of one; turn sequence parallelism off."
            found.add(parts[0], Refused(reason, sequence_parallel=True))
            continue
        for layer in layers:
            found.layer(layer)
        found.add(layers[0], Boundary(enter="split"))
        found.add(layers[-1], Boundary(leave="join"))
    for name, module in modules.items():
        if name not in found.rules and any(p is not None for p in module._parameters.values()):
            found.rules[name] = (Replicated(),)
    return {name: each[0] if len(each) == 1 else each for name, each in found.rules.items()}


def styles(found: Style | str | tuple[Style | str, ...]) -> tuple[Style, ...]:
    """Return a rule's styles as a tuple."""
    return tuple(each for each in (found if isinstance(found, tuple) else (found,)) if isinstance(each, Style))


class _SequenceRegions:
    """The rules of a model's modules, to which those of sequence parallelism are added layer by layer."""

    def __init__(
        self, modules: Mapping[str, nn.Module], width: int | None, rules: dict[str, tuple[Style, ...]]
    ) -> None:
        self.modules = modules
        self.width = width
        self.rules = rules

    def has(self, name: str, *kinds: type[Style]) -> bool:
        return any(isinstance(style, kinds) for style in self.rules.get(name, ()))

    def inside(self, name: str) -> Iterator[tuple[str, nn.Module]]:
        for local, module in self.modules[name].named_modules():
            if local and f"{name}.{local}" in self.modules:
                yield f"{name}.{local}", module

    def divided(self, name: str) -> bool:
        """Return whether a layer of a module is split over ranks."""
        return any(self.has(each, Column, Row, ConvColumn, ConvRow) for each, _ in self.inside(name))

    def add(self, name: str, *found: Style) -> None:
        """Add styles around those that a module has: the boundary of a layer, whose modules keep their own."""
        self.rules[name] = (*found, *self.rules.get(name, ()))

    def layer(self, name: str) -> None:
        """Give rules to a layer of a stack, or one that refuses sequence parallelism."""
        module = self.modules[name]
        direct = any(self.has(f"{name}.{local}", Column, ConvColumn) for local in module._modules)
        if found := sorted(names_read(module) & (MIXES | SELECTS | (RESHAPES if direct else set()))):
            reason = f"calls {found[0]} on hidden states itself, which may mix tokens; turn sequence parallelism off."
            self.add(name, Refused(reason, sequence_parallel=True))
        drawn = [each for each, p in vars(module).items() if "drop" in each and isinstance(p, float) and p]
        if drawn:
            reason = (
                f"draws {drawn[0]}={getattr(module, drawn[0])} itself, and would draw one mask for different tokens; "
                "set it to 0, or turn sequence parallelism off."
            )
            self.add(name, Refused(reason, sequence_parallel=True))
        if several := several_states(module):
            self.add(name, Refused(f"{several}; turn sequence parallelism off.", sequence_parallel=True))
        if by_token := by_token_arguments(module):
            self.add(name, Boundary(arguments=by_token))
        self.visit(name)

    def children(self, name: str) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules in a module, but not one that is in another place too, and has its name there."""
        for local, child in self.modules[name].named_children():
            if f"{name}.{local}" in self.modules:
                yield f"{name}.{local}", child

    def visit(self, name: str) -> None:
        """Give rules to a module that gets this rank's share of the tokens."""
        module = self.modules[name]
        if any(p is not None for p in module._parameters.values()):
            self.add(name, SequenceRegion())
        for each, child in self.children(name):
            if self.has(each, Column, ConvColumn):
                # The layer gathers the tokens itself.
                self.rules[each] = tuple(
                    replace(s, tokens="share") if isinstance(s, Column | ConvColumn) else s for s in self.rules[each]
                )
            elif self.has(each, Row, ConvRow):
                continue
            elif self.gathers(each):
                self.region(each)
            elif isinstance(child, nn.ModuleList | nn.ModuleDict):  # the layer calls what is in it
                self.visit(each)
            elif not any(True for _ in child.parameters()):
                if isinstance(child, nn.Dropout):
                    self.rules.setdefault(each, (Dropout(),))
            elif computes_by_token(child) and each not in self.rules:
                self.rules[each] = (SequenceRegion(),)
            elif self.opens(each):
                self.visit(each)
            else:
                self.whole(each)

    def gathers(self, name: str) -> bool:
        """Return whether a module is an attention, or a feed-forward layer with all of its layers."""
        children = [each for each, _ in self.children(name)]
        columns = any(self.has(each, Column, ConvColumn) for each in children)
        return self.has(name, Attributes) or (columns and any(self.has(each, Row, ConvRow) for each in children))

    def is_part(self, name: str) -> bool:
        """Return whether a module is an attention, or nothing but the linear layers of a feed-forward layer."""
        layers = [each for each, child in self.children(name) if any(True for _ in child.parameters())]
        known = (Column, Row, ConvColumn, ConvRow)
        return self.has(name, Attributes) or (bool(layers) and all(self.has(each, *known) for each in layers))

    def region(self, name: str) -> None:
        """Gather the tokens for a module whose first layers split features, and whose last one scatters the sum."""
        known = (Column, Row, ConvColumn, ConvRow, HeadRegion, WideNorm)
        inner = [
            (each, child) for each, child in self.inside(name) if any(p is not None for p in child._parameters.values())
        ]
        others = [each for each, _ in inner if not self.has(each, *known)]
        own = any(p is not None for p in self.modules[name]._parameters.values())
        arguments = inspect.signature(self.modules[name].forward).parameters
        first = not others and not own and not any(each in arguments for each in WHOLE)
        for each, child in self.inside(name):
            if self.has(each, Column, ConvColumn) and first:
                self.rules[each] = tuple(
                    replace(s, tokens="gathered") if isinstance(s, Column | ConvColumn) else s for s in self.rules[each]
                )
            if isinstance(child, nn.Dropout):
                self.rules.setdefault(each, (Dropout(),))
        for each in others:
            self.rules.setdefault(each, (Replicated(),))
        self.add(name, Boundary(enter="gather" if first else "join"))

    def opens(self, name: str) -> bool:
        """Return whether a module's own modules can be visited: split layers are in it, and nothing that is unknown."""
        if not self.divided(name):
            return False
        for each, child in self.children(name):
            plain = not any(True for _ in child.parameters()) or computes_by_token(child)
            split = self.has(each, Column, Row, ConvColumn, ConvRow) or self.gathers(each)
            if not plain and not split and not self.opens(each):
                return False
        return True

    def keep_tokens(self, name: str) -> None:
        """Let every rank get all tokens from the last layers in a module, too."""
        for each, _ in self.inside(name):
            if self.has(each, Row, ConvRow):
                self.rules[each] = tuple(
                    replace(s, scatter_output=False) if isinstance(s, Row | ConvRow) else s for s in self.rules[each]
                )
            elif self.has(each, SequenceRegion):  # the second layer of an adapter, behind one of these
                self.rules[each] = (Replicated(),)

    def whole(self, name: str) -> None:
        """Let every rank compute a module with all tokens, and take its share of the output."""
        inside = [each for each, _ in self.inside(name)]
        rows = [each for each in inside if self.has(each, Row, ConvRow)]
        if rows and not any(self.has(each, Column, ConvColumn) for each in inside):
            beside = "beside what may mix tokens; turn sequence parallelism off."
            reason = f"sums the features of all ranks ({rows[0]}) {beside}"
            self.add(name, Refused(reason, sequence_parallel=True))
        self.keep_tokens(name)
        for each, child in self.inside(name):
            if not self.has(each, Row, ConvRow) and any(p is not None for p in child._parameters.values()):
                self.rules.setdefault(each, (Replicated(),))
        # One that others add to hidden states has their width.
        biases = [p for local, p in self.modules[name]._parameters.items() if "bias" in local and p is not None]
        if any(self.width is None or p.shape[-1] in (self.width, 1) for p in biases):
            reason = "may hand out its bias, for tokens of which ranks hold shares; turn sequence parallelism off."
            self.add(name, Refused(reason, sequence_parallel=True))
        self.add(name, Boundary(enter="join", leave="split"))


def several_states(layer: nn.Module) -> str | None:
    """Return that a layer gets hidden states besides its first argument, which alone is divided; None: it does not."""
    first, *others = inspect.signature(layer.forward).parameters
    return next((f"gets hidden states as {first} and as {each}" for each in others if each in STATES), None)


def by_token_arguments(layer: nn.Module) -> tuple[str, ...]:
    """Return the arguments of a layer that have a value for each token, besides hidden states."""
    return tuple(each for each in inspect.signature(layer.forward).parameters if each in BY_TOKEN)


def computes_by_token(module: nn.Module) -> bool:
    """Return whether a module computes each token's output from that token alone: a norm, or a linear layer."""
    return isinstance(module, nn.Linear) or (
        "norm" in type(module).__name__.lower() and not len(list(module.children()))
    )
