"""Styles of foreign layers under context parallelism: see :mod:`megalight.parallel.context.divided_layers`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from torch import nn

from megalight.errors import LayoutError
from megalight.nn.adapter import AdapterSet
from megalight.parallel.context.divided_layers import (
    OwnPart,
    add_boundary,
    change_arguments,
    compute_part,
    own_features,
    read_alike,
    refuse_states,
)
from megalight.parallel.styles.linear import Column, ConvColumn, ConvRow, Row
from megalight.parallel.styles.style import Attributes, Splitter, Style, register

REFUSED = ("past_key_values", "output_hidden_states", "output_attentions", "output_router_logits")
"""Arguments of a call in training that ask for states of all tokens inside of layers, or for heads of all ranks."""


def _keep(splitter: Splitter, name: str, module: nn.Module) -> None:
    """Hold a projection whole on every rank.

    Raises:
        LayoutError: it has an adapter, which would compute the heads of all ranks.
    """
    if isinstance(getattr(module, "adapter", None), AdapterSet):
        raise LayoutError(
            f"{name} has an adapter, which would compute the heads of all ranks along cp. Leave attention out of the "
            "adapter's targets, or set context_parallel=1."
        )
    splitter.keep(name, module)


@register
@dataclass(frozen=True)
class DividedStates(Style):
    """A model whose layers get shares of the tokens: calls cannot ask for what is inside of them."""

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the model, and add a check.

        Raises:
            LayoutError: the layout splits it in other ways, too.
        """
        shared = splitter.shared
        for degree, size in (("tensor_parallel", shared.mesh.tp), ("expert_parallel", shared.mesh.ep)):
            if size > 1:
                raise LayoutError(
                    f"{name or 'the model'} ({type(module).__name__}) does not hand all of its attention to the "
                    f"attention interface of transformers, so its layers are divided over context_parallel="
                    f"{shared.mesh.cp}, and not over {degree}={size} besides. Set one of the two to 1."
                )
        refuse_states(module, REFUSED)


@register
@dataclass(frozen=True)
class TokenBoundary(Style):
    """Where a foreign model's hidden states change between all tokens and this rank's share along ``cp``.

    Attributes:
        stack: the list of layers around it.
        enter: change of the module's first input. ``begin``: take this rank's share, in the first layer. ``gather``:
            gather all tokens for the heads of this rank. ``join``: gather them for what all ranks compute alike.
        leave: change of its first output. ``join``: gather all tokens. ``split``: take this rank's share.
        arguments: names of further inputs ``[B, S, ...]``, of which the module computes with its rank's share.
    """

    axis: ClassVar[str] = "cp"

    stack: str
    enter: Literal["begin", "gather", "join"] | None = None
    leave: Literal["join", "split"] | None = None
    arguments: tuple[str, ...] = ()

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, and add hooks."""
        splitter.keep_rest(name, module)
        shares = splitter.shared.shares_of(self.stack)
        add_boundary(module, shares, self.enter, self.leave)
        if self.arguments:
            change_arguments(module, self.arguments, shares.split)


@register
@dataclass(frozen=True)
class OwnHeadsColumn(Style):
    """A projection to heads, of which a rank computes its own along ``cp``. Its weights stay whole.

    Attributes:
        split: how tensor parallelism divides it.
        stack: the list of layers around it.
    """

    axis: ClassVar[str] = "cp"

    split: Column | ConvColumn
    stack: str

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, which computes with a part of its weights."""
        _keep(splitter, name, module)
        weight, kind = module.get_parameter("weight"), self.split
        if isinstance(kind, ConvColumn):
            features, dim = weight.shape[1], 1
            sizes: tuple[int, ...] = (features // kind.sections,) * kind.sections
            units, shared = (kind.units or sizes[0],) * kind.sections, False
        else:
            dim, shared = 0, kind.shared
            sizes = kind.sizes or (weight.shape[0],)
            units = kind.counts or (sizes if kind.units is None else (kind.units,))
        slices = own_features(name, sizes, units, splitter.shared.mesh, shared)
        if isinstance(kind, ConvColumn):  # its forward reads the number of its outputs
            module.nf = sum(each.stop - each.start for each in slices)
        parts = {"weight": OwnPart(dim, slices), "bias": OwnPart(0, slices)}
        # Gathered above the layer, where the backward sums the gradient; or all ranks compute its input alike.
        read = partial(read_alike, groups=splitter.shared.context_groups)
        gathered = splitter.shared.shares_of(self.stack).check_gathered
        compute_part(module, parts, before=gathered if kind.tokens == "gathered" else read)


@register
@dataclass(frozen=True)
class OwnHeadsRow(Style):
    """The projection from heads, whose terms are summed over ``cp``. Its weights stay whole; its bias is added once.

    Attributes:
        split: how tensor parallelism divides it.
        stack: the list of layers around it.
    """

    axis: ClassVar[str] = "cp"

    split: Row | ConvRow
    stack: str

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, which computes with a part of its weights."""
        _keep(splitter, name, module)
        dim = 0 if isinstance(self.split, ConvRow) else 1
        features, mesh = module.get_parameter("weight").shape[dim], splitter.shared.mesh
        part = OwnPart(dim, own_features(name, (features,), (features,), mesh))
        last = "bias" if module._parameters.get("bias") is not None else None
        compute_part(module, {"weight": part}, after=splitter.shared.shares_of(self.stack).sum, last=last)


@register
@dataclass(frozen=True)
class OwnCounts(Style):
    """An attention that computes this rank's heads along ``cp``: its counts become those of one rank.

    Attributes:
        counts: those that tensor parallelism changes.
    """

    axis: ClassVar[str] = "cp"

    counts: Attributes

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, and change its attributes.

        Raises:
            LayoutError: ``cp`` does not divide the heads.
        """
        splitter.keep_rest(name, module)
        mesh, counts = splitter.shared.mesh, self.counts
        counts.divide_counts(name, module, mesh.cp, "context_parallel")
        parts = {}
        for local, dim in counts.per_head.items():
            heads = module.get_parameter(local).shape[dim]
            parts[local] = OwnPart(dim, own_features(f"{name}.{local}", (heads,), (heads,), mesh))
        if parts:
            compute_part(module, parts)
