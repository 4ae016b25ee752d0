"""A callback that chooses backends for ops that no model setting covers."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl

from megalight.ops import use_backends


class UseBackends(pl.Callback):
    """Makes ``auto`` mean the given backends during a run. Afterwards ``auto`` has its usual meaning again.

    Args:
        names: op -> backend, as ``megalight doctor --all`` lists them: ``{"weight_gradient": "transformer_engine"}``.

    Raises:
        ConfigurationError: there is no such op (in ``setup``).
        BackendError: the op has no such backend (in ``setup``), or the backend cannot serve (at its first use).
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set the backends, before the model is built."""
        # Before the model is built, because modules choose their backend as they are made,
        # or at their first call.
        use_backends(**self.names)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore ``auto`` after the run."""
        use_backends(**dict.fromkeys(self.names, "auto"))
