"""Styles at the boundaries of sequence parallelism: all tokens before a module, this rank's share after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.parallel.collectives import all_gather, copy, join, own_slice, split
from megalight.parallel.context.divided_layers import change_arguments, read_alike
from megalight.parallel.shared_state import SharedState
from megalight.parallel.styles.style import Splitter, Style, register


@register
@dataclass(frozen=True)
class Boundary(Style):
    """Where a foreign model's hidden states change between whole and split under sequence parallelism.

    Attributes:
        enter: change of the module's first input. ``split``: take this rank's share. ``gather``: gather all tokens for
            the split layers inside (:class:`Column` with ``tokens="gathered"``). ``join``: gather all tokens for a
            module that computes the same on every rank.
        leave: change of its first output. ``join``: gather all tokens for modules after it that compute the same on
            every rank. ``gather``: gather them for modules that use other tokens on each rank. ``split``: take this
            rank's share.
        arguments: names of further inputs ``[B, S, ...]``, of which the module computes with its rank's share.
    """

    enter: Literal["split", "gather", "join"] | None = None
    leave: Literal["join", "gather", "split"] | None = None
    arguments: tuple[str, ...] = ()

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, and add hooks."""
        self.add_to(module, splitter.shared)

    def add_to(self, module: nn.Module, shared: SharedState) -> None:
        """Add hooks that act while sequence parallelism is on; add none if it is never used.

        Hooks are used because foreign modules must keep their type. A model has few of them per layer.
        """

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            # Looked up in each call: decoding switches sequence parallelism off.
            if not shared.sequence_parallel:
                return args, kwargs
            # Models of `transformers` pass hidden states by keyword; by convention they come first.
            first = args[0] if args else next(iter(kwargs.values()))
            found = self._enter(first, shared)
            # Some attentions are called with the same hidden states as queries, keys and values.
            return (
                tuple(found if each is first else each for each in args),
                {name: found if each is first else each for name, each in kwargs.items()},
            )

        region = {"gather": all_gather, "join": join, "split": split}[self.leave or "join"]

        def change(module: nn.Module, output: Tensor, first: Tensor) -> Tensor:
            dim = shared.sequence_dim
            if dim and output.dim() == 2 and first.dim() > 2 and self.leave == "split":  # rows one below the other
                rows = output.view(-1, first.shape[dim], output.shape[-1])
                return region(rows, shared.group, dim).flatten(0, 1)
            # Rows `[T, ...]` may have no features: values for each token.
            if dim and output.dim() < dim + 2:
                raise LayoutError(
                    f"a {type(module).__name__} returns hidden states {tuple(output.shape)}, and sequence parallelism "
                    f"looks for tokens in dim {dim} before the features; turn it off for this model."
                )
            return region(output, shared.group, dim)

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not shared.sequence_parallel:
                return output
            first = args[0] if args else next(iter(kwargs.values()))
            # By the same convention they come first in a tuple or list; the rest (attention
            # weights, caches) is left alone.
            if isinstance(output, tuple | list):
                shape = output[0].shape
                if self.leave == "split" and any(isinstance(x, Tensor) and x.shape == shape for x in output[1:]):
                    raise LayoutError(
                        f"a {type(module).__name__} returns {len(output)} hidden states {tuple(shape)}, and sequence "
                        "parallelism divides the first output alone; turn it off for this model."
                    )
                return type(output)((change(module, output[0], first), *output[1:]))
            return change(module, output, first)

        # No hook where it could never act: each one costs the host a call in every forward.
        if self.enter and shared.sequence_parallel:
            module.register_forward_pre_hook(before, with_kwargs=True)
        if self.leave and shared.sequence_parallel:
            module.register_forward_hook(after, with_kwargs=True)
        if self.arguments and shared.sequence_parallel:
            change_arguments(
                module, self.arguments, lambda x: self._share(x, shared) if shared.sequence_parallel else x
            )

    def _enter(self, x: Tensor, shared: SharedState) -> Tensor:
        # The backward of `gather` sums gradients over ranks, as the layers inside see part of the
        # features. That of `join` takes the own share, as gradients are equal there: a sum would make
        # them tp times too large.
        if self.enter == "gather":
            return all_gather(x, shared.group, shared.sequence_dim)
        if self.enter == "join":
            return join(x, shared.group, shared.sequence_dim)
        if shared.sequence_dim and x.dim() > shared.sequence_dim + 2:
            raise LayoutError(
                f"layers get hidden states {tuple(x.shape)}, and sequence parallelism looks for tokens in dim "
                f"{shared.sequence_dim} before the features; turn it off for this model."
            )
        return self._share(x, shared)

    def _share(self, x: Tensor, shared: SharedState) -> Tensor:
        if not x.is_floating_point():  # ids have no gradient
            return own_slice(x, shared.group, shared.sequence_dim)
        return split(x, shared.group, shared.sequence_dim)


@register
@dataclass(frozen=True)
class SharedSlice(Style):
    """A layer that every rank computes whole, and the last features of whose output the heads of all ranks read.

    The rotated key of latent attention: a rank's gradient of it is that of its own heads, so the backward sums it.

    Attributes:
        size: number of these features.
        over: the mesh axis whose ranks divide the heads.
    """

    size: int
    over: Literal["tp", "cp"] = "tp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, and add a hook."""
        splitter.keep(name, module)
        shared = splitter.shared
        if shared.mesh.size(self.over) == 1:
            return

        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            own, read = torch.split(output, [output.shape[-1] - self.size, self.size], dim=-1)
            read = copy(read, shared.group) if self.over == "tp" else read_alike(read, shared.context_groups)
            return torch.cat([own, read], dim=-1)

        module.register_forward_hook(after)


@register
@dataclass(frozen=True)
class SequenceRegion(Style):
    """A module that works on its rank's share of the tokens when sequence parallelism is on.

    Its weights see a part of the tokens, so their gradients are summed over ``tp``.

    Attributes:
        split_input: the module gets whole-sequence inputs (position ids, for example), and takes its share of the
            first.
    """

    split_input: bool = False

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module."""
        # Without sequence parallelism all ranks see all tokens and compute the whole gradient alike: no sum is due.
        splitter.keep(name, module, partial=splitter.shared.sequence_parallel)
        # With the hooks of a boundary, so that ids and hidden states are cut alike.
        if self.split_input:
            Boundary(enter="split").add_to(module, splitter.shared)


@register
@dataclass(frozen=True)
class AllRows(Style):
    """A module without parameters, in a model whose ranks along ``cp`` hold equal runs of packed rows.

    It reads the rows of all ranks as its first input, and each rank goes on with its run of the rows that it returns.
    Styles before it in a rule are around it.
    """

    axis: ClassVar[str] = "cp"

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> None:
        """Keep the module, and add hooks if there are several shares."""
        splitter.keep(name, module)
        shared = splitter.shared
        if shared.mesh.cp == 1:
            return

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return join(args[0], shared.context_groups.all, 0), *args[1:]

        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return split(output, shared.context_groups.all, 0)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, prepend=True)
