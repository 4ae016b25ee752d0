"""Replicas of a model in processes of their own, behind a coordinator in another: what ``megalight serve`` starts.

A process that ends is started again if it was ready before. Requests of a replica that is gone go on at another one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalight import errors
from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, LayoutError, MegalightError, integer
from megalight.inference.grammar import GrammarSource
from megalight.inference.text import tokenizer_of
from megalight.inference.weights import NewWeights
from megalight.serving.async_llm import AsyncClient, InFlight, check_in_flight
from megalight.serving.engine_loop import EngineOptions, EngineOutput, EngineRequest
from megalight.serving.engine_status import EngineStatus
from megalight.serving.engine_worker import EngineWorker
from megalight.serving.inference_client import InferenceClient
from megalight.serving.processes import close_input, end_process, freeze_objects, say, settings_of, start_process
from megalight.serving.rank_processes import HOST, ReplicaRanks, as_settings, from_settings, replicas_sharing_experts
from megalight.serving.served_model import ModelText, ServedModel

log = logging.getLogger(__name__)
WATCH_SECONDS = 0.05
"""Time between two looks whether processes are there."""


class ReplicaProcesses:
    """The processes of a coordinator and of its engines.

    Args:
        path: where all of them read the model.
        tensor_parallel: number of processes of each.
        expert_parallel: number of processes that share the experts: those of a replica, or of several.
        device: None: a GPU for each process if there is one; ``cuda:1``: from this one on.
        weights: see :meth:`TextGenerator.from_checkpoint`.

    Attributes:
        text: what requests are made of, except for the tokenizer.

    Raises:
        LayoutError: there are too few GPUs, or a degree does not fit the others.
        MegalightError: what loading the model raises.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        replicas: int = 1,
        tensor_parallel: int = 1,
        expert_parallel: int = 1,
        device: str | torch.device | None = None,
        options: EngineOptions | None = None,
        **weights: Any,
    ) -> None:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        environments = _environments(integer("replicas", replicas), integer("tensor_parallel", tensor_parallel), where)
        together = replicas_sharing_experts(replicas, tensor_parallel, expert_parallel)
        self._folder = Path(tempfile.mkdtemp(prefix="megalight-"))
        self.endpoint = f"ipc://{self._folder}/coordinator"
        settings = {
            "endpoint": self.endpoint,
            "device": where.type,
            **as_settings(path, options or EngineOptions(), weights),
        }
        self._failed: Callable[[BaseException], None] | None = None
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        coordinator = _Process("megalight.serving.coordinator:coordinate", {"endpoint": self.endpoint}, {})
        engines = [
            _Process("megalight.serving.replicas:be_replica", {**settings, "name": str(number)}, environment)
            for number, environment in enumerate(environments)
        ]
        self._processes = [coordinator, *engines]
        self._groups = [_Group([coordinator])]
        for first in range(0, replicas, together):
            sharing = engines[first : first + together]
            self._groups.append(
                _Group(sharing, ReplicaRanks(tensor_parallel=tensor_parallel, expert_parallel=expert_parallel))
            )
        try:
            for group in self._groups:
                group.start()
            _, *found = _ready(self._processes)
        except BaseException:
            self.close()
            raise
        self.text = found[0]
        for group in self._groups:
            threading.Thread(target=self._attend, args=(group,), daemon=True).start()

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
        _end(self._processes)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _attend(self, group: _Group) -> None:
        """Start processes again each time one of them ends, until they fail to become ready."""
        while True:
            while all(each.process.poll() is None for each in group.processes):
                if self._closed.wait(WATCH_SECONDS):
                    return
            with self._lock:
                if self._closed.is_set():
                    return
                for each in group.processes:
                    if (code := each.process.poll()) is not None:
                        log.warning("%s has ended with code %s, and is started again", each.name, code)
                # Those with which it shares experts wait for it, in the midst of a pass.
                _end(group.processes)
                group.start()
            try:
                _ready(group.processes)
            except MegalightError as error:
                with self._lock:
                    if self._closed.is_set():
                        return
                    for each in group.processes:
                        each.lost = True
                    coordinator, *replicas = self._processes
                    if coordinator.lost or all(each.lost for each in replicas):
                        self._failure = error
                log.error("%s is not started again: %s", ", ".join(each.name for each in group.processes), error)
                if self._failure is not None and self._failed is not None:
                    self._failed(error)
                return


class _Group:
    """Processes that begin and end together: the coordinator, or replicas that share experts."""

    def __init__(self, processes: Sequence[_Process], ranks: ReplicaRanks | None = None) -> None:
        self.processes, self._ranks = processes, ranks

    def start(self) -> None:
        """Start all."""
        if self._ranks is None:
            self.processes[0].start()
            return
        ranks = self._ranks
        if len(self.processes) > 1:
            world = ranks.tensor_parallel * len(self.processes)
            # They find each other by this process, which outlives them.
            self._store = dist.TCPStore(HOST, 0, world, is_master=True, wait_for_workers=False)
            ranks = replace(ranks, world=world, port=self._store.port)
        for place, process in enumerate(self.processes):
            process.start(ranks=asdict(replace(ranks, first=place * ranks.tensor_parallel)))


class _Process:
    """A process that tells when it is ready, or why it cannot be."""

    def __init__(self, function: str, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._function, self._settings, self._environment = function, settings, environment
        self.name = f"replica {settings['name']}" if "name" in settings else "the coordinator"
        self.lost = False
        self.started: subprocess.Popen[str] | None = None

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self.started is not None
        return self.started

    def start(self, **settings: Any) -> None:
        self._read, write = os.pipe()
        try:
            self.started = start_process(
                self._function, {**self._settings, **settings, "ready": write}, self._environment, passed=[write]
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


def _ready(processes: Sequence[_Process]) -> list[dict[str, Any]]:
    """Wait until all are ready; return what they say. If one cannot be, all end.

    Raises:
        MegalightError: see :meth:`_Process.ready`.
    """
    with ThreadPoolExecutor(len(processes)) as readers:
        found = [readers.submit(process.ready) for process in processes]
        try:
            for each in as_completed(found):
                each.result()
        except BaseException:
            _end(processes)
            raise
    return [each.result() for each in found]


def _end(processes: Sequence[_Process]) -> None:
    """End processes, at once: none sees that another one is gone."""
    started = [each.started for each in processes if each.started is not None]
    for process in started:
        close_input(process)
    for process in started:
        end_process(process)


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
    ranks = ReplicaRanks(**settings["ranks"])
    try:
        served = ServedModel.from_checkpoint(
            path,
            tensor_parallel=ranks.tensor_parallel,
            replica=ranks if ranks.expert_parallel > 1 else None,
            device=settings["device"],
            options=options,
            **weights,
        )
        loop = served.loop
        served.prepare_template()
    except MegalightError as error:
        say(settings, error=type(error).__name__, message=str(error))
        sys.exit(1)

    def failed(error: BaseException) -> None:
        log.error("%s", error)
        os._exit(1)  # the engine may wait for the rank in a collective

    if served.ranks is not None:
        served.ranks.watch(failed)
    freeze_objects()
    say(
        settings,
        ends=sorted(served.ends),
        start=served.start,
        vocab_size=served.vocab_size,
        max_sequence_length=served.max_sequence_length,
        num_blocks=served.num_blocks,
    )
    try:
        group = str(ranks.port) if loop.engine.shares_experts else None
        asyncio.run(EngineWorker(loop, settings["endpoint"], name=settings["name"], group=group).run())
    finally:
        served.close()


class ReplicatedLLM(AsyncClient):
    """Completes requests that come at any time, by several replicas in processes of their own.

    Args:
        path: see :class:`LLM`.
        replicas: number of engines.
        tensor_parallel: number of processes, and GPUs, of each.
        expert_parallel: number of processes that share the experts: those of a replica, or of several.
        device: None: a GPU for each process if there is one.
        options: sizes of each engine.
        weights: ``tokenizer``, ``dtype``, ``base``, ``keys``, ``adapter``: see :meth:`TextGenerator.from_checkpoint`.

    Raises:
        LayoutError: there are too few GPUs, or a degree does not fit the others.
        CheckpointError, DataError, ConfigurationError: see :meth:`TextGenerator.from_checkpoint`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        replicas: int = 1,
        tensor_parallel: int = 1,
        expert_parallel: int = 1,
        device: str | torch.device | None = None,
        options: EngineOptions | None = None,
        **weights: Any,
    ) -> None:
        # All processes must find the same one.
        path = latest_checkpoint(path)
        tokenizer = weights.get("tokenizer")
        words = Tokenizer.load(tokenizer) if tokenizer else tokenizer_of(path)
        self._replicas = ReplicaProcesses(
            path,
            replicas=replicas,
            tensor_parallel=tensor_parallel,
            expert_parallel=expert_parallel,
            device=device,
            options=options,
            **weights,
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
