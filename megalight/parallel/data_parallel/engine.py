"""The data-parallel engine: flat buffers, gradients reduced as they arrive, parameters gathered when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megalight.errors import MegalightError
from megalight.imports import has_grad_dtype
from megalight.ops.linear import precision_of
from megalight.ops.linear.wgrad import IS_ZERO
from megalight.parallel.data_parallel.arrivals import Arrivals
from megalight.parallel.data_parallel.buffers import Bucket, FlatShard, ParamInfo, distinct_trainable
from megalight.parallel.data_parallel.codes import Codes, codes_of
from megalight.parallel.data_parallel.gather import Gatherer, masters_to_parameters, parameters_to_masters
from megalight.parallel.data_parallel.layout import Kind, default_bucket_size, level_of, plan_buckets
from megalight.parallel.data_parallel.norm import counted_runs, global_norm
from megalight.parallel.data_parallel.reduce import PartialReducer, Reducer
from megalight.parallel.groups import new_group
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.trace import span, spanned

DATA_AXES = ("dp", "cp")
"""Mesh axes whose ranks hold the same parameters and see different tokens."""
MODEL_AXES = ("pp", "tp")
"""Mesh axes whose ranks hold different parameters."""


class DataParallelEngine:
    """Keeps parameters, gradients and masters in flat buffers and moves them between data-parallel ranks.

    One optimizer step::

        engine.zero_grad()
        with engine.micro_batches(len(batches)):
            for batch in batches:
                loss(batch).backward()
        engine.finish_grad_sync()
        norm = engine.grad_norm()
        optimizer.step()                 # on engine.shards, see megalight.optim.shard_optimizer
        engine.publish()

    All reductions are sums: scale the loss. Parameters that need no gradient are left alone.

    Args:
        params: the local parameters; a tied parameter may be listed several times.
        mesh: ``ParallelMesh()`` for one process.
        level: ``"no_shard"``: every rank keeps all masters and optimizer state; ``"optim"``: its share of them.
        grad_dtype: of the gradient buffers; None: float32, or float64 for float64 parameters.
        reduce_dtype: what travels in the gradient reduction; None: ``grad_dtype``.
        reduction: ``"sum"``, or ``"accumulate_fp32"``: see :class:`~megalight.parallel.data_parallel.reduce.Reducer`.
        master_dtype: of the tensors the optimizer updates; None: float32 for half-precision parameters, else the
            parameters' own, and then no copy is kept.
        bucket_size: elements; None: 40 million, or 1 million per rank where that is more.
        edge_bucket_size: the same for the parameters that the model registers first: their gradients are reduced last,
            and they are gathered first, so that whole messages are exposed. None: ``bucket_size``.
        max_ctas: most multiprocessors of a GPU that reductions and gathers occupy beside computation, in a process
            group of their own; None: NCCL's own choice.
        overlap_grad_reduce: start a bucket's reduction as soon as its gradients of all micro-batches are complete. How
            often each parameter's gradient arrives is learned from the steps seen so far; the first one of all
            therefore never overlaps.
        overlap_param_gather: let the gathering of updated parameters run on after :meth:`publish`.
        device: of numbers that ranks exchange, where there is no parameter to tell (a pipeline's stage without any).

    Attributes:
        shards: this rank's part of every bucket, in bucket order (last parameters of the model first).

    Raises:
        ConfigurationError: a level or reduction that does not exist, or that do not fit together.
    """

    def __init__(
        self,
        params: Sequence[ParamInfo],
        mesh: ParallelMesh,
        *,
        level: str = "optim",
        grad_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reduction: str = "sum",
        master_dtype: torch.dtype | None = None,
        bucket_size: int | None = None,
        edge_bucket_size: int | None = None,
        max_ctas: int | None = None,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = True,
        device: torch.device | None = None,
    ) -> None:
        self.mesh = mesh
        self.level = level_of(level)
        self.overlap_param_gather = overlap_param_gather
        self.infos = distinct_trainable(params)
        group = mesh.group(*DATA_AXES)
        if group is not None and max_ctas is not None:
            group = new_group(mesh.ranks(*DATA_AXES), "data parallelism", max_ctas=max_ctas)
        world = mesh.size("dp") * mesh.size("cp")
        rank = mesh.ranks(*DATA_AXES).index(mesh.global_rank)

        kinds = [
            Kind(
                i.parameter.dtype,
                grad_dtype or _wide(i.parameter.dtype),
                i.group,
                _shared(i.spec),
                i.chunk,
                codes_of(i),
            )
            for i in self.infos
        ]
        sizes = [info.parameter.numel() for info in self.infos]
        layouts = plan_buckets(sizes, kinds, world, bucket_size or default_bucket_size(world), edge_bucket_size)
        self.buckets = [
            Bucket(
                layout,
                self.infos,
                layout.interval(rank, world) if self.level.state else (0, layout.numel),
                master_dtype or _wide(layout.kind.param_dtype),
            )
            for layout in layouts
        ]
        self.shards: list[FlatShard] = [bucket.shard for bucket in self.buckets]
        self.device = self.buckets[0].params.device if self.buckets else device or torch.device("cpu")

        self._reducer = Reducer(group, self.level.state, reduce_dtype, reduction)
        self._partial = PartialReducer(self.shards, mesh, self.device)
        self._gatherer = Gatherer(self.buckets[::-1], group if self.level.state else None)
        self._codes = Codes(self._with_codes(), group if self.level.state else None, self.device)
        self._norm_groups = [mesh.group(*MODEL_AXES), group if self.level.state else None]
        self._counted = [counted_runs(shard) for shard in self.shards]
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda" and group is not None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pending: list[Callable[[], Tensor]] = []
        self._scaler: Callable[[Tensor], None] | None = None
        self._reduced = False
        self._written = False
        self._any_dtype = False
        self._gather_hooks = False
        self._may_write = True
        self._arrivals = Arrivals(self.buckets, self._send, overlap_grad_reduce, self._stream)
        self.recast()

    # ---------------------------------------------------------------- gradients

    def zero_grad(self) -> None:
        """Set every gradient to zero, and be ready for the micro-batches of another step."""
        self._reduced = False
        self._wait()  # only where a step was given up halfway
        for bucket in self.buckets:
            bucket.sent = False
            bucket.shard.master.grad = None
        if self.buckets:
            torch._foreach_zero_([bucket.grads for bucket in self.buckets])
        for info in self.infos if self._may_write else ():
            if precision_of(info.parameter) is not None:
                setattr(info.parameter, IS_ZERO, True)

    @contextmanager
    def micro_batches(self, count: int, reduce: bool = True) -> Iterator[None]:
        """Around the forward and backward passes of ``count`` micro-batches; complete buckets are sent off inside.

        Parameters still on their way are waited for here, unless :meth:`attach_gather_hooks` lets modules do it.

        Args:
            reduce: these are the last ones before :meth:`finish_grad_sync`.
        """
        if not self._gather_hooks:
            self.sync_parameters()
        self._arrivals.begin(count, reduce)
        try:
            yield
        finally:
            self._arrivals.stop()
        self._arrivals.learn()

    @spanned("finish_gradients")
    def finish_grad_sync(self) -> None:
        """Reduce what was not reduced yet, wait for all of it, and set ``shard.master.grad`` everywhere (once a step).

        From here on ``parameter.grad`` holds sums on level ``no_shard``; on ``optim`` this rank's interval only does.
        """
        self.sync_parameters()  # the optimizer will write where they are gathered from
        if self._reduced:
            return
        self._reduced = True
        for bucket in self.buckets:
            if not bucket.sent:
                self._send(bucket)
        with torch.no_grad():
            gradients = self._wait()
            self._partial(gradients)
            for shard, gradient in zip(self.shards, gradients, strict=True):
                shard.master.grad = gradient if self._any_dtype else gradient.to(shard.master.dtype)

    @property
    def reduced(self) -> bool:
        """Whether :meth:`finish_grad_sync` has run since the last :meth:`zero_grad`."""
        return self._reduced

    @property
    def gradients(self) -> list[Tensor]:
        """The reduced gradients of the shards, as :meth:`finish_grad_sync` left them.

        Raises:
            MegalightError: they are not reduced yet.
        """
        gradients = [shard.master.grad for shard in self.shards]
        if any(gradient is None for gradient in gradients):
            raise MegalightError("gradients are not reduced yet; call finish_grad_sync() first.")
        return [gradient for gradient in gradients if gradient is not None]

    def adopt(self, gradients: Sequence[Tensor]) -> None:
        """Be as :meth:`finish_grad_sync` leaves it: somebody else (a replayed graph) reduced into these tensors."""
        self._reduced = True
        for bucket, gradient in zip(self.buckets, gradients, strict=True):
            bucket.sent = True
            bucket.shard.master.grad = gradient

    def only_add(self) -> None:
        """Have every gradient added to what there is, zeros too: a graph that is replayed cannot tell the first one."""
        self._may_write = False
        for info in self.infos:
            info.parameter.__dict__.pop(IS_ZERO, None)

    def give_up(self) -> None:
        """Be as before the passes of this step, of which nothing reached the device; sums of earlier ones stay."""
        self._arrivals.stop()
        self._pending = []
        self._reduced = False
        for bucket in self.buckets:
            bucket.sent = False
            bucket.shard.master.grad = None

    @contextmanager
    def noting(self) -> Iterator[list[tuple[int, int]]]:
        """Inside, gradients that arrive are noted down in the list and not counted: :meth:`arrive` counts them later.

        For passes that are recorded now and replayed then.
        """
        with self._arrivals.noting() as seen:
            yield seen

    def places_of(self, parameters: Iterable[nn.Parameter]) -> list[tuple[int, int]]:
        """By which ``(bucket, place)`` :meth:`noting` and :meth:`arrive` know these parameters."""
        wanted = {id(parameter) for parameter in parameters}
        return [
            (index, place)
            for index, bucket in enumerate(self.buckets)
            for place, info in enumerate(bucket.infos)
            if id(info.parameter) in wanted
        ]

    def arrive(self, seen: Sequence[tuple[int, int]]) -> None:
        """Count gradients whose arrival nobody else tells of: complete buckets are sent off."""
        for index, place in seen:
            self._arrivals.count(index, place)

    def homes_of(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """Which buckets hold these parameters, for :meth:`sync_parameters`."""
        return self._gatherer.buckets_of(parameters)

    def _wait(self) -> list[Tensor]:
        gradients = [finish() for finish in self._pending]
        self._pending = []
        if gradients and self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return gradients

    def grad_norm(self) -> Tensor:
        """The L2 norm of the reduced gradients of the whole model: 0-dim, on the device, equal on every rank."""
        views = [
            gradient[start:stop]
            for gradient, runs in zip(self.gradients, self._counted, strict=True)
            for start, stop in runs
        ]
        return global_norm(views, self._norm_groups, self.device)

    @torch.no_grad()
    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the reduced gradients by a 0-dim tensor on the device (inside the optimizer, where it offers to)."""
        if self._scaler is not None:
            self._scaler(factor)
        elif self.shards:
            torch._foreach_mul_(self.gradients, factor)

    def _send(self, bucket: Bucket) -> None:
        bucket.sent = True
        with torch.no_grad():
            if self._stream is None:
                with span("reduce_gradients", elements=bucket.layout.numel):
                    self._pending.append(self._reducer.start(bucket))
                return
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream), span("reduce_gradients", elements=bucket.layout.numel):
                reduced = self._reducer.start(bucket)()
            self._pending.append(lambda: reduced)

    # ---------------------------------------------------------------- parameters

    def fuse(self, scaler: Callable[[Tensor], None]) -> Callable[[], None]:
        """Let an optimizer scale gradients and round masters into ``bucket.own_params`` inside its own step.

        It is then also handed gradients in whatever dtype they were summed in.

        Args:
            scaler: called by :meth:`scale_gradients` in place of a multiplication.

        Returns:
            what to call after each step: the next :meth:`publish` then need not copy.
        """

        def written() -> None:
            self._written = True

        self._scaler = scaler
        if has_grad_dtype():
            self._any_dtype = True
            for shard in self.shards:
                shard.master.grad_dtype = None
        return written

    @spanned("gather_parameters")
    def publish(self) -> None:
        """Bring the updated masters into the parameters of every data-parallel rank (or start to)."""
        self.sync_parameters()
        if not self._written:
            masters_to_parameters(self.buckets)
        self._written = False
        self._codes.cast()
        self._gatherer.start()
        if not self.overlap_param_gather:
            self.sync_parameters()

    def sync_parameters(self, homes: Sequence[int] | None = None) -> None:
        """Wait until every parameter is up to date. Call it before reading weights; costs nothing when they are.

        Args:
            homes: wait for the parameters of these buckets only (:meth:`homes_of`).
        """
        self._gatherer.wait(homes)

    def recast(self) -> None:
        """Where parameters are codes: :meth:`publish`, after masters were written by other than the optimizer."""
        if self._with_codes():
            self.publish()

    def widen(self) -> None:
        """Give parameters that are codes their own type again: at the end of training, for whoever reads them."""
        for bucket in self._with_codes():
            self._gatherer.widen(bucket)
        self._codes = Codes((), None, self.device)

    def _with_codes(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.holds_codes]

    def refresh_masters(self) -> None:
        """Take the masters from the parameters, after weights were loaded into them.

        Where parameters are codes, weights are loaded into the masters, and the codes follow.
        """
        self.sync_parameters()
        parameters_to_masters(self.buckets)
        self.recast()

    @torch.no_grad()
    def fill_masters(self, name: str, values: Tensor) -> None:
        """Set the masters of one parameter from values of its shape, wider than the parameter can hold.

        Made for the float32 draws of ``parallel.initialise``; names the engine does not know are passed over.
        """
        for bucket in self.buckets:
            for info, slot in zip(bucket.infos, bucket.layout.slots, strict=True):
                if info.name == name:
                    bucket.shard.fill(slot.start, values)

    def attach_gather_hooks(self, module: nn.Module) -> None:
        """Let each submodule wait for its parameters just before its forward, so that the gathering overlaps.

        Only for models in which every parameter is read inside the forward of the module that owns it, or, where that
        one has no children, of its parent.
        """
        self._gatherer.attach(module)
        self._gather_hooks = True

    def memory(self) -> dict[str, int]:
        """Bytes on this rank: ``parameters``, ``gradients``, ``masters`` (those that are copies)."""
        return {
            "parameters": sum(bucket.params.nbytes for bucket in self.buckets),
            "gradients": sum(bucket.grads.nbytes for bucket in self.buckets),
            "masters": sum(b.shard.master.nbytes for b in self.buckets if not b.master_is_own_params),
        }


def _shared(spec: ShardSpec) -> str:
    """The tensor's name where other pipeline stages hold it as well."""
    return next((p.name for p in spec.pieces if any(axis.startswith("pp") for axis in p.partial)), "")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
