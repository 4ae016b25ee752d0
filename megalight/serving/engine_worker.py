"""An engine that a coordinator drives: it takes requests from a socket, and sends one frame for each step."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
import zlib
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from megalight.errors import ConfigurationError, MegalightError
from megalight.inference import SamplingParams
from megalight.inference.grammar import GrammarSource
from megalight.serving.coordinator import BEAT
from megalight.serving.curve_keys import CurveKeys, check_endpoint
from megalight.serving.engine_loop import END, Abort, EngineLoop, EngineOutput, EngineRequest, EngineThread
from megalight.serving.messages import (
    LARGEST,
    AbortRequest,
    Ack,
    Command,
    EngineReply,
    Fault,
    Frame,
    Heartbeat,
    Hello,
    Output,
    Rejoin,
    SubmitRequest,
    decode_for_engine,
    encode,
    fault_of,
)

log = logging.getLogger(__name__)


def obey(loop: EngineLoop, told: Command, sink: Callable[[list[EngineOutput]], None]) -> None:
    """Change the state of a loop, or its weights.

    Replicas that share experts change while nothing is in flight, and read weights together; ``sink`` takes what
    passes in flight give.

    Raises:
        CheckpointError, ConfigurationError: see :meth:`EngineLoop.check_weights`.
    """
    header, weights, meet = told.header, told.weights, 0
    if header == "UPDATE_WEIGHTS" and told.weights_epoch == loop.weights_epoch:
        return  # told twice: the coordinator had lost sight of this engine
    if header in ("CHECK_WEIGHTS", "UPDATE_WEIGHTS"):
        meet = END + 1 + zlib.crc32(f"{header} {told.weights_epoch} {weights}".encode())
    if meet or header in ("PAUSE", "SUSPEND"):
        for outputs in loop.settle(meet):
            sink(outputs)
    if meet and loop.recalled:
        return
    if header == "CHECK_WEIGHTS":
        loop.check_weights(weights)
    elif header == "UPDATE_WEIGHTS":
        loop.update_weights(weights, told.weights_epoch)
    elif header == "PAUSE":
        loop.paused = True
    elif header == "UNPAUSE":
        loop.paused = False
    elif header == "SUSPEND":
        loop.engine.suspend()
    elif header == "RESUME":
        loop.engine.resume()
        loop.paused = False
    else:
        loop.abort_all()


def _request_of(message: SubmitRequest) -> EngineRequest:
    """Return the request of a message.

    Raises:
        ConfigurationError, TypeError: settings of its sampling are out of range, or unknown.
    """
    fields = message.request
    grammar = None if fields.grammar is None else GrammarSource(*fields.grammar)
    return EngineRequest(
        id=message.id,
        prompt=fields.prompt,
        max_new_tokens=fields.max_new_tokens,
        sampling_params=SamplingParams(**fields.sampling_params),
        ends=fields.ends,
        stop=fields.stop,
        seed=message.seed,
        log_probs=fields.log_probs,
        top_log_probs=fields.top_log_probs,
        prompt_log_probs=fields.prompt_log_probs,
        grammar=grammar,
        special_text=fields.special_text,
        generated=message.generated,
    )


class EngineWorker:
    """Connects an engine to a coordinator. :meth:`run` ends when the coordinator stops all engines.

    Args:
        loop: the engine's loop, which nobody else uses.
        name: the engine's name in :attr:`InferenceClient.engines`; None: a new one.
        group: a name of the replicas with which it shares experts, the same for all of them. None: it shares none.
        keys: the coordinator's, for ``tcp://``.

    Raises:
        ConfigurationError: the engine shares experts, and has no group.
    """

    def __init__(
        self,
        loop: EngineLoop,
        endpoint: str,
        *,
        name: str | None = None,
        group: str | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        check_endpoint(endpoint, keys)
        if loop.engine.shares_experts and not group:
            raise ConfigurationError("the engine shares experts with others; give all of them the same group=.")
        self._group = group or ""
        self._loop, self._endpoint, self._keys = loop, endpoint, keys
        self._identity = uuid.uuid4().bytes
        self._name = self._identity.hex()[:8] if name is None else name
        self._epochs = itertools.count(1)
        self._epoch = 0
        self._weights = ""
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Serve the coordinator.

        Raises:
            MegalightError: a step has failed.
        """
        events = asyncio.get_running_loop()
        stopped = asyncio.Event()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._identity)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        if self._keys is not None:
            self._keys.credentials(self._socket)
        self._socket.connect(self._endpoint)

        def failed(error: BaseException) -> None:
            self._failure = error
            events.call_soon_threadsafe(stopped.set)

        def sink(outputs: list[EngineOutput]) -> None:
            # The epoch is the one in which the requests came: outputs of those before are of no use.
            frame = EngineReply(self._epoch, [Output.of(output) for output in outputs], self._loop.weights_epoch)
            events.call_soon_threadsafe(self._send, frame)

        self._sink = sink
        self._thread = EngineThread(self._loop, sink, failed)
        waiting = asyncio.ensure_future(stopped.wait())
        self._arrived = asyncio.Queue[Frame]()
        tasks = [asyncio.create_task(each) for each in (self._listen(), self._follow(stopped), self._beat())]
        try:
            await asyncio.wait({*tasks, waiting}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # raises what ended it
        finally:
            waiting.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, waiting, return_exceptions=True)
            await asyncio.to_thread(self._thread.close)
            self._socket.close()
        if self._failure is not None:
            raise MegalightError(f"the engine has stopped: {self._failure}") from self._failure

    def _send(self, message: Frame) -> None:
        if not self._socket.closed:
            self._socket.send(encode(message))

    async def _beat(self) -> None:
        self._hello()
        while True:
            await asyncio.sleep(BEAT)
            self._send(Heartbeat(self._epoch, self._loop.status))

    def _hello(self) -> None:
        self._epoch = next(self._epochs)
        self._send(Hello(self._epoch, self._name, self._loop.weights_epoch, self._weights, self._group))

    async def _listen(self) -> None:
        while True:
            frame = await self._socket.recv()
            try:
                message = decode_for_engine(frame)
            except (ValueError, msgspec.MsgspecError):
                log.warning("a frame of the coordinator is malformed")
                continue
            if isinstance(message, Rejoin):
                self._loop.recalled = True
            self._arrived.put_nowait(message)

    async def _follow(self, stopped: asyncio.Event) -> None:
        while True:
            message = await self._arrived.get()
            if isinstance(message, SubmitRequest):
                # One of an older epoch has been given to another engine, or comes again in this one.
                if message.epoch == self._epoch:
                    try:
                        self._thread.submit(_request_of(message))
                    except (ConfigurationError, TypeError) as wrong:
                        refused = EngineOutput(id=message.id, error=ConfigurationError(str(wrong)))
                        self._send(EngineReply(self._epoch, [Output.of(refused)]))
            elif isinstance(message, AbortRequest):
                self._thread.submit(Abort(message.id))
            elif isinstance(message, Rejoin):
                await self._between_steps(Command("STOP", 0, 0))
                # The state of all may be another one now; the answer to the hello says so.
                await self._between_steps(Command("RESUME", 0, 0))
                self._loop.recalled = False
                self._hello()
            elif isinstance(message, Command) and message.epoch == self._epoch:
                error = await self._between_steps(message)
                if message.header == "UPDATE_WEIGHTS":
                    self._weights = message.weights
                self._send(Ack(self._epoch, message.number, error))
                if message.header == "STOP":
                    stopped.set()

    async def _between_steps(self, told: Command) -> Fault | None:
        """Do what the coordinator says; return why weights are refused. Any other error ends the engine."""
        events = asyncio.get_running_loop()
        done = events.create_future()

        def command(loop: EngineLoop) -> None:
            error = None
            try:
                obey(loop, told, self._sink)
            except MegalightError as raised:
                # After the check all others have read them, or will.
                if told.header != "CHECK_WEIGHTS":
                    raise
                error = fault_of(raised)
            events.call_soon_threadsafe(lambda: None if done.done() else done.set_result(error))

        self._thread.submit(command)
        found: Fault | None = await done
        return found
