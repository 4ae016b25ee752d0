"""MegatronStrategy: train a one-device model with Lightning and Megatron parallelism."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Literal, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.models.module import MegalightModule
from megalight.optim.sharded import sharding_of
from megalight.parallel import degrees
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions
from megalight.parallel.expert import ExpertOptions
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import FAILED, ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline.schedules import Actions, PipelineOptions
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.random import RandomStreams
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.step import StepRunner, run_passes
from megalight.parallel.tensor.overlap.spec import TensorOptions
from megalight.strategies import _lightning, launchers, micro_batches, setup, unsharded_optimizer, validation
from megalight.strategies.checkpoints import CheckpointOptions
from megalight.strategies.checkpoints.hooks import FolderCheckpoints
from megalight.strategies.checkpoints.resuming import Resumed
from megalight.strategies.launchers import join
from megalight.strategies.step import Stepper, StepReport, clip_by_norm, clip_by_value, unscale
from megalight.strategies.user_module import defines_step, reads_weights_before_update, reads_weights_between_steps
from megalight.strategies.whole_model import shown_by, with_whole_model

log = logging.getLogger(__name__)


class MegatronStrategy(FolderCheckpoints):
    """Tensor, sequence, context, pipeline and data parallelism for any LightningModule.

    The model is written for one device. ``setup`` splits it by its plan, so that a run in any layout computes the same
    losses, gradients and weights as one device.

    Args:
        tensor_parallel: number of ranks over which each layer's weights are split.
        sequence_parallel: whether to also split the activations between these layers by tokens.
        tensor: how split layers overlap communication with matrix products.
        pipeline_parallel: number of stages over which the layers are divided.
        virtual_pipeline: number of chunks of layers per pipeline rank. Each micro-batch passes all ranks that often.
        pipeline_layout: the layers of each chunk as a string (``"Et|tt|tt|tL"``, see
            :mod:`megalight.parallel.pipeline.layout`). None: ``pipeline`` decides.
        pipeline: the schedule, and how layers are divided.
        context_parallel: number of ranks over which each sequence is divided.
        context: how attention communicates with context parallelism.
        expert_parallel: number of ranks over which experts are divided.
        expert_tensor_parallel: number of ranks over which each expert's weights are split.
        expert: how tokens get to their experts.
        recompute: activations that the backward pass computes again instead of storing them.
        micro_batch_size: samples per micro-batch. A DataLoader batch is this rank's share of one global batch, and the
            step divides it into micro-batches. None: the whole share is one micro-batch. ``auto``: as many as fit into
            the GPU, found in the first steps (:mod:`~megalight.strategies.micro_batches`).
        data_parallel: how the replicas of the model share gradients and optimizer state.
        broadcast_buffers: whether all replicas take over the buffers of the first one (running statistics of batch
            norms, say) after each step and before evaluation, as under ``DistributedDataParallel``.
        checkpoints: how checkpoints are written.
        plan: how the model is split. None: the module's own ``plan()``, or the plan registered for the model's class.
        sigterm_every_n_steps: number of steps between checks whether any rank received SIGTERM (also at each of the
            first ten), or SLURM's signal that the job will be requeued.
        process_group_backend: ``gloo`` or ``nccl``. None: decide by the device.
        timeout_seconds: timeout of collectives in seconds.
        start_method: how ``devices=N`` starts processes without torchrun or SLURM: ``popen`` re-runs the script,
            ``fork`` and ``spawn`` start workers of this process. ``auto`` means fork in notebooks, else popen.

    Attributes:
        layout: the layout that these arguments describe.
        mesh: the grid of ranks.
        parallel_model: this rank's part of the model, with the specs of its parameters.
        engine: the data-parallel engine. None outside ``fit``, and with optimizers that need whole parameters
            (:mod:`~megalight.strategies.unsharded_optimizer`).
        report: report of the last training step. None before the first.

    Logs:
        grad_norm: norm of the whole gradient before clipping, over all ranks, with clipping by norm.

    Raises:
        LayoutError: the degrees do not fit the number of processes or the model.
        ConfigurationError: options cannot be combined.
    """

    strategy_name = "megatron"

    def __init__(
        self,
        tensor_parallel: int = 1,
        sequence_parallel: bool = False,
        tensor: TensorOptions | None = None,
        pipeline_parallel: int = 1,
        virtual_pipeline: int = 1,
        pipeline_layout: str | None = None,
        pipeline: PipelineOptions | None = None,
        context_parallel: int = 1,
        context: ContextOptions | None = None,
        expert_parallel: int = 1,
        expert_tensor_parallel: int = 1,
        expert: ExpertOptions | None = None,
        recompute: RecomputeOptions | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
        data_parallel: DataParallelOptions | None = None,
        broadcast_buffers: bool = True,
        checkpoints: CheckpointOptions | None = None,
        plan: ParallelizePlan | None = None,
        sigterm_every_n_steps: int = 10,
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800,
        start_method: Literal["auto", "popen", "fork", "spawn"] = "auto",
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        # First: a mistake in the layout is found before anything of Lightning is asked.
        self.layout = Layout(
            tensor_parallel=tensor_parallel,
            sequence_parallel=sequence_parallel,
            tensor=tensor or TensorOptions(),
            context_parallel=context_parallel,
            context=context or ContextOptions(),
            expert_parallel=expert_parallel,
            expert_tensor_parallel=expert_tensor_parallel,
            expert=expert or ExpertOptions(),
            pipeline_parallel=pipeline_parallel,
            virtual_pipeline=virtual_pipeline,
            pipeline_layout=pipeline_layout,
            pipeline=pipeline or PipelineOptions(),
            recompute=recompute or RecomputeOptions(),
            data_parallel=data_parallel or DataParallelOptions(),
            plan=plan,
        )
        degrees.check_at_least_one("sigterm_every_n_steps", sigterm_every_n_steps)
        degrees.check_timeout(timeout_seconds)
        if process_group_backend is not None:
            known = torch.distributed.Backend.backend_list
            degrees.check_backend(process_group_backend, [each for each in known if each != "undefined"])
        if isinstance(micro_batch_size, int):
            degrees.check_at_least_one("micro_batch_size", micro_batch_size)
        validation.check_checkpoint_io(checkpoint_io)
        super().__init__(accelerator, parallel_devices, cluster_environment, None, precision_plugin)
        self.micro_batch_size = micro_batch_size
        self.broadcast_buffers = broadcast_buffers
        self.checkpoints = checkpoints or CheckpointOptions()
        self.sigterm_every_n_steps = sigterm_every_n_steps
        self.process_group_backend = process_group_backend
        self.timeout_seconds = timeout_seconds
        self.start_method = start_method
        self.num_nodes = 1
        self.mesh = ParallelMesh()
        self.parallel_model: ParallelModel | None = None
        self.engine: DataParallelEngine | None = None
        self.report: StepReport | None = None
        self.extra_shard_states: dict[str, list[Tensor]] = {}
        self.streams: RandomStreams | None = None
        self._stepper: Stepper | None = None
        self._setup_of: pl.LightningModule | None = None
        self._accumulating = False
        self._ended = False
        self._resumed: Resumed | None = None
        self._averages = unsharded_optimizer.BackwardAverages(None, self.mesh)
        self._sigterm: _lightning.SigtermAgreement | None = None
        self._whole_between_steps = False
        self._whole_before_update = False
        self._foreign_bar = False
        self._left_out: set[str] = set()

    @classmethod
    def of(cls, trainer: pl.Trainer) -> Self:
        """Return the strategy of a trainer. Editors and type checkers then know its attributes, such as ``report``.

        Raises:
            ConfigurationError: the trainer has another strategy.
        """
        if not isinstance(trainer.strategy, cls):
            raise ConfigurationError(
                f"the trainer's strategy is {type(trainer.strategy).__name__}, and a {cls.__name__} is needed. "
                f"Pass Trainer(strategy={cls.__name__}(...))."
            )
        return trainer.strategy

    # ------------------------------------------------------------------ ranks and launching

    def _configure_launcher(self) -> None:
        self.grid(self.num_nodes * self.num_processes)  # refuse before a process starts
        self._launcher = launchers.launcher(self, self.start_method)

    def setup_environment(self) -> None:
        """Make the process group, the mesh and the random streams."""
        # An earlier failure in this process is over: ranks may wait for each other again.
        FAILED.clear()
        super().setup_environment()
        self.set_world_ranks()
        # The mesh asks for groups, so the process group comes first.
        join(self, self.timeout_seconds)
        # A second loop of the same Trainer keeps the mesh, and with it the process groups.
        if self.streams is None:
            self.mesh = self.grid(self.world_size, self.global_rank)
            self.streams = RandomStreams(self.mesh, self.distributed_sampler_kwargs["rank"])
        log.info("parallel layout: %s", self.description)

    # ------------------------------------------------------------------ model and optimizer

    def connect(self, model: pl.LightningModule) -> None:
        """Check module and callbacks before anything is built."""
        trainer = _lightning.trainer_of(model)
        if trainer is not None:  # without one there is nothing to check yet
            if trainer.state.fn == TrainerFn.FITTING:
                mesh = self.grid(self.num_nodes * self.num_processes)
                unsharded_optimizer.check_early(self, trainer, model, mesh)
                validation.check_pruning(trainer, model, mesh)
            validation.check_callbacks(trainer)
            if not self.divides_data:
                _lightning.keep_loaders(trainer)
        # Another module needs a split of its own. The same one continues with the split model that it has.
        if model is not self._setup_of:
            self._setup_of = None
        super().connect(model)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether checkpoints are read after :meth:`setup`: ``WeightAveraging`` writes weights when it is read."""
        # Not for StochasticWeightAveraging: read by then, it would come too late to take the schedule away.
        averaging = (
            None if self.lightning_module is None else unsharded_optimizer.averager(self.lightning_module.trainer)
        )
        return isinstance(averaging, WeightAveraging)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Build the model of Megalight's modules on the meta device: it is split first, and filled later."""
        # A plain module keeps its values. One that was set up before is on its device, and nothing is built here.
        module = self.lightning_module
        meta = isinstance(module, MegalightModule) and self._setup_of is None
        with torch.device("meta") if meta else nullcontext():
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Turn the one-device model into this rank's part of a parallel one; see :mod:`megalight.strategies.setup`."""
        assert self.accelerator is not None and self.lightning_module is not None
        module = self.lightning_module
        self.accelerator.setup(trainer)
        validation.check_callbacks(trainer)  # again, because the module may have added some
        fitting = trainer.state.fn == TrainerFn.FITTING
        new = self._setup_of is None
        if new:
            # The engine of an earlier module holds that one's parameters.
            self.engine = None
            self.check_module(module, self.mesh)
            model = setup.build(self, module, self._resumed is not None)
            before_backward = partial(_lightning.fire, trainer, "on_before_backward")
            saved = None if self._resumed is None else self._resumed.micro_batches(self)
            device = self.root_device
            self.micro_batches = micro_batches.of_strategy(self.micro_batch_size, device, self.mesh, saved)
            self._stepper = self.make_stepper(module, model, before_backward)
            setup.prepare(self, module, self._stepper.step)
            self._setup_of = module
        else:
            setup.return_metrics(module, self.root_device)
        assert self._stepper is not None and self.parallel_model is not None
        # in fit, the engine allocates the storage of the parameters and then fills in their values
        if fitting:
            self._fit_setup(trainer)
        else:
            self.parallel_model.fill()
        # After the engine has made its storage, so that values are read into it once.
        if new and self._resumed is not None:
            self.read_weights()
        # Transforms act on the values that the run begins with, also on those of a checkpoint. Masters follow.
        if new and self.parallel_model.transform_values() and self.engine is not None:
            self.engine.refresh_masters()
        self._stepper.begin(self.engine)
        if fitting and self.engine is not None and self._whole_between_steps:
            self.engine.gather_parameters()
        if isinstance(module, MegalightModule):  # what its layers keep for later passes must not be inference tensors
            for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
                loop.inference_mode = False

    def make_stepper(
        self, module: pl.LightningModule, model: ParallelModel, before_backward: Callable[[Tensor], None]
    ) -> Stepper:
        """Make what runs the steps of a module.

        Args:
            before_backward: called with each scalar before its backward.
        """
        assert self.micro_batches is not None
        return Stepper(module, model, self.precision, self.micro_batches, before_backward)

    def _fit_setup(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None and self.parallel_model is not None
        with validation.optimizer_of_stage(self.lightning_module, self.parallel_model):
            self.setup_optimizers(trainer)
        on_shards = not unsharded_optimizer.is_needed(self.lightning_module, self.optimizers)
        # The backward is part of `training_step`, so Lightning must not run it again.
        _lightning.skip_backward(trainer, on_shards)
        self._sigterm = _lightning.SigtermAgreement(
            trainer, self.any_rank, self.finish_saves, self.sigterm_every_n_steps
        )
        self._sigterm.install()
        _lightning.count_no_epochs(trainer, on=True)
        divided = partial(with_whole_model, model=self.parallel_model) if self.world_size > 1 else None
        _lightning.summarize(trainer, divided, shown_by)
        self.begin_saving(trainer)
        if not on_shards:
            unsharded_optimizer.check(self, self.lightning_module, self.optimizers)
            # No engine will bring the values, so the parameters get memory of their own.
            self.parallel_model.fill()
            self.engine = self.precision.clip_by_norm = self.precision.clip_by_value = None
            self._averages = unsharded_optimizer.BackwardAverages(self.lightning_module, self.mesh)
            return
        bar = trainer.progress_bar_callback
        self._foreign_bar = bar is not None and not bar.__module__.startswith("megalight.")
        if reads_weights_between_steps(self.lightning_module, trainer, sharded=True):
            self.precision.keep_weights()  # before the engine decides how it stores them
        self._make_engine()
        assert self.engine is not None
        sharded, module = self.engine.level.parameters, self.lightning_module
        self._whole_between_steps = reads_weights_between_steps(module, trainer, sharded)
        self._only_updates_write = not self._whole_between_steps
        # Only sharded weights are away there. On other levels they are whole between the backward and the update.
        self._whole_before_update = sharded and reads_weights_before_update(module, trainer)
        if self._whole_between_steps and self.engine.units is not None and sharded and self.is_global_zero:
            log.warning(
                "A hook of yours runs between steps and may read weights, so that every rank gathers the whole model "
                "there. If it reads none, set reads_weights = False on its callback or module, which saves %.1f GiB.",
                sum(tensor.nbytes for tensor in self.parallel_model.parameters()) / 2**30,
            )
        self._ended = False

    def _make_engine(self) -> None:
        assert self.lightning_module is not None and self.parallel_model is not None
        if self.data_parallel.check_for_nan and self.precision.loss_scale is not None:
            raise ConfigurationError(
                "data_parallel.check_for_nan=True with precision='16-mixed', where gradients overflow now and then and "
                "such steps are skipped; leave check_for_nan out, or use 'bf16-mixed'."
            )
        self.engine = setup.build_engine(self, self.optimizers[0])
        if isinstance(self.lightning_module, MegalightModule):
            # Only our modules keep to the rule that these hooks need: each module reads its own
            # parameters in its forward.
            self.engine.parameters.attach_gather_hooks(self.parallel_model.root)
        self.precision.clip_by_norm = partial(clip_by_norm, self.lightning_module, self.engine)
        self.precision.clip_by_value = partial(clip_by_value, self.engine)
        self.precision.unscale = partial(unscale, self.engine)

    def _follow_optimizer(self) -> None:
        """Follow what user code did between steps: it may have replaced memory, or added or unfrozen parameters."""
        assert self.engine is not None and self._stepper is not None
        if self._whole_between_steps:
            self.engine.reattach()
        sharding = sharding_of(self.optimizers[0])
        if sharding is None or not sharding.changed:
            return
        if kept := ", ".join(self.extra_shard_states):
            raise ConfigurationError(
                f"parameters were added to the optimizer after training began, and {kept} is kept for the earlier ones "
                "only. Let all parameters require gradients when training begins, and freeze some in on_train_start."
            )
        if self.engine.level.parameters:
            raise ConfigurationError(
                "parameters were added to the optimizer after training began, but this data_parallel.level shards them "
                "once. Use level='optim', or let all parameters require gradients when training begins, and freeze "
                "some in on_train_start."
            )
        # First end the sharding, then close the engine: the optimizer must not point at buffers that are gone.
        sharding.end()
        earlier = self.engine
        earlier.close()
        # What was trained before and is frozen now keeps its masters and state: it may be trained again.
        frozen = [info.parameter for info in earlier.infos if not info.parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        self._make_engine()
        for parameter in frozen:
            parameter.requires_grad_(False)
        # The new engine fills its masters from half-precision parameters. Those of the old one have more bits.
        earlier.give_masters(self.engine)
        self._stepper.begin(self.engine)

    def run_steps_by(self, runner: StepRunner) -> None:
        """Let ``runner`` run the passes of all following training steps of a ``MegalightModule``, until the next setup.

        Call it before training. The default is :func:`megalight.parallel.step.run_passes`.
        """
        assert self._stepper is not None
        if not self._stepper.micro_batches.found and runner is not run_passes:
            raise ConfigurationError(
                "micro_batch_size='auto' changes the number in the first steps, and CUDA graphs record one. Train a "
                "few steps without them, and give the number that the log tells."
            )
        self._stepper.step.runner = runner

    def train_schedule(self, micro_batches: int) -> Actions:
        """Return this rank's actions in a training step with ``micro_batches`` micro-batches."""
        assert self._stepper is not None
        return self._stepper.step.timetable("train", micro_batches).actions

    def model_to_device(self) -> None:
        """Do nothing: :meth:`setup` makes parameters on the device."""

    # ------------------------------------------------------------------ the step

    def training_step(self, *args: Any) -> Any:
        """Run forward and backward of all micro-batches and reduce gradients; return the detached global mean loss.

        The result is None if the user's own step skipped the batch.
        """
        assert self._stepper is not None
        self.check_saves()
        trainer = self._trainer
        window = int(trainer.accumulate_grad_batches)
        begins = trainer.fit_loop.batch_idx % window == 0
        if begins and self._sigterm is not None:
            self._sigterm.at_step()
        if self.engine is None:
            return self._stepper.by_user("training_step", args)
        # Lightning skips its own zero_grad with the backward.
        if begins:
            self._follow_optimizer()
            self._stepper.zero_hooks = partial(_lightning.zero_grad, trainer, self.optimizers[0])
            self._stepper.begin_window()
        # The user's hooks before this step could read whole weights. From here on units come and go.
        self.engine.release_parameters()
        sync = not self._accumulating
        scaling = self.precision.loss_scale
        # Gradients of a window add up, so each of its batches counts as a fraction.
        scale = (1.0 if scaling is None else scaling.scale) / window
        output, report = self._stepper.train(args, trainer.global_step, scale, sync)
        self.fence_saves()
        if report is None:
            return None
        self.report = report
        # Gathered before the hooks below, which may read weights.
        if self._whole_before_update or (self._whole_between_steps and not sync):
            self.engine.gather_parameters()
        _lightning.fire(trainer, "on_after_backward")
        if not defines_step(self._stepper.module, "training_step"):
            for name, value in {"loss": self.report.loss, **self.report.metrics}.items():
                shown = name == "loss" and self._foreign_bar
                _lightning.log(self._stepper.module, f"train_{name}", value, shown)
        return output

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run the closure (step, hooks, clipping), update this rank's shards, and start gathering the parameters."""
        if self.engine is None:
            # Lightning clips after the closure, so the closure must already average the gradients.
            averaging = unsharded_optimizer.averaging(optimizer, closure, self.mesh)
            output = super().optimizer_step(optimizer, averaging, model, **kwargs)
            self._equal_buffers()
            return output
        assert self.micro_batches is not None and self._stepper is not None
        stepper = self._stepper
        with self.micro_batches.update(optimizer, lambda: stepper.has_gradients):
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.engine.publish()
        self._equal_buffers()
        # the gather overlaps with the next forward, unless the user's code may read weights before it
        if self._whole_between_steps:
            self.engine.gather_parameters()
        return output

    def _equal_buffers(self) -> None:
        if self.broadcast_buffers and self.parallel_model is not None:
            self.parallel_model.broadcast_buffers()

    def on_validation_start(self) -> None:
        """Give all replicas the buffers of the first one: there may have been forwards since the last step."""
        self._equal_buffers()

    on_test_start = on_predict_start = on_validation_start

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Run before the backward of Lightning's own loop, for optimizers of whole parameters.

        Raises:
            ConfigurationError: optimization is on shards, and :meth:`training_step` runs the backward itself.
        """
        if self.engine is None and self._setup_of is not None:
            self._averages.begin()
            return
        raise ConfigurationError(
            "something called backward on MegatronStrategy, whose training_step has done it already; a callback that "
            "toggles Lightning's backward cannot be used with it."
        )

    def post_backward(self, closure_loss: Tensor) -> None:
        """Average gradients over the replicas after a backward of manual optimization, which may then clip them."""
        self._averages.end()

    def validation_step(self, *args: Any) -> Any:
        """Run forward only, and log ``val_loss``, which is the same on every rank."""
        return self._evaluation_step("val", "validation_step", args)

    def replay(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Run a validation batch forward again, and log nothing, for callbacks that measure activations.

        Returns:
            sum and count of its losses over all ranks.
        """
        assert self._stepper is not None
        return self._stepper.totals("val", batch)["loss"]

    def probe(self, batch: Any) -> None:
        """Run a validation batch forward and backward, and reduce nothing, for callbacks that watch gradients."""
        assert self._stepper is not None
        self._stepper.probe(batch)

    def test_step(self, *args: Any) -> Any:
        """Run forward only, and log ``test_loss``, which is the same on every rank."""
        return self._evaluation_step("test", "test_step", args)

    def predict_step(self, *args: Any) -> Any:
        """Run the module's ``predict_step`` or, if ``pp`` or ``cp`` > 1 or with frozen models, its ``output_step``."""
        assert self._stepper is not None
        self.sync_parameters()
        if self._stepper.stages is None and (self.mesh.pp * self.mesh.cp > 1 or self._stepper.step.frozen):
            return self._stepper.predict(args[0])
        return self._stepper.by_user("predict_step", args)

    def _evaluation_step(self, stage: str, method: str, args: tuple[Any, ...]) -> Any:
        assert self._stepper is not None
        # The last step's gather may still be in flight.
        self.sync_parameters()
        if defines_step(self._stepper.module, method):
            return self._stepper.by_user(method, args)
        return self._stepper.evaluate(stage, *args)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Mark steps that only accumulate gradients. Lightning enters this context around them."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # ------------------------------------------------------------------ data and the end

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let all ranks of a replica get the same augmentation, and replicas that communicate equally many batches."""
        return setup.process_loader(self, dataloader)

    def on_train_start(self) -> None:
        """Do what its callback does at the start of an epoch, in case the run resumes inside one."""
        _lightning.resume_accumulation(self._trainer)

    def on_train_end(self) -> None:
        """Wait for a save under way, and gather the weights in their own dtype, so that they can be read."""
        self.finish_saves()
        if self.engine is not None:
            self.engine.widen()  # it is closed in teardown: a learning-rate finder trains again with this engine
            self._ended = True

    def on_exception(self, exception: BaseException) -> None:
        """Note the failure: after it, nothing may wait for other ranks, which could hang."""
        super().on_exception(exception)
        if self._sigterm is not None:
            self._sigterm.tell(exception)
        # The engine of a failed fit stays open: its gradients and masters may be looked at, or saved.
        self._ended = False
        if self.world_size > 1:
            FAILED.set()
        elif self.engine is not None:
            # No other rank is needed to give weights that are quantized their own dtype again. A device that has
            # failed, or has no memory left, cannot: then they stay quantized.
            with suppress(RuntimeError):
                self.engine.widen()
        self.end_saving(failed=True)

    def teardown(self) -> None:
        """Release resources. Weights stay where they are, as views of flat buffers."""
        self.end_saving(failed=FAILED.is_set())  # first, while all ranks are still here
        if self._sigterm is not None:
            _lightning.count_no_epochs(self._sigterm.trainer, on=False)
            _lightning.summarize_as_before(self._sigterm.trainer)
            self._sigterm.uninstall()
            self._sigterm = None
        self._averages.close()
        self._resumed = None
        self.precision_plugin.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        assert self.accelerator is not None
        if self.engine is not None and self._ended:
            setup.close_engine(self, self.engine, self.optimizers[0])
        if not FAILED.is_set():  # it waits for the device, which may wait for a message of another rank
            self.accelerator.teardown()

    @classmethod
    def register_strategies(cls, registry: Any) -> None:
        """Register the names for ``Trainer(strategy=...)``."""
        registry.register("megatron", cls, "Megatron parallelism for any LightningModule", override=True)
        registry.register("megatron_notebook", cls, "the same, started by fork", override=True, start_method="fork")
