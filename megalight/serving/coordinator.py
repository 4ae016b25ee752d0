"""A coordinator of data-parallel engines: it routes requests, answers clients, and changes the state of all engines.

Clients and engines connect to one ZeroMQ ``ROUTER``. An engine sends one frame for each of its steps. The coordinator
keeps the tokens of each request, so that another engine goes on with it when its own is gone: samples follow from seed
and position alone.
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import zmq

from megalight.errors import ConfigurationError
from megalight.serving.curve_keys import CurveKeys, check_endpoint
from megalight.serving.engine_status import EngineStatus
from megalight.serving.messages import (
    LARGEST,
    AbortRequest,
    Ack,
    Command,
    Connect,
    ConnectAck,
    Control,
    ControlAck,
    EngineReply,
    Fault,
    Frame,
    Header,
    Heartbeat,
    Hello,
    Output,
    Rejoin,
    Reply,
    RequestFields,
    State,
    SubmitRequest,
    decode_for_coordinator,
    encode,
)
from megalight.serving.processes import say, settings_of

T = TypeVar("T")
log = logging.getLogger(__name__)

SILENCE = 2.0
"""Seconds without a sign of an engine, or of the coordinator, after which it is taken for gone."""
BEAT = 0.25
"""Seconds between two signs."""
CHUNK = 64
"""Tokens of a piece by which beginnings of prompts are compared."""
EXPECTED = 64
"""Tokens that a request counts for its completion from the start, beside those that it has."""
REMEMBERED = 16_384
"""Pieces of prompts that are remembered of an engine whose cache is unknown, and ended requests of all clients."""

FROM_ENGINES = EngineReply, Heartbeat, Ack
"""Messages of engines that have said hello."""

DURING: dict[Header, tuple[State, State]] = {
    "PAUSE": ("PAUSING", "PAUSED"),
    "UNPAUSE": ("RESUMING", "RUNNING"),
    "SUSPEND": ("SUSPENDING", "SUSPENDED"),
    "RESUME": ("RESUMING", "RUNNING"),
    "STOP": ("STOPPING", "STOPPED"),
}
"""Header -> the state while engines acknowledge it, and the one after that."""
STEPS: dict[tuple[Header, State], tuple[Header, ...]] = {
    ("PAUSE", "RUNNING"): ("PAUSE",),
    ("UNPAUSE", "PAUSED"): ("UNPAUSE",),
    ("SUSPEND", "RUNNING"): ("PAUSE", "SUSPEND"),
    ("SUSPEND", "PAUSED"): ("SUSPEND",),
    ("RESUME", "PAUSED"): ("UNPAUSE",),
    ("RESUME", "SUSPENDED"): ("RESUME",),
    ("STOP", "RUNNING"): ("STOP",),
    ("STOP", "PAUSED"): ("STOP",),
    ("STOP", "SUSPENDED"): ("STOP",),
    ("UPDATE_WEIGHTS", "RUNNING"): ("CHECK_WEIGHTS", "PAUSE", "UPDATE_WEIGHTS", "UNPAUSE"),
    ("UPDATE_WEIGHTS", "PAUSED"): ("CHECK_WEIGHTS", "UPDATE_WEIGHTS"),
    ("UPDATE_WEIGHTS", "SUSPENDED"): ("CHECK_WEIGHTS", "UPDATE_WEIGHTS"),
}
"""What a client wants in a state -> what engines are told. Nothing, if it is so already."""
ENTERED: dict[State, tuple[Header, ...]] = {
    "PAUSING": ("PAUSE",),
    "PAUSED": ("PAUSE",),
    "SUSPENDING": ("PAUSE", "SUSPEND"),
    "SUSPENDED": ("PAUSE", "SUSPEND"),
    "STOPPING": ("STOP",),
}
"""What an engine is told that comes in a state."""


@dataclass(eq=False)
class _RoutedRequest:
    """A request that has not ended."""

    client: bytes
    request: RequestFields
    seed: int
    generated: list[int]
    engine: _Engine | None = None
    load: int = 0
    held: list[Output] = field(default_factory=list)


@dataclass(eq=False)
class _Engine:
    """An engine, with the requests that it has."""

    identity: bytes
    name: str
    group: str
    epoch: int
    seen: float
    order: int
    status: EngineStatus = field(default_factory=EngineStatus)
    requests: dict[str, _RoutedRequest] = field(default_factory=dict)
    load: int = 0
    total: int = 0
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def shared(self, pieces: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens it has had before."""
        count = 0
        for piece in pieces:
            if piece not in self.prefixes:
                break
            count += CHUNK
        return count

    def take(self, number: str, pending: _RoutedRequest, pieces: Sequence[int]) -> None:
        """Count a request."""
        self.requests[number], pending.engine = pending, self
        # What is cached neither runs nor takes blocks again: requests with one beginning stay together.
        uncached = len(pending.request.prompt) - self.shared(pieces)
        pending.load = uncached + len(pending.generated) + EXPECTED
        self.load += pending.load
        self.total += 1
        for piece in pieces:
            self.prefixes[piece] = None
            self.prefixes.move_to_end(piece)
        most = self.status.cache_tokens // CHUNK or REMEMBERED
        while len(self.prefixes) > most:
            self.prefixes.popitem(last=False)

    def drop(self, number: str) -> None:
        """Count a request no more."""
        if (pending := self.requests.pop(number, None)) is not None:
            self.load -= pending.load
            pending.engine = None


def _pieces(tokens: Sequence[int]) -> list[int]:
    """Return a number for each beginning of a prompt whose length is a multiple of :data:`CHUNK`."""
    found, before = [], 0
    for first in range(0, len(tokens) - CHUNK + 1, CHUNK):
        before = hash((before, *tokens[first : first + CHUNK]))
        found.append(before)
    return found


class DataParallelInferenceCoordinator:
    """Routes requests of clients to engines. :meth:`run` serves until a client stops all.

    A request goes to the engine with the least load in tokens. Those with which its prompt begins do not count where
    the engine has had them before, now and while the request runs. An engine that is silent for two seconds is taken
    out.

    Args:
        endpoint: where it listens: ``ipc://`` and the path of a socket, which the rights of its folder protect. Or
            ``tcp://``, with keys.
        keys: those that engines and clients must have.
        retry: whether requests of an engine that is gone go on elsewhere. Otherwise they get an error.

    Attributes:
        state: what all engines do.
        dropped: frames that were dropped, by reason.
        duplicates: requests whose id came again.

    Raises:
        ConfigurationError: the endpoint is of another kind, or cannot be used.
    """

    def __init__(self, endpoint: str, *, keys: CurveKeys | None = None, retry: bool = True) -> None:
        check_endpoint(endpoint, keys)
        # Of its own with keys: one answer for all sockets of a context says who may connect.
        context = zmq.Context.instance() if keys is None else zmq.Context()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        # Replies to a client that is gone raise; a connection of the same identity takes the place of the older one.
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.LINGER, 200),
            (zmq.SNDHWM, 10_000),
            (zmq.MAXMSGSIZE, LARGEST),
        ):
            self._socket.setsockopt(option, value)
        self._guard = None if keys is None else keys.guard(self._socket)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._close_socket()
            raise ConfigurationError(f"endpoint {endpoint!r} cannot be used ({error}).") from error
        self._retry, self._epoch = retry, uuid.uuid4().hex
        self.state: State = "RUNNING"
        self.dropped, self.duplicates = Counter[str](), 0
        self._engines: dict[bytes, _Engine] = {}
        self._strangers: dict[bytes, float] = {}
        self._clients: dict[bytes, set[str]] = {}
        self._pending: dict[str, _RoutedRequest] = {}
        # By client and its own id; those that ended are remembered for a while.
        self._numbers: dict[tuple[bytes, str], str] = {}
        self._done: OrderedDict[tuple[bytes, str], None] = OrderedDict()
        self._waiting: deque[str] = deque()
        self._controls: deque[tuple[bytes, Control]] = deque()
        self._steps: deque[Header] = deque()
        self._awaited: dict[bytes, int] = {}
        # The weights that all engines have, by epoch and place; and those that they are told to read.
        self._weights = self._next_weights = (0, "")
        self._updated_in: State = "PAUSED"
        self._refusal: Fault | None = None
        self._draining = False
        self._count = 0
        self._closed = False

    @property
    def engines(self) -> int:
        """Number of engines."""
        return len(self._engines)

    def close(self) -> None:
        """Let :meth:`run` end soon, as if the process were gone. May be called in any thread."""
        self._closed = True

    def run(self) -> None:
        """Serve until all engines have acknowledged ``STOP``."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        checked = time.monotonic()
        try:
            while self.state != "STOPPED" and not self._closed:
                emptied = not poller.poll(int(BEAT * 400)) or self._drain()
                # Signs that lie in the queue count: this process may itself have waited for a core.
                if emptied and (now := time.monotonic()) - checked > BEAT:
                    checked = now
                    for engine in [*self._engines.values()]:
                        if now - engine.seen > SILENCE and engine.identity in self._engines:
                            self._lose(engine)
        finally:
            self._close_socket()

    def _close_socket(self) -> None:
        self._socket.close()
        if self._guard is not None:
            self._guard.stop()
            self._socket.context.term()

    def _drain(self) -> bool:
        """Handle what has come, for a while; return whether it is all."""
        for _ in range(1000):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            try:
                (frame,) = frames
                message = decode_for_coordinator(frame)
            except (ValueError, msgspec.MsgspecError, RecursionError):
                self.dropped["malformed"] += 1
                continue
            self._handle(identity, message)
        return False

    def _handle(self, identity: bytes, message: Frame) -> None:
        engine = self._engines.get(identity)
        if isinstance(message, Hello):
            self._join(identity, message)
        elif isinstance(message, FROM_ENGINES):
            if engine is None:
                self.dropped["unknown engine"] += 1
                # Once: it says hello after each.
                if time.monotonic() - self._strangers.get(identity, -SILENCE) >= SILENCE:
                    if len(self._strangers) >= REMEMBERED:
                        self._strangers.clear()
                    self._strangers[identity] = time.monotonic()
                    self._send(identity, Rejoin())
            elif message.epoch != engine.epoch:
                self.dropped["older epoch"] += 1
            else:
                engine.seen = time.monotonic()
                if isinstance(message, EngineReply):
                    self._reply(engine, message.outputs, message.weights_epoch)
                elif isinstance(message, Heartbeat):
                    engine.status = message.status or engine.status
                elif isinstance(message, Ack) and self._awaited.get(identity) == message.number:
                    del self._awaited[identity]
                    self._refusal = self._refusal or message.error
                    self._advance()
        elif engine is not None:
            self.dropped["client's message from an engine"] += 1
        elif isinstance(message, Connect):
            engines = {each.name: each.status for each in self._engines.values()}
            self._send(identity, ConnectAck(self._epoch, self.state, engines))
        elif isinstance(message, SubmitRequest):
            self._submit(identity, message.request)
        elif isinstance(message, AbortRequest):
            if (number := self._numbers.get((identity, message.id))) is not None:
                self._abort(number)
        elif isinstance(message, Control):
            self._controls.append((identity, message))
            self._advance()

    def _send(self, identity: bytes, message: Frame) -> bool:
        """Send a message; return whether its receiver is there."""
        try:
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Gone, or so slow that ten thousand messages wait for it.
            log.debug("%s: %s", identity, error)
            return False
        return True

    # Requests

    def _submit(self, client: bytes, request: RequestFields) -> None:
        key = client, request.id
        if key in self._numbers or key in self._done:
            self.duplicates += 1
            return
        self._count += 1
        number = str(self._count)  # engines drop those of an earlier coordinator
        seed = random.getrandbits(62) if request.seed is None else request.seed
        self._pending[number] = _RoutedRequest(client, request, seed, [*request.generated])
        self._numbers[key] = number
        self._clients.setdefault(client, set()).add(number)
        self._waiting.append(number)
        self._dispatch()

    def _dispatch(self) -> None:
        """Send requests that wait to engines."""
        while self._waiting and self._engines and not self._draining:
            number = self._waiting.popleft()
            if (pending := self._pending.get(number)) is None:
                continue
            request = pending.request
            pieces = _pieces(request.prompt)
            engine = self._choose(pieces)
            engine.take(number, pending, pieces)
            if not self._send(
                engine.identity, SubmitRequest(request, engine.epoch, number, pending.seed, pending.generated)
            ):
                self._lose(engine)

    def _choose(self, pieces: Sequence[int]) -> _Engine:
        """Return the engine for a prompt; of equals the one that had the fewest requests."""
        return min(self._engines.values(), key=lambda each: (each.load - each.shared(pieces), each.total, each.order))

    def _reply(self, engine: _Engine, outputs: Sequence[Output], weights_epoch: int) -> None:
        """Send outputs to their clients, in one frame for each."""
        replies: dict[bytes, list[Output]] = {}
        for output in outputs:
            if (pending := engine.requests.get(output.id)) is None:
                continue  # it was aborted
            request = pending.request
            pending.generated += output.tokens
            pending.load += len(output.tokens)
            engine.load += len(output.tokens)
            ended = output.reason is not None or output.error is not None
            number, output.id = output.id, request.id
            if request.prompt_log_probs:
                # Elsewhere the tokens so far would be part of the prompt: the request would run again as a whole.
                pending.held.append(output)
            if ended or not pending.held:
                found = _joined(pending.held) if pending.held else output
                replies.setdefault(pending.client, []).append(found)
            if ended:
                self._end(number)
        for client, several in replies.items():
            if not self._send(client, Reply(several, weights_epoch)):
                self._leave(client)
        if self._draining:
            self._advance()

    def _end(self, number: str) -> None:
        pending = self._pending.pop(number)
        if pending.engine is not None:
            pending.engine.drop(number)
        key = pending.client, pending.request.id
        del self._numbers[key]
        self._done[key] = None
        if len(self._done) > REMEMBERED:
            self._done.popitem(last=False)
        numbers = self._clients.get(pending.client, set())
        numbers.discard(number)
        if not numbers:
            self._clients.pop(pending.client, None)

    def _abort(self, number: str) -> None:
        engine = self._pending[number].engine
        self._end(number)
        if engine is not None:
            self._send(engine.identity, AbortRequest(number))
        if self._draining:
            self._advance()

    def _leave(self, client: bytes) -> None:
        """A client is gone: its blocks are for others."""
        for number in self._clients.pop(client, set()).copy():
            self._abort(number)

    # Engines

    def _join(self, identity: bytes, hello: Hello) -> None:
        self._strangers.pop(identity, None)
        if (older := self._engines.get(identity)) is not None:
            self._lose(older)
        self._engines[identity] = _Engine(identity, hello.name, hello.group, hello.epoch, time.monotonic(), self._count)
        updating = self.state == "UPDATING"
        for header in ENTERED.get(self._updated_in if updating else self.state, ()):
            self._tell(identity, header, awaited=self.state.endswith("ING") and self.state != "RUNNING")
        behind = []
        if hello.weights_epoch > self._weights[0]:
            # This coordinator has come after them.
            self._weights = hello.weights_epoch, hello.weights
            behind = [other for other in self._engines if other != identity]
        if updating or hello.weights_epoch < self._weights[0]:
            behind = [identity]
        for other in behind:
            self._tell(other, "UPDATE_WEIGHTS", awaited=updating)
        # Last, as to the others: those that share experts check and read together.
        if self._steps and self._steps[0] == "CHECK_WEIGHTS":
            self._tell(identity, "CHECK_WEIGHTS", awaited=True)
        self._advance()
        self._dispatch()

    def _lose(self, engine: _Engine) -> None:
        """An engine is gone, and with it those that share experts with it, which come again. Their requests go on
        elsewhere, from the tokens that they have.
        """
        engines = [each for each in self._engines.values() if each is engine or each.group == engine.group != ""]
        lost = [number for each in engines for number in self._take_out(each)]
        # In front of younger ones, in their order.
        self._waiting.extendleft(reversed([number for number in lost if number in self._pending]))
        self._advance()
        self._dispatch()

    def _take_out(self, engine: _Engine) -> list[str]:
        """Return the requests that an engine had."""
        log.warning("engine %s is gone, with %d requests", engine.name, len(engine.requests))
        del self._engines[engine.identity]
        self._awaited.pop(engine.identity, None)
        lost = [*engine.requests]
        for number in lost:
            pending = engine.requests[number]
            engine.drop(number)
            if pending.held:
                pending.held.clear()
                pending.generated.clear()
            if not self._retry:
                error = ("", "the engine of the request is gone; send it again.")
                self._send(pending.client, Reply([Output(pending.request.id, error=error)]))
                self._end(number)
        return lost

    # States

    def _tell(self, identity: bytes, header: Header, *, awaited: bool) -> None:
        self._count += 1
        epoch, weights = self._next_weights if self.state == "UPDATING" or header == "CHECK_WEIGHTS" else self._weights
        command = Command(header, self._count, self._engines[identity].epoch, weights, epoch)
        if self._send(identity, command) and awaited:
            self._awaited[identity] = self._count

    def _advance(self) -> None:
        """Enter the state that all engines have acknowledged, and go on with what clients want."""
        while not self._awaited and self.state != "STOPPED":
            if self._steps:
                if self._steps[0] == "CHECK_WEIGHTS" and not self._engines:
                    return  # one must have read them first: those that come are told
                self._enter(self._steps.popleft())
                if self._steps:
                    self._begin(self._steps[0])
                else:
                    self._answer()
            elif self._controls and self._may_begin(self._controls[0][1]):
                if self._refusal is None:
                    self._steps.extend(STEPS.get((self._controls[0][1].header, self.state), ()))
                if self._steps:
                    self._begin(self._steps[0])
                else:
                    self._answer()
            else:
                return
        if self.state == "STOPPED":
            for client, control in self._controls:
                self._send(client, ControlAck(control.ticket, self.state))
            for pending in self._pending.values():
                error = ("", "the engines have stopped.")
                self._send(pending.client, Reply([Output(pending.request.id, error=error)]))

    def _may_begin(self, control: Control) -> bool:
        """Return whether a client can have now what it wants: new weights may wait for engines, and for requests."""
        if control.header != "UPDATE_WEIGHTS":
            return True
        if control.wait and any(engine.requests for engine in self._engines.values()):
            if self.state != "RUNNING":
                text = "in_flight is 'wait', and requests wait for a resume; resume, or choose 'keep'."
                self._refusal = "configuration", text
                return True
            self._draining = True
            return False
        return bool(self._engines)

    def _begin(self, header: Header) -> None:
        if header == "CHECK_WEIGHTS":
            self._next_weights = self._weights[0] + 1, self._controls[0][1].weights
        elif header == "UPDATE_WEIGHTS":
            self._updated_in, self.state = self.state, "UPDATING"
        else:
            self.state = DURING[header][0]
        for identity in [*self._engines]:
            self._tell(identity, header, awaited=True)

    def _enter(self, header: Header) -> None:
        """All engines have acknowledged."""
        if header == "UPDATE_WEIGHTS":
            self.state, self._weights = self._updated_in, self._next_weights
        elif header != "CHECK_WEIGHTS":
            self.state = DURING[header][1]
        elif self._refusal is not None:
            self._steps.clear()

    def _answer(self) -> None:
        """Tell a client that all engines have done what it wanted, or why not."""
        client, control = self._controls.popleft()
        error, self._refusal, self._draining = self._refusal, None, False
        self._send(client, ControlAck(control.ticket, self.state, self._weights[0], error))
        self._dispatch()


def _joined(outputs: Sequence[Output]) -> Output:
    """Return several outputs of a request as one."""
    return msgspec.structs.replace(
        outputs[-1],
        text="".join(each.text for each in outputs),
        tokens=[token for each in outputs for token in each.tokens],
        log_probs=_all([each.log_probs for each in outputs]),
        top_log_probs=_all([each.top_log_probs for each in outputs]),
        prompt_log_probs=_all([each.prompt_log_probs for each in outputs]),
        cached_tokens=max(each.cached_tokens for each in outputs),
    )


def _all(parts: Sequence[list[T] | None]) -> list[T] | None:
    found = [part for part in parts if part is not None]
    return [each for part in found for each in part] if found else None


def coordinate() -> None:
    """Be the coordinator, in a process of its own."""
    settings = settings_of()
    coordinator = DataParallelInferenceCoordinator(settings["endpoint"])
    say(settings, state=coordinator.state)
    coordinator.run()
