"""Launchers start the processes of ``devices=N``: they re-run the script, fork in notebooks, or start nothing.

Under torchrun and SLURM the processes run already. We then only check that there are ``devices x num_nodes``. In all
cases, :mod:`megalight.strategies.preflight` runs before processes start.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.queues import SimpleQueue
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megalight import checkpoint
from megalight.errors import ConfigurationError, LayoutError
from megalight.strategies import orphans, preflight
from megalight.strategies._lightning import (
    IS_INTERACTIVE,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    WorkerOutput,
)
from megalight.strategies.checkpoints.resuming import newest_for_last
from megalight.strategies.checkpoints.whole import load_weights
from megalight.strategies.mesh_strategy import HandedBack, MeshStrategy

GRACE_SECONDS = 1.0
"""How long other ranks may run after rank 0 has failed and shown its error. It is enough to end by themselves, and too
short to repeat the error. Without rank 0 they cannot finish anything."""


SETTLE_SECONDS = 0.5
"""How long a killed process may still seem to run, although its connections are closed already."""


class ScriptLauncher(SubprocessScriptLauncher):
    """Re-runs the command for every other local rank. With one process, torchrun or SLURM, it starts nothing."""

    def __init__(self, strategy: MeshStrategy) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        """Notebooks cannot be re-run, but a single process needs no start."""
        return self._alone

    @property
    def _alone(self) -> bool:
        started = self.cluster_environment.creates_processes_externally
        return not started and self.num_processes * self.num_nodes == 1

    def launch(self, function: Any, *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Run the checks, start the other local ranks unless they run already, and call ``function``."""
        # Before any process starts: an error is then shown once, and nothing has to be ended.
        preflight.check(self._strategy, trainer, function, *args, **kwargs)
        if self._alone:
            with newest_for_last(trainer):
                return function(*args, **kwargs)
        # Another process has started this one. If that was rank 0, it may be killed and leave this one alone.
        if self.cluster_environment.creates_processes_externally:
            orphans.watch()
        else:
            orphans.announce()
        try:
            with newest_for_last(trainer):
                return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException as error:
            if self.procs:
                first = self._strategy.node_rank * self.num_processes + 1
                for rank, name in killed(self.procs, SETTLE_SECONDS):
                    error.add_note(f"(rank {first + rank} was killed by {name})")
                # Not now: the error is shown first, and other ranks get the time to end by themselves.
                atexit.register(end, self.procs, GRACE_SECONDS)
            raise


def killed(processes: list[subprocess.Popen[Any]], settle: float) -> Iterator[tuple[int, str]]:
    """Yield index and signal name of each process that a signal ended. Wait at most ``settle`` seconds in all."""
    deadline = time.monotonic() + settle
    for place, process in enumerate(processes):
        with suppress(subprocess.TimeoutExpired):
            # a negative code is the number of the signal
            if (code := process.wait(max(0.0, deadline - time.monotonic()))) < 0:
                yield place, signal.Signals(-code).name


def end(processes: list[subprocess.Popen[Any]], grace: float) -> None:
    """Wait ``grace`` seconds for processes to end, then kill the others, which may hang in a collective."""
    deadline = time.monotonic() + grace
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


class Terminated:
    """Stands for the results of workers that SIGTERM ended."""


class WorkerLauncher(MultiProcessingLauncher):
    """Runs ranks as worker processes and returns their results to this process: weights, metrics, step counters."""

    _strategy: MeshStrategy

    def launch(self, function: Any, *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Run the checks, start one worker per rank, and take over their results at the end."""
        preflight.check(self._strategy, trainer, function, *args, **kwargs)
        if trainer is not None:
            _ = trainer.log_dir  # chosen here, so that this process knows the folder in which its workers write
        try:
            with newest_for_last(trainer):
                return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:
            # An interrupt may end the wait and reach no worker. They would train on, and keep the next run's port.
            self._end()

    def _end(self) -> None:
        """Wait a little for workers to end, then kill the others."""
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in self.procs:
            worker.join(max(0.0, deadline - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join()

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        """Run one rank. If SIGTERM ends it, tell the main process, which waits for a result."""
        self._strategy.handed_back = None  # by the workers of an earlier fit, to the main process
        try:
            super()._wrapping_function(process_idx, *args, **kwargs)
        except SIGTERMException:
            if process_idx == 0:
                results = next(value for value in (*args, *kwargs.values()) if isinstance(value, SimpleQueue))
                results.put(Terminated())
            raise

    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        folder = None
        # weights return by a checkpoint: it makes the whole model from the shards of all ranks
        if trainer.state.fn == TrainerFn.FITTING:
            # One folder for all workers, made by rank 0 and known to the others.
            parent = self._strategy.broadcast(
                tempfile.mkdtemp(prefix="megalight-") if self._strategy.is_global_zero else ""
            )
            folder = os.path.join(parent, "results.ckpt")
            trainer.save_checkpoint(folder, weights_only=True)
        if self._strategy.local_rank != 0:
            return None
        return WorkerOutput(None, folder, trainer.state, results, self.get_extra_results(trainer))

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return metrics and the state of each ModelCheckpoint, as bytes: memory of tensors ends with the worker."""
        buffer = io.BytesIO()
        # As bytes: tensors in shared memory vanish with the worker.
        torch.save([callback.state_dict() for callback in _savers(trainer)], buffer)
        return {**super().get_extra_results(trainer), "savers": buffer.getvalue()}

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """Put metrics and states of the worker into this process's trainer."""
        super().update_main_process_results(trainer, extra)
        states = torch.load(io.BytesIO(extra["savers"]), weights_only=True)
        for callback, state in zip(_savers(trainer), states, strict=True):
            callback.dirpath = state["dirpath"]  # if none was given, the worker has chosen one
            callback.load_state_dict(state)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        if isinstance(worker_output, Terminated):
            raise SIGTERMException("SIGTERM ended the processes of this run, so it has no results.")
        if worker_output.weights_path is not None:
            # Into a whole module, as this process has the model of one device.
            load_weights(trainer.lightning_module, worker_output.weights_path)
            saved = checkpoint.open(worker_output.weights_path)
            trainer.fit_loop.load_state_dict(saved.common["loops"]["fit_loop"])
            files = {name: saved.file(name) for name in saved.files}
            self._strategy.handed_back = HandedBack(trainer.lightning_module, files)
            saved.release()
            checkpoint.remove(worker_output.weights_path)
            os.rmdir(os.path.dirname(worker_output.weights_path))
        trainer.state = worker_output.trainer_state
        self.update_main_process_results(trainer, worker_output.extra)


def _savers(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def launcher(strategy: MeshStrategy, start_method: str) -> Any:
    """Make the launcher for a start method.

    Raises:
        ConfigurationError: the start method cannot work here.
        LayoutError: torchrun, SLURM or another launcher did not start ``devices x num_nodes`` processes.
    """
    assert strategy.cluster_environment is not None
    if start_method not in ("auto", "popen", "fork", "spawn"):
        raise ConfigurationError(f"start_method={start_method!r}; choose auto, popen, fork or spawn.")
    expected = strategy.num_processes * strategy.num_nodes
    external = strategy.cluster_environment.creates_processes_externally
    if external:
        _check_started(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
    if start_method == "auto":
        start_method = "fork" if IS_INTERACTIVE else "popen"
    if IS_INTERACTIVE and start_method != "fork" and not external and expected > 1:
        raise ConfigurationError(
            f"start_method={start_method!r} starts {expected} processes that import the script again, and a notebook "
            "is none. Leave start_method out, which forks here, or run a script."
        )
    if start_method == "popen" or external or expected == 1:
        return ScriptLauncher(strategy)
    if strategy.num_nodes > 1:
        raise ConfigurationError(
            f"start_method={start_method!r} hands results back on this machine, but num_nodes={strategy.num_nodes}. "
            "Use start_method='popen', torchrun or srun."
        )
    if start_method == "fork" and sys.platform == "win32":
        raise ConfigurationError("start_method='fork' does not exist on Windows; use 'spawn'.")
    return WorkerLauncher(strategy, start_method=start_method)  # type: ignore[arg-type]


def _check_started(environment: ClusterEnvironment, devices: int, num_nodes: int) -> None:
    expected = devices * num_nodes
    if isinstance(environment, LightningEnvironment):  # its world size is not known yet: we set it later
        found = int(os.environ.get("WORLD_SIZE", expected))
    else:
        found = environment.world_size()
    if found != expected:
        raise LayoutError(
            f"{found} processes were started, but Trainer(devices={devices}, num_nodes={num_nodes}) asks for "
            f"{expected}. Make both the same: start {devices} on each node (torchrun --nproc-per-node {devices}, "
            f"srun --ntasks-per-node {devices}), or set devices={max(1, found // num_nodes)}."
        )
