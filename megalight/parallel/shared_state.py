"""State that all tensor-parallel layers of a model share, and dropout that draws from its random streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.errors import BackendError, LayoutError
from megalight.ops.linear.low_precision import precision_of
from megalight.parallel.collectives import all_reduce, copy
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.context.divided_layers import TokenShares
from megalight.parallel.context.spec import ContextGroups
from megalight.parallel.expert.copy_engine import PeerExchange
from megalight.parallel.expert.dispatch import EqualTokens, ExpertOptions
from megalight.parallel.mesh import ParallelMesh, check_max_ctas, new_group, shared_group
from megalight.parallel.peers.one_shot import OneShotCollectives, one_shot
from megalight.parallel.random import RandomStreams
from megalight.parallel.tensor.overlap import spec, symmetric
from megalight.parallel.tensor.overlap.pipelined import Messages, Pipelined, pieces_why_not
from megalight.parallel.tensor.overlap.spec import MAX_CTAS, Overlap, OverlapSpec, TensorOptions
from megalight.registry import Backend, BackendRegistry

Make: TypeAlias = "Callable[[SharedState], Overlap]"


def _pipelined(shared: SharedState) -> Overlap:
    return Pipelined(shared.tp_group, Messages(shared.message_group), shared.tensor.pieces)


def _symmetric(shared: SharedState) -> Overlap:
    return symmetric.Symmetric(shared.tp_group, shared.tensor.pieces)


OVERLAPS: BackendRegistry[OverlapSpec, Make] = BackendRegistry("tensor-parallel overlap")

# The numbers are priorities for a list of reasons; `auto` is decided below, by the layer and its recording.
OVERLAPS.register(Backend("plain", lambda shared: spec.NoOverlap(shared.tp_group), 20, spec.why_not))
OVERLAPS.register(Backend("pipelined", _pipelined, 10, pieces_why_not))
OVERLAPS.register(Backend("symmetric", _symmetric, 0, symmetric.why_not))


def automatic(spec: OverlapSpec) -> str:
    """Return the backend that ``auto`` uses, as measured on H200 GPUs (``docs/performance/log.md``).

    The host takes longer to launch copies and flags than collectives. If a CUDA graph launches them, ``symmetric``
    saves 6 to 10 % of a step. Without a graph the host is too slow, and it loses as much.
    """
    # Ranks must choose alike, or they deadlock. So the answer depends only on facts that are equal on all of them.
    return "symmetric" if spec.recorded and symmetric.why_not(spec) is None else "plain"


def choose(layer: str, spec: OverlapSpec, kind: str) -> Backend[OverlapSpec, Make]:
    """Return the backend for a layer.

    Raises:
        LayoutError: the named backend cannot serve it, or does not exist; gives the reason of each backend.
    """
    try:
        return OVERLAPS.select(spec, automatic(spec) if kind == "auto" else kind)
    except BackendError as error:
        raise LayoutError(f"{layer}: {error}") from error


COUNTS_MAX_CTAS = 2
"""Multiprocessors that an exchange of numbers may occupy, beside computation: a few bytes for each rank."""

Tokens: TypeAlias = Literal["share", "gathered", "whole"]
"""The tokens that a split layer receives under sequence parallelism.

``share``: this rank's share, and the layer gathers all tokens. ``gathered``: all tokens, gathered by a ``Boundary``
above the layer, which also sums the gradient. ``whole``: the whole sequence, which every rank holds anyway. Without
sequence parallelism all inputs are whole.
"""


@dataclass
class SharedState:
    """State shared by the tensor-parallel layers: one object per parallel model.

    Attributes:
        mesh: the mesh of ranks.
        sequence_parallel: hidden states between split layers hold this rank's share of the tokens. It is read in every
            forward, so that it can be switched off temporarily (decoding).
        sequence_dim: the dim of hidden states that counts tokens.
        context: the kind of attention that layers use under context parallelism.
        tensor: how split layers hide their communication.
        expert: how copies of tokens get to their experts.
        context_groups: the ranks along ``cp``.
        streams: random streams for dropout.
        recorded: training steps, or all layers in them, are recorded as CUDA graphs (:func:`steps_recorded`).
    """

    mesh: ParallelMesh
    sequence_parallel: bool = False
    sequence_dim: int = 0
    context: ContextOptions = field(default_factory=ContextOptions)
    tensor: TensorOptions = field(default_factory=TensorOptions)
    expert: ExpertOptions = field(default_factory=ExpertOptions)
    context_groups: ContextGroups = field(init=False)
    streams: RandomStreams = field(init=False)
    recorded: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.context_groups = ContextGroups(self.mesh, self.context.inner)
        self._shares: dict[str, TokenShares] = {}
        self.streams = RandomStreams(self.mesh)
        self._group: ProcessGroup | None = None
        self._splits_tokens = self.sequence_parallel  # stays True while decoding switches it off
        # Choices are cached by what they depend on, as every layer asks in every pass.
        self._overlaps: dict[tuple[str, OverlapSpec], Overlap] = {}
        self._ways: dict[str, Overlap] = {}

    @property
    def group(self) -> ProcessGroup | None:
        """The ``tp`` group; None for one rank. Made on first use: a model can be split and inspected without it.

        Raises:
            ConfigurationError: ``TensorOptions.max_ctas`` is set, and the backend is not NCCL.
        """
        if self._group is None and self.mesh.tp > 1:
            group = self.mesh.group("tp")
            check_max_ctas("TensorOptions.max_ctas", self.tensor.max_ctas, dist.get_backend())
            self._group = group
        return self._group

    @property
    def tp_group(self) -> ProcessGroup:
        """The ``tp`` group, which must exist: for code that runs on several ranks only."""
        assert self.group is not None
        return self.group

    @cached_property
    def message_group(self) -> ProcessGroup:
        """A second group of the same ranks, for messages with few SMs and high priority.

        Products are queued behind these messages, so they must start at once. The group is made on first use, by all
        ranks.
        """
        limit = MAX_CTAS if self.tensor.max_ctas is None else self.tensor.max_ctas
        return new_group(self.mesh.ranks("tp"), "tensor-parallel messages", max_ctas=limit, urgent=True)

    @cached_property
    def expert_group(self) -> ProcessGroup:
        """A second group of the ranks along ``ep`` and ``etp``, for tokens on their way to experts and back.

        A communicator sends one message after the other. Data parallelism often has the same ranks: in its communicator
        tokens, for which the next layer waits, would queue behind whole buckets of gradients or parameters. All models
        on these ranks share the group; it is made on first use, by all ranks.
        """
        return shared_group(self.mesh.ranks("ep", "etp"), "tokens of experts")

    @cached_property
    def equal_tokens(self) -> EqualTokens:
        """Whether the ranks along ``ep`` and ``etp`` bring equally many tokens: one answer for all layers."""
        return EqualTokens(self)

    @cached_property
    def peer_exchange(self) -> PeerExchange:
        """The slots through which the dispatcher ``symmetric`` sends rows of all layers. All ranks make it together."""
        return PeerExchange(self.expert_group)

    @cached_property
    def counts_group(self) -> ProcessGroup:
        """A third group of the ranks along ``ep`` and ``etp``, for numbers that the host waits for.

        In that of the tokens, the host would wait for the tokens of another micro-batch. All models on these ranks
        share the group; it is made on first use, by all ranks.
        """
        return shared_group(self.mesh.ranks("ep", "etp"), "numbers of rows", max_ctas=COUNTS_MAX_CTAS)

    def one_shot_for(self, layer: nn.Module, x: Tensor, features: int) -> OneShotCollectives | None:
        """Return the one-shot way over ``tp`` for outputs ``[..., features]`` of a layer with inputs ``x [..., in]``.

        None in training, for more tokens than it takes, and where the GPUs do not reach each other's memory.
        """
        if layer.training or torch.is_grad_enabled() or not x.is_cuda or torch.compiler.is_compiling():
            return None
        way = self._one_shot
        return way if way is not None and way.takes(x.numel() // x.shape[-1] * features, x.dtype) else None

    @cached_property
    def _one_shot(self) -> OneShotCollectives | None:
        return one_shot(self.tp_group)

    @cached_property
    def one_shot_experts(self) -> OneShotCollectives | None:
        """Messages to experts and back, of passes of few tokens; all ranks ask together."""
        return one_shot(self.expert_group)

    def overlap(self, name: str, x: Tensor, weight: Tensor) -> Overlap:
        """Return the overlap backend for the split layer ``name`` and inputs like ``x``.

        Raises:
            LayoutError: the requested backend cannot serve the layer.
        """
        # With what differs between calls: autocast, dtype, and whether steps are recorded.
        spec = self._spec(weight, x.device, x.dtype, self.group)
        kind = self.tensor.kind_of(name)
        if (kind, spec) not in self._overlaps:
            way = choose(name, spec, kind)
            if way.name not in self._ways:
                self._ways[way.name] = way.fn(self)
            self._overlaps[kind, spec] = self._ways[way.name]
        return self._overlaps[kind, spec]

    def shares_of(self, stack: str) -> TokenShares:
        """Return the shares of the tokens between the first and the last layer of a foreign model's list of layers."""
        return self._shares.setdefault(stack, TokenShares(self.context_groups))

    def gains_by_recording(self) -> bool:
        """Whether layers that have run would overlap in another way if steps were recorded."""
        return any(
            kind == "auto" and automatic(replace(spec, recorded=True)) != automatic(replace(spec, recorded=False))
            for kind, spec in self._overlaps
        )

    def restart(self) -> None:
        """Let the ways of overlap begin as if nothing had run; the ranks that share the layers call this together."""
        for way in self._ways.values():
            way.restart()

    def check_overlap(self, name: str, weight: Tensor, device: torch.device) -> None:
        """Raise now, before anything runs, if the chosen overlap backend cannot serve a layer.

        Raises:
            LayoutError: gives the reason of each backend.
        """
        # Without group and dtype, which are not known before the first pass.
        choose(name, self._spec(weight, device, None, None), self.tensor.kind_of(name))

    def _spec(
        self, weight: Tensor, device: torch.device, dtype: torch.dtype | None, group: ProcessGroup | None
    ) -> OverlapSpec:
        return OverlapSpec(
            self.mesh.tp,
            self._splits_tokens,
            device.type,
            dtype,
            weight.dtype,
            low_precision=precision_of(weight) is not None,
            autocast=torch.is_autocast_enabled(device.type),
            recorded=self.recorded,
            group=group,
        )

    def tokens(self, planned: Tokens) -> Tokens:
        """Return the tokens that a layer receives now; ``planned`` holds under sequence parallelism."""
        return planned if self.sequence_parallel else "whole"

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedState:
        """Return the same object, so that copies of a model share it: process groups cannot be copied."""
        return self


def steps_recorded(model: nn.Module, recorded: bool) -> None:
    """Tell the split layers of ``model`` whether its training steps, or all layers in them, are recorded.

    This affects the choice of ``overlap="auto"``. All ranks call it together, between layers. Those that ended a
    recording at different places then begin with the same slots again.
    """
    # In place, because the layers hold the object since the split.
    for shared in _states(model):
        shared.recorded = recorded
        shared.restart()


def gains_by_recording(model: nn.Module) -> bool:
    """Whether split layers of ``model`` that have run hide more of their communication if steps are recorded.

    The ranks that share layers call this together.
    """
    return any(shared.gains_by_recording() for shared in _states(model))


def _states(model: nn.Module) -> list[SharedState]:
    found = [getattr(module, "shared", None) for module in model.modules()]
    return list({id(shared): shared for shared in found if isinstance(shared, SharedState)}.values())


@dataclass(frozen=True)
class GroupMean:
    """The mean of the values of neighboring ``tp`` ranks, whose parts of a group of features are of one size.

    Several ranks may hold the same part, if all parts have equally many holders.

    Attributes:
        shared: the state that all tensor-parallel layers share.
        ranks: number of ranks that hold a group.
    """

    shared: SharedState
    ranks: int

    def __call__(self, part: Tensor) -> Tensor:
        """Return the mean, in the shape of ``part``. The backward sums gradients over the ranks, too."""
        mesh = self.shared.mesh
        group = self.shared.group if self.ranks == mesh.tp else mesh.group(f"tp%{self.ranks}")
        # The sum enters the features of every rank, so each has one term of its gradient.
        return copy(all_reduce(part, group), group) / self.ranks


class ParallelDropout(nn.Module):
    """Dropout of hidden states: one common mask if all ``tp`` ranks hold the same input, else one mask per rank.

    Args:
        p: probability that an element is dropped.
        shared: the state that all tensor-parallel layers share.
        split: the input differs between ranks even without sequence parallelism.
    """

    def __init__(self, p: float, shared: SharedState, *, split: bool = False) -> None:
        super().__init__()
        self.p = p
        self.shared = shared
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        """In training, drop elements of ``x`` and scale the others by ``1 / (1 - p)``."""
        if not self.training or not self.p:
            return x
        # Hidden states that all ranks hold must get one mask on all ranks, or the copies would drift apart.
        own = self.split or self.shared.sequence_parallel
        with self.shared.streams.fork("tensor", x.device) if own else nullcontext():
            return F.dropout(x, self.p)

    def extra_repr(self) -> str:
        """Return the probability, for printing."""
        return f"p={self.p}, split={self.split}"


class OwnStream(nn.Module):
    """Runs a module without parameters on this rank's random stream in training (attention with dropout).

    Args:
        module: its first argument is a tensor on the device whose generator it uses.
        shared: the state that all tensor-parallel layers share.
    """

    def __init__(self, module: nn.Module, shared: SharedState) -> None:
        super().__init__()
        self.module = module
        self.shared = shared

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module."""
        with self.shared.streams.fork("tensor", x.device) if self.training else nullcontext():
            return self.module(x, *args, **kwargs)


def streams_of(model: nn.Module) -> list[RandomStreams]:
    """Return the random streams that modules of a model use, each once."""
    found = (part for part in model.modules() if isinstance(part, ParallelDropout | OwnStream))
    droppers = [part for part in found if has_dropout(part.module if isinstance(part, OwnStream) else part)]
    return list({id(part.shared.streams): part.shared.streams for part in droppers}.values())


def has_dropout(module: nn.Module) -> bool:
    """Whether a module can drop anything; assumed for a module that does not state its probability."""
    probability = getattr(module, "p", getattr(module, "dropout", 1.0))
    return not isinstance(probability, float) or probability > 0
