"""The order of a streamed data set: which rows each sample of a global batch is made of, on any number of ranks.

Sample ``b`` of every global batch comes from stream ``b``. A stream takes rows of its own, tokenizes them, and cuts or
packs them to samples; it knows no other stream. So ranks and workers may share the streams of a batch in any way, and
the batch stays the same. The state of all streams is the position of a run, which resumes in any layout.

Shards are divided into as many groups as divide both them and the streams, so that a reader of a few streams reads a
few shards. Rows of a group are shuffled in blocks of ``window`` rows, and dealt to the streams of the group in turn. A
block is read again on resume, from the place in its shard where it starts.
"""

from __future__ import annotations

import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from megalight.data.chat.dataset import PackOptions, make_row
from megalight.data.gpt.dataset import GPTSample, SampleOptions, make_sample
from megalight.errors import DataError

log = logging.getLogger(__name__)

OnBad = Literal["raise", "skip"]
Row = Mapping[str, Any]
Place = tuple[int, int]
"""The pass over the data, and the number of a row or of a block in it."""
WARNINGS = 10
"""Rows that are skipped with a message each; later ones are skipped without."""


class Rows(Protocol):
    """What is streamed: ``datasets.IterableDataset`` is such rows."""

    @property
    def num_shards(self) -> int:
        """Number of parts that can be read on their own."""

    def shard(self, num_shards: int, index: int) -> Self:
        """Return one of ``num_shards`` parts, which are equally many shards."""

    def __iter__(self) -> Iterator[Row]:
        """Yield rows, from the place of :meth:`load_state_dict` on."""

    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the last row that was yielded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration start at a place."""


@dataclass(frozen=True)
class StreamOrder:
    """Which rows each of ``streams`` streams takes.

    Attributes:
        name: of the data, for messages.
        streams: samples of a global batch.
        window: rows of a block, which are shuffled together. 1: the order of the data.
        seed: seed of the order; each pass has another.
    """

    rows: Rows
    name: str
    streams: int
    window: int
    seed: int

    @property
    def groups(self) -> int:
        """Number of groups of shards."""
        return math.gcd(self.rows.num_shards, self.streams)

    def group_of(self, stream: int) -> tuple[int, int]:
        """Return the group of a stream, and its place among the streams of the group."""
        return divmod(stream, self.streams // self.groups)


class _GroupReader:
    """Reads the blocks of one group in order, and keeps those that one of its streams still needs."""

    def __init__(
        self, order: StreamOrder, group: int, start: Place = (0, 0), seek: dict[str, Any] | None = None
    ) -> None:
        self._order, self._group = order, group
        self._next = start
        self._blocks: dict[Place, list[Row]] = {}
        self._seeks: dict[Place, dict[str, Any] | None] = {}
        self._ends: dict[int, int] = {}
        self._open(seek)

    def _open(self, seek: dict[str, Any] | None) -> None:
        self._rows = self._order.rows.shard(self._order.groups, self._group)
        if seek is not None:
            self._rows.load_state_dict(seek)
        self._seek, self._iterator = seek, iter(self._rows)

    def row(self, turn: int, number: int) -> Row | None:
        """Return a row of a pass, or None behind its last one."""
        block, at = divmod(number, self._order.window)
        while (turn, block) not in self._blocks and block < self._ends.get(turn, block + 1):
            self._read()
        found = self._blocks.get((turn, block), ())
        return found[at] if at < len(found) else None

    def start(self, place: Place) -> tuple[Place, dict[str, Any] | None]:
        """Return a block that is not behind ``place``, and where it starts in the data: None at its start."""
        if not place[1]:
            return place, None
        return (place, self._seeks[place]) if place in self._seeks else (self._next, self._seek)

    def over(self, turn: int, number: int) -> bool:
        """Return whether a row is known to lie behind the last one of its pass."""
        return number // self._order.window >= self._ends.get(turn, math.inf)

    def release(self, before: Place) -> None:
        """Forget blocks that no stream needs."""
        for place in [place for place in self._blocks if place < before]:
            del self._blocks[place], self._seeks[place]

    def _read(self) -> None:
        turn, number = self._next
        try:
            rows = list(itertools.islice(self._iterator, self._order.window))
        except OSError as error:
            raise DataError(
                f"{self._order.name}: reading broke off ({error}). Check the network and the disk, and resume the run "
                "from its last checkpoint."
            ) from error
        if not rows:
            if not number:
                raise DataError(f"{self._order.name} has no rows in a part of its shards; name another split.")
            self._ends[turn], self._next = number, (turn + 1, 0)
            self._open(None)
            return
        if self._order.window > 1:
            random = np.random.Generator(np.random.PCG64([self._order.seed, turn, self._group, number]))
            rows = [rows[index] for index in random.permutation(len(rows))]
        self._blocks[self._next], self._seeks[self._next] = rows, self._seek
        self._next, self._seek = (turn, number + 1), self._rows.state_dict()


class _Cursor:
    """The next row of one stream."""

    def __init__(self, reader: _GroupReader, order: StreamOrder, stream: int, place: Place | None, passes: int | None):
        self._reader, self._order, self._passes = reader, order, passes
        _, self._first = order.group_of(stream)
        self._place: Place = (0, self._first) if place is None else place

    @property
    def place(self) -> Place:
        """The next row. Behind the end of a pass, which has no block, it is the first one of the next pass."""
        turn, number = self._place
        return (turn + 1, self._first) if self._reader.over(turn, number) else self._place

    def take(self) -> tuple[Place, Row] | None:
        """Return the next row and its place; None behind the last pass."""
        turn, number = self._place
        if self._passes is not None and turn >= self._passes:
            return None
        if (row := self._reader.row(turn, number)) is not None:
            self._place = turn, number + self._order.streams // self._order.groups
            return (turn, number), row
        if number == self._first and self._passes is None:
            raise DataError(
                f"{self._order.name} has too few rows: a global batch of {self._order.streams} samples takes at least "
                "one row for each in a pass. Use a smaller global_batch_size, or more data."
            )
        self._place = turn + 1, self._first
        return self.take()


@dataclass
class _Pending:
    """A tokenized row of which a part is still to be used.

    Attributes:
        loss: 1 for each token that counts in the loss.
        start: tokens before this position are used.
    """

    place: Place
    ids: NDArray[np.int64]
    loss: NDArray[np.uint8]
    start: int = 0


Encode = Callable[[Row], tuple[NDArray[np.int64], NDArray[np.uint8]]]
"""Returns the tokens of a row, and which of them count in the loss."""


class Stream(ABC):
    """Samples of one stream.

    Args:
        encode: turns a row into tokens.
        name: of the data, for messages.
        on_bad: what happens with a row that cannot be encoded.
        start: tokens of the first row that are used already.
    """

    def __init__(self, cursor: _Cursor, encode: Encode, name: str, on_bad: OnBad, start: int = 0) -> None:
        self.cursor = cursor
        self._encode, self._name, self._on_bad, self._start = encode, name, on_bad, start
        self._pending: deque[_Pending] = deque()
        self._skipped = 0

    @abstractmethod
    def sample(self) -> GPTSample:
        """Return the next sample; one without loss behind the last row."""

    def state(self) -> list[int]:
        """Return where the next sample starts: the pass, the row, and the token in it."""
        if self._pending:
            return [*self._pending[0].place, self._pending[0].start]
        return [*self.cursor.place, self._start]

    def block(self, window: int) -> Place:
        """Return the block in which the next sample starts."""
        turn, number, _ = self.state()
        return turn, number // window

    def _more(self) -> _Pending | None:
        """Return the next row that has tokens."""
        while (found := self.cursor.take()) is not None:
            place, row = found
            start, self._start = self._start, 0
            try:
                ids, loss = self._encode(row)
            except DataError as error:
                message = f"{self._name}, row {place[1]}: {error}"
                if self._on_bad == "raise":
                    raise DataError(f"{message} Repair the data, or leave such rows out with on_bad=skip.") from error
                self._skipped += 1
                if self._skipped <= WARNINGS:
                    log.warning("left out: %s", message)
                continue
            if len(ids) > start:
                return _Pending(place, ids, loss, start)
        return None


class TextStream(Stream):
    """Documents, concatenated and cut to samples of ``S + 1`` tokens; the last one is the first of the next sample."""

    def __init__(self, *args: Any, options: SampleOptions) -> None:
        super().__init__(*args)
        self._options = options

    def sample(self) -> GPTSample:
        """See :meth:`Stream.sample`."""
        wanted = self._options.sequence_length + 1
        while sum(len(each.ids) - each.start for each in self._pending) < wanted:
            if (more := self._more()) is None:
                break
            self._pending.append(more)
        pieces: list[NDArray[np.int64]] = []
        while self._pending and wanted:
            first = self._pending[0]
            piece = first.ids[first.start : first.start + wanted]
            pieces.append(piece)
            wanted -= len(piece)
            if wanted:
                self._pending.popleft()
            else:
                first.start += len(piece) - 1
        # A single token is the label of the sample before, and predicts nothing.
        return make_sample(pieces if sum(map(len, pieces)) > 1 else [], self._options)


class ChatStream(Stream):
    """Whole conversations, in their order; a sample ends before the first one that does not fit into it."""

    def __init__(self, *args: Any, options: PackOptions) -> None:
        super().__init__(*args)
        self._options = options

    def sample(self) -> GPTSample:
        """See :meth:`Stream.sample`."""
        pieces: list[tuple[NDArray[np.int64], NDArray[np.uint8]]] = []
        room = self._options.sequence_length
        while True:
            if not self._pending:
                if (more := self._more()) is None:
                    break
                self._pending.append(more)
            piece = self._fitting(self._pending[0])
            if piece is None:
                self._pending.popleft()
                continue
            if len(piece[0]) - 1 > room:
                break
            self._pending.popleft()
            pieces.append(piece)
            room -= len(piece[0]) - 1
            if not self._options.packing:
                break
        return make_row([(ids, loss[1:]) for ids, loss in pieces], self._options, self._name)

    def _fitting(self, found: _Pending) -> tuple[NDArray[np.int64], NDArray[np.uint8]] | None:
        """Return a conversation that fits into a row, or None if it is left out."""
        ids, loss, most = found.ids, found.loss, self._options.sequence_length + 1
        if len(ids) > most:
            if self._options.too_long == "raise":
                raise DataError(
                    f"{self._name}, row {found.place[1]}: the conversation has {len(ids)} tokens; sequence_length "
                    f"{most - 1} takes {most}. Raise sequence_length, or choose another too_long."
                )
            if self._options.too_long == "drop":
                return None
            part = slice(0, most) if self._options.too_long == "cut_end" else slice(-most, None)
            ids, loss = ids[part], loss[part]
        return (ids, loss) if len(ids) > 1 and loss[1:].any() else None


MakeStream = Callable[[_Cursor, int], Stream]
"""Makes the stream of a cursor, whose first row starts at a token."""


@dataclass(frozen=True)
class StreamStates:
    """Where all streams, or some, are after a batch.

    Attributes:
        streams: stream -> pass, row and token at which its next sample starts.
        seeks: group, pass and block -> where the block starts in the data.
    """

    streams: dict[int, list[int]]
    seeks: dict[tuple[int, int, int], dict[str, Any] | None]

    @classmethod
    def merged(cls, parts: Iterable[StreamStates]) -> StreamStates:
        """Return the states of several readers as one."""
        streams: dict[int, list[int]] = {}
        seeks: dict[tuple[int, int, int], dict[str, Any] | None] = {}
        for part in parts:
            streams |= part.streams
            seeks |= part.seeks
        return cls(streams, seeks)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {
            "streams": [self.streams[stream] for stream in sorted(self.streams)],
            "seeks": [[*key, self.seeks[key]] for key in sorted(self.seeks)],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StreamStates:
        """Read :meth:`to_dict`."""
        seeks = {(int(group), int(turn), int(block)): seek for group, turn, block, seek in values["seeks"]}
        return cls({number: list(map(int, state)) for number, state in enumerate(values["streams"])}, seeks)


class StreamReader(IterableDataset[Any]):
    """Yields, batch by batch, the samples of some streams, and their states after the batch. Workers share the streams.

    Args:
        order: which rows each stream takes.
        states: where to start. None: at the start of the data.
        passes: passes after which samples are without loss. None: any number.
    """

    def __init__(
        self,
        order: StreamOrder,
        make: MakeStream,
        streams: range,
        batches: int,
        states: StreamStates | None = None,
        passes: int | None = None,
    ) -> None:
        self.order, self.make, self.streams, self.batches = order, make, streams, batches
        self.states, self.passes = states, passes

    def __iter__(self) -> Iterator[tuple[list[GPTSample], StreamStates]]:
        """Yield the samples of this worker's streams."""
        streams: Sequence[int] = self.streams
        if (worker := torch.utils.data.get_worker_info()) is not None:
            streams = [int(each) for each in np.array_split(np.asarray(streams), worker.num_workers)[worker.id]]
            # `datasets` would divide the shards over workers; here, each worker reads those of its streams.
            cast(Any, torch.utils.data._utils.worker)._worker_info = None
        readers: dict[int, _GroupReader] = {}
        held: dict[int, Stream] = {}
        for group, members in itertools.groupby(streams, lambda stream: self.order.group_of(stream)[0]):
            own = list(members)
            readers[group] = self._reader(group, own)
            for stream in own:
                turn, number, start = (None, None, 0) if self.states is None else self.states.streams[stream]
                place = None if turn is None or number is None else (turn, number)
                held[stream] = self.make(_Cursor(readers[group], self.order, stream, place, self.passes), start)
        for _ in range(self.batches):
            samples = [stream.sample() for stream in held.values()]
            yield samples, self._states(held, readers)

    def _reader(self, group: int, streams: Sequence[int]) -> _GroupReader:
        """Return a reader that starts at the first block which one of the streams needs."""
        if self.states is None:
            return _GroupReader(self.order, group)
        known = [(turn, block) for number, turn, block in self.states.seeks if number == group]
        starts = []
        for stream in streams:
            turn, number, _ = self.states.streams[stream]
            place = turn, number // self.order.window
            starts.append(max([(turn, 0), *(each for each in known if each <= place)]))
        return _GroupReader(self.order, group, min(starts), self.states.seeks.get((group, *min(starts))))

    def _states(self, held: Mapping[int, Stream], readers: Mapping[int, _GroupReader]) -> StreamStates:
        states = {stream: each.state() for stream, each in held.items()}
        seeks: dict[tuple[int, int, int], dict[str, Any] | None] = {}
        blocks: dict[int, list[Place]] = {}
        for stream, each in held.items():
            group, _ = self.order.group_of(stream)
            blocks.setdefault(group, []).append(place := each.block(self.order.window))
            start, seek = readers[group].start(place)
            seeks[(group, *start)] = seek
        for group, places in blocks.items():
            readers[group].release(min(places))
        return StreamStates(states, seeks)
