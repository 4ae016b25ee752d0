"""Precision plugins for Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from megalight.errors import ConfigurationError, nearest
from megalight.ops.linear.low_precision import LOW_PRECISION, Session
from megalight.optim.adam import Adam
from megalight.optim.sharded import sharding_of
from megalight.parallel.model import ParallelModel
from megalight.parallel.precision import (
    LowPrecisionOptions as LowPrecisionOptions,
)
from megalight.parallel.precision import (
    apply_low_precision,
    check_low_precision,
    options_of_part,
    remove_low_precision,
)


@dataclass
class LossScale:
    """The factor on the loss. It grows after many finite steps, and shrinks after each step that overflowed.

    Attributes:
        scale: the current factor.
        growth_factor: factor on it after ``growth_interval`` finite steps in a row.
        backoff_factor: factor on it after a step with an infinite or NaN gradient.
        growth_interval: see above.
        finite_steps: finite steps since the last change.
    """

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    finite_steps: int = 0

    def update(self, finite: bool) -> None:
        """Note whether all gradients of a step were finite."""
        # Counted before the test, so that the interval counts this step.
        self.finite_steps += 1
        if not finite:
            # Shrink at once, grow slowly: an overflow costs a step, a small scale only some precision.
            self.scale, self.finite_steps = self.scale * self.backoff_factor, 0
        elif self.finite_steps == self.growth_interval:
            self.scale, self.finite_steps = self.scale * self.growth_factor, 0

    def state_dict(self) -> dict[str, float]:
        """Return all values, for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over the values of :meth:`state_dict`."""
        self.__dict__.update(state)


DTYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}


class MegatronPrecision(Precision):
    """The precision plugin of :class:`~megalight.strategies.MegatronStrategy`, in place of Lightning's own.

    Args:
        precision: one of the strings in the table above.

    Attributes:
        dtype: dtype of the weights of a ``MegalightModule``.
        plain: whether the module is a plain LightningModule. It then gets the same as from Lightning's own plugins:
            autocast in ``bf16-mixed``; in the ``-true`` precisions, inputs and the default dtype have the dtype of the
            weights. The strategy sets this and ``device_type``.
        clip_by_norm: clips by the global gradient norm. The strategy sets it. None: gradients are whole on each rank.
        loss_scale: the factor on the loss. None: 1.
        unscale: divides gradients by the factor, and returns whether all ranks' are finite. The strategy sets it.
        clip_by_value: clips each element. The strategy sets it. None: as above.
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in DTYPES:
            raise ConfigurationError(
                f"precision={precision!r} is not supported by MegatronStrategy; choose one of {', '.join(DTYPES)}."
            )
        self.precision = precision  # type: ignore[assignment]
        self.dtype = DTYPES[precision]
        # float16 alone: small gradients would underflow. bf16 has the exponents of float32.
        self.loss_scale = LossScale() if precision == "16-mixed" else None
        self.unscale: Callable[[float], bool] | None = None
        self.plain = False
        self.device_type = "cpu"
        self.clip_by_norm: Callable[[float], None] | None = None
        self.clip_by_value: Callable[[float], None] | None = None

    @classmethod
    def of(cls, plugin: Precision | None) -> Precision:
        """Convert Lightning's plugin for a precision string to ours. Plugins of this class are returned unchanged."""
        # Lightning's default plugin stands for "nothing was asked".
        if plugin is None or type(plugin) is Precision:
            return cls("32-true")
        if isinstance(plugin, MegatronPrecision):
            return plugin
        if type(plugin) in (MixedPrecision, HalfPrecision, DoublePrecision):
            return cls(str(plugin.precision))
        raise ConfigurationError(
            f"the precision plugin {type(plugin).__name__} does not work under MegatronStrategy; "
            f"use Trainer(precision=...) with one of {', '.join(DTYPES)}."
        )

    @property
    def autocasts(self) -> bool:
        """Whether the user's code runs under autocast with float32 weights."""
        return self.plain and self.precision in ("bf16-mixed", "16-mixed")

    def convert_input(self, data: Any) -> Any:
        """Convert a batch. That of a ``MegalightModule`` is unchanged: its loss masks must stay float32."""
        # Labels and masks of a plain module follow Lightning's own plugins: all floats are cast.
        if not self.plain or self.autocasts or self.dtype == torch.float32:
            return data
        return apply_to_collection(data, Tensor, lambda x: x.to(self.dtype) if x.is_floating_point() else x)

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Surround the user's code in one micro-batch."""
        if self.autocasts:
            # Around each micro-batch, not the step: autocast caches casts of weights until its end, and a cache that
            # outlives a micro-batch holds memory.
            with torch.autocast(self.device_type, dtype=self.dtype):
                yield
        elif self.plain:
            # The default dtype, as Lightning's own plugin does: tensors that the user makes in a step get it.
            before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(before)
        else:
            yield

    def check(self, root: nn.Module) -> None:
        """Check a model without values, split as one rank would, before there are processes."""

    def take(self, whole: nn.Module, part: str | None) -> None:
        """Prepare for a part of a model alone, because other ranks have the rest.

        Args:
            whole: the whole model, before it is divided or split.
            part: ``language``, ``vision``, or None: the whole.
        """

    def prepare(self, model: ParallelModel, seed: int = 0) -> None:
        """Prepare this rank's part of the model. Setup calls it when the parameters have their dtype and device.

        Args:
            seed: seed of the run, equal on all ranks.
        """
        # A model that was trained with another plugin before may still have products in 8 bits.
        remove_low_precision(model.root)

    def keep_weights(self) -> None:
        """Leave weights in their own dtype between steps unless someone asked to quantize them: hooks may read them."""

    def begin(self, number: int) -> None:
        """Begin training step ``number``: work on the host that must not be recorded in a CUDA graph."""

    @contextmanager
    def step(self, last: bool) -> Iterator[None]:
        """Surround all micro-batches of a training step. Weights do not change inside.

        Args:
            last: whether the optimizer's update follows; False: further batches of an accumulation window do.
        """
        yield

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Surround passes that run only to be recorded. They must leave no state behind."""
        yield

    @property
    def generators(self) -> list[torch.Generator]:
        """Random generators that a training step uses, besides torch's default ones."""
        return []

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Do nothing: contexts surround each micro-batch, not the whole step."""
        yield

    val_step_context = test_step_context = predict_step_context = train_step_context

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure (passes, hooks, clipping), then step. An optimizer on shards shows its own parameters before.

        Other optimizers get the closure, which they may call several times.
        """
        # Optimizers of the user's own step on whole parameters; Lightning's way is right for them.
        if sharding_of(optimizer) is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        # The closure first: gradients are complete, and reduced over ranks, only after it.
        result, finite = closure(), True
        scaled = self.loss_scale is not None and result is not None  # a skipped batch has no gradients
        if scaled:
            assert self.loss_scale is not None and self.unscale is not None
            # All ranks get the same answer. If one skipped the step alone, weights would drift apart.
            finite = self.unscale(self.loss_scale.scale)
            self.loss_scale.update(finite)
        self._after_closure(model, optimizer)
        if finite:
            # The closure has run: the optimizer gets its result, and the passes do not run again.
            results = [result]

            def once() -> Any:
                if not results:
                    name = type(optimizer).__name__
                    raise ConfigurationError(
                        f"{name} runs its closure again in a step, where its masters are shards of weights; take "
                        "elementwise = True from the class, so that it updates whole weights."
                    )
                return results.pop()

            return optimizer.step(closure=once, **kwargs)
        if isinstance(optimizer, Adam):
            optimizer.grad_scale = None  # clipping was for gradients that are not used
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale, if there is one."""
        return {} if self.loss_scale is None else self.loss_scale.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loss scale."""
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state_dict)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm over all ranks. Each element counts once."""
        if self.clip_by_norm is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self.clip_by_norm(float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip each gradient element."""
        if self.clip_by_value is None:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            self.clip_by_value(float(clip_val))


class MegatronLowPrecision(MegatronPrecision):
    """Precision plugin: linear layers multiply in 8 or 4 bits, and ``precision`` applies to everything else.

    Weights, activations between layers, main gradients and optimizer state keep their dtypes.

    Args:
        options: the recipe, and the layers that use it.
        precision: precision of everything else; one of the strings of
            :class:`~megalight.plugins.precision.MegatronPrecision`.
        implementation: implementation of casts and products: ``own``, or one that a plugin registered, such as
            ``transformer_engine`` with the recipes of that package.

    Raises:
        ConfigurationError: there is no such implementation.

    Attributes:
        here: the options of the part of the model that this rank has; None: its layers keep their dtype.
    """

    def __init__(
        self,
        options: LowPrecisionOptions | None = None,
        precision: str = "bf16-mixed",
        implementation: str = "own",
    ) -> None:
        super().__init__(precision)
        # Asked at construction, so that a misspelled name raises before processes start.
        if implementation not in LOW_PRECISION:
            known = list(LOW_PRECISION)
            raise ConfigurationError(
                f"implementation={implementation!r}; choose one of {', '.join(known)}." + nearest(implementation, known)
            )
        self.options = options or LowPrecisionOptions()
        self.here: LowPrecisionOptions | None = self.options
        self.kind = LOW_PRECISION[implementation]
        self.session: Session | None = None

    def check(self, root: nn.Module) -> None:
        """Check that the layers of the model fit.

        Raises:
            ConfigurationError: they do not.
        """
        if self.here is not None:
            check_low_precision(root, self.here, self.kind)

    def take(self, whole: nn.Module, part: str | None) -> None:
        """Keep only what the options say about a part of the model.

        Raises:
            ConfigurationError: a pattern matches nothing in any part.
        """
        self.here = self.options if part is None else options_of_part(whole, self.options, part)

    def prepare(self, model: ParallelModel, seed: int = 0) -> None:
        """Set up the linear layers for low precision.

        Raises:
            ConfigurationError: the module is a plain LightningModule, or its layers do not fit.
            BackendError: the device does not support these products.
        """
        if self.plain:
            raise ConfigurationError(
                f"products in 8 bits need a MegalightModule, and {type(model.root).__name__} is a plain "
                "LightningModule; write build_model, forward_step and loss_step, or choose another precision."
            )
        if self.here is None:
            super().prepare(model, seed)
            self.session = Session(seed)
            return
        # After the model was split, as scales belong to this rank's weights.
        self.session = apply_low_precision(
            model.root,
            self.here,
            model.mesh,
            model.num_layers,
            self.kind,
            model.specs,
            seed,
            None if model.grafted is None else model.grafted.mesh,
        )

    def keep_weights(self) -> None:
        """Leave weights in their own dtype between steps unless someone asked to quantize them: hooks may read them."""
        assert self.session is not None, "the strategy calls prepare in setup"
        for layer in self.session.layers:
            layer.primary = layer.primary or False

    def begin(self, number: int) -> None:
        """Begin training step ``number``, which seeds stochastic rounding."""
        assert self.session is not None, "the strategy calls prepare in setup"
        self.session.begin(number)

    @contextmanager
    def step(self, last: bool) -> Iterator[None]:
        """Surround all micro-batches of one step. Inside, each weight is cast once.

        Args:
            last: whether the optimizer's update follows. Histories of scales count updates.
        """
        assert self.session is not None
        with self.session.step(last=last):
            yield

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Do as :meth:`step`, but restore histories of scales at the end. The next step casts weights again."""
        assert self.session is not None
        with self.session.rehearsal():
            yield

    @property
    def generators(self) -> list[torch.Generator]:
        """Random generators that stochastic rounding has used so far."""
        return [] if self.session is None else list(self.session.generators.values())
