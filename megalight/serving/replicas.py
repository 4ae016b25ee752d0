"""Replicas of a model in processes of their own, behind a coordinator in another: what ``megalight serve`` starts.

A process that ends is started again if it was ready before. Requests of a replica that is gone go on at another one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megalight import errors
from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, LayoutError, MegalightError, integer
from megalight.inference.grammar import GrammarSource
from megalight.inference.text import tokenizer_of
from megalight.inference.weights import NewWeights
from megalight.serving.engine_loop import EngineOptions, EngineOutput, EngineRequest
from megalight.serving.engine_status import EngineStatus
from megalight.serving.engine_worker import EngineWorker
from megalight.serving.inference_client import InferenceClient
from megalight.serving.llm import AsyncClient, InFlight, ModelText, ServedModel, check_in_flight
from megalight.serving.processes import end_process, say, settings_of, start_process
from megalight.serving.rank_processes import as_settings, from_settings

log = logging.getLogger(__name__)


class ReplicaProcesses:
    """The processes of a coordinator and of its engines.

    Args:
        path: where all of them read the model.
        replicas: number of engines.
        tensor_parallel: number of processes of each.
        device: None: a GPU for each process if there is one; ``cuda:1``: from this one on.
        options: sizes of each engine.
        weights: see :meth:`TextGenerator.from_checkpoint`.

    Attributes:
        endpoint: where the coordinator listens.
        text: what requests are made of, except for the tokenizer.

    Raises:
        LayoutError: there are too few GPUs.
        MegalightError: what loading the model raises.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        replicas: int = 1,
        tensor_parallel: int = 1,
        device: str | torch.device | None = None,
        options: EngineOptions | None = None,
        **weights: Any,
    ) -> None:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        environments = _environments(integer("replicas", replicas), integer("tensor_parallel", tensor_parallel), where)
        self._folder = Path(tempfile.mkdtemp(prefix="megalight-"))
        self.endpoint = f"ipc://{self._folder}/coordinator"
        settings = {
            "endpoint": self.endpoint,
            "tensor_parallel": tensor_parallel,
            "device": where.type,
            **as_settings(path, options or EngineOptions(), weights),
        }
        self._failed: Callable[[BaseException], None] | None = None
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._processes = [_Process("megalight.serving.coordinator:coordinate", {"endpoint": self.endpoint}, {})]
        self._processes += [
            _Process("megalight.serving.replicas:be_replica", {**settings, "name": str(number)}, environment)
            for number, environment in enumerate(environments)
        ]
        try:
            _, *found = [each.ready() for each in self._processes]
        except BaseException:
            self.close()
            raise
        self.text = found[0]
        for process in self._processes:
            threading.Thread(target=self._attend, args=(process,), daemon=True).start()

    def watch(self, failed: Callable[[BaseException], None]) -> None:
        """Let ``failed`` be called, in another thread, when no replica is left."""
        with self._lock:
            self._failed = failed
        if self._failure is not None:
            failed(self._failure)

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._closed.set()
        for process in self._processes:
            end_process(process.process)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _attend(self, process: _Process) -> None:
        """Start a process again each time it ends, until it fails to become ready."""
        while True:
            code = process.process.wait()
            with self._lock:
                if self._closed.is_set():
                    return
                log.warning("%s has ended with code %s, and is started again", process.name, code)
                end_process(process.process)
                process.start()
            try:
                process.ready()
            except MegalightError as error:
                with self._lock:
                    if self._closed.is_set():
                        return
                    process.lost = True
                    coordinator, *replicas = self._processes
                    if coordinator.lost or all(each.lost for each in replicas):
                        self._failure = error
                log.error("%s is not started again: %s", process.name, error)
                if self._failure is not None and self._failed is not None:
                    self._failed(error)
                return


class _Process:
    """A process that tells when it is ready, or why it cannot be."""

    def __init__(self, function: str, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._function, self._settings, self._environment = function, settings, environment
        self.name = f"replica {settings['name']}" if "name" in settings else "the coordinator"
        self.lost = False
        self.start()

    def start(self) -> None:
        self._read, write = os.pipe()
        try:
            self.process = start_process(
                self._function, {**self._settings, "ready": write}, self._environment, passed=[write]
            )
        finally:
            os.close(write)

    def ready(self) -> dict[str, Any]:
        """Wait until it is ready; return what it says then.

        Raises:
            MegalightError: it says why it cannot be, or has ended.
        """
        with os.fdopen(self._read) as said:
            line = said.readline()
        if not line:
            raise MegalightError(f"{self.name} has ended with code {self.process.wait()}; its output says why.")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise getattr(errors, found["error"], MegalightError)(found["message"])
        return found


def _environments(replicas: int, tensor_parallel: int, device: torch.device) -> list[dict[str, str]]:
    """Return variables by which each replica sees its own GPUs.

    Raises:
        LayoutError: there are too few.
    """
    if device.type != "cuda":
        return [{}] * replicas
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    gpus = gpus[device.index or 0 :]
    if len(gpus) < replicas * tensor_parallel:
        raise LayoutError(
            f"{replicas} replicas on {tensor_parallel} GPUs each need {replicas * tensor_parallel}, and there are "
            f"{len(gpus)}; lower --replicas or --tensor-parallel."
        )
    places = range(0, replicas * tensor_parallel, tensor_parallel)
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + tensor_parallel])} for first in places]


def be_replica() -> None:
    """Be an engine, in a process of its own, which starts those of its other ranks."""
    settings = settings_of()
    path, options, weights = from_settings(settings)
    try:
        served = ServedModel.from_checkpoint(
            path,
            tensor_parallel=settings["tensor_parallel"],
            device=settings["device"],
            options=options,
            **weights,
        )
        loop = served.loop
    except MegalightError as error:
        say(settings, error=type(error).__name__, message=str(error))
        sys.exit(1)

    def failed(error: BaseException) -> None:
        log.error("%s", error)
        os._exit(1)  # the engine may wait for the rank in a collective

    if served.ranks is not None:
        served.ranks.watch(failed)
    say(
        settings,
        ends=sorted(served.ends),
        start=served.start,
        vocab_size=served.vocab_size,
        max_sequence_length=served.max_sequence_length,
        num_blocks=served.num_blocks,
    )
    try:
        asyncio.run(EngineWorker(loop, settings["endpoint"], name=settings["name"]).run())
    finally:
        served.close()


class ReplicatedLLM(AsyncClient):
    """Completes requests that come at any time, by several replicas in processes of their own.

    Args:
        path: see :class:`LLM`.
        replicas: number of engines.
        tensor_parallel: number of processes, and GPUs, of each.
        device: None: a GPU for each process if there is one.
        options: sizes of each engine.
        weights: ``tokenizer``, ``dtype``, ``base``, ``keys``, ``adapter``: see :meth:`TextGenerator.from_checkpoint`.

    Raises:
        LayoutError: there are too few GPUs.
        CheckpointError, DataError, ConfigurationError: see :meth:`TextGenerator.from_checkpoint`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        replicas: int = 1,
        tensor_parallel: int = 1,
        device: str | torch.device | None = None,
        options: EngineOptions | None = None,
        **weights: Any,
    ) -> None:
        # All processes must find the same one.
        path = latest_checkpoint(path)
        tokenizer = weights.get("tokenizer")
        words = Tokenizer.load(tokenizer) if tokenizer else tokenizer_of(path)
        self._replicas = ReplicaProcesses(
            path, replicas=replicas, tensor_parallel=tensor_parallel, device=device, options=options, **weights
        )
        text = self._replicas.text
        super().__init__(
            ModelText(
                tokenizer=words,
                ends=frozenset(text["ends"]),
                start=tuple(text["start"]),
                vocab_size=text["vocab_size"],
                max_sequence_length=text["max_sequence_length"],
                num_blocks=text["num_blocks"],
            )
        )
        self._client = InferenceClient(self._replicas.endpoint)
        self._closed = False

    def subscribe(self, requests: Sequence[EngineRequest]) -> AsyncIterator[list[EngineOutput]]:
        """See :class:`AsyncClient`."""
        if self._closed or self.failure is not None:
            raise MegalightError("the engines have stopped; start them again.") from self.failure
        return self._started().subscribe(requests)

    async def prepare(self, grammar: GrammarSource) -> None:
        """Do nothing: an engine compiles a grammar with its first request."""

    @property
    def unfinished(self) -> int:
        """Number of requests that run or wait."""
        return self._client.unfinished

    @property
    def engines(self) -> Mapping[str, EngineStatus]:
        """What each engine has, and has done, by its name."""
        return self._started().engines

    async def pause(self) -> None:
        """Stop all engines after their step. Requests wait."""
        await self._started().pause()

    async def suspend(self) -> None:
        """Give the memory of all caches back. Requests keep their tokens, and wait."""
        await self._started().suspend()

    async def resume(self) -> None:
        """Go on with all requests: after a suspend from their first token."""
        await self._started().resume()

    async def update_weights(self, weights: NewWeights, *, in_flight: InFlight = "keep") -> int:
        """See :class:`AsyncClient`. The weights are in a folder."""
        check_in_flight(in_flight)
        if isinstance(weights, Mapping):
            raise ConfigurationError("the engines are other processes, which read new weights from a folder; save one.")
        # Once: all engines must read the same.
        path = await asyncio.to_thread(latest_checkpoint, weights)
        return await self._started().update_weights(str(path), wait=in_flight == "wait")

    async def shutdown(self) -> None:
        """End all processes. Streams that have not ended raise a ``MegalightError``."""
        self._closed = True
        await self._client.close()
        await asyncio.to_thread(self._replicas.close)

    def _started(self) -> InferenceClient:
        if not self._client.started:
            self._client.start()
            events = asyncio.get_running_loop()

            def failed(error: BaseException) -> None:
                events.call_soon_threadsafe(self._fail, error)

            self._replicas.watch(failed)
        return self._client

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.failed.set()
        self._client.lose("the engines have stopped, and the request is lost; send it again.")
