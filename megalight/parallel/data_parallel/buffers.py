"""Flat buffers: parameters and gradients become views of them, and each rank's part is what its optimizer steps on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.errors import MegalightError
from megalight.imports import has_grad_dtype
from megalight.ops.parameter import collect, release, state_of
from megalight.ops.quantize.formats import DTYPES
from megalight.parallel.data_parallel.layout import BucketLayout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import Piece, ShardSpec
from megalight.parallel.storage import has_memory


@dataclass(frozen=True)
class ParamInfo:
    """A parameter as the engine sees it.

    Attributes:
        name: its name in the local model, for messages.
        parameter: the object; it keeps its identity, its storage moves into a flat buffer. It may be without memory:
            values come after the engine is built.
        spec: which canonical pieces it holds.
        group: index of the optimizer's parameter group that it belongs to.
        chunk: which of the model's parts on this rank holds it, in model order.
        mesh: the grid over which its model is split; None: the engine's.
    """

    name: str
    parameter: nn.Parameter
    spec: ShardSpec
    group: int
    chunk: int = 0
    mesh: ParallelMesh | None = None


@dataclass(eq=False)
class FlatShard:
    """The interval of one bucket whose optimizer state this rank holds.

    Attributes:
        group: index of the optimizer's parameter group.
        start, stop: elements of the bucket.
        master: ``[stop - start]`` leaf that the optimizer updates; ``master.grad`` is set once gradients are reduced.
            Where it has the parameters' own dtype it *is* their storage; its state (``master_copy``) tells.
        slots: ``(spec, first element in the bucket)`` of every parameter in the bucket.
        replicas: ranks that hold this same shard. They divide among themselves what is to be done once: counting for a
            norm, writing to a checkpoint.
        place: of this rank among them.
    """

    group: int
    start: int
    stop: int
    master: Tensor
    slots: Sequence[tuple[ShardSpec, int]] = field(repr=False)
    replicas: tuple[int, ...] = (0,)
    place: int = 0

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start

    def part(self, start: int, stop: int) -> Tensor:
        """The master's values of elements ``[start, stop)`` of the bucket, which lie in this shard: a view."""
        return self.master.detach()[start - self.start : stop - self.start]

    def fill(self, offset: int, values: Tensor) -> None:
        """Copy what of ``values``, which start at element ``offset`` of the bucket, lies in this shard."""
        low, high = max(self.start, offset), min(self.stop, offset + values.numel())
        if low < high:
            part = values.reshape(-1)[low - offset : high - offset]
            self.master[low - self.start : high - self.start] = part

    def intervals(self) -> Iterator[tuple[Piece, int, int, int]]:
        """The parts of canonical pieces that lie in this shard.

        Yields:
            piece, first, last, shard_start: elements ``[first, last)`` of the flattened piece lie at ``shard_start`` of
            the shard. What no interval covers is padding.
        """
        for spec, offset in self.slots:
            low, high = max(self.start, offset), min(self.stop, offset + spec.numel)
            if low < high:
                for piece, first, last in spec.cut(low - offset, high - offset):
                    yield piece, first, last, offset + piece.start + first - self.start


class Bucket:
    """One bucket's storage.

    Args:
        layout: what lies where.
        infos: all parameters of the engine.
        group: the ranks that share the bucket; None for one.
        divided: each of them keeps the masters of its interval only.
        master_dtype: of the masters.

    Attributes:
        group: as given: gradients are summed over it.
        shard_group: ranks among which masters are divided; None: each has all.
        params: ``[numel]`` flat parameters, or their codes; the parameters are views of it.
        grads: ``[numel]`` flat gradients.
        main_grads: every parameter with its view of :attr:`grads`.
        shard: this rank's part.
        arrived: parameters whose gradients of the last micro-batch are complete.
        sent: the reduction of the gradients was started.
        holds_codes: the parameters are 8-bit codes, of which the precision of each weight knows the scale.
        master_is_own_params: the optimizer updates the parameters' storage itself.
    """

    def __init__(
        self,
        layout: BucketLayout,
        infos: Sequence[ParamInfo],
        group: ProcessGroup | None,
        divided: bool,
        master_dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self.group = group
        self.shard_group = group if divided else None
        self.infos = [infos[slot.index] for slot in layout.slots]
        device = self.infos[0].parameter.device
        codes = layout.kind.codes
        self.grads = torch.zeros(layout.numel, dtype=layout.kind.grad_dtype, device=device)
        self.main_grads = list(self._views(self.grads))
        self.arrived = 0
        self.sent = False
        self.holds_codes = codes is not None
        values = torch.zeros(layout.numel, dtype=layout.kind.param_dtype, device=device)
        for parameter, view in self._views(values):
            if has_memory(parameter):
                view.copy_(parameter.detach())
            elif codes is None:
                view.fill_(torch.nan)  # values come later; NaN tells what never got any
        self.params = values if codes is None else torch.zeros(layout.numel, dtype=DTYPES[codes], device=device)
        for parameter, view in self._views(self.params):
            parameter.data = view
        kind = layout.kind
        interval = layout.interval(kind.place) if divided else (0, layout.numel)
        replicas = ((kind.mesh.global_rank,), 0) if divided else (kind.ranks, kind.place)
        own = values[slice(*interval)]
        self.master_is_own_params = codes is None and master_dtype == own.dtype
        master = own.detach() if self.master_is_own_params else own.to(master_dtype, copy=True)
        slots = [(info.spec, slot.start) for info, slot in zip(self.infos, layout.slots, strict=True)]
        self.shard = FlatShard(kind.group, *interval, master.requires_grad_(), slots, *replicas)
        state_of(self.shard.master).master_copy = not self.master_is_own_params

    def _views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter with its place in a flat tensor of the bucket."""
        for info, slot in zip(self.infos, self.layout.slots, strict=True):
            yield info.parameter, flat[slot.start : slot.stop].view(info.parameter.shape)

    @torch.no_grad()
    def widen(self, gather: Callable[[Tensor, Tensor], object]) -> None:
        """Give parameters that are codes their own type again, with the values of the masters.

        Args:
            gather: fills its first argument with every rank's second.
        """
        self.params = torch.zeros(self.layout.numel, dtype=self.layout.kind.param_dtype, device=self.params.device)
        self.holds_codes = False
        self.own_params.copy_(self.shard.master)
        gather(self.params, self.own_params)
        for parameter, view in self._views(self.params):
            parameter.data = view

    def drop_gradients(self) -> None:
        """Leave gradients to autograd, and keep no memory for them."""
        for parameter, _ in self.main_grads:
            release(parameter)
        self.shard.master.grad = None
        self.grads, self.main_grads = self.grads.new_empty(0), []

    @property
    def own_params(self) -> Tensor:
        """The interval of :attr:`params` that this rank keeps."""
        return self.params[self.shard.start : self.shard.stop]

    @property
    def own_grads(self) -> Tensor:
        """The interval of :attr:`grads` that this rank keeps."""
        return self.grads[self.shard.start : self.shard.stop]

    @property
    def autograd_adds(self) -> bool:
        """Whether ``parameter.grad`` may be the buffer's view itself, so that autograd adds into it."""
        return self.grads.dtype == self.params.dtype or has_grad_dtype()

    def gaps(self) -> list[Tensor]:
        """What of :attr:`grads` belongs to no parameter."""
        starts = [slot.start for slot in self.layout.slots[1:]] + [self.layout.numel]
        gaps = zip((slot.stop for slot in self.layout.slots), starts, strict=True)
        return [self.grads[low:high] for low, high in gaps if low < high]

    @property
    def rounds_masters(self) -> bool:
        """Whether parameters are masters in a narrower type: copies that are not cast with scales."""
        return not (self.master_is_own_params or self.holds_codes)


def distinct_trainable(infos: Sequence[ParamInfo]) -> list[ParamInfo]:
    """Parameters that need gradients, tied ones once, in order.

    Raises:
        MegalightError: they have no storage yet, or live on several devices.
    """
    seen: dict[int, ParamInfo] = {}
    for info in infos:
        if info.parameter.requires_grad:
            seen.setdefault(id(info.parameter), info)
    devices = {info.parameter.device: info.name for info in seen.values()}
    if len(devices) > 1 or torch.device("meta") in devices:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise MegalightError(f"parameters must have storage on one device: {where}. Materialise the model first.")
    return list(seen.values())


def land_gradients(
    parameter: nn.Parameter,
    main_grad: Tensor,
    arrived: Callable[[], None],
    announced: Callable[[], None],
    autograd_adds: bool,
) -> None:
    """Make every gradient of ``parameter`` end in ``main_grad``, and report each arrival.

    Args:
        parameter: already a view; an engine that had it before hears of no further gradient.
        arrived: called after each gradient that autograd brought, also where that is none.
        announced: called by ops that brought a gradient to ``main_grad`` themselves.
        autograd_adds: see :attr:`Bucket.autograd_adds`. Where ``parameter.grad`` is None, or may not be the buffer's
            view, autograd leaves a gradient there that is brought to the buffer.
    """
    state = collect(parameter, main_grad, announced)

    def after_accumulation(accumulated: Tensor) -> None:
        gradient = accumulated.grad
        if gradient is not None and gradient is not main_grad:
            if torch.is_grad_enabled():  # autograd has then added up out of place
                raise MegalightError(
                    "backward(create_graph=True) reached a parameter whose gradients live in a flat buffer; "
                    "use torch.autograd.grad for gradients of gradients."
                )
            state.add(gradient)
            accumulated.grad = main_grad if autograd_adds else None
        arrived()

    if autograd_adds:
        if main_grad.dtype != parameter.dtype:
            parameter.grad_dtype = None  # any: autograd adds to the wider buffer without converting first
        parameter.grad = main_grad
    state.landing = parameter.register_post_accumulate_grad_hook(after_accumulation)  # type: ignore[no-untyped-call]
