"""Gradient hooks: autograd's gradients go into the flat buffer, and complete buckets are reduced at once.

:func:`register_grad_hook` serves one parameter, :class:`GradReadyCounter` counts what is ready,
:class:`FirstWrites` lets the first gradient of a step overwrite the buffer, so that it need not be zeroed, and
:class:`UnusedParameters` finds what no gradient has reached.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.errors import MegalightError
from megalight.ops.parameter import collect, state_of
from megalight.parallel.data_parallel.buffers import Bucket
from megalight.parallel.data_parallel.communication import SideStream

log = logging.getLogger(__name__)


def register_grad_hook(
    parameter: nn.Parameter,
    main_grad: Tensor,
    arrived: Callable[[], None],
    announced: Callable[[], None],
    autograd_adds: bool,
) -> None:
    """Register the hook that collects every gradient of ``parameter`` in ``main_grad``, and report each one.

    Args:
        parameter: already a view of the buffer. An earlier engine gets no further gradients of it.
        arrived: called after every backward of autograd through the parameter, also when the gradient is None.
        announced: called by ops that have added a gradient to ``main_grad`` themselves.
        autograd_adds: see :attr:`Bucket.autograd_adds`. If ``parameter.grad`` is None or may not be the buffer's view,
            autograd leaves the gradient there, and the hook adds it to the buffer.
    """
    state = collect(parameter, main_grad, announced)

    def after_accumulation(accumulated: Tensor) -> None:
        gradient = accumulated.grad
        if gradient is main_grad:
            state.unused = False  # autograd has added it in place
        # Autograd has put the gradient into a tensor of its own, because `.grad` was None or has another dtype.
        elif gradient is not None:
            if torch.is_grad_enabled():  # then autograd has accumulated out of place, into a new tensor
                raise MegalightError(
                    "backward(create_graph=True) reached a parameter whose gradients live in a flat buffer; "
                    "use torch.autograd.grad for gradients of gradients."
                )
            # An embedding with sparse=True has rows alone.
            state.add(gradient.to_dense() if gradient.is_sparse else gradient)
            accumulated.grad = main_grad if autograd_adds else None
        arrived()

    if autograd_adds:
        if main_grad.dtype != parameter.dtype:
            parameter.grad_dtype = None  # any dtype: autograd adds to the wider buffer without a cast first
        parameter.grad = main_grad
    state.grad_hook = parameter.register_post_accumulate_grad_hook(after_accumulation)  # type: ignore[no-untyped-call]


class GradReadyCounter:
    """Counts arriving gradients, and sends complete buckets while the last backward passes still run.

    A parameter's gradient may arrive several times per micro-batch (tied weights, or an op that adds to ``main_grad``
    beside autograd). The engine learns the usual number from the steps seen so far. Only the total over all
    micro-batches is compared, so backward passes may run in any order and in parts (pipelines, delayed weight
    gradients).

    Args:
        buckets: sent strictly in this order, because all ranks must start their collectives in the same order.
        send: starts a bucket's reduction.
        overlap: send buckets before the last micro-batch ends.
        stream: that of the reductions; None on the CPU.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        send: Callable[[Bucket], None],
        overlap: bool,
        stream: SideStream | None,
    ) -> None:
        self.buckets = buckets
        self.overlap = overlap
        self._send = send
        self._stream = stream
        self._sending = False
        self._next = 0
        self._micro_batches = 0
        self._noted: list[tuple[int, int]] | None = None
        self._counts = [[0] * len(bucket.infos) for bucket in buckets]
        self._usual = [[0] * len(bucket.infos) for bucket in buckets]
        """The largest number of arrivals per micro-batch seen so far, per bucket and parameter."""
        for index, bucket in enumerate(buckets):
            for place, (parameter, main_grad) in enumerate(bucket.main_grads):
                arrived, announced = self._on_grad_ready(index, place), self._on_announcement(index, place)
                register_grad_hook(parameter, main_grad, arrived, announced, bucket.autograd_adds)

    def begin(self, micro_batches: int, send: bool) -> None:
        """Begin the passes of ``micro_batches`` micro-batches; ``send``: they are the last before the reduction."""
        # Counted per call: the gradients of one call are compared with its number of micro-batches.
        self._counts = [[0] * len(bucket.infos) for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.arrived = 0
        self._next = 0
        self._micro_batches = micro_batches
        self._sending = send and self.overlap
        if self._stream is not None:
            self._stream.begin()

    def stop(self) -> None:
        """End the passes, also after an error."""
        self._sending = False

    @contextmanager
    def noting(self) -> Iterator[list[tuple[int, int]]]:
        """Record arrivals inside the block as ``(bucket, place)`` instead of counting them."""
        self._noted = []
        try:
            yield self._noted
        finally:
            self._noted = None

    def learn(self) -> None:
        """Update the usual numbers of arrivals, after passes that ended without an error."""
        # Nothing is sent early before something was learned: a bucket that seems
        # complete might get a second gradient.
        first = not any(map(any, self._usual))
        # Rounded up: arrivals may be spread unevenly over micro-batches.
        self._usual = [
            [max(usual, -(-count // self._micro_batches)) for usual, count in zip(*rows, strict=True)]
            for rows in zip(self._usual, self._counts, strict=True)
        ]
        if first and self.overlap:
            self._tell_unused()

    def _tell_unused(self) -> None:
        unused = [
            info.name
            for bucket, usual in zip(self.buckets, self._usual, strict=True)
            for info, count in zip(bucket.infos, usual, strict=True)
            if not count
        ]
        if unused and any(map(any, self._usual)):
            log.info(
                "%d parameters got no gradient in the first step (%s ...): their buckets and all later ones are "
                "reduced after the backward passes only; freeze what is never used",
                len(unused),
                unused[0],
            )

    def _on_grad_ready(self, index: int, place: int) -> Callable[[], None]:
        here = weakref.ref(self)  # a hook of a parameter holds this closure: a strong reference would leak the engine

        def arrived() -> None:
            if (alive := here()) is not None:
                alive.count(index, place)

        return arrived

    def _on_announcement(self, index: int, place: int) -> Callable[[], None]:
        here = weakref.ref(self)

        def announced() -> None:
            if (alive := here()) is None:
                return
            info = alive.buckets[index].infos[place]
            # Adding to old values would give a wrong gradient without a sign.
            if state_of(info.parameter).untouched:
                raise MegalightError(
                    f"an op added to main_grad of {info.name} without asking whether its gradient is the first one of "
                    "the step, which is written. Let it use megalight.ops.parameter.add_gradient, or "
                    "ParameterState.touch."
                )
            alive.count(index, place)

        return announced

    def count(self, index: int, place: int) -> None:
        """Count one gradient, and send every bucket that is now complete and next in order."""
        # The pass is being recorded. Its gradients do not exist yet; each replay reports them.
        if self._noted is not None:
            self._noted.append((index, place))
            return
        bucket = self.buckets[index]
        if bucket.sent:
            raise MegalightError(
                f"a gradient of {bucket.infos[place].name} arrived after its bucket was reduced. Either this step "
                "uses it more often than those before it did: switch overlap_grad_reduce off; or a new step began "
                "without zero_grad()."
            )
        # A gradient computed on another stream must be finished before the reduction stream reads the buffer.
        if self._stream is not None:
            self._stream.follow()
        self._counts[index][place] += 1
        if self._sending and self._counts[index][place] == self._usual[index][place] * self._micro_batches:
            bucket.arrived += 1
            # A complete bucket waits for those before it: all ranks must start the same collectives in the same order.
            while self._next < len(self.buckets) and self._complete(self.buckets[self._next]):
                self._send(self.buckets[self._next])
                self._next += 1

    @staticmethod
    def _complete(bucket: Bucket) -> bool:
        return bucket.arrived == len(bucket.infos)


class FirstWrites:
    """Marks main gradients as untouched (:mod:`megalight.ops.parameter`), and zeroes those that no gradient reached.

    Only the first passes of a step write. When they end, everything that they did not reach is zeroed, and later passes
    add. Norms and optimizers also read the gaps between parameters. The gaps are small, so they are zeroed at the
    beginning of each step.

    Attributes:
        wanted: no passes have ended since :meth:`begin`.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.wanted = False
        self._buffers: dict[Bucket, list[tuple[nn.Parameter, Tensor]]] = {
            bucket: bucket.main_grads for bucket in buckets
        }
        self._open: set[Bucket] = set()
        self._zeroed = [gap for bucket in buckets for gap in bucket.gaps()]
        self._added: set[int] = set()

    def begin(self) -> None:
        """Begin a step: the buffers hold old values that must not be read."""
        # Only marked, not zeroed: the first gradient overwrites. This saves
        # one pass over all gradients per step.
        self.wanted = True
        self._open = set(self._buffers)
        if self._zeroed:
            torch._foreach_zero_(self._zeroed)
        for pairs in self._buffers.values():
            for parameter, _ in pairs:
                if id(parameter) not in self._added:
                    state_of(parameter).untouched = True
                    parameter.grad = None  # so that autograd does not add to the old values

    def end(self) -> None:
        """End the first passes: zero what they did not reach."""
        self.wanted = False
        if left := [buffer for bucket in tuple(self._open) for buffer in self._close(bucket)]:
            torch._foreach_zero_(left)

    def complete(self, bucket: Bucket) -> None:
        """Zero what no gradient of this bucket has reached; all its gradients have arrived."""
        if bucket in self._open and (left := self._close(bucket)):
            torch._foreach_zero_(left)

    def skip(self) -> None:
        """End passes whose gradients a replayed graph has already written to the buffers."""
        self.wanted = False
        for bucket in tuple(self._open):
            self._close(bucket)

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Zero the main gradients of these parameters at the beginning of each later step, so that all passes add."""
        self.end()
        wanted = {id(parameter) for parameter in parameters} - self._added
        # A parameter that was left out before is in the list already, and must not come twice.
        found = [pair for pairs in self._buffers.values() for pair in pairs if id(pair[0]) in wanted]
        self._added.update(id(parameter) for parameter, _ in found)
        self._zeroed += [buffer for _, buffer in found]

    def _close(self, bucket: Bucket) -> list[Tensor]:
        """Make all further gradients add, also those of autograd; return the buffers that no gradient has reached."""
        self._open.discard(bucket)
        adds, left = bucket.autograd_adds, []
        for parameter, buffer in self._buffers[bucket]:
            state = state_of(parameter)
            if state.untouched:
                state.untouched = False
                left.append(buffer)
            # From here on autograd adds in place, into the buffer itself.
            if adds:
                parameter.grad = buffer
        return left


class UnusedParameters:
    """Finds the parameters that no gradient has reached in a step: an optimizer leaves them as they are, as in torch.

    What is frozen when the gradients are reduced counts as unused if it had none; all ranks freeze the same parameters.

    Args:
        buckets: of the parameters.
        everyone: all ranks of the mesh; None for a single rank.
        device: of the message.
        agree: whether ranks tell each other which other parameters had a gradient, with one message per step. A rank
            waits for it only where it lacks a gradient itself. If not, these parameters have a gradient of zero, and a
            warning names one.
    """

    def __init__(
        self, buckets: Sequence[Bucket], everyone: ProcessGroup | None, device: torch.device, agree: bool
    ) -> None:
        self._held = [[(info, state_of(info.parameter)) for info in bucket.infos] for bucket in buckets]
        self._agree = agree
        self._everyone = everyone if agree else None
        self._device = device
        self._recorded: set[int] = set()
        self._zero: str | None = None  # a parameter that had no gradient, without being frozen
        self._warned = False
        self._numbers: list[list[int]] = []
        self._sent: tuple[set[int], Tensor] | None = None
        if self._everyone is not None:
            # By the names of the whole model: a tensor that is split, or tied, is one parameter of torch.
            names = [[info.spec.pieces[0].name for info, _ in held] for held in self._held]
            every: list[Any] = [None] * self._everyone.size()
            dist.all_gather_object(every, names, group=self._everyone)
            numbers = {name: number for number, name in enumerate(sorted({n for r in every for b in r for n in b}))}
            self._numbers = [[numbers[name] for name in held] for held in names]
            self._count = len(numbers)

    def begin(self) -> None:
        """Begin a step: no gradient has arrived."""
        for held in self._held:
            for _, state in held:
                state.unused = True

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count these parameters as used unless they are frozen: passes are recorded that tell nothing of them."""
        self._recorded.update(map(id, parameters))

    def find(self) -> list[frozenset[int]]:
        """Return the places of unused parameters in each bucket; all ranks call this together."""
        frozen, without = [], []
        for held in self._held:
            none = {place for place, (_, state) in enumerate(held) if state.unused}
            still = {place for place in none if not held[place][0].parameter.requires_grad}
            frozen.append(frozenset(still))
            without.append({p for p in none - still if id(held[p][0].parameter) not in self._recorded})
        unused = self._agreed(frozen, without) if self._everyone is not None else without
        names = (held[place][0].name for held, places in zip(self._held, unused, strict=True) for place in places)
        self._zero = next(names, None)
        if self._agree:
            return [a | b for a, b in zip(frozen, unused, strict=True)]
        self._warn()
        return frozen

    def frozen(self) -> list[frozenset[int]]:
        """Return the places of frozen parameters, after passes that were replayed as a whole: the others count."""
        self._warn()
        return [
            frozenset(place for place, (info, _) in enumerate(held) if not info.parameter.requires_grad)
            for held in self._held
        ]

    def _agreed(self, frozen: Sequence[frozenset[int]], without: Sequence[set[int]]) -> list[set[int]]:
        """Return those that have no gradient here and on no other rank either."""
        rows = zip(self._numbers, frozen, without, strict=True)
        missing = {numbers[place] for numbers, still, none in rows for place in still | none}
        if self._sent is None or self._sent[0] != missing:
            here = [int(number not in missing) for number in range(self._count)]
            self._sent = missing, torch.tensor(here, dtype=torch.uint8, device=self._device)
        flags = self._sent[1].clone()
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._everyone)
        if not any(without):
            return [set() for _ in without]  # the host need not wait for what the others lack
        used = flags.tolist()
        return [
            {place for place in none if not used[numbers[place]]}
            for numbers, none in zip(self._numbers, without, strict=True)
        ]

    def _warn(self) -> None:
        if self._zero is None or self._warned:
            return
        self._warned = True
        log.warning(
            "%s got no gradient in a step, and counts as if it were zero: weight decay and momentum move it. %s, or "
            "freeze it with requires_grad_(False).",
            self._zero,
            "Train without CUDA graphs of whole steps to leave it as it is"
            if self._agree
            else "Set data_parallel.find_unused_parameters=True to leave it as it is, as torch does",
        )
