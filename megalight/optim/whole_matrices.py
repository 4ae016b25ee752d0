"""Optimizers that need whole matrices, on shards: each matrix is gathered on its home rank, updated, sent back.

Data parallelism divides a matrix into intervals, tensor parallelism into boxes, expert parallelism divides a stack of
experts. An element-wise optimizer does not notice. One that looks at a whole matrix does, so here each matrix has a
*home*: one of the ranks that hold a part of it, unless these have enough work. Homes are chosen by cost, the most
expensive matrix first, so that ranks do equal work, each matrix once. Matrices of equal shape go together: one
all-to-all brings them home, one brings the updates back. While one batch is updated, the next one is on its way, and so
are parameters that are updated already: batches come in the order in which the next forward pass needs their buckets.

What is kept from step to step lies in one of two places. State in the shape of the shards (momentum of Muon) takes the
memory that an element-wise optimizer's state does. State of a whole matrix (the preconditioners of Shampoo) lies on its
home, so that ranks divide it as they divide the work. A checkpoint has both under canonical names, for any layout.
"""

from __future__ import annotations

import fnmatch
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.ops.common import wide
from megalight.ops.momentum import decayed_step
from megalight.optim.adam import Adam
from megalight.optim.qk_clip import QKClip
from megalight.parallel.data_parallel.buffers import Bucket, FlatShard
from megalight.parallel.mesh import DENSE_AXES
from megalight.parallel.shard import ShardPiece, boxes

UNEVEN = 1.01
"""How much more than its share of the work a rank takes on, so that matrices need not travel to another one."""
GATHER_BYTES = 256 * 2**20
"""Default of the largest number of bytes of a batch of matrices on a rank."""


Shape = tuple[int, int]


class MatrixBox(NamedTuple):
    """A box of a matrix that lies contiguously in a rank's shard.

    Attributes:
        row, column: where it begins in the matrix.
        rows, columns: its extent.
        bucket: index of the shard.
        start: its first element there.
    """

    row: int
    column: int
    rows: int
    columns: int
    bucket: int
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Where it lies in the matrix."""
        return self[:4]


@dataclass(eq=False)
class HomedMatrix:
    """A matrix, and the ranks that hold it.

    Attributes:
        name: canonical name; a head of it has its number behind.
        shape: of the whole matrix.
        held: rank in the group -> its boxes.
        home: the rank that updates it.
    """

    name: str
    shape: tuple[int, int]
    held: dict[int, list[MatrixBox]] = field(default_factory=dict)
    home: int = 0

    @property
    def buckets(self) -> set[int]:
        """Indices of the buckets that hold it, on any rank."""
        return {box.bucket for boxes in self.held.values() for box in boxes}

    @property
    def place(self) -> tuple[int, int, int]:
        """Where it begins: the first rank that holds it, the bucket and the element there."""
        rank = min(self.held)
        return rank, *min((box.bucket, box.start) for box in self.held[rank])

    def sources(self) -> dict[int, list[MatrixBox]]:
        """Return the boxes that each rank sends home: each part once, where several hold it."""
        order = sorted(self.held, key=lambda rank: (rank - self.home) % (max(self.held) + 1))
        seen: set[tuple[int, int, int, int]] = set()
        chosen: dict[int, list[MatrixBox]] = {}
        for rank in order:
            new = [box for box in self.held[rank] if box.place not in seen]
            seen.update(box.place for box in new)
            chosen[rank] = new
        return chosen


class ShardSpan(NamedTuple):
    """Elements of a rank's shard: one or several boxes that lie behind each other there."""

    bucket: int
    start: int
    numel: int


class MatrixSpan(NamedTuple):
    """A box of a matrix of a batch (``last = first + 1``), or all of several matrices (``box=None``)."""

    shape: Shape
    first: int
    last: int
    box: MatrixBox | None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return (self.last - self.first) * prod(self.shape) if self.box is None else self.box.numel

    def of(self, batch: Tensor) -> Tensor:
        """Return it in a batch, as a view."""
        part = batch[self.first : self.last]
        if (box := self.box) is None:
            return part
        return part[:, box.row : box.row + box.rows, box.column : box.column + box.columns]


class MatrixRound(NamedTuple):
    """What this rank sends, computes and receives at a time. Each rank has matrices of its own shapes.

    Attributes:
        own: shape -> the matrices of this shape whose home is this rank: one batch.
        resting: shape -> where its batch lies in a shard, if no other rank has a part of it: it is updated there.
        sent: for each rank, spans of this rank's shards that it needs.
        received: for each rank, what comes from it.
        returned: for each rank, that whose updates it gets.
        updated: for each rank, spans of this rank's shards whose updates come from it.
        completed: the buckets whose last matrices, on any rank, are in this round.
    """

    own: dict[Shape, list[str]]
    resting: dict[Shape, ShardSpan]
    sent: list[list[ShardSpan]]
    received: list[list[MatrixSpan]]
    returned: list[list[MatrixSpan]]
    updated: list[list[ShardSpan]]
    completed: list[int]


class MatrixExchange:
    """Brings matrices out of the shards of one group of ranks to their homes, and updates back. All ranks call it.

    Args:
        shards: index of a bucket -> this rank's shard of it.
        group: the ranks that hold all parts of these matrices together; None: one rank.
        flops: the work for a matrix of a shape, by which homes are chosen.
        heads: the number of rows by which the matrix of a name is divided; 0: it is one matrix.
        gather_bytes: the largest number of bytes of the matrices of a round, on each rank; at least one matrix.
        itemsize: bytes of an element.
        room: the state of a new matrix of a shape, by name.

    Attributes:
        load: for each rank, the work of one step.
        states: for each round and shape, the state of the matrices whose home is this rank, ``[B, ...]`` by name.

    Raises:
        ConfigurationError: a tensor is no matrix.
    """

    def __init__(
        self,
        shards: Mapping[int, FlatShard],
        group: dist.ProcessGroup | None,
        flops: Callable[[Shape], float],
        heads: Callable[[str], int],
        gather_bytes: int,
        itemsize: int,
        room: Callable[[Shape], Mapping[str, Tensor]],
    ) -> None:
        self.group = group
        size, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        own = [entry for index, shard in shards.items() for entry in _matrices(index, shard, heads)]
        every = [own]
        if group is not None:
            every = [[] for _ in range(size)]
            dist.all_gather_object(every, own, group=group)
        found: dict[str, HomedMatrix] = {}
        for rank, entries in enumerate(every):
            for name, shape, box in entries:
                found.setdefault(name, HomedMatrix(name, shape)).held.setdefault(rank, []).append(box)
        # All ranks make the same list, in the same order.
        # Equal ones come as they lie in memory.
        self.matrices = sorted(found.values(), key=lambda each: (-flops(each.shape), each.shape, each.place, each.name))
        self.load = [0.0] * size
        fair = UNEVEN * sum(flops(matrix.shape) for matrix in self.matrices) / size
        for matrix in self.matrices:
            cost = flops(matrix.shape)
            # On a rank that holds a part of it, less travels. Elsewhere only if that rank has its share of the work.
            near, free = (min(ranks, key=self.load.__getitem__) for ranks in (sorted(matrix.held), range(size)))
            matrix.home = near if self.load[near] + cost <= max(fair, self.load[free] + cost) else free
            self.load[matrix.home] += cost
        rounds = self._rounds(size, flops, gather_bytes, itemsize)
        ends = {index: n for n, of_rank in enumerate(rounds) for each in of_rank for m in each for index in m.buckets}
        self.rounds = [
            self._round(of_rank, sorted((index for index, end in ends.items() if end == number), reverse=True))
            for number, of_rank in enumerate(rounds)
        ]
        self.states: list[dict[Shape, dict[str, Tensor]]] = [
            {
                shape: {name: torch.stack([each] * len(names)) for name, each in room(shape).items()}
                for shape, names in current.own.items()
            }
            for current in self.rounds
        ]

    def named_states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the state that lies on this rank: name of the state, name of the matrix, view of the tensor."""
        for current, states in zip(self.rounds, self.states, strict=True):
            for shape, names in current.own.items():
                for name, tensor in states[shape].items():
                    yield from ((name, matrix, each) for matrix, each in zip(names, tensor, strict=True))

    def _rounds(
        self, size: int, flops: Callable[[Shape], float], gather_bytes: int, itemsize: int
    ) -> list[list[list[HomedMatrix]]]:
        """Return for each round and rank the matrices that are updated there: what ranks compute at about one time.

        They wait for each other in every round, so that none may be far ahead.
        """
        begin, timed = [0.0] * size, []
        # The last bucket has the first layers, which the next forward pass needs first.
        for matrix in sorted(self.matrices, key=lambda each: -max(each.buckets)):
            timed.append((begin[matrix.home], matrix))
            begin[matrix.home] += flops(matrix.shape)
        rounds: list[list[list[HomedMatrix]]] = []
        used = [0] * size
        for _, matrix in sorted(timed, key=lambda pair: pair[0]):
            needed = itemsize * prod(matrix.shape)
            if not rounds or (used[matrix.home] and used[matrix.home] + needed > gather_bytes):
                rounds.append([[] for _ in range(size)])
                used = [0] * size
            rounds[-1][matrix.home].append(matrix)
            used[matrix.home] += needed
        for of_rank in rounds:
            for matrices in of_rank:
                # In the order of memory: neighbors, such as the experts of a stack, are copied together.
                matrices.sort(key=lambda each: (each.shape, each.place))
        return rounds

    def _round(self, of_rank: list[list[HomedMatrix]], completed: list[int]) -> MatrixRound:
        batches: dict[Shape, list[HomedMatrix]] = defaultdict(list)
        for matrix in of_rank[self.rank]:
            batches[matrix.shape].append(matrix)
        resting = {shape: span for shape, batch in batches.items() if (span := self._rest(batch)) is not None}
        travelling = [[m for m in ms if rank != self.rank or m.shape not in resting] for rank, ms in enumerate(of_rank)]
        ranks = range(len(of_rank))
        mine = [(batches[m.shape].index(m), m, m.sources()) for m in travelling[self.rank]]
        return MatrixRound(
            {shape: [matrix.name for matrix in batch] for shape, batch in batches.items()},
            resting,
            [_joined(b for m in travelling[rank] for b in m.sources().get(self.rank, [])) for rank in ranks],
            [_together((m.shape, i, b) for i, m, sources in mine for b in sources.get(rank, [])) for rank in ranks],
            [_together((m.shape, i, b) for i, m, _ in mine for b in m.held.get(rank, [])) for rank in ranks],
            [_joined(b for m in travelling[rank] for b in m.held.get(self.rank, [])) for rank in ranks],
            completed,
        )

    def _rest(self, batch: Sequence[HomedMatrix]) -> ShardSpan | None:
        """Return where all of a batch lies side by side on this rank, and nowhere else."""
        boxes = [box for matrix in batch for box in matrix.held.get(self.rank, [])]
        spans = _joined(boxes)
        alone = all(len(matrix.held) == 1 for matrix in batch)
        whole = len(boxes) == len(batch) and all(box.numel == prod(batch[0].shape) for box in boxes)
        return spans[0] if alone and whole and len(spans) == 1 else None

    def update(
        self, flats: Mapping[int, Tensor], function: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
    ) -> Iterator[int]:
        """Replace every matrix by ``function`` of it and its state.

        Args:
            flats: index of a bucket -> flat tensor of this rank's shard, which is changed in place.
            function: ``[B, m, n] -> [B, m, n]``, in the same dtype. It changes the state in place, and may write its
                result into the matrices that it gets.

        Yields:
            the index of each bucket, as soon as all of its matrices are replaced; all ranks in the same order.
        """
        coming = self._gather(self.rounds[0], flats) if self.rounds else None
        leaving: tuple[MatrixRound, _Message] | None = None
        for number, current in enumerate(self.rounds):
            assert coming is not None
            whole = self._whole(current, coming, flats)
            coming = self._gather(self.rounds[number + 1], flats) if number + 1 < len(self.rounds) else None
            for shape, batch in whole.items():
                updated = function(batch, self.states[number][shape])
                if shape in current.resting:
                    batch.copy_(updated)  # nothing is copied if it was updated in place
                whole[shape] = updated
            pieces = [[span.of(whole[span.shape]).reshape(-1) for span in spans] for spans in current.returned]
            message = _Message(pieces, current.updated, next(iter(flats.values())), self.group)
            if leaving is not None:
                yield from self._scatter(*leaving, flats)
            leaving = current, message
        if leaving is not None:
            yield from self._scatter(*leaving, flats)

    def _gather(self, current: MatrixRound, flats: Mapping[int, Tensor]) -> _Message:
        pieces = [[flats[s.bucket][s.start : s.start + s.numel] for s in spans] for spans in current.sent]
        return _Message(pieces, current.received, next(iter(flats.values())), self.group)

    def _whole(self, current: MatrixRound, message: _Message, flats: Mapping[int, Tensor]) -> dict[Shape, Tensor]:
        values, first = message.wait(), 0
        whole = {
            shape: flats[span.bucket][span.start : span.start + span.numel].view(-1, *shape)
            for shape, span in current.resting.items()
        }
        for span in chain.from_iterable(current.received):
            count = len(current.own[span.shape])
            if span.box is None and span.last - span.first == count:  # all of a batch lies there already
                whole[span.shape] = values[first : first + span.numel].view(count, *span.shape)
                first += span.numel
                continue
            if span.shape not in whole:
                whole[span.shape] = values.new_empty(count, *span.shape)
            target = span.of(whole[span.shape])
            target.copy_(values[first : first + span.numel].view(target.shape))
            first += span.numel
        return whole

    def _scatter(self, current: MatrixRound, message: _Message, flats: Mapping[int, Tensor]) -> list[int]:
        values, first = message.wait(), 0
        for span in chain.from_iterable(current.updated):
            flats[span.bucket][span.start : span.start + span.numel] = values[first : first + span.numel]
            first += span.numel
        return current.completed


def _scaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    return gradient if scale is None else gradient * scale


class _Message:
    """One all-to-all that is on its way: pieces for each rank, and what comes from each."""

    def __init__(
        self,
        pieces: Sequence[Sequence[Tensor]],
        coming: Sequence[Sequence[ShardSpan | MatrixSpan]],
        like: Tensor,
        group: dist.ProcessGroup | None,
    ) -> None:
        flat = [piece for of_rank in pieces for piece in of_rank]
        self._sent = flat[0] if len(flat) == 1 else torch.cat(flat) if flat else like.new_empty(0)
        self._received, self._work = self._sent, None
        if group is not None:
            sizes = [sum(span.numel for span in of_rank) for of_rank in coming]
            counts = [sum(piece.numel() for piece in of_rank) for of_rank in pieces]
            self._received = like.new_empty(sum(sizes))
            self._work = dist.all_to_all_single(self._received, self._sent, sizes, counts, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return what came, ``[sum(sizes)]``."""
        if self._work is not None:
            self._work.wait()
        return self._received


def _joined(boxes: Iterable[MatrixBox]) -> list[ShardSpan]:
    """Return boxes of a shard as spans."""
    spans: list[ShardSpan] = []
    for box in boxes:
        if spans and (last := spans[-1]).bucket == box.bucket and last.start + last.numel == box.start:
            spans[-1] = ShardSpan(box.bucket, last.start, last.numel + box.numel)
        else:
            spans.append(ShardSpan(box.bucket, box.start, box.numel))
    return spans


def _together(boxes: Iterable[tuple[Shape, int, MatrixBox]]) -> list[MatrixSpan]:
    """Return boxes of matrices of a batch as spans."""
    spans: list[MatrixSpan] = []
    for shape, index, box in boxes:
        whole = box.place == (0, 0, *shape)
        if whole and spans and (last := spans[-1]).box is None and (last.shape, last.last) == (shape, index):
            spans[-1] = last._replace(last=index + 1)
        else:
            spans.append(MatrixSpan(shape, index, index + 1, None if whole else box))
    return spans


def _matrices(
    index: int, shard: FlatShard, heads: Callable[[str], int]
) -> Iterator[tuple[str, tuple[int, int], MatrixBox]]:
    """Yield the boxes of matrices that lie in a shard, with name and shape of the matrix."""
    for piece, first, last, start in shard.intervals():
        if len(piece.shape) != 2:
            raise ConfigurationError(
                f"{piece.name} has shape {list(piece.shape)}, and is no matrix, so that an optimizer of whole matrices "
                "cannot update it; let a pattern of adam_names match it."
            )
        high = heads(piece.name)
        if high and piece.shape[0] % high:
            raise ConfigurationError(
                f"{piece.name} has {piece.shape[0]} rows, which are no heads of {high} rows; correct head_dim."
            )
        for offset, extent, at in boxes(piece.size, first, last):
            row, column = piece.offset[0] + offset[0], piece.offset[1] + offset[1]
            yield from _cut(piece, high, index, row, column, extent, start + at - first)


def _cut(
    piece: ShardPiece, high: int, bucket: int, row: int, column: int, extent: tuple[int, ...], start: int
) -> Iterator[tuple[str, tuple[int, int], MatrixBox]]:
    """Yield a box, divided where one head ends and the next one begins."""
    rows, columns = extent
    if not high:
        yield piece.name, (piece.shape[0], piece.shape[1]), MatrixBox(row, column, rows, columns, bucket, start)
        return
    while rows:
        head, into = divmod(row, high)
        count = min(rows, high - into)
        yield f"{piece.name}[{head}]", (high, piece.shape[1]), MatrixBox(into, column, count, columns, bucket, start)
        row, rows, start = row + count, rows - count, start + count * columns


class WholeMatrixOptimizer(Adam):
    """Base class of optimizers that look at whole matrices; parameters that are none are updated by Adam.

    A subclass defines :meth:`update`, which gets whole matrices on their home rank, and their state there, if
    :meth:`home_state` names any. What can be computed on flat parts of matrices belongs in :meth:`direction`. Groups
    with ``whole_matrices=True`` hold what it updates.

    Without an engine, parameters of three dims are stacks of matrices.

    Attributes:
        dtype: dtype in which matrices are sent and updated.
        gather_bytes: the largest number of bytes of a batch of gathered matrices, on each rank.
        head_dim: rows of one head, for names that match ``head_names``.
        exchanges: an exchange for each mesh; None: they are made in the next step.
        buckets: index of a bucket of matrices -> the bucket; None: there is no engine.
        places: master -> index of its bucket, and its first element in the shard.
        kept: name of a matrix -> its state on this rank, while there is no engine.
        parts: master -> the part of a shard that it is.
        clip: scales rows of weights after they are updated; None: nothing does.
    """

    elementwise = False

    def __init__(
        self,
        params: Iterable[Any],
        *args: Any,
        dtype: torch.dtype = torch.bfloat16,
        gather_bytes: int = GATHER_BYTES,
        head_dim: int = 0,
        head_names: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.dtype = dtype
        self.gather_bytes, self.head_dim, self.head_names = gather_bytes, head_dim, tuple(head_names)
        self.buckets: Mapping[int, Bucket] | None = None
        self.exchanges: list[tuple[MatrixExchange, list[int]]] | None = None
        self.places: dict[Tensor, tuple[int, int]] = {}
        self.kept: dict[str, dict[str, Tensor]] = {}
        self.parts: dict[Tensor, FlatShard] = {}
        self.clip: QKClip | None = None
        super().__init__(params, *args, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; without ``whole_matrices`` Adam updates it."""
        super().add_param_group({"whole_matrices": False, **param_group})

    def direction(self, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
        """Return ``[n]``, what travels home, of parts of matrices with gradient ``[n]``.

        ``state`` may keep tensors of that shape. Without this method, the gradient travels.
        """
        return gradient

    def write_direction(
        self, out: Tensor, gradient: Tensor, scale: Tensor | None, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Write the direction of ``scale gradient`` to ``out [n]``; a subclass may do it in one pass over memory."""
        out.copy_(self.direction(_scaled(gradient, scale), state, group))

    def home_state(self, shape: tuple[int, int]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the state of a matrix of a shape, by name. It begins as zeros, in float32 or wider."""
        return {}

    @abstractmethod
    def update(self, matrices: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return, ``[B, m, n]``, what is subtracted from matrices, times the learning rate.

        Args:
            matrices: ``[B, m, n]``, which may be overwritten and returned. One without a gradient in this step is zero,
                and so is the gradient of an expert without tokens: leave its state as it is.
            state: ``[B, ...]`` by name, to be changed in place.
        """

    @abstractmethod
    def flops(self, shape: tuple[int, int]) -> float:
        """Return the work of :meth:`update` for a matrix of a shape."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters. If ``closure`` is given, it is called first and its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.clip is not None:
            self.clip.begin()
        for parameter, group, update in self._in_time():
            if update is None:
                self._arrive(parameter)
                self._update(parameter, group)
                if self._clipped(parameter) and (copy := self.copies.get(parameter)) is not None:
                    copy.copy_(parameter)
            elif parameter.numel():
                self._apply(parameter, group, update)
            if parameter in self.after:
                self.after[parameter]()
        self.grad_scale = self.host_scale = None
        return loss

    def _clipped(self, parameter: Tensor) -> bool:
        return self.clip is not None and self.clip.scale(self.parts[parameter])

    def _arrive(self, parameter: Tensor) -> None:
        if parameter in self.before:
            self.before[parameter]()

    def _in_time(self) -> Iterator[tuple[Tensor, dict[str, Any], Tensor | None]]:
        """Yield the parameters to update, each with its group, and matrices with what is subtracted, times the rate.

        Parameters that are updated travel to other ranks while the next matrices are computed.
        """
        of_adam = [pair for pair in self._in_turn() if not pair[1]["whole_matrices"]]
        if self.buckets is None:
            updates = self._alone(
                {
                    parameter: self.direction(_scaled(gradient, scale), self.state[parameter], group)
                    for parameter, group, gradient, scale in self._gradients()
                }
            )
            yield from ((p, group, updates.get(p)) for p, group in self._in_turn())
            return
        exchanges = self.begun()
        devices = {bucket.params.device for bucket in self.buckets.values()}
        yield from ((p, group, None) for p, group in of_adam if p.device in devices)
        flats = {
            index: torch.empty(bucket.shard.numel, dtype=self.dtype, device=bucket.params.device)
            for index, bucket in self.buckets.items()
        }
        absent = {parameter: place for parameter, place in self.places.items() if place[0] in flats}
        held: dict[int, list[tuple[Tensor, dict[str, Any], Tensor]]] = defaultdict(list)
        # One after the other, so that only one of them is in memory in a wide dtype.
        for parameter, group, gradient, scale in self._gradients():
            index, start = absent.pop(parameter)
            view = flats[index][start : start + parameter.numel()]
            self.write_direction(view, gradient, scale, self.state[parameter], group)
            held[index].append((parameter, group, view))
        # Parameters without a gradient in this step take part as zeros: all ranks send and receive the same always.
        for parameter, (index, start) in absent.items():
            flats[index][start : start + parameter.numel()] = 0
        for exchange, members in exchanges:
            for index in exchange.update({index: flats[index] for index in members}, self.update):
                yield from (each for each in held[index] if each[0].device in devices)
        # Masters on the host take long, and the device has all of its work by now.
        on_host = [(p, group, None) for p, group in of_adam if p.device not in devices] + [
            each for members in held.values() for each in members if each[0].device not in devices
        ]
        yield from sorted(on_host, key=lambda each: self.turns.get(each[0], 0))

    def _gradients(self) -> Iterator[tuple[Tensor, dict[str, Any], Tensor, Tensor | None]]:
        """Yield the parameters with matrices that have a gradient, each with its group, the gradient and its factor."""
        for parameter, group in self._in_turn():
            if group["whole_matrices"]:
                self._arrive(parameter)
                gradient = parameter.grad
                assert gradient is not None
                host = parameter.device.type == "cpu" and self.host_scale is not None
                yield parameter, group, gradient, self.host_scale if host else self.grad_scale

    def begun(self) -> list[tuple[MatrixExchange, list[int]]]:
        """Return the exchanges. The first call makes them, on all ranks together."""
        if self.exchanges is None:
            self.exchanges = list(self._exchanges())
            self._take_kept(self.exchanges)
        return self.exchanges

    def home_tensors(self) -> list[tuple[str, str, Tensor]]:
        """Return the state that lies on this rank: name of the state, name of the matrix, view of the tensor.

        All ranks call it together.
        """
        if self.buckets is None or not self.home_state((1, 1)):
            return []
        return [each for exchange, _ in self.begun() for each in exchange.named_states()]

    def leave(self) -> None:
        """Forget the engine. State on homes is kept for the next one, which all ranks begin together."""
        for exchange, _ in self.exchanges or ():
            for name, matrix, tensor in exchange.named_states():
                self.kept.setdefault(matrix, {})[name] = tensor
        self.buckets, self.exchanges, self.places, self.parts = None, None, {}, {}

    def _take_kept(self, exchanges: Sequence[tuple[MatrixExchange, list[int]]]) -> None:
        """Take over the state of an earlier engine, also where a matrix has another home now."""
        if not self.home_state((1, 1)):
            return
        for exchange, _ in exchanges:
            own = list(exchange.named_states())
            others: list[dict[str, dict[str, Tensor]]] = [self.kept]
            if exchange.group is not None:
                moved: list[Any] = [None] * exchange.group.size()
                dist.all_gather_object(moved, {m for _, m, _ in own if m not in self.kept}, group=exchange.group)
                asked = set[str]().union(*moved)
                given = {m: {n: t.cpu() for n, t in self.kept[m].items()} for m in sorted(asked & self.kept.keys())}
                dist.all_gather_object(moved, given, group=exchange.group)
                others += moved
            for name, matrix, tensor in own:
                if (found := next((kept[matrix] for kept in others if matrix in kept), None)) is not None:
                    tensor.copy_(found[name])
        self.kept = {}

    def _alone(self, directions: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Update whole parameters; those of equal shape together."""
        stacks: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        result: dict[Tensor, Tensor] = {}
        for parameter, direction in directions.items():
            if parameter.ndim < 2:
                raise ConfigurationError(
                    f"a parameter of shape {list(parameter.shape)} is no matrix; put it into a group with "
                    "whole_matrices=False."
                )
            stack = direction.to(self.dtype).view(-1, *direction.shape[-2:])
            shape = stack.shape[1], stack.shape[2]
            if room := self._room(shape, parameter.device):
                state = self.state[parameter]
                for name, each in room.items():
                    state.setdefault(name, torch.stack([each] * len(stack)))
                result[parameter] = self.update(stack, {name: state[name] for name in room}).view(parameter.shape)
            else:
                stacks[shape].append((parameter, stack))
        for shape, members in stacks.items():
            whole = torch.cat([stack for _, stack in members])
            # Experts of all layers have one shape: not all of them at once.
            for batch in torch.split(whole, max(1, self.gather_bytes // (whole.itemsize * prod(shape)))):
                batch.copy_(self.update(batch, {}))
            parts = torch.split(whole, [len(stack) for _, stack in members])
            result |= {p: part.reshape(p.shape) for (p, _), part in zip(members, parts, strict=True)}
        return result

    def _room(self, shape: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
        dtype = wide(self.dtype)
        return {n: torch.zeros(size, dtype=dtype, device=device) for n, size in self.home_state(shape).items()}

    def _exchanges(self) -> Iterator[tuple[MatrixExchange, list[int]]]:
        assert self.buckets is not None
        meshes: dict[Any, list[int]] = {}
        for index, bucket in self.buckets.items():
            meshes.setdefault(bucket.layout.kind.mesh, []).append(index)
        for mesh, members in meshes.items():
            # All ranks of a pipeline stage: whatever divides a matrix does so among these.
            group = mesh.group(*(axis for axis in DENSE_AXES if axis != "pp"))
            shards = {index: self.buckets[index].shard for index in members}
            room = partial(self._room, device=self.buckets[members[0]].params.device)
            exchange = MatrixExchange(
                shards, group, self.flops, self._rows_of_head, self.gather_bytes, self.dtype.itemsize, room
            )
            yield exchange, members

    def _rows_of_head(self, name: str) -> int:
        return self.head_dim if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.head_names) else 0

    def _apply(self, parameter: Tensor, group: Mapping[str, Any], update: Tensor) -> None:
        lr = group["lr"].to(parameter.device) if isinstance(group["lr"], Tensor) else group["lr"]
        copy = self.copies.get(parameter)
        # Rows may be scaled once more, before they are copied.
        out = copy if self.clip is None else None
        decayed_step(parameter, update.to(parameter.device), lr=lr, weight_decay=group["weight_decay"], out=out)
        self._clipped(parameter)
        if copy is not None and out is None:
            copy.copy_(parameter)
        for start, stop, quantized_out in (
            (self.quantized_out[parameter]() or ()) if parameter in self.quantized_out else ()
        ):
            quantized_out.cast(parameter[start:stop])
