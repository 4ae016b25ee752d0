"""Launchers start the processes of ``devices=N``: they re-run the script, fork in notebooks, or start nothing.

Under torchrun and SLURM the processes run already. We then only check that there are ``devices x num_nodes``. In all
cases, :func:`check` runs before processes start, and ranks end when rank 0 is killed (:func:`watch`).

The processes meet at rank 0 and make the process group; a rank that waits says for what.
"""

from __future__ import annotations

import atexit
import datetime
import errno
import inspect
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megalight import checkpoint
from megalight.data.sampler import GlobalBatchSampler
from megalight.errors import ConfigurationError, LayoutError
from megalight.models.module import MegalightModule
from megalight.parallel.apply import check_split
from megalight.parallel.mesh import check_max_ctas, end_at_exit
from megalight.parallel.transform import apply_transforms
from megalight.strategies._lightning import (
    IS_INTERACTIVE,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    WorkerOutput,
)
from megalight.strategies.checkpoints.resuming import latest_for_last, load_weights, open_saved
from megalight.strategies.mesh_strategy import MeshStrategy, ModelPart, WorkerResult
from megalight.strategies.setup import check_plain
from megalight.strategies.unsharded_optimizer import check_early
from megalight.strategies.user_module import layout_for
from megalight.strategies.validation import check_lazy, check_pruning, check_tuners
from megalight.types.packed_sequences import check_length

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
        check(self._strategy, trainer, function, *args, **kwargs)
        if self._alone:
            with latest_for_last(trainer):
                return function(*args, **kwargs)
        # Another process has started this one. If that was rank 0, it may be killed and leave this one alone.
        if self.cluster_environment.creates_processes_externally:
            watch()
        else:
            announce()
        try:
            with latest_for_last(trainer):
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
        check(self._strategy, trainer, function, *args, **kwargs)
        if trainer is not None:
            _ = trainer.log_dir  # chosen here, so that this process knows the folder in which its workers write
        try:
            with latest_for_last(trainer):
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
            self._strategy.handed_back = WorkerResult(trainer.lightning_module, files)
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


STARTED_BY = "MEGALIGHT_STARTED_BY"
"""Set for child processes: the id of rank 0's process, a colon, and the path of the mark."""


PERIOD_SECONDS = 0.5
"""Time between two looks at the parent."""


ORPHANS_GRACE_SECONDS = 3.0
"""Time for an orphan to end by itself and to show its own error."""


def announce() -> None:
    """On rank 0, before it starts children: leave a mark that is removed at a normal exit and stays after a kill.

    A killed rank 0 cannot end its children. On GPUs they would wait for ever: an NCCL collective without rank 0
    never ends, and the store that its watchdog asks is gone.
    """
    if STARTED_BY in os.environ and os.environ[STARTED_BY].startswith(f"{os.getpid()}:"):
        return
    handle, path = tempfile.mkstemp(prefix="megalight-rank0-")
    os.close(handle)
    os.environ[STARTED_BY] = f"{os.getpid()}:{path}"
    atexit.register(Path(path).unlink, missing_ok=True)


def watch() -> None:
    """On a child of rank 0: end this process soon after rank 0 was killed. Other processes are not watched."""
    parent, _, mark = os.environ.get(STARTED_BY, "").partition(":")
    if parent == str(os.getppid()) and not any(thread.name == STARTED_BY for thread in threading.enumerate()):
        threading.Thread(target=_watch, args=(int(parent), Path(mark)), name=STARTED_BY, daemon=True).start()


def _watch(parent: int, mark: Path) -> None:
    # A process whose parent dies gets another parent.
    while os.getppid() == parent:
        time.sleep(PERIOD_SECONDS)
    if not mark.exists():
        return  # rank 0 ended by itself, with or without an error; its launcher ends the others where needed
    time.sleep(ORPHANS_GRACE_SECONDS)
    with suppress(OSError):
        mark.unlink()
    with suppress(OSError):
        sys.stderr.write(f"Rank 0 (process {parent}) was killed; process {os.getpid()}, which it started, ends too.\n")
        sys.stderr.flush()
    os._exit(1)


# Checks before any process or process group starts


NAMED = ("best", "last", "hpc")
"""Values of ``ckpt_path`` that Lightning resolves later."""


def check(
    strategy: MeshStrategy, trainer: pl.Trainer | None, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Check the arguments of the trainer's ``function`` before it is called.

    Modules can have their own checks: ``check_data(datamodule)`` and ``check_checkpoint(entries)``. A callback with a
    method ``attach(module)`` can change the model that the module will build.

    Raises:
        ConfigurationError: processes cannot meet at MASTER_PORT; there is a limit on SMs, but communication is
            not sent with NCCL; no plan says how to split the module; or a callback would prune layers that it cannot
            see whole.
        LayoutError: the model or the batch does not divide over the ranks.
        DataError: the data does not fit the model or the division of sequences.
        CheckpointError: the checkpoint is incomplete, has an unknown format, or is of another model.
    """
    check_address(strategy)
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    module: Any = given.get("model") or strategy.lightning_module
    data = next((value for value in given.values() if isinstance(value, pl.LightningDataModule)), None)
    # First, because a callback may change the model that is checked below.
    for callback in getattr(trainer, "callbacks", ()):
        if hasattr(callback, "attach"):
            callback.attach(module)
    max_ctas = strategy.data_parallel.advanced.max_ctas
    check_max_ctas("data_parallel.advanced.max_ctas", max_ctas, backend_of(strategy))
    check_max_ctas("TensorOptions.max_ctas", strategy.layout.tensor.max_ctas, backend_of(strategy))
    ranks = strategy.num_nodes * strategy.num_processes
    parts = strategy.parts(ranks)
    fitting = trainer if trainer is not None and trainer.state.fn == TrainerFn.FITTING else None
    if fitting is not None:
        check_tuners(fitting, module, data, ranks)
    for part in parts:
        strategy.check_module(module, part.mesh)
        if fitting is not None:
            check_early(strategy, fitting, module, part.mesh)
            check_pruning(fitting, module, part.mesh)
        if ranks > 1:
            if isinstance(module, MegalightModule):
                _split_on_meta(strategy, module, part)
            else:
                check_plain(strategy, module, part.mesh)
    mesh = parts[-1].mesh
    size = getattr(data, "global_batch_size", None)
    if isinstance(size, int):
        GlobalBatchSampler(size, size, num_replicas=mesh.dp)  # refuses what does not divide
    length = getattr(data, "sequence_length", None)
    if isinstance(length, int) and mesh.cp > 1:
        check_length(length, mesh.cp)
    if data is not None and hasattr(module, "check_data"):
        module.check_data(data)
    path = given.get("ckpt_path")
    if not path and isinstance(module, MegalightModule) and module.model is None:
        module.initial_weights()  # opens the folder, which checks that it exists, is complete and of this family
    if path and path not in NAMED:
        entries = open_saved(str(path), module).common
        if hasattr(module, "check_checkpoint"):
            module.check_checkpoint(entries)


def _split_on_meta(strategy: MeshStrategy, module: Any, part: ModelPart) -> None:
    """Build the model without memory, and split a part of it like its first rank.

    This runs the module's ``build_model`` once more than training. We cannot keep this model: ``setup`` hooks, which
    may prepare what ``build_model`` needs, have not run yet, and with ``start_method="fork"`` or ``"spawn"`` another
    process trains. On the meta device the extra run needs no memory and little time.
    """
    built_elsewhere = type(module).configure_model is not MegalightModule.configure_model
    if built_elsewhere or module.model is not None:
        return
    # The state of the generator stays, so that the later real build draws the same values
    # as without this check.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = module.build_model()
        check_lazy(model)
        apply_transforms(model, module.transforms)
        module.check_model(model)
        model = part.take(model)
        layout = layout_for(module, model, part.layout)
        check_split(model, part.mesh, layout, strategy.precision.dtype, strategy.root_device)
        strategy.precision.check(model)
        for frozen in module.frozen_models().values():
            frozen.check(part.mesh, strategy.precision.dtype, strategy.root_device)


log = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long a process waits for others until it says so. It says so again after twice the time.

On a slow machine, processes that start together need half a minute to import torch.
"""


def check_address(strategy: MeshStrategy) -> None:
    """Refuse an address at which the processes of a run cannot meet, before this process starts the others.

    Raises:
        ConfigurationError: MASTER_PORT is no port, is in use, or is not set although there are several machines.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    alone = strategy.num_nodes * strategy.num_processes == 1
    if alone or environment.creates_processes_externally or dist.is_initialized():
        return
    given = os.environ.get("MASTER_PORT")
    if given is not None and not (given.isdigit() and 0 < int(given) < 2**16):
        raise ConfigurationError(f"MASTER_PORT={given} is no port; set a number from 1 to 65535, or leave it out.")
    if strategy.num_nodes > 1 and given is None and isinstance(environment, LightningEnvironment):
        raise ConfigurationError(
            f"num_nodes={strategy.num_nodes}, and MASTER_PORT is not set: {_several(strategy, 'PORT')} For a single "
            "machine, leave num_nodes out."
        )
    if given is not None and strategy.node_rank == 0:
        try:
            socket.create_server(("", int(given))).close()
        except OSError as error:
            raise _unusable(int(given), error.errno) from error


def meet(strategy: MeshStrategy, address: str, port: int, timeout_seconds: float) -> dist.Store:
    """Wait until all processes are here.

    Args:
        address: where rank 0 is.
        timeout_seconds: how long to wait.

    Returns:
        what to keep until the process group is made: on rank 0 it serves the others.

    Raises:
        ConfigurationError: another program has the port.
        LayoutError: there are not as many processes in time.
    """
    began, tell_after, pause = time.monotonic(), PATIENCE_SECONDS, 0.005
    store: dist.TCPStore | None = None
    found = 0
    while found < strategy.world_size:
        if store is None:
            store, found = _arrive(strategy, address, port)
        else:
            # Not a wait inside torch, which an interrupt would not end.
            time.sleep(pause := min(2 * pause, 0.5))
            found = store.add("here", 0)
        waited = time.monotonic() - began
        if found < strategy.world_size and waited >= min(tell_after, timeout_seconds):
            text = _missing(strategy, f"{address}:{port}", found, waited)
            if waited >= timeout_seconds:
                raise LayoutError(text)
            if strategy.global_rank == 0 or (store is None and strategy.local_rank == 0):
                log.warning(text)
            tell_after *= 2
    assert store is not None
    return store


def _arrive(strategy: MeshStrategy, address: str, port: int) -> tuple[dist.TCPStore | None, int]:
    """Return the store, and how many processes have come to it; None and 0 while rank 0 does not answer."""
    # torchrun's agent has one already. Otherwise torch makes one on rank 0, and this is the same.
    serves = strategy.global_rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    if not serves:
        try:  # torch would wait, and then write traces of C++
            socket.create_connection((address, port), timeout=1.0).close()
        except OSError:
            time.sleep(0.05)
            return None, 0
    timeout = datetime.timedelta(seconds=PATIENCE_SECONDS)
    try:
        store = dist.TCPStore(
            address, port, strategy.world_size, serves, timeout, wait_for_workers=False, multi_tenant=True
        )
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise _unusable(port, errno.EADDRINUSE) from error
        raise
    return store, store.add("here", 1)


def _missing(strategy: MeshStrategy, place: str, found: int, waited: float) -> str:
    here = f"{found} of {strategy.world_size} processes are here" if found else f"no rank 0 answers at {place}"
    asked = f"Trainer(devices={strategy.num_processes}, num_nodes={strategy.num_nodes})"
    text = f"{here} after {waited:.0f} seconds, and {asked} waits for all {strategy.world_size} of them. "
    if strategy.num_nodes > 1 and isinstance(strategy.cluster_environment, LightningEnvironment):
        return text + _several(strategy, place.rpartition(":")[2])
    return text + "Look for an error of another rank above, or in its own output."


def _several(strategy: MeshStrategy, port: str) -> str:
    last = strategy.num_nodes - 1
    return (
        f"Start the same command on each of the {strategy.num_nodes} machines with MASTER_ADDR=ADDRESS of the first, "
        f"MASTER_PORT={port} and NODE_RANK=0 to {last} (it is {strategy.node_rank} here), or let torchrun or SLURM "
        "start it (megalight launch writes the script)."
    )


def _unusable(port: int, code: int | None) -> ConfigurationError:
    reason = "is in use on this machine" if code == errno.EADDRINUSE else f"cannot be used: {os.strerror(code or 0)}"
    return ConfigurationError(
        f"MASTER_PORT={port} {reason}, and the processes of this run meet there. Set it to a free port, or, on a "
        "single machine, leave it out."
    )


def backend_of(strategy: MeshStrategy) -> str:
    """Return the backend of the process group, or the backend with which it will be made."""
    if dist.is_initialized():
        return str(dist.get_backend())
    return strategy.process_group_backend or ("nccl" if strategy.root_device.type == "cuda" else "gloo")


def join(strategy: MeshStrategy, timeout_seconds: float) -> None:
    """Make the process group of all ranks, unless there is one already or only one process.

    Args:
        timeout_seconds: timeout of collectives in seconds, and of the wait for all processes.

    Raises:
        ConfigurationError: another program has the port.
        LayoutError: there are not as many processes in time.
    """
    if strategy.world_size == 1 or dist.is_initialized():
        return
    assert strategy.cluster_environment is not None
    address, port = strategy.cluster_environment.main_address, strategy.cluster_environment.main_port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)  # not set for workers and SLURM tasks
    store = meet(strategy, address, port, timeout_seconds)
    dist.init_process_group(  # no device_id: with it, every rank must take part in making every group
        backend_of(strategy),
        init_method="env://",
        rank=strategy.global_rank,
        world_size=strategy.world_size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    del store  # the group has its own of the same server now
    # Threads of the group that outlive the interpreter would abort the process.
    end_at_exit()
