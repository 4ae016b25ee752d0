"""Metrics of each step, and a progress bar that shows finished steps, so that training never waits for it."""

from __future__ import annotations

import datetime
import re
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from megalight.callbacks.meter import StepMeter, Window, current_loss, last_step, rates
from megalight.errors import ConfigurationError
from megalight.nn.moe import Router
from megalight.strategies.checkpoints.hooks import FolderCheckpoints
from megalight.strategies.mesh_strategy import MeshStrategy


class OptimizerMonitor(pl.Callback):
    """Logs ``lr`` and ``grad_norm`` every ``log_every_n_steps`` steps, to every logger.

    With clipping by norm, ``MegatronStrategy`` computes and logs ``grad_norm`` in every step. Without clipping it costs
    one pass over the gradients in each step that is logged. It is not logged under strategies that shard gradients in
    their own way, nor with 16-bit precision, whose gradients are scaled.

    Lightning leaves out the last step of a run if its number is no multiple. It is logged when training ends: these
    values, and others whose names begin with ``train_``.

    Nothing waits for the device before that.

    Logs:
        lr: learning rate of the first parameter group.
        grad_norm: norm of the whole gradient before clipping, over all ranks.
    """

    reads_weights = False

    def __init__(self) -> None:
        self._last: tuple[int, float | None] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget the last step of an earlier run."""
        self._last = None

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Log the values of the step that comes, under its number."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        rate = learning_rate(trainer)
        # The step that comes has the next number, under which Lightning logs.
        if not every or (trainer.global_step + 1) % every:
            # A schedule changes the rate after the step.
            self._last = None if not every else (trainer.global_step, None if isinstance(rate, Tensor) else rate)
            return
        self._last = None
        if isinstance(rate, Tensor):  # on the device, for optimizers that are recorded
            pl_module.log("lr", rate.detach().clone(), on_step=True, on_epoch=False, batch_size=1)
        elif rate is not None:  # ``log`` would copy it to the device, and wait
            for logger in trainer.loggers:
                logger.log_metrics({"lr": rate}, step=trainer.global_step)
        norm = gradient_norm(trainer, pl_module)
        if norm is not None:
            pl_module.log("grad_norm", norm, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the last step, unless Lightning has."""
        if self._last is None:
            return
        (step, rate), found = self._last, trainer.callback_metrics
        values = {name: float(value) for name, value in found.items() if name.startswith("train_")}
        if isinstance(trainer.strategy, MeshStrategy) and "grad_norm" in found and trainer.gradient_clip_val:
            values["grad_norm"] = float(found["grad_norm"])  # of every step, while others are of the last logged one
        if rate is not None:
            values["lr"] = rate
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)


def learning_rate(trainer: pl.Trainer) -> float | Tensor | None:
    """Return the learning rate of the first group of the first optimizer."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rate: float | Tensor | None = groups[0].get("lr") if groups else None
    return rate


def gradient_norm(trainer: pl.Trainer, module: pl.LightningModule) -> Tensor | None:
    """Return the norm of the gradient before clipping. None: the strategy logs it, or it is not known here."""
    strategy = trainer.strategy
    if isinstance(strategy, MeshStrategy):
        logged = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
        return None if logged or strategy.engine is None else strategy.engine.grad_norm()
    # Gradients of 16-bit precision are still scaled here.
    known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not str(trainer.precision).startswith("16")
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients) if known and gradients else None


class ExpertLoads(pl.Callback):
    """Logs the loads of the experts and the losses of the router of each layer, every ``log_every_n_steps`` steps.

    Values are those of the whole step, over all ranks. The host does not wait for the device. ``megalight plot`` draws
    them.

    Args:
        each: also log the load of each expert.

    Logs:
        experts_<layer>/max_load: choices of the busiest expert, divided by the mean.
        experts_<layer>/min_load: choices of the least busy expert, divided by the mean.
        experts_<layer>/drop_rate: share of the choices that exceeded the capacity.
        experts_<layer>/<loss>: a loss of the router without its coefficient, such as ``aux_loss`` (1 for balanced
            experts).
        experts_<layer>/load_<expert>: choices of one expert, divided by the mean (``each=True``).

    Raises:
        ConfigurationError: the model has no experts.
    """

    def __init__(self, each: bool = False) -> None:
        self.each = each
        self._routers: dict[str, Router] = {}
        self._names: dict[str, list[str]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the routers count, and learn the layers of other pipeline stages."""
        self._routers = {_label(name): m for name, m in pl_module.named_modules() if isinstance(m, Router)}
        for router in self._routers.values():
            # Routers count only where somebody reads the counts.
            router.observed = True
        own = {label: self._columns(router) for label, router in self._routers.items()}
        found = [own]
        # Each stage has routers of its own layers, and all of them log equal names.
        if (group := _stages(trainer)) is not None:
            found *= group.size()
            dist.all_gather_object(found, own, group=group)
        self._names = {label: names for stage in found for label, names in stage.items()}
        if not self._names:
            raise ConfigurationError(
                f"ExpertLoads: {type(pl_module).__name__} has no router of megalight.nn.moe. Give its configuration "
                "experts (moe), or remove the callback."
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the last step."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or trainer.global_step % every or not trainer.global_step:
            return
        rows = {label: self._row(router) for label, router in self._routers.items() if router.loads is not None}
        device = pl_module.device
        # Zeros for layers of other stages, so that the sum over stages is each layer's own row.
        # Made on the device: a copy of host memory would have the host wait for the step.
        empty = {n: torch.zeros(len(names), dtype=torch.float64, device=device) for n, names in self._names.items()}
        values = torch.cat([rows.get(label, zeros) for label, zeros in empty.items()])
        if (group := _stages(trainer)) is not None:
            dist.all_reduce(values, group=group)  # each layer is on one stage
        names = [f"experts_{label}/{name}" for label, columns in self._names.items() for name in columns]
        # Tensors on the device: Lightning reads them when a logger asks.
        pl_module.log_dict(dict(zip(names, values, strict=True)), batch_size=1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the routers count no longer than they need."""
        for router in self._routers.values():
            router.observed = False

    def _columns(self, router: Router) -> list[str]:
        loads = [f"load_{expert}" for expert in range(len(router.weight))] if self.each else []
        return ["max_load", "min_load", "drop_rate", *router.balance.names, *loads]

    def _row(self, router: Router) -> Tensor:
        loads, dropped = router.loads, router.dropped
        assert loads is not None
        assert dropped is not None
        # 1 is the mean load, whatever the number of tokens.
        relative = loads / loads.mean()
        first = [relative.max(), relative.min(), dropped.sum() / loads.sum(), *router.losses.values()]
        return torch.cat([torch.stack(first), relative]) if self.each else torch.stack(first)


def _label(name: str) -> str:
    """Return the number of the layer that holds a router, or else the router's name."""
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return match[1] if match else name


def _stages(trainer: pl.Trainer) -> dist.ProcessGroup | None:
    """Return the group of the pipeline's stages; None: there is one stage."""
    mesh = getattr(trainer.strategy, "mesh", None)
    return None if mesh is None else mesh.group("pp")


BAR = "{l_bar}{bar:12}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
"""The bar in terminals: of fixed width, so that the values have room. They include speed and time left."""


class StepProgress(TQDMProgressBar):
    """Shows loss, learning rate, gradient norm, speed, memory and the time that is left.

    It is a bar in terminals and notebooks, and plain lines elsewhere. While a checkpoint is written beside training, it
    names it, and says for how long.

    Values are copied from the device asynchronously and shown when they have arrived. Lightning's own bar reads its
    metrics with ``.item()``, which makes the host wait for the device at every refresh.

    Args:
        interval_s: seconds between refreshes of the bar.
        show: logged metrics to show beside the loss, when they exist.
        plain: whether to print a line every ``log_every_n_steps`` steps instead of a bar. None: yes if the output is
            neither a terminal nor a notebook.

    Raises:
        ConfigurationError: ``interval_s`` is negative.
    """

    def __init__(
        self, interval_s: float = 0.5, show: tuple[str, ...] = ("val_loss",), plain: bool | None = None
    ) -> None:
        # Every step: how often the bar is drawn is decided here, by time.
        super().__init__(refresh_rate=1)
        if interval_s < 0:
            raise ConfigurationError(f"interval_s is {interval_s}; it must be at least 0 seconds.")
        self.interval_s = interval_s
        self.show = tuple(show)
        self._notebook = "ipykernel" in sys.modules
        self.plain = plain if plain is not None else not (self._notebook or sys.stdout.isatty())
        self._meter: StepMeter | None = None
        self._window: Window | None = None
        self._marked = 0.0
        self._marked_step = 0
        self._rate: Tensor | float | None = None

    def init_train_tqdm(self) -> Tqdm:
        """Make the bar of training."""
        bar = super().init_train_tqdm()
        if not self._notebook:  # there the bar is a widget beside the text
            bar.bar_format = BAR
        return bar

    def on_train_start(self, *args: Any) -> None:
        """Start measuring."""
        super().on_train_start(*args)
        trainer: pl.Trainer = args[0]
        self._window = None
        self._marked_step = trainer.global_step
        # Other ranks have no bar, and no reason to copy values.
        self._meter = StepMeter(trainer.strategy.root_device) if self._enabled else None
        if self._meter is not None:
            self._meter.start(trainer.global_step, trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the learning rate of this step: at its end, the schedule has advanced already."""
        rate = learning_rate(trainer)
        # A copy: the optimizer's tensor changes in place.
        self._rate = rate.detach().clone() if isinstance(rate, Tensor) else rate

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Request the values of this step, and show the latest that have arrived."""
        if self._meter is None:
            return
        self._meter.add(trainer, batch)
        if self._due(trainer):
            # The time of the request, not of the arrival: otherwise a slow device would be asked more often.
            self._marked, self._marked_step = time.monotonic(), trainer.global_step
            self._meter.close(trainer.global_step, self._values(trainer, outputs))
        # What has arrived belongs to an earlier step, and is shown as such.
        if (window := self._meter.poll()) is not None:
            self._window = window
            self._tell(trainer, pl_module, batch_idx)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock: validation is not training time."""
        super().on_validation_start(trainer, pl_module)
        if self._meter is not None:
            self._meter.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the metrics of validation and restart the clock."""
        # Not the parent's method, which reads all metrics, and waits for the device.
        self.val_progress_bar.close()
        self.reset_dataloader_idx_tracker()
        if self._meter is not None:
            self._meter.resume()
        found = {name: trainer.callback_metrics[name] for name in self.show if name in trainer.callback_metrics}
        if self.plain and self._meter is not None and found:
            print(
                f"step {trainer.global_step}  {'  '.join(f'{k} {float(v):.4f}' for k, v in found.items())}", flush=True
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the last step."""
        if self._meter is not None:
            # The end of an epoch waits anyway, so the last values may.
            while (window := self._meter.poll(wait=True)) is not None:
                self._window = window
                self._tell(trainer, pl_module, trainer.fit_loop.batch_idx)

    def on_train_end(self, *args: Any) -> None:
        """Close the bar and stop measuring."""
        super().on_train_end(*args)
        self._stop()

    def on_exception(self, *args: Any) -> None:
        """Stop measuring."""
        self._stop()

    def _stop(self) -> None:
        if self._meter is not None:
            self._meter.stop()
            self._meter = None

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the values that the bar shows, as text with units."""
        return {} if self._window is None else dict(figures(self._window, trainer, pl_module))

    @property
    def is_disabled(self) -> bool:
        """Whether tqdm's bars are hidden: on all ranks except one, and if plain lines are printed."""
        return self.plain or super().is_disabled

    def _due(self, trainer: pl.Trainer) -> bool:
        if self.plain:
            assert self._meter is not None
            return self._meter.due(trainer, max(int(trainer.log_every_n_steps), 1))  # type: ignore[attr-defined]
        step = trainer.global_step
        # The last step in any case, since its values stay on the screen.
        in_time = time.monotonic() - self._marked >= self.interval_s or step == last_step(trainer)
        # Not twice for the same step, which accumulates several batches.
        return step > self._marked_step and in_time

    def _values(self, trainer: pl.Trainer, outputs: Any) -> dict[str, Tensor | float]:
        loss = current_loss(trainer, outputs)
        values: dict[str, Tensor | float] = {} if loss is None else {"loss": loss}
        if self._rate is not None:
            values["lr"] = self._rate
        logged = trainer.callback_metrics
        values |= {name: logged[name] for name in ("grad_norm", *self.show) if name in logged}
        return values

    def _tell(self, trainer: pl.Trainer, module: pl.LightningModule, batch_idx: int) -> None:
        assert self._window is not None
        if self.plain:
            total = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
            texts = "  ".join(f"{name} {text}" for name, text in figures(self._window, trainer, module).items())
            print(f"step {self._window.step}{total}  {texts}", flush=True)
            return
        bar: Tqdm = self.train_progress_bar
        # By batches, as the bar's length counts them.
        bar.n = batch_idx + 1
        bar.set_postfix(self.get_metrics(trainer, module))


def figures(window: Window, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, str]:
    """Return the values of a window as short texts with units, and the time that is left at this speed.

    Those that most users look for come first: a terminal cuts the line off at its width.
    """
    texts = {name: ("{:.3g}" if name == "lr" else "{:.4f}").format(value) for name, value in window.values.items()}
    units = {
        "tokens_per_s": ("tok/s", "{:,.0f}"),
        "mfu_percent": ("MFU", "{:.1f}%"),
        "data_wait_percent": ("data wait", "{:.0f}%"),
        "memory_gib": ("GiB", "{:.2f}"),
        "step_time_s": ("s/step", "{:.3g}"),
        "tflop_per_s_per_device": ("TFLOP/s/dev", "{:.3g}"),
    }
    strategy = trainer.strategy
    saving = strategy.save_under_way if isinstance(strategy, FolderCheckpoints) else None
    if saving is not None:
        texts["saving"] = f"{saving.path.name} {time.time() - saving.begun:.0f} s"
    speeds = rates(window, trainer, module)
    steps = last_step(trainer)
    if steps is not None and "step_time_s" in speeds:
        left = max(0, steps - window.step) * speeds["step_time_s"]
        texts["left"] = str(datetime.timedelta(seconds=round(left)))
    return texts | {short: form.format(speeds[name]) for name, (short, form) in units.items() if name in speeds}
