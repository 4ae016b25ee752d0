"""Styles of attention: heads over ``tp``, sequences over ``cp``, and mixers that need whole sequences."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.nn import Attention, DraftAttention, InnerAttention, RMSNorm
from megalight.nn.mamba2 import AllTokens
from megalight.ops.norm import rms_norm
from megalight.parallel import shard
from megalight.parallel.collectives import own_slice
from megalight.parallel.context.all_to_all import HeadShare, RowAttention
from megalight.parallel.context.attention import ContextAttention, ContextDraftAttention
from megalight.parallel.context.divided_calls import ContextCore, divide_calls, why_not
from megalight.parallel.context.divided_layers import ContextMean, OwnPart, compute_part, own_features
from megalight.parallel.shared_state import GroupMean
from megalight.parallel.styles.style import Splitter, Style, register


@register
@dataclass(frozen=True)
class HeadRegion(Style):
    """A module that works on this rank's attention heads (QK-norm).

    If all heads share its weights, their gradients are summed over ``tp``. A norm over all heads together
    (``nn.Attention(norm_whole=True)``) has weights of its own for each head: a rank holds those of its heads, and mean
    squares are averaged over ``tp``, one number per token.
    """

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module; of a norm over all heads together, keep the part for this rank's heads.

        Raises:
            LayoutError: such a norm is not an ``nn.RMSNorm``, or its heads cannot be distributed.
        """
        around = splitter.model.get_submodule(name.rpartition(".")[0])
        tp = splitter.shared.mesh.tp
        if tp == 1 or not isinstance(around, Attention) or not around.norm_whole:
            # Each rank sees the gradient of its own heads only.
            splitter.keep(name, module, partial=True)
            return
        if not isinstance(module, RMSNorm):
            raise LayoutError(
                f"{name} is a {type(module).__name__} over all heads together, and tp={tp} divides the heads; only an "
                "RMSNorm can be divided. Set norm.kind=rms, attention.qk_norm_whole=false, or tp=1."
            )
        heads = module.weight.shape[0] // around.head_dim
        # As the projection divides heads: a key head may be on several ranks. Each head is then on equally many, so the
        # mean over ranks is that over heads.
        rule = functools.partial(shard.output_features, units=[heads], shared=True)
        module._parameters["weight"] = splitter.split(name, module, "weight", rule)
        module.average = GroupMean(splitter.shared, tp)


@register
@dataclass(frozen=True)
class WideNorm(Style):
    """An RMS norm of a foreign model over all heads together (OLMo-2), of which a rank has its own.

    Mean squares are averaged over ranks, one number per token.

    Attributes:
        heads: number of heads.
        eps: added to the mean square.
        over: the mesh axis whose ranks divide the heads.
    """

    heads: int
    eps: float
    over: Literal["tp", "cp"] = "tp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, with the part of its weight for this rank's heads.

        Raises:
            LayoutError: its heads cannot be distributed.
        """
        shared = splitter.shared
        if self.over == "cp":
            splitter.keep(name, module)
            size = module.get_parameter("weight").shape[0]
            part = OwnPart(0, own_features(name, (size,), (self.heads,), shared.mesh, shared=True))
            module.forward = functools.partial(_norm, module, self.eps, ContextMean(shared.context_groups))
            compute_part(module, {"weight": part})
            return
        # As the projection divides heads: each is on equally many ranks, so the mean over ranks is that over heads.
        rule = functools.partial(shard.output_features, units=[self.heads], shared=True)
        module._parameters["weight"] = splitter.split(name, module, "weight", rule)
        if shared.mesh.tp > 1:
            module.forward = functools.partial(_norm, module, self.eps, GroupMean(shared, shared.mesh.tp))


def _norm(module: nn.Module, eps: float, average: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``[..., features] -> [..., features]``: this rank's features, normed with those of all ranks."""
    return rms_norm(x, module.weight, eps, average=average)  # type: ignore[arg-type]


@register
@dataclass(frozen=True)
class OwnHeads(Style):
    """An attention of a foreign model that is called with a tensor of all heads (ALiBi), and takes those of its rank.

    Attributes:
        argument: name of the argument, ``[heads, ...]`` or ``[B * heads, ...]``, or None.
        heads: number of heads.
        over: the mesh axis whose ranks divide the heads.
    """

    argument: str
    heads: int
    over: Literal["tp", "cp"] = "tp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, and add a hook."""
        shared = splitter.shared
        if shared.mesh.size(self.over) == 1:
            return
        place = list(inspect.signature(module.forward).parameters).index(self.argument)

        def own(value: Tensor) -> Tensor:
            group = shared.group if self.over == "tp" else shared.context_groups.all
            return own_slice(value.reshape(-1, self.heads, *value.shape[1:]), group, 1).flatten(0, 1)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if isinstance(kwargs.get(self.argument), Tensor):
                return args, {**kwargs, self.argument: own(kwargs[self.argument])}
            if len(args) > place and isinstance(args[place], Tensor):
                return (*args[:place], own(args[place]), *args[place + 1 :]), kwargs
            return args, kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)


@register
@dataclass(frozen=True)
class DraftAttentionRegion(Style):
    """The attention core of a draft model (``nn.DraftAttention``), whose real tokens lie in all shares."""

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module | None:
        """Return a :class:`ContextDraftAttention` if there are several shares.

        Raises:
            LayoutError: another kind than ``all_gather`` is asked for.
        """
        inner = self.expect(name, module, DraftAttention, replaced=self.splits(splitter.shared.mesh))
        shared = splitter.shared
        if shared.mesh.cp == 1:
            return None
        if (kind := shared.context.kind_of(name)) not in ("auto", "all_gather"):
            raise LayoutError(
                f"{name}: context.kind={kind!r} cannot serve the attention of a draft model, which gathers the keys of "
                "the real tokens once. Set kind='all_gather' or 'auto'."
            )
        return ContextDraftAttention(inner, shared.context_groups)


@register
@dataclass(frozen=True)
class ContextRegion(Style):
    """The attention core (``nn.InnerAttention``), which attends to all shares of a sequence under context parallelism.

    The kind (ring, all-gather, ...) is an option of the layout, not of the plan.
    """

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module | None:
        """Return a :class:`ContextAttention` if there are several shares."""
        inner = self.expect(name, module, InnerAttention, replaced=self.splits(splitter.shared.mesh))
        shared = splitter.shared
        # Without shares the attention is right as it is, and a wrapper would cost every call.
        if shared.mesh.cp == 1:
            return None
        outer = splitter.model.get_submodule(name.rpartition(".")[0])
        heads = getattr(outer, "heads", None)  # this rank's number: the projection before it is already split
        return ContextAttention(inner, name, shared.context.kind_of(name), shared.context_groups, heads)


@register
@dataclass(frozen=True)
class InterfaceRegion(Style):
    """A model of ``transformers`` that uses our attention by its attention interface, or a module around one.

    A module around one has an attribute ``core`` (``HFModel``), and gets shares of sequences. A model alone
    takes its share by itself, of each call with labels (:mod:`megalight.parallel.context.divided_calls`).
    """

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Give the model the attention of this rank's share.

        Raises:
            LayoutError: it mixes tokens in another way than by attention, or needs all positions at once.
        """
        splitter.keep(name, module)
        shared = splitter.shared
        if shared.mesh.cp == 1:
            return
        if hasattr(module, "core"):
            net: nn.Module = module.net  # type: ignore[assignment]
            if reason := why_not(net):
                raise LayoutError(f"{name or 'the model'} ({type(net).__name__}) {reason}. Set context_parallel=1.")
            module.core = ContextCore(name, shared.context, shared.context_groups)  # type: ignore[assignment]
            return
        multiple = shared.mesh.tp if shared.sequence_parallel else 1
        divide_calls(name, module, shared.context, shared.context_groups, multiple)


@register
@dataclass(frozen=True)
class HeadExchange(Style):
    """The place in a mixer where all tokens of a sequence meet (``AllTokens`` of ``nn.Mamba2``).

    Ranks exchange their tokens for heads there, whichever kind attention uses.
    """

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module | None:
        """Return a :class:`HeadShare` if there are several shares."""
        self.expect(name, module, AllTokens, replaced=self.splits(splitter.shared.mesh))
        if splitter.shared.mesh.cp == 1:
            return None
        # this rank's number: the projection before it is already split
        heads = splitter.model.get_submodule(name.rpartition(".")[0]).heads
        return HeadShare(name, splitter.shared.context_groups, heads)  # type: ignore[arg-type]


@register
@dataclass(frozen=True)
class RowExchange(Style):
    """The attention core (``nn.InnerAttention``) of a model whose ranks along ``cp`` hold equal runs of packed rows."""

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module | None:
        """Return a :class:`RowAttention` if there are several shares."""
        inner = self.expect(name, module, InnerAttention, replaced=self.splits(splitter.shared.mesh))
        if splitter.shared.mesh.cp == 1:
            return None
        # This rank's number: the projection before it is already split.
        heads = splitter.model.get_submodule(name.rpartition(".")[0]).heads
        return RowAttention(inner, name, splitter.shared.context_groups, heads)  # type: ignore[arg-type]


@register
@dataclass(frozen=True)
class WholeSequences(Style):
    """A mixer that needs all tokens of a sequence, so context parallelism, which cuts sequences, raises an error."""

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module.

        Raises:
            LayoutError: ranks hold shares of the sequences.
        """
        cp = splitter.shared.mesh.cp
        # A state runs through the sequence: every share but the first would begin from zeros.
        if cp > 1:
            raise LayoutError(
                f"{name} ({type(module).__name__}) needs whole sequences, and cp={cp} gives each rank a share of every "
                "one. Set context_parallel=1 (tensor and pipeline parallelism serve such layers)."
            )
        splitter.keep(name, module)
