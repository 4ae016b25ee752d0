"""Starting the processes of ``devices=N``: by re-running the script, by fork in notebooks, or not at all.

Under torchrun and SLURM the processes are there already; the script launcher then only checks that they are as many
as ``devices x num_nodes`` says.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from megalight import checkpoint
from megalight.errors import ConfigurationError, LayoutError
from megalight.strategies._lightning import (
    IS_INTERACTIVE,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    WorkerOutput,
)

if TYPE_CHECKING:
    from megalight.strategies.megatron import MegatronStrategy


class ScriptLauncher(SubprocessScriptLauncher):
    """Re-runs the command once per local rank, after checking that the number of processes is the one asked for."""

    def launch(self, function: Any, *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other local ranks unless they run already, then call ``function``.

        Raises:
            LayoutError: a launcher started another number of processes than ``devices x num_nodes``.
        """
        expected = self.num_processes * self.num_nodes
        if self.cluster_environment.creates_processes_externally:
            found = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", str(expected))))
            if found != expected:
                raise LayoutError(
                    f"the launcher started {found} processes, but Trainer(devices={self.num_processes}, "
                    f"num_nodes={self.num_nodes}) asks for {expected}. Make both the same "
                    f"(torchrun --nproc-per-node {self.num_processes}, or devices={found // max(self.num_nodes, 1)})."
                )
        return super().launch(function, *args, trainer=trainer, **kwargs)


class WorkerLauncher(MultiProcessingLauncher):
    """Runs ranks as workers of this process and hands the results back: weights, metrics, step counters."""

    _strategy: MegatronStrategy

    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        folder = None
        if trainer.state.fn == TrainerFn.FITTING:
            parent = self._strategy.broadcast(tempfile.mkdtemp(prefix="megalight-") if self._strategy.is_global_zero else "")
            folder = os.path.join(parent, "results.ckpt")
            trainer.save_checkpoint(folder, weights_only=True)
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        last = getattr(trainer.checkpoint_callback, "last_model_path", None)
        if self._strategy.local_rank != 0:
            return None
        extra = {**self.get_extra_results(trainer), "last_model_path": last}
        return WorkerOutput(best, folder, trainer.state, results, extra)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        callback = trainer.checkpoint_callback
        if callback is not None:
            callback.best_model_path = str(worker_output.best_model_path or "")  # type: ignore[attr-defined]
            callback.last_model_path = str(worker_output.extra["last_model_path"] or "")  # type: ignore[attr-defined]
        if worker_output.weights_path is not None:
            self._strategy.restore_in_parent(trainer, worker_output.weights_path)
            checkpoint.remove(worker_output.weights_path)
            os.rmdir(os.path.dirname(worker_output.weights_path))
        trainer.state = worker_output.trainer_state
        self.update_main_process_results(trainer, worker_output.extra)


def launcher(strategy: MegatronStrategy, start_method: str) -> Any:
    """The launcher for a start method.

    Raises:
        ConfigurationError: a start method that cannot work here.
    """
    assert strategy.cluster_environment is not None
    if start_method not in ("auto", "popen", "fork", "spawn"):
        raise ConfigurationError(f"start_method={start_method!r}; choose auto, popen, fork or spawn.")
    external = strategy.cluster_environment.creates_processes_externally
    if not external and strategy.num_processes * strategy.num_nodes == 1:
        return None
    if start_method == "auto":
        start_method = "fork" if IS_INTERACTIVE and not external else "popen"
    if start_method == "popen" or external:
        return ScriptLauncher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
    if start_method == "fork" and sys.platform == "win32":
        raise ConfigurationError("start_method='fork' does not exist on Windows; use 'spawn'.")
    return WorkerLauncher(strategy, start_method=start_method)  # type: ignore[arg-type]
