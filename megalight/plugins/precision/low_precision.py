"""Products in 8 or 4 bits under MegatronStrategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from megalight.errors import ConfigurationError, nearest
from megalight.ops.linear.low_precision import LOW_PRECISION, Session
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.precision import LowPrecisionOptions, apply_low_precision
from megalight.plugins.precision.megatron import MegatronPrecision


class MegatronLowPrecision(MegatronPrecision):
    """Linear layers multiply in 8 or 4 bits; all else is as in ``precision``.

    Weights, activations between layers, main gradients and optimizer state keep their types.

    Args:
        options: the recipe, and which layers take part.
        precision: of everything else; one of the strings of
            :class:`~megalight.plugins.precision.megatron.MegatronPrecision`.
        implementation: who casts and multiplies: ``own``, or one that a plugin registered: ``transformer_engine``, by
            that package's recipes.

    Raises:
        ConfigurationError: no such implementation.
    """

    def __init__(
        self,
        options: LowPrecisionOptions | None = None,
        precision: str = "bf16-mixed",
        implementation: str = "own",
    ) -> None:
        super().__init__(precision)
        if implementation not in LOW_PRECISION:
            known = list(LOW_PRECISION)
            raise ConfigurationError(
                f"implementation={implementation!r}; choose one of {', '.join(known)}." + nearest(implementation, known)
            )
        self.options = options or LowPrecisionOptions()
        self.kind = LOW_PRECISION[implementation]
        self.session: Session | None = None

    def prepare(self, model: nn.Module, mesh: ParallelMesh, num_layers: int | None) -> None:
        """Tell the linear layers.

        Raises:
            ConfigurationError: the module is a plain LightningModule, or its layers do not fit.
            BackendError: the device has no such products.
        """
        if self.plain:
            raise ConfigurationError(
                f"products in 8 bits need a MegalightModule, and {type(model).__name__} is a plain LightningModule; "
                "write build_model, forward_step and loss_step, or choose another precision."
            )
        self.session = apply_low_precision(model, self.options, mesh, num_layers, self.kind)

    def begin(self, number: int) -> None:
        """Stochastic rounding draws by the number of the step."""
        assert self.session is not None, "the strategy calls prepare in setup"
        self.session.begin(number)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around all micro-batches of one step: each weight is cast once inside."""
        assert self.session is not None
        with self.session.step():
            yield

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """As inside :meth:`step`; histories are put back, and the step that follows casts weights anew."""
        assert self.session is not None
        with self.session.rehearsal():
            yield

    @property
    def generators(self) -> list[torch.Generator]:
        """Those of stochastic rounding that were drawn from so far."""
        return [] if self.session is None else list(self.session.generators.values())
