"""Matrix products in 8 or 4 bits with MegatronStrategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from megalight.errors import ConfigurationError, nearest
from megalight.ops.linear.low_precision import LOW_PRECISION, Session
from megalight.parallel.model import ParallelModel
from megalight.parallel.precision import (
    LowPrecisionOptions,
    apply_low_precision,
    check_low_precision,
    options_of_part,
)
from megalight.plugins.precision.megatron import MegatronPrecision


class MegatronLowPrecision(MegatronPrecision):
    """Precision plugin: linear layers multiply in 8 or 4 bits, and ``precision`` applies to everything else.

    Weights, activations between layers, main gradients and optimizer state keep their dtypes.

    Args:
        options: the recipe, and the layers that use it.
        precision: precision of everything else; one of the strings of
            :class:`~megalight.plugins.precision.megatron.MegatronPrecision`.
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
