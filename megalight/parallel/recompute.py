"""Activation recompute: the forward pass does not keep activations, and the backward pass computes them again.

There are two mechanisms. A *region* (a layer, consecutive layers, the attention core, an MLP) keeps its inputs and runs
again. An output that is cheap to compute (of a norm or an activation) is *discarded*: the linear layer that reads it
keeps a recipe to compute it again. Both replace the ``forward`` of module instances, so the names of modules and
parameters do not change.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from threading import get_ident
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalight.attachments import GATHER_HOOK
from megalight.errors import ConfigurationError, nearest, nearest_pattern
from megalight.nn import Activation, Embedding, LayerNorm, Linear, RMSNorm
from megalight.ops.autograd import RecomputeRecipe, attach_recipe, recipe_of
from megalight.ops.batch_invariant import MODE, batch_invariant_mode
from megalight.parallel.interleaved_passes import uninterrupted
from megalight.parallel.layers import Override, depth_layers_of, is_a, layers_of, stacks_of, tower_layers_of, translated
from megalight.parallel.shared_state import ParallelDropout
from megalight.parallel.tensor.linear import ColumnLinear, RowLinear

GRANULARITIES = ("none", "selective", "full")
METHODS = ("uniform", "block")


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """Activations that the backward pass computes again, so that they need not be kept.

    Attributes:
        granularity: ``none``; ``selective``: the named modules inside every layer; ``full``: whole layers.
        modules: for ``selective``: names or glob patterns (``*`` also matches dots) of modules, as they are called
            inside a layer (``attention.inner``, ``mlp``, ``*_norm``, ``mlp.act``), or in the model
            (``layers.1?.mlp``, ``layers.3``). Megatron's names are known too (:mod:`~megalight.parallel.layers`).
        method: for ``full``: ``uniform`` (the default): consecutive layers form groups of ``num_layers``, and each
            group keeps only its input; ``block``: the first ``num_layers`` layers of every model chunk are recomputed
            one by one, and the others keep everything. Layers of multi-token prediction are recomputed by ``uniform``,
            one by one.
        num_layers: for ``full``; the default for ``uniform`` is 1.
        vision: recompute of the layers of a vision tower, which the other settings leave alone. Names in its
            ``modules`` are those inside of a layer of the tower, or begin with ``embed.tower.layers``.

    Raises:
        ConfigurationError: an unknown word, or settings that do not belong together.
    """

    granularity: Literal["none", "selective", "full"] = "none"
    modules: tuple[str, ...] = ()
    method: Literal["uniform", "block"] | None = None
    num_layers: int | None = None
    vision: RecomputeOptions | None = None

    def __post_init__(self) -> None:
        # Translated here, so that all other code knows one name for each module. Frozen, hence past the guard.
        object.__setattr__(self, "modules", translated(self.modules))
        _check_word("granularity", self.granularity, GRANULARITIES)
        if self.vision is not None and self.vision.vision is not None:
            raise ConfigurationError("recompute.vision.vision is set, and a tower has no tower; leave it out.")
        full = self.granularity == "full"
        if not full and (self.method is not None or self.num_layers is not None):
            raise ConfigurationError(
                f"recompute.granularity={self.granularity!r} with method={self.method!r}, "
                f"num_layers={self.num_layers}: they need granularity='full'; set it, or leave them out."
            )
        if self.granularity != "selective" and self.modules:
            raise ConfigurationError(
                f"recompute.granularity={self.granularity!r} with modules={list(self.modules)}: they need "
                "granularity='selective'; set it, or leave them out."
            )
        if self.granularity == "selective" and not self.modules:
            raise ConfigurationError(
                "recompute.granularity='selective' needs modules; name some, for example "
                "modules=['attention_norm', 'mlp_norm', 'mlp.act']."
            )
        if full:
            self._check_full()

    def _check_full(self) -> None:
        method = "uniform" if self.method is None else self.method
        _check_word("method", method, METHODS)
        if self.num_layers is None and method == "block":
            raise ConfigurationError(
                "recompute.method='block' needs num_layers: how many layers of a chunk to recompute."
            )
        number = 1 if self.num_layers is None else self.num_layers
        if number < 1:
            raise ConfigurationError(f"recompute.num_layers={number}; it must be at least 1.")
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "num_layers", number)


def _check_word(what: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        raise ConfigurationError(
            f"recompute.{what}={word!r}; it must be one of {', '.join(known)}." + nearest(str(word), known)
        )


Layer: TypeAlias = tuple[str, nn.Module]
"""Name in the model and module of a layer: ``layers.3``, or ``mtp.depths.0.layers.0``."""
DISCARDED = (RMSNorm, LayerNorm, Activation, nn.RMSNorm, nn.LayerNorm, nn.GELU, nn.SiLU, nn.ReLU)
"""Modules whose output the next linear layer can compute again."""
USELESS: dict[tuple[type[nn.Module], ...], str] = {
    (Linear, ColumnLinear, RowLinear, nn.Linear): "a linear layer keeps only its input, and so would its recompute",
    (nn.Dropout, ParallelDropout): "dropout keeps a mask, and its recompute would keep its input, which is larger",
    (Embedding, nn.Embedding): "an embedding keeps only token ids",
    (nn.ModuleDict, nn.ModuleList): "it is a container, which is never called",
}
"""Module types for which recompute saves nothing, and why."""


def _matches(layer: Layer, pattern: str) -> list[tuple[str, nn.Module]]:
    """Return the modules that a pattern names, in the layer or as the layer itself, which has an empty name."""
    outer, module = layer
    matches = re.compile(fnmatch.translate(pattern)).match
    found = []
    # By both names: patterns for one layer begin with `layers.`.
    for name, part in module.named_modules():
        whole = f"{outer}.{name}" if name else outer
        if (name and matches(name)) or matches(whole):
            found.append((name, part))
    return found


def selected(layer: Layer, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the modules of a layer to recompute, without modules inside another one of the list."""
    # A dict, as several patterns may name the same module, which must be replaced once.
    found = {name: module for p in patterns for name, module in _matches(layer, p) if not _why_useless(module)}
    return [
        (name, module)
        for name, module in found.items()
        # An outer region runs its inner modules again anyway; a region in a region would run them three times.
        if not any(name != other and (not other or name.startswith(f"{other}.")) for other in found)
    ]


def _why_useless(module: nn.Module) -> str | None:
    if getattr(module, "inplace", False):
        return "it overwrites its input, so it cannot run a second time"
    if getattr(module, "fp8_input_store", False):
        return "it keeps its input in 8 bits (fp8_input_store), and its recompute would keep it whole"
    return next((reason for types, reason in USELESS.items() if isinstance(module, types)), None)


def check_pattern(layers: list[Layer], pattern: str, patterns: Sequence[str], option: str) -> None:
    """Check that a pattern, among others of an ``option``, names a module whose recompute saves memory.

    Raises:
        ConfigurationError: it names none.
    """
    found = [(layer, name, module) for layer in layers for name, module in _matches(layer, pattern)]
    if not found:
        names = dict.fromkeys(name for _, layer in layers for name, _ in layer.named_modules() if name)
        raise ConfigurationError(
            f"pattern {pattern!r} of {option} matches no module of any layer; modules inside a layer are "
            f"{', '.join(names)}." + nearest_pattern(pattern, names)
        )
    useful = [one for one in found if not _why_useless(one[2])]
    if not useful:
        raise ConfigurationError(
            f"{pattern!r} of {option} would save nothing: {_why_useless(found[0][2])}. Leave it out."
        )
    if not any(name in dict(selected(layer, patterns)) for layer, name, _ in useful):
        raise ConfigurationError(
            f"{pattern!r} of {option} lies inside another module of the list, which is recomputed as a whole; "
            "leave out one of the two."
        )


class RecomputeRegion(Override):
    """Keeps the inputs of a module, and runs the module again in the backward pass."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.draws = Draws([module])

    def recomputed(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output, and keep only the inputs."""
        return run_region(self.plain, self.draws(), *_without_caches(args, kwargs))


CACHE = "transformers.cache_utils.Cache"


def _without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave out caches of ``transformers``, which it fills in training, too: a second run would fill them twice."""
    return (
        tuple(None if is_a(arg, CACHE) else arg for arg in args),
        {name: None if is_a(arg, CACHE) else arg for name, arg in kwargs.items()},
    )


def run_region(function: Callable[..., Any], draws: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``function(*args, **kwargs)`` under ``torch.utils.checkpoint``, which keeps the inputs only."""
    call = _RecomputedCall(function, args, draws)
    # Kept tensors are arguments of `checkpoint`, as it saves what it is called with; the
    # real arguments bypass it.
    kept = [tensor for part, arg in zip(call.parts, args, strict=True) for tensor in part.kept(arg)]
    # The non-reentrant form allows keyword arguments, and inputs that need no gradients.
    return checkpoint(call, *kept, use_reentrant=False, preserve_rng_state=draws, **kwargs)


class _RecomputedCall:
    """A call that first runs with its own arguments, and later with arguments rebuilt from kept tensors.

    A dict of tensors is kept entry by entry, because the function may change the dict. A tensor with a recipe is kept
    as the recipe's ingredients.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], draws: bool) -> None:
        self.function = function
        self.draws = draws
        # The backward runs in other threads, and both runs must save the same tensors.
        self.invariant = MODE.on
        self.parts = [_Argument(arg) for arg in args]
        # A view has no recipe. So linear layers inside the region save the tensor itself, which is rebuilt only once.
        self.args: Sequence[Any] | None = [arg if recipe_of(arg) is None else arg.view_as(arg) for arg in args]

    def __call__(self, *kept: Any, **kwargs: Any) -> Any:
        if self.invariant != MODE.on:
            with batch_invariant_mode(self.invariant):
                return self(*kept, **kwargs)
        # The first run has the real arguments. They are dropped, because only the kept tensors may stay in memory.
        args, self.args = self.args, None
        if args is None:
            rest = iter(kept)
            args = [part.put_together([next(rest) for _ in range(part.count)]) for part in self.parts]
            # The second run takes its arguments from what autograd has saved.
            if self.draws:  # torch has set the generators back, which another pass would read, too
                with uninterrupted():
                    return self.function(*args, **kwargs)
        return self.function(*args, **kwargs)


class _Argument:
    """Describes one argument of a region; it holds no tensor."""

    def __init__(self, arg: Any) -> None:
        recipe = recipe_of(arg)
        self.keys = list(arg) if isinstance(arg, dict) else None
        self.make = None if recipe is None else recipe.read()
        self.needs_grad = recipe is not None and arg.requires_grad
        self.count = len(arg) if self.keys is not None else 1 if recipe is None else len(recipe.ingredients)

    def kept(self, arg: Any) -> tuple[Any, ...]:
        """Return the tensors to keep for ``arg``."""
        recipe = recipe_of(arg)
        return tuple(arg.values()) if self.keys is not None else (arg,) if recipe is None else recipe.ingredients

    def put_together(self, kept: list[Any]) -> Any:
        """Rebuild the argument from the kept tensors."""
        if self.keys is not None:
            return dict(zip(self.keys, kept, strict=True))
        if self.make is not None:
            # It is a leaf. It needs a gradient if the first one did: both runs must save the same tensors.
            return self.make(*kept).requires_grad_(self.needs_grad)
        return kept[0]


class Draws:
    """Tells whether modules draw random numbers, so that generators must be reset for the second run.

    Modules of this package and of torch show it by ``p`` or ``dropout``. Other modules are assumed to draw.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        parts = [part for module in modules for part in module.modules()]
        # RReLU draws although it has no probability.
        self.always = any(
            # Code of others may draw anywhere.
            isinstance(part, nn.RReLU) or type(part).__module__.partition(".")[0] not in ("megalight", "torch")
            for part in parts
        )
        self.droppers = [part for part in parts if isinstance(_probability(part), float | int)]

    def __call__(self) -> bool:
        """Whether the modules draw random numbers now."""
        # Read at each call: a scheduler or a user may change the probability.
        return self.always or any(_probability(part) for part in self.droppers)


def _probability(module: nn.Module) -> Any:
    return getattr(module, "p", getattr(module, "dropout", None))


class Discarding(Override):
    """Returns the output together with a recipe for it. The first call shows whether a linear layer reads the recipe.

    Ordinary recompute of a norm would save nothing, because the next layer keeps the norm's output.

    Attributes:
        unread: the first call's recipe was not read; None before that call.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.unread: bool | None = None

    def recomputed(self, x: Tensor, residual: Tensor | None = None, *, pair: bool = False, **kwargs: Any) -> Any:
        """Return the output with its recipe. A norm's second output is kept anyway, so its recipe starts there."""
        # Told in the second call: readers come after this module, so the first call cannot know.
        if self.unread:
            raise ConfigurationError(
                f"recompute of {self.name} ({type(self.module).__name__}) saves nothing: no linear layer of Megalight "
                "reads its output directly, so the output is kept all the same. Leave it out of recompute.modules, or "
                "name a module that contains it."
            )
        pair = pair or residual is not None
        # With a residual, the norm returns the sum too, which the residual stream keeps alive anyway: the recipe starts
        # from it, so that `x` and `residual` may be freed.
        y, kept = self.plain(x, residual, pair=True, **kwargs) if pair else (self.plain(x, **kwargs), x)
        # A linear layer that reads the recipe, in this first pass, sets it back to False.
        if self.unread is None:
            self.unread = True
        y = attach_recipe(y, RecomputeRecipe(_again(self.plain, x.device.type, kwargs), (kept,), self._was_read))
        return (y, kept) if pair else y

    def _was_read(self) -> None:
        self.unread = False


def _again(function: Callable[..., Tensor], device: str, kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Bind ``function`` to the current autocast state."""
    # The backward runs outside autocast, and the output must come out in the same dtype.
    enabled = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device)

    def again(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype, enabled):
            return function(x, **kwargs)

    # Without autocast there is nothing to set, and the context manager would cost every call.
    return again if enabled else lambda x: function(x, **kwargs)


def make_group(layers: list[Layer]) -> None:
    """Make consecutive layers one recompute region."""
    group = Group(Draws([layer for _, layer in layers]))
    for name, layer in layers:
        gathering = GATHER_HOOK.get(layer)  # a hook of the data-parallel engine, which may run twice
        allowed = set() if gathering is None else {gathering.id}
        if {*layer._forward_hooks, *layer._forward_pre_hooks} - allowed:
            raise ConfigurationError(
                f"{name} has forward hooks, which recompute of groups of layers would call twice; choose "
                "recompute.num_layers=1."
            )
        group.members.append(Member(name, layer, group, len(group.members)))


@dataclass(eq=False)
class Group:
    """Consecutive layers that all run when the first one is called; the others return their input.

    So the model's own loop over layers stays as it is. The loop must not change anything between two layers, nor pass
    other arguments to another layer; both raise an error.

    Attributes:
        draws: tells whether the layers draw random numbers.
        members: the layers.
        running: the threads in which the members run their own layers now. A forward of one micro-batch may have
            stopped halfway while the group runs again for another one (:mod:`megalight.parallel.interleaved_passes`).
        expected: the arguments with which the other members must be called now: the first call's result and its other
            arguments.
    """

    draws: Draws
    members: list[Member] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    expected: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def run(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Run all layers."""
        # Threads, because passes of two micro-batches take turns in threads of their own.
        self.running.add(get_ident())
        try:
            hidden = self.members[0].plain(hidden, *args, **kwargs)
            for member in self.members[1:]:
                # By the module, not by its own forward: its hooks gather its parameters.
                hidden = member.module(hidden, *args, **kwargs)
            return hidden
        finally:
            self.running.discard(get_ident())


class Member(Override):
    """One layer of a group."""

    def __init__(self, name: str, module: nn.Module, group: Group, place: int) -> None:
        super().__init__(name, module)
        self.group = group
        self.place = place

    def recomputed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the whole group in the first member; return the input in the others."""
        group = self.group
        if get_ident() in group.running:
            return self.plain(*args, **kwargs)
        if self.place == 0:
            result = run_region(group.run, group.draws(), *_without_caches(args, kwargs))
            # The other members check that they get just this output: a model that does something between its layers
            # would otherwise skip it unnoticed.
            group.expected = (result, *args[1:]), kwargs
            return result
        if group.expected is None or not _same(args, kwargs, *group.expected):
            raise ConfigurationError(
                f"{self.name} is recomputed together with the layer before it. So it must get the output of that layer "
                "as its first argument, and the same other arguments; here it does not. Choose recompute.num_layers=1."
            )
        if self.place == len(group.members) - 1:
            # Kept no longer: it would hold the hidden states until the next pass.
            group.expected = None
        return args[0]


def _same(args: tuple[Any, ...], kwargs: dict[str, Any], args_: tuple[Any, ...], kwargs_: dict[str, Any]) -> bool:
    """Whether two calls got identical objects."""
    if len(args) != len(args_) or kwargs.keys() != kwargs_.keys():
        return False
    # Identity is cheaper than equality, and the loop has no reason to make copies.
    return all(map(operator.is_, args, args_)) and all(kwargs[key] is kwargs_[key] for key in kwargs)


def check_recompute(model: nn.Module, recompute: RecomputeOptions, chunks: Iterable[Sequence[int]] = ()) -> None:
    """Check that ``recompute`` makes sense for a whole model, before it is cut into chunks.

    Its layers are those in ``layers``, or those of the models of ``transformers`` in it, towers included.

    Args:
        chunks: indices of the layers of each chunk, if the model will be cut.

    Raises:
        ConfigurationError: the model has no layers; a pattern matches nothing, or only modules for which recompute
            saves no memory; there are fewer layers than requested; layers of ``transformers`` recompute already.
    """
    if recompute.vision is not None:
        tower = list(tower_layers_of(model).items())
        if not tower:
            raise ConfigurationError(
                f"recompute.vision is set, and {type(model).__name__} has no vision tower; leave it out."
            )
        _check([tower], [], recompute.vision, "recompute.vision.modules")
    if recompute.granularity != "none":
        stacks, depths = _layers(model)
        _check(stacks, depths, recompute, "recompute.modules", chunks)


def _check(
    stacks: list[list[Layer]],
    depths: list[Layer],
    recompute: RecomputeOptions,
    option: str,
    chunks: Iterable[Sequence[int]] = (),
) -> None:
    chunks = list(chunks)
    layers = [layer for stack in stacks for layer in stack]
    for name, layer in layers:
        if getattr(layer, "gradient_checkpointing", False):
            raise ConfigurationError(
                f"{name} recomputes itself (gradient_checkpointing_enable), and would run three times with {option}. "
                "Call gradient_checkpointing_disable() on its model, or leave recompute out."
            )
    for stack in stacks if recompute.granularity == "full" else ():
        _check_number(stack, recompute)
        if sum(map(len, chunks)) == len(stack):  # the one that is cut; a tower is not
            for chunk in chunks:
                # Each chunk by itself: groups of layers do not reach over the edge of a chunk.
                _check_number([stack[index] for index in chunk], recompute)
    for pattern in recompute.modules:
        check_pattern(layers + depths, pattern, recompute.modules, option)


def apply_recompute(chunk: nn.Module, recompute: RecomputeOptions, *, whole: bool = True) -> None:
    """Apply recompute to one model chunk, in place; an earlier recompute is removed first.

    It acts only while gradients are enabled and the module is in training mode, so evaluation and generation do not
    change. Call it when modules are final (after ``parallelize``).

    Args:
        chunk: a model with ``layers``, a ``ModuleDict`` or ``ModuleList``, or one around models of ``transformers``.
        whole: the chunk is the whole model, so it must pass :func:`check_recompute`. A part of a model that was checked
            before may lack modules that a pattern names.

    Raises:
        ConfigurationError: as :func:`check_recompute`; more layers than the chunk has; a group of layers with forward
            hooks; a module whose ``forward`` other code has replaced.
    """
    # Removed first, as an override refuses a module whose forward is already replaced.
    for module in chunk.modules():
        # A forward on the instance hides that of the class; deleting it brings the class's back.
        if isinstance(module.__dict__.get("forward"), Override):
            del module.forward
    if whole:
        check_recompute(chunk, recompute)
    if recompute.vision is not None:
        _apply([list(tower_layers_of(chunk).items())], [], recompute.vision)
    if recompute.granularity != "none":
        _apply(*_layers(chunk), recompute)


def _apply(stacks: list[list[Layer]], depths: list[Layer], recompute: RecomputeOptions) -> None:
    if recompute.granularity == "full":
        for stack in stacks:
            _apply_full(stack, recompute)
        if recompute.method == "uniform":
            for name, module in depths:
                RecomputeRegion(name, module)  # alone: a projection lies between two of them
        return
    for layer in chain(*stacks, depths):
        for name, module in selected(layer, recompute.modules):
            kind = Discarding if isinstance(module, DISCARDED) else RecomputeRegion
            kind(layer[0] + (f".{name}" if name else ""), module)


def _layers(model: nn.Module) -> tuple[list[list[Layer]], list[Layer]]:
    """Return the stacks of layers of a model or a chunk of one, and the layers of its multi-token prediction."""
    if not hasattr(model, "layers") and (foreign := stacks_of(model)):
        return [list(stack.items()) for stack in foreign], []
    layers = [(f"layers.{index}", layer) for index, layer in layers_of(model, "recompute").items()]
    return [layers], list(depth_layers_of(model).items())


def redrawing(chunk: nn.Module) -> list[str]:
    """Return names of recomputed modules that draw random numbers; for them the host resets generators."""
    found = []
    for module in chunk.modules():
        override = module.__dict__.get("forward")
        # A member of a group asks the group.
        draws = getattr(override, "draws", None) or getattr(getattr(override, "group", None), "draws", None)
        if isinstance(override, Override) and draws is not None and draws():
            found.append(override.name)
    return found


def _apply_full(layers: list[Layer], recompute: RecomputeOptions) -> None:
    assert recompute.num_layers is not None
    _check_number(layers, recompute)
    if recompute.method == "block":
        # "block": the first layers of a chunk, because their activations live longest.
        groups = [[layer] for layer in layers[: recompute.num_layers]]
    else:
        # "uniform": every layer belongs to a region, and a region keeps only its first input.
        groups = [layers[i : i + recompute.num_layers] for i in range(0, len(layers), recompute.num_layers)]
    for group in groups:
        if len(group) == 1:
            RecomputeRegion(*group[0])
        else:
            make_group(group)


def _check_number(layers: list[Layer], recompute: RecomputeOptions) -> None:
    assert recompute.num_layers is not None
    # Not chunks without layers, such as one with the embedding alone.
    if 0 < len(layers) < recompute.num_layers:
        raise ConfigurationError(
            f"recompute.num_layers={recompute.num_layers}, but a model chunk has {len(layers)} layers "
            f"({layers[0][0]} to {layers[-1][0]}); choose at most that many."
        )
