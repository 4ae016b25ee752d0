"""Processes for the other ranks of a model that is split over several: this process starts them, and leads them.

The first rank makes all calls to its engine, and the others follow. They end when it closes them, or is gone.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist

from megalight.errors import CheckpointError, ConfigurationError, DataError, LayoutError, MegalightError, integer
from megalight.evaluation import Continuation, LogLikelihood, log_likelihoods
from megalight.inference import DynamicEngine, ParallelGPT, TextGenerator
from megalight.inference.grammar import Grammar, GrammarCompiler, GrammarSource
from megalight.inference.weights import LoadedWeights, NewWeights
from megalight.parallel.mesh import ParallelMesh, end_at_exit
from megalight.serving.engine_loop import KEPT_GRAMMARS, LOST_SECONDS, EngineOptions
from megalight.serving.processes import end_process, freeze_objects, settings_of, start_process

HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class ReplicaRanks:
    """The ranks of a replica, among those of all replicas with which it shares experts.

    Attributes:
        tensor_parallel: number of ranks that share every layer: those of the replica.
        expert_parallel: number of ranks that share the experts.
        world: number of all ranks; None: the replica's.
        port: where they find each other on this machine; None: the replica's first rank chooses.
    """

    tensor_parallel: int
    expert_parallel: int = 1
    first: int = 0
    world: int | None = None
    port: int | None = None

    def mesh(self, rank: int) -> ParallelMesh:
        """Return the mesh of a rank.

        Raises:
            LayoutError: the degrees do not divide the number of ranks.
        """
        world = self.world or self.tensor_parallel
        return ParallelMesh(world, rank, tp=self.tensor_parallel, ep=self.expert_parallel)


def as_settings(path: str | os.PathLike[str], options: EngineOptions, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a model is, the sizes of its engine, and how its weights are read, as values of JSON."""
    plain = {name: value if value is None else str(value) for name, value in weights.items() if name != "dtype"}
    dtype = weights.get("dtype")
    plain["dtype"] = None if dtype is None else str(dtype).removeprefix("torch.")
    sizes = {**asdict(options), "draft": options.draft and os.fspath(options.draft)}
    return {"path": str(path), "options": sizes, "weights": plain}


def from_settings(settings: Mapping[str, Any]) -> tuple[str, EngineOptions, dict[str, Any]]:
    """Return what :func:`as_settings` was given."""
    weights = dict(settings["weights"])
    weights["dtype"] = weights["dtype"] and getattr(torch, weights["dtype"])
    return settings["path"], EngineOptions(**settings["options"]), weights


def replicas_sharing_experts(replicas: int, tensor_parallel: int, expert_parallel: int) -> int:
    """Return how many replicas share experts with each other.

    Raises:
        LayoutError: the degrees do not fit.
    """
    if integer("expert_parallel", expert_parallel) % tensor_parallel and tensor_parallel % expert_parallel:
        raise LayoutError(
            f"--expert-parallel {expert_parallel} and --tensor-parallel {tensor_parallel} do not divide each other; "
            f"experts are shared by ranks of a replica, or by whole replicas. Set --expert-parallel {tensor_parallel}."
        )
    together = max(1, expert_parallel // tensor_parallel)
    if replicas % together:
        raise LayoutError(
            f"--expert-parallel {expert_parallel} needs {together} replicas, or a multiple, of --tensor-parallel "
            f"{tensor_parallel}, and there are {replicas}; set --replicas {together}."
        )
    return together


class RankProcesses:
    """The processes of all ranks of a replica but the first, which is this one.

    Args:
        path: where all ranks read the model.
        ranks: the ranks, the first included.
        device: cpu or cuda. Each rank has a GPU of its own.
        weights: see :meth:`TextGenerator.from_checkpoint`.

    Raises:
        LayoutError: this process has ranks already, or there are too few GPUs.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        ranks: ReplicaRanks,
        device: torch.device,
        options: EngineOptions,
        weights: Mapping[str, Any],
    ) -> None:
        size, first, world = ranks.tensor_parallel, ranks.first, ranks.world or ranks.tensor_parallel
        if dist.is_initialized():
            raise LayoutError(
                f"tensor_parallel is {size}, and this process is a rank of others already; use another process."
            )
        if device.type == "cuda" and torch.cuda.device_count() < size:
            raise LayoutError(f"tensor_parallel is {size}, and there are {torch.cuda.device_count()} GPUs; use fewer.")
        if ranks.port is None:
            store = dist.TCPStore(HOST, 0, world, is_master=True, wait_for_workers=False)
        else:
            store = dist.TCPStore(HOST, ranks.port, world, is_master=False)
        ranks = replace(ranks, port=store.port, world=world)
        settings = {"ranks": asdict(ranks), "device": device.type, **as_settings(path, options, weights)}
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // size))
        self._closed = False
        self._processes = [
            start_process(
                "megalight.serving.rank_processes:follow",
                {**settings, "rank": rank},
                {"RANK": str(rank), "LOCAL_RANK": str(rank - first), "OMP_NUM_THREADS": threads},
            )
            for rank in range(first + 1, first + size)
        ]
        atexit.register(self.close)
        try:
            self.mesh, self.device = _join(store, ranks, first, device.type)
        except BaseException:
            self.close()
            raise

    def watch(self, failed: Callable[[BaseException], None]) -> None:
        """Let ``failed`` be called, in another thread, if a rank ends before :meth:`close`."""

        def wait(rank: int, process: subprocess.Popen[str]) -> None:
            code = process.wait()
            if not self._closed:
                failed(MegalightError(f"rank {rank} of the model has ended with code {code}."))

        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=wait, args=(rank, process), daemon=True).start()

    def score(self, engine: DynamicEngine, continuations: Sequence[Continuation]) -> list[LogLikelihood]:
        """Score continuations with all ranks."""
        _lead(engine, "score", [*continuations])
        return log_likelihoods(engine.model, continuations)

    def close(self) -> None:
        """End the processes."""
        self._closed = True
        atexit.unregister(self.close)
        for process in self._processes:
            end_process(process)


class LedWeights(LoadedWeights):
    """The weights of a model whose other ranks follow the first one."""

    def __init__(self, weights: LoadedWeights, engine: DynamicEngine) -> None:
        self._weights, self._engine = weights, engine

    def check(self, weights: NewWeights) -> None:
        """See :class:`LoadedWeights`."""
        _lead(self._engine, "check", _place(weights))
        self._weights.check(weights)

    def read(self, weights: NewWeights) -> None:
        """See :class:`LoadedWeights`."""
        _lead(self._engine, "read", _place(weights))
        self._weights.read(weights)


def _place(weights: NewWeights) -> str:
    if isinstance(weights, Mapping):
        raise ConfigurationError("the model is divided over processes, which read new weights from a folder; save one.")
    return os.fspath(weights)


def _lead(engine: DynamicEngine, *job: Any) -> None:
    """Let the other ranks do something beside the engine, as the first one does now."""
    assert isinstance(engine.model, ParallelGPT)
    engine.close()
    engine.model.call(job)


def _join(store: dist.Store, ranks: ReplicaRanks, rank: int, kind: str) -> tuple[ParallelMesh, torch.device]:
    mesh = ranks.mesh(rank)
    # Each replica sees its own GPUs.
    device = torch.device(kind, rank - ranks.first) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=mesh.world_size)
    end_at_exit()
    return mesh, device


def follow() -> None:
    """Be a rank that follows the first one."""
    settings = settings_of()
    ranks = ReplicaRanks(**settings["ranks"])
    assert ranks.port is not None
    store = dist.TCPStore(HOST, ranks.port, ranks.world, is_master=False)
    mesh, device = _join(store, ranks, settings["rank"], settings["device"])
    path, options, weights = from_settings(settings)
    try:
        found = TextGenerator.from_checkpoint(path, device=device, mesh=mesh, **weights)
        engine = options.engine(found.model, first_rank_only=True)
    except MegalightError:
        sys.exit(1)  # the first rank tells it
    assert isinstance(found.model, ParallelGPT) and found.weights is not None
    jobs: dict[str, Callable[[Any], Any]] = {
        "score": lambda continuations: log_likelihoods(found.model, continuations),
        "check": found.weights.check,
        "read": found.weights.read,
    }
    vocabulary = found.model.config.vocab_size

    @cache
    def compiler(ends: frozenset[int]) -> GrammarCompiler:
        return GrammarCompiler(found.tokenizer, vocabulary, ends)

    @lru_cache(KEPT_GRAMMARS)
    def grammar(source: GrammarSource, ends: frozenset[int]) -> Grammar:
        return compiler(ends).compile(source)

    freeze_objects()
    try:
        while True:
            engine.follow(grammar)
            name, argument = found.model.call(("", None))
            with suppress(DataError, CheckpointError, ConfigurationError):  # the first rank raises it, too
                jobs[name](argument)
    except RuntimeError:
        # If the first rank is gone, this process ends meanwhile: connections may close before the standard input.
        time.sleep(LOST_SECONDS)
        raise
