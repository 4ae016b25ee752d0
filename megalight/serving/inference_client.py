"""The client of a coordinator, for ``asyncio``."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import zmq
import zmq.asyncio

from megalight.errors import ConfigurationError, MegalightError
from megalight.serving.coordinator import BEAT, SILENCE
from megalight.serving.curve_keys import CurveKeys, check_endpoint
from megalight.serving.engine_loop import EngineOutput, EngineRequest, OutputQueue
from megalight.serving.engine_status import EngineStatus
from megalight.serving.messages import (
    LARGEST,
    AbortRequest,
    Connect,
    Control,
    ControlAck,
    Frame,
    Header,
    Output,
    Reply,
    RequestFields,
    State,
    SubmitRequest,
    decode_for_client,
    encode,
    error_of,
)


@dataclass
class _Stream:
    """A request that has not ended, with its tokens so far."""

    request: EngineRequest
    outputs: OutputQueue
    generated: list[int] = field(default_factory=list)


class InferenceClient:
    """Sends requests to the engines of a coordinator. Use it as an async context manager.

    Args:
        endpoint: where the coordinator listens.
        keys: the coordinator's, for ``tcp://``.
        retry: whether requests wait for a coordinator that is gone, and go on with the next one from the tokens that
            they have. Otherwise they raise within two seconds.

    Attributes:
        state: what all engines did when the coordinator was last heard of; None: it was not yet.
        engines: name -> what the engine has, and has done, at that time.
    """

    def __init__(self, endpoint: str, *, keys: CurveKeys | None = None, retry: bool = True) -> None:
        check_endpoint(endpoint, keys)
        self._endpoint, self._keys, self._retry = endpoint, keys, retry
        self._streams: dict[str, _Stream] = {}
        self._tickets: dict[int, tuple[Control, asyncio.Future[ControlAck]]] = {}
        self._numbers = itertools.count()
        self._epoch: str | None = None
        self._heard = 0.0
        self.state: State | None = None
        self.engines: dict[str, EngineStatus] = {}
        self._connected = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> InferenceClient:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def started(self) -> bool:
        """Whether it has been started."""
        return bool(self._tasks)

    def start(self) -> None:
        """Connect, in the event loop that runs."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        if self._keys is not None:
            self._keys.credentials(self._socket)
        self._socket.connect(self._endpoint)
        self._heard = time.monotonic()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]

    async def close(self) -> None:
        """End. Requests that have not ended raise."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.started:
            self._socket.close()
        self.lose("the client is closed.")

    @property
    def unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    async def submit(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Yield what each step gives a request, until it ends; see :meth:`subscribe`."""
        async with aclosing(self.subscribe([request])) as parts:  # type: ignore[type-var]
            async for outputs in parts:
                for output in outputs:
                    yield output

    async def subscribe(self, requests: Sequence[EngineRequest]) -> AsyncIterator[list[EngineOutput]]:
        """Yield what steps have given several requests meanwhile, until all have ended.

        Whoever leaves the iteration aborts them.

        Raises:
            DataError, ConfigurationError: an engine refuses one of the requests.
            MegalightError: they are lost.
        """
        for request in requests:
            if request.id in self._streams:
                raise ConfigurationError(f"a request {request.id!r} runs already; give each an id of its own.")
        outputs = OutputQueue(requests)
        for request in requests:
            self._streams[request.id] = _Stream(request, outputs)
            # A coordinator that is not there yet gets it when it is.
            if self._epoch is not None:
                self._send(SubmitRequest(RequestFields.of(request)))
        try:
            while outputs.unfinished:
                yield await outputs.get()
        finally:
            for request in requests:
                if self._streams.pop(request.id, None) is not None:
                    self._send(AbortRequest(request.id))

    async def pause(self) -> State:
        """Let all engines stop after their step; return the state when all have."""
        return await self._control("PAUSE")

    async def unpause(self) -> State:
        """Let engines that are paused go on."""
        return await self._control("UNPAUSE")

    async def suspend(self) -> State:
        """Let all engines stop, and give the memory of their caches back."""
        return await self._control("SUSPEND")

    async def resume(self) -> State:
        """Let engines that are paused or suspended go on."""
        return await self._control("RESUME")

    async def stop(self) -> State:
        """End all engines and the coordinator."""
        return await self._control("STOP")

    async def update_weights(self, weights: str, *, wait: bool = False) -> int:
        """Let all engines read other weights; return how often that was done. They stop meanwhile.

        Args:
            weights: a checkpoint, or a folder of ``transformers``, where all engines find it now and later.
            wait: whether requests that run end with the old weights first. Otherwise they go on with the new ones.

        Raises:
            CheckpointError, ConfigurationError: an engine refuses the weights, and all keep theirs; or requests wait
                for a resume.
        """
        ack = await self._acknowledged("UPDATE_WEIGHTS", weights, wait)
        if ack.error is not None:
            raise error_of(ack.error)
        return ack.weights_epoch

    async def _control(self, header: Header) -> State:
        return (await self._acknowledged(header)).state

    async def _acknowledged(self, header: Header, weights: str = "", wait: bool = False) -> ControlAck:
        ticket, done = next(self._numbers), asyncio.get_running_loop().create_future()
        control = Control(header, ticket, weights, wait)
        self._tickets[ticket] = control, done
        await self._connected.wait()
        self._send(control)
        try:
            found: ControlAck = await done
            return found
        finally:
            del self._tickets[ticket]

    def _send(self, message: Frame) -> None:
        if not self._socket.closed:
            self._socket.send(encode(message))

    async def _beat(self) -> None:
        while True:
            self._send(Connect())
            await asyncio.sleep(BEAT)
            if not self._retry and time.monotonic() - self._heard > SILENCE - 2 * BEAT:
                self.lose("the coordinator is gone; send the request again.")

    async def _listen(self) -> None:
        while True:
            message = decode_for_client(await self._socket.recv())
            self._heard = time.monotonic()
            if isinstance(message, Reply):
                for output in message.outputs:
                    # Nobody waits for a request that was aborted meanwhile.
                    if (stream := self._streams.get(output.id)) is None:
                        continue
                    stream.generated += output.tokens
                    found = _output_of(output, message.weights_epoch)
                    stream.outputs.put(found)
                    if found.last:
                        del self._streams[output.id]
            elif isinstance(message, ControlAck):
                if message.ticket in self._tickets and not (done := self._tickets[message.ticket][1]).done():
                    done.set_result(message)
            else:
                self.state, self.engines = message.state, message.engines
                if message.epoch != self._epoch:
                    self._meet(message.epoch)

    def _meet(self, epoch: str) -> None:
        """Tell a coordinator that is new all that is wanted."""
        self._epoch = epoch
        self._connected.set()
        for stream in self._streams.values():
            self._send(SubmitRequest(RequestFields.of(replace(stream.request, generated=stream.generated))))
        for control, _ in self._tickets.values():
            self._send(control)

    def lose(self, message: str) -> None:
        """Let all requests that have not ended raise."""
        for stream in self._streams.values():
            stream.outputs.put(EngineOutput(id=stream.request.id, error=MegalightError(message)))
        self._streams.clear()


def _output_of(output: Output, weights_epoch: int) -> EngineOutput:
    return EngineOutput(
        id=output.id,
        text=output.text,
        tokens=output.tokens,
        reason=output.reason,
        log_probs=output.log_probs,
        top_log_probs=output.top_log_probs,
        prompt_log_probs=output.prompt_log_probs,
        cached_tokens=output.cached_tokens,
        weights_epoch=weights_epoch,
        error=None if output.error is None else error_of(output.error),
    )
