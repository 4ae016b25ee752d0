"""Generate in Python, for requests that come at any time: :class:`AsyncLLM`. It needs no Lightning."""

from __future__ import annotations

import asyncio
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.errors import ConfigurationError, MegalightError
from megalight.inference import SamplingParams
from megalight.inference.grammar import GrammarSource
from megalight.inference.text import NEW_TOKENS
from megalight.inference.weights import NewWeights
from megalight.serving.asynchronous import QueueShutDown, get_asyncio_loop
from megalight.serving.engine_loop import (
    Abort,
    EngineLoop,
    EngineOptions,
    EngineOutput,
    EngineRequest,
    EngineThread,
    OutputQueue,
)
from megalight.serving.engine_status import EngineStatus
from megalight.serving.served_model import ModelText, Prompt, ServedModel

InFlight: TypeAlias = Literal["keep", "wait"]
"""What becomes of requests that run when weights are replaced."""
T = TypeVar("T")


def check_in_flight(in_flight: str) -> None:
    """Refuse another word than those of :data:`InFlight`.

    Raises:
        ConfigurationError: it is one.
    """
    if in_flight not in get_args(InFlight):
        raise ConfigurationError(f"in_flight is {in_flight!r}; choose 'keep' or 'wait'.")


class AsyncClient(ABC):
    """Completes requests that come at any time, by engines in this process or in others. For ``asyncio``.

    Args:
        served: what requests are made of.

    Attributes:
        served: what requests are made of.
        failed: set when nothing completes requests any more.
        failure: why.
    """

    def __init__(self, served: ModelText) -> None:
        self.served = served
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        self._ids = itertools.count()

    @abstractmethod
    def subscribe(self, requests: Sequence[EngineRequest]) -> AsyncIterator[list[EngineOutput]]:
        """Yield what steps have given several requests meanwhile, until all have ended.

        Whoever leaves the iteration aborts them.

        Raises:
            DataError, ConfigurationError: the engine refuses one of the requests.
            MegalightError: a step has failed, or :meth:`shutdown` was called.
        """

    async def submit(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Yield what each step gives a request, until it ends; see :meth:`subscribe`."""
        async with aclosing(self.subscribe([request])) as parts:  # type: ignore[type-var]
            async for outputs in parts:
                for output in outputs:
                    yield output

    @abstractmethod
    async def prepare(self, grammar: GrammarSource) -> None:
        """Compile the grammar of a request before it comes, where that spares a step a wait."""

    @property
    @abstractmethod
    def unfinished(self) -> int:
        """Number of requests that run or wait."""

    @property
    @abstractmethod
    def engines(self) -> Mapping[str, EngineStatus]:
        """What each engine has, and has done, by its name."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop after the step that runs. Requests wait."""

    @abstractmethod
    async def suspend(self) -> None:
        """Give the memory of the cache back. Requests keep their tokens, and wait."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on with all requests: after a suspend from their first token."""

    @abstractmethod
    async def update_weights(self, weights: NewWeights, *, in_flight: InFlight = "keep") -> int:
        """Replace the weights of all engines, which stop meanwhile; return how often that was done.

        Outputs say by ``weights_epoch`` which weights have given them.

        Args:
            weights: see :meth:`LLM.update_weights`. They must stay where they are until the next ones come: engines
                that start again read them.
            in_flight: ``keep``: requests that run go on with the new weights, from the tokens that they have; their
                keys and values are computed again. ``wait``: they end with the old ones first, and others wait.

        Raises:
            CheckpointError, ConfigurationError: see :meth:`LLM.update_weights`; nothing has changed. Or requests that
                run cannot end, as engines are paused or suspended.
        """

    @abstractmethod
    async def shutdown(self) -> None:
        """End after the step that runs. Streams that have not ended raise a ``MegalightError``."""

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        ends: Collection[int] = (),
        seed: int | None = None,
        log_probs: bool = False,
    ) -> AsyncIterator[EngineOutput]:
        """Yield the completion of a prompt in parts, as they come: see :meth:`LLM.generate`, and :meth:`submit`."""
        ids = self.served.ids_of(prompt)
        limit = min(NEW_TOKENS, self.served.room(ids)) if max_new_tokens is None else max_new_tokens
        request = EngineRequest(
            id=f"generate-{next(self._ids)}",
            prompt=ids,
            max_new_tokens=limit,
            sampling_params=SamplingParams.of(sampling_params),
            ends={*ends, *self.served.ends},
            stop=stop,
            seed=seed,
            log_probs=log_probs,
        )
        async for output in self.submit(request):
            yield output


class AsyncLLM(AsyncClient):
    """A model that completes prompts which come at any time, in a thread of its own. For ``asyncio``.

    The first error of a step ends it: all streams raise it, and :attr:`failed` is set.

    Args:
        path: see :class:`LLM`.
        options: those of :class:`LLM`.

    Attributes:
        served: the model.
        failed: set when a step has failed.
        failure: its error.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        sizes = {each.name: options.pop(each.name) for each in fields(EngineOptions) if each.name in options}
        served = ServedModel.from_checkpoint(path, options=EngineOptions(**sizes), **options)
        self._serve(served)

    @classmethod
    def of(cls, served: ServedModel) -> AsyncLLM:
        """Return one for a model that is loaded."""
        found = cls.__new__(cls)
        found._serve(served)
        return found

    served: ServedModel

    def _serve(self, served: ServedModel) -> None:
        super().__init__(served)
        self._streams: dict[str, OutputQueue] = {}
        self._events: asyncio.AbstractEventLoop | None = None
        self._thread: EngineThread | None = None
        self._closed = False
        # Clear while requests end with the old weights.
        self._admits, self._ended_one = asyncio.Event(), asyncio.Event()
        self._admits.set()
        self._held = 0
        self._updating = asyncio.Lock()

    async def subscribe(self, requests: Sequence[EngineRequest]) -> AsyncIterator[list[EngineOutput]]:
        """See :class:`AsyncClient`."""
        self._held += len(requests)
        try:
            await self._admits.wait()
        finally:
            self._held -= len(requests)
        self._check_open()
        for request in requests:
            if request.id in self._streams:
                raise ConfigurationError(f"a request {request.id!r} runs already; give each an id of its own.")
        thread, outputs = self._started(), OutputQueue(requests)
        for request in requests:
            self._streams[request.id] = outputs
            thread.submit(request)
        try:
            while outputs.unfinished:
                yield await outputs.get()
        except QueueShutDown:
            raise MegalightError("the engine has stopped, and the request is lost; send it again.") from self.failure
        finally:
            for request in requests:
                if self._streams.pop(request.id, None) is not None:
                    thread.submit(Abort(request.id))
                    self._ended_one.set()

    async def prepare(self, grammar: GrammarSource) -> None:
        """Compile the grammar in another thread than the engine's.

        Raises:
            ConfigurationError: it is wrong.
        """
        await asyncio.to_thread(self.served.loop.grammar, grammar)

    @property
    def unfinished(self) -> int:
        """Number of requests that run or wait."""
        return len(self._streams) + self._held

    @property
    def engines(self) -> Mapping[str, EngineStatus]:
        """What the engine has, and has done, as ``0``."""
        return {"0": self.served.loop.status}

    async def pause(self) -> None:
        """Stop after the step that runs. Requests wait."""
        await self._between_steps(lambda loop: setattr(loop, "paused", True))

    async def suspend(self) -> None:
        """Give the memory of the cache back. Requests keep their tokens, and wait."""
        await self._between_steps(lambda loop: loop.engine.suspend())

    async def resume(self) -> None:
        """Go on with all requests: after a suspend from their first token."""

        def act(loop: EngineLoop) -> None:
            loop.engine.resume()
            loop.paused = False

        await self._between_steps(act)

    async def update_weights(self, weights: NewWeights, *, in_flight: InFlight = "keep") -> int:
        """See :class:`AsyncClient`."""
        self._check_open()
        check_in_flight(in_flight)
        if not isinstance(weights, Mapping):
            # Once: all ranks must read the same.
            weights = await asyncio.to_thread(latest_checkpoint, weights)
        async with self._updating:
            try:
                if in_flight == "wait":
                    await self._between_steps(lambda loop: loop.check_weights(weights))
                    await self._drain()
                return await self._between_steps(lambda loop: loop.update_weights(weights))
            finally:
                self._admits.set()

    async def _drain(self) -> None:
        """Admit no more requests, and wait until those that run have ended."""
        loop = self.served.loop
        if self._streams and (loop.paused or loop.engine.suspended):
            raise ConfigurationError("in_flight is 'wait', and requests wait for a resume; resume, or choose 'keep'.")
        self._admits.clear()
        while self._streams:
            self._ended_one.clear()
            await self._ended_one.wait()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed or self.failure is not None:
            raise MegalightError("the engine has stopped; start it again.") from self.failure

    async def shutdown(self) -> None:
        """End after the step that runs. Streams that have not ended raise a ``MegalightError``."""
        self._closed = True
        if self._thread is not None:
            await asyncio.to_thread(self._thread.close)
        await asyncio.to_thread(self.served.close)
        self._end_streams()

    async def _between_steps(self, act: Callable[[EngineLoop], T]) -> T:
        thread, done = self._started(), get_asyncio_loop().create_future()

        def command(loop: EngineLoop) -> None:
            try:
                found = act(loop)
            except BaseException as error:
                events.call_soon_threadsafe(done.set_exception, error)
                if not isinstance(error, MegalightError):
                    raise
            else:
                events.call_soon_threadsafe(done.set_result, found)

        events = get_asyncio_loop()
        thread.submit(command)
        # Shielded: nobody sets a future that was cancelled.
        answer: T = await asyncio.shield(done)
        return answer

    def _started(self) -> EngineThread:
        if self._thread is None:
            self._events = get_asyncio_loop()
            self._thread = EngineThread(self.served.loop, self._arrived, self._ended)
            if self.served.ranks is not None:
                self.served.ranks.watch(self._ended)
        return self._thread

    def _arrived(self, outputs: list[EngineOutput]) -> None:
        assert self._events is not None
        self._events.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            # Nobody waits for a request that was aborted meanwhile.
            if (stream := self._streams.get(output.id)) is not None:
                stream.put(output)
                if output.last:
                    del self._streams[output.id]
                    self._ended_one.set()

    def _ended(self, error: BaseException) -> None:
        assert self._events is not None
        self._events.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.failed.set()
        self._end_streams()

    def _end_streams(self) -> None:
        for stream in self._streams.values():
            stream.shutdown()
        self._streams.clear()
        self._ended_one.set()
