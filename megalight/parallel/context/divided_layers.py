"""Context parallelism of layers whose code is not ours: tokens between them are divided, attention by heads.

A model runs on whole sequences up to its first layer, and from its last one on, on every rank: masks, positions,
biases and losses are its own. In between a rank holds a share of the tokens, contiguous and equally long. Norms and
feed-forward layers compute with it. An attention gathers the tokens and computes its own heads of all of them, as
sequence parallelism does over ``tp`` (https://arxiv.org/abs/2205.05198), but with a part of weights that all ranks
hold. What mixes tokens in another way (a state-space mixer, a convolution) is computed whole.

The engine takes the mean of gradients over ``cp``. So there are two kinds of gradients: where all ranks compute the
same, each has the true gradient; where ranks compute different tokens or heads, each has ``cp`` times its term.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.parallel import collectives
from megalight.parallel.context.spec import ContextGroups
from megalight.parallel.mesh import ParallelMesh

TOKENS = 1
"""The dim of hidden states ``[B, S, h]`` that counts tokens."""


WHOLE = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""Arguments of an attention that looks at other tokens besides its first input: all of them, on every rank."""

BY_TOKEN = ("per_layer_input", "audio_token_mask")
"""Arguments of a layer with a value for each token, besides hidden states: it computes with those of its share."""


class _Scaled(torch.autograd.Function):
    """The identity, whose backward multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def _scaled(x: Tensor, factor: float) -> Tensor:
    found: Tensor = _Scaled.apply(x, factor)  # type: ignore[no-untyped-call]
    return found


def read_alike(x: Tensor, groups: ContextGroups) -> Tensor:
    """Return what all ranks along ``cp`` compute alike, for what computes this rank's heads."""
    return _scaled(collectives.copy(x, groups.all), 1 / groups.mesh.cp)


@dataclass(eq=False)
class TokenShares:
    """The shares of the tokens between the first and the last layer of a list.

    Attributes:
        groups: the process groups.
        lengths: numbers of tokens in the shares so far.
        gathered: number of tokens that were gathered last.
        divided: whether ranks hold shares in the call that runs; otherwise, each holds all tokens.
    """

    groups: ContextGroups
    divided: bool = False
    lengths: set[int] = field(default_factory=set)
    gathered: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenShares:
        """Return this object: layers of a copy belong to the same ranks."""
        return self

    def begin(self, x: Tensor) -> Tensor:
        """Take this rank's share of the tokens, which all ranks have: ``[B, S, h] -> [B, S / cp, h]``.

        Raises:
            LayoutError: the tokens do not divide. Without gradients (in generation), each rank keeps all then.
        """
        cp = self.groups.mesh.cp
        length = x.shape[TOKENS] if x.dim() > TOKENS else 0
        # A single token would be taken for a value of all tokens.
        self.divided = length % cp == 0 and length >= 2 * cp
        if not self.divided and torch.is_grad_enabled():
            raise LayoutError(
                f"context_parallel={cp} divides the tokens of {tuple(x.shape)} in dim {TOKENS}, whose length must be a "
                f"multiple of {cp}, and at least {2 * cp}. Pad the sequences."
            )
        self.lengths.add(length // cp)
        return self.split(x)

    def split(self, x: Tensor) -> Tensor:
        """Take this rank's share of what all ranks compute alike."""
        if not self.divided:
            return x
        if not x.is_floating_point():  # a mask has no gradient
            return collectives.own_slice(x, self.groups.all, TOKENS)
        return collectives.split(_scaled(x, 1 / self.groups.mesh.cp), self.groups.all, TOKENS)

    def join(self, x: Tensor) -> Tensor:
        """Gather all tokens, for what all ranks compute alike."""
        self._check(x)
        return _scaled(collectives.join(x, self.groups.all, TOKENS), self.groups.mesh.cp) if self.divided else x

    def gather(self, x: Tensor) -> Tensor:
        """Gather all tokens, for what computes this rank's heads."""
        self._check(x)
        x = collectives.all_gather(x, self.groups.all, TOKENS) if self.divided else x
        self.gathered = x.shape[TOKENS]
        return x

    def check_gathered(self, x: Tensor) -> Tensor:
        """Return the input of a projection, of all tokens.

        Raises:
            LayoutError: the attention got these hidden states besides the first, and not gathered.
        """
        if x.shape[TOKENS] != self.gathered:
            raise LayoutError(
                f"an attention projects hidden states {tuple(x.shape)} besides its first of {self.gathered} tokens, "
                "and context parallelism cannot tell which tokens these are. Set context_parallel=1."
            )
        return x

    def sum(self, x: Tensor) -> Tensor:
        """Sum the terms of all heads, and take this rank's share of the tokens."""
        if self.divided:
            return collectives.reduce_scatter(x, self.groups.all, TOKENS)
        return collectives.all_reduce(x, self.groups.all)

    def _check(self, x: Tensor) -> None:
        """Check that these are hidden states of a share: the list of layers runs from its first to its last.

        Raises:
            LayoutError: they are not.
        """
        length = x.shape[TOKENS] if x.dim() > TOKENS else 0
        if torch.is_grad_enabled() and (not self.divided or length not in self.lengths):
            raise LayoutError(
                f"a layer gets hidden states {tuple(x.shape)}, and context parallelism looks for a share of the tokens "
                f"in dim {TOKENS}, from the first layer of a list to the last. Set context_parallel=1."
            )


@dataclass(frozen=True)
class OwnPart:
    """The part of a tensor that a rank computes with: slices along one dim, side by side."""

    dim: int
    slices: tuple[slice, ...]

    def of(self, x: Tensor) -> Tensor:
        """Return the part."""
        taken = [x[(slice(None),) * self.dim + (each,)] for each in self.slices]
        return taken[0] if len(taken) == 1 else torch.cat(taken, self.dim)


def own_features(
    name: str, sizes: Sequence[int], units: Sequence[int], mesh: ParallelMesh, shared: bool = False
) -> tuple[slice, ...]:
    """Return this rank's features along ``cp`` of each section, in whole units.

    Args:
        name: the layer, for messages.
        sizes: features of each section.
        units: heads of each section.
        mesh: the mesh of ranks.
        shared: several ranks may compute a head of the section that has the most; of others, they always may.

    Raises:
        LayoutError: ``cp`` does not divide the heads.
    """
    cp, rank, first, found = mesh.cp, mesh.rank("cp"), 0, list[slice]()
    for size, count in zip(sizes, units, strict=True):
        several = (shared or count < max(units)) and cp % count == 0
        if count % cp and not several:
            raise LayoutError(
                f"{name} has {count} heads, and context_parallel={cp} does not divide them. Choose a number of ranks "
                "that divides the heads."
            )
        copies = max(1, cp // count)
        width = size * copies // cp
        start = first + rank // copies * width
        found.append(slice(start, start + width))
        first += size
    return tuple(found)


@dataclass(frozen=True)
class ContextMean:
    """The mean of the values of all ranks along ``cp``, whose features are of one size.

    Attributes:
        groups: the process groups.
    """

    groups: ContextGroups

    def __call__(self, part: Tensor) -> Tensor:
        """Return the mean, in the shape of ``part``. The backward takes the mean of gradients over the ranks, too."""
        group = self.groups.all
        # The sum enters the features of every rank, so each has one term of its gradient.
        return collectives.copy(collectives.all_reduce(part, group), group) / self.groups.mesh.cp


@contextmanager
def _in_place(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a module's own code read other tensors than its parameters."""
    own = dict(module._parameters)
    module._parameters.update(values)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(own)


@dataclass(frozen=True, eq=False)
class PartOfModule:
    """Computes a module with parts of its parameters, which stay whole.

    Attributes:
        module: its first input and its output are tensors.
        compute: its own code.
        parts: name of a parameter -> its part.
        before: changes its first input.
        after: changes its output.
        last: name of a parameter that is added behind ``after``.
    """

    module: nn.Module
    compute: Callable[..., Any]
    parts: Mapping[str, OwnPart]
    before: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor], Tensor] | None = None
    last: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output."""
        own = self.module._parameters
        values = {name: part.of(whole) for name, part in self.parts.items() if (whole := own.get(name)) is not None}
        last = None if self.last is None else own[self.last]
        if last is not None:
            values[self.last or ""] = torch.zeros_like(last)  # some layers need one
        if self.before is not None:
            args = self.before(args[0]), *args[1:]
        with _in_place(self.module, values):
            found = self.compute(*args, **kwargs)
        found = found if self.after is None else self.after(found)
        return found if last is None else found + last


def compute_part(module: nn.Module, parts: Mapping[str, OwnPart], **changes: Any) -> None:
    """Let a module compute with parts of its parameters: see :class:`PartOfModule`."""
    # Where its class has it, so that the module keeps its type.
    module.forward = PartOfModule(module, module.forward, parts, **changes)


def add_boundary(module: nn.Module, shares: TokenShares, enter: str | None, leave: str | None) -> None:
    """Change the first input and the first output of a module, which are hidden states.

    Args:
        module: a layer, or a module in one.
        shares: those of its model.
        enter: ``begin``, ``gather`` or ``join``: a method of ``shares``; None: the input stays.
        leave: ``join`` or ``split``; None: the output stays.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # Models of `transformers` pass hidden states by position or keyword; by convention they come first.
        first = args[0] if args else next(iter(kwargs.values()))
        found = getattr(shares, enter or "")(first)

        def changed(name: str | int, value: Any) -> Any:
            if value is first:  # attention that is called with queries, keys and values
                return found
            others = isinstance(value, Tensor) and value.dim() == first.dim() and value.dtype == first.dtype
            if others and leave == "split" and name not in WHOLE and value.shape[1:] == first.shape[1:]:
                raise LayoutError(
                    f"a {type(module).__name__} gets hidden states {tuple(value.shape)} besides the first, and context "
                    "parallelism cannot tell whether these are all tokens. Set context_parallel=1."
                )
            return value

        args = tuple(changed(place, value) for place, value in enumerate(args))
        return args, {name: changed(name, value) for name, value in kwargs.items()}

    def changed(module: nn.Module, output: Tensor, length: int) -> Tensor:
        if not shares.divided:
            return output
        if output.dim() == 2 and leave == "split":  # of all rows, one below the other
            rows = output.view(-1, length, output.shape[-1])
            return shares.split(rows).flatten(0, 1)
        if output.dim() < TOKENS + 2:
            raise LayoutError(
                f"a {type(module).__name__} returns hidden states {tuple(output.shape)}, and context parallelism looks "
                f"for tokens in dim {TOKENS} before the features. Set context_parallel=1."
            )
        return getattr(shares, leave or "")(output)  # type: ignore[no-any-return]

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()))
        length = first.shape[TOKENS] if first.dim() > 2 else 0
        if isinstance(output, tuple | list):
            return type(output)((changed(module, output[0], length), *output[1:]))
        return changed(module, output, length)

    if enter:
        module.register_forward_pre_hook(before, with_kwargs=True)
    if leave:
        # Before hooks of others, which see what the next layer gets.
        module.register_forward_hook(after, with_kwargs=True)


def change_arguments(module: nn.Module, names: Sequence[str], change: Callable[[Tensor], Tensor]) -> None:
    """Change tensors among the arguments of a module, which are passed by position or keyword."""
    places = {place: name for place, name in enumerate(inspect.signature(module.forward).parameters) if name in names}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        found = tuple(
            change(each) if place in places and isinstance(each, Tensor) else each for place, each in enumerate(args)
        )
        named = {
            name: change(each) if name in places.values() and isinstance(each, Tensor) else each
            for name, each in kwargs.items()
        }
        return found, named

    module.register_forward_pre_hook(before, with_kwargs=True)


def refuse_states(model: nn.Module, refused: tuple[str, ...]) -> None:
    """Let a model refuse arguments that ask for hidden states inside of its layers.

    Args:
        model: a model of ``transformers``.
        refused: names of the arguments, and of settings with the same meaning.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        config = getattr(module, "config", None)
        for each in refused:
            if kwargs.get(each) or (kwargs.get(each) is None and getattr(config, each, False)):
                raise LayoutError(
                    f"{type(module).__name__} is called with {each}, and under context_parallel its layers have shares "
                    "of the tokens. Leave it out, or set context_parallel=1."
                )

    model.register_forward_pre_hook(before, with_kwargs=True)
