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
from dataclasses import asdict
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist

from megalight.errors import CheckpointError, ConfigurationError, DataError, LayoutError, MegalightError
from megalight.evaluation import Continuation, LogLikelihood, log_likelihoods
from megalight.inference import DynamicEngine, ParallelGPT, TextGenerator
from megalight.inference.grammar import Grammar, GrammarCompiler, GrammarSource
from megalight.inference.weights import LoadedWeights, NewWeights
from megalight.parallel.mesh import ParallelMesh, end_at_exit
from megalight.serving.engine_loop import KEPT_GRAMMARS, EngineOptions
from megalight.serving.processes import end_process, settings_of, start_process

HOST = "127.0.0.1"
LOST_SECONDS = 2
"""Time after which a rank tells that it has lost the others."""


def as_settings(path: str | os.PathLike[str], options: EngineOptions, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a model is, the sizes of its engine, and how its weights are read, as values of JSON."""
    plain = {name: value if value is None else str(value) for name, value in weights.items() if name != "dtype"}
    dtype = weights.get("dtype")
    plain["dtype"] = None if dtype is None else str(dtype).removeprefix("torch.")
    return {"path": str(path), "options": asdict(options), "weights": plain}


def from_settings(settings: Mapping[str, Any]) -> tuple[str, EngineOptions, dict[str, Any]]:
    """Return what :func:`as_settings` was given."""
    weights = dict(settings["weights"])
    weights["dtype"] = weights["dtype"] and getattr(torch, weights["dtype"])
    return settings["path"], EngineOptions(**settings["options"]), weights


class RankProcesses:
    """The processes of all ranks of a model but the first, which is this one.

    Args:
        path: where all ranks read the model.
        size: number of ranks, the first included.
        device: cpu or cuda. Each rank has a GPU of its own.
        options: sizes of the engine.
        weights: see :meth:`TextGenerator.from_checkpoint`.

    Attributes:
        mesh: all ranks.
        device: that of this process.

    Raises:
        LayoutError: this process has ranks already, or there are too few GPUs.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        size: int,
        device: torch.device,
        options: EngineOptions,
        weights: Mapping[str, Any],
    ) -> None:
        if dist.is_initialized():
            raise LayoutError(
                f"tensor_parallel is {size}, and this process is a rank of others already; use another process."
            )
        if device.type == "cuda" and torch.cuda.device_count() < size:
            raise LayoutError(f"tensor_parallel is {size}, and there are {torch.cuda.device_count()} GPUs; use fewer.")
        store = dist.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False)
        settings = {"size": size, "port": store.port, "device": device.type, **as_settings(path, options, weights)}
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // size))
        self._closed = False
        self._processes = [
            start_process(
                "megalight.serving.rank_processes:follow",
                {**settings, "rank": rank},
                {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": threads},
            )
            for rank in range(1, size)
        ]
        atexit.register(self.close)
        try:
            self.mesh, self.device = _join(store, size, 0, device.type)
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


def _join(store: dist.Store, size: int, rank: int, kind: str) -> tuple[ParallelMesh, torch.device]:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    end_at_exit()
    return ParallelMesh(size, rank, tp=size), device


def follow() -> None:
    """Be a rank that follows the first one."""
    settings = settings_of()
    store = dist.TCPStore(HOST, settings["port"], settings["size"], is_master=False)
    mesh, device = _join(store, settings["size"], settings["rank"], settings["device"])
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
